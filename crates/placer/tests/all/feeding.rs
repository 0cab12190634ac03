//! The feeder: order, bounds, and what happens when QEMU goes away.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use audit::Delivery;
use page::{BlockId, Epoch, Fill, PAGE_BYTES, PageIndex};
use placer::{BlockPlan, Feeder, FeederError, FeederHandle, PlaceError, Placement, Placer};

use crate::common::{Fed, QemuEnd, body};

fn placer(handle: FeederHandle) -> Placer {
    let bytes = 256 * PAGE_BYTES as u64;
    let plan = BlockPlan { name: "ram0".to_owned(), bytes, placement: Placement::Inline };
    Placer::new(vec![plan], handle).unwrap()
}

fn place_one(placer: &Placer, epoch: u32) -> Result<(), PlaceError> {
    let content = body(epoch.to_le_bytes()[0]);
    placer.place_bodies(
        BlockId(0),
        Epoch(epoch),
        &[PageIndex(epoch % 256)],
        &content,
        Delivery::Body,
    )
}

#[test]
fn everything_comes_in_the_order_it_was_fed() {
    let qemu = QemuEnd::start();
    let feeder = Feeder::start(qemu.socket(), page::Pool::new(0)).unwrap();
    // Longer than a chunk; there is only one chunk.
    let (head, tail) = (vec![b'h'; 3_000_000], vec![b't'; 2_000_000]);
    feeder.head(&head, 5, true).unwrap();
    let placer = placer(feeder.handle());
    for epoch in 0..200 {
        place_one(&placer, epoch).unwrap();
    }
    feeder.tail(&tail).unwrap();
    feeder.finish().unwrap();
    let fed = Fed::parse(&qemu.end(), &head, &tail, 5, true);
    let pages: Vec<_> = fed.records.iter().map(|record| record.page).collect();
    assert_eq!(pages, (0..200).collect::<Vec<_>>());
    assert!(feeder.high_water_bytes() < 1 << 20);
}

#[test]
fn a_whole_stream_passes_as_it_is() {
    let qemu = QemuEnd::start();
    let feeder = Feeder::start(qemu.socket(), page::Pool::new(1 << 20)).unwrap();
    let stream: Vec<_> = (0..3_000_000_u32).map(|n| (n % 251).to_le_bytes()[0]).collect();
    for piece in stream.chunks(77_777) {
        feeder.whole(piece).unwrap();
    }
    feeder.finish().unwrap();
    assert!(qemu.end() == stream);
    assert!(matches!(feeder.whole(b"more"), Err(FeederError::Ended)));
    feeder.finish().unwrap();
}

#[test]
fn a_stream_has_one_head_and_pages_come_after_it() {
    let qemu = QemuEnd::start();
    let feeder = Feeder::start(qemu.socket(), page::Pool::new(1 << 20)).unwrap();
    let placer = placer(feeder.handle());
    let early = place_one(&placer, 0);
    assert!(matches!(early, Err(PlaceError::Feeder(FeederError::NoHead))), "{early:?}");
    feeder.head(b"head", 1, true).unwrap();
    assert!(matches!(feeder.head(b"head", 1, true), Err(FeederError::SecondHead)));
    place_one(&placer, 0).unwrap();
}

#[test]
fn every_call_fails_once_qemu_is_gone() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let feeder = Feeder::start(ours, page::Pool::new(1 << 20)).unwrap();
    feeder.head(b"head", 1, true).unwrap();
    let placer = placer(feeder.handle());
    drop(theirs);
    let error = (0..).find_map(|epoch| place_one(&placer, epoch).err()).unwrap();
    assert!(matches!(error, PlaceError::Feeder(FeederError::Write(_))), "{error}");
    assert!(!error.only_this_lane());
    feeder.stop();
    assert!(matches!(feeder.tail(b"tail"), Err(FeederError::Write(_))));
    assert!(matches!(feeder.finish(), Err(FeederError::Write(_))));
}

#[test]
fn a_qemu_that_does_not_read_makes_lanes_wait_until_it_reads_or_all_is_stopped() {
    for stop in [false, true] {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let feeder = Feeder::start(ours, page::Pool::new(2 << 20)).unwrap();
        feeder.head(b"head", 1, true).unwrap();
        let placer = placer(feeder.handle());
        thread::scope(|scope| {
            let lanes: Vec<_> = (0..3)
                .map(|_| {
                    scope.spawn(|| {
                        let content = [1; 128 * PAGE_BYTES];
                        let pages: Vec<_> = (0..128).map(PageIndex).collect();
                        (0..20).try_for_each(|epoch| {
                            placer.place_bodies(
                                BlockId(0),
                                Epoch(epoch),
                                &pages,
                                &content,
                                Delivery::Body,
                            )
                        })
                    })
                })
                .collect();
            while feeder.high_water_bytes() + (1 << 20) < 2 << 20 {
                thread::yield_now();
            }
            if stop {
                feeder.stop();
            } else {
                scope.spawn(move || {
                    let mut all = Vec::new();
                    theirs.read_to_end(&mut all).unwrap();
                });
            }
            for lane in lanes {
                match lane.join().unwrap() {
                    Ok(()) => assert!(!stop),
                    Err(error) => {
                        let stopped = PlaceError::Feeder(FeederError::Stopped).to_string();
                        assert!(stop && error.to_string() == stopped, "{error}");
                    }
                }
            }
            assert!(feeder.high_water_bytes() <= 2 << 20);
            assert_eq!(feeder.finish().is_err(), stop);
        });
    }
}

/// Otherwise the thread that passes a stream on would not notice what ends the migration.
#[test]
fn a_qemu_that_hangs_is_given_up() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let feeder = Feeder::start(ours, page::Pool::new(1 << 20)).unwrap();
    feeder.give_up_after(Duration::from_millis(1)).unwrap();
    let piece = [7; 64 << 10];
    let error = (0..).find_map(|_| feeder.whole(&piece).err()).unwrap();
    assert!(matches!(error, FeederError::Unread { seconds: 0 }), "{error}");
    assert!(matches!(feeder.finish(), Err(FeederError::Unread { .. })));
    drop(theirs);
}

#[test]
fn a_feeder_that_is_dropped_stops() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let feeder = Feeder::start(ours, page::Pool::new(1 << 20)).unwrap();
    feeder.head(b"head", 1, true).unwrap();
    let placer = placer(feeder.handle());
    drop(feeder);
    let fills = [Fill { first: PageIndex(0), count: 1, byte: 0 }];
    let stopped = placer.place_fills(BlockId(0), Epoch(0), &fills);
    assert!(matches!(stopped, Err(PlaceError::Feeder(FeederError::Stopped))), "{stopped:?}");
    drop(theirs);
}
