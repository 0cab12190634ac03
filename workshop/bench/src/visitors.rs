//! Clients of the server in a guest: from a third host they change and read its values, each as
//! soon as it was answered, and check what they read.
//!
//! They are a process of their own, which reports what was answered and when, by the clock that all
//! processes share.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use lab_guest::net::ADDRESS;
use lab_guest::random::Random;
use rustix::time::{ClockId, clock_gettime};

use crate::count;
use lab::error::{LabError, Result, SystemContext};
use lab::hosts::Outside;

/// memcached's port.
const PORT: u16 = 11211;
const CLIENTS: u64 = 4;
const VALUE_BYTES: usize = 64 << 10;
const KEYS: u64 = 1536;
/// One request in so many reads; the others change values.
const READ_ONCE_IN: usize = 4;
/// How often it reports how much was answered.
const TELL: Duration = Duration::from_millis(20);
/// A longer silence is reported.
const SILENCE_US: u64 = 5_000;
/// Longest time until a server has started and is filled.
const READY_MAX: Duration = Duration::from_secs(90);
/// An answer that takes longer counts as none.
const PATIENCE: Duration = Duration::from_secs(120);

/// Bytes that a server must keep.
pub const KEPT_BYTES: u64 = KEYS * VALUE_BYTES as u64;

/// What clients have reported.
#[derive(Debug, Default)]
struct Heard {
    counts: Vec<(Instant, u64)>,
    silences: Vec<(Instant, Instant)>,
    wrong: u64,
}

/// Running clients. Dropping it ends them.
pub(super) struct Visitors {
    child: Child,
    heard: Arc<Mutex<Heard>>,
    listening: Option<JoinHandle<()>>,
}

impl Visitors {
    /// Starts the clients; returns when the server has all its values.
    pub(super) fn start(outside: &Outside) -> Result<Self> {
        let own = std::env::current_exe().doing("find the lab's own program")?;
        let mut command = outside.host.command(&own);
        command.arg("visitors").stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().doing("start clients")?;
        let output = child.stdout.take();
        let heard = Arc::new(Mutex::new(Heard::default()));
        let (ready, is_ready) = mpsc::channel();
        let hears = Arc::clone(&heard);
        let listen = move || {
            let (now, now_us) = (Instant::now(), clock_us());
            let at = |us: u64| now + Duration::from_micros(us.saturating_sub(now_us));
            let lines = output.map(|output| BufReader::new(output).lines());
            for line in lines.into_iter().flatten().map_while(io::Result::ok) {
                if line == "ready" {
                    // After the timeout the receiver is dropped.
                    let _ = ready.send(());
                }
                hears.lock().unwrap_or_else(PoisonError::into_inner).hear(&line, at);
            }
        };
        let thread = thread::Builder::new().name("visitors".to_owned()).spawn(listen);
        let listening = Some(thread.doing("start a thread")?);
        let visitors = Self { child, heard, listening };
        wait_ready(&is_ready)?;
        Ok(visitors)
    }

    /// Number of answers between two instants.
    pub(super) fn answered(&self, from: Instant, to: Instant) -> f64 {
        count::between(&self.lock().counts, from, to)
    }

    /// When so many requests since an instant had been answered; none if they have not been yet.
    pub(super) fn when(&self, since: Instant, requests: u64) -> Option<Instant> {
        self.lock().when(since, requests)
    }

    /// The longest time without any answer that overlaps the time between two instants, counted
    /// from the first of them.
    pub(super) fn silence(&self, from: Instant, to: Instant) -> Duration {
        self.lock().silence(from, to)
    }

    /// Answers that differ from what the server was given.
    pub(super) fn wrong(&self) -> u64 {
        self.lock().wrong
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn wait_ready(is_ready: &Receiver<()>) -> Result<()> {
    is_ready.recv_timeout(READY_MAX).map_err(|_| LabError::Silent {
        what: "the server in the guest".to_owned(),
        waited: READY_MAX,
        detail: String::new(),
    })
}

impl Drop for Visitors {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(listening) = self.listening.take() {
            let _ = listening.join();
        }
    }
}

impl Heard {
    fn hear(&mut self, line: &str, at: impl Fn(u64) -> Instant) {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |nth: usize| words.get(nth).and_then(|word| word.parse::<u64>().ok());
        match (words[0], number(1), number(2), number(3)) {
            ("answered", Some(us), Some(count), Some(wrong)) => {
                self.counts.push((at(us), count));
                self.wrong = wrong;
            }
            ("silent", Some(from_us), Some(to_us), _) => {
                self.silences.push((at(from_us), at(to_us)));
            }
            _ => {}
        }
    }

    fn when(&self, since: Instant, requests: u64) -> Option<Instant> {
        let due = count::at(&self.counts, since) + requests as f64;
        self.counts.iter().find(|(_, count)| *count as f64 >= due).map(|(at, _)| *at)
    }

    fn silence(&self, from: Instant, to: Instant) -> Duration {
        let touching = |(began, ended): &(Instant, Instant)| *ended > from && *began < to;
        let silences = self.silences.iter().copied().chain(self.lasting()).filter(touching);
        let lengths = silences.map(|(began, ended)| ended - began.max(from));
        lengths.max().unwrap_or_default()
    }

    /// The silence that has not ended yet.
    fn lasting(&self) -> Option<(Instant, Instant)> {
        let (now, count) = *self.counts.last()?;
        let since = self.counts.iter().rev().take_while(|(_, before)| *before == count).last()?.0;
        (now - since > TELL * 2).then_some((since, now))
    }
}

/// Microseconds of the clock that `Instant` uses.
fn clock_us() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    u64::try_from(now.tv_sec * 1_000_000 + now.tv_nsec / 1000).unwrap_or(0)
}

/// Totals of all clients.
#[derive(Default)]
struct Done {
    answered: AtomicU64,
    wrong: AtomicU64,
    last_us: AtomicU64,
}

/// The clients: they fill the server, then use it until their reports can't be written.
///
/// # Errors
/// If the server doesn't start, or ends a connection.
pub fn visit() -> io::Result<()> {
    let filled: io::Result<Vec<Client>> = (0..CLIENTS).map(Client::connect).collect();
    let done = Arc::new(Done::default());
    done.last_us.store(clock_us(), Relaxed);
    println!("ready");
    for mut client in filled? {
        let done = Arc::clone(&done);
        thread::Builder::new().name("client".to_owned()).spawn(move || {
            loop {
                match client.ask() {
                    Ok(right) => done.was_answered(right),
                    // The other clients continue. If all end, the silence shows it.
                    Err(error) => return eprintln!("client: {error}"),
                }
            }
        })?;
    }
    loop {
        thread::sleep(TELL);
        let (answered, wrong) = (done.answered.load(Relaxed), done.wrong.load(Relaxed));
        let mut output = io::stdout().lock();
        writeln!(output, "answered {} {answered} {wrong}", clock_us())?;
        output.flush()?;
    }
}

impl Done {
    fn was_answered(&self, right: bool) {
        let now = clock_us();
        let last = self.last_us.fetch_max(now, Relaxed);
        self.answered.fetch_add(1, Relaxed);
        if !right {
            self.wrong.fetch_add(1, Relaxed);
        }
        if now.saturating_sub(last) > SILENCE_US {
            println!("silent {last} {now}");
        }
    }
}

/// One client, with keys of its own.
struct Client {
    stream: BufReader<TcpStream>,
    first_key: u64,
    versions: Vec<u64>,
    random: Random,
    value: Vec<u8>,
}

impl Client {
    /// Connects, and stores all its values in the server.
    fn connect(nth: u64) -> io::Result<Self> {
        let until = Instant::now() + READY_MAX;
        let stream = loop {
            match TcpStream::connect((ADDRESS, PORT)) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > until => return Err(error),
                // The server is not up yet.
                Err(_) => thread::sleep(Duration::from_millis(50)),
            }
        };
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let keys = KEYS / CLIENTS;
        let mut client = Self {
            stream: BufReader::with_capacity(64 << 10, stream),
            first_key: nth * keys,
            versions: vec![0; usize::try_from(keys).unwrap_or(0)],
            random: Random::new(nth, 3),
            value: Vec::new(),
        };
        for index in 0..client.versions.len() {
            client.set(index)?;
        }
        Ok(client)
    }

    /// Changes a value, or reads one. Returns whether the answer was right.
    fn ask(&mut self) -> io::Result<bool> {
        let index = self.random.below(self.versions.len());
        if self.random.below(READ_ONCE_IN) == 0 {
            self.check(index)
        } else {
            self.set(index).map(|()| true)
        }
    }

    fn set(&mut self, index: usize) -> io::Result<()> {
        self.versions[index] += 1;
        let key = self.first_key + index as u64;
        let mut request = format!("set {key} 0 0 {VALUE_BYTES}\r\n").into_bytes();
        fill(&mut self.value, key, self.versions[index]);
        request.extend(&self.value);
        request.extend(b"\r\n");
        self.stream.get_mut().write_all(&request)?;
        match self.line()?.as_str() {
            "STORED" => Ok(()),
            answer => Err(io::Error::other(format!("{answer:?} to a set"))),
        }
    }

    fn check(&mut self, index: usize) -> io::Result<bool> {
        let key = self.first_key + index as u64;
        self.stream.get_mut().write_all(format!("get {key}\r\n").as_bytes())?;
        let head = self.line()?;
        // The server has room for all values: it never evicts one.
        if head != format!("VALUE {key} 0 {VALUE_BYTES}") {
            return if head == "END" { Ok(false) } else { Err(io::Error::other(head)) };
        }
        let mut found = vec![0; VALUE_BYTES + 2];
        self.stream.read_exact(&mut found)?;
        let end = self.line()?;
        fill(&mut self.value, key, self.versions[index]);
        Ok(end == "END" && found.starts_with(&self.value))
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(line.trim_end().to_owned())
    }
}

/// The value of a key in a version; it can't be compressed.
fn fill(value: &mut Vec<u8>, key: u64, version: u64) {
    let mut random = Random::new(key, version);
    value.clear();
    while value.len() < VALUE_BYTES {
        value.extend(random.draw().to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_of_clients_are_parsed() {
        let start = Instant::now();
        let at = |us| start + Duration::from_micros(us);
        let mut heard = Heard::default();
        for line in ["ready", "answered 100 7 0", "silent 200 900", "answered 1000 9 1", "silent x"]
        {
            heard.hear(line, at);
        }
        assert_eq!(heard.counts, [(at(100), 7), (at(1000), 9)]);
        assert_eq!((&heard.silences[..], heard.wrong), (&[(at(200), at(900))][..], 1));
        assert_eq!(heard.when(at(100), 2), Some(at(1000)));
        assert_eq!(heard.when(at(100), 3), None);
        let silence = |from, to| heard.silence(at(from), at(to)).as_micros();
        assert_eq!([silence(100, 300), silence(400, 9000), silence(900, 9000)], [700, 500, 0]);
        heard.hear("answered 90000 9 1", at);
        // Clients that get no more answers report nothing.
        assert_eq!(heard.silence(at(2000), at(95_000)).as_micros(), 88_000);
    }

    #[test]
    fn values_differ_by_key_and_version() {
        let value = |key, version| {
            let mut value = Vec::new();
            fill(&mut value, key, version);
            value
        };
        assert_eq!(value(1, 2).len(), VALUE_BYTES);
        assert!(value(1, 2) != value(1, 3) && value(1, 2) != value(2, 2));
    }
}
