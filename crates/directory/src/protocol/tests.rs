use proptest::prelude::*;

use super::*;

fn split(bytes: &[u8]) -> (&[u8; HEADER_BYTES], &[u8]) {
    bytes.split_first_chunk().unwrap()
}

fn kind() -> impl Strategy<Value = RequestKind> {
    prop::sample::select(vec![RequestKind::Claim, RequestKind::Hold, RequestKind::Release])
}

fn answer() -> impl Strategy<Value = Answer> {
    let host = || "[a-z][a-z0-9._-]{0,63}".prop_map(|name| HostName::new(&name).unwrap());
    let few =
        prop::sample::select(["a", "b", "c"].map(|name| HostName::new(name).unwrap()).to_vec());
    prop_oneof![
        Just(Answer::Yours),
        host().prop_map(Answer::Held),
        host().prop_map(Answer::Coming),
        few.prop_map(Answer::Held),
    ]
}

proptest! {
    #[test]
    fn a_request_comes_back_as_it_went(
        kind in kind(), id: u32, host in "[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
        wait_ms in 0..100_000_u64,
        names in prop::collection::vec(any::<[u8; NAME_BYTES]>(), 0..=NAMES_MAX),
    ) {
        let names: Vec<Name> = names.into_iter().map(Name).collect();
        let host = HostName::new(&host).unwrap();
        let mut bytes = Vec::new();
        let wait = Duration::from_millis(wait_ms);
        write_request(kind, id, &host, &names, wait, &mut bytes);
        prop_assert_eq!(bytes.len(), request_bytes(&host, &names));
        let (header, body) = split(&bytes);
        let header = RequestHeader::parse(header).unwrap();
        prop_assert_eq!((header.kind, header.id), (kind, id));
        prop_assert_eq!((header.wait, header.body_bytes()), (wait.min(WAIT_MAX), body.len()));
        let mut came = Vec::new();
        prop_assert_eq!(header.read_body(body, &mut came).unwrap(), host);
        prop_assert_eq!(came, names);
        // A body that is one byte shorter or longer is refused.
        prop_assert!(header.read_body(&body[1..], &mut Vec::new()).is_err());
        let longer = [body, b"x".as_slice()].concat();
        prop_assert!(header.read_body(&longer, &mut Vec::new()).is_err());
    }

    #[test]
    fn a_reply_comes_back_as_it_went(
        id: u32, answers in prop::collection::vec(answer(), 0..=NAMES_MAX),
    ) {
        let mut bytes = Vec::new();
        write_answers(id, &answers, &mut bytes);
        let (header, body) = split(&bytes);
        let header = ReplyHeader::parse(header).unwrap();
        prop_assert_eq!((header.id, header.body_bytes()), (id, body.len()));
        prop_assert_eq!(header.refusal(body), None);
        let mut came = Vec::new();
        header.read_body(body, &mut came).unwrap();
        prop_assert_eq!(came, answers);
    }

    #[test]
    fn a_refusal_comes_back_cut_to_its_cap(id: u32, why in ".{0,2000}") {
        let mut bytes = Vec::new();
        write_refusal(id, &why, &mut bytes);
        let (header, body) = split(&bytes);
        let header = ReplyHeader::parse(header).unwrap();
        let text = header.refusal(body).unwrap();
        prop_assert!(header.id == id && why.starts_with(&text));
        prop_assert!(text.len() <= TEXT_BYTES_MAX && text.len() + 4 > why.len().min(TEXT_BYTES_MAX));
    }

    #[test]
    fn any_header_is_within_the_caps_or_refused(bytes: [u8; HEADER_BYTES], body: Vec<u8>) {
        let mut bytes = bytes;
        bytes[..2].copy_from_slice(&REQUEST_MAGIC.to_le_bytes());
        bytes[2] %= 5;
        if let Ok(header) = RequestHeader::parse(&bytes) {
            prop_assert!(header.body_bytes() <= LETTERS_MAX + NAMES_MAX * NAME_BYTES);
            let _ = header.read_body(&body, &mut Vec::new());
        }
        bytes[..2].copy_from_slice(&REPLY_MAGIC.to_le_bytes());
        bytes[2] %= 3;
        if let Ok(header) = ReplyHeader::parse(&bytes) {
            prop_assert!(header.body_bytes() <= NAMES_MAX * (1 + LETTERS_MAX + CODE_BYTES));
            let _ = header.read_body(&body, &mut Vec::new());
        }
    }
}

#[test]
fn a_reply_that_makes_no_sense_is_refused() {
    let reply = |fields: [usize; 3], body: &[u8]| {
        let mut bytes = Vec::new();
        write_reply_header(7, 0, fields, &mut bytes);
        let header = ReplyHeader::parse(split(&bytes).0)?;
        let mut answers = Vec::new();
        header.read_body(body, &mut answers).map(|()| answers)
    };
    let held = Answer::Held(HostName::new("a").unwrap());
    assert_eq!(reply([1, 1, 2], b"\x01a\x01\x00").unwrap(), [held]);
    for (fields, body) in [
        // A host that isn't in the table; no host; an invalid host name.
        ([1, 1, 2], &b"\x01a\x02\x00"[..]),
        ([1, 1, 2], b"\x01a\x00\x80"),
        ([1, 1, 2], b"\x01 \x01\x00"),
        // More hosts than announced, or fewer; one cut short; one too long.
        ([2, 1, 4], b"\x01a\x01b\x01\x00\x01\x00"),
        ([2, 2, 2], b"\x01a\x01\x00\x01\x00"),
        ([1, 1, 2], b"\x02a\x01\x00"),
        ([1, 1, 66], &[b'a'; 68]),
        // More hosts than answers.
        ([1, 2, 4], b"\x01a\x01b\x01\x00"),
        // Other lengths than announced.
        ([1, 1, 2], b"\x01a\x01"),
        ([1, 1, 2], b"\x01a\x01\x00\x00"),
        ([1, 1, 2], b"\x01"),
        ([NAMES_MAX + 1, 0, 0], b""),
    ] {
        assert!(reply(fields, body).is_err(), "{fields:?} {body:?}");
    }
}
