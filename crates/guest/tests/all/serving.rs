//! The helper with a socket in place of its port: each request is answered, whatever was sent
//! before, and as long as the peer is there.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use cachemap::{AnswerKind, Budget, CacheMap, Fault, Limits, Listener, Query, State, VERSION};
use guest::port::{Broken, Port};
use guest::serve::{PROGRAM, serve};

const LIMITS: Limits = Limits { ram_pages: 1 << 40, end_page: 1 << 40 };

fn helper() -> (UnixStream, JoinHandle<()>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    ours.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let serving = thread::spawn(move || {
        let mut port = Port::of(theirs.into()).unwrap();
        serve(&mut port).unwrap();
    });
    (ours, serving)
}

/// More runs would violate the protocol, which the listener checks.
const RUNS_MAX: u32 = 1000;

fn query(nonce: u64, answer: AnswerKind) -> Query {
    let budget = Budget { cpu_percent: 50, time_ms: 300, memory_bytes: 8 << 20 };
    Query { version: VERSION, nonce, answer, budget, runs_max: RUNS_MAX }
}

fn hear(stream: &mut UnixStream, query: &Query) -> Result<(Listener, State), Fault> {
    let mut listener = Listener::new(query, LIMITS);
    let mut room = vec![0; 64 << 10];
    loop {
        let length = stream.read(&mut room).unwrap();
        assert!(length > 0, "the helper has gone");
        let state = listener.take(&room[..length])?;
        if state == State::Done {
            return Ok((listener, state));
        }
    }
}

fn map(stream: &mut UnixStream, nonce: u64) -> Option<CacheMap> {
    let query = query(nonce, AnswerKind::Map);
    stream.write_all(&query.to_bytes()).unwrap();
    match hear(stream, &query) {
        Ok((listener, _)) => listener.into_map(),
        // Only root may learn where pages are.
        Err(Fault::Refused { text }) if text.contains("root") => None,
        Err(fault) => panic!("{fault}"),
    }
}

fn ends(stream: UnixStream, serving: JoinHandle<()>) {
    drop(stream);
    serving.join().unwrap();
}

#[test]
fn a_request_for_a_greeting_gets_one() {
    let (mut stream, serving) = helper();
    for nonce in 0..3 {
        let query = query(nonce, AnswerKind::Greeting);
        stream.write_all(&query.to_bytes()).unwrap();
        let (listener, _) = hear(&mut stream, &query).unwrap();
        assert_eq!(listener.greeting().map(|greeting| greeting.program.as_str()), Some(PROGRAM));
    }
    ends(stream, serving);
}

#[test]
fn a_request_of_another_version_gets_a_greeting() {
    let (mut stream, serving) = helper();
    let other = Query { version: VERSION + 1, ..query(5, AnswerKind::Map) };
    stream.write_all(&other.to_bytes()).unwrap();
    let (listener, _) = hear(&mut stream, &query(5, AnswerKind::Greeting)).unwrap();
    assert_eq!(listener.greeting().map(|greeting| greeting.version), Some(VERSION));
    ends(stream, serving);
}

#[test]
fn repeated_requests_get_maps_within_the_budget() {
    let (mut stream, serving) = helper();
    for nonce in 10..13 {
        let Some(map) = map(&mut stream, nonce) else { continue };
        let summary = map.summary();
        assert!(summary.runs <= u64::from(RUNS_MAX));
        // A test in a guest checks which pages these are. Here each is reported once.
        assert_eq!(map.pages(), summary.pages);
        assert!(summary.pages <= summary.cached_pages);
    }
    ends(stream, serving);
}

#[test]
fn garbage_and_half_a_request_before_a_request_do_no_harm() {
    let (mut stream, serving) = helper();
    let half = query(1, AnswerKind::Map).to_bytes();
    stream.write_all(&half[..30]).unwrap();
    stream.write_all(&[0x44; 10_000]).unwrap();
    drop(map(&mut stream, 2));
    ends(stream, serving);
}

#[test]
fn a_new_request_gets_the_newer_answer() {
    let (mut stream, serving) = helper();
    // Nothing is read in between, so the first answer fills the socket.
    stream.write_all(&query(1, AnswerKind::Map).to_bytes()).unwrap();
    thread::yield_now();
    drop(map(&mut stream, 2));
    ends(stream, serving);
}

#[test]
fn a_disconnect_ends_the_answer() {
    let (mut stream, serving) = helper();
    stream.write_all(&query(1, AnswerKind::Map).to_bytes()).unwrap();
    stream.read_exact(&mut [0; 8]).unwrap();
    ends(stream, serving);
}

/// A survey that may use all of a CPU rests for no time, and has to learn that nobody listens.
#[test]
fn a_rest_of_no_time_notices_a_disconnect() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let mut port = Port::of(theirs.into()).unwrap();
    port.rest(Duration::ZERO).unwrap();
    drop(ours);
    assert!(matches!(port.rest(Duration::ZERO), Err(Broken::Disconnected)));
}
