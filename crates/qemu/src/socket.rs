//! Connecting to QEMU's sockets.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

/// Connects to a socket. QEMU lets two clients wait for a monitor and accepts one at a time:
/// while it accepts none, a connection would wait without end for a place.
///
/// # Errors
/// If nobody listens there, or, as [`io::ErrorKind::TimedOut`], there is no place for
/// `limit`.
pub fn connect(path: &Path, limit: Duration) -> io::Result<UnixStream> {
    let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // The limit of a connect, too.
    set_socket_timeout(&stream, Timeout::Send, Some(limit))?;
    let address = SocketAddrUnix::new(path)?;
    loop {
        match rustix::net::connect(&stream, &address) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
            connected => break connected?,
        }
    }
    set_socket_timeout(&stream, Timeout::Send, None)?;
    Ok(UnixStream::from(stream))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_waited_for_no_longer_than_that() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let limit = Duration::from_millis(20);
        let error = connect(&path, limit).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        let busy = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        let busy = busy.unwrap();
        rustix::net::bind(&busy, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&busy, 1).unwrap();
        let _waiting = [(); 2].map(|()| connect(&path, limit).unwrap());
        let error = connect(&path, limit).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
