//! Streams between two QEMUs that another program commands: requests for answers stay
//! in them, and from where they can't be split any more they are passed on unchanged.

use page::PageIndex;
use stream::fuzzing::{Taken, seed_blocks, split_by};
use stream::{
    PartSection, PostcopyWatch, Splitter, StreamError, StreamKind, Unsplittable, resumes_postcopy,
    write,
};

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

/// A section in which a difference follows a page of the same or another block.
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
fn requests_for_answers_stay_in_the_head() {
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

/// QEMU sends the command with the capability `dirty-bitmaps` alone, too, and RAM as usual.
#[test]
fn a_stream_whose_bitmaps_may_be_late_never_turns_to_postcopy() {
    for stream in [StreamKind::Classic, StreamKind::Multifd] {
        let mut data = Vec::new();
        write::header(&mut data, Some("pc-q35-10.0"));
        write::open_return_path(&mut data);
        write::bitmaps_advise(&mut data);
        write::ram_setup(&mut data, 2, &seed_blocks(), true, false);
        let head = data.clone();
        PartSection::begin_end(&mut data, 2, true).finish();
        let sent = taken(stream, &data).head.unwrap();
        assert_eq!((sent.bytes, sent.may_turn_to_postcopy), (head, false), "{stream:?}");
    }
}

fn taken_head(setup: &[u8]) -> stream::Head {
    let mut data = setup.to_vec();
    PartSection::begin_end(&mut data, 2, true).finish();
    taken(StreamKind::Classic, &data).head.unwrap()
}

#[test]
fn a_switch_to_postcopy_is_passed_on_with_the_rest_of_the_stream() {
    for stream in [StreamKind::Classic, StreamKind::Multifd] {
        let mut data = setup(true);
        let mut section = PartSection::begin(&mut data, 2, true);
        section.fill("pc.ram", PageIndex(1), 0).unwrap();
        section.finish();
        let mut rest = Vec::new();
        write::switchover_start(&mut rest);
        write::postcopy_discard(&mut rest, "pc.ram", PageIndex(1));
        write::ping(&mut rest, 2);
        rest.extend_from_slice(b"\x08\x00\x07\x00\x04\x00\x00\x00\x09a package and pages");
        data.extend_from_slice(&rest);
        let taken = taken(stream, &data);
        assert_eq!(taken.pages.len(), 1);
        assert_eq!(taken.rest, Some(rest));
        assert_eq!(taken.tail, None);
    }
}

/// The places of the pieces in which a stream is seen to turn to post-copy.
fn turns(data: &[u8], piece_bytes: usize) -> Vec<usize> {
    let mut watch = PostcopyWatch::default();
    let pieces = data.chunks(piece_bytes).enumerate();
    pieces.filter(|(_, piece)| watch.push(piece)).map(|(nth, _)| nth * piece_bytes).collect()
}

#[test]
fn a_switch_to_postcopy_is_found_however_the_stream_is_cut() {
    for parts in [0, 3] {
        let mut data = setup(true);
        (0..parts).for_each(|first| part(&mut data, first));
        write::switchover_start(&mut data);
        let begin = data.len();
        write::postcopy_discard(&mut data, "pc.ram", PageIndex(1));
        let end = data.len();
        data.extend_from_slice(b"\x08\x00\x07\x00\x04\x00\x00\x00\x09a package and pages");
        for piece_bytes in [1, 7, 100, 5000, data.len()] {
            let found = turns(&data, piece_bytes);
            let [at] = found[..] else { panic!("{parts} {piece_bytes}: {found:?}") };
            assert!(at + piece_bytes > begin && at < end, "{parts} {piece_bytes}: {at}");
        }
        assert!(turns(&data[..begin], 7).is_empty(), "it may turn");
    }
}

#[test]
fn a_switch_to_postcopy_is_found_behind_pages_that_qemu_has_encoded() {
    let mut data = setup(true);
    let mut section = PartSection::begin(&mut data, 2, true);
    section.difference("pc.ram", PageIndex(1), &[0, 1, 7]).unwrap();
    section.fill("pc.ram", PageIndex(2), 0).unwrap();
    section.compressed("pc.ram", PageIndex(3), &[8; 5000]).unwrap();
    section.difference("pc.ram", PageIndex(4), &[9; 3]).unwrap();
    section.finish();
    let begin = data.len();
    write::postcopy_discard(&mut data, "pc.ram", PageIndex(1));
    for piece_bytes in [1, 7, 100, 5000, data.len()] {
        let found = turns(&data, piece_bytes);
        let [at] = found[..] else { panic!("{piece_bytes}: {found:?}") };
        assert!(at + piece_bytes > begin, "{piece_bytes}: {at}");
    }
    // No page is that long: it is no record that is known.
    let mut data = setup(true);
    let mut section = PartSection::begin(&mut data, 2, true);
    section.compressed("pc.ram", PageIndex(3), &[8; 9000]).unwrap();
    section.finish();
    write::postcopy_discard(&mut data, "pc.ram", PageIndex(1));
    assert!(turns(&data, 100).is_empty());
}

/// It has no header: its first commands ask what has arrived of each block.
#[test]
fn a_stream_that_resumes_postcopy_is_found_however_it_is_cut() {
    let mut data = Vec::new();
    write::recv_bitmap(&mut data, "pc.ram");
    write::recv_bitmap(&mut data, "vga.vram");
    for piece_bytes in [1, 7, data.len()] {
        let found = turns(&data, piece_bytes);
        assert!(matches!(found[..], [at] if at < 8), "{piece_bytes}: {found:?}");
    }
    assert!(resumes_postcopy(&data[..3]) && !resumes_postcopy(&data[..2]));
    let mut ping = Vec::new();
    write::ping(&mut ping, 1);
    assert!(!resumes_postcopy(&ping) && turns(&ping, 100).is_empty());
    assert!(!resumes_postcopy(&setup(true)));
}

#[test]
fn other_streams_never_turn_to_postcopy() {
    let mut ended = setup(true);
    part(&mut ended, 0);
    PartSection::begin_end(&mut ended, 2, true).finish();
    write::postcopy_discard(&mut ended, "pc.ram", PageIndex(1));
    let mut not_advised = setup(false);
    part(&mut not_advised, 0);
    write::postcopy_discard(&mut not_advised, "pc.ram", PageIndex(1));
    let encrypted = [0x16, 3, 1].into_iter().cycle().take(600).collect();
    for data in [ended, not_advised, differences(false, true), encrypted, Vec::new()] {
        assert!(turns(&data, 100).is_empty() && turns(&data, 1 << 20).is_empty());
    }
}

/// The destination's QEMU has seen neither the section's beginning nor the record that
/// named the block.
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

fn two_compressed(mut section: PartSection<'_>) {
    section.compressed("pc.ram", PageIndex(1), b"packed").unwrap();
    section.compressed("pc.ram", PageIndex(2), b"packed, too").unwrap();
    section.finish();
}

/// Before 9.1 QEMU could compress pages itself, all but the first of each block.
#[test]
fn pages_that_qemu_compresses_are_passed_on() {
    let mut data = setup(false);
    let mut section = begin(&mut data, false);
    section.body("pc.ram", PageIndex(0), &[7; 4096]).unwrap();
    two_compressed(section);
    data.extend_from_slice(b"devices");
    let taken = taken(StreamKind::Classic, &data);
    let mut rest = Vec::new();
    two_compressed(begin(&mut rest, false));
    rest.extend_from_slice(b"devices");
    assert_eq!((taken.rest, taken.pages.len()), (Some(rest), 1));

    let new = Splitter::new(StreamKind::Classic);
    let error = split_by(new, &data, 100, 100).unwrap_err().1;
    assert_eq!(error, StreamError::Late(Unsplittable::Compressed));
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

/// The agent's own moves don't enable postcopy or XBZRLE, so only another program can
/// have.
#[test]
fn a_stream_that_is_not_answered_must_not_switch() {
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
