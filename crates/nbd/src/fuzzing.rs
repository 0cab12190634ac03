//! Entry points for the fuzzers (`workshop/fuzz/`), and for the seeded runs in this
//! crate's tests: whatever the other end sends is read or refused, within the
//! caps.

use std::collections::HashSet;
use std::io;

use crate::client::{Flight, Part, choose as choose_export, negotiate};
use crate::handshake::{
    Answer, BlockSizes, Go, Greeting, Info, OptionCode, OptionHeader, OptionReplyHeader,
    PAYLOAD_BYTES_MAX,
};
use crate::reader::{Answered, Places};
use crate::server::{Export, RequestKind, RequestReader, Step, choose};
use crate::transmission::{Command, RequestHeader, SimpleReply};
use crate::{Errno, ExportFlags};

const EXPORT_BYTES: u64 = 1 << 20;
const PLACES: usize = 3;
const READ_BYTES: usize = 64;

/// Reads any bytes as a client's negotiation and requests. Returns how many
/// requests were served.
pub fn server(bytes: &[u8]) -> usize {
    let export = |name: &str| Export { name: name.to_owned(), bytes: EXPORT_BYTES };
    let exports = [export("vda"), export("vdb")];
    let mut from = bytes;
    let Ok(Some(chosen)) = choose(&mut from, io::sink(), &exports) else { return 0 };
    assert!(chosen < exports.len());
    let mut requests = RequestReader::new(from, EXPORT_BYTES);
    let (mut served, mut piece) = (0, [0; 700]);
    loop {
        let request = match requests.next() {
            Ok(Step::Serve(request)) => request,
            Ok(Step::Answer { .. }) => continue,
            Ok(Step::Goodbye) | Err(_) => return served,
        };
        served += 1;
        assert!(request.offset + u64::from(request.bytes) <= EXPORT_BYTES);
        match request.kind {
            RequestKind::Flush => assert_eq!(request.bytes, 0),
            RequestKind::Write => {
                assert!(0 < request.bytes && request.bytes <= PAYLOAD_BYTES_MAX);
                assert_eq!(requests.payload_left, request.bytes);
                let bytes = piece.len().min(request.bytes as usize);
                let _ = requests.read_payload(&mut piece[..bytes]);
            }
            RequestKind::WriteZeroes | RequestKind::Trim => assert!(request.bytes > 0),
        }
    }
}

/// Reads any bytes as a server's negotiation, then as its replies to a client with
/// more requests than places. Returns how many operations ended.
pub fn client(bytes: &[u8]) -> usize {
    let mut from = bytes;
    let Ok(info) = negotiate(&mut from, io::sink(), "vda") else { return 0 };
    assert!(info.flags.contains(ExportFlags::FLUSH));
    assert!(info.sizes.minimum.is_power_of_two() && info.sizes.minimum <= info.sizes.maximum);
    let mut flight = Flight::new(PLACES);
    let (mut begun, mut ended) = (0, HashSet::new());
    let part = Part { command: Command::WRITE, offset: 0, bytes: 4096 };
    while let Some((reply, rest)) = from.split_first_chunk() {
        from = rest;
        while flight.has_room() {
            let operation = flight.begin(begun);
            begun += 1;
            flight.launch(operation, part, true);
        }
        match SimpleReply::parse(reply).and_then(|reply| flight.answered(reply)) {
            Ok(Some((tag, _))) => assert!(tag < begun && ended.insert(tag), "it ends once"),
            Ok(None) => unreachable!("operations of one part"),
            Err(_) => break,
        }
    }
    assert_eq!(flight.take_all().len(), begun - ended.len());
    ended.len()
}

/// Reads any bytes as a server's negotiation, then as its replies to reads, with their
/// payloads. Returns how many reads ended.
pub fn reader(bytes: &[u8]) -> usize {
    let mut from = bytes;
    let Ok(info) = choose_export(&mut from, io::sink(), "vda") else { return 0 };
    assert!(info.sizes.minimum.is_power_of_two() && info.sizes.minimum <= info.sizes.maximum);
    let mut places = Places::new(PLACES);
    let (mut asked, mut ended) = (0, HashSet::new());
    while let Some((reply, rest)) = from.split_first_chunk() {
        from = rest;
        while places.has_room() {
            places.enter(0..READ_BYTES, asked);
            asked += 1;
        }
        let answered = SimpleReply::parse(reply).and_then(|reply| places.answered(reply));
        let Ok(Answered { place, payload }) = answered else { break };
        if let Some((range, buffer)) = payload {
            let rest = from.split_at_checked(range.len());
            places.filled(place, range, buffer, rest.is_some());
            let Some((_, rest)) = rest else { break };
            from = rest;
        }
        let (tag, _) = places.take(place).expect("its answer is there");
        assert!(tag < asked && ended.insert(tag), "it ends once");
    }
    let left = (0..PLACES).filter(|place| places.give_up(*place).is_some());
    assert_eq!(left.count(), asked - ended.len());
    ended.len()
}

/// The bytes of a small valid client, to mutate.
#[must_use]
pub fn seed_server() -> Vec<u8> {
    let mut out = 3_u32.to_be_bytes().to_vec();
    let mut option = |option, content: &[u8]| {
        let bytes = u32::try_from(content.len()).unwrap_or(0);
        out.extend_from_slice(&OptionHeader { option, bytes }.to_bytes());
        out.extend_from_slice(content);
    };
    let mut go = Vec::new();
    let _ = Go { name: "vda" }.write(&mut go);
    option(OptionCode(8), &[]);
    option(OptionCode::LIST, &[]);
    option(OptionCode::INFO, &go);
    option(OptionCode::GO, &go);
    let mut request = |command, cookie, offset, bytes, payload: &[u8]| {
        let header = RequestHeader { flags: 0, command, cookie, offset, bytes };
        out.extend_from_slice(&header.to_bytes());
        out.extend_from_slice(payload);
    };
    request(Command::WRITE, 1, 4096, 16, &[7; 16]);
    request(Command::WRITE_ZEROES, 2, 0, 1 << 20, &[]);
    request(Command::READ, 3, 0, 512, &[]);
    request(Command::TRIM, 4, 512, 512, &[]);
    request(Command::WRITE, 5, EXPORT_BYTES, 4, &[7; 4]);
    request(Command::FLUSH, 6, 0, 0, &[]);
    request(Command::DISCONNECT, 7, 0, 0, &[]);
    out
}

/// The bytes of a small valid server, to mutate.
#[must_use]
pub fn seed_client() -> Vec<u8> {
    let mut out = seed_negotiation();
    // The client's cookies: 1 x 3 + 0, 2 x 3 + 1, 3 x 3 + 2; then again.
    for (cookie, outcome) in [(3, Ok(())), (7, Err(Errno::NO_SPACE)), (12, Ok(())), (11, Ok(()))] {
        out.extend_from_slice(&SimpleReply { cookie, outcome }.to_bytes());
    }
    out
}

/// The bytes of a small valid server that is read from, to mutate.
#[must_use]
pub fn seed_reader() -> Vec<u8> {
    let mut out = seed_negotiation();
    for (cookie, outcome) in [(7, Ok(())), (3, Err(Errno::IO)), (11, Ok(())), (13, Ok(()))] {
        out.extend_from_slice(&SimpleReply { cookie, outcome }.to_bytes());
        out.resize(out.len() + if outcome.is_ok() { READ_BYTES } else { 0 }, 7);
    }
    out
}

fn seed_negotiation() -> Vec<u8> {
    let mut out = Greeting { flags: 3 }.to_bytes().to_vec();
    let mut reply = |answer, content: &[u8]| {
        let bytes = u32::try_from(content.len()).unwrap_or(0);
        let header = OptionReplyHeader { option: OptionCode::GO, answer, bytes };
        out.extend_from_slice(&header.to_bytes());
        out.extend_from_slice(content);
    };
    let flags = ExportFlags::HAS_FLAGS | ExportFlags::FLUSH | ExportFlags::WRITE_ZEROES;
    let sizes = BlockSizes { minimum: 1, preferred: 4096, maximum: PAYLOAD_BYTES_MAX };
    for info in [Info::Export { bytes: EXPORT_BYTES, flags }, Info::BlockSizes(sizes)] {
        let mut content = Vec::new();
        info.write(&mut content);
        reply(Answer::INFO, &content);
    }
    reply(Answer::ACK, &[]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seeds_are_sound() {
        assert_eq!(server(&seed_server()), 4);
        assert_eq!(client(&seed_client()), 4);
        assert_eq!(reader(&seed_reader()), 4);
    }

    #[test]
    fn sound_input_with_a_few_changes_is_read_or_refused() {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            usize::try_from(state >> 33).unwrap() % below.max(1)
        };
        for round in 0..20_000 {
            let mut bytes = match round % 3 {
                0 => seed_server(),
                1 => seed_client(),
                _ => seed_reader(),
            };
            for _ in 0..1 + next(4) {
                let at = next(bytes.len());
                match next(3) {
                    0 => bytes[at] = u8::try_from(next(256)).unwrap(),
                    1 => bytes[at] ^= 1 << next(8),
                    _ => bytes.truncate(at + 1),
                }
            }
            server(&bytes);
            client(&bytes);
            reader(&bytes);
        }
    }
}
