//! How connections end: any thread can end one in any state, and a cut on the path
//! never goes unnoticed.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use identity::{Connection, Security};

use crate::common::{self, Cluster, Numbers, listen, plain, secured};

fn both(cluster: &Cluster) -> [(Connection, Connection); 2] {
    [secured(cluster), plain()]
}

#[test]
fn a_third_thread_wakes_a_reader() {
    let cluster = Cluster::new();
    for (mut ours, _theirs) in both(&cluster) {
        let closer = ours.closer();
        thread::scope(|scope| {
            let reading = scope.spawn(move || ours.read(&mut [0; 9]).map(|bytes| (bytes, ours)));
            closer.close();
            let (bytes, mut ours) = reading.join().unwrap().unwrap();
            assert_eq!(bytes, 0);
            assert!(ours.write_all(b"x").is_err(), "nothing goes out any more");
            assert_eq!(ours.read(&mut [0; 9]).unwrap(), 0);
        });
    }
}

#[test]
fn a_third_thread_wakes_a_writer_that_nobody_reads() {
    let cluster = Cluster::new();
    for (mut ours, theirs) in both(&cluster) {
        let closer = ours.closer();
        let (full, is_full) = std::sync::mpsc::channel();
        thread::scope(|scope| {
            let writing = scope.spawn(move || {
                let piece = vec![7; 1 << 20];
                for written in 0.. {
                    // Sockets buffer some MiB.
                    if written == 1 {
                        full.send(()).unwrap();
                    }
                    if let Err(error) = ours.write_all(&piece) {
                        return error;
                    }
                }
                unreachable!()
            });
            is_full.recv().unwrap();
            closer.close();
            let error = writing.join().unwrap();
            assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        });
        drop(theirs);
    }
}

#[test]
fn a_third_thread_wakes_both_halves_and_the_peer() {
    let cluster = Cluster::new();
    for (ours, mut theirs) in both(&cluster) {
        let closer = ours.closer();
        let (mut reader, mut writer) = ours.into_halves();
        thread::scope(|scope| {
            let reading = scope.spawn(move || reader.read(&mut [0; 9]).unwrap());
            let writing = scope.spawn(move || while writer.write_all(&[1; 70_000]).is_ok() {});
            let echo = scope.spawn(move || io::copy(&mut theirs, &mut io::sink()));
            closer.clone().close();
            closer.close();
            assert_eq!(reading.join().unwrap(), 0);
            writing.join().unwrap();
            // It ends, in order or not.
            let _ = echo.join().unwrap();
        });
    }
}

#[test]
fn an_orderly_end_is_distinguished_from_a_cut() {
    let cluster = Cluster::new();
    let (mut ours, mut theirs) = secured(&cluster);
    ours.write_all(b"all of it").unwrap();
    ours.close();
    let mut came = Vec::new();
    theirs.read_to_end(&mut came).unwrap();
    assert_eq!(came, b"all of it");

    // Dropped without closing, as if it had been cut on the path.
    let (mut ours, mut theirs) = secured(&cluster);
    ours.write_all(b"not all").unwrap();
    drop(ours);
    let mut came = [0; 7];
    theirs.read_exact(&mut came).unwrap();
    let error = theirs.read(&mut came).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
}

/// Two hosts, with `middle` between them: it gets both sockets after both ends
/// are secured.
fn through(cluster: &Cluster, middle: impl FnOnce(TcpStream, TcpStream) + Send) -> Connection {
    let (a, b) = (Security::Tls(cluster.host("a")), Security::Tls(cluster.host("b")));
    let (outer, address) = listen();
    let calling = TcpStream::connect(address).unwrap();
    let from = outer.accept().unwrap().0;
    let (inner, address) = listen();
    let to = TcpStream::connect(address).unwrap();
    let called = inner.accept().unwrap().0;
    let is_over = AtomicBool::new(false);
    let (ours, theirs) = thread::scope(|scope| {
        for (mut from, mut to) in [(&from, &to), (&to, &from)] {
            let is_over = &is_over;
            scope.spawn(move || {
                let mut bytes = [0; 4096];
                from.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
                while !is_over.load(SeqCst) {
                    let Ok(count) = from.read(&mut bytes) else { continue };
                    to.write_all(&bytes[..count]).unwrap();
                }
            });
        }
        let accepted = scope.spawn(|| b.accept(called).unwrap());
        let mut ours = a.connect(calling, "b").unwrap();
        let mut theirs = accepted.join().unwrap();
        // Afterwards nothing is in flight.
        common::welcome(&mut ours, &mut theirs);
        is_over.store(true, SeqCst);
        (ours, theirs)
    });
    from.set_read_timeout(None).unwrap();
    thread::scope(|scope| {
        scope.spawn(move || middle(from, to));
        scope.spawn(move || {
            let mut ours = ours;
            // It may be cut off.
            let _ = ours.write_all(&vec![9; 100_000]);
            ours.close();
        });
    });
    theirs
}

/// Reads to the end or to an error.
fn read_all(mut connection: Connection) -> (usize, Option<io::Error>) {
    let mut came = vec![0; 10_000];
    let mut total = 0;
    loop {
        match connection.read(&mut came) {
            Ok(0) => return (total, None),
            Ok(count) => {
                assert!(came[..count].iter().all(|byte| *byte == 9), "nothing but what was sent");
                total += count;
            }
            Err(error) => {
                let again = connection.read(&mut came).unwrap_err();
                assert_eq!(again.kind(), error.kind(), "and it stays so");
                return (total, Some(error));
            }
        }
    }
}

#[test]
fn cuts_and_changes_on_the_path_are_noticed() {
    let cluster = Cluster::new();
    let mut numbers = Numbers::new(7);
    for round in 0..12 {
        let (at, kind) = (numbers.below(100_000), round % 4);
        let theirs = through(&cluster, |mut from, mut to| {
            let mut sealed = Vec::new();
            from.read_to_end(&mut sealed).unwrap();
            assert!(sealed.len() > 100_000);
            match kind {
                0 => sealed[at] ^= 1,
                1 => sealed.truncate(at),
                // A record of 16384 bytes is left out, or repeated.
                2 => drop(sealed.drain(16_406..2 * 16_406)),
                _ => sealed.splice(16_406..16_406, sealed[..16_406].to_vec()).for_each(drop),
            }
            // The peer may have disconnected.
            let _ = to.write_all(&sealed);
            let _ = to.shutdown(Shutdown::Write);
        });
        let (total, error) = read_all(theirs);
        let error = error.expect("it is noticed");
        assert!(total < 100_000);
        let wanted =
            if kind == 1 { io::ErrorKind::UnexpectedEof } else { io::ErrorKind::InvalidData };
        assert_eq!(error.kind(), wanted, "{error}");
    }
}

#[test]
fn bytes_from_a_third_party_are_noticed() {
    let cluster = Cluster::new();
    for garbage in [b"DROVEWAY".to_vec(), vec![0; 50], vec![0xff; 70_000], vec![23, 3, 3, 0, 30]] {
        let theirs = through(&cluster, |mut from, mut to| {
            // The peer may have disconnected.
            let _ = to.write_all(&garbage);
            let _ = io::copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Write);
        });
        let (total, error) = read_all(theirs);
        assert_eq!((total, error.unwrap().kind()), (0, io::ErrorKind::InvalidData));
    }
}

/// A byte now and then doesn't extend the deadline.
#[test]
fn a_deadline_also_stops_a_peer_that_sends_byte_by_byte() {
    let cluster = Cluster::new();
    for (mut ours, mut theirs) in both(&cluster) {
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(SeqCst) && theirs.write_all(b"x").is_ok() {
                    thread::sleep(Duration::from_millis(5));
                }
            });
            ours.set_read_deadline(Some(Instant::now() + Duration::from_millis(100))).unwrap();
            let late = ours.read_exact(&mut [0; 1 << 20]).unwrap_err().kind();
            assert!(
                matches!(late, io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock),
                "{late:?}"
            );
            assert!(ours.read(&mut [0]).is_err());
            ours.set_read_deadline(None).unwrap();
            assert_eq!(ours.read(&mut [0]).unwrap(), 1, "it may go on when there is time");
            over.store(true, SeqCst);
        });
    }
}
