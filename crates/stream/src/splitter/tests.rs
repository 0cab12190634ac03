use super::*;
use crate::fuzzing::{seed_blocks, seed_main, split};
use crate::record::flag;
use crate::{PartSection, write};

fn taken(stream: StreamKind, data: &[u8]) -> crate::fuzzing::Taken {
    split(stream, data, 1000, 5).unwrap()
}

fn error(stream: StreamKind, data: &[u8]) -> StreamError {
    split(stream, data, 1000, 5).unwrap_err().1
}

fn whole(data: &[u8]) {
    let taken = taken(StreamKind::Classic, data);
    assert_eq!(taken.whole.as_deref(), Some(data));
    assert!(matches!(error(StreamKind::Multifd, data), StreamError::Late(_)));
}

/// Header and RAM's setup, as section 2.
fn setup(footers: bool) -> Vec<u8> {
    let mut out = Vec::new();
    write::header(&mut out, footers.then_some("pc-q35-10.0"));
    write::ram_setup(&mut out, 2, &seed_blocks(), footers, false);
    out
}

/// The same, of a QEMU that opens a return path.
fn setup_that_asks(footers: bool) -> Vec<u8> {
    let mut out = Vec::new();
    write::header(&mut out, footers.then_some("pc-q35-10.0"));
    write::open_return_path(&mut out);
    write::ping(&mut out, 1);
    write::ram_setup(&mut out, 2, &seed_blocks(), footers, false);
    out
}

fn part(out: &mut Vec<u8>, footers: bool, from: u32) {
    let mut part = PartSection::begin(out, 2, footers);
    for page in from..from + 4 {
        part.fill("pc.ram", PageIndex(page), 0).unwrap();
    }
    part.finish();
}

fn word(out: &mut Vec<u8>, word: u64) {
    out.extend_from_slice(&word.to_be_bytes());
}

#[test]
fn splits_head_pages_and_tail() {
    for footers in [true, false] {
        let mut data = setup_that_asks(footers);
        let head = setup(footers);
        part(&mut data, footers, 0);
        part(&mut data, footers, 4);
        let mut end = PartSection::begin_end(&mut data, 2, footers);
        end.body("vga.vram", PageIndex(5), &[9; 4096]).unwrap();
        end.multifd_flush();
        end.finish();
        data.extend_from_slice(b"devices");

        let mut tail = Vec::new();
        PartSection::begin_end(&mut tail, 2, footers).finish();
        tail.extend_from_slice(b"devices");

        let taken = taken(StreamKind::Classic, &data);
        let sent = taken.head.unwrap();
        assert_eq!(sent.bytes, head);
        assert_eq!(sent.blocks, seed_blocks());
        assert_eq!((sent.ram_section, sent.footers), (2, footers));
        assert_eq!(taken.tail.unwrap(), tail);
        let epochs: Vec<_> = taken.pages.iter().map(|page| page.epoch.0).collect();
        assert_eq!(epochs, [1, 1, 1, 1, 2, 2, 2, 2, 3]);
        assert_eq!(taken.pages[8].first, 9);
    }
}

/// A splitter for an answered stream leaves requests for answers in place.
#[test]
fn requests_for_answers_stay_in_an_answered_stream() {
    let mut data = setup_that_asks(true);
    let head_bytes = data.len();
    part(&mut data, true, 0);
    write::ping(&mut data, 2);
    PartSection::begin_end(&mut data, 2, true).finish();
    let mut splitter = Splitter::answered(StreamKind::Classic);
    let mut sink = Ignore;
    let Progress { consumed, step } = splitter.push(&data, &mut sink).unwrap();
    let Step::Head(head) = step else { panic!() };
    assert_eq!(head.bytes, data[..head_bytes]);
    assert!(splitter.epoch_by_section() && !splitter.may_turn_to_postcopy());
    let Progress { step: Step::Tail(tail), .. } =
        splitter.push(&data[consumed..], &mut sink).unwrap()
    else {
        panic!()
    };
    let mut expected = Vec::new();
    write::ping(&mut expected, 2);
    PartSection::begin_end(&mut expected, 2, true).finish();
    expected.truncate(expected.len() - 5);
    assert_eq!(tail, expected);
}

struct Ignore;

impl Sink for Ignore {
    fn body(&mut self, _: BlockId, _: PageIndex, _: usize) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
    fn fill(&mut self, _: BlockId, _: PageIndex, _: u8) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
    fn epoch(&mut self, _: Epoch) {}
}

#[test]
fn a_head_without_end_is_refused_before_it_is_too_long() {
    let mut header = Vec::new();
    write::header(&mut header, None);
    // Commands of the longest kind.
    let mut command = vec![kind::COMMAND];
    command.extend_from_slice(&command::POSTCOPY_ADVISE.to_be_bytes());
    command.extend_from_slice(&u16::MAX.to_be_bytes());
    command.resize(command.len() + usize::from(u16::MAX), 7);
    let mut splitter = Splitter::new(StreamKind::Classic);
    assert_eq!(splitter.push(&header, &mut Ignore).unwrap().consumed, header.len());
    let mut kept_bytes = header.len();
    let error = loop {
        match splitter.push(&command, &mut Ignore) {
            Ok(progress) => kept_bytes += progress.consumed,
            Err(error) => break error,
        }
    };
    assert_eq!(error, StreamError::HeadTooLong);
    assert!(kept_bytes <= HEAD_BYTES_MAX && kept_bytes + command.len() > HEAD_BYTES_MAX);
    assert!(splitter.head.len() <= HEAD_BYTES_MAX && splitter.whole.len() <= HEAD_BYTES_MAX);
}

#[test]
fn a_multifd_head_is_complete_with_the_last_word_of_setup() {
    let head = setup(true);
    let taken = split(StreamKind::Multifd, &head[..head.len() - 5], 1000, 5).unwrap_err().0;
    assert_eq!(taken.head.unwrap().bytes, head);
    let classic = split(StreamKind::Classic, &head, 1000, 5).unwrap_err().0;
    assert_eq!(classic.head, None);
}

#[test]
fn a_wrongly_predicted_footer_ends_the_migration() {
    let mut data = Vec::new();
    write::header(&mut data, Some("pc"));
    write::ram_setup(&mut data, 2, &seed_blocks(), false, false);
    part(&mut data, false, 0);
    assert_eq!(error(StreamKind::Multifd, &data), StreamError::Footers { sent: false });
    let mut data = Vec::new();
    write::header(&mut data, None);
    write::ram_setup(&mut data, 2, &seed_blocks(), true, false);
    assert_eq!(error(StreamKind::Multifd, &data), StreamError::Footers { sent: true });
}

#[test]
fn multifd_epochs_count_flushes_if_setup_has_one() {
    let data = &seed_main(1)[1..];
    let taken = taken(StreamKind::Multifd, data);
    let epochs: Vec<_> = taken.pages.iter().map(|page| page.epoch.0).collect();
    assert_eq!(epochs, [[1; 6], [2; 6], [3; 6]].concat());
    let flush = flag::MULTIFD_FLUSH.to_be_bytes();
    let head = taken.head.unwrap().bytes;
    assert!(!head.windows(8).any(|window| window == flush));
    let tail = taken.tail.unwrap();
    assert!(!tail.windows(8).any(|window| window == flush));
    // SWITCHOVER_START between the sections was kept for the END; the PING was
    // dropped.
    assert_eq!(tail[..10], [8, 0, 11, 0, 0, 3, 0, 0, 0, 2]);
}

#[test]
fn a_multifd_flush_without_one_in_setup_is_refused() {
    let mut data = setup(true);
    let mut part = PartSection::begin(&mut data, 2, true);
    part.multifd_flush();
    part.finish();
    assert_eq!(error(StreamKind::Multifd, &data), StreamError::StrayFlush);
}

#[test]
fn passes_whole_what_it_cannot_split() {
    let mut foreign = Vec::new();
    write::header(&mut foreign, Some("pc"));
    write::section_header(&mut foreign, true, 0, "0000:00:02.0/vfio", 1);
    foreign.extend_from_slice(b"anything at all");
    whole(&foreign);

    let mut bitmaps = setup_that_asks(true);
    write::section_header(&mut bitmaps, false, 3, "dirty-bitmap", 1);
    bitmaps.extend_from_slice(&[0x42; 5000]);
    whole(&bitmaps);

    // Of another version, or with more blocks than possible.
    for (version, blocks) in [(2, 64_u64), (1, u64::MAX)] {
        let mut plugged = Vec::new();
        write::header(&mut plugged, Some("pc"));
        write::section_header(&mut plugged, true, 0, "m/virtio-mem-device-early", version);
        for word in [1 << 32, blocks, 1] {
            plugged.extend_from_slice(&word.to_be_bytes());
        }
        plugged.extend_from_slice(&[0; 100]);
        whole(&plugged);
    }

    let mut shared = Vec::new();
    write::header(&mut shared, Some("pc"));
    write::capabilities(&mut shared, &["x-ignore-shared"]);
    shared.extend_from_slice(&setup(true)[8..]);
    whole(&shared);

    let mut postcopy = Vec::new();
    write::header(&mut postcopy, Some("pc"));
    // It has switched to postcopy.
    postcopy.extend_from_slice(&[8, 0, 3, 0, 0, 8, 0, 4, 0, 0]);
    whole(&postcopy);

    for flags in [flag::XBZRLE, flag::COMPRESS_PAGE, flag::HOOK, 0x400, flag::PAGE | flag::ZERO] {
        let mut data = setup(true);
        data.extend_from_slice(&[2, 0, 0, 0, 2]);
        word(&mut data, flag::MULTIFD_FLUSH);
        word(&mut data, flags);
        data.extend_from_slice(b"more");
        let taken = taken(StreamKind::Classic, &data);
        assert_eq!(taken.whole.as_deref(), Some(&data[..]), "{flags:#x}");
    }
}

#[test]
fn after_pages_it_is_too_late_to_pass_whole() {
    let mut data = setup(true);
    part(&mut data, true, 0);
    let before = data.len();
    write::section_header(&mut data, false, 9, "vfio", 1);
    let expected = Unsplittable::Section { name: "vfio".to_owned() };
    assert_eq!(error(StreamKind::Classic, &data), StreamError::Late(expected));
    data.truncate(before);
    data.extend_from_slice(&[2, 0, 0, 0, 9]);
    let expected = Unsplittable::SectionId { section: 9 };
    assert_eq!(error(StreamKind::Classic, &data), StreamError::Late(expected));
}

#[test]
fn content_of_dirty_bitmaps_before_rams_end_is_refused() {
    let mut data = setup(true);
    write::section_header(&mut data, false, 3, "dirty-bitmap", 1);
    data.extend_from_slice(&[1, 0x7e, 0, 0, 0, 3]);
    part(&mut data, true, 0);
    data.extend_from_slice(&[2, 0, 0, 0, 3, 1, 0x7e, 0, 0, 0, 3, 2, 0, 0, 0, 3, 0x42]);
    let expected = Unsplittable::Bitmaps { flags: 0x42 };
    assert_eq!(error(StreamKind::Classic, &data), StreamError::Late(expected));
}

#[test]
fn hostile_records_are_named() {
    let with = |record: &[u8]| {
        let mut data = setup(true);
        data.extend_from_slice(&[2, 0, 0, 0, 2]);
        data.extend_from_slice(record);
        error(StreamKind::Classic, &data)
    };
    let record = |word: u64, rest: &[u8]| [&word.to_be_bytes()[..], rest].concat();
    assert_eq!(with(&record(flag::ZERO | flag::CONTINUE, &[0])), StreamError::ContinueWithoutBlock);
    assert_eq!(
        with(&record(flag::ZERO, b"\x03nox\x00")),
        StreamError::UnknownBlock { name: "nox".to_owned() }
    );
    assert!(matches!(
        with(&record((1 << 20) | flag::PAGE, b"\x06pc.ram")),
        StreamError::OutsideBlock { offset: 0x10_0000, .. }
    ));
    assert!(matches!(
        with(&record((u64::MAX << 12) | flag::ZERO, b"\x06pc.ram\x00")),
        StreamError::OutsideBlock { .. }
    ));
    assert_eq!(with(&record(flag::EOS, &[0x7e, 0, 0, 0, 3])), StreamError::Footer { section: 2 });
    assert_eq!(
        with(&record(flag::EOS, &[0x7e, 0, 0, 0, 2, 0x55])),
        StreamError::UnknownRecord { kind: 0x55 }
    );
    assert_eq!(with(&[]), StreamError::EndedEarly { place: "within a RAM section" });
}

#[test]
fn a_hostile_block_list_is_refused() {
    let with = |total: u64, list: &[u8]| {
        let mut data = Vec::new();
        write::header(&mut data, Some("pc"));
        write::section_header(&mut data, false, 2, "ram", 4);
        word(&mut data, total | flag::MEM_SIZE);
        data.extend_from_slice(list);
        error(StreamKind::Classic, &data)
    };
    let block = |bytes: u64| [&b"\x01a"[..], &bytes.to_be_bytes()].concat();
    assert_eq!(with(4096, &block(8192)), StreamError::Total { excess_bytes: 4096 });
    assert!(matches!(with(1 << 60, &block(1 << 60)), StreamError::BlockLength { .. }));
    assert!(matches!(with(8192, &block(4096).repeat(2)), StreamError::BlockTwice { .. }));
    assert_eq!(with(0, &flag::MEM_SIZE.to_be_bytes()), StreamError::BlockLists { count: 2 });
}

#[test]
fn other_input_is_not_a_stream() {
    assert_eq!(
        error(StreamKind::Classic, b"GET / HTTP/1.1"),
        StreamError::NotAStream { magic: 0x4745_5420, version: 0x2f20_4854 }
    );
    let mut data = Vec::new();
    write::header(&mut data, None);
    data.extend_from_slice(&[7, 0xff, 0, 0, 0]);
    assert_eq!(error(StreamKind::Classic, &data), StreamError::MachineName { bytes: 0xff00_0000 });
}
