//! The helper, or a liar in its place.

use std::fs;
use std::io::{self, BufRead, BufReader, Error, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

const HELPER: &str = "/droveway-guest";
const SELF: &str = "/proc/self/exe";

/// The process at the helper's port.
#[derive(Default)]
pub(crate) struct Helper(Mutex<Option<Running>>);

struct Running {
    process: Child,
    /// Pipes of a liar, which waits for a word.
    talk: Option<(ChildStdin, BufReader<ChildStdout>)>,
}

impl Helper {
    fn lock(&self) -> MutexGuard<'_, Option<Running>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the helper, after it has ended any process in its place.
    pub(crate) fn start(&self) -> io::Result<()> {
        self.end()?;
        // It ends with the guest.
        let process = Command::new(HELPER).spawn()?;
        *self.lock() = Some(Running { process, talk: None });
        Ok(())
    }

    /// Starts a liar in the helper's place, which tells that lie.
    pub(crate) fn lie(&self, lie: &str) -> io::Result<()> {
        self.end()?;
        let mut liar = Command::new(SELF);
        liar.args(["lie", lie]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = liar.spawn()?;
        let (Some(stdin), Some(stdout)) = (process.stdin.take(), process.stdout.take()) else {
            return Err(Error::other("no pipes"));
        };
        let running = Running { process, talk: Some((stdin, BufReader::new(stdout))) };
        *self.lock() = Some(running);
        self.hear("ready")
    }

    /// Waits until the liar says that word.
    pub(crate) fn hear(&self, word: &str) -> io::Result<()> {
        let mut running = self.lock();
        let talk = running.as_mut().and_then(|running| running.talk.as_mut());
        let (_, from) = talk.ok_or_else(|| Error::other("nobody lies"))?;
        loop {
            let mut line = String::new();
            match from.read_line(&mut line)? {
                0 => return Err(Error::other(format!("the liar ended before it was {word}"))),
                _ if line.trim() == word => return Ok(()),
                _ => {}
            }
        }
    }

    /// Lets the liar go on.
    pub(crate) fn go(&self) -> io::Result<()> {
        let mut running = self.lock();
        let talk = running.as_mut().and_then(|running| running.talk.as_mut());
        let (to, _) = talk.ok_or_else(|| Error::other("nobody lies"))?;
        to.write_all(b"go\n")
    }

    /// Ends the process: the helper by a kill, as the kernel does when memory is short; a liar
    /// after it has restored what it changed.
    pub(crate) fn end(&self) -> io::Result<()> {
        let Some(mut running) = self.lock().take() else { return Ok(()) };
        match running.talk.take() {
            Some(talk) => drop(talk),
            None => running.process.kill()?,
        }
        running.process.wait().map(drop)
    }

    /// Whether the helper surveys pages now: only then it has `kpageflags` open.
    pub(crate) fn works(&self) -> io::Result<bool> {
        let id = self.lock().as_ref().ok_or(io::ErrorKind::NotFound)?.process.id();
        let open = fs::read_dir(format!("/proc/{id}/fd"))?.map_while(Result::ok);
        let mut leads_to = open.map(|entry| fs::read_link(entry.path()).unwrap_or_default());
        Ok(leads_to.any(|path| path.ends_with("kpageflags")))
    }

    /// How often it was woken, as a line of its `/proc/PID/status`.
    pub(crate) fn woken(&self) -> io::Result<String> {
        let id = self.lock().as_ref().ok_or(io::ErrorKind::NotFound)?.process.id();
        let status = fs::read_to_string(format!("/proc/{id}/status"))?;
        let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches"));
        Ok(line.unwrap_or_default().to_owned())
    }
}
