//! Clients of the web server in a guest, from a third host: they request files at a fixed rate,
//! whether earlier requests were answered or not, and check that a file stays what it is.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hasher};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use lab_guest::net::ADDRESS;
use lab_guest::random::Random;

use crate::neighbour::{WRONG, tell};
use crate::part;

const PORT: u16 = 80;
/// More than needed as long as the server answers at once.
const CLIENTS: usize = 16;
/// Files of the server: `/0` and so on, 256 KiB each.
const FILES: usize = 16;
const FILE_BYTES_MAX: usize = 1 << 20;
/// Time between two requests: 10 MB/s.
const EVERY: Duration = Duration::from_millis(25);
/// A request that no client is free for is dropped after this time, as an impatient visitor would.
const PATIENCE: Duration = Duration::from_millis(100);

/// When the next request is due, which file it is for, and what each file was at first.
struct Requests {
    due: Instant,
    random: Random,
    hashes: HashMap<usize, u64>,
}

impl Requests {
    fn next(&mut self, now: Instant) -> (Instant, usize) {
        if let Some(oldest) = now.checked_sub(PATIENCE) {
            self.due = self.due.max(oldest);
        }
        let due = self.due;
        self.due += EVERY;
        (due, self.random.below(FILES))
    }

    /// Whether a file is what it was.
    fn is_same(&mut self, file: usize, body: &[u8]) -> bool {
        let mut hasher = DefaultHasher::new();
        hasher.write(body);
        let hash = hasher.finish();
        *self.hashes.entry(file).or_insert(hash) == hash
    }
}

/// Uses the server, and prints how many requests were answered.
///
/// # Errors
/// If the server can't be reached at first, or the output can't be written.
pub fn visit() -> io::Result<()> {
    let requests =
        Requests { due: Instant::now(), random: Random::new(1, 5), hashes: HashMap::new() };
    let requests = Arc::new(Mutex::new(requests));
    let done = Arc::new(AtomicU64::new(0));
    let streams: io::Result<Vec<TcpStream>> =
        (0..CLIENTS).map(|_| TcpStream::connect((ADDRESS, PORT))).collect();
    let streams = streams?;
    part::ready()?;
    for stream in streams {
        stream.set_nodelay(true)?;
        let (requests, done) = (Arc::clone(&requests), Arc::clone(&done));
        thread::Builder::new().name("web-client".to_owned()).spawn(move || {
            // The other clients continue. What is not answered shows it.
            if let Err(error) = ask(BufReader::new(stream), &requests, &done) {
                eprintln!("web client: {error}");
            }
        })?;
    }
    tell(&done)
}

fn ask(
    mut stream: BufReader<TcpStream>,
    requests: &Mutex<Requests>,
    done: &AtomicU64,
) -> io::Result<()> {
    let lock = || requests.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        let (due, file) = lock().next(Instant::now());
        thread::sleep(due.saturating_duration_since(Instant::now()));
        let request = format!("GET /{file} HTTP/1.1\r\nHost: lab\r\n\r\n");
        stream.get_mut().write_all(request.as_bytes())?;
        let body = answer(&mut stream)?;
        if !lock().is_same(file, &body) {
            println!("{WRONG}");
        }
        done.fetch_add(1, Relaxed);
    }
}

/// Reads an answer; returns the body.
fn answer(stream: &mut impl BufRead) -> io::Result<Vec<u8>> {
    let odd = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let mut line = String::new();
    stream.read_line(&mut line)?;
    if !line.starts_with("HTTP/1.1 200 ") {
        return Err(odd(format!("the server answers {line:?}")));
    }
    let mut bytes = None;
    loop {
        line.clear();
        if stream.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        if name.eq_ignore_ascii_case("content-length") {
            bytes = value.trim().parse::<usize>().ok().filter(|bytes| *bytes <= FILE_BYTES_MAX);
        }
    }
    let bytes = bytes.ok_or_else(|| odd("the server's answer has no fit length".to_owned()))?;
    let mut body = vec![0; bytes];
    Read::read_exact(stream, &mut body)?;
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_their_times_whatever_is_answered() {
        let due = Instant::now();
        let mut requests = Requests { due, random: Random::new(1, 1), hashes: HashMap::new() };
        assert_eq!(requests.next(due).0, due);
        assert_eq!(requests.next(due).0, due + EVERY);
        // Those of the last second are dropped.
        let late = due + Duration::from_secs(1);
        assert_eq!(requests.next(late).0, late.checked_sub(PATIENCE).unwrap());
    }

    #[test]
    fn a_file_that_changes_is_noticed() {
        let mut requests =
            Requests { due: Instant::now(), random: Random::new(1, 1), hashes: HashMap::new() };
        assert!(requests.is_same(3, b"a") && requests.is_same(3, b"a"));
        assert!(requests.is_same(4, b"b") && !requests.is_same(3, b"b"));
    }

    #[test]
    fn answers_are_read_to_their_end() {
        let mut two: &[u8] = b"HTTP/1.1 200 OK\r\nServer: x\r\nContent-Length: 3\r\n\r\nabc\
                               HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nd";
        assert_eq!(answer(&mut two).unwrap(), b"abc");
        assert_eq!(answer(&mut two).unwrap(), b"d");
        for odd in [
            "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nab",
            "HTTP/1.1 200 OK\r\n",
        ] {
            assert!(answer(&mut odd.as_bytes()).is_err(), "{odd}");
        }
    }
}
