//! The cost of TLS: CPU seconds per GB of both ends together, over loopback,
//! compared with the same bytes in plaintext.
//!
//! The connection is used as by a lane: one thread writes batches of 512 KiB, each a
//! small head and a body, and another reads them into a buffer that it keeps; every
//! fourth is acknowledged.

use std::io::{IoSlice, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use identity::{Authority, CertificateRequest, Connection, Files, Identity, Security, Subject};
use rustix::time::{ClockId, clock_gettime};

const HEAD_BYTES: usize = 16 + 4 * 128;
const BODY_BYTES: usize = 512 << 10;
/// The size of a pool, and more than any cache.
const POOL_BYTES: usize = 128 << 20;
const BATCHES: usize = 4096;
const ROUNDS: usize = 5;

fn main() {
    // `cargo test --benches` only checks that this compiles.
    if !std::env::args().any(|arg| arg == "--bench") {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let (a, b) = (host(dir.path(), "a"), host(dir.path(), "b"));
    let kinds = [("plain", Security::Plaintext, Security::Plaintext), ("tls", a, b)];
    println!("| | GB/s | sender CPU s/GB | receiver CPU s/GB | both |");
    println!("|---|---|---|---|---|");
    let mut boths = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for ((name, a, b), all) in kinds.iter().zip(&mut boths) {
            let Cost { gb, took, sent, received } = carry(a, b);
            let [sent, received] = [sent, received].map(|cpu| cpu.as_secs_f64() / gb);
            let both = sent + received;
            let rate = gb / took.as_secs_f64();
            println!("| {name} | {rate:.2} | {sent:.3} | {received:.3} | {both:.3} |");
            all.push(both);
        }
    }
    let [plain, tls] = boths.map(median);
    println!("median: plain {plain:.3}, tls {tls:.3}: {:.3} CPU s/GB more", tls - plain);
    let (_, _, b) = &kinds[1];
    handshakes(dir.path(), b);
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn host(dir: &Path, name: &str) -> Security {
    let ca = dir.join("ca");
    if !ca.exists() {
        Authority::create(&ca, 10).expect("a new CA");
    }
    let authority = Authority::open(&ca).expect("the CA");
    let subject = Subject::host(name).expect("a name");
    let request = CertificateRequest { subject, days: 1, out: dir.join(name), replace: false };
    let files = authority.issue(&request).expect("a certificate").files;
    Security::Tls(Arc::new(Identity::load(name, &files).expect("an identity")))
}

fn connect(a: &Security, b: &Security) -> (Connection, Connection) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let stream = TcpStream::connect(listener.local_addr().expect("bound")).expect("it listens");
    let (theirs, _) = listener.accept().expect("a connection");
    for end in [&stream, &theirs] {
        end.set_nodelay(true).expect("a TCP connection");
    }
    if !a.is_secure() {
        return (Connection::plain(stream), Connection::plain(theirs));
    }
    thread::scope(|scope| {
        let accepted = scope.spawn(|| b.accept(theirs).expect("it calls"));
        let ours = a.connect(stream, "b").expect("it answers");
        (ours, accepted.join().expect("no panic"))
    })
}

struct Cost {
    gb: f64,
    took: Duration,
    sent: Duration,
    received: Duration,
}

fn carry(a: &Security, b: &Security) -> Cost {
    let (mut ours, theirs) = connect(a, b);
    let pool: Vec<u8> = (0..POOL_BYTES).map(|at| (at / 512).to_le_bytes()[0]).collect();
    let began = Instant::now();
    let receiving = thread::spawn(move || receive(theirs));
    let sent = thread::scope(|scope| {
        let (reader, writer) = ours.halves();
        let acks = scope.spawn(|| {
            let began = cpu();
            let mut ack = [0; 8];
            while reader.read_exact(&mut ack).is_ok() {}
            cpu() - began
        });
        let began = cpu();
        let head = [7; HEAD_BYTES];
        for batch in 0..BATCHES {
            let at = batch * BODY_BYTES % POOL_BYTES;
            let body = &pool[at..at + BODY_BYTES];
            let mut slices = [IoSlice::new(&head), IoSlice::new(body)];
            let mut slices = &mut slices[..];
            while !slices.is_empty() {
                let written = writer.write_vectored(slices).expect("it is read");
                IoSlice::advance_slices(&mut slices, written);
            }
        }
        let sent = cpu() - began;
        sent + acks.join().expect("no panic")
    });
    let received = receiving.join().expect("no panic");
    let gb = (BATCHES * (HEAD_BYTES + BODY_BYTES)) as f64 / 1e9;
    Cost { gb, took: began.elapsed(), sent, received }
}

fn receive(mut connection: Connection) -> Duration {
    let began = cpu();
    let mut head = [0; HEAD_BYTES];
    let mut body = vec![0; BODY_BYTES];
    for batch in 0..BATCHES {
        connection.read_exact(&mut head).expect("a head");
        connection.read_exact(&mut body).expect("a body");
        if batch % 4 == 3 {
            connection.write_all(&[0; 8]).expect("it is read");
        }
    }
    connection.close();
    cpu() - began
}

/// Measures handshakes, full and resumed.
fn handshakes(dir: &Path, b: &Security) {
    const COUNT: u32 = 200;
    let files = Files::within(&dir.join("a"));
    let load = || Security::Tls(Arc::new(Identity::load("a", &files).expect("an identity")));
    let strangers: Vec<Security> = (0..COUNT).map(|_| load()).collect();
    let full = measure(strangers.iter(), b);
    let known = load();
    let resumed = measure((0..COUNT).map(|_| &known), b);
    for (name, (took, cpu)) in [("full", full), ("resumed", resumed)] {
        println!("handshake, {name}: {:?}, CPU of both ends {:?}", took / COUNT, cpu / COUNT);
    }
}

fn measure<'s>(calling: impl Iterator<Item = &'s Security>, b: &Security) -> (Duration, Duration) {
    let (began, cpu) = (Instant::now(), process_cpu());
    for a in calling {
        let (mut ours, mut theirs) = connect(a, b);
        theirs.write_all(b"w").expect("it is read");
        ours.read_exact(&mut [0]).expect("it was written");
    }
    (began.elapsed(), process_cpu() - cpu)
}

fn cpu() -> Duration {
    of(ClockId::ThreadCPUTime)
}

fn process_cpu() -> Duration {
    of(ClockId::ProcessCPUTime)
}

fn of(clock: ClockId) -> Duration {
    Duration::try_from(clock_gettime(clock)).expect("time since the start")
}
