//! Connects to a socket that another program has made, which may not accept connections.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

/// Connects to a socket. If the listener's backlog is full, as that of QEMU's monitor is with two
/// connections, this waits for room no longer than `limit`.
///
/// # Errors
/// If nothing listens there, or, as [`io::ErrorKind::TimedOut`], if the backlog stays full.
pub fn connect(path: impl AsRef<Path>, limit: Duration) -> io::Result<UnixStream> {
    let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // The send timeout also limits a connect.
    set_socket_timeout(&stream, Timeout::Send, Some(limit))?;
    let address = SocketAddrUnix::new(path.as_ref())?;
    loop {
        match rustix::net::connect(&stream, &address) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                let why = "the program that listens there does not accept";
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            connected => break connected?,
        }
    }
    set_socket_timeout(&stream, Timeout::Send, None)?;
    Ok(UnixStream::from(stream))
}

/// As [`connect`], to a socket file that is open: its name may be another socket's by now, or a
/// link.
///
/// # Errors
/// As [`connect`].
pub fn connect_opened(socket: impl AsFd, limit: Duration) -> io::Result<UnixStream> {
    connect(format!("/proc/self/fd/{}", socket.as_fd().as_raw_fd()), limit)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    use rustix::fs::{Mode, OFlags};
    use rustix::net::{bind, listen};

    use super::*;

    #[test]
    fn an_open_socket_file_is_connected_to() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let file = rustix::fs::open(&path, OFlags::PATH, Mode::empty()).unwrap();
        let mut stream = connect_opened(file, Duration::from_secs(5)).unwrap();
        stream.write_all(b"here").unwrap();
        let mut read = [0; 4];
        listener.accept().unwrap().0.read_exact(&mut read).unwrap();
        assert_eq!(&read, b"here");
    }

    #[test]
    fn a_full_backlog_is_waited_for_no_longer_than_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let limit = Duration::from_millis(20);
        assert_eq!(connect(&path, limit).unwrap_err().kind(), io::ErrorKind::NotFound);
        let flags = SocketFlags::CLOEXEC;
        let busy = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        bind(&busy, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&busy, 1).unwrap();
        let _waiting = [(); 2].map(|()| connect(&path, limit).unwrap());
        let error = connect(&path, limit).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
    }
}
