//! Written streams are split into what was written, however they arrive. Joined again in order, one
//! pass is the same stream; in any order, several passes leave the same memory.

use page::{PAGE_BYTES, PageIndex};
use proptest::prelude::*;
use xen::fuzzing::{Parts, changes, join, seeds, split, stream};
use xen::write::{self, page_data, record};
use xen::{DomainKind, PageKind, PageWord, StreamError, libxc};

/// Pages with ascending numbers, and the byte that each repeats.
fn pass() -> impl Strategy<Value = Vec<(PageWord, u8)>> {
    let page = (prop::sample::select(PageKind::ALL.to_vec()), any::<u8>());
    prop::collection::btree_map(0..24_u32, page, 1..12).prop_map(|pages| {
        let word = |page, kind| PageWord { page: PageIndex(page), kind };
        pages.into_iter().map(|(page, (kind, byte))| (word(page, kind), byte)).collect()
    })
}

fn domain() -> impl Strategy<Value = DomainKind> {
    prop_oneof![Just(DomainKind::Pv), Just(DomainKind::Hvm)]
}

/// A stream of these passes; the last one follows VERIFY if `verifies`.
fn written(
    domain: DomainKind,
    passes: &[Vec<(PageWord, u8)>],
    record_pages: usize,
    verifies: bool,
) -> Vec<u8> {
    let mut out = Vec::new();
    write::begin(&mut out, domain);
    for (nth, pages) in passes.iter().enumerate() {
        if verifies && nth + 1 == passes.len() {
            record(&mut out, libxc::VERIFY, &[]);
        }
        pages.chunks(record_pages).for_each(|pages| page_data(&mut out, pages));
    }
    write::end(&mut out, domain);
    out
}

fn whole(data: &[u8]) -> Parts {
    split(data, usize::MAX, usize::MAX).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]

    #[test]
    fn written_streams_are_split_into_what_was_written(
        domain in domain(),
        passes in prop::collection::vec(pass(), 1..5),
        record_pages in 1..8usize,
        verifies: bool,
        piece_bytes in prop_oneof![1..40usize, 3000..9000usize],
        pause_after in 1..6usize,
    ) {
        let data = written(domain, &passes, record_pages, verifies);
        let parts = split(&data, piece_bytes, pause_after).unwrap();
        let mut rest = Vec::new();
        write::begin(&mut rest, domain);
        if verifies {
            record(&mut rest, libxc::VERIFY, &[]);
        }
        write::end(&mut rest, domain);
        prop_assert_eq!(&parts.non_ram, &rest);
        let mut taken = parts.pages.iter();
        for (word, byte) in passes.iter().flatten() {
            let page = taken.next().unwrap();
            prop_assert_eq!(page.word, *word);
            let body = if word.kind.has_body() { vec![*byte; PAGE_BYTES] } else { Vec::new() };
            prop_assert_eq!(&page.body, &body);
        }
        prop_assert_eq!(taken.next(), None);
    }

    #[test]
    fn one_pass_is_joined_to_the_same_stream(
        domain in domain(),
        pass in pass(),
        record_pages in 1..8usize,
    ) {
        let data = written(domain, &[pass], record_pages, false);
        let joined = join(&whole(&data), record_pages, |_| {}).unwrap();
        prop_assert_eq!(joined, data);
    }

    #[test]
    fn pages_in_any_order_leave_the_same_memory(
        domain in domain(),
        passes in prop::collection::vec(pass(), 1..6),
        verifies: bool,
        batch_pages in 1..5usize,
        keys in prop::collection::vec(any::<u16>(), 32),
        repeats: bool,
    ) {
        let data = written(domain, &passes, 5, verifies);
        let parts = whole(&data);
        let joined = join(&parts, batch_pages, |batches| {
            if repeats {
                batches.extend_from_within(..);
            }
            let mut keys = keys.iter().cycle();
            batches.sort_by_cached_key(|_| keys.next());
        });
        let again = whole(&joined.unwrap());
        prop_assert_eq!(&again.non_ram, &parts.non_ram);
        prop_assert_eq!(changes(&again), changes(&parts));
    }

    #[test]
    fn a_damaged_stream_is_refused_or_split(
        seed in prop::sample::select(seeds()),
        damages in prop::collection::vec(
            (any::<prop::sample::Index>(), prop_oneof![Just(0_u8), Just(0xff), any::<u8>()], 0..8_u8),
            1..5,
        ),
    ) {
        let mut data = seed;
        for (at, byte, how) in damages {
            if data.is_empty() {
                break;
            }
            let at = at.index(data.len());
            match how {
                0 => data.truncate(at),
                1 => data.insert(at, byte),
                2 => {
                    data.remove(at);
                }
                _ => data[at] = byte,
            }
        }
        stream(&data);
    }

    #[test]
    fn any_bytes_are_refused_but_never_panic(data in prop::collection::vec(any::<u8>(), 0..600)) {
        stream(&data);
        prop_assert!(split(&data, 100, 1).is_err());
    }
}

/// So they begin deeper in the stream than random bytes do.
#[test]
fn the_seeds_are_whole_streams() {
    for seed in seeds() {
        stream(&seed);
        let parts = whole(&seed[1..]);
        assert!(!parts.pages.is_empty());
    }
    let (_, error) = *split(b"", 1, 1).unwrap_err();
    assert_eq!(error, StreamError::EndedEarly { place: "in the header of xl" });
}
