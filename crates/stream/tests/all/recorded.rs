//! Streams recorded from QEMU 7.2, 10.0 and 11.1; see `recorded/README.md`.

use stream::fuzzing::{Taken, split, split_by};
use stream::{Splitter, StreamKind, Unsplittable};

const VERSIONS: [&str; 3] = ["7.2", "10.0", "11.1"];
/// Bytes of each stream after RAM's end, and bytes of that end with its footer.
const BEHIND_BYTES: usize = 64;
const END_BYTES: usize = 5 + 8 + 5;

fn recorded(version: &str, what: &str) -> Vec<u8> {
    let home = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/recorded");
    std::fs::read(format!("{home}/{version}-{what}.stream")).unwrap()
}

/// Splits the stream in pieces of several sizes.
fn taken(stream: StreamKind, data: &[u8]) -> Taken {
    let all_at_once = split(stream, data, usize::MAX >> 1, 1).unwrap();
    for piece_bytes in [1, 7, 100] {
        assert_eq!(split(stream, data, piece_bytes, 1).unwrap(), all_at_once);
    }
    assert_eq!(all_at_once.whole, None, "it is not split");
    all_at_once
}

fn has(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// The tail before RAM's end, without the SWITCHOVER_START of QEMU 10 and newer.
fn before_end(tail: &[u8]) -> &[u8] {
    let (before, end) = tail.split_at(tail.len() - END_BYTES - BEHIND_BYTES);
    assert_eq!(end[0], 3, "RAM's END");
    before.strip_suffix(&[8, 0, 11, 0, 0]).unwrap_or(before)
}

fn names(taken: &Taken) -> Vec<&str> {
    let blocks = &taken.head.as_ref().unwrap().blocks;
    blocks.iter().map(|block| block.name.as_str()).collect()
}

#[test]
fn each_stream_is_split_and_its_devices_are_left_alone() {
    let what = ["plain", "postcopy", "postcopy-huge", "bitmaps", "postcopy-bitmaps", "virtio-mem"];
    for version in VERSIONS {
        for what in what {
            let data = recorded(version, what);
            let taken = taken(StreamKind::Classic, &data);
            let tail = taken.tail.as_ref().unwrap();
            assert!(tail.ends_with(&data[data.len() - BEHIND_BYTES..]), "{version} {what}");
            let head = taken.head.as_ref().unwrap();
            assert!(head.footers && names(&taken).contains(&"pc.bios"), "{version} {what}");
        }
    }
}

/// The destination, which a management tool has set up in the same way, is notified.
#[test]
fn a_migration_that_may_turn_to_postcopy_says_so_in_its_head() {
    // POSTCOPY_ADVISE, with the page sizes of RAM and of the guest.
    let advises = [8, 0, 3, 0, 16, 0, 0, 0, 0, 0];
    for version in VERSIONS {
        for (what, is_advised) in
            [("plain", false), ("bitmaps", false), ("postcopy", true), ("postcopy-bitmaps", true)]
        {
            let head = taken(StreamKind::Classic, &recorded(version, what)).head.unwrap();
            assert_eq!(has(&head.bytes, &advises), is_advised, "{version} {what}");
            assert_eq!(head.may_turn_to_postcopy, is_advised, "{version} {what}");
        }
    }
}

#[test]
fn a_block_of_huge_pages_is_a_block_as_any_other() {
    for version in VERSIONS {
        let taken = taken(StreamKind::Classic, &recorded(version, "postcopy-huge"));
        let head = taken.head.as_ref().unwrap();
        let ram = head.blocks.iter().find(|block| block.bytes == 32 << 20).unwrap();
        assert!(ram.name.ends_with('m'), "{ram:?}");
        // The destination receives the list with the page size after the block's own.
        assert!(has(&head.bytes, &[0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0x20, 0, 0]));
        assert_eq!(
            names(&taken).len(),
            names(&self::taken(StreamKind::Classic, &recorded(version, "plain"),)).len()
        );
    }
}

/// The head announces the bitmaps; QEMU's records of them are empty until the VM has
/// stopped, and the content follows RAM's end.
#[test]
fn dirty_bitmaps_begin_in_the_head() {
    for version in VERSIONS {
        for what in ["bitmaps", "postcopy-bitmaps"] {
            let taken = taken(StreamKind::Classic, &recorded(version, what));
            let head = taken.head.unwrap().bytes;
            assert!(has(&head, b"dirty-bitmap") && has(&head, b"\x02d0\x02b1"), "{version} {what}");
            assert_eq!(before_end(taken.tail.as_ref().unwrap()), b"", "{version} {what}");
        }
    }
}

/// With multifd the head was already sent when they start: they go with the tail, before
/// RAM's end, with their footer.
#[test]
fn dirty_bitmaps_begin_in_the_tail_beside_channels() {
    for version in VERSIONS {
        let taken = taken(StreamKind::Multifd, &recorded(version, "bitmaps"));
        let head = taken.head.unwrap().bytes;
        assert!(!has(&head, b"dirty-bitmap"));
        let tail = taken.tail.unwrap();
        assert!(tail[6..].starts_with(b"dirty-bitmap"), "{version}");
        let begin = before_end(&tail);
        assert_eq!(begin[begin.len() - 5], 0x7e, "{version}");
    }
}

/// 7.2 writes it with the other devices; 10.0 after RAM's setup; 11.1 before it.
#[test]
fn plugged_blocks_of_a_virtio_mem_device_reach_the_destination() {
    let early = b"/virtio-mem-device-early";
    for (version, stream, in_head) in [
        ("7.2", StreamKind::Classic, None),
        ("10.0", StreamKind::Classic, Some(true)),
        ("10.0", StreamKind::Multifd, Some(false)),
        ("11.1", StreamKind::Classic, Some(true)),
        ("11.1", StreamKind::Multifd, Some(true)),
    ] {
        let taken = taken(stream, &recorded(version, "virtio-mem"));
        let (head, tail) = (taken.head.as_ref().unwrap(), taken.tail.as_ref().unwrap());
        assert!(names(&taken).iter().any(|name| name.ends_with("/vmem0")), "{version}");
        assert_eq!(has(&head.bytes, early), in_head == Some(true), "{version} {stream:?}");
        assert_eq!(has(before_end(tail), early), in_head == Some(false), "{version} {stream:?}");
    }
}

/// A management tool's stream: everything from the first difference on goes to the
/// destination's QEMU unchanged, in a section of RAM that it has seen start.
#[test]
fn differences_to_pages_sent_before_end_the_split() {
    for version in VERSIONS {
        let data = recorded(version, "xbzrle");
        let split = |piece_bytes| {
            split_by(Splitter::answered(StreamKind::Classic), &data, piece_bytes, 1).unwrap()
        };
        let taken = split(usize::MAX >> 1);
        assert_eq!(split(7), taken);
        assert!(!taken.pages.is_empty() && taken.tail.is_none() && taken.whole.is_none());
        let rest = taken.rest.unwrap();
        let (begin, record) = rest.split_at(5);
        let name = data.windows(4).position(|four| four == b"\x03ram").unwrap();
        assert_eq!(begin, [&[2], &data[name - 4..name]].concat(), "{version}: a PART of RAM");
        let (word, named) = record.split_at(8);
        assert_eq!(u64::from_be_bytes(word.try_into().unwrap()) & 0xfff, 0x40, "{version}");
        let difference = named.strip_prefix(b"\x06pc.ram").unwrap();
        assert!(difference[0] == 1 && data.ends_with(difference), "{version}");
        // In a stream that is not answered it would be refused.
        let ours = stream::fuzzing::split(StreamKind::Classic, &data, 7, 1).unwrap_err();
        assert_eq!(ours.1, stream::StreamError::Late(Unsplittable::Xbzrle));
    }
}
