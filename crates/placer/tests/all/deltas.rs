//! Pages that arrive as deltas.

use std::sync::Arc;

use audit::{Delivery, Hash};
use page::{BlockId, Buffer, DeltaWriter, Deltas, Epoch, PAGE_BYTES, PART_BYTES, PageIndex};
use placer::{BlockPlan, Feeder, PlaceError, Placement, Placer};
use ram::Mapping;

use crate::common::QemuEnd;

const BLOCK: BlockId = BlockId(0);
const PAGES: u64 = 8;

fn body(byte: u8) -> [u8; PAGE_BYTES] {
    [byte; PAGE_BYTES]
}

struct Arrival {
    mapping: Arc<Mapping>,
    placer: Placer,
    _qemu: (QemuEnd, Feeder),
}

fn arrival() -> Arrival {
    let mapping = Arc::new(Mapping::own(PAGES * PAGE_BYTES as u64));
    let placement = Placement::Mapped(Arc::clone(&mapping));
    let (placer, qemu) = placer(placement);
    Arrival { mapping, placer, _qemu: qemu }
}

fn placer(placement: Placement) -> (Placer, (QemuEnd, Feeder)) {
    let qemu = QemuEnd::start();
    let feeder = Feeder::start(qemu.socket(), page::Pool::new(16 << 20)).unwrap();
    feeder.head(b"head", 2, false).unwrap();
    let bytes = PAGES * PAGE_BYTES as u64;
    let plans = vec![BlockPlan { name: "ram0".to_owned(), bytes, placement }];
    let placer = Placer::new(plans, feeder.handle()).unwrap().audited(Hash::fastest()).unwrap();
    (placer, (qemu, feeder))
}

impl Arrival {
    fn whole(&self, epoch: u32, page: u32, byte: u8) {
        let pages = [PageIndex(page)];
        self.placer.place_bodies(BLOCK, Epoch(epoch), &pages, &body(byte), Delivery::Body).unwrap();
    }

    /// The delta changes one part of the page, if it has a base.
    fn delta(
        &self,
        epoch: u32,
        page: u32,
        (base, part): (Option<u32>, u32),
        byte: u8,
    ) -> Result<(), PlaceError> {
        let mut writer = DeltaWriter::default();
        writer.begin(1);
        writer.push(&body(byte), base.map(|base| (Epoch(base), 1 << part)));
        let deltas = Deltas::parse(1, writer.bytes()).unwrap();
        let pages = [PageIndex(page)];
        self.placer.place_deltas(BLOCK, Epoch(epoch), &pages, deltas, &mut Buffer::default())
    }

    /// The first byte of each part.
    fn parts(&self, page: u32) -> Vec<u8> {
        let mut bytes = vec![0; PAGE_BYTES];
        self.mapping.read(PageIndex(page).offset(), &mut bytes).unwrap();
        bytes.chunks_exact(PART_BYTES).map(|part| part[0]).collect()
    }

    /// The audit's note of a page is what RAM has.
    fn assert_noted(&self, page: u32) {
        let mut bytes = vec![0; PAGE_BYTES];
        self.mapping.read(PageIndex(page).offset(), &mut bytes).unwrap();
        let ledger = self.placer.ledger().unwrap().block(BLOCK).unwrap();
        assert_eq!(ledger.not_as_placed(PageIndex(page), &bytes), []);
        bytes[77] ^= 1;
        assert_eq!(ledger.not_as_placed(PageIndex(page), &bytes), [PageIndex(page)]);
    }
}

#[test]
fn a_delta_changes_its_parts_of_the_base_and_nothing_else() {
    let arrival = arrival();
    arrival.whole(1, 3, 7);
    arrival.delta(2, 3, (Some(1), 4), 9).unwrap();
    arrival.delta(5, 3, (Some(2), 0), 8).unwrap();
    let mut expected = vec![7; 32];
    (expected[4], expected[0]) = (9, 8);
    assert_eq!(arrival.parts(3), expected);
    arrival.assert_noted(3);
    arrival.delta(6, 3, (None, 0), 1).unwrap();
    assert_eq!(arrival.parts(3), [1; 32]);
    arrival.assert_noted(3);
    assert_eq!(arrival.parts(2), [0; 32]);
}

#[test]
fn a_delta_that_came_already_or_is_older_changes_nothing() {
    let arrival = arrival();
    arrival.whole(1, 3, 7);
    arrival.delta(2, 3, (Some(1), 4), 9).unwrap();
    arrival.delta(2, 3, (Some(1), 4), 9).unwrap();
    arrival.whole(6, 3, 5);
    // By another lane that was slow.
    arrival.delta(4, 3, (Some(2), 7), 1).unwrap();
    arrival.delta(4, 3, (None, 0), 1).unwrap();
    assert_eq!(arrival.parts(3), [5; 32]);
    arrival.assert_noted(3);
}

#[test]
fn a_delta_to_what_is_not_here_is_refused_and_changes_nothing() {
    let arrival = arrival();
    arrival.whole(2, 3, 7);
    for base in [0, 1, 3] {
        let refused = arrival.delta(4, 3, (Some(base), 1), 9).unwrap_err();
        assert!(refused.only_this_lane(), "the source sends it whole by another");
        let said = refused.to_string();
        assert!(said.contains("page 3 of RAM block ram0") && said.contains("version 2"), "{said}");
    }
    assert_eq!(arrival.parts(3), [7; 32]);
    let outside = arrival.delta(4, 8, (Some(0), 1), 9);
    assert!(matches!(outside, Err(PlaceError::Outside { .. })));
    // The base of a page that was never sent is zeros: version 0.
    arrival.delta(4, 5, (Some(0), 1), 9).unwrap();
    assert_eq!(arrival.parts(5)[..3], [0, 9, 0]);
}

#[test]
fn there_are_as_many_deltas_as_pages_and_none_inline() {
    let arrival = arrival();
    let deltas = Deltas::parse(0, &[]).unwrap();
    let placed = arrival.placer.place_deltas(
        BLOCK,
        Epoch(1),
        &[PageIndex(1)],
        deltas,
        &mut Buffer::default(),
    );
    assert!(matches!(placed, Err(PlaceError::WrongLength { .. })));
    let (placer, _qemu) = placer(Placement::Inline);
    let placed = placer.place_deltas(BLOCK, Epoch(1), &[], deltas, &mut Buffer::default());
    assert!(matches!(placed, Err(PlaceError::NoBase { .. })));
}
