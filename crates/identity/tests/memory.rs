//! What connections receive into is bounded for all of a process, and those that are silent keep
//! little of it.

#[path = "all/common/mod.rs"]
mod common;

use std::fs;
use std::io::{Read, Write};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use common::{Cluster, call, welcome};
use identity::{Connection, Security};

const MIB: usize = 1 << 20;
/// If each had all that it may receive into, they would have 120 MiB.
const CONNECTIONS: usize = 240;
const RECEIVING_MAX: usize = 64 * MIB;
/// What they have at first, and what threads and the heap have.
const OTHERWISE: usize = 32 * MIB;
const PIECE: [u8; 16 << 10] = [7; 16 << 10];
const PIECES: usize = 128;
/// A slow machine takes long.
const LONG: Duration = Duration::from_secs(60);

/// Resident memory of this process, but for files.
fn resident_bytes() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

/// One end sends faster than the other reads.
fn burst(ours: &mut Connection, theirs: &mut Connection) {
    let (tell, much_is_sent) = channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            for _ in 0..PIECES {
                ours.write_all(&PIECE).unwrap();
                // The reader has started by now.
                let _ = tell.send(());
            }
        });
        // Until the kernel takes no more.
        while much_is_sent.recv_timeout(Duration::from_millis(10)).is_ok() {}
        let mut into = vec![0; PIECES * PIECE.len()];
        theirs.read_exact(&mut into).unwrap();
    });
}

#[test]
fn connections_receive_into_so_much_and_silent_ones_into_little() {
    let cluster = Cluster::new();
    let [a, b] = ["a", "b"].map(|name| Security::Tls(cluster.host(name)));
    let before = resident_bytes();
    let grown = || resident_bytes().saturating_sub(before);
    let mut connections = Vec::new();
    for _ in 0..CONNECTIONS {
        let (ours, theirs) = call(&a, &b, "b");
        let (mut ours, mut theirs) = (ours.unwrap(), theirs.unwrap());
        welcome(&mut ours, &mut theirs);
        burst(&mut ours, &mut theirs);
        connections.push((ours, theirs));
    }
    assert!(grown() < RECEIVING_MAX + OTHERWISE, "{} MiB", grown() / MIB);
    thread::scope(|scope| {
        let mut silent = Vec::new();
        for (ours, mut theirs) in connections {
            silent.push(ours);
            scope.spawn(move || theirs.read_exact(&mut [0]).unwrap());
        }
        let since = Instant::now();
        while grown() > OTHERWISE {
            assert!(since.elapsed() < LONG, "{} MiB", grown() / MIB);
            thread::sleep(Duration::from_millis(100));
        }
        // None of them has lost anything.
        silent.iter_mut().for_each(|ours| ours.write_all(&[1]).unwrap());
    });
}
