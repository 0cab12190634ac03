use std::io::Read;
use std::sync::Arc;
use std::thread;

use super::*;

const LONG: Duration = Duration::from_secs(60);

/// A writer, and what its receiver reads.
fn writer(pages_max: u32, unread_max: Duration) -> (Arc<DomainWriter>, UnixStream) {
    let (input, receiver) = UnixStream::pair().unwrap();
    let writer = DomainWriter::new(input, pages_max, Some(Hash::default()), unread_max);
    (Arc::new(writer.unwrap()), receiver)
}

/// A batch of these pages, each of which repeats its own number.
fn batch(epoch: u32, pages: &[u32]) -> (BatchHeader, Tables, Vec<u8>) {
    let bytes: Vec<u8> =
        pages.iter().flat_map(|page| vec![page.to_le_bytes()[0]; PAGE_BYTES]).collect();
    let header = BatchHeader {
        encoding: 0,
        block: PageKind::Normal.block(),
        epoch: Epoch(epoch),
        bodies: u16::try_from(pages.len()).unwrap(),
        fills: 0,
        payload_bytes: u32::try_from(bytes.len()).unwrap(),
        deltas: false,
        has_names: false,
    };
    let pages = pages.iter().copied().map(PageIndex).collect();
    (header, Tables { pages, ..Tables::default() }, bytes)
}

fn take(writer: &DomainWriter, epoch: u32, pages: &[u32]) -> Result<(), LaneEnd> {
    let (header, tables, bytes) = batch(epoch, pages);
    writer.take(header, &tables, &bytes)
}

#[test]
fn pages_wait_for_their_epoch_and_are_audited_with_their_last_content() {
    let (writer, mut receiver) = writer(1000, LONG);
    writer.non_ram(b"head").unwrap();
    let early = thread::spawn({
        let writer = Arc::clone(&writer);
        move || take(&writer, 2, &[7])
    });
    writer.epoch(Epoch(1), 4).unwrap();
    take(&writer, 1, &[3, 9]).unwrap();
    writer.epoch(Epoch(2), 4).unwrap();
    early.join().unwrap().unwrap();
    // An older version of it, and a page of zeros that is sent as such.
    take(&writer, 1, &[7]).unwrap();
    let (header, mut tables, _) = batch(2, &[]);
    tables.fills.push(Fill { first: PageIndex(8), count: 2, byte: 0 });
    writer.take(header, &tables, &[]).unwrap();
    writer.non_ram(b"tail").unwrap();
    let expected = Ledger::new(Hash::default(), [1000]).unwrap();
    let block = expected.block(BLOCK).unwrap();
    let hash = block.hash();
    for (page, byte) in [(3, 3), (7, 7), (8, 0), (9, 0)] {
        let fingerprint = hash.of_fill(byte);
        block.write().placed(PageIndex(page), fingerprint, Epoch(2), Delivery::Body);
    }
    assert_eq!(writer.ledger().unwrap().totals(), expected.totals());
    let bytes = writer.written_bytes();
    writer.end();
    let mut written = Vec::new();
    receiver.read_to_end(&mut written).unwrap();
    assert_eq!(written.len() as u64, bytes);
    assert!(written.starts_with(b"head") && written.ends_with(b"tail"));
    // Two records of a page each, and of two pages twice.
    assert_eq!(written.len(), 8 + 3 * 16 + 5 * (8 + PAGE_BYTES));
}

/// What threads that serve other VMs too have found is written before the stream goes on, and the
/// newest version of a page wins.
#[test]
fn pages_by_name_are_written_by_the_next_thread_that_writes() {
    let (writer, mut receiver) = writer(1000, LONG);
    writer.epoch(Epoch(1), 0).unwrap();
    let normal = PageKind::Normal.block();
    let late = |pages: &[u32]| {
        let (header, tables, bytes) = batch(1, pages);
        writer.check(header.block, header.epoch, &tables.pages).unwrap();
        writer.place_late(normal, Epoch(1), &tables.pages, &bytes, Delivery::SameHost)
    };
    assert!(late(&[3]) && writer.written_bytes() == 0);
    let record = |pages: usize| 16 + pages * (8 + PAGE_BYTES);
    // The check of the next ones writes it.
    assert!(late(&[4, 5]) && writer.written_bytes() == record(1) as u64);
    let (_, tables, bytes) = batch(1, &[9]);
    writer.place_bodies(normal, Epoch(1), &tables.pages, &bytes, Delivery::SameHost).unwrap();
    writer.epoch(Epoch(2), 0).unwrap();
    take(&writer, 2, &[7]).unwrap();
    assert!(late(&[7, 8]));
    let zeros = Fill { first: PageIndex(1), count: 1, byte: 0 };
    writer.place_fills(normal, Epoch(2), &[zeros]).unwrap();
    assert!(late(&[6]));
    writer.non_ram(b"tail").unwrap();
    let expected = Ledger::new(Hash::default(), [1000]).unwrap();
    let block = expected.block(BLOCK).unwrap();
    for (page, byte) in [(1, 0), (3, 3), (4, 4), (5, 5), (6, 6), (7, 7), (8, 8), (9, 9)] {
        let fingerprint = block.hash().of_fill(byte);
        block.write().placed(PageIndex(page), fingerprint, Epoch(2), Delivery::Body);
    }
    assert_eq!(writer.ledger().unwrap().totals(), expected.totals());
    let bytes = [1, 2, 1, 1, 1, 1, 1].map(record).iter().sum::<usize>() + b"tail".len();
    assert_eq!(writer.written_bytes(), bytes as u64);
    writer.stop();
    assert!(!late_after_the_end(&writer));
    drop(writer);
    let mut written = Vec::new();
    receiver.read_to_end(&mut written).unwrap();
    assert!(written.len() == bytes && written.ends_with(b"tail"));
}

fn late_after_the_end(writer: &DomainWriter) -> bool {
    let (header, tables, bytes) = batch(1, &[10]);
    writer.place_late(header.block, header.epoch, &tables.pages, &bytes, Delivery::Rack)
}

#[test]
fn page_tables_do_not_go_by_name() {
    let (writer, _receiver) = writer(1000, LONG);
    writer.epoch(Epoch(1), 0).unwrap();
    let refused =
        |kind: PageKind, page| match writer.check(kind.block(), Epoch(1), &[PageIndex(page)]) {
            Err(LaneEnd::Refused(why)) => why,
            other => panic!("{other:?}"),
        };
    let tables = PageKind::ALL.into_iter().filter(|kind| *kind != PageKind::Normal);
    tables.for_each(|kind| assert!(refused(kind, 1).contains("page tables"), "{kind:?}"));
    assert!(refused(PageKind::Normal, 1000).contains("outside the domain"));
    writer.check(PageKind::Normal.block(), Epoch(1), &[PageIndex(999)]).unwrap();
}

#[test]
fn a_source_that_breaks_the_rules_is_refused() {
    let (writer, _receiver) = writer(1000, LONG);
    assert!(writer.epoch(Epoch(2), 0).unwrap_err().contains("epoch 2 follows epoch 0"));
    assert!(writer.epoch(Epoch(1), 9).is_err());
    writer.epoch(Epoch(1), 0).unwrap();
    let refused = |pages: &[u32]| match take(&writer, 1, pages) {
        Err(LaneEnd::Refused(why)) => why,
        other => panic!("{other:?}"),
    };
    assert!(refused(&[1000]).contains("outside the domain"));
    take(&writer, 1, &[1]).unwrap();
    writer.non_ram(b"verify").unwrap();
    assert!(refused(&[2]).contains("was missing when its epoch ended"));
}

#[test]
fn a_receiver_that_reads_nothing_ends_the_arrival_and_so_does_its_end() {
    let (stuck, _receiver) = writer(1 << 20, Duration::from_millis(10));
    stuck.epoch(Epoch(1), 0).unwrap();
    let pages: Vec<u32> = (0..128).collect();
    let error = (0..100).find_map(|nth| {
        let pages: Vec<u32> = pages.iter().map(|page| nth * 128 + page).collect();
        take(&stuck, 1, &pages).err()
    });
    assert!(matches!(error, Some(LaneEnd::Refused(why)) if why.contains("reads nothing")));
    // A lane that waits for an epoch ends too.
    let (writer, _receiver) = writer(1000, LONG);
    let waiting = thread::spawn({
        let writer = Arc::clone(&writer);
        move || take(&writer, 1, &[1])
    });
    writer.end();
    assert!(matches!(waiting.join().unwrap(), Err(LaneEnd::Over)));
}

#[test]
fn a_complete_domain_takes_no_more_pages_and_its_receiver_can_still_be_permitted() {
    let (writer, mut receiver) = writer(1000, LONG);
    writer.epoch(Epoch(1), 0).unwrap();
    let waiting = thread::spawn({
        let writer = Arc::clone(&writer);
        move || take(&writer, 2, &[1])
    });
    writer.stop();
    assert!(matches!(waiting.join().unwrap(), Err(LaneEnd::Over)));
    assert!(matches!(take(&writer, 1, &[1]), Err(LaneEnd::Over)));
    (&writer.input).write_all(b"permission").unwrap();
    let mut read = [0; 10];
    receiver.read_exact(&mut read).unwrap();
    assert_eq!(&read, b"permission");
}
