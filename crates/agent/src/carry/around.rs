//! Relays a connection that is not carried to its original target.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

/// The connections that are relayed so.
#[derive(Default)]
pub(super) struct Around {
    number: Mutex<usize>,
    changed: Condvar,
}

impl Around {
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
            .name("carry-around".to_owned())
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
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn both_ways_are_passed_on_to_their_ends() {
        let (mut qemu, taken) = UnixStream::pair().unwrap();
        let (way, mut handler) = UnixStream::pair().unwrap();
        let passing = thread::spawn(move || pass(&taken, &way));
        qemu.write_all(b"there").unwrap();
        qemu.shutdown(Shutdown::Write).unwrap();
        let mut heard = String::new();
        handler.read_to_string(&mut heard).unwrap();
        assert_eq!(heard, "there");
        handler.write_all(b"back").unwrap();
        drop(handler);
        let mut heard = String::new();
        qemu.read_to_string(&mut heard).unwrap();
        assert_eq!(heard, "back");
        passing.join().unwrap().unwrap();
    }

    #[test]
    fn those_that_are_passed_on_are_waited_for() {
        let around = Arc::<Around>::default();
        let left = || around.wait_none(Instant::now() + Duration::from_millis(1));
        assert_eq!(left(), 0);
        let (mut qemu, taken) = UnixStream::pair().unwrap();
        let (way, mut handler) = UnixStream::pair().unwrap();
        let passing = thread::spawn({
            let around = Arc::clone(&around);
            move || around.pass(&taken, &way)
        });
        qemu.write_all(b"there").unwrap();
        handler.read_exact(&mut [0; 5]).unwrap();
        assert_eq!((around.number(), left()), (1, 1));
        drop((qemu, handler));
        assert_eq!(around.wait_none(Instant::now() + Duration::from_secs(60)), 0);
        // Both have closed, whichever is seen first.
        let _ = passing.join().unwrap();
    }
}
