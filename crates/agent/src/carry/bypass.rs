//! Relays a connection that is not carried to its original target.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use crate::shares::{Share, Shares};

/// Connections that are relayed at a time, and those of one listener, where a VM may have broken
/// out of its QEMU. Each has two threads; a migration has one for each of its channels.
const CONNECTIONS_MAX: usize = 256;
const CONNECTIONS_OF_ONE_MAX: usize = 64;

/// The connections that are relayed so.
pub(super) struct Bypasses {
    shares: Arc<Shares>,
    number: Mutex<usize>,
    changed: Condvar,
}

impl Default for Bypasses {
    fn default() -> Self {
        let shares = Shares::new(CONNECTIONS_MAX, CONNECTIONS_OF_ONE_MAX);
        Self { shares, number: Mutex::default(), changed: Condvar::new() }
    }
}

impl Bypasses {
    /// Admits a connection to this listener, until the share is dropped; none if there are too
    /// many.
    pub(super) fn admit(&self, listener: &str) -> Option<Share> {
        self.shares.take(listener)
    }

    /// Relays both directions until both have ended, or one has failed.
    pub(super) fn pass(&self, one: &UnixStream, other: &UnixStream) -> io::Result<()> {
        *self.number.lock() += 1;
        let passed = pass(one, other);
        *self.number.lock() -= 1;
        self.changed.notify_all();
        passed
    }

    /// How many there are.
    pub(super) fn number(&self) -> usize {
        *self.number.lock()
    }

    /// Waits until there is none, at most until `until`. Returns how many are left.
    pub(super) fn wait_none(&self, until: Instant) -> usize {
        let mut number = self.number.lock();
        while *number > 0 && !self.changed.wait_until(&mut number, until).timed_out() {}
        *number
    }
}

fn pass(one: &UnixStream, other: &UnixStream) -> io::Result<()> {
    thread::scope(|scope| {
        let back = thread::Builder::new()
            .name("carry-bypass".to_owned())
            .spawn_scoped(scope, || copy(other, one))?;
        let there = copy(one, other);
        there.and(back.join().unwrap_or_else(|fault| std::panic::resume_unwind(fault)))
    })
}

fn copy(mut from: &UnixStream, mut to: &UnixStream) -> io::Result<()> {
    let copied = io::copy(&mut from, &mut to).map(drop);
    // Once one direction has failed, the other is of no use.
    let how = if copied.is_ok() { Shutdown::Write } else { Shutdown::Both };
    for socket in [to].into_iter().chain(copied.is_err().then_some(from)) {
        // The socket may be closed already.
        let _ = socket.shutdown(how);
    }
    copied
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::time::Duration;

    use super::*;

    #[test]
    fn both_ways_are_passed_on_to_their_ends() {
        let (mut qemu, taken) = UnixStream::pair().unwrap();
        let (original, mut handler) = UnixStream::pair().unwrap();
        let passing = thread::spawn(move || pass(&taken, &original));
        qemu.write_all(b"there").unwrap();
        qemu.shutdown(Shutdown::Write).unwrap();
        let mut received = String::new();
        handler.read_to_string(&mut received).unwrap();
        assert_eq!(received, "there");
        handler.write_all(b"back").unwrap();
        drop(handler);
        let mut received = String::new();
        qemu.read_to_string(&mut received).unwrap();
        assert_eq!(received, "back");
        passing.join().unwrap().unwrap();
    }

    #[test]
    fn no_listener_has_all_shares() {
        let bypasses = Bypasses::default();
        let of_one = std::iter::from_fn(|| bypasses.admit("a")).take(CONNECTIONS_MAX + 1);
        let mut shares: Vec<Share> = of_one.collect();
        assert_eq!(shares.len(), CONNECTIONS_OF_ONE_MAX);
        let others = (0..CONNECTIONS_MAX).filter_map(|nth| bypasses.admit(&format!("b{nth}")));
        shares.extend(others);
        assert_eq!(shares.len(), CONNECTIONS_MAX);
        drop(shares);
        assert!(bypasses.admit("a").is_some());
    }

    #[test]
    fn those_that_are_passed_on_are_waited_for() {
        let bypasses = Arc::<Bypasses>::default();
        let left = || bypasses.wait_none(Instant::now() + Duration::from_millis(1));
        assert_eq!(left(), 0);
        let (mut qemu, taken) = UnixStream::pair().unwrap();
        let (original, mut handler) = UnixStream::pair().unwrap();
        let passing = thread::spawn({
            let bypasses = Arc::clone(&bypasses);
            move || bypasses.pass(&taken, &original)
        });
        qemu.write_all(b"there").unwrap();
        handler.read_exact(&mut [0; 5]).unwrap();
        assert_eq!((bypasses.number(), left()), (1, 1));
        drop((qemu, handler));
        assert_eq!(bypasses.wait_none(Instant::now() + Duration::from_secs(60)), 0);
        // Both have closed, whichever is seen first.
        let _ = passing.join().unwrap();
    }
}
