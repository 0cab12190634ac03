use std::net::Shutdown;
use std::thread;

use cachemap::{Device, QueryFinder, Reply, Run, Summary};

use super::*;
use crate::qmp::played::played;

const RAM: Limits = Limits { ram_pages: 1000, end_page: 1000 };

fn patience(greeting_ms: u64, all_ms: u64) -> Patience {
    let ms = Duration::from_millis;
    Patience { greeting: ms(greeting_ms), all: ms(all_ms) }
}

/// The answer to a request, with `helper` at the port's other end.
fn asked(
    patience: Patience,
    helper: impl FnOnce(UnixStream, Query) + Send,
) -> Result<CacheMap, GuestError> {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut bytes = [0; Query::BYTES];
            theirs.read_exact(&mut bytes).unwrap();
            let query = QueryFinder::default().take(&bytes).unwrap();
            helper(theirs, query);
        });
        let answer = query(&ours, RAM, Budget::default(), patience);
        // Ends a helper that is still writing.
        ours.shutdown(Shutdown::Both).unwrap();
        answer
    })
}

fn with_runs(query: &Query, runs: &[Run]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut reply = Reply::new(query, "1", &mut bytes);
    reply.device(&Device { sectors: 8000, ..Device::default() }, &mut bytes);
    for run in runs {
        reply.run(*run, &mut bytes);
    }
    reply.finish(Summary::default(), &mut bytes);
    bytes
}

#[test]
fn the_rest_of_an_older_answer_in_the_port_is_skipped() {
    let run = Run { page: 5, sector: 16, pages: 7, device: 0 };
    let map = asked(patience(9000, 9000), |mut port, query| {
        let others = Query { nonce: query.nonce ^ 1, ..query };
        let left = with_runs(&others, &[run]);
        port.write_all(&left[3..]).unwrap();
        for byte in with_runs(&query, &[run]) {
            port.write_all(&[byte]).unwrap();
        }
    });
    assert_eq!(map.unwrap().runs(), [run]);
}

/// The helper continues only after its first part was passed on.
#[test]
fn parts_are_handed_on_while_the_helper_looks() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let (received, goes_on) = std::sync::mpsc::channel();
    let pages = u32::try_from(PART_PAGES_LEAST).unwrap();
    let run = |page: u32, pages| Run { page: page.into(), sector: 0, pages, device: 0 };
    let (summary, parts) = thread::scope(|scope| {
        scope.spawn(move || {
            let mut bytes = [0; Query::BYTES];
            theirs.read_exact(&mut bytes).unwrap();
            let query = QueryFinder::default().take(&bytes).unwrap();
            let mut bytes = Vec::new();
            let mut reply = Reply::new(&query, "1", &mut bytes);
            reply.device(&Device { sectors: 1 << 20, ..Device::default() }, &mut bytes);
            reply.run(run(0, pages), &mut bytes);
            reply.hand_on(&mut bytes);
            theirs.write_all(&bytes).unwrap();
            goes_on.recv().unwrap();
            bytes.clear();
            // Too little for a part of its own.
            reply.run(run(5000, 1), &mut bytes);
            reply.hand_on(&mut bytes);
            reply.run(run(0, 2), &mut bytes);
            reply.finish(Summary::default(), &mut bytes);
            theirs.write_all(&bytes).unwrap();
        });
        let mut parts = Vec::new();
        let mut hand_on = |part: CacheMap| {
            assert_eq!(part.devices().len(), 1);
            parts.push(part.runs().to_vec());
            let _ = received.send(());
        };
        let limits = Limits { ram_pages: 8000, end_page: 8000 };
        let patience = patience(9000, 9000);
        let all = query_in_parts(&ours, limits, Budget::default(), patience, &mut hand_on);
        (all.unwrap(), parts)
    });
    assert_eq!((summary.runs, summary.pages), (3, u64::from(pages) + 3));
    assert_eq!(parts, [vec![run(0, pages)], vec![run(0, 2), run(5000, 1)]]);
}

/// What arrived counts, however little it is, if the helper doesn't come to an end.
#[test]
fn what_a_helper_had_told_before_it_died_is_handed_on() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let run = Run { page: 5, sector: 16, pages: 7, device: 0 };
    let mut parts = Vec::new();
    let error = thread::scope(|scope| {
        scope.spawn(move || {
            let mut bytes = [0; Query::BYTES];
            theirs.read_exact(&mut bytes).unwrap();
            let query = QueryFinder::default().take(&bytes).unwrap();
            let mut bytes = Vec::new();
            let mut reply = Reply::new(&query, "1", &mut bytes);
            reply.device(&Device { sectors: 8000, ..Device::default() }, &mut bytes);
            reply.run(run, &mut bytes);
            reply.hand_on(&mut bytes);
            theirs.write_all(&bytes).unwrap();
        });
        let mut hand_on = |part: CacheMap| parts.extend(part.runs().to_vec());
        let patience = patience(9000, 9000);
        query_in_parts(&ours, RAM, Budget::default(), patience, &mut hand_on).unwrap_err()
    });
    assert!(matches!(error, GuestError::Closed), "{error}");
    assert_eq!(parts, [run]);
}

#[test]
fn silence_ends_the_request() {
    let silent = |port: UnixStream, _: Query| {
        // Until the other end gives up.
        let _ = (&port).read(&mut [0]);
    };
    let error = asked(patience(50, 9000), silent).unwrap_err();
    assert!(matches!(error, GuestError::Absent { .. }), "{error}");
    let greets = |mut port: UnixStream, query: Query| {
        let mut bytes = Vec::new();
        drop(Reply::new(&query, "1", &mut bytes));
        port.write_all(&bytes).unwrap();
        let _ = port.read(&mut [0]);
    };
    let error = asked(patience(9000, 100), greets).unwrap_err();
    assert!(matches!(error, GuestError::Late { .. }), "{error}");
    let closes = |port: UnixStream, _: Query| drop(port);
    let error = asked(patience(9000, 9000), closes).unwrap_err();
    assert!(matches!(error, GuestError::Closed), "{error}");
}

#[test]
fn one_byte_at_a_time_does_not_last_for_ever() {
    let slow = |mut port: UnixStream, _: Query| {
        while port.write_all(&[0x44]).is_ok() {
            thread::sleep(Duration::from_millis(1));
        }
    };
    let error = asked(patience(100, 9000), slow).unwrap_err();
    assert!(matches!(error, GuestError::Absent { .. }), "{error}");
}

#[test]
fn invalid_answers_are_errors() {
    let outside = Run { page: 999, sector: 0, pages: 2, device: 0 };
    let lies = [
        (vec![outside], "memory"),
        (vec![Run { page: 0, sector: 7999, pages: 1, device: 0 }], "disk"),
        (vec![Run { page: 0, sector: 0, pages: 1, device: 7 }], "disk 7"),
        (vec![Run { page: 0, sector: 0, pages: 900, device: 0 }; 3], "more than 2000 pages"),
    ];
    for (runs, word) in lies {
        let answer = asked(patience(9000, 9000), move |mut port, query| {
            // The reader may stop before the end.
            let _ = port.write_all(&with_runs(&query, &runs));
        });
        let error = answer.unwrap_err();
        assert!(matches!(&error, GuestError::Answer(_)), "{error}");
        assert!(error.to_string().contains(word), "{error}");
    }
    let refuses = |mut port: UnixStream, query: Query| {
        let mut bytes = Vec::new();
        Reply::new(&query, "1", &mut bytes).refuse("not today", &mut bytes);
        port.write_all(&bytes).unwrap();
    };
    let error = asked(patience(9000, 9000), refuses).unwrap_err();
    assert!(error.to_string().contains("not today"), "{error}");
}

#[test]
fn endless_garbage_ends_the_request() {
    let babbles = |mut port: UnixStream, _: Query| while port.write_all(&[0x44; 4096]).is_ok() {};
    let error = asked(patience(60_000, 60_000), babbles).unwrap_err();
    assert!(matches!(error, GuestError::Answer(Fault::NoGreeting { .. })), "{error}");
}

#[test]
fn a_helper_is_greeted() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut bytes = [0; Query::BYTES];
            theirs.read_exact(&mut bytes).unwrap();
            let query = QueryFinder::default().take(&bytes).unwrap();
            assert_eq!(query.answer, AnswerKind::Greeting);
            let greeting = Greeting {
                version: 9,
                nonce: query.nonce,
                program: "9.1".to_owned(),
                clears: cachemap::Clears::No,
            };
            theirs.write_all(&greeting.to_bytes()).unwrap();
        });
        let greeting = greet(&ours, Duration::from_secs(9)).unwrap();
        assert_eq!((greeting.version, greeting.program.as_str()), (9, "9.1"));
    });
}

#[test]
fn pages_above_the_gap_are_within_the_limits() {
    let cases = [
        (512 << 20, 512 << 20),
        (2 << 30, 2 << 30),
        // q35 has 2 GiB below the gap, and the rest from 4 GiB on.
        (3 << 30, 5 << 30),
        (64 << 30, 66 << 30),
        (1 << 40, (1 << 40) + (1022 << 30)),
    ];
    for (bytes, end) in cases {
        let limits = limits(bytes);
        assert_eq!((limits.ram_pages, limits.end_page), (bytes / 4096, end / 4096), "{bytes}");
    }
}

/// What a virtio-mem device has plugged need not be at its beginning.
#[test]
fn plugged_memory_may_be_anywhere_in_its_device() {
    const GIB: u64 = 1 << 30;
    let (_dir, qmp, player) = played(|command| {
        // As QEMU 7.2 answers.
        let said = match command["execute"].as_str() {
            Some("query-memory-size-summary") => {
                json!({ "base-memory": GIB, "plugged-memory": 3 * GIB })
            }
            Some("query-memory-devices") => json!([
                {"type": "dimm", "data": {"memdev": "/objects/m", "addr": 4 * GIB, "size": GIB,
                    "slot": 0, "node": 0, "hotplugged": false, "hotpluggable": true, "id": "d"}},
                {"type": "virtio-mem", "data": {"memdev": "/objects/vm0", "memaddr": 8 * GIB,
                    "block-size": 2 << 20, "size": 2 * GIB, "node": 0, "max-size": 64 * GIB,
                    "requested-size": 2 * GIB, "id": "m0"}}
            ]),
            _ => return None,
        };
        Some(format!("{}\n", json!({ "return": said, "id": command["id"] })))
    });
    let qmp = qmp.unwrap();
    let pages = |bytes: u64| bytes / PAGE_BYTES;
    let expected = Limits { ram_pages: pages(4 * GIB), end_page: pages(72 * GIB) };
    assert_eq!(limits_of(&qmp).unwrap(), expected);
    drop(qmp);
    player.join().unwrap();
}
