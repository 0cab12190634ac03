//! A process of `xl migrate-receive`.

use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command};
use std::time::Duration;

use host::child::{KILLED_MAX, exits_within};

use super::{Xl, XlError};

/// A receiver. It is killed when this is dropped, if it has not exited: then its copy of the domain
/// may be left.
#[derive(Debug)]
pub struct Receiving {
    child: Child,
    /// What it reads.
    input: UnixStream,
    /// What it writes.
    output: UnixStream,
    has_exited: bool,
}

impl Receiving {
    pub(super) fn start(xl: &Xl) -> Result<Self, XlError> {
        // Sockets and not pipes: writes to them can time out, and be ended by another thread. ssh's
        // server has them too.
        let started = || -> io::Result<Self> {
            let (input, child_input) = UnixStream::pair()?;
            let (output, child_output) = UnixStream::pair()?;
            let child = Command::new(xl.program())
                .arg("migrate-receive")
                .current_dir("/")
                .stdin(OwnedFd::from(child_input))
                .stdout(OwnedFd::from(child_output))
                .spawn()?;
            Ok(Self { child, input, output, has_exited: false })
        };
        started().map_err(|source| xl.system(source))
    }

    /// What it reads.
    #[must_use]
    pub fn input(&self) -> &UnixStream {
        &self.input
    }

    /// What it writes.
    #[must_use]
    pub fn output(&self) -> &UnixStream {
        &self.output
    }

    /// Closes its input: it fails, unless it has all that it needs.
    pub fn close_input(&self) {
        // It may have exited.
        let _ = self.input.shutdown(Shutdown::Both);
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether it has exited, for which it has time until `limit`.
    pub fn wait(&mut self, limit: Duration) -> bool {
        if !self.has_exited {
            self.has_exited = exits_within(&mut self.child, limit);
        }
        self.has_exited
    }

    /// Ends it at once. Returns whether it has exited: one that waits in the kernel does so only
    /// when that lets it, and what it waits for may still be done.
    #[must_use = "one that has not exited may still change its copy"]
    pub fn kill(&mut self) -> bool {
        if !self.has_exited {
            // It fails if it has exited.
            let _ = self.child.kill();
        }
        self.wait(KILLED_MAX)
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        if !self.kill() {
            tracing::error!(pid = self.pid(), "xl's receiver can't be ended");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::super::tests::program;
    use super::*;

    #[test]
    fn a_receiver_exits_when_its_input_is_closed() {
        let dir = tempfile::tempdir().unwrap();
        let xl = program(dir.path(), "echo \"$1\"; cat > /dev/null; echo closed");
        let mut receiver = xl.receive().unwrap();
        assert!(!receiver.wait(Duration::from_millis(1)), "it reads");
        receiver.input().write_all(b"domain").unwrap();
        receiver.close_input();
        let mut text = String::new();
        receiver.output().read_to_string(&mut text).unwrap();
        assert_eq!(text, "migrate-receive\nclosed\n");
        assert!(receiver.wait(Duration::from_secs(60)));
        assert!(receiver.kill(), "it has exited");
    }

    #[test]
    fn a_receiver_that_reads_nothing_is_killed() {
        let dir = tempfile::tempdir().unwrap();
        let xl = program(dir.path(), "exec sleep 600");
        let mut receiver = xl.receive().unwrap();
        receiver.close_input();
        assert!(!receiver.wait(Duration::from_millis(1)));
        assert!(receiver.kill());
    }
}
