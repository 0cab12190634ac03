use proptest::prelude::*;

use super::*;
use crate::frame;
use crate::{Budget, Clears, Reply};

const LIMITS: Limits = Limits { ram_pages: 1000, end_page: 2000 };

fn query(answer: AnswerKind) -> Query {
    Query { version: VERSION, nonce: 77, answer, budget: Budget::default(), runs_max: 500 }
}

fn device(sectors: u64) -> Device {
    Device { name: "vda".to_owned(), sectors, ..Device::default() }
}

fn run(page: u64, sector: u64, pages: u32, device: u16) -> Run {
    Run { page, sector, pages, device }
}

/// An answer with these runs on two disks of 10,000 sectors each.
fn answer(runs: &[Run]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut reply = Reply::new(&query(AnswerKind::Map), "1.2.3", &mut bytes);
    for _ in 0..2 {
        reply.device(&device(10_000), &mut bytes);
    }
    for run in runs {
        reply.run(*run, &mut bytes);
    }
    reply.finish(Summary::default(), &mut bytes);
    bytes
}

fn received(bytes: &[u8]) -> Result<Option<CacheMap>, Fault> {
    let mut listener = Listener::new(&query(AnswerKind::Map), LIMITS);
    let state = listener.take(bytes)?;
    assert_eq!(state == State::Done, listener.summary.is_some());
    Ok(listener.into_map())
}

#[test]
fn bytes_before_the_greeting_are_skipped() {
    let mut left = answer(&[run(1, 2, 3, 0)]);
    left.truncate(left.len() - 5);
    // As if it answered another query.
    left[20] ^= 1;
    let bytes = [left, answer(&[run(4, 8, 5, 1)])].concat();
    let map = received(&bytes).unwrap().unwrap();
    assert_eq!(map.runs(), [run(4, 8, 5, 1)]);
    assert_eq!((map.summary().pages, map.summary().runs), (5, 1));
    assert_eq!(map.devices(), [device(10_000), device(10_000)]);
}

#[test]
fn an_answer_without_a_greeting_is_refused() {
    let mut listener = Listener::new(&query(AnswerKind::Map), LIMITS);
    let garbage = vec![0x44; 1 << 20];
    for _ in 0..4 {
        assert_eq!(listener.take(&garbage), Ok(State::Waiting));
        assert!(listener.kept.len() < Greeting::BYTES);
    }
    assert_eq!(listener.take(&garbage), Err(Fault::NoGreeting { bytes: 5 << 20 }));
}

#[test]
fn each_false_answer_has_its_fault() {
    let outside = |page, pages| Fault::OutsideRam { page, pages };
    let beyond = |sector, pages| Fault::OutsideDisk { sector, pages };
    let cases = [
        (vec![run(1999, 0, 2, 0)], outside(1999, 2)),
        (vec![run(u64::MAX, 0, 1, 0)], outside(u64::MAX, 1)),
        (vec![run(0, 9_993, 1, 0)], beyond(9_993, 1)),
        (vec![run(0, u64::MAX - 7, 1, 0)], beyond(u64::MAX - 7, 1)),
        (vec![run(0, 0, 1, 2)], Fault::Device { device: 2 }),
        (vec![run(0, 0, 0, 0)], Fault::Empty),
        (vec![run(0, 0, 600, 0); 4], Fault::Pages { pages_max: 2000 }),
        (vec![run(9, 9, 1, 0); 501], Fault::Runs { runs_max: 500 }),
    ];
    for (runs, fault) in cases {
        assert_eq!(received(&answer(&runs)), Err(fault));
    }
    // Anything within bounds is accepted, however odd.
    let map = received(&answer(&[run(0, 0, 600, 0), run(100, 16, 600, 1)])).unwrap().unwrap();
    assert_eq!((map.pages(), map.summary().pages), (700, 1200));
}

#[test]
fn an_endless_answer_is_refused() {
    let mut bytes = Vec::new();
    let reply = Reply::new(&query(AnswerKind::Map), "", &mut bytes);
    drop(reply);
    let endless = |kind, content: &[u8]| {
        let mut listener = Listener::new(&query(AnswerKind::Map), LIMITS);
        listener.take(&bytes).unwrap();
        let mut fault = None;
        for sequence in 0..10_000 {
            let mut one = Vec::new();
            frame::write(kind, sequence, 77, content, &mut one);
            if let Err(error) = listener.take(&one) {
                fault = Some(error);
                break;
            }
        }
        fault.expect("an end")
    };
    assert_eq!(endless(Kind::Device, &[0, 0, 0, 0]), Fault::Devices);
    assert_eq!(endless(Kind::Runs, &[]), Fault::Empty);
    assert_eq!(endless(Kind::Runs, &[0, 0, 0, 0]), Fault::Empty);
    assert_eq!(endless(Kind::Runs, &[0; 3]), Fault::CutShort);
    let summary = [0; 9];
    assert_eq!(endless(Kind::Summary, &summary), Fault::AfterEnd);
}

#[test]
fn refusals_and_other_versions_are_reported() {
    let mut bytes = Vec::new();
    Reply::new(&query(AnswerKind::Map), "9", &mut bytes).refuse("no\nrights", &mut bytes);
    assert_eq!(received(&bytes), Err(Fault::Refused { text: "norights".to_owned() }));
    let (program, clears) = ("9.0".to_owned(), Clears::default());
    let theirs = Greeting { version: 9, nonce: 77, program, clears };
    assert_eq!(received(&theirs.to_bytes()), Err(Fault::OtherVersion { theirs: 9 }));
    let mut listener = Listener::new(&query(AnswerKind::Greeting), LIMITS);
    assert_eq!(listener.take(&theirs.to_bytes()), Ok(State::Done));
    assert_eq!(listener.greeting(), Some(&theirs));
    assert_eq!(listener.into_map(), None);
}

#[test]
fn more_after_the_end_is_wrong() {
    for more in [&[0][..], &[0; 30]] {
        let bytes = [&answer(&[])[..], more].concat();
        assert_eq!(received(&bytes), Err(Fault::AfterEnd));
    }
}

proptest! {
    #[test]
    fn any_map_comes_back_in_any_pieces(
        fields in prop::collection::vec((0..900_u64, 1..=9_u32, 0..2_u16), 0..200),
        sizes in prop::collection::vec(1..3000_usize, 1..20),
    ) {
        let numbered = fields.iter().zip(0_u64..);
        let runs: Vec<Run> = numbered.map(|(&(s, n, d), nth)| run(nth * 9, s, n, d)).collect();
        let bytes = answer(&runs);
        let mut listener = Listener::new(&query(AnswerKind::Map), LIMITS);
        let (mut rest, mut state) = (&bytes[..], State::Waiting);
        for size in sizes.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (piece, after) = rest.split_at((*size).min(rest.len()));
            state = listener.take(piece)?;
            rest = after;
        }
        prop_assert_eq!(state, State::Done);
        let map = listener.into_map().unwrap();
        let devices = vec![device(10_000); 2];
        let expected = CacheMap::new(devices, runs, map.summary().clone());
        prop_assert_eq!(map, expected);
    }

    #[test]
    fn changed_answers_are_refused_or_end_early(
        at in any::<prop::sample::Index>(),
        bit in 0..8_u8,
        end in any::<prop::sample::Index>(),
    ) {
        let runs: Vec<Run> = (0..100).map(|nth| run(nth * 3, nth * 50, 2, 0)).collect();
        let mut bytes = answer(&runs);
        let whole = bytes.clone();
        let at = at.index(bytes.len());
        bytes[at] ^= 1_u8 << bit;
        prop_assert!(!matches!(received(&bytes), Ok(Some(_))));
        let end = end.index(whole.len());
        prop_assert_eq!(received(&whole[..end]), Ok(None));
    }
}
