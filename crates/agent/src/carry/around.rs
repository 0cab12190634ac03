//! Relays a connection that is not carried to its original target.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::thread;

/// Relays both directions until both have ended, or one has failed.
pub(super) fn pass(one: &UnixStream, other: &UnixStream) -> io::Result<()> {
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
}
