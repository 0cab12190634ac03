//! Connecting to a socket that another user's program may have made.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

/// Connects to a socket by its open file: its name may be another's by now, or a link.
/// Whoever listens there and does not accept is waited for no longer than `limit`.
///
/// # Errors
/// If nothing listens there, or accepts.
pub fn connect(socket: impl AsFd, limit: Duration) -> io::Result<UnixStream> {
    let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // The limit of a connect, too.
    set_socket_timeout(&stream, Timeout::Send, Some(limit))?;
    let address = SocketAddrUnix::new(format!("/proc/self/fd/{}", socket.as_fd().as_raw_fd()))?;
    loop {
        match rustix::net::connect(&stream, &address) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                let why = "whoever listens there does not accept";
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            connected => break connected?,
        }
    }
    set_socket_timeout(&stream, Timeout::Send, None)?;
    Ok(UnixStream::from(stream))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    use rustix::net::{bind, listen};

    use super::*;
    use crate::Directory;

    #[test]
    fn whoever_accepts_is_connected_to() {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("vm.sock")).unwrap();
        let file = Directory::open(dir.path()).unwrap().unwrap().socket("vm.sock").unwrap();
        let mut stream = connect(file.unwrap(), Duration::from_secs(5)).unwrap();
        stream.write_all(b"here").unwrap();
        let mut read = [0; 4];
        listener.accept().unwrap().0.read_exact(&mut read).unwrap();
        assert_eq!(&read, b"here");
    }

    #[test]
    fn whoever_does_not_is_waited_for_a_while() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.sock");
        let flags = SocketFlags::CLOEXEC;
        let full = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        bind(&full, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&full, 0).unwrap();
        let file = || Directory::open(dir.path()).unwrap().unwrap().socket("vm.sock").unwrap();
        let _first = connect(file().unwrap(), Duration::from_secs(5)).unwrap();
        let error = connect(file().unwrap(), Duration::from_millis(10)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
    }
}
