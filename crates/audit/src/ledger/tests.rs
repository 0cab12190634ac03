use proptest::prelude::*;

use super::*;

fn ledger(pages: impl IntoIterator<Item = u64>) -> Ledger {
    Ledger::new(Hash::default(), pages).unwrap()
}

fn print(content: u32) -> Fingerprint {
    Hash::default().of(&content.to_le_bytes())
}

#[test]
fn an_older_epoch_that_comes_late_changes_nothing() {
    let ledger = ledger([10]);
    let block = ledger.block(BlockId(0)).unwrap();
    block.write().handed_over(PageIndex(3), print(1), Epoch(7));
    let before = ledger.totals();
    block.write().handed_over(PageIndex(3), print(2), Epoch(6));
    assert_eq!(ledger.totals(), before);
    block.write().handed_over(PageIndex(3), print(2), Epoch(7));
    assert_ne!(ledger.totals(), before);
}

/// A balloon may have returned the page in between, and then QEMU doesn't hand it over again.
#[test]
fn of_two_contents_in_one_epoch_the_destination_may_hold_either() {
    let source = ledger([10]);
    let (page, ours) = (PageIndex(3), source.block(BlockId(0)).unwrap());
    let hand_over = |content, epoch| {
        ours.write().handed_over(page, print(content), Epoch(epoch));
    };
    let is_right = |content| {
        let destination = ledger([10]);
        let theirs = destination.block(BlockId(0)).unwrap();
        theirs.write().placed(page, print(content), Epoch(2), Delivery::Body);
        let compared = ours.compare(0, &theirs.entries(0).unwrap()).unwrap();
        compared.differences.is_empty()
    };
    hand_over(1, 2);
    hand_over(1, 2);
    assert!(is_right(1) && !is_right(2), "the same content twice");
    for _ in 0..2 {
        hand_over(2, 2);
        assert!(is_right(1) && is_right(2));
    }
    hand_over(2, 3);
    assert!(!is_right(1) && is_right(2), "a newer epoch");
    // The older one is noted last, and the destination keeps the newer.
    hand_over(1, u32::MAX);
    hand_over(2, u32::MAX - 1);
    assert!(is_right(1) && !is_right(2), "an older epoch");
}

/// A QEMU that is held ends a thousand passes a second.
#[test]
fn millions_of_epochs_without_pages_let_no_wrong_page_pass() {
    let (source, destination) = (ledger([10]), ledger([10]));
    let (ours, theirs) =
        (source.block(BlockId(0)).unwrap(), destination.block(BlockId(0)).unwrap());
    for (content, epoch) in [(1, 5_000_000), (2, 6_000_000), (3, u32::MAX)] {
        ours.write().handed_over(PageIndex(3), print(content), Epoch(epoch));
    }
    for (content, differences) in [(1, 1), (2, 1), (3, 0)] {
        theirs.write().placed(PageIndex(3), print(content), Epoch(7_000_000), Delivery::Body);
        let compared = ours.compare(0, &theirs.entries(0).unwrap()).unwrap();
        assert_eq!((compared.differences.len(), compared.unproved_pages), (differences, 0));
    }
}

#[test]
fn a_page_that_can_not_be_proved_is_counted() {
    let (source, destination) = (ledger([10]), ledger([10]));
    let (ours, theirs) =
        (source.block(BlockId(0)).unwrap(), destination.block(BlockId(0)).unwrap());
    for content in [1, 2] {
        ours.write().handed_over(PageIndex(3), print(content), Epoch(7));
    }
    for (content, unproved_pages) in [(1, 1), (2, 0)] {
        theirs.write().placed(PageIndex(3), print(content), Epoch(7), Delivery::Body);
        let compared = ours.compare(0, &theirs.entries(0).unwrap()).unwrap();
        assert_eq!(compared, RangeComparison { differences: Vec::new(), unproved_pages });
    }
}

#[test]
fn a_difference_names_the_epochs_of_both_ends() {
    let (source, destination) = (ledger([10]), ledger([10]));
    let (ours, theirs) =
        (source.block(BlockId(0)).unwrap(), destination.block(BlockId(0)).unwrap());
    ours.write().handed_over(PageIndex(3), print(1), Epoch(4_000_000));
    ours.write().handed_over(PageIndex(3), print(2), Epoch(9_000_000));
    ours.left_out(Epoch(9_000_000))(PageIndex(3));
    theirs.write().placed(PageIndex(3), print(1), Epoch(8_500_000), Delivery::Body);
    let compared = ours.compare(0, &theirs.entries(0).unwrap()).unwrap();
    assert_eq!(
        compared.differences.iter().map(ToString::to_string).collect::<Vec<_>>(),
        ["page 3: handed over in epoch 9000000, left out as out of date and not handed over \
          again; placed: sent by the source, of epoch 8500000"]
    );
}

#[test]
fn content_in_another_place_is_another_sum() {
    let total = |places: [(u32, u32); 2]| {
        let ledger = ledger([9000]);
        for (page, content) in places {
            let block = ledger.block(BlockId(0)).unwrap();
            block.write().handed_over(PageIndex(page), print(content), Epoch(1));
        }
        ledger.totals()
    };
    assert_eq!(total([(1, 5), (8000, 6)]), total([(8000, 6), (1, 5)]));
    assert_ne!(total([(1, 5), (2, 6)]), total([(1, 6), (2, 5)]));
    assert_ne!(total([(1, 5), (8000, 6)]), total([(1, 6), (8000, 5)]));
}

#[test]
fn pages_and_blocks_that_are_not_there_are_passed_by() {
    let ledger = ledger([5, 0]);
    assert!(ledger.block(BlockId(2)).is_none());
    let block = ledger.block(BlockId(0)).unwrap();
    block.write().handed_over(PageIndex(5), print(1), Epoch(1));
    block.left_out(Epoch(1))(PageIndex(u32::MAX));
    assert_eq!((ledger.totals(), ledger.pages()), (vec![0, 0], 5));
    assert_eq!((block.entries(0).unwrap().len(), block.entries(1)), (5, None));
    assert!(block.compare(0, &[0; 4]).is_none());
    assert!(block.compare(u32::MAX, &[]).is_none());
}

const THREE_RANGES: u32 = 3 * 4096;

proptest! {
    /// Both ends note the same pages in different orders. The pages that differ in the end are
    /// found, and no others.
    #[test]
    fn what_differs_is_what_is_found(
        pages in prop::collection::vec((0..THREE_RANGES, 0..4_u32), 1..60),
        wrong in prop::collection::btree_set(0..THREE_RANGES, 0..5),
    ) {
        let count = u64::from(THREE_RANGES);
        let (source, destination) = (ledger([count]), ledger([count]));
        let (ours, theirs) =
            (source.block(BlockId(0)).unwrap(), destination.block(BlockId(0)).unwrap());
        let mut last = std::collections::BTreeMap::new();
        for (epoch, (page, content)) in (1..).map(Epoch).zip(&pages) {
            ours.write().handed_over(PageIndex(*page), print(*content), epoch);
            last.insert(*page, (*content, epoch));
        }
        let mut expected = Vec::new();
        let mut writing = theirs.write();
        for (page, (content, epoch)) in last.iter().rev() {
            let placed = if wrong.contains(page) { content + 100 } else { *content };
            writing.placed(PageIndex(*page), print(placed), *epoch, Delivery::Body);
            if wrong.contains(page) {
                expected.push(*page);
            }
        }
        drop(writing);
        expected.reverse();
        prop_assert_eq!(source.totals() == destination.totals(), expected.is_empty());
        let digests = ours.digests().zip(theirs.digests());
        let differing = (0_u32..).zip(digests).filter(|(_, (ours, theirs))| ours != theirs);
        let found: Vec<u32> = differing
            .flat_map(|(range, _)| {
                ours.compare(range, &theirs.entries(range).unwrap()).unwrap().differences
            })
            .map(|difference| difference.page.0)
            .collect();
        prop_assert_eq!(found, expected);
    }
}
