//! Deliberate mistakes between the tap and the RAM: the audit finds the pages that they make
//! wrong, all of them, and no others.
//!
//! The source's pages go into batches and its ledger, as from a tap. The placer gets a list of
//! deliveries made from the same batches, in any order, which each mistake changes in its own
//! way. Which pages are wrong in the end is checked in the RAM itself, and not only by the audit.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use audit::{Delivery, Hash, Ledger, RANGE_PAGES};
use page::{Batch, BlockId, Epoch, Fill, PAGE_BYTES, PageIndex, Pool};
use placer::{BlockPlan, Feeder, Placement, Placer};
use ram::Mapping;

use crate::common::{QemuEnd, body};

/// More than one range of the ledger.
const PAGES: u32 = 4096 + 200;
const _: () = assert!(PAGES as usize > RANGE_PAGES);
const EPOCHS: u32 = 4;
/// Pages that change in each epoch after the first.
const WORKING_SET: std::ops::Range<u32> = 4000..4200;

/// Pseudorandom numbers from one seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, sides: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        u32::try_from((self.0 >> 16) % u64::from(sides)).unwrap()
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            let other = self.below(u32::try_from(at + 1).unwrap());
            items.swap(at, other as usize);
        }
    }
}

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

/// One page for the placer.
#[derive(Clone, Debug)]
struct Delivered {
    block: BlockId,
    epoch: u32,
    page: u32,
    bytes: Vec<u8>,
    fill: Option<u8>,
    by: Delivery,
}

impl Delivered {
    fn give(&self, placer: &Placer) {
        let (first, epoch) = (PageIndex(self.page), Epoch(self.epoch));
        match self.fill {
            Some(byte) => placer.place_fills(self.block, epoch, &[Fill { first, count: 1, byte }]),
            None => placer.place_bodies(self.block, epoch, &[first], &self.bytes, self.by),
        }
        .unwrap();
    }

    fn is(&self, block: u16, epoch: u32, page: u32) -> bool {
        (self.block, self.epoch, self.page) == (BlockId(block), epoch, page)
    }
}

/// The last content of each page at the source.
type Last = BTreeMap<(u16, u32), Content>;

/// What QEMU hands over: all pages in the first epoch, the working set in each.
fn hand_over(ledger: &Ledger, dice: &mut Dice) -> (Vec<Delivered>, Last) {
    let pool = Pool::new(8 << 20);
    let (mut deliveries, mut last) = (Vec::new(), Last::new());
    for epoch in 1..=EPOCHS {
        for block in 0..2_u16 {
            let pages = if epoch == 1 { 0..PAGES } else { WORKING_SET };
            let pages: Vec<u32> = pages.collect();
            for some in pages.chunks(100) {
                let mut batch = pool.take().unwrap();
                (batch.block, batch.epoch) = (BlockId(block), Epoch(epoch));
                for &page in some {
                    // Each page has different content in each epoch.
                    let kind = u8::try_from(dice.below(60)).unwrap() * 4;
                    let content = match dice.below(3) {
                        0 => Content::Fill(if epoch == 1 { 0 } else { kind }),
                        _ => Content::Body(kind + u8::try_from(epoch).unwrap() - 1),
                    };
                    put(&mut batch, page, content);
                    last.insert((block, page), content);
                    let fill = match content {
                        Content::Fill(byte) => Some(byte),
                        Content::Body(_) => None,
                    };
                    let by =
                        [Delivery::Body, Delivery::SameHost, Delivery::Rack, Delivery::Storage]
                            [dice.below(4) as usize];
                    let (block, bytes) = (BlockId(block), content.bytes());
                    deliveries.push(Delivered { block, epoch, page, bytes, fill, by });
                }
                ledger.bodies_handed_over(&batch, batch.bodies(), batch.epoch);
                ledger.fills_handed_over(&batch, batch.epoch);
            }
        }
    }
    (deliveries, last)
}

fn put(batch: &mut Batch, page: u32, content: Content) {
    match content {
        Content::Fill(byte) => batch.push_fill(PageIndex(page), byte),
        Content::Body(_) => {
            let at = batch.bodies().len() * PAGE_BYTES;
            batch.buffer_mut()[at..at + PAGE_BYTES].copy_from_slice(&content.bytes());
            batch.push_body(PageIndex(page), at);
        }
    }
}

/// A destination, and what it has in the end.
struct Destination {
    placer: Placer,
    mappings: Vec<Arc<Mapping>>,
    _qemu: QemuEnd,
    _feeder: Feeder,
}

impl Destination {
    fn new() -> Self {
        let qemu = QemuEnd::start();
        let feeder = Feeder::start(qemu.socket(), page::Pool::new(1 << 20)).unwrap();
        feeder.head(b"head", 2, false).unwrap();
        let bytes = u64::from(PAGES) * PAGE_BYTES as u64;
        let mappings: Vec<_> = (0..2).map(|_| Arc::new(Mapping::own(bytes))).collect();
        let plan = |nth: usize| BlockPlan {
            name: format!("ram{nth}"),
            bytes,
            placement: Placement::Mapped(Arc::clone(&mappings[nth])),
        };
        let placer = Placer::new(vec![plan(0), plan(1)], feeder.handle()).unwrap();
        let placer = placer.audited(Hash::fastest()).unwrap();
        Self { placer, mappings, _qemu: qemu, _feeder: feeder }
    }

    fn read(&self, block: u16, page: u32) -> Vec<u8> {
        let mut bytes = vec![0; PAGE_BYTES];
        self.mappings[usize::from(block)].read(PageIndex(page).offset(), &mut bytes).unwrap();
        bytes
    }

    /// The pages whose RAM differs from the source's.
    fn wrong(&self, last: &Last) -> BTreeSet<(u16, u32)> {
        let wrong = last
            .iter()
            .filter(|((block, page), content)| self.read(*block, *page) != content.bytes());
        wrong.map(|(place, _)| *place).collect()
    }

    /// The pages that the audit finds by what was placed.
    fn differences(&self, source: &Ledger) -> BTreeSet<(u16, u32)> {
        let ours = self.placer.ledger().unwrap();
        let mut found = BTreeSet::new();
        for ((number, source), (_, ours)) in source.blocks().zip(ours.blocks()) {
            let digests = source.digests().zip(ours.digests());
            for (range, _) in (0..).zip(digests).filter(|(_, (source, ours))| source != ours) {
                let entries = ours.entries(range).unwrap();
                let compared = source.compare(range, &entries).unwrap();
                found.extend(compared.differences.iter().map(|one| (number.0, one.page.0)));
            }
        }
        let is_same = source.totals() == ours.totals();
        assert_eq!(is_same, found.is_empty(), "totals tell whether anything differs");
        found
    }

    /// The pages that the deep audit finds by what RAM holds.
    fn not_as_placed(&self) -> BTreeSet<(u16, u32)> {
        let ledger = self.placer.ledger().unwrap();
        let mut found = BTreeSet::new();
        for ((number, block), mapping) in ledger.blocks().zip(&self.mappings) {
            let mut bytes = vec![0; PAGES as usize * PAGE_BYTES];
            mapping.read(0, &mut bytes).unwrap();
            let wrong = block.not_as_placed(PageIndex(0), &bytes);
            found.extend(wrong.iter().map(|page| (number.0, page.0)));
        }
        found
    }
}

/// The page of the working set whose last delivery is to be broken.
struct Target {
    block: u16,
    page: u32,
}

/// A change to the deliveries before they are placed.
type Mistake = fn(&mut Vec<Delivered>, &Target, &mut Dice);

fn at(deliveries: &mut [Delivered], block: u16, epoch: u32, page: u32) -> &mut Delivered {
    deliveries.iter_mut().find(|one| one.is(block, epoch, page)).unwrap()
}

const MISTAKES: [(&str, Mistake); 14] = [
    ("a stale batch is placed late, as if it were new", |all, to, _| {
        let mut stale = at(all, to.block, 1, to.page).clone();
        stale.epoch = EPOCHS;
        let newest = at(all, to.block, EPOCHS, to.page).clone();
        all.retain(|one| !one.is(to.block, EPOCHS, to.page));
        all.extend([newest, stale]);
    }),
    ("a name is resolved to another page's content", |all, to, _| {
        let other = at(all, to.block, 1, 17).bytes.clone();
        let mut one = at(all, to.block, EPOCHS, to.page).clone();
        (one.bytes, one.fill, one.by) = (other, None, Delivery::SameHost);
        *at(all, to.block, EPOCHS, to.page) = one;
    }),
    ("a fill is skipped", |all, to, _| {
        all.retain(|one| !one.is(to.block, EPOCHS, to.page));
    }),
    ("a fill has another byte", |all, to, _| {
        let one = at(all, to.block, EPOCHS, to.page);
        one.fill = Some(one.fill.unwrap_or(0) ^ 1);
    }),
    ("the epochs of two versions are swapped", |all, to, _| {
        at(all, to.block, EPOCHS, to.page).epoch = 99;
        at(all, to.block, EPOCHS - 1, to.page).epoch = EPOCHS;
        at(all, to.block, 99, to.page).epoch = EPOCHS - 1;
    }),
    ("what was handed back is dropped", |all, to, _| {
        // The destination had requested it as bytes, and its whole batch was lost.
        let first = to.page / 4 * 4;
        all.retain(|one| !(first..first + 4).any(|page| one.is(to.block, EPOCHS, page)));
    }),
    ("a page is placed beside its place", |all, to, _| {
        let beside = if to.page + 1 < WORKING_SET.end { to.page + 1 } else { to.page - 1 };
        at(all, to.block, EPOCHS, to.page).page = beside;
    }),
    ("a page is placed in another block", |all, to, _| {
        at(all, to.block, EPOCHS, to.page).block = BlockId(1 - to.block);
    }),
    ("two pages of a batch are swapped", |all, to, _| {
        let beside = if to.page + 1 < WORKING_SET.end { to.page + 1 } else { to.page - 1 };
        let other = at(all, to.block, EPOCHS, beside).clone();
        let one = at(all, to.block, EPOCHS, to.page);
        let (bytes, fill) = (one.bytes.clone(), one.fill);
        (one.bytes, one.fill) = (other.bytes, other.fill);
        let other = at(all, to.block, EPOCHS, beside);
        (other.bytes, other.fill) = (bytes, fill);
    }),
    ("a bit is flipped on the way", |all, to, dice| {
        let one = at(all, to.block, EPOCHS, to.page);
        one.fill = None;
        one.bytes[dice.below(4096) as usize] ^= 1 << dice.below(8);
    }),
    ("a decoder leaves what it had before at the end of a page", |all, to, _| {
        let before = at(all, to.block, EPOCHS - 1, to.page).bytes.clone();
        let one = at(all, to.block, EPOCHS, to.page);
        one.fill = None;
        one.bytes[4000..].copy_from_slice(&before[4000..]);
    }),
    ("a page is left out as out of date, and does not come again", |all, to, _| {
        all.retain(|one| !(one.is(to.block, EPOCHS, to.page) || one.is(to.block, 3, to.page)));
    }),
    ("a page that changed is left out as announced before", |all, to, _| {
        let mut announced = at(all, to.block, 1, to.page).clone();
        (announced.epoch, announced.by) = (0, Delivery::Storage);
        all.retain(|one| !(one.block.0 == to.block && one.page == to.page));
        all.push(announced);
    }),
    ("an epoch's number wraps around", |all, to, _| {
        at(all, to.block, EPOCHS, to.page).epoch = 0;
    }),
];

/// Places everything, in any order except for what a mistake has moved to the end.
fn place(destination: &Destination, deliveries: &[Delivered]) {
    deliveries.iter().for_each(|one| one.give(&destination.placer));
}

fn prepared(seed: u64) -> (Dice, Ledger, Vec<Delivered>, Last) {
    let mut dice = Dice(seed);
    let pages = u64::from(PAGES);
    let source = Ledger::new(Hash::fastest(), [pages, pages]).unwrap();
    let (mut deliveries, last) = hand_over(&source, &mut dice);
    dice.shuffle(&mut deliveries);
    (dice, source, deliveries, last)
}

#[test]
fn without_a_mistake_nothing_differs() {
    for seed in 1..4 {
        let (_, source, deliveries, last) = prepared(seed);
        let destination = Destination::new();
        place(&destination, &deliveries);
        assert!(destination.wrong(&last).is_empty());
        assert!(destination.differences(&source).is_empty());
        assert!(destination.not_as_placed().is_empty());
    }
}

#[test]
fn each_mistake_is_found_by_the_pages_that_it_makes_wrong() {
    for (name, mistake) in MISTAKES {
        let mut made = 0;
        for seed in 1..4 {
            let (mut dice, source, mut deliveries, last) = prepared(seed * 77);
            let page = WORKING_SET.start + dice.below(WORKING_SET.end - WORKING_SET.start);
            let target = Target { block: u16::try_from(dice.below(2)).unwrap(), page };
            mistake(&mut deliveries, &target, &mut dice);
            let destination = Destination::new();
            place(&destination, &deliveries);
            let wrong = destination.wrong(&last);
            made += wrong.len();
            assert_eq!(destination.differences(&source), wrong, "{name}, seed {seed}");
            assert!(destination.not_as_placed().is_empty(), "{name}: RAM is as it was placed");
        }
        assert!(made > 0, "{name}: it was never made");
    }
}

/// A change of RAM after it was written shows only when it is read back.
#[test]
fn ram_that_is_not_as_it_was_placed_is_found_by_reading_it_back() {
    let (mut dice, source, deliveries, last) = prepared(5);
    let destination = Destination::new();
    place(&destination, &deliveries);
    let mut changed = BTreeSet::new();
    for _ in 0..20 {
        let (block, page) = (dice.below(2), dice.below(PAGES));
        let mapping = &destination.mappings[block as usize];
        let offset = PageIndex(page).offset() + u64::from(dice.below(4096));
        let mut byte = [0];
        mapping.read(offset, &mut byte).unwrap();
        mapping.write(offset, &[byte[0] ^ 0x40]).unwrap();
        changed.insert((u16::try_from(block).unwrap(), page));
    }
    assert_eq!(destination.wrong(&last), changed);
    assert!(destination.differences(&source).is_empty());
    assert_eq!(destination.not_as_placed(), changed);
}
