//! `xl migrate`.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use lab_guest::random::Random;
use xen::handshake::{Answer, PERMISSION};
use xen::{PageWord, libxc, write};

use super::life::AWAY;
use super::memory::Memory;
use super::stream::{after_pages, beginning};
use super::{Domain, State, Store};

/// Passes while the domain runs.
const PASSES: u64 = 5;
/// Pages that the domain writes during each.
const WRITES: u32 = 64;
/// How long xl waits for its transport's end.
const EXIT_MAX: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(5);
/// Pages in a record: fewer than xl has, so that a small domain has many records.
const RECORD_PAGES: usize = 300;

/// The process that carries the stream, started as xl starts it.
struct Transport {
    child: Child,
    input: Option<ChildStdin>,
    output: Option<ChildStdout>,
}

impl Transport {
    fn start(rune: &str) -> io::Result<Self> {
        let mut command = Command::new("sh");
        command.args(["-c", rune]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        Ok(Self { child, input, output })
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.input.as_mut().map_or(Ok(()), |input| input.write_all(bytes))
    }

    fn read(&mut self, count: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; count];
        self.output.as_mut().map_or(Ok(()), |output| output.read_exact(&mut bytes))?;
        Ok(bytes)
    }

    fn expect(&mut self, text: &[u8]) -> io::Result<()> {
        let read = self.read(text.len())?;
        if read == text {
            return Ok(());
        }
        let read = String::from_utf8_lossy(&read).into_owned();
        Err(io::Error::other(format!("Message contents unexpected: {read:?}")))
    }

    /// Closes both pipes, and waits a while until the process has exited.
    fn close(mut self) -> io::Result<()> {
        drop((self.input.take(), self.output.take()));
        let until = Instant::now() + EXIT_MAX;
        while Instant::now() < until {
            if let Some(status) = self.child.try_wait()? {
                eprintln!("migration child: {status}");
                return Ok(());
            }
            thread::sleep(PAUSE);
        }
        eprintln!("migration child not exiting, no longer waiting");
        Ok(())
    }
}

fn text(answer: Answer) -> Vec<u8> {
    let mut out = Vec::new();
    answer.write(&mut out);
    out
}

struct Sender<'s> {
    store: &'s Store,
    domain: Domain,
    memory: Memory,
    random: Random,
    /// Whether all pages are sent again, to be compared.
    verifies: bool,
}

/// Migrates a domain by this transport. Returns whether it runs there.
pub(super) fn migrate(
    store: &Store,
    domain: Domain,
    rune: &str,
    verifies: bool,
) -> io::Result<bool> {
    let memory = domain.memory()?;
    let random = Random::new(u64::from(memory.pages()), 1);
    let mut sender = Sender { store, domain, memory, random, verifies };
    let mut transport = Transport::start(rune)?;
    if let Err(error) = sender.send(&mut transport) {
        eprintln!("migration sender: {error}");
        transport.close()?;
        eprintln!("Migration failed, resuming at sender.");
        sender.resume()?;
        return Ok(false);
    }
    match sender.hand_over(&mut transport) {
        Ok(0) => {
            eprintln!("migration sender: Target reports successful startup.");
            // xl does not mind whether that fails. It exits with its pipes open.
            let _ = sender.domain.destroy();
            eprintln!("Migration successful.");
            return Ok(true);
        }
        Ok(status) => {
            eprintln!("migration sender: Target reports startup failure (status code {status}).");
            sender.take_back()?;
            eprintln!("Migration failed due to problems at target.");
        }
        Err(error) => {
            eprintln!("** Migration failed during final handshake **: {error}");
            transport.close()?;
        }
    }
    Ok(false)
}

impl Sender<'_> {
    /// Sends the domain, until the receiver has it.
    fn send(&mut self, transport: &mut Transport) -> io::Result<()> {
        transport.expect(&text(Answer::Banner))?;
        let kind = self.domain.kind()?;
        transport.write(&beginning(&self.domain.config()?, kind)?)?;
        let last = self.send_while_it_runs(transport)?;
        self.send_pages(transport, &last)?;
        if self.verifies {
            let mut verify = Vec::new();
            write::record(&mut verify, libxc::VERIFY, &[]);
            transport.write(&verify)?;
            self.send_pages(transport, &all(&self.memory))?;
        }
        transport.write(&after_pages(kind))?;
        transport.expect(&text(Answer::Ready))?;
        self.store.pass("offered")
    }

    /// Sends passes, during which the domain writes, and suspends it. Returns what is left.
    fn send_while_it_runs(&mut self, transport: &mut Transport) -> io::Result<Vec<u32>> {
        let mut dirty = all(&self.memory);
        for pass in 0..PASSES {
            self.send_pages(transport, &dirty)?;
            self.store.pass(&format!("pass-{pass}"))?;
            let mut written = BTreeSet::new();
            for _ in 0..WRITES {
                written.extend(self.memory.write(&mut self.random));
            }
            dirty = written.into_iter().collect();
        }
        self.domain.keep(&self.memory)?;
        self.domain.set(State::Suspended)?;
        self.store.pass("suspended")?;
        Ok(dirty)
    }

    fn send_pages(&self, transport: &mut Transport, pages: &[u32]) -> io::Result<()> {
        for pages in pages.chunks(RECORD_PAGES) {
            let words: Vec<PageWord> = pages.iter().map(|page| self.memory.word(*page)).collect();
            let mut out = Vec::new();
            write::page_data_head(&mut out, &words);
            for word in words.iter().filter(|word| word.kind.has_body()) {
                out.extend_from_slice(self.memory.page(word.page.0));
            }
            transport.write(&out)?;
        }
        Ok(())
    }

    /// Permits the receiver to unpause the domain. Returns the receiver's status.
    fn hand_over(&mut self, transport: &mut Transport) -> io::Result<u8> {
        let name = format!("{}{AWAY}", self.domain.name());
        self.domain.rename(&name)?;
        transport.write(PERMISSION)?;
        self.store.pass("permitted")?;
        let mut report = text(Answer::Report { status: 0 });
        report.pop();
        transport.expect(&report)?;
        let status = transport.read(1)?[0];
        if status != 0 {
            transport.expect(&text(Answer::HandedBack))?;
        }
        Ok(status)
    }

    /// Resumes a domain that the receiver has handed back.
    fn take_back(&mut self) -> io::Result<()> {
        let name = self.domain.name().trim_end_matches(AWAY).to_owned();
        self.domain.rename(&name)?;
        self.resume()
    }

    fn resume(&self) -> io::Result<()> {
        self.domain.keep(&self.memory)?;
        self.domain.set(State::Running)
    }
}

fn all(memory: &Memory) -> Vec<u32> {
    (0..memory.pages()).collect()
}
