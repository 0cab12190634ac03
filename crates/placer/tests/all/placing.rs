//! The placer's rules, one by one.

use std::sync::Arc;

use audit::{Delivery, Hash, Ledger};
use page::{BATCH_PAGES, BlockId, Epoch, Fill, PAGE_BYTES, PageIndex, Pool};
use placer::{BlockPlan, Feeder, PlaceError, Placement, Placer};
use ram::{DataRanges, Mapping};

use crate::common::{Fed, QemuEnd, body};

const BLOCK: BlockId = BlockId(0);
const PAGE: u64 = PAGE_BYTES as u64;

struct Arrival {
    qemu: QemuEnd,
    feeder: Feeder,
    placer: Placer,
}

fn arrival(bytes: u64, placement: Placement) -> Arrival {
    let qemu = QemuEnd::start();
    let feeder = Feeder::start(qemu.socket(), page::Pool::new(16 << 20)).unwrap();
    feeder.head(b"head", 2, false).unwrap();
    let plans = vec![BlockPlan { name: "ram0".to_owned(), bytes, placement }];
    let placer = Placer::new(plans, feeder.handle()).unwrap();
    Arrival { qemu, feeder, placer }
}

fn mapped(pages: u64) -> (Arc<Mapping>, Arrival) {
    let mapping = ram(pages * PAGE);
    let arrival = arrival(pages * PAGE, Placement::Mapped(Arc::clone(&mapping)));
    (mapping, arrival)
}

fn ram(bytes: u64) -> Arc<Mapping> {
    Arc::new(Mapping::own(bytes))
}

fn page_of(mapping: &Mapping, page: u32) -> Vec<u8> {
    let mut bytes = vec![0; PAGE_BYTES];
    mapping.read(PageIndex(page).offset(), &mut bytes).unwrap();
    bytes
}

fn fill(first: u32, count: u32, byte: u8) -> Fill {
    Fill { first: PageIndex(first), count, byte }
}

fn indices(pages: impl IntoIterator<Item = u32>) -> Vec<PageIndex> {
    pages.into_iter().map(PageIndex).collect()
}

#[test]
fn zeros_over_zeros_leave_a_hole() {
    let (mapping, Arrival { placer, .. }) = mapped(1_024);
    placer.place_fills(BLOCK, Epoch(0), &[fill(0, 1_024, 0)]).unwrap();
    assert_eq!(mapping.data_ranges().unwrap(), DataRanges::Known(vec![]));
    placer.place_fills(BLOCK, Epoch(1), &[fill(100, 200, 9)]).unwrap();
    let data = 100 * PAGE..300 * PAGE;
    assert_eq!(mapping.data_ranges().unwrap(), DataRanges::Known(vec![data]));
    placer.place_fills(BLOCK, Epoch(2), &[fill(100, 1, 0), fill(200, 824, 0)]).unwrap();
    assert_eq!(page_of(&mapping, 100), vec![0; PAGE_BYTES]);
    assert_eq!(page_of(&mapping, 101), vec![9; PAGE_BYTES]);
    // A page that was overwritten with zeros is known to be zero, though it's no hole: what it
    // holds is not even read.
    mapping.fill(100 * PAGE, 1, 5).unwrap();
    placer.place_fills(BLOCK, Epoch(3), &[fill(100, 1, 0)]).unwrap();
    assert_eq!(page_of(&mapping, 100)[0], 5);
}

#[test]
fn what_was_in_mapped_ram_before_is_zeroed() {
    let mapping = ram(64 * PAGE);
    let touched = [0, 5, 6, 7, 15, 16, 17, 31, 63];
    touched.iter().for_each(|page| mapping.fill(page * PAGE, 10, 1).unwrap());
    let arrival = arrival(64 * PAGE, Placement::Mapped(Arc::clone(&mapping)));
    arrival.placer.place_fills(BLOCK, Epoch(1), &[fill(20, 10, 9)]).unwrap();
    // Of pages that may hold something, this one happens to be zero.
    mapping.fill(23 * PAGE, PAGE, 0).unwrap();
    let before = mapping.data_ranges().unwrap();
    arrival.placer.place_fills(BLOCK, Epoch(2), &[fill(0, 64, 0)]).unwrap();
    // To read a hole would be enough to give it memory.
    assert_eq!(mapping.data_ranges().unwrap(), before, "holes stay holes");
    for page in 0..64 {
        assert_eq!(page_of(&mapping, page), vec![0; PAGE_BYTES], "{page}");
    }
}

/// Runs of fills that are skipped, written and stale in turn, over more than one of the audit's
/// ranges.
#[test]
fn the_audit_has_each_page_of_a_run() {
    const PAGES: u32 = 3 * 4096;
    for inline in [false, true] {
        let bytes = u64::from(PAGES) * PAGE;
        let placement = if inline { Placement::Inline } else { Placement::Mapped(ram(bytes)) };
        let Arrival { placer, qemu: _qemu, feeder: _feeder } = arrival(bytes, placement);
        let placer = placer.audited(Hash::fastest()).unwrap();
        let source = Ledger::new(Hash::fastest(), [u64::from(PAGES)]).unwrap();
        let mut batch = Pool::new(1).take().unwrap();
        for (epoch, fills) in [
            (1, vec![fill(4000, 200, 9), fill(0, 4000, 0), fill(4200, 4096, 0)]),
            (3, vec![fill(4100, 4, 7), fill(8192, 8, 0)]),
            (2, vec![fill(0, 8200, 0)]),
        ] {
            for run in &fills {
                for page in (run.first.0..).take(run.count as usize) {
                    batch.push_fill(PageIndex(page), run.byte);
                }
            }
            source.fills_handed_over(&batch, Epoch(epoch));
            batch.clear_fills();
            placer.place_fills(BLOCK, Epoch(epoch), &fills).unwrap();
        }
        assert_eq!(placer.ledger().unwrap().totals(), source.totals(), "inline: {inline}");
    }
}

#[test]
fn inline_zeros_are_fed_once_until_other_content_was() {
    let Arrival { qemu, feeder, placer } = arrival(64 * PAGE, Placement::Inline);
    placer.place_fills(BLOCK, Epoch(0), &[fill(0, 64, 0)]).unwrap();
    placer.place_fills(BLOCK, Epoch(1), &[fill(0, 64, 0)]).unwrap();
    placer.place_bodies(BLOCK, Epoch(2), &indices([3]), &body(1), Delivery::Body).unwrap();
    placer.place_fills(BLOCK, Epoch(3), &[fill(0, 64, 0)]).unwrap();
    placer.place_fills(BLOCK, Epoch(1), &[fill(0, 2, 0)]).unwrap();
    feeder.tail(b"tail").unwrap();
    feeder.finish().unwrap();
    let fed = Fed::parse(&qemu.end(), b"head", b"tail", 2, false);
    assert_eq!((fed.records.len(), fed.sections), (64 + 1 + 1, 3));
    assert_eq!((fed.records[65].page, fed.records[65].bytes[0]), (3, 0));
}

#[test]
fn more_fills_than_a_chunk_holds_arrive_all_the_same() {
    let pages = 200_000;
    let Arrival { qemu, feeder, placer } = arrival(u64::from(pages) * PAGE, Placement::Inline);
    placer.place_fills(BLOCK, Epoch(0), &[fill(0, pages, 0)]).unwrap();
    feeder.tail(b"tail").unwrap();
    feeder.finish().unwrap();
    // Not parsed: each page's 4,096 bytes would be 800 MB.
    let bytes = qemu.end();
    let sections = (pages as usize).div_ceil(59_000);
    assert!(bytes.len() >= 9 * pages as usize);
    assert!(bytes.len() <= 9 * pages as usize + sections * 300 + 8);
}

#[test]
fn after_close_nothing_is_written() {
    let (mapping, arrival) = mapped(2);
    let placer = &arrival.placer;
    placer.close();
    let late =
        placer.place_bodies(BLOCK, Epoch(0), &indices([0]), &body(1), Delivery::Body).unwrap_err();
    assert!(matches!(late, PlaceError::Closed) && late.only_this_lane());
    let fills = placer.place_fills(BLOCK, Epoch(9), &[fill(0, 2, 1)]);
    assert!(matches!(fills, Err(PlaceError::Closed)));
    for page in [0, 1] {
        assert_eq!(page_of(&mapping, page), [0; PAGE_BYTES]);
    }
}

#[test]
fn an_inline_page_after_the_tail_is_a_late_copy() {
    let Arrival { qemu, feeder, placer } = arrival(4 * PAGE, Placement::Inline);
    feeder.tail(b"tail").unwrap();
    let late =
        placer.place_bodies(BLOCK, Epoch(1), &indices([0]), &body(1), Delivery::Body).unwrap_err();
    assert!(late.only_this_lane(), "{late}");
    feeder.finish().unwrap();
    let late = placer.place_fills(BLOCK, Epoch(1), &[fill(0, 1, 0)]).unwrap_err();
    assert!(late.only_this_lane(), "{late}");
    assert_eq!(qemu.end(), b"headtail");
}

#[test]
fn invalid_pages_are_refused_with_nothing_placed() {
    for inline in [false, true] {
        let mapping = ram(8 * PAGE);
        let placement =
            if inline { Placement::Inline } else { Placement::Mapped(Arc::clone(&mapping)) };
        let Arrival { qemu, feeder, placer } = arrival(8 * PAGE, placement);
        let bodies = |block, pages: &[u32]| {
            let bytes = vec![1; pages.len() * PAGE_BYTES];
            let pages = indices(pages.iter().copied());
            placer.place_bodies(block, Epoch(1), &pages, &bytes, Delivery::Body).unwrap_err()
        };
        assert!(matches!(bodies(BlockId(1), &[0]), PlaceError::UnknownBlock { blocks: 1, .. }));
        assert!(matches!(bodies(BLOCK, &[0, 8]), PlaceError::Outside { .. }));
        assert!(matches!(bodies(BLOCK, &[u32::MAX, 0]), PlaceError::Outside { .. }));
        assert!(matches!(bodies(BLOCK, &[3, 3]), PlaceError::Twice { .. }));
        assert!(matches!(bodies(BLOCK, &[3, 4, 2, 4]), PlaceError::Twice { .. }));
        let many: Vec<_> = (0..=u32::try_from(BATCH_PAGES).unwrap()).collect();
        assert!(matches!(bodies(BLOCK, &many), PlaceError::TooManyPages { pages: 129 }));
        let short = placer.place_bodies(BLOCK, Epoch(1), &indices([0]), &[1; 100], Delivery::Body);
        assert!(matches!(short, Err(PlaceError::WrongLength { bytes: 100, pages: 1 })));

        let fills = |block, fills: &[Fill]| placer.place_fills(block, Epoch(1), fills).unwrap_err();
        assert!(matches!(fills(BlockId(9), &[fill(0, 1, 1)]), PlaceError::UnknownBlock { .. }));
        for outside in [fill(0, 9, 1), fill(8, 1, 1), fill(u32::MAX, u32::MAX, 1)] {
            let refused = fills(BLOCK, &[fill(0, 1, 1), outside]);
            assert!(matches!(refused, PlaceError::Outside { .. }), "{outside:?}");
        }
        let twice = fills(BLOCK, &[fill(0, 8, 1), fill(0, 1, 2)]);
        assert!(matches!(twice, PlaceError::Twice { .. }));
        placer.place_fills(BLOCK, Epoch(1), &[fill(8, 0, 1)]).unwrap();

        assert_eq!(mapping.data_ranges().unwrap(), DataRanges::Known(vec![]));
        feeder.finish().unwrap();
        assert_eq!(qemu.end(), b"head");
    }
}

#[test]
fn invalid_block_lists_are_refused() {
    let qemu = QemuEnd::start();
    let feeder = Feeder::start(qemu.socket(), page::Pool::new(0)).unwrap();
    let new = |name: &str, bytes, placement| {
        let plan = BlockPlan { name: name.to_owned(), bytes, placement };
        Placer::new(vec![plan], feeder.handle()).map(drop).unwrap_err()
    };
    let long = "x".repeat(256);
    for (name, bytes) in [("", 4096), (&*long, 4096), ("ram0", 4097)] {
        let refused = new(name, bytes, Placement::Inline);
        assert!(matches!(refused, PlaceError::BadBlock { .. }), "{refused}");
    }
    for bytes in [1 << 60, !0xfff] {
        let refused = new("ram0", bytes, Placement::Inline);
        assert!(matches!(refused, PlaceError::TooMuchRam { .. }), "{refused}");
    }
    let refused = new("ram0", 8192, Placement::Mapped(ram(4096)));
    assert!(matches!(refused, PlaceError::OtherSize { here_bytes: 4096, .. }), "{refused}");

    let plan = |name: String| BlockPlan { name, bytes: 4096, placement: Placement::Inline };
    let all = |plans| Placer::new(plans, feeder.handle()).map(drop).unwrap_err();
    let refused = all(["ram0", "vga", "ram0"].map(|name| plan(name.to_owned())).to_vec());
    assert!(matches!(&refused, PlaceError::BlockTwice { name } if name == "ram0"), "{refused}");
    let refused = all((0..100_000).map(|number| plan(number.to_string())).collect());
    assert!(matches!(refused, PlaceError::TooManyBlocks { .. }), "{refused}");
}
