//! In whatever order, and however often, lanes deliver pages: in the end, the RAM is what the
//! source had.

use std::sync::{Arc, Barrier};
use std::thread;

use page::{BlockId, Epoch, Fill, PAGE_BYTES, PageIndex};
use placer::{BlockPlan, Feeder, Placement, Placer};
use proptest::prelude::*;
use ram::Mapping;

use crate::common::{Fed, QemuEnd, body, content_after};

const PAGES: u32 = 96;
const MAPPED: BlockId = BlockId(0);
const INLINE: BlockId = BlockId(1);

/// A page's content in one epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Body(u8),
    Fill(u8),
}

impl Content {
    fn bytes(self) -> Vec<u8> {
        match self {
            Self::Body(seed) => body(seed),
            Self::Fill(byte) => vec![byte; PAGE_BYTES],
        }
    }
}

#[derive(Clone, Debug)]
struct Sent {
    block: BlockId,
    epoch: Epoch,
    pages: Vec<(PageIndex, Content)>,
}

impl Sent {
    fn give(&self, placer: &Placer) {
        let fill = |&(first, content): &(PageIndex, Content)| match content {
            Content::Fill(byte) => Some(Fill { first, count: 1, byte }),
            Content::Body(_) => None,
        };
        let fills: Vec<_> = self.pages.iter().filter_map(fill).collect();
        placer.place_fills(self.block, self.epoch, &fills).unwrap();
        let is_body = |(_, content): &&(PageIndex, Content)| matches!(content, Content::Body(_));
        let bodies: Vec<_> = self.pages.iter().filter(is_body).collect();
        let pages: Vec<_> = bodies.iter().map(|(page, _)| *page).collect();
        let bytes: Vec<_> = bodies.iter().flat_map(|(_, content)| content.bytes()).collect();
        placer.place_bodies(self.block, self.epoch, &pages, &bytes, audit::Delivery::Body).unwrap();
    }
}

/// For each epoch, the pages that were sent, with some pages in each.
type Epochs = Vec<Vec<Option<Content>>>;

fn epochs() -> impl Strategy<Value = Epochs> {
    let content = prop_oneof![
        3 => any::<u8>().prop_map(Content::Body),
        3 => Just(Content::Fill(0)),
        1 => any::<u8>().prop_map(Content::Fill),
    ];
    let page = prop::option::weighted(0.6, content);
    prop::collection::vec(prop::collection::vec(page, PAGES as usize), 1..6)
}

/// The batches of all epochs, each at least once as a whole.
fn deliveries(block: BlockId, epochs: &Epochs, dice: &mut impl FnMut(usize) -> usize) -> Vec<Sent> {
    let mut deliveries = Vec::new();
    for (epoch, sent) in (0..).map(Epoch).zip(epochs) {
        let mut pages: Vec<_> = (0..)
            .map(PageIndex)
            .zip(sent)
            .filter_map(|(page, content)| content.map(|content| (page, content)))
            .collect();
        if dice(2) == 0 {
            shuffle(&mut pages, dice);
        }
        while !pages.is_empty() {
            let batch = pages.split_off(pages.len().saturating_sub(1 + dice(40)));
            let delivery = Sent { block, epoch, pages: batch };
            // A lane that dies before it acknowledges has the batch sent again.
            deliveries.extend(vec![delivery; 1 + dice(3)]);
        }
    }
    deliveries
}

fn shuffle<T>(items: &mut [T], dice: &mut impl FnMut(usize) -> usize) {
    for at in (1..items.len()).rev() {
        items.swap(at, dice(at + 1));
    }
}

/// Each page at the end, given what it was before.
fn last_of(epochs: &Epochs, before: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut pages = before.to_vec();
    for sent in epochs {
        for (page, content) in pages.iter_mut().zip(sent) {
            if let Some(content) = content {
                *page = content.bytes();
            }
        }
    }
    pages
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn the_last_epoch_is_what_remains(
        mapped in epochs(),
        inline in epochs(),
        preloaded in prop::collection::vec(any::<bool>(), PAGES as usize),
        seed in 1..u64::MAX,
    ) {
        let mut state = seed;
        let mut dice = |sides: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            usize::try_from(state >> 16).unwrap() % sides
        };
        let before: Vec<_> = preloaded
            .iter()
            .map(|&preloaded| if preloaded { body(0xfe) } else { vec![0; PAGE_BYTES] })
            .collect();
        let bytes = u64::from(PAGES) * PAGE_BYTES as u64;
        let mapping = Arc::new(Mapping::own(bytes));
        for (page, bytes) in (0..).map(PageIndex).zip(&before) {
            if bytes[0] != 0 {
                mapping.write(page.offset(), bytes).unwrap();
            }
        }
        let qemu = QemuEnd::start();
        let feeder = Feeder::start(qemu.socket(), page::Pool::new(1 << 20)).unwrap();
        feeder.head(b"head", 7, true).unwrap();
        let plan = |name: &str, placement| BlockPlan { name: name.to_owned(), bytes, placement };
        let plans = vec![
            plan("pc.ram", Placement::Mapped(Arc::clone(&mapping))),
            plan("pc.bios", Placement::Inline),
        ];
        let placer = Placer::new(plans, feeder.handle()).unwrap();

        let mut all = deliveries(MAPPED, &mapped, &mut dice);
        all.extend(deliveries(INLINE, &inline, &mut dice));
        shuffle(&mut all, &mut dice);
        let lanes = 4;
        thread::scope(|scope| {
            for lane in all.chunks(all.len().div_ceil(lanes).max(1)) {
                let placer = &placer;
                scope.spawn(move || lane.iter().for_each(|delivery| delivery.give(placer)));
            }
        });
        placer.close();
        feeder.tail(b"tail").unwrap();
        feeder.finish().unwrap();

        let expected = last_of(&mapped, &before);
        for (page, expected) in (0..).map(PageIndex).zip(&expected) {
            let mut found = vec![0; PAGE_BYTES];
            mapping.read(page.offset(), &mut found).unwrap();
            prop_assert!(&found == expected, "mapped {}", page);
        }
        let fed = Fed::parse(&qemu.end(), b"head", b"tail", 7, true);
        let found = content_after(&fed.records, "pc.bios", &before);
        for (page, (found, expected)) in found.iter().zip(last_of(&inline, &before)).enumerate() {
            prop_assert!(found == &expected, "inline page {}", page);
        }
    }
}

#[test]
fn of_concurrent_epochs_the_newest_is_last_in_the_stream() {
    const LANES: u32 = 4;
    const BATCHES: u32 = 100;
    const BATCH_PAGES: u32 = 32;
    const PAGES: u32 = BATCHES * BATCH_PAGES;
    let qemu = QemuEnd::start();
    let feeder = Feeder::start(qemu.socket(), page::Pool::new(64 << 20)).unwrap();
    feeder.head(b"head", 7, false).unwrap();
    let bytes = u64::from(PAGES) * PAGE_BYTES as u64;
    let plan = BlockPlan { name: "pc.ram".to_owned(), bytes, placement: Placement::Inline };
    let placer = Placer::new(vec![plan], feeder.handle()).unwrap();
    let begin = Barrier::new(LANES as usize);
    thread::scope(|scope| {
        for epoch in 1..=LANES {
            let (placer, begin) = (&placer, &begin);
            scope.spawn(move || {
                let bytes = vec![epoch.to_le_bytes()[0]; BATCH_PAGES as usize * PAGE_BYTES];
                begin.wait();
                for first in (0..PAGES).step_by(BATCH_PAGES as usize) {
                    let pages: Vec<_> = (first..first + BATCH_PAGES).map(PageIndex).collect();
                    placer
                        .place_bodies(
                            BlockId(0),
                            Epoch(epoch),
                            &pages,
                            &bytes,
                            audit::Delivery::Body,
                        )
                        .unwrap();
                }
            });
        }
    });
    feeder.tail(b"tail").unwrap();
    feeder.finish().unwrap();
    let mut last = vec![0; PAGES as usize];
    for record in Fed::parse(&qemu.end(), b"head", b"tail", 7, false).records {
        last[record.page] = record.bytes[0];
    }
    let wrong = last.iter().filter(|&&byte| u32::from(byte) != LANES).count();
    assert_eq!(wrong, 0, "pages whose last record is not the newest");
}
