//! A panic of a lane's thread ends the migration: a lane that has lost a thread
//! would otherwise look like one that is only slow.
//!
//! A file that an environment variable names selects the thread that panics, so each
//! test runs `a_lane_with_a_fault` in a process of its own.

use std::net::TcpListener;
use std::process::Command;
use std::thread;

use identity::{Connection, Security};
use page::{Encoding, PageIndex, Pool, SLOT_BYTES};
use transport::{Endpoint, Lanes, LanesError, LanesPlan};
use wire::{Ack, BatchHeader, LaneHeader, Preamble, Reply, Token};

use std::io::{Read, Write};

/// As many as fill the window of a new lane.
const BATCHES: u64 = 4;

/// Accepts one lane, and acknowledges batches of one page when all have arrived: by then the
/// sending thread waits for room for more.
fn acknowledge(listener: &TcpListener) {
    let (stream, _) = listener.accept().unwrap();
    let mut lane = Connection::plain(stream);
    let mut preamble = [0; Preamble::BYTES];
    lane.read_exact(&mut preamble).unwrap();
    lane.write_all(&Reply::Welcome.to_bytes(wire::VERSION)).unwrap();
    let mut header = [0; LaneHeader::BYTES];
    for placed in 1.. {
        if lane.read_exact(&mut header).is_err() {
            return;
        }
        let Ok(LaneHeader::Pages(BatchHeader { payload_bytes, .. })) = LaneHeader::parse(&header)
        else {
            panic!("one page each")
        };
        let mut rest = vec![0; 4 + payload_bytes as usize];
        if lane.read_exact(&mut rest).is_err() {
            return;
        }
        if placed == BATCHES {
            let _ = lane.write_all(&Ack { placed }.to_bytes());
        }
    }
}

/// Run by the other tests.
#[test]
#[ignore = "a program for the other tests, which run it"]
fn a_lane_with_a_fault() {
    let thread = std::fs::read_to_string(std::env::var("DROVEWAY_PANIC_FILE").unwrap()).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = Endpoint { local: None, remote: listener.local_addr().unwrap() };
    let destination = thread::spawn(move || acknowledge(&listener));
    let plan = LanesPlan {
        endpoints: vec![endpoint],
        peer: String::new(),
        security: Security::Plaintext,
        token: Token([1; 16]),
        encoding: Encoding::Raw,
        stale_filter: None,
        deltas: None,
    };
    let lanes = Lanes::start(plan).unwrap();
    let pool = Pool::new(4 * SLOT_BYTES);
    for page in 0..BATCHES {
        let mut batch = pool.take().unwrap();
        batch.push_body(PageIndex(u32::try_from(page).unwrap()), 0);
        if lanes.submit(batch).is_err() {
            break;
        }
    }
    let error = lanes.wait_drained().unwrap_err();
    assert!(matches!(&error, LanesError::Fault { thread: it } if *it == thread), "{error}");
    assert!(error.to_string().contains(&thread), "{error}");
    lanes.stop();
    assert_eq!(pool.out_bytes(), 0, "every buffer is back");
    destination.join().unwrap();
}

fn with_a_fault(thread: &str) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("panic");
    std::fs::write(&file, thread).unwrap();
    let mut run = Command::new(std::env::current_exe().unwrap());
    run.args(["--exact", "--ignored", "faults::a_lane_with_a_fault"])
        .env("DROVEWAY_PANIC_FILE", &file);
    let output = run.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn a_panic_of_the_sending_thread_ends_the_migration() {
    with_a_fault("lane-0-send");
}

#[test]
fn a_panic_of_the_acknowledgement_thread_ends_the_migration() {
    with_a_fault("lane-0-ack");
}
