//! A control connection: any thread may write, one reads.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crossbeam_channel::{Receiver, bounded};
use identity::{Closer, Connection, Writer};
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use wire::{Frame, WireError, read_frame, read_message};

use crate::error::LinkError;

/// What was received over a control connection.
#[derive(Debug)]
pub(crate) enum Received<M> {
    Message(M),
    Head(Vec<u8>),
    Tail(Vec<u8>),
    Whole(Vec<u8>),
    Back(Vec<u8>),
    /// The connection has ended; nothing follows.
    Disconnected(LinkError),
}

/// Frames that may wait for a destination's engine. Then the peer, which decides how large they
/// are, has to wait.
const RECEIVED_MAX: usize = 2;
/// The same for a source's engine, which may be busy with QEMU: urgent messages follow those that
/// are sent every second.
const RECEIVED_AT_ONCE_MAX: usize = 16;

/// Unacknowledged data this old ends the control connection of a carried migration. QEMU's own
/// connection would survive a network that is cut for a while, and in post-copy the VM stands still
/// if its connection breaks. So this is longer than lanes try to connect again.
pub(crate) const CARRIED_DEAD_AFTER: Duration = Duration::from_secs(30);

/// The writing half, and the handle that ends the connection.
#[derive(Debug)]
pub(crate) struct Link<Said> {
    writer: Mutex<Writer>,
    closer: Closer,
    bytes: AtomicU64,
    said: PhantomData<fn(Said)>,
}

impl<Said: Serialize> Link<Said> {
    /// Starts on a connection after its preamble; `name` is for its thread.
    pub(crate) fn start<M: DeserializeOwned + Send + 'static>(
        connection: Connection,
        name: &str,
    ) -> std::io::Result<(Self, Receiver<Received<M>>)> {
        Self::start_bounded(connection, name, RECEIVED_MAX, Some)
    }

    /// As [`Link::start`]. `at_once` sees each message on the reading thread, and returns those
    /// that it doesn't handle. It handles what can't wait while the receiver is busy with QEMU, so
    /// it must not block.
    pub(crate) fn start_with<M: DeserializeOwned + Send + 'static>(
        connection: Connection,
        name: &str,
        at_once: impl Fn(M) -> Option<M> + Send + 'static,
    ) -> std::io::Result<(Self, Receiver<Received<M>>)> {
        Self::start_bounded(connection, name, RECEIVED_AT_ONCE_MAX, at_once)
    }

    fn start_bounded<M: DeserializeOwned + Send + 'static>(
        connection: Connection,
        name: &str,
        received_max: usize,
        at_once: impl Fn(M) -> Option<M> + Send + 'static,
    ) -> std::io::Result<(Self, Receiver<Received<M>>)> {
        let closer = connection.closer();
        let (reader, writer) = connection.into_halves();
        let (received, inbox) = bounded(received_max);
        data_threads::spawn(format!("read-{name}"), move || {
            let mut reading = std::io::BufReader::new(reader);
            loop {
                let next = match read_one(&mut reading) {
                    Received::Message(message) => match at_once(message) {
                        Some(message) => Received::Message(message),
                        None => continue,
                    },
                    other => other,
                };
                let over = matches!(next, Received::Disconnected(_));
                // An error means that the receiver is dropped.
                if received.send(next).is_err() || over {
                    return;
                }
            }
        })?;
        let (writer, bytes) = (Mutex::new(writer), AtomicU64::new(0));
        Ok((Self { writer, closer, bytes, said: PhantomData }, inbox))
    }

    pub(crate) fn send(&self, message: &Said) -> Result<(), LinkError> {
        self.write(|out| Frame::message(message)?.write_to(out))
    }

    pub(crate) fn frame(&self, frame: &Frame) -> Result<(), LinkError> {
        self.write(|out| frame.write_to(out))
    }

    pub(crate) fn head(&self, head: Vec<u8>) -> Result<(), LinkError> {
        self.write(|out| Frame::Head(head).write_to(out))
    }

    pub(crate) fn non_ram(&self, whole: bool, bytes: &[u8]) -> Result<(), LinkError> {
        self.write(|out| Frame::write_non_ram(whole, bytes, out))
    }

    pub(crate) fn back(&self, bytes: &[u8]) -> Result<(), LinkError> {
        self.write(|out| Frame::write_back(bytes, out))
    }

    /// Tells the source that nothing more is sent back.
    pub(crate) fn back_ends(&self) -> Result<(), LinkError> {
        self.frame(&Frame::Back(Vec::new()))
    }

    fn write(
        &self,
        write: impl FnOnce(&mut Counting<'_>) -> Result<(), WireError>,
    ) -> Result<(), LinkError> {
        let mut out = Counting { writer: &mut self.writer.lock(), bytes: &self.bytes };
        Ok(write(&mut out)?)
    }

    /// Bytes written so far.
    pub(crate) fn wire_bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Sets how long the peer may acknowledge nothing until the connection is broken.
    pub(crate) fn set_dead_after(&self, limit: Duration) -> std::io::Result<()> {
        self.closer.set_dead_after(limit)
    }

    /// Ends the connection if a thread is still writing after `patience`: the peer reads slowly or
    /// not at all, and joining that thread would mean waiting for the peer.
    pub(crate) fn cut_if_stuck(&self, patience: Duration) {
        if self.writer.try_lock_for(patience).is_none() {
            self.closer.close();
        }
    }

    /// Ends both directions, which ends the reading thread.
    pub(crate) fn close(&self) {
        match self.writer.try_lock() {
            Some(mut writer) => writer.close(),
            // Another thread is writing to a peer that doesn't read.
            None => self.closer.close(),
        }
    }
}

impl<Said> Drop for Link<Said> {
    fn drop(&mut self) {
        self.writer.get_mut().close();
    }
}

fn read_one<M: DeserializeOwned>(reading: &mut impl std::io::Read) -> Received<M> {
    match read_frame(reading) {
        Ok(Some(Frame::Message(json))) => match read_message(&json) {
            Ok(message) => Received::Message(message),
            Err(error) => Received::Disconnected(error.into()),
        },
        Ok(Some(Frame::Head(bytes))) => Received::Head(bytes),
        Ok(Some(Frame::Tail(bytes))) => Received::Tail(bytes),
        Ok(Some(Frame::Whole(bytes))) => Received::Whole(bytes),
        Ok(Some(Frame::Back(bytes))) => Received::Back(bytes),
        Ok(None) => Received::Disconnected(LinkError::Closed),
        Err(error) => Received::Disconnected(error.into()),
    }
}

struct Counting<'l> {
    writer: &'l mut Writer,
    bytes: &'l AtomicU64,
}

impl std::io::Write for Counting<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let written = self.writer.write(bytes)?;
        self.bytes.fetch_add(written as u64, Relaxed);
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::thread;

    use wire::{ToDestination, ToSource};

    use super::*;

    #[test]
    fn a_peer_that_sends_more_than_is_read_waits() {
        const SENT: usize = 50;
        for waits_max in [RECEIVED_MAX, RECEIVED_AT_ONCE_MAX] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let connection = Connection::plain(listener.accept().unwrap().0);
            let (_link, inbox): (Link<ToSource>, Receiver<Received<ToDestination>>) =
                match waits_max {
                    RECEIVED_MAX => Link::start(connection, "peer"),
                    _ => Link::start_with(connection, "peer", Some),
                }
                .unwrap();
            for _ in 0..SENT {
                Frame::write_non_ram(false, &[1], &mut peer).unwrap();
            }
            while inbox.len() < waits_max {
                thread::yield_now();
            }
            for _ in 0..SENT {
                assert!(inbox.len() <= waits_max);
                assert!(matches!(inbox.recv().unwrap(), Received::Tail(bytes) if bytes == [1]));
            }
        }
    }
}
