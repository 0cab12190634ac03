//! Streams from the writer are split into what was written, however they
//! arrive; and whatever the splitter takes out can be written back.

use page::{PAGE_BYTES, PageIndex};
use proptest::prelude::*;
use stream::fuzzing::{Taken, seed_blocks, split};
use stream::{Blocks, PartSection, StreamKind, write};

#[derive(Clone, Debug)]
struct Sent {
    block: usize,
    page: u32,
    byte: u8,
    body: bool,
}

fn sent() -> impl Strategy<Value = Sent> {
    (0..3usize, 0..16u32, any::<u8>(), any::<bool>()).prop_map(|(block, page, byte, body)| {
        let page = if block == 2 { 0 } else { page };
        Sent { block, page, byte, body }
    })
}

fn add(part: &mut PartSection<'_>, page: &Sent) {
    let name = &seed_blocks()[page.block].name;
    if page.body {
        part.body(name, PageIndex(page.page), &[page.byte; PAGE_BYTES]).unwrap();
    } else {
        part.fill(name, PageIndex(page.page), page.byte).unwrap();
    }
}

struct Stream {
    head: Vec<u8>,
    bytes: Vec<u8>,
    tail: Vec<u8>,
}

fn stream(sections: &[Vec<Sent>], footers: bool, kind: StreamKind, devices: &[u8]) -> Stream {
    let flush = kind == StreamKind::Multifd;
    let mut head = Vec::new();
    write::header(&mut head, footers.then_some("pc-q35-10.0"));
    let mut bytes = head.clone();
    write::ram_setup(&mut head, 7, &seed_blocks(), footers, false);
    write::ram_setup(&mut bytes, 7, &seed_blocks(), footers, flush);
    for (nth, pages) in sections.iter().enumerate() {
        let mut part = if nth + 1 == sections.len() {
            PartSection::begin_end(&mut bytes, 7, footers)
        } else {
            PartSection::begin(&mut bytes, 7, footers)
        };
        for page in pages {
            add(&mut part, page);
        }
        if flush {
            part.multifd_flush();
        }
        part.finish();
    }
    bytes.extend_from_slice(devices);
    let mut tail = Vec::new();
    PartSection::begin_end(&mut tail, 7, footers).finish();
    tail.extend_from_slice(devices);
    Stream { head, bytes, tail }
}

/// The stream that a destination would be fed if it placed all pages inline.
fn written_back(taken: &Taken) -> Vec<u8> {
    let head = taken.head.as_ref().unwrap();
    let mut out = head.bytes.clone();
    let mut at = 0;
    while at < taken.pages.len() {
        let epoch = taken.pages[at].epoch;
        let mut part = PartSection::begin(&mut out, head.ram_section, head.footers);
        while let Some(page) = taken.pages.get(at).filter(|page| page.epoch == epoch) {
            let name = &head.blocks[usize::from(page.block.0)].name;
            if page.body {
                part.body(name, page.page, &[page.first; PAGE_BYTES]).unwrap();
            } else {
                part.fill(name, page.page, page.first).unwrap();
            }
            at += 1;
        }
        part.finish();
    }
    out.extend_from_slice(taken.tail.as_ref().unwrap());
    out
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn written_streams_are_split_into_what_was_written(
        sections in prop::collection::vec(prop::collection::vec(sent(), 0..9), 1..5),
        footers: bool,
        multifd: bool,
        devices in prop::collection::vec(any::<u8>(), 0..300),
        piece_bytes in prop_oneof![1..40usize, 3000..9000usize],
        pause_after in 1..6usize,
    ) {
        let kind = if multifd { StreamKind::Multifd } else { StreamKind::Classic };
        let made = stream(&sections, footers, kind, &devices);
        let taken = split(kind, &made.bytes, piece_bytes, pause_after).unwrap();
        prop_assert_eq!(&taken.head.as_ref().unwrap().bytes, &made.head);
        prop_assert_eq!(taken.tail.as_ref().unwrap(), &made.tail);
        let mut pages = taken.pages.iter();
        for (nth, section) in sections.iter().enumerate() {
            for sent in section {
                let got = pages.next().unwrap();
                prop_assert_eq!(
                    (usize::from(got.block.0), got.page.0, got.first, got.body),
                    (sent.block, sent.page, sent.byte, sent.body)
                );
                prop_assert_eq!(got.epoch.0 as usize, nth + 1);
            }
        }
        prop_assert_eq!(pages.next(), None);

        let mut again = split(StreamKind::Classic, &written_back(&taken), 5000, 4).unwrap();
        // The other kind of stream has epochs by other marks.
        again.head.as_mut().unwrap().epoch_by_section =
            taken.head.as_ref().unwrap().epoch_by_section;
        // Sections without pages are not written back, so epochs shift.
        for (page, was) in again.pages.iter_mut().zip(&taken.pages) {
            page.epoch = was.epoch;
        }
        prop_assert_eq!(again, taken);
    }

    #[test]
    fn a_stream_cut_short_ends_early(
        sections in prop::collection::vec(prop::collection::vec(sent(), 0..4), 1..4),
        cut in any::<prop::sample::Index>(),
        multifd: bool,
    ) {
        let kind = if multifd { StreamKind::Multifd } else { StreamKind::Classic };
        let made = stream(&sections, true, kind, &[]);
        // The footer of END belongs to the tail, which the splitter does not
        // parse.
        let cut = cut.index(made.bytes.len() - 5);
        let (_, error) = *split(kind, &made.bytes[..cut], 4096, 3).unwrap_err();
        let ended_early = matches!(error, stream::StreamError::EndedEarly { .. });
        prop_assert!(ended_early, "{}", error);
    }

    #[test]
    fn any_bytes_are_refused_or_split_but_never_panic(
        data in prop::collection::vec(any::<u8>(), 0..600),
    ) {
        stream::fuzzing::main_stream(&data);
        stream::fuzzing::multifd_channel(&data);
    }
}

#[test]
fn the_seed_blocks_are_sound() {
    assert_eq!(Blocks::new(seed_blocks()).unwrap().list().len(), 3);
}
