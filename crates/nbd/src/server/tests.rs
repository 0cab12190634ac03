use std::io::{Cursor, Read, Write};

use super::*;
use crate::handshake::{Answer, Go, Greeting, Info, OptionCode, OptionHeader, OptionReplyHeader};

fn exports() -> Vec<Export> {
    vec![
        Export { name: "vda".to_owned(), bytes: 1 << 30 },
        Export { name: "vdb".to_owned(), bytes: 512 },
    ]
}

fn option(code: OptionCode, content: &[u8]) -> Vec<u8> {
    let bytes = u32::try_from(content.len()).unwrap();
    let mut out = OptionHeader { option: code, bytes }.to_bytes().to_vec();
    out.extend_from_slice(content);
    out
}

fn go(name: &str) -> Vec<u8> {
    let mut content = Vec::new();
    Go { name }.write(&mut content).unwrap();
    content
}

/// Negotiates with a client that sends these flags and messages. Returns the outcome and
/// what the server sends after its greeting.
fn negotiated(flags: u32, said: &[Vec<u8>]) -> (Result<Option<usize>, ServerError>, Vec<u8>) {
    let mut from = flags.to_be_bytes().to_vec();
    from.extend(said.concat());
    let mut to = Vec::new();
    let chosen = choose(&from[..], &mut to, &exports());
    let greeting = Greeting::parse(to.first_chunk().unwrap()).unwrap();
    assert_eq!(greeting.flags, 3);
    (chosen, to.split_off(Greeting::BYTES))
}

fn replies(said: Vec<u8>) -> Vec<(OptionCode, Answer, Vec<u8>)> {
    let (mut said, mut replies) = (Cursor::new(said), Vec::new());
    let mut header = [0; OptionReplyHeader::BYTES];
    while said.read_exact(&mut header).is_ok() {
        let header = OptionReplyHeader::parse(&header).unwrap();
        let mut content = vec![0; header.bytes as usize];
        said.read_exact(&mut content).unwrap();
        replies.push((header.option, header.answer, content));
    }
    replies
}

#[test]
fn a_client_chooses_after_unsupported_options_and_queries() {
    let said = [
        option(OptionCode(11), &[]),
        option(OptionCode(8), &[]),
        option(OptionCode::LIST, &[]),
        option(OptionCode::INFO, &go("vda")),
        option(OptionCode::GO, &go("nosuch")),
        option(OptionCode::GO, &go("vdb")),
    ];
    let (chosen, said) = negotiated(3, &said);
    assert_eq!(chosen.unwrap(), Some(1));
    let replies = replies(said);
    let answers: Vec<_> = replies.iter().map(|(option, answer, _)| (option.0, answer.0)).collect();
    let (unsupported, unknown) = (Answer::UNSUPPORTED.0, Answer::UNKNOWN.0);
    let expected = [
        (11, unsupported),
        (8, unsupported),
        (3, 2),
        (3, 2),
        (3, 1),
        (6, 3),
        (6, 3),
        (6, 1),
        (7, unknown),
        (7, 3),
        (7, 3),
        (7, 1),
    ];
    assert_eq!(answers, expected);
    assert_eq!(replies[2].2, b"\0\0\0\x03vda");
    assert_eq!(replies[8].2, b"no export is called 'nosuch'");
    let Ok(Info::Export { bytes: 512, flags }) = Info::parse(&replies[9].2) else { panic!() };
    assert_eq!(flags.0, 0b110_0101);
    let Ok(Info::BlockSizes(sizes)) = Info::parse(&replies[10].2) else { panic!() };
    assert_eq!((sizes.minimum, sizes.maximum), (1, 32 << 20));
}

#[test]
fn a_client_may_abort_without_choosing() {
    let (chosen, said) = negotiated(3, &[option(OptionCode::ABORT, &[])]);
    assert!(chosen.unwrap().is_none());
    assert_eq!(replies(said), [(OptionCode::ABORT, Answer::ACK, Vec::new())]);
}

#[test]
fn invalid_options_are_refused_and_the_negotiation_goes_on() {
    let said = [
        option(OptionCode::GO, b"xx"),
        option(OptionCode::LIST, b"x"),
        option(OptionCode::GO, &go("vda")),
    ];
    let (chosen, said) = negotiated(3, &said);
    assert_eq!(chosen.unwrap(), Some(0));
    let replies = replies(said);
    assert_eq!((replies[0].1, replies[1].1), (Answer::INVALID, Answer::INVALID));
}

#[test]
fn protocol_violations_end_the_negotiation() {
    let forever = vec![option(OptionCode::LIST, &[]); 300];
    assert!(matches!(negotiated(3, &forever).0, Err(ServerError::Client(_))));
    assert!(matches!(negotiated(4, &[]).0, Err(ServerError::Client(_))));
    let oldest = option(OptionCode::EXPORT_NAME, b"vda");
    assert!(matches!(negotiated(3, &[oldest]).0, Err(ServerError::Client(_))));
    assert!(matches!(negotiated(3, &[vec![0; 16]]).0, Err(ServerError::Client(_))));
    assert!(matches!(negotiated(3, &[]).0, Err(ServerError::HungUp)));
    let cut = option(OptionCode::GO, &go("vda"))[..20].to_vec();
    assert!(matches!(negotiated(3, &[cut]).0, Err(ServerError::HungUp)));
    let mut long = option(OptionCode::GO, &[]);
    long[12] = 0xff;
    assert!(matches!(negotiated(3, &[long]).0, Err(ServerError::Client(_))));
}

#[test]
fn replies_to_a_client_that_is_gone_fail() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(&3_u32.to_be_bytes()).unwrap();
    theirs.write_all(&option(OptionCode::GO, &go("vda"))).unwrap();
    let connection = negotiate(ours, &exports()).unwrap().unwrap();
    assert_eq!(connection.export, 0);
    connection.replier.ok(1).unwrap();
    drop(theirs);
    assert!(matches!(connection.replier.ok(2), Err(ServerError::Socket { .. })));
    assert!(matches!(connection.replier.clone().ok(3), Err(ServerError::Broken)));
    let mut requests = connection.requests;
    // The client left with unread data, which resets the connection.
    assert!(requests.next_request().is_err());
}

#[test]
fn a_reader_wakes_when_the_connection_is_shut_down() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(&3_u32.to_be_bytes()).unwrap();
    theirs.write_all(&option(OptionCode::GO, &go("vda"))).unwrap();
    let Connection { mut requests, replier, .. } = negotiate(ours, &exports()).unwrap().unwrap();
    let reader = std::thread::spawn(move || requests.next_request());
    replier.shut_down();
    assert!(matches!(reader.join().unwrap(), Err(ServerError::HungUp)));
}
