use super::*;
use crate::PageKind;

fn word(page: u32, kind: PageKind) -> PageWord {
    PageWord { page: PageIndex(page), kind }
}

/// A joiner in its first epoch, after 100 bytes of the non-RAM stream.
fn started() -> Joiner {
    let mut joiner = Joiner::new(1000);
    joiner.non_ram(&[0; 100]);
    joiner.epoch(Epoch(1), 100).unwrap();
    joiner
}

fn take(
    joiner: &mut Joiner,
    epoch: u32,
    pages: &[PageWord],
) -> Result<(Joined, Record), JoinError> {
    let mut record = Record::default();
    let joined = joiner.page_data(Epoch(epoch), pages, &mut record)?;
    Ok((joined, record))
}

#[test]
fn a_record_has_the_bytes_that_libxc_writes() {
    let pages = [word(3, PageKind::L1Pinned), word(4, PageKind::Invalid)];
    let (joined, record) = take(&mut started(), 1, &pages).unwrap();
    assert_eq!((joined, record.bodies()), (Joined::Record, &[0][..]));
    let mut expected = Vec::new();
    // PAGE_DATA, its length, two pages.
    for number in [1_u32, 8 + 16 + 4096, 2, 0] {
        expected.extend_from_slice(&number.to_le_bytes());
    }
    expected.extend_from_slice(&[3, 0, 0, 0, 0, 0, 0, 0x90]);
    expected.extend_from_slice(&[4, 0, 0, 0, 0, 0, 0, 0xf0]);
    assert_eq!(record.head(), expected);
}

/// A type without a body is a version like others.
#[test]
fn older_versions_are_dropped_if_they_arrive_late() {
    let mut joiner = started();
    joiner.epoch(Epoch(2), 100).unwrap();
    let newer = [word(7, PageKind::Invalid), word(9, PageKind::Normal)];
    assert_eq!(take(&mut joiner, 2, &newer).unwrap().0, Joined::Record);
    let older = [6, 7, 8, 9].map(|page| word(page, PageKind::Normal));
    let (joined, record) = take(&mut joiner, 1, &older).unwrap();
    assert_eq!((joined, record.bodies()), (Joined::Record, &[0, 2][..]));
    // What a lane that died had sent comes again.
    for (epoch, pages) in [(1, &older[..]), (2, &newer[..])] {
        assert_eq!(take(&mut joiner, epoch, pages).unwrap().0, Joined::Stale);
    }
}

#[test]
fn pages_wait_for_what_precedes_them() {
    let mut joiner = Joiner::new(1000);
    let page = [word(1, PageKind::Normal)];
    assert_eq!(take(&mut joiner, 1, &page).unwrap().0, Joined::Early);
    joiner.non_ram(&[0; 100]);
    assert_eq!(take(&mut joiner, 1, &page).unwrap().0, Joined::Early);
    joiner.epoch(Epoch(1), 100).unwrap();
    assert_eq!(take(&mut joiner, 1, &page).unwrap().0, Joined::Record);
}

#[test]
fn a_page_that_was_missing_at_its_epochs_end_is_an_error() {
    let mut joiner = started();
    let pages = [1, 2].map(|page| word(page, PageKind::Normal));
    take(&mut joiner, 1, &pages[..1]).unwrap();
    joiner.non_ram(&[0; 8]);
    assert_eq!(take(&mut joiner, 1, &pages[..1]).unwrap().0, Joined::Stale);
    let missed = JoinError::Missed { page: PageIndex(2), epoch: Epoch(1) };
    assert_eq!(take(&mut joiner, 1, &pages).unwrap_err(), missed);
    joiner.epoch(Epoch(2), 108).unwrap();
    assert_eq!(take(&mut joiner, 2, &pages).unwrap().0, Joined::Record);
}

#[test]
fn epochs_must_follow_each_other_where_the_source_had_them() {
    let mut joiner = started();
    for epoch in [Epoch(0), Epoch(1), Epoch(3)] {
        let error = JoinError::EpochOrder { epoch, before: Epoch(1) };
        assert_eq!(joiner.epoch(epoch, 100), Err(error));
    }
    let error = JoinError::Position { epoch: Epoch(2), position: 101, written: 100 };
    assert_eq!(joiner.epoch(Epoch(2), 101), Err(error));
    assert_eq!(joiner.epoch(Epoch(2), 100), Ok(()));
}

#[test]
fn page_numbers_are_limited() {
    let mut joiner = started();
    let (page, pages_max) = (PageIndex(1000), 1000);
    let error = take(&mut joiner, 1, &[word(1000, PageKind::Normal)]).unwrap_err();
    assert_eq!(error, JoinError::OutsideDomain { page, pages_max });
    assert!(take(&mut joiner, 1, &[word(999, PageKind::Normal)]).is_ok());
}
