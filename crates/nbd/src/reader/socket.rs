//! Addresses of NBD servers, and connections to them.

use std::fmt;
use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// At a unix socket.
    Unix(PathBuf),
    /// At `HOST:PORT`.
    Tcp(String),
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "{}", path.display()),
            Self::Tcp(address) => f.write_str(address),
        }
    }
}

/// A connection to a server.
#[derive(Debug)]
pub enum Socket {
    /// On this host.
    Unix(UnixStream),
    /// On any host.
    Tcp(TcpStream),
}

impl Socket {
    pub(crate) fn connect(endpoint: &Endpoint, patience: Duration) -> io::Result<Self> {
        let address = match endpoint {
            Endpoint::Unix(path) => return UnixStream::connect(path).map(Self::Unix),
            Endpoint::Tcp(address) => address,
        };
        let mut last = io::Error::other("the name has no address");
        for address in address.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, patience) {
                Ok(socket) => {
                    // Requests are small and must be sent at once.
                    socket.set_nodelay(true)?;
                    return Ok(Self::Tcp(socket));
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    pub(crate) fn set_patience(&self, patience: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Unix(socket) => {
                socket.set_read_timeout(patience)?;
                socket.set_write_timeout(patience)
            }
            Self::Tcp(socket) => {
                socket.set_read_timeout(patience)?;
                socket.set_write_timeout(patience)
            }
        }
    }

    pub(crate) fn shut_down(&self) {
        // A failure means that the connection is closed already.
        let _ = match self {
            Self::Unix(socket) => socket.shutdown(Shutdown::Both),
            Self::Tcp(socket) => socket.shutdown(Shutdown::Both),
        };
    }
}

impl Read for &Socket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Unix(socket) => (&mut &*socket).read(buffer),
            Socket::Tcp(socket) => (&mut &*socket).read(buffer),
        }
    }
}

impl Write for &Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Socket::Unix(socket) => (&mut &*socket).write_vectored(slices),
            Socket::Tcp(socket) => (&mut &*socket).write_vectored(slices),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
