//! Both directions at once, in pieces of all lengths: what is read is what was
//! written.

use std::io::{IoSlice, Read, Write};
use std::thread;

use identity::{Connection, Reader, Writer};

use crate::common::{Cluster, Numbers, plain, secured};

const BYTES: usize = 8 << 20;

/// The bytes of one direction.
fn content(seed: u64) -> Vec<u8> {
    let mut numbers = Numbers::new(seed);
    (0..BYTES / 8).flat_map(|_| numbers.next().to_le_bytes()).collect()
}

/// A length: mostly small, sometimes a batch's, often close to a record's.
fn length(numbers: &mut Numbers) -> usize {
    match numbers.below(8) {
        0 => 1,
        1 => 16_384 - 2 + numbers.below(5),
        2 => numbers.below(600_000),
        3 => 4096,
        _ => numbers.below(3000),
    }
}

fn write(writer: &mut Writer, content: &[u8], seed: u64) {
    let mut numbers = Numbers::new(seed);
    let mut rest = content;
    while !rest.is_empty() {
        let mut pieces = Vec::new();
        for _ in 0..=numbers.below(6) {
            let (piece, after) = rest.split_at(length(&mut numbers).min(rest.len()));
            pieces.push(IoSlice::new(piece));
            rest = after;
        }
        let mut pieces = &mut pieces[..];
        while pieces.iter().any(|piece| !piece.is_empty()) {
            let written = writer.write_vectored(pieces).unwrap();
            IoSlice::advance_slices(&mut pieces, written);
        }
    }
}

fn read(reader: &mut Reader, seed: u64) -> Vec<u8> {
    let mut numbers = Numbers::new(seed);
    let mut content = Vec::with_capacity(BYTES);
    while content.len() < BYTES {
        let start = content.len();
        let wanted = length(&mut numbers).clamp(1, BYTES - start);
        content.resize(start + wanted, 0);
        let into = &mut content[start..];
        let came = match numbers.below(3) {
            0 => reader.read_exact(into).map(|()| wanted).unwrap(),
            1 => reader.read(into).unwrap(),
            _ => match reader.read_ready(into).unwrap() {
                Some(came) => came,
                None => reader.read(into).unwrap(),
            },
        };
        assert!(came > 0, "ended after {start} bytes");
        content.truncate(start + came);
    }
    content
}

fn both_ways((mut ours, mut theirs): (Connection, Connection), seed: u64) {
    let [there, back] = [content(seed), content(seed + 1)];
    let (came_there, came_back) = thread::scope(|scope| {
        let (our_reader, our_writer) = ours.halves();
        let (their_reader, their_writer) = theirs.halves();
        let (there, back) = (&there, &back);
        scope.spawn(move || write(our_writer, there, seed + 2));
        scope.spawn(move || write(their_writer, back, seed + 3));
        let came_there = scope.spawn(move || read(their_reader, seed + 4));
        let came_back = read(our_reader, seed + 5);
        (came_there.join().unwrap(), came_back)
    });
    assert!(came_there == there && came_back == back);
    // Closed in order: the other end sees the end and no error.
    ours.close();
    assert_eq!(theirs.read(&mut [0; 9]).unwrap(), 0);
    assert_eq!(theirs.read_ready(&mut [0; 9]).unwrap(), Some(0));
}

#[test]
fn secured_connections() {
    let cluster = Cluster::new();
    for seed in 0..4 {
        both_ways(secured(&cluster), seed);
    }
}

#[test]
fn plain_connections_too() {
    both_ways(plain(), 1);
}

#[test]
fn a_read_without_waiting_tells_whether_there_are_bytes() {
    let cluster = Cluster::new();
    for (mut ours, mut theirs) in [secured(&cluster), plain()] {
        let mut into = [0; 100];
        assert_eq!(theirs.read_ready(&mut into).unwrap(), None);
        ours.write_all(b"abc").unwrap();
        // On loopback the bytes have arrived when the write returns.
        assert_eq!(theirs.read_ready(&mut into[..2]).unwrap(), Some(2));
        assert_eq!(theirs.read_ready(&mut into[2..]).unwrap(), Some(1));
        assert_eq!(&into[..3], b"abc");
        assert_eq!(theirs.read_ready(&mut into).unwrap(), None);
    }
}

#[test]
fn a_read_that_timed_out_has_lost_nothing() {
    let cluster = Cluster::new();
    for (mut ours, mut theirs) in [secured(&cluster), plain()] {
        theirs.set_read_timeout(Some(std::time::Duration::from_millis(5))).unwrap();
        let error = theirs.read(&mut [0; 9]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
        ours.write_all(b"later").unwrap();
        let mut into = [0; 5];
        theirs.read_exact(&mut into).unwrap();
        assert_eq!(&into, b"later");
    }
}
