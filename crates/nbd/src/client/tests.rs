use std::collections::HashMap;
use std::io::{Read, Write};
use std::sync::mpsc::{Receiver, Sender, channel};

use super::*;
use crate::handshake::{Answer, BlockSizes, Info, OptionCode, OptionHeader, OptionReplyHeader};
use crate::server::{self, Connection, Export, Request, RequestKind};
use crate::transmission::{Command, RequestHeader, SimpleReply};
use crate::{Errno, ExportFlags};

const DISK: usize = 1 << 20;

fn settings(in_flight_max: usize) -> Settings {
    Settings { in_flight_max, ..Settings::default() }
}

/// A client whose outcomes are sent to a channel.
fn reporting(socket: UnixStream, in_flight_max: usize) -> (Client<u32>, Receiver<(u32, Outcome)>) {
    let (report, reported) = channel();
    let client = Client::over(socket, "vda", &settings(in_flight_max), move |tag, outcome| {
        let _ = report.send((tag, outcome));
    });
    (client.unwrap(), reported)
}

/// This crate's server with a disk in memory. Requests at `spoiled` fail.
fn serve(socket: UnixStream, spoiled: u64) -> (Vec<u8>, Vec<Request>) {
    let exports = [Export { name: "vda".to_owned(), bytes: DISK as u64 }];
    let negotiated = server::negotiate(socket, &exports).unwrap().unwrap();
    let Connection { mut requests, replier, .. } = negotiated;
    let (mut disk, mut seen) = (vec![0xee; DISK], Vec::new());
    while let Ok(Some(request)) = requests.next_request() {
        seen.push(request);
        let from = usize::try_from(request.offset).unwrap();
        let range = &mut disk[from..from + request.bytes as usize];
        match request.kind {
            RequestKind::Write => {
                for piece in range.chunks_mut(1000) {
                    requests.read_payload(piece).unwrap();
                }
            }
            RequestKind::WriteZeroes | RequestKind::Trim => range.fill(0),
            RequestKind::Flush => {}
        }
        if request.offset == spoiled {
            replier.fail(request.cookie, Errno::NO_SPACE).unwrap();
        } else {
            replier.ok(request.cookie).unwrap();
        }
    }
    (disk, seen)
}

#[test]
fn writes_reach_the_server_in_order() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let server = thread::spawn(move || serve(theirs, u64::MAX));
    let (client, reported) = reporting(ours, 4);
    assert_eq!(client.info().bytes, DISK as u64);
    let mut expected = vec![0xee; DISK];
    // The writes overlap, but this server keeps the order.
    for round in 0..200_u32 {
        let from = (round as usize * 7919 * 3) % (DISK - 5000);
        if round % 5 == 4 {
            client.write_zeroes(from as u64, 5000, round).unwrap();
            expected[from..from + 5000].fill(0);
        } else {
            let bytes = u8::try_from(round).unwrap();
            client.write(from as u64, &[bytes; 3001], round).unwrap();
            expected[from..from + 3001].fill(bytes);
        }
    }
    client.flush(200).unwrap();
    assert!(reported.iter().take(201).all(|(_, outcome)| outcome.is_ok()));
    drop(client);
    let (disk, seen) = server.join().unwrap();
    assert!(disk == expected);
    assert_eq!(seen.len(), 201);
    assert_eq!(seen.last().unwrap().kind, RequestKind::Flush);
}

#[test]
fn each_tag_comes_back_once_and_a_failure_stays_known() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let server = thread::spawn(move || serve(theirs, 8192));
    let (client, reported) = reporting(ours, 2);
    for tag in 0..5 {
        client.write(u64::from(tag) * 4096, &[1; 4096], tag).unwrap();
    }
    client.flush(5).unwrap();
    let outcomes: HashMap<_, _> = reported.iter().take(6).collect();
    let text = "the destination's disk did not write 4096 bytes at 8192: no space left";
    assert_eq!(client.failure().unwrap().to_string(), text);
    drop(client);
    assert!(reported.iter().next().is_none());
    assert_eq!(outcomes.len(), 6);
    assert!(outcomes.iter().all(|(tag, outcome)| outcome.is_err() == (*tag == 2)));
    server.join().unwrap();
}

#[test]
fn requests_outside_the_export_are_refused_at_once() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let server = thread::spawn(move || serve(theirs, u64::MAX));
    let (client, reported) = reporting(ours, 2);
    for (offset, bytes) in [(0, 0), (DISK as u64 - 1, 2), (u64::MAX, 1), (0, u64::MAX)] {
        let refused = client.write_zeroes(offset, bytes, 0);
        assert!(matches!(refused, Err(ClientError::Outside { .. })), "{offset} {bytes}");
    }
    drop(client);
    assert!(server.join().unwrap().1.is_empty());
    assert!(reported.iter().next().is_none());
}

#[test]
fn an_export_that_is_not_there_is_refused_in_the_servers_words() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let exports = [Export { name: "other".to_owned(), bytes: 512 }];
    let server = thread::spawn(move || server::negotiate(theirs, &exports).map(|_| ()));
    let refused = Client::over(ours, "vda", &settings(1), |_: (), _| {}).unwrap_err();
    let text = "the NBD server refuses the export 'vda': no export is called 'vda'";
    assert_eq!(refused.to_string(), text);
    assert!(matches!(server.join().unwrap(), Err(server::ServerError::HungUp)));
}

/// A server that does what this crate's server never does. It negotiates an export
/// and returns each request.
struct Odd {
    socket: UnixStream,
}

impl Odd {
    fn new(mut socket: UnixStream, flags: ExportFlags, sizes: BlockSizes) -> Self {
        use crate::handshake::Greeting;
        socket.write_all(&Greeting { flags: 3 }.to_bytes()).unwrap();
        let mut heard = [0; 4 + OptionHeader::BYTES + 4 + 3 + 2];
        socket.read_exact(&mut heard).unwrap();
        let infos =
            [Info::Export { bytes: DISK as u64, flags }, Info::BlockSizes(sizes), Info::Other(2)];
        let option = OptionCode::GO;
        for info in infos {
            let mut content = Vec::new();
            info.write(&mut content);
            let bytes = u32::try_from(content.len()).unwrap();
            let header = OptionReplyHeader { option, answer: Answer::INFO, bytes };
            socket.write_all(&header.to_bytes()).unwrap();
            socket.write_all(&content).unwrap();
        }
        let ack = OptionReplyHeader { option, answer: Answer::ACK, bytes: 0 };
        socket.write_all(&ack.to_bytes()).unwrap();
        Self { socket }
    }

    fn next(&mut self) -> Option<(RequestHeader, Vec<u8>)> {
        let mut header = [0; RequestHeader::BYTES];
        self.socket.read_exact(&mut header).ok()?;
        let header = RequestHeader::parse(&header).unwrap();
        let bytes = if header.command == Command::WRITE { header.bytes as usize } else { 0 };
        let mut payload = vec![0; bytes];
        self.socket.read_exact(&mut payload).unwrap();
        Some((header, payload))
    }

    fn answer(&mut self, cookie: u64) {
        let reply = SimpleReply { cookie, outcome: Ok(()) };
        self.socket.write_all(&reply.to_bytes()).unwrap();
    }
}

const FLUSH: ExportFlags = ExportFlags(ExportFlags::HAS_FLAGS.0 | ExportFlags::FLUSH.0);

#[test]
fn large_requests_go_out_in_parts_and_zeroes_as_bytes_if_they_must() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let sizes = BlockSizes { minimum: 512, preferred: 4096, maximum: 100_000 };
    let server = thread::spawn(move || {
        let mut odd = Odd::new(theirs, FLUSH, sizes);
        let (mut seen, mut kept) = (Vec::new(), Vec::new());
        while let Some((header, payload)) = odd.next() {
            seen.push((header.command, header.offset, payload));
            kept.push(header.cookie);
            // Answers in reverse order.
            if kept.len() == 2 {
                kept.drain(..).rev().for_each(|cookie| odd.answer(cookie));
            }
        }
        seen
    });
    let (client, reported) = reporting(ours, 2);
    let unaligned = client.write(100, &[1; 512], 0);
    assert!(matches!(unaligned, Err(ClientError::Unaligned { minimum: 512, .. })));
    let data: Vec<u8> = (0..250_368_u32).map(|at| at.to_le_bytes()[1]).collect();
    client.write(512, &data, 1).unwrap();
    client.write_zeroes(0, 99_840, 2).unwrap();
    client.write_zeroes(512, 512, 3).unwrap();
    client.flush(4).unwrap();
    let mut tags: Vec<_> =
        reported.iter().take(4).map(|(tag, outcome)| (tag, outcome.is_ok())).collect();
    drop(client);
    tags.sort_unstable();
    assert_eq!(tags, [(1, true), (2, true), (3, true), (4, true)]);
    let seen = server.join().unwrap();
    let shape: Vec<_> = seen.iter().map(|(_, offset, bytes)| (*offset, bytes.len())).collect();
    assert_eq!(
        shape,
        [(512, 99_840), (100_352, 99_840), (200_192, 50_688), (0, 99_840), (512, 512), (0, 0)]
    );
    assert!(seen[..3].iter().flat_map(|(_, _, bytes)| bytes).eq(&data));
    assert!(seen[3].0 == Command::WRITE && seen[3].2.iter().all(|byte| *byte == 0));
}

#[test]
fn exports_of_no_use_are_refused_before_anything_is_written() {
    let read_only = FLUSH | ExportFlags::READ_ONLY;
    for (flags, text) in [(read_only, "is read-only"), (ExportFlags(1), "can't be flushed")] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let server = thread::spawn(move || Odd::new(theirs, flags, BlockSizes::default()));
        let refused = Client::over(ours, "vda", &settings(1), |_: (), _| {}).unwrap_err();
        assert!(refused.to_string().ends_with(text), "{refused}");
        server.join().unwrap();
    }
}

/// A client with two places and three requests, of which the server has received
/// two. Checks that all fail once `how` has ended the connection.
fn broken_off(
    how: impl FnOnce(Odd, &Client<u32>) -> Option<Odd>,
) -> (Client<u32>, Receiver<(u32, Outcome)>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let server = thread::spawn(move || {
        let mut odd = Odd::new(theirs, FLUSH, BlockSizes::default());
        odd.next().unwrap();
        odd.next().unwrap();
        odd
    });
    let (client, reported) = reporting(ours, 2);
    client.write(0, &[1; 512], 0).unwrap();
    client.write(512, &[1; 512], 1).unwrap();
    thread::scope(|scope| {
        // Waits for a place until the connection ends.
        let late = scope.spawn(|| client.write(1024, &[1; 512], 2));
        let odd = how(server.join().unwrap(), &client);
        let accepted = match late.join().unwrap() {
            Ok(()) => 3,
            Err(ClientError::Failed(_)) => 2,
            Err(other) => panic!("{other}"),
        };
        let mut tags: Vec<_> = reported
            .iter()
            .take(accepted)
            .map(|(tag, outcome)| {
                assert!(outcome.is_err());
                tag
            })
            .collect();
        tags.sort_unstable();
        assert_eq!(tags, [0, 1, 2][..accepted]);
        drop(odd);
    });
    assert!(matches!(client.flush(9), Err(ClientError::Failed(_))));
    (client, reported)
}

#[test]
fn a_server_that_dies_fails_all_that_is_unanswered() {
    let (client, _) = broken_off(|odd, _| {
        drop(odd);
        None
    });
    let failure = client.failure().unwrap();
    assert!(matches!(failure, Failure::Broken(_)), "{failure}");
}

#[test]
fn a_reply_to_no_request_ends_the_connection() {
    let (client, _) = broken_off(|mut odd, _| {
        odd.answer(0xdead_beef);
        Some(odd)
    });
    assert!(client.failure().unwrap().to_string().contains("a reply to no request"));
}

#[test]
fn a_client_is_stopped_while_the_server_does_not_answer() {
    let (client, _) = broken_off(|odd, client| {
        client.stop();
        Some(odd)
    });
    assert_eq!(client.failure(), Some(Failure::Stopped));
}

#[test]
fn a_dropped_client_reports_unanswered_requests() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let server = thread::spawn(move || Odd::new(theirs, FLUSH, BlockSizes::default()));
    let (client, reported) = reporting(ours, 2);
    client.write(0, &[1; 512], 7).unwrap();
    drop(client);
    assert_eq!(reported.iter().collect::<Vec<_>>(), [(7, Err(Failure::Stopped))]);
    server.join().unwrap();
}

#[test]
fn nothing_hangs_when_the_callback_panics() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let server = thread::spawn(move || {
        let mut odd = Odd::new(theirs, FLUSH, BlockSizes::default());
        let (header, _) = odd.next().unwrap();
        odd.answer(header.cookie);
        odd
    });
    let (told, hears): (Sender<()>, _) = channel();
    let client = Client::over(ours, "vda", &settings(2), move |(), _| {
        drop(told.clone());
        panic!("as a test");
    });
    let client = client.unwrap();
    client.write(0, &[1; 512], ()).unwrap();
    // Each waits for a place, until there will be none.
    let refused = loop {
        if let Err(error) = client.flush(()) {
            break error;
        }
    };
    assert!(matches!(refused, ClientError::Failed(Failure::Broken(_))), "{refused}");
    drop((client, hears));
    server.join().unwrap();
}
