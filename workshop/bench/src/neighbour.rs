//! A load next to a VM that moves, and its throughput: a server of web pages on the NIC that the
//! migration uses, threads that keep all CPUs busy, or a second VM.
//!
//! The first two are a process each, which reports every 50 ms how much it has done. A neighbour's
//! rate in the seconds before the migration is taken as its undisturbed rate.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use lab_guest::random::Random;

use super::second_vm::SecondVm;
use crate::{count, part};
use lab::error::{Result, SystemContext};
use lab::hosts::Hosts;
use lab::setup::Kit;

const PORT: u16 = 7813;
/// How often it reports how much it has done.
const TELL: Duration = Duration::from_millis(50);
/// Number of clients: more than needed as long as the server answers at once.
const CLIENTS: usize = 16;
/// A request that no client is free for is dropped after this time, as an impatient visitor would.
const PATIENCE: Duration = Duration::from_millis(100);
/// Sizes of answers, all equally frequent.
const ANSWER_BYTES: [u64; 4] = [16 << 10, 64 << 10, 256 << 10, 1 << 20];
/// Rounds of work that count as one.
const ROUNDS: u64 = 100_000;

/// A load next to a VM that moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Neighbour {
    /// A server on host a, with clients on host b.
    Web {
        /// Content that the clients request per second.
        bytes_per_s: u64,
    },
    /// Computes, with a thread for each CPU.
    Computing,
    /// A VM on host a whose memcached clients use.
    Vm,
}

/// A running neighbour. Dropping it ends it.
pub(super) enum Work {
    /// Processes.
    Processes(AtWork),
    /// A second VM.
    Vm(Box<SecondVm>),
}

impl Work {
    /// Its processes.
    pub(super) fn pids(&self) -> Vec<u32> {
        match self {
            Self::Processes(at_work) => at_work.pids(),
            Self::Vm(vm) => vec![vm.pid()],
        }
    }

    /// How much it did between two instants.
    pub(super) fn done(&self, from: Instant, to: Instant) -> f64 {
        match self {
            Self::Processes(at_work) => at_work.done(from, to),
            Self::Vm(vm) => vm.answered(from, to),
        }
    }

    /// Its rates from `before` to `from`, and from `from` to `to`.
    pub(super) fn fared(&self, before: Instant, from: Instant, to: Instant) -> Fared {
        let per_s = |from: Instant, to: Instant| {
            self.done(from, to) / to.saturating_duration_since(from).as_secs_f64().max(1e-3)
        };
        Fared { before_per_s: per_s(before, from), meanwhile_per_s: per_s(from, to) }
    }

    /// Checks its data, if it has any.
    pub(super) fn check(&self) -> Result<()> {
        match self {
            Self::Processes(_) => Ok(()),
            Self::Vm(vm) => vm.check(),
        }
    }
}

/// Throughput of a neighbour.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Fared {
    /// Work per second before the migration.
    pub(super) before_per_s: f64,
    /// Work per second while the VM moved.
    pub(super) meanwhile_per_s: f64,
}

impl Fared {
    /// The share of its throughput that it kept.
    pub(super) fn kept(self) -> f64 {
        if self.before_per_s > 0.0 { self.meanwhile_per_s / self.before_per_s } else { 0.0 }
    }
}

/// What a process reports in place of a count if it has read something wrong.
pub(super) const WRONG: &str = "wrong";

/// Running processes that report how much they have done. Dropping it ends them.
pub(super) struct AtWork {
    children: Vec<Child>,
    done: Arc<Mutex<Vec<(Instant, u64)>>>,
    wrong: Arc<AtomicU64>,
    listening: Option<JoinHandle<()>>,
}

impl Neighbour {
    /// Starts the neighbour.
    pub(super) fn start(self, kit: &Kit, hosts: &Hosts) -> Result<Work> {
        let own = std::env::current_exe().doing("find the lab's own program")?;
        let mut children = Vec::new();
        let start = |mut command: Command, arguments: &[&str]| {
            command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped());
            command.spawn().doing("start a neighbour")
        };
        let mut told = match self {
            Self::Web { bytes_per_s } => {
                children.push(part::start(&hosts.a, &["neighbour-server", &PORT.to_string()])?);
                let address = format!("{}:{PORT}", hosts.a.addresses[0]);
                let rate = bytes_per_s.to_string();
                start(hosts.b.command(&own), &["neighbour-clients", &address, &rate])?
            }
            // On no host, so that its CPU time does not count as the migration's.
            Self::Computing => start(Command::new(&own), &["neighbour-computing"])?,
            Self::Vm => return Ok(Work::Vm(Box::new(SecondVm::start(kit, hosts)?))),
        };
        let output = told.stdout.take();
        children.push(told);
        AtWork::hear(children, output).map(Work::Processes)
    }
}

impl AtWork {
    /// Listens to the last of these children, which reports on `output` how much it has done.
    pub(super) fn hear(children: Vec<Child>, output: Option<ChildStdout>) -> Result<Self> {
        let (done, wrong) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicU64::new(0)));
        let own = (Arc::clone(&done), Arc::clone(&wrong));
        let mut at_work = Self { children, done: own.0, wrong: own.1, listening: None };
        let listen = move || {
            let lines = output.map(|output| BufReader::new(output).lines());
            for line in lines.into_iter().flatten().map_while(io::Result::ok) {
                if line.trim() == WRONG {
                    wrong.fetch_add(1, Relaxed);
                } else if let Ok(count) = line.trim().parse() {
                    done.lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .push((Instant::now(), count));
                }
            }
        };
        let thread = thread::Builder::new().name("neighbour".to_owned()).spawn(listen);
        at_work.listening = Some(thread.doing("start a thread")?);
        Ok(at_work)
    }

    /// Its processes.
    pub(super) fn pids(&self) -> Vec<u32> {
        self.children.iter().map(Child::id).collect()
    }

    /// How often it has read something wrong.
    pub(super) fn wrong(&self) -> u64 {
        self.wrong.load(Relaxed)
    }

    /// How much it did between two instants.
    pub(super) fn done(&self, from: Instant, to: Instant) -> f64 {
        let counts = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        count::between(&counts, from, to)
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        if let Some(listening) = self.listening.take() {
            let _ = listening.join();
        }
    }
}

/// Reports every 50 ms how much was done, until the reports can't be written.
pub(super) fn tell(done: &AtomicU64) -> io::Result<()> {
    loop {
        thread::sleep(TELL);
        let mut output = io::stdout().lock();
        writeln!(output, "{}", done.load(Relaxed))?;
        output.flush()?;
    }
}

/// The web server: answers each request, which is a length, with as many bytes.
///
/// # Errors
/// If it can't listen.
pub fn server(port: u16) -> io::Result<()> {
    let listener = TcpListener::bind(("0.0.0.0", port))?;
    part::ready()?;
    for stream in listener.incoming() {
        let mut stream = stream?;
        thread::Builder::new().name("answer".to_owned()).spawn(move || {
            let bytes = vec![7; 1 << 20];
            let mut request = [0; 8];
            while stream.read_exact(&mut request).is_ok() {
                let asked = usize::try_from(u64::from_le_bytes(request)).unwrap_or(usize::MAX);
                if stream.write_all(&bytes[..asked.min(bytes.len())]).is_err() {
                    return;
                }
            }
        })?;
    }
    Ok(())
}

/// The times of requests, whether earlier ones were answered or not.
struct Requests {
    random: Random,
    due: Instant,
    bytes_per_s: u64,
}

impl Requests {
    fn next(&mut self) -> (Instant, u64) {
        // Requests that no client took in time are dropped.
        if let Some(oldest) = Instant::now().checked_sub(PATIENCE) {
            self.due = self.due.max(oldest);
        }
        let bytes = ANSWER_BYTES[self.random.below(ANSWER_BYTES.len())];
        let due = self.due;
        self.due += Duration::from_secs_f64(bytes as f64 / self.bytes_per_s.max(1) as f64);
        (due, bytes)
    }
}

/// The clients, which request `bytes_per_s` and report how many bytes arrived.
///
/// # Errors
/// If they can't connect, or their reports can't be written.
pub fn clients(address: &str, bytes_per_s: u64) -> io::Result<()> {
    let requests = Requests { random: Random::new(1, 1), due: Instant::now(), bytes_per_s };
    let requests = Arc::new(Mutex::new(requests));
    let done = Arc::new(AtomicU64::new(0));
    for _ in 0..CLIENTS {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        let (requests, done) = (Arc::clone(&requests), Arc::clone(&done));
        thread::Builder::new()
            .name("ask".to_owned())
            .spawn(move || ask(stream, &requests, &done))?;
    }
    tell(&done)
}

fn ask(mut stream: TcpStream, requests: &Mutex<Requests>, done: &AtomicU64) -> io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let (due, bytes) = requests.lock().unwrap_or_else(PoisonError::into_inner).next();
        thread::sleep(due.saturating_duration_since(Instant::now()));
        stream.write_all(&bytes.to_le_bytes())?;
        let mut left = bytes;
        while left > 0 {
            let room = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            let count = stream.read(&mut buffer[..room])?;
            if count == 0 {
                return Ok(());
            }
            left -= count as u64;
            done.fetch_add(count as u64, Relaxed);
        }
    }
}

/// Keeps all CPUs busy, and reports how much it has computed.
///
/// # Errors
/// If threads can't be started, or the reports can't be written.
pub fn computing() -> io::Result<()> {
    let done = Arc::new(AtomicU64::new(0));
    for nth in 0..thread::available_parallelism()?.get() {
        let done = Arc::clone(&done);
        thread::Builder::new().name("compute".to_owned()).spawn(move || {
            let mut random = Random::new(nth as u64, 0);
            loop {
                for _ in 0..ROUNDS {
                    std::hint::black_box(random.draw());
                }
                done.fetch_add(1, Relaxed);
            }
        })?;
    }
    tell(&done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overdue_requests_are_dropped() {
        let now = Instant::now();
        let due = now.checked_sub(Duration::from_secs(1)).unwrap_or(now);
        let mut requests = Requests { random: Random::new(1, 1), due, bytes_per_s: 1 << 20 };
        let (first, bytes) = requests.next();
        assert!(first + PATIENCE >= now);
        let (second, _) = requests.next();
        assert!(second > first, "{bytes}");
    }
}
