//! The caller at a listener: a QEMU, with its main connection and its multifd channels, or
//! the client of a disk.
//!
//! A QEMU that loses a multifd channel just as it waits for another one's SYNC may wait
//! for ever (10.0 does), and can't migrate its VM any more. So a QEMU that isn't served
//! loses only its main connection, which fails its migration; its channels are read
//! until it closes them itself.

use std::io;
use std::mem;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use stream::multifd::{INIT_BYTES, MAGIC};
use tap::{Taken, TakenChannel};

/// Time for a QEMU whose main connection is closed to close the others.
pub(super) const CLOSING_MAX: Duration = Duration::from_secs(10);
/// Time for the source's QEMU to close its connections once it has received SHUT.
pub(super) const CLOSED_MAX: Duration = Duration::from_secs(30);
/// Time for the first bytes of a connection, which QEMU sends at once.
const FIRST_WORD_MAX: Duration = Duration::from_secs(1);

/// Connections of one caller. Dropping them closes them in the right order.
#[derive(Debug, Default)]
pub struct Caller {
    /// None once taken over.
    main: Option<UnixStream>,
    /// Bytes already read from it.
    pub(super) before: Vec<u8>,
    pub(super) channels: Vec<Channel>,
}

/// A multifd channel whose first message was read.
#[derive(Debug)]
pub(super) struct Channel {
    pub(super) id: u8,
    pub(super) uuid: [u8; 16],
    pub(super) first: [u8; INIT_BYTES],
    /// Bytes read after it.
    pub(super) after: Vec<u8>,
    pub(super) socket: UnixStream,
}

impl Channel {
    /// The channel for the tap.
    pub(super) fn into_taken(self) -> TakenChannel {
        TakenChannel { id: self.id, socket: self.socket, before: self.after }
    }
}

impl Caller {
    /// Starts with the connection that came first.
    #[must_use]
    pub fn new(main: UnixStream) -> Self {
        Self { main: Some(main), before: Vec::new(), channels: Vec::new() }
    }

    /// A channel of a migration that is not split after all, as a connection of its own.
    pub(super) fn of_channel(Channel { first, after, socket, .. }: Channel) -> Self {
        let before = [&first[..], &after[..]].concat();
        Self { main: Some(socket), before, channels: Vec::new() }
    }

    /// Whether nothing was read from it, so that it can be passed on elsewhere.
    #[must_use]
    pub fn is_unread(&self) -> bool {
        self.before.is_empty()
    }

    /// Another handle to the connection that came first.
    ///
    /// # Errors
    /// If the system has no descriptor for it.
    ///
    /// # Panics
    /// If the connections were taken over.
    pub fn try_clone_connection(&self) -> io::Result<UnixStream> {
        self.main().try_clone()
    }

    /// The connection that came first.
    ///
    /// # Panics
    /// If the connections were taken over.
    pub(super) fn main(&self) -> &UnixStream {
        self.main.as_ref().expect("its connections are not taken over yet")
    }

    /// The main connection, to be forwarded unchanged.
    ///
    /// # Panics
    /// If the connections were taken over.
    #[must_use]
    pub fn into_connection(self) -> UnixStream {
        self.take_over().0
    }

    /// Hands all connections over.
    ///
    /// # Panics
    /// If the connections were taken over.
    pub(super) fn take_over(mut self) -> (UnixStream, Vec<Channel>) {
        let main = self.main.take().expect("its connections are not taken over yet");
        (main, mem::take(&mut self.channels))
    }

    /// Whether the first connection is a multifd channel: its main connection came earlier,
    /// or went elsewhere. Waits a moment for the first bytes.
    #[must_use]
    pub fn is_stray(&self) -> bool {
        is_channel(self.main(), &self.before)
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        let Some(main) = self.main.take() else { return };
        let (before, channels) = (mem::take(&mut self.before), mem::take(&mut self.channels));
        refuse(main, before, channels.into_iter().map(|one| one.socket).collect());
    }
}

/// Closes connections that the tap could not take, in the right order.
pub(super) fn refuse_taken(Taken { main, before, channels }: Taken) {
    refuse(main, before, channels.into_iter().map(|one| one.socket).collect());
}

fn refuse(main: UnixStream, before: Vec<u8>, mut channels: Vec<UnixStream>) {
    let give_up = move || {
        if is_channel(&main, &before) {
            channels.push(main);
        } else {
            tap::abort(&main);
        }
        drain(channels.iter().collect());
    };
    // If no thread can be started, all are closed at once.
    let _ = data_threads::spawn("carry-refuse", give_up);
}

/// Whether a connection, from which `before` was read, starts as a multifd channel does.
fn is_channel(socket: &UnixStream, before: &[u8]) -> bool {
    if !before.is_empty() {
        return before.starts_with(&MAGIC.to_be_bytes());
    }
    let end = Instant::now() + FIRST_WORD_MAX;
    let mut magic = [0; 4];
    let mut seen = 0;
    while wait_readable(&[socket], end) {
        match recv(socket, &mut magic[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((count, _)) if count == magic.len() => return magic == MAGIC.to_be_bytes(),
            // The rest of the four bytes comes at once, or never.
            Ok((count, _)) if count > seen => seen = count,
            Err(Errno::AGAIN | Errno::INTR) => {}
            _ => return false,
        }
    }
    false
}

/// Reads channels until QEMU has closed them, for [`CLOSING_MAX`] at most, and discards the data.
pub(super) fn drain(mut sockets: Vec<&UnixStream>) {
    let end = Instant::now() + CLOSING_MAX;
    let mut buffer = vec![0; 64 << 10];
    while !sockets.is_empty() && wait_readable(&sockets, end) {
        sockets.retain(|socket| {
            let read = recv(socket, &mut buffer[..], RecvFlags::DONTWAIT);
            matches!(read, Ok((1.., _)) | Err(Errno::AGAIN | Errno::INTR))
        });
    }
}

/// Waits until one of them has data or has ended; `false` if none has by `end`.
pub(super) fn wait_readable(sockets: &[&UnixStream], end: Instant) -> bool {
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

    /// The connecting end, and the accepted one.
    fn connection() -> (TcpStream, UnixStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let caller = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (caller, UnixStream::from(OwnedFd::from(listener.accept().unwrap().0)))
    }

    /// Writes until it fails, which must be an error and not a wait.
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
        let (first, after) = ([0; INIT_BYTES], Vec::new());
        caller.channels.push(Channel { id: 0, uuid: [0; 16], first, after, socket: taken_channel });
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
    fn channels_that_the_tap_could_not_take_are_read_on() {
        let (main, taken) = connection();
        let (mut channel, socket) = connection();
        let channels = vec![TakenChannel { id: 0, socket, before: Vec::new() }];
        refuse_taken(Taken { main: taken, before: QEVM.to_vec(), channels });
        assert_eq!(write_until_refused(&main), ErrorKind::ConnectionReset);
        for _ in 0..1024 {
            channel.write_all(&[0; 64 << 10]).unwrap();
        }
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

    #[test]
    fn a_channel_that_was_read_before_is_read_on() {
        let (mut channel, socket) = connection();
        let mut first = [0; INIT_BYTES];
        first[..4].copy_from_slice(&MAGIC.to_be_bytes());
        let of = Channel { id: 0, uuid: [0; 16], first, after: vec![7; 9], socket };
        let caller = Caller::of_channel(of);
        assert!(caller.is_stray() && !caller.is_unread());
        assert_eq!(caller.before.len(), INIT_BYTES + 9);
        drop(caller);
        for _ in 0..1024 {
            channel.write_all(&[0; 64 << 10]).unwrap();
        }
    }

    /// A peer whose window is full is notified, too, even while another process keeps
    /// the socket.
    #[test]
    fn a_blocked_writer_is_notified_at_once() {
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
