use std::sync::Arc;

use page::{Deltas as Came, Pool, Reserve, SLOT_BYTES};

use super::*;

const MIB: u64 = 1 << 20;

fn alone() -> Deltas {
    Deltas::new(&Reserve::new(Deltas::ALL_BYTES_MAX))
}

/// Deltas for a block that the destination can read, with noting on.
fn deltas() -> Deltas {
    readable(alone(), 4 * MIB)
}

fn readable(deltas: Deltas, bytes: u64) -> Deltas {
    let block = |name: &str| Announced { name: name.to_owned(), bytes };
    deltas.announce(&[block("ram"), block("rom")]);
    deltas.take_for(&["ram".to_owned()]);
    deltas.note_pages(true);
    deltas
}

fn batch(pool: &Arc<Pool>, block: u16, epoch: u32, pages: &[(u32, u8)]) -> Batch {
    let mut batch = pool.take().unwrap();
    (batch.block, batch.epoch) = (BlockId(block), Epoch(epoch));
    for (nth, (page, byte)) in pages.iter().enumerate() {
        batch.buffer_mut()[nth * PAGE_BYTES..][..PAGE_BYTES].fill(1);
        batch.buffer_mut()[nth * PAGE_BYTES + 1000] = *byte;
        batch.push_body(PageIndex(*page), nth * PAGE_BYTES);
    }
    batch
}

/// Takes and sends a batch as a lane does. Returns each page's base if it goes as
/// deltas.
fn send(deltas: &Deltas, lane: &mut Comparing, batch: &mut Batch) -> Option<Vec<Option<u32>>> {
    lane.leave(deltas, batch);
    let bytes = lane.compare(deltas, batch)?;
    let came = Came::parse(batch.bodies().len(), bytes).unwrap();
    Some(came.iter().map(|delta| delta.base().map(|base| base.0)).collect())
}

#[test]
fn a_placed_version_is_the_base_of_the_next() {
    let (deltas, pool) = (deltas(), Pool::new(8 * SLOT_BYTES));
    let mut lane = Comparing::default();
    let mut first = batch(&pool, 0, 1, &[(3, 1), (4, 1), (5, 1)]);
    assert_eq!(send(&deltas, &mut lane, &mut first), None, "nothing is there");
    let mut second = batch(&pool, 0, 2, &[(3, 2), (4, 2)]);
    assert_eq!(send(&deltas, &mut lane, &mut second), None, "it may not have come");
    deltas.placed(&first);
    // A newer version of page 3 has left, which may arrive at any time.
    let mut third = batch(&pool, 0, 3, &[(3, 3), (5, 3)]);
    assert_eq!(send(&deltas, &mut lane, &mut third), Some(vec![None, Some(1)]));
    deltas.placed(&second);
    deltas.placed(&third);
    let mut fourth = batch(&pool, 0, 4, &[(3, 4), (4, 4), (5, 3), (6, 4)]);
    let bases = send(&deltas, &mut lane, &mut fourth);
    assert_eq!(bases, Some(vec![Some(3), Some(2), Some(3), None]));
    assert_eq!(deltas.pages(), 4);
    // A batch sent again by another lane goes whole, because the same version is already
    // there.
    deltas.placed(&fourth);
    assert_eq!(send(&deltas, &mut lane, &mut fourth), None);
}

/// One of QEMU's channels is read later than another.
#[test]
fn an_older_version_does_not_leave_after_a_newer_one() {
    let (deltas, pool) = (deltas(), Pool::new(8 * SLOT_BYTES));
    let mut lane = Comparing::default();
    let mut first = batch(&pool, 0, 1, &[(3, 1), (4, 1), (5, 1), (9, 1)]);
    send(&deltas, &mut lane, &mut first);
    deltas.placed(&first);
    let mut third = batch(&pool, 0, 3, &[(3, 3), (4, 3), (9, 3)]);
    assert_eq!(send(&deltas, &mut lane, &mut third), Some(vec![Some(1); 3]));
    let mut second = batch(&pool, 0, 2, &[(3, 2), (4, 2), (5, 2)]);
    (8..11).for_each(|page| second.push_fill(PageIndex(page), 0));
    assert_eq!(lane.leave(&deltas, &mut second), 2);
    let left: Vec<u32> = second.bodies().iter().map(|body| body.page.0).collect();
    assert_eq!(left, [5], "the others have left in a newer version");
    let fill = |first| Fill { first: PageIndex(first), count: 1, byte: 0 };
    assert_eq!(second.fills(), [fill(8), fill(10)]);
    // Page 5 goes as a delta, and a batch that is taken twice is not older than itself.
    assert!(lane.compare(&deltas, &second).is_some());
    assert_eq!(lane.leave(&deltas, &mut third), 0);
}

#[test]
fn only_changed_parts_are_sent() {
    let (deltas, pool) = (deltas(), Pool::new(4 * SLOT_BYTES));
    let mut lane = Comparing::default();
    let mut first = batch(&pool, 0, 1, &[(3, 1), (4, 1)]);
    send(&deltas, &mut lane, &mut first);
    deltas.placed(&first);
    let mut second = batch(&pool, 0, 2, &[(3, 2), (4, 1)]);
    lane.leave(&deltas, &mut second);
    let bytes = lane.compare(&deltas, &second).unwrap();
    assert_eq!(bytes.len(), 16 + PART_BYTES, "one part of the first page");
    for (nth, delta) in Came::parse(2, bytes).unwrap().iter().enumerate() {
        let mut page = first.bytes_of(first.bodies()[nth]).to_vec();
        delta.apply(&mut page);
        assert_eq!(page, second.bytes_of(second.bodies()[nth]));
    }
}

#[test]
fn a_page_sent_in_another_form_is_no_base() {
    let (deltas, pool) = (deltas(), Pool::new(8 * SLOT_BYTES));
    let (mut lane, mut other) = (Comparing::default(), Comparing::default());
    let mut first = batch(&pool, 0, 1, &[(3, 1), (4, 1), (5, 1)]);
    send(&deltas, &mut lane, &mut first);
    deltas.placed(&first);
    // One page goes as a fill, and one by name: a stage removes it from the batch.
    let mut second = batch(&pool, 0, 2, &[(4, 2)]);
    second.push_fill(PageIndex(3), 0);
    other.leave(&deltas, &mut second);
    second.retain_bodies(|_, _| false);
    assert_eq!(other.compare(&deltas, &second), None);
    deltas.placed(&second);
    let mut third = batch(&pool, 0, 3, &[(3, 3), (4, 3), (5, 3)]);
    assert_eq!(send(&deltas, &mut lane, &mut third), Some(vec![None, None, Some(1)]));
}

#[test]
fn a_batch_from_which_pages_were_taken_is_compared_by_its_pages() {
    let (deltas, pool) = (deltas(), Pool::new(8 * SLOT_BYTES));
    let mut lane = Comparing::default();
    let mut first = batch(&pool, 0, 1, &[(3, 1), (4, 2), (5, 3), (6, 4)]);
    send(&deltas, &mut lane, &mut first);
    deltas.placed(&first);
    let mut second = batch(&pool, 0, 2, &[(3, 1), (4, 2), (5, 3), (6, 9)]);
    lane.leave(&deltas, &mut second);
    second.retain_bodies(|nth, _| nth % 2 == 1);
    let bytes = lane.compare(&deltas, &second).unwrap();
    assert_eq!(bytes.len(), 2 * 8 + PART_BYTES, "page 4 has not changed");
    // A lane's bases for one batch don't apply to another.
    let third = batch(&pool, 0, 3, &[(4, 1)]);
    assert_eq!(lane.compare(&deltas, &third), None);
}

#[test]
fn there_are_no_bases_for_unreadable_ram_or_a_busy_cpu() {
    let (deltas, pool) = (deltas(), Pool::new(8 * SLOT_BYTES));
    let mut lane = Comparing::default();
    for block in [1, 2] {
        for epoch in 1..3 {
            let mut batch = batch(&pool, block, epoch, &[(3, 1)]);
            assert_eq!(send(&deltas, &mut lane, &mut batch), None);
            deltas.placed(&batch);
        }
    }
    deltas.note_pages(false);
    let mut first = batch(&pool, 0, 1, &[(3, 1), (5000, 1)]);
    assert_eq!(send(&deltas, &mut lane, &mut first), None);
    deltas.placed(&first);
    assert_eq!(send(&deltas, &mut lane, &mut batch(&pool, 0, 2, &[(3, 1)])), None);
    assert!(deltas.known.lock().records.is_empty());
}

#[test]
fn records_go_to_pages_that_are_sent_again() {
    let (deltas, pool) = (deltas(), Pool::new(8 * SLOT_BYTES));
    deltas.known.lock().records_max = 4;
    let mut lane = Comparing::default();
    let mut again = |epoch, page| {
        let mut batch = batch(&pool, 0, epoch, &[(page, 1)]);
        let bases = send(&deltas, &mut lane, &mut batch);
        deltas.placed(&batch);
        bases.is_some()
    };
    // Two pages are sent again and again, among many that are not.
    for epoch in 1..200 {
        let is_known = [again(epoch, 7), again(epoch, 8)];
        assert_eq!(is_known, [epoch > 1; 2], "{epoch}");
        again(epoch, 100 + epoch);
    }
    assert_eq!(deltas.known.lock().records.len(), 4);
}

#[test]
fn records_take_so_much_memory_and_no_more() {
    let bytes = |ram_bytes| Deltas::pages_max(ram_bytes) * size_of::<Record>() as u64;
    for (ram_bytes, most) in [(0, 64 << 20), (16 << 30, 256 << 20), (u64::MAX, 1 << 30)] {
        let bytes = bytes(ram_bytes);
        assert!(bytes <= most && bytes > most - 1000, "{bytes} of {most}");
    }
}

#[test]
fn records_of_all_vms_have_a_bound_and_each_vm_has_some() {
    let reserve = Reserve::new(RECORDS_OWN_BYTES);
    let pages = u32::try_from(3 * RECORDS_OWN_BYTES / size_of::<Record>()).unwrap();
    let ram_bytes = u64::from(pages) * PAGE_BYTES as u64;
    let vm = || readable(Deltas::new(&reserve), ram_bytes);
    let records = |of: &Deltas| of.known.lock().records.len();
    let note_all = |of: &Deltas| {
        let mut known = of.known.lock();
        (0..pages).for_each(|page| {
            known.note(BlockId(0), page, Epoch(0), &Fingerprints::default());
        });
        assert!(known.records.capacity() * size_of::<Record>() <= known.memory.bytes());
        known.records.len() * size_of::<Record>()
    };
    let (one, other) = (vm(), vm());
    let step = RECORDS_OWN_BYTES - size_of::<Record>()..=RECORDS_OWN_BYTES;
    assert!((2 * step.start()..=2 * step.end()).contains(&note_all(&one)));
    assert!(step.contains(&note_all(&other)), "it has its own part");
    assert_eq!(reserve.borrowed_bytes(), RECORDS_OWN_BYTES);
    // What is left by one that ends is for the others.
    let before = records(&other);
    drop(one);
    note_all(&other);
    assert!(records(&other) > before);
    drop(other);
    assert_eq!(reserve.borrowed_bytes(), 0);
}

#[test]
fn pages_of_a_block_without_tables_go_whole() {
    let (deltas, pool) = (alone(), Pool::new(8 * SLOT_BYTES));
    let endless = Announced { name: "ram".to_owned(), bytes: u64::MAX >> 4 };
    deltas.announce(&[endless.clone(), endless]);
    deltas.take_for(&["ram".to_owned()]);
    deltas.note_pages(true);
    let mut lane = Comparing::default();
    for epoch in 1..3 {
        let mut batch = batch(&pool, 0, epoch, &[(3, 1)]);
        batch.push_fill(PageIndex(9), 0);
        assert_eq!(send(&deltas, &mut lane, &mut batch), None);
        deltas.placed(&batch);
    }
}

/// QEMU before 9.0 may send a page twice in one epoch, in two versions, and the lanes
/// decide which one is placed last.
#[test]
fn a_page_sent_twice_in_an_epoch_is_no_base() {
    for placed_between in [false, true] {
        let (deltas, pool) = (deltas(), Pool::new(8 * SLOT_BYTES));
        let [mut one, mut other] = [Comparing::default(), Comparing::default()];
        let mut first = batch(&pool, 0, 1, &[(3, 1), (4, 1), (5, 1)]);
        let mut second = batch(&pool, 0, 1, &[(3, 2)]);
        if placed_between {
            send(&deltas, &mut one, &mut first);
            deltas.placed(&first);
            send(&deltas, &mut other, &mut second);
        } else {
            one.leave(&deltas, &mut first);
            other.leave(&deltas, &mut second);
            one.compare(&deltas, &first);
            other.compare(&deltas, &second);
            deltas.placed(&first);
        }
        deltas.placed(&second);
        // The same holds for a page that left as a body and as part of a fill run.
        let mut fills = batch(&pool, 0, 1, &[]);
        fills.push_fill(PageIndex(5), 0);
        one.leave(&deltas, &mut fills);
        let mut third = batch(&pool, 0, 2, &[(3, 2), (4, 2), (5, 2)]);
        let bases = send(&deltas, &mut one, &mut third);
        assert_eq!(bases, Some(vec![None, Some(1), None]), "{placed_between}");
        deltas.placed(&third);
        let mut fourth = batch(&pool, 0, 3, &[(3, 3), (4, 3), (5, 3)]);
        assert_eq!(send(&deltas, &mut one, &mut fourth), Some(vec![Some(2); 3]));
    }
}

#[test]
fn a_run_that_would_become_too_many_leaves_whole() {
    let deltas = alone();
    let pages = 4 * u32::try_from(FILLS_MAX).unwrap();
    let bytes = u64::from(pages) * PAGE_BYTES as u64;
    deltas.announce(&[Announced { name: "ram".to_owned(), bytes }]);
    let (pool, mut lane) = (Pool::new(2 * SLOT_BYTES), Comparing::default());
    let leave = |lane: &mut Comparing, epoch, fills: &mut dyn Iterator<Item = u32>| {
        let mut batch = batch(&pool, 0, epoch, &[]);
        fills.for_each(|page| batch.push_fill(PageIndex(page), 0));
        lane.leave(&deltas, &mut batch);
        batch.fills().len()
    };
    // Every other page of a quarter, and then of the whole run.
    for (part, left) in [(4, FILLS_MAX / 2), (1, 1)] {
        leave(&mut lane, 2, &mut (0..pages / part).step_by(2));
        assert_eq!(leave(&mut lane, 1, &mut (0..pages)), left, "{part}");
    }
}
