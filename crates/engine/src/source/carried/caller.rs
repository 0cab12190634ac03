//! Who connected to a door: a QEMU, by its main connection and its multifd channels, or
//! the client of a disk.
//!
//! A QEMU that loses a multifd channel just as it waits for another one's SYNC may wait
//! for ever (10.0 does), and can't migrate its VM any more. So a QEMU that isn't served
//! loses its main connection only, by which its migration fails; its channels are read
//! until it has closed them itself.

use std::mem;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use stream::multifd::{INIT_BYTES, MAGIC};

/// How long a QEMU has, whose main connection is closed, to close the others.
pub(super) const CLOSING_MAX: Duration = Duration::from_secs(10);
/// A QEMU says at once what a connection is.
const FIRST_WORD_MAX: Duration = Duration::from_secs(1);

/// Connections of one who called. Dropped, they are given up in the right order.
#[derive(Debug, Default)]
pub struct Caller {
    /// None once somebody else has them.
    main: Option<UnixStream>,
    pub(super) channels: Vec<Channel>,
}

/// A multifd channel of which the first message was read.
#[derive(Debug)]
pub(super) struct Channel {
    pub(super) id: u8,
    pub(super) uuid: [u8; 16],
    pub(super) first: [u8; INIT_BYTES],
    pub(super) socket: UnixStream,
}

impl Caller {
    /// Of the connection that came first.
    #[must_use]
    pub fn new(main: UnixStream) -> Self {
        Self { main: Some(main), channels: Vec::new() }
    }

    /// The connection that came first.
    ///
    /// # Panics
    /// If they were taken over.
    pub(super) fn main(&self) -> &UnixStream {
        self.main.as_ref().expect("nobody has taken them over")
    }

    /// The main connection, to be forwarded as it is.
    ///
    /// # Panics
    /// If they were taken over.
    #[must_use]
    pub fn into_connection(self) -> UnixStream {
        self.take_over().0
    }

    /// Leaves them to somebody else.
    ///
    /// # Panics
    /// If they were taken over.
    pub(super) fn take_over(mut self) -> (UnixStream, Vec<Channel>) {
        let main = self.main.take().expect("nobody has taken them over");
        (main, mem::take(&mut self.channels))
    }

    /// Whether what came first is a multifd channel, whose main connection has gone.
    pub(super) fn is_stray(&self) -> bool {
        is_channel(self.main())
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        let Some(main) = self.main.take() else { return };
        let channels = mem::take(&mut self.channels);
        let give_up = move || {
            let mut channels: Vec<_> = channels.into_iter().map(|one| one.socket).collect();
            if is_channel(&main) {
                channels.push(main);
            } else {
                tap::abort(&main);
            }
            drain(channels);
        };
        // With no thread to be had they are closed, all at once.
        let _ = data_threads::spawn("carry-refuse", give_up);
    }
}

/// Whether a connection begins as a multifd channel does.
fn is_channel(socket: &UnixStream) -> bool {
    let end = Instant::now() + FIRST_WORD_MAX;
    let mut magic = [0; 4];
    let mut seen = 0;
    while wait_readable(&[socket], end) {
        match recv(socket, &mut magic[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((count, _)) if count == magic.len() => return magic == MAGIC.to_be_bytes(),
            // The rest of four bytes comes at once, or never.
            Ok((count, _)) if count > seen => seen = count,
            Err(Errno::AGAIN | Errno::INTR) => {}
            _ => return false,
        }
    }
    false
}

/// Reads connections until their QEMU has closed them, and throws away what comes.
fn drain(mut sockets: Vec<UnixStream>) {
    let end = Instant::now() + CLOSING_MAX;
    let mut buffer = vec![0; 64 << 10];
    while !sockets.is_empty() && wait_readable(&sockets.iter().collect::<Vec<_>>(), end) {
        sockets.retain(|socket| {
            let read = recv(socket, &mut buffer[..], RecvFlags::DONTWAIT);
            matches!(read, Ok((1.., _)) | Err(Errno::AGAIN | Errno::INTR))
        });
    }
}

/// Waits until one of them has something, or its end; `false` if none has until `end`.
fn wait_readable(sockets: &[&UnixStream], end: Instant) -> bool {
    let mut polled: Vec<_> =
        sockets.iter().map(|socket| PollFd::new(socket, PollFlags::IN)).collect();
    loop {
        let left = Timespec::try_from(end.saturating_duration_since(Instant::now()));
        match poll(&mut polled, left.ok().as_ref()) {
            Err(Errno::INTR) => {}
            ready => return ready.is_ok_and(|count| count > 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::OwnedFd;

    use super::*;

    const QEVM: &[u8] = b"QEVM";

    /// The end of one who connects, and the one that is taken.
    fn connection() -> (TcpStream, UnixStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let caller = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (caller, UnixStream::from(OwnedFd::from(listener.accept().unwrap().0)))
    }

    /// Writes until it isn't taken any more, which must be an error and no wait.
    fn write_until_refused(mut caller: &TcpStream) -> ErrorKind {
        loop {
            if let Err(error) = caller.write_all(&[0; 4096]) {
                return error.kind();
            }
        }
    }

    #[test]
    fn the_main_connection_is_closed_and_its_channels_are_read_on() {
        let (mut main, taken) = connection();
        let (mut channel, taken_channel) = connection();
        main.write_all(QEVM).unwrap();
        let mut caller = Caller::new(taken);
        let first = [0; INIT_BYTES];
        caller.channels.push(Channel { id: 0, uuid: [0; 16], first, socket: taken_channel });
        drop(caller);
        assert_eq!(write_until_refused(&main), ErrorKind::ConnectionReset);
        // More than both ends' buffers hold.
        for _ in 0..1024 {
            channel.write_all(&[0; 64 << 10]).unwrap();
        }
        channel.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(channel.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_channel_that_comes_alone_is_read_on() {
        let (mut channel, taken) = connection();
        let caller = Caller::new(taken);
        channel.write_all(&MAGIC.to_be_bytes()).unwrap();
        assert!(caller.is_stray());
        drop(caller);
        for _ in 0..1024 {
            channel.write_all(&[0; 64 << 10]).unwrap();
        }
    }

    /// One whose window is full learns it as well, though somebody keeps the socket.
    #[test]
    fn one_that_waits_until_more_is_read_learns_at_once() {
        let (mut main, taken) = connection();
        main.write_all(QEVM).unwrap();
        main.set_nonblocking(true).unwrap();
        while main.write(&[0; 4096]).is_ok() {}
        main.set_nonblocking(false).unwrap();
        let kept = taken.try_clone().unwrap();
        drop(Caller::new(taken));
        let _ = write_until_refused(&main);
        drop(kept);
    }
}
