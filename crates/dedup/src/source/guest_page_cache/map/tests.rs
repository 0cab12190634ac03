use cachemap::{
    AnswerKind, Budget, Device, Limits, Listener, Query, Reply, State, Summary, VERSION,
};

use super::*;

fn stretch(first: u32, pages: u32, disk: u16, sector: u64) -> Stretch {
    Stretch { first, pages, place: DiskLocation { disk, sector }, at: 100 * first as usize }
}

#[test]
fn pages_are_found_in_any_order() {
    let part = |stretches: &[Stretch]| {
        let blocks = vec![("ram".into(), stretches.to_vec())];
        Arc::new(Map { blocks, ..Map::default() })
    };
    let first = part(&[stretch(10, 4, 0, 800), stretch(14, 1, 1, 63), stretch(20, 2, 0, 8)]);
    let second = part(&[stretch(13, 1, 4, 0), stretch(16, 1, 3, 24)]);
    let bits = Bits::new(0);
    assert!(Places::of("rom", Arc::new([Arc::clone(&first)]), &bits).is_none());
    let mut places = Places::of("ram", Arc::new([first, second]), &bits).unwrap();
    for (page, expected) in [
        (10, Some((0, 800, 0, 1000))),
        (13, Some((0, 824, 0, 1003))),
        (14, Some((1, 63, 0, 1400))),
        (15, None),
        (21, Some((0, 16, 0, 2001))),
        (16, Some((3, 24, 1, 1600))),
        (11, Some((0, 808, 0, 1001))),
        (9, None),
        (22, None),
        (20, Some((0, 8, 0, 2000))),
    ] {
        let found = places.find(PageIndex(page));
        let expected = expected.map(|(disk, sector, part, at)| PageOnDisk {
            place: DiskLocation { disk, sector },
            part,
            at,
        });
        assert_eq!(found, expected, "{page}");
    }
}

/// A run from below q35's memory gap to above it.
#[test]
fn a_run_is_cut_where_memory_is() {
    let text = "FlatView #0\n AS \"memory\", root: system\n \
        0000000000000000-0000000000003fff (prio 0, ram): pc.ram\n \
        0000000100000000-0000000100001fff (prio 0, ram): pc.ram @0000000000004000\n";
    let memory = GuestMemory::read(text, [("pc.ram", 0x6000)]);
    assert_eq!(memory.pages(), 6);
    let mut blocks = vec![("pc.ram".to_owned(), Vec::new())];
    let mut nowhere = NOWHERE_MAX;
    let run = |page, pages| Run { page, sector: 1000, pages, device: 0 };
    add(&run(2, 9), 3, &memory, &mut blocks, &mut nowhere);
    add(&run(0xf_ffff, 3), 4, &memory, &mut blocks, &mut nowhere);
    let expected = [stretch(2, 2, 3, 1000), stretch(4, 2, 4, 1008)];
    let expected = expected.map(|stretch| Stretch { at: 0, ..stretch });
    assert_eq!((&blocks[0].1[..], nowhere), (&expected[..], NOWHERE_MAX - 8));
    // A lying helper's run: each page of the gap would be looked up, in each map.
    let mut blocks = vec![("pc.ram".to_owned(), Vec::new())];
    add(&run(3, 0x10_0000), 3, &memory, &mut blocks, &mut nowhere);
    add(&run(0xf_ffff, 3), 4, &memory, &mut blocks, &mut nowhere);
    add(&run(0x10_0000, 1), 5, &memory, &mut blocks, &mut nowhere);
    let expected = [stretch(3, 1, 3, 1000), stretch(4, 1, 5, 1000)];
    let expected = expected.map(|stretch| Stretch { at: 0, ..stretch });
    assert_eq!((&blocks[0].1[..], nowhere), (&expected[..], 0));
}

/// A helper's map of 4 pages.
fn told() -> CacheMap {
    let (budget, runs_max) = (Budget::default(), 100);
    let query = Query { version: VERSION, nonce: 7, answer: AnswerKind::Map, budget, runs_max };
    let mut bytes = Vec::new();
    let mut reply = Reply::new(&query, "1", &mut bytes);
    reply.device(&Device { sectors: 8000, ..Device::default() }, &mut bytes);
    reply.run(Run { page: 1, sector: 16, pages: 4, device: 0 }, &mut bytes);
    reply.finish(Summary::default(), &mut bytes);
    let mut listener = Listener::new(&query, Limits { ram_pages: 100, end_page: 100 });
    assert_eq!(listener.take(&bytes), Ok(State::Done));
    listener.into_map().unwrap()
}

#[test]
fn pages_that_are_named_and_not_found_are_noticed() {
    let text = "FlatView #0\n AS \"memory\", root: system\n \
        0000000000000000-0000000000003fff (prio 0, ram): pc.ram KVM\n";
    let blocks = || vec![("pc.ram".to_owned(), 0x4000)];
    let (told, known) = (told(), GuestMemory::read(text, [("pc.ram", 0x4000)]));
    for (numbers, memory, is_named, pages) in [
        ([Some(0)], &known, true, 3),
        ([None], &known, false, 0),
        ([Some(0)], &GuestMemory::default(), true, 0),
    ] {
        assert_eq!(names_pages(&told, &numbers), is_named);
        assert_eq!(stretches(&told, &numbers, memory, blocks()).pages(), pages);
    }
}

pub(in crate::source::guest_page_cache) fn map() -> Map {
    let stretches = [stretch(10, 4, 1, 800), stretch(14, 1, 0, 64), stretch(20, 2, 1, 8)];
    let blocks = vec![("rom".into(), vec![]), ("ram".into(), stretches.to_vec())];
    let mut map = Map { blocks, ..Map::default() };
    map.number();
    map
}

/// A map with so many pages in one stretch.
fn long(pages: u32) -> Map {
    Map { blocks: vec![("ram".into(), vec![stretch(0, pages, 0, 8)])], ..Map::default() }
}

#[test]
fn a_large_map_is_cut_to_its_room() {
    const MIB: usize = 1 << 20;
    let (mut room, pages) = (Room::next_to(8 * MIB), 1 << 16);
    let (first, is_all) = room.take(long(pages));
    assert!(is_all && first.told.len() == pages as usize);
    let (second, is_all) = room.take(long(pages));
    assert!(!is_all && second.pages() < pages.into(), "{}", second.pages());
    assert_eq!(second.told.len() as u64, second.pages());
    let (third, is_all) = room.take(long(pages));
    assert!(!is_all, "{}", third.pages());
    let all = first.bytes() + second.bytes() + third.bytes();
    assert!(all <= 2 * MIB, "{all} bytes");
}

fn of(stretches: Vec<Stretch>) -> Map {
    Map { blocks: vec![("ram".into(), stretches)], ..Map::default() }
}

/// Stretches of one page take more memory a page than long ones, and are the lowest here.
#[test]
fn a_map_of_short_rows_stays_within_its_room() {
    const ROOM: usize = 2 << 20;
    let short = (0..50_000).map(|nth| stretch(2 * nth, 1, 0, 8 * u64::from(nth)));
    let rows = short.chain([stretch(1 << 20, 50_000, 1, 8)]).collect();
    let (map, is_all) = Room::next_to(Room::PART * ROOM).take(of(rows));
    assert!(!is_all && map.pages() > 0);
    assert!(map.bytes() <= ROOM, "{} bytes", map.bytes());
}

/// A lying helper's map: many pages at one place.
#[test]
fn rows_at_one_place_become_no_longer_than_they_are() {
    const ROOM: usize = 1 << 20;
    let short = (0..2_000).map(|nth| stretch(2 * nth, 1, 0, 8));
    let rows: Vec<_> = short.chain([stretch(1 << 20, 50_000, 0, 8)]).collect();
    for rows in [rows.clone(), rows.into_iter().rev().collect()] {
        let (map, is_all) = Room::next_to(Room::PART * ROOM).take(of(rows));
        assert!(!is_all && map.pages() <= 52_000, "{} pages", map.pages());
        assert!(map.bytes() <= ROOM, "{} bytes", map.bytes());
    }
}

/// Spare capacity of a vector is memory, too.
#[test]
fn a_map_holds_no_more_places_than_it_counts() {
    let rows = (0..1_000).map(|nth| stretch(2 * nth, 1, 0, 8 * u64::from(nth)));
    let mut rows: Vec<_> = rows.collect();
    rows.reserve_exact(50_000);
    let (map, is_all) = Room::next_to(8 << 20).take(of(rows));
    assert!(is_all);
    assert_eq!(map.blocks[0].1.capacity(), map.blocks[0].1.len());
}

#[test]
fn the_lowest_on_disks_are_kept() {
    for (percent, expected) in [
        (0, vec![]),
        (15, vec![(14, 1)]),
        (50, vec![(14, 1), (20, 2)]),
        (58, vec![(10, 1), (14, 1), (20, 2)]),
        (100, vec![(10, 4), (14, 1), (20, 2)]),
    ] {
        let mut map = map();
        map.cut(percent);
        let kept = map.blocks[1].1.iter().map(|stretch| (stretch.first, stretch.pages));
        assert_eq!(kept.collect::<Vec<_>>(), expected, "{percent} %");
    }
}
