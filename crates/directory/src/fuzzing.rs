//! The fuzzer's entry point (`workshop/fuzz/`), and its seeds.

use std::time::{Duration, Instant};

use content::{NAME_BYTES, Name};

use crate::directory::{Answer, Directory, Terms};
use crate::embedded::{Embedded, Limits};
use crate::host::HostName;
use crate::protocol::{
    HEADER_BYTES, NAMES_MAX, ReplyHeader, RequestKind, write_answers, write_refusal, write_request,
};
use crate::server::serve;

/// Takes any bytes as a client's requests to a small directory, and checks that all its replies
/// can be read. Then takes the same bytes as replies.
///
/// # Panics
/// If the crate has a fault.
pub fn connection(bytes: &[u8]) {
    let limits = Limits { entries_max: 512, terms: Terms::default() };
    let directory = Embedded::new(limits);
    let mut replies = Vec::new();
    // A breach of the protocol is an error.
    let _ = serve(bytes, &mut replies, &directory, &|host| host.as_str() != "stranger");
    assert!(directory.usage().entries <= directory.usage().entries_max);
    assert!(read_replies(&replies), "our own replies are read to their end");
    read_replies(bytes);
}

/// Whether the bytes are replies only.
fn read_replies(bytes: &[u8]) -> bool {
    let mut rest = bytes;
    let mut answers = Vec::new();
    while let Some((header, after)) = rest.split_first_chunk::<HEADER_BYTES>() {
        let Ok(header) = ReplyHeader::parse(header) else { return false };
        let Some((body, after)) = after.split_at_checked(header.body_bytes()) else { return false };
        if header.refusal(body).is_none() {
            if header.read_body(body, &mut answers).is_err() {
                return false;
            }
            assert!(answers.len() <= NAMES_MAX);
        }
        rest = after;
    }
    rest.is_empty()
}

/// Small valid connections, to mutate: requests of all kinds, and replies.
///
/// # Panics
/// Never: its host names are valid.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let [one, other, stranger] =
        ["host-1", "h", "stranger"].map(|name| HostName::new(name).expect("a name"));
    let names: Vec<Name> = (0..20).map(|byte| Name([byte; NAME_BYTES])).collect();
    let wait = Duration::from_secs(1);
    let mut all = Vec::new();
    let mut seeds = Vec::new();
    let requests = [
        (RequestKind::Claim, &one, &names[..]),
        (RequestKind::Claim, &other, &names[5..]),
        (RequestKind::Hold, &one, &names[..9]),
        (RequestKind::Release, &other, &names[7..12]),
        (RequestKind::Forget, &one, &[]),
        (RequestKind::Claim, &stranger, &names[..1]),
    ];
    for (id, (kind, host, names)) in (1..).zip(requests) {
        let mut request = Vec::new();
        write_request(kind, id, host, names, wait, &mut request);
        all.extend_from_slice(&request);
        seeds.push(request);
    }
    seeds.push(all);
    let directory = Embedded::new(Limits::default());
    let mut answers: Vec<Answer> = Vec::new();
    let until = Instant::now();
    directory.hold(&one, &names[..5], until).expect("it knows few hosts");
    directory.claim(&one, &names[..10], &mut answers, until).expect("it knows few hosts");
    directory.claim(&other, &names, &mut answers, until).expect("it knows few hosts");
    let mut replies = Vec::new();
    write_answers(7, &answers, &mut replies);
    write_refusal(8, "no", &mut replies);
    write_answers(9, &[], &mut replies);
    seeds.push(replies);
    seeds
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn seeds_are_sound() {
        for seed in seeds() {
            connection(&seed);
        }
        assert!(seeds().last().is_some_and(|replies| read_replies(replies)));
    }

    proptest! {
        #[test]
        fn changed_seeds_are_read_or_refused(
            seed in prop::sample::select(seeds()),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
            end in any::<prop::sample::Index>(),
        ) {
            let mut bytes = seed;
            for (place, byte) in changes {
                let place = place.index(bytes.len());
                bytes[place] = byte;
            }
            connection(&bytes);
            bytes.truncate(end.index(bytes.len()));
            connection(&bytes);
        }
    }
}
