//! Streams between two QEMUs that somebody else commands: what asks stays in them, and
//! from where they can't be split any more they are passed on as they are.

use page::PageIndex;
use stream::fuzzing::{Taken, seed_blocks, split_by};
use stream::{PartSection, Splitter, StreamError, StreamKind, Unsplittable, write};

fn taken(stream: StreamKind, data: &[u8]) -> Taken {
    let all_at_once = split_by(Splitter::answered(stream), data, usize::MAX >> 1, 100).unwrap();
    for piece_bytes in [1, 7, 100] {
        let pieces = split_by(Splitter::answered(stream), data, piece_bytes, 1).unwrap();
        assert_eq!(pieces, all_at_once);
    }
    all_at_once
}

fn setup(may_turn: bool) -> Vec<u8> {
    let mut out = Vec::new();
    write::header(&mut out, Some("pc-q35-10.0"));
    write::open_return_path(&mut out);
    write::ping(&mut out, 1);
    if may_turn {
        write::postcopy_advise(&mut out);
    }
    write::ram_setup(&mut out, 2, &seed_blocks(), true, false);
    out
}

fn part(out: &mut Vec<u8>, first: u32) {
    let mut part = PartSection::begin(out, 2, true);
    part.fill("vga.vram", PageIndex(first), 7).unwrap();
    part.body("pc.ram", PageIndex(first), &[7; 4096]).unwrap();
    part.finish();
}

/// A section in which a difference follows another page, of the same block or not.
fn differences(is_end: bool, same_block: bool) -> Vec<u8> {
    let mut stream = setup(false);
    part(&mut stream, 0);
    let mut section = begin(&mut stream, is_end);
    let block = if same_block { "pc.ram" } else { "vga.vram" };
    section.fill(block, PageIndex(2), 9).unwrap();
    two_differences(section);
    stream.extend_from_slice(b"devices");
    stream
}

fn two_differences(mut section: PartSection<'_>) {
    section.difference("pc.ram", PageIndex(0), &[0, 2, 5, 5]).unwrap();
    section.difference("pc.ram", PageIndex(1), &[0, 1, 6]).unwrap();
    section.finish();
}

fn begin(out: &mut Vec<u8>, is_end: bool) -> PartSection<'_> {
    let begin = if is_end { PartSection::begin_end } else { PartSection::begin };
    begin(out, 2, true)
}

#[test]
fn what_asks_for_an_answer_stays_in_the_head() {
    let mut data = setup(true);
    let head = data.clone();
    part(&mut data, 0);
    PartSection::begin_end(&mut data, 2, true).finish();
    let taken = taken(StreamKind::Classic, &data);
    let sent = taken.head.unwrap();
    assert_eq!(sent.bytes, head);
    assert!(sent.may_turn_to_postcopy);
    assert_eq!(taken.rest, None);
    let never = taken_head(&setup(false));
    assert!(!never.may_turn_to_postcopy);
}

fn taken_head(setup: &[u8]) -> stream::Head {
    let mut data = setup.to_vec();
    PartSection::begin_end(&mut data, 2, true).finish();
    taken(StreamKind::Classic, &data).head.unwrap()
}

#[test]
fn what_turns_to_postcopy_is_passed_on_from_there() {
    for stream in [StreamKind::Classic, StreamKind::Multifd] {
        let mut data = setup(true);
        let mut section = PartSection::begin(&mut data, 2, true);
        section.fill("pc.ram", PageIndex(1), 0).unwrap();
        section.finish();
        let mut rest = Vec::new();
        write::switchover_start(&mut rest);
        write::postcopy_discard(&mut rest, "pc.ram", PageIndex(1));
        write::ping(&mut rest, 2);
        rest.extend_from_slice(b"\x08\x00\x08\x00\x04\x00\x00\x00\x09a package and pages");
        data.extend_from_slice(&rest);
        let taken = taken(stream, &data);
        assert_eq!(taken.pages.len(), 1);
        assert_eq!(taken.rest, Some(rest));
        assert_eq!(taken.tail, None);
    }
}

/// The destination's QEMU has never heard of the section's beginning, nor of the
/// block that the record means.
#[test]
fn differences_are_passed_on_in_a_section_that_names_its_block() {
    for is_end in [false, true] {
        for same_block in [false, true] {
            let taken = taken(StreamKind::Classic, &differences(is_end, same_block));
            let mut rest = Vec::new();
            two_differences(begin(&mut rest, is_end));
            rest.extend_from_slice(b"devices");
            assert_eq!(taken.rest, Some(rest), "{is_end} {same_block}");
            assert_eq!(taken.pages.len(), 3);
        }
    }
}

#[test]
fn a_difference_of_no_block_is_refused() {
    let mut data = setup(false);
    part(&mut data, 0);
    data.extend_from_slice(&[2, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0x40, 1, b'x']);
    let error = split_by(Splitter::answered(StreamKind::Classic), &data, 100, 100).unwrap_err().1;
    assert_eq!(error, StreamError::UnknownBlock { name: "x".to_owned() });
}

#[test]
fn differences_before_any_page_leave_the_stream_whole() {
    let mut data = setup(false);
    let mut section = PartSection::begin(&mut data, 2, true);
    section.difference("pc.ram", PageIndex(0), &[0, 1, 6]).unwrap();
    section.finish();
    assert_eq!(taken(StreamKind::Classic, &data).whole, Some(data));
}

/// What our own moves switch off would have to be switched on by somebody else.
#[test]
fn a_stream_of_our_own_must_not_turn() {
    for data in [differences(false, true), {
        let mut data = setup(true);
        part(&mut data, 0);
        write::postcopy_discard(&mut data, "pc.ram", PageIndex(1));
        data
    }] {
        let new = Splitter::new(StreamKind::Classic);
        let error = split_by(new, &data, 100, 100).unwrap_err().1;
        let StreamError::Late(reason) = error else { panic!("{error}") };
        assert!(matches!(reason, Unsplittable::Xbzrle | Unsplittable::Postcopy { command: 6 }));
    }
}
