//! Streams over real sockets: whole, cut short, hostile, and stopped.

mod held;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use page::{Batch, Body, Epoch, PAGE_BYTES, PageIndex, Pool, SLOT_BYTES};
use parking_lot::Mutex;
use stream::multifd::{Init, write_head};
use stream::{PartSection, write};
use tap::{Block, Channels, Head, Output, Stopped, Tap, TapError};

const SECTION: u32 = 3;

/// Block, page, epoch, and the first byte or fill.
type Page = (u16, u32, u32, u8);

/// An output that keeps all it receives.
#[derive(Default)]
struct Kept {
    head: Mutex<Option<Head>>,
    pages: Mutex<Vec<Page>>,
    tail: Mutex<Vec<u8>>,
    whole: Mutex<(Vec<u8>, Option<String>)>,
    /// Bodies reported by `arrived`, with the number of reports.
    arrived: Mutex<HashMap<Page, u32>>,
    slow: bool,
    panics: bool,
    refuses: bool,
}

impl Output for Kept {
    fn head(&self, head: Head) -> Result<(), Stopped> {
        *self.head.lock() = Some(head);
        if self.refuses { Err(Stopped) } else { Ok(()) }
    }

    fn arrived(&self, batch: &Batch, first: usize) {
        let bodies = batch.bodies()[first..].iter();
        let page =
            |body: &Body| (batch.block.0, body.page.0, batch.epoch.0, batch.bytes_of(*body)[0]);
        let mut arrived = self.arrived.lock();
        bodies.for_each(|body| *arrived.entry(page(body)).or_default() += 1);
    }

    fn batch(&self, batch: Batch) -> Result<(), Stopped> {
        assert!(!self.panics, "a fault of ours, on purpose");
        let mut arrived = self.arrived.lock();
        for body in batch.bodies() {
            let page = (batch.block.0, body.page.0, batch.epoch.0, batch.bytes_of(*body)[0]);
            assert_eq!(arrived.remove(&page), Some(1), "{page:?} arrives once, and first");
        }
        drop(arrived);
        let mut pages = self.pages.lock();
        for body in batch.bodies() {
            let bytes = batch.bytes_of(*body);
            assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a body is not torn");
            pages.push((batch.block.0, body.page.0, batch.epoch.0, bytes[0]));
        }
        for fill in batch.fills() {
            let run = fill.first.0..fill.first.0 + fill.count;
            pages.extend(run.map(|page| (batch.block.0, page, batch.epoch.0, fill.byte)));
        }
        drop(pages);
        if self.slow {
            thread::yield_now();
        }
        Ok(())
    }

    fn tail(&self, bytes: &[u8]) -> Result<(), Stopped> {
        self.tail.lock().extend_from_slice(bytes);
        Ok(())
    }

    fn whole(&self, bytes: &[u8], reason: Option<&str>) -> Result<(), Stopped> {
        let mut whole = self.whole.lock();
        whole.0.extend_from_slice(bytes);
        if let Some(reason) = reason {
            whole.1 = Some(reason.to_owned());
        }
        Ok(())
    }
}

struct Setup {
    path: tempfile::TempPath,
    tap: Tap,
    kept: Arc<Kept>,
    pool: Arc<Pool>,
}

fn start(channels: Channels, slots: usize) -> Setup {
    start_held(channels, slots, false)
}

fn start_held(channels: Channels, slots: usize, held: bool) -> Setup {
    start_with(channels, slots, held, Kept { slow: true, ..Kept::default() })
}

fn start_with(channels: Channels, slots: usize, held: bool, kept: Kept) -> Setup {
    let bound = tempfile::Builder::new().make(|path| UnixListener::bind(path)).unwrap();
    let (listener, path) = bound.into_parts();
    let kept = Arc::new(kept);
    let pool = Pool::new(slots * SLOT_BYTES);
    let output = Arc::clone(&kept) as Arc<dyn Output>;
    let tap = Tap::start(listener, channels, held, Arc::clone(&pool), output, || ()).unwrap();
    Setup { path, tap, kept, pool }
}

impl Setup {
    fn connect(&self) -> UnixStream {
        UnixStream::connect(&self.path).unwrap()
    }
}

fn blocks() -> Vec<Block> {
    let block = |name: &str, pages: u64| Block { name: name.to_owned(), bytes: pages * 4096 };
    vec![block("pc.ram", 4096), block("pc.bios", 64)]
}

fn setup_bytes() -> Vec<u8> {
    let mut out = Vec::new();
    write::header(&mut out, Some("pc-q35-7.2"));
    let blocks = blocks();
    write::ram_setup(&mut out, SECTION, &blocks, true, false);
    out
}

fn body(byte: u8) -> [u8; PAGE_BYTES] {
    [byte; PAGE_BYTES]
}

/// A classic stream of `sections` RAM sections, and the pages in it.
fn classic(sections: u32) -> (Vec<u8>, Vec<Page>) {
    let mut out = setup_bytes();
    let mut pages = Vec::new();
    for nth in 0..=sections {
        let epoch = nth + 1;
        let mut section = if nth == sections {
            PartSection::begin_end(&mut out, SECTION, true)
        } else {
            PartSection::begin(&mut out, SECTION, true)
        };
        for page in 0..700u32 {
            let byte = u8::try_from((page + epoch) % 255).unwrap();
            if page % 5 == 0 {
                section.fill("pc.ram", PageIndex(page), 0).unwrap();
                pages.push((0, page, epoch, 0));
            } else {
                section.body("pc.ram", PageIndex(page), &body(byte)).unwrap();
                pages.push((0, page, epoch, byte));
            }
        }
        section.body("pc.bios", PageIndex(9), &body(77)).unwrap();
        pages.push((1, 9, epoch, 77));
        section.finish();
    }
    out.extend_from_slice(b"devices");
    (out, pages)
}

#[test]
fn a_classic_stream_is_split_with_a_pool_of_one_slot() {
    let setup = start(Channels::Classic, 1);
    let (bytes, mut expected) = classic(4);
    let mut qemu = setup.connect();
    // In pieces that end at arbitrary places.
    for piece in bytes.chunks(100_003) {
        qemu.write_all(piece).unwrap();
    }
    drop(qemu);
    setup.tap.join().unwrap();
    let mut pages = std::mem::take(&mut *setup.kept.pages.lock());
    let epoch_first = pages.iter().map(|page| page.2).min().unwrap();
    let shift = 1 - i64::from(epoch_first);
    for page in &mut pages {
        page.2 = u32::try_from(i64::from(page.2) + shift).unwrap();
    }
    pages.sort_unstable();
    expected.sort_unstable();
    assert!(pages == expected);
    assert_eq!(setup.kept.head.lock().as_ref().unwrap().blocks, blocks());
    assert!(setup.kept.tail.lock().ends_with(b"devices"));
    assert_eq!(setup.pool.out_bytes(), 0);
}

#[test]
fn four_channels_share_a_pool_of_two_slots_without_waiting_for_each_other() {
    let setup = start(Channels::Multifd(4), 2);
    let channels: Vec<_> = (0..4u32)
        .map(|id| {
            let mut socket = setup.connect();
            thread::spawn(move || {
                let mut out = Vec::new();
                Init { uuid: [0; 16], id: u8::try_from(id).unwrap() }.write(&mut out);
                for round in 0..6u32 {
                    for packet in 0..6 {
                        let at = (id * 6 + packet) * 128;
                        let normal: Vec<_> = (at..at + 70).map(PageIndex).collect();
                        let zero: Vec<_> = (at + 70..at + 128).map(PageIndex).collect();
                        write_head(&mut out, "pc.ram", &normal, &zero, false);
                        let byte = u8::try_from(round + 1).unwrap();
                        out.resize(out.len() + 70 * PAGE_BYTES, byte);
                    }
                    write_head(&mut out, "", &[], &[], true);
                }
                socket.write_all(&out).unwrap();
            })
        })
        .collect();
    let mut main = setup.connect();
    let mut out = setup_bytes();
    // A section ends with each SYNC on the channels, including the setup
    // section.
    for _ in 0..4 {
        PartSection::begin(&mut out, SECTION, true).finish();
    }
    PartSection::begin_end(&mut out, SECTION, true).finish();
    out.extend_from_slice(b"devices");
    main.write_all(&out).unwrap();
    for channel in channels {
        channel.join().unwrap();
    }
    drop(main);
    setup.tap.join().unwrap();
    let pages = setup.kept.pages.lock();
    assert_eq!(pages.len(), 4 * 6 * 6 * 128);
    for (_, _, epoch, byte) in pages.iter().filter(|page| page.3 != 0) {
        assert_eq!(*epoch + 1, u32::from(*byte), "a page has the epoch of its round");
    }
    assert!(setup.kept.tail.lock().ends_with(b"devices"));
}

#[test]
fn a_stream_that_ends_early_is_an_error_wherever_it_ends() {
    let (bytes, _) = classic(1);
    for end in [0, 3, 40, 900, 5000, 700_000, bytes.len() - 4106] {
        let setup = start(Channels::Classic, 2);
        setup.connect().write_all(&bytes[..end]).unwrap();
        assert!(setup.tap.join().is_err(), "cut at {end}");
        assert_eq!(setup.pool.out_bytes(), 0);
    }
}

#[test]
fn a_channel_that_ends_within_a_packet_is_an_error() {
    let setup = start(Channels::Multifd(1), 2);
    let mut main = setup.connect();
    main.write_all(&setup_bytes()).unwrap();
    let mut out = Vec::new();
    Init { uuid: [0; 16], id: 0 }.write(&mut out);
    write_head(&mut out, "pc.ram", &[PageIndex(1)], &[], false);
    setup.connect().write_all(&out).unwrap();
    let error = setup.tap.join().unwrap_err();
    assert!(matches!(error, TapError::Truncated { .. }), "{error}");
}

#[test]
fn pages_outside_their_block_and_strangers_are_refused() {
    let setup = start(Channels::Multifd(1), 2);
    let mut main = setup.connect();
    main.write_all(&setup_bytes()).unwrap();
    let mut out = Vec::new();
    Init { uuid: [0; 16], id: 0 }.write(&mut out);
    write_head(&mut out, "pc.bios", &[PageIndex(64)], &[], false);
    setup.connect().write_all(&out).unwrap();
    assert!(matches!(setup.tap.join().unwrap_err(), TapError::Multifd(_)));

    let setup = start(Channels::Classic, 2);
    setup.connect().write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    assert!(matches!(setup.tap.join().unwrap_err(), TapError::Stream(_)));
}

#[test]
fn a_classic_stream_that_cannot_be_split_is_passed_on_whole() {
    let mut bytes = Vec::new();
    write::header(&mut bytes, None);
    write::section_header(&mut bytes, false, 1, "vfio", 1);
    bytes.extend_from_slice(&[9; 300_000]);
    let setup = start(Channels::Classic, 1);
    setup.connect().write_all(&bytes).unwrap();
    setup.tap.join().unwrap();
    let whole = setup.kept.whole.lock();
    assert!(whole.0 == bytes);
    assert!(whole.1.as_ref().unwrap().contains("vfio"));
}

/// A multifd channel with this many SYNCs; its one page precedes the SYNC `page_before`.
fn only_channel(syncs: u32, page_before: u32) -> Vec<u8> {
    let mut out = Vec::new();
    Init { uuid: [0; 16], id: 0 }.write(&mut out);
    for sync in 0..syncs {
        if sync == page_before {
            write_head(&mut out, "pc.ram", &[], &[PageIndex(1)], false);
        }
        write_head(&mut out, "", &[], &[], true);
    }
    out
}

/// The main channel and one multifd channel with this many sections and SYNCs;
/// the last page precedes the SYNC `page_before`.
fn rounds(sections: u32, syncs: u32, page_before: u32) -> Result<(), TapError> {
    let setup = start(Channels::Multifd(1), 2);
    setup.connect().write_all(&only_channel(syncs, page_before)).unwrap();
    let mut out = setup_bytes();
    for _ in 2..sections {
        PartSection::begin(&mut out, SECTION, true).finish();
    }
    PartSection::begin_end(&mut out, SECTION, true).finish();
    setup.connect().write_all(&out).unwrap();
    setup.tap.join()
}

#[test]
fn channels_and_main_stream_must_count_the_same_rounds() {
    assert!(rounds(4, 4, 3).is_ok());
    assert!(rounds(4, 5, 4).is_ok(), "a SYNC at the very end");
    assert!(matches!(rounds(4, 3, 1).unwrap_err(), TapError::Rounds { ended: 3, main: 4, .. }));
    assert!(matches!(rounds(4, 6, 1).unwrap_err(), TapError::Rounds { ended: 6, main: 4, .. }));
}

#[test]
fn a_migration_that_ends_without_all_channels_is_an_error() {
    let setup = start(Channels::Multifd(2), 2);
    let mut out = setup_bytes();
    PartSection::begin_end(&mut out, SECTION, true).finish();
    setup.connect().write_all(&out).unwrap();
    let error = setup.tap.join().unwrap_err();
    assert!(matches!(error, TapError::ChannelsMissing { connected: 1 }), "{error}");
}

#[test]
fn only_the_main_channel_is_accepted_until_qemu_is_ready() {
    let bound = tempfile::Builder::new().make(|path| UnixListener::bind(path)).unwrap();
    let (listener, path) = bound.into_parts();
    let same = listener.try_clone().unwrap();
    let ((waits, waiting), (ready, is_ready)) = (mpsc::channel(), mpsc::channel());
    let until_ready = move || {
        waits.send(()).unwrap();
        is_ready.recv().unwrap();
    };
    let (kept, channels) = (Arc::new(Kept::default()), Channels::Multifd(1));
    let output = Arc::clone(&kept) as Arc<dyn Output>;
    let pool = Pool::new(2 * SLOT_BYTES);
    let tap = Tap::start(listener, channels, false, pool, output, until_ready).unwrap();
    let mut main = UnixStream::connect(&path).unwrap();
    main.write_all(&setup_bytes()).unwrap();
    waiting.recv().unwrap();
    let channel = UnixStream::connect(&path).unwrap();
    // It is read meanwhile.
    while kept.head.lock().is_none() {
        thread::yield_now();
    }
    // The channel is still there to be accepted. The file's mode is that of the tap's, too.
    same.set_nonblocking(true).unwrap();
    drop(same.accept().unwrap());
    same.set_nonblocking(false).unwrap();
    drop(channel);
    ready.send(()).unwrap();
    UnixStream::connect(&path).unwrap().write_all(&only_channel(2, 1)).unwrap();
    let mut out = Vec::new();
    PartSection::begin_end(&mut out, SECTION, true).finish();
    main.write_all(&out).unwrap();
    drop(main);
    tap.join().unwrap();
    assert_eq!(kept.pages.lock().len(), 1);
}

#[test]
fn pages_do_not_wait_in_the_tap_for_more_pages() {
    let setup = start(Channels::Classic, 1);
    let (bytes, _) = classic(0);
    let mut qemu = setup.connect();
    qemu.write_all(&bytes[..200_000]).unwrap();
    // The only buffer comes back although QEMU sends no more.
    while setup.kept.pages.lock().is_empty() {
        thread::yield_now();
    }
    drop(setup.pool.take().unwrap());
    qemu.write_all(&bytes[200_000..]).unwrap();
    drop(qemu);
    setup.tap.join().unwrap();
}

#[test]
fn an_error_on_one_channel_ends_those_that_wait_for_a_buffer() {
    let setup = start(Channels::Multifd(1), 1);
    let held = setup.pool.take().unwrap();
    let mut main = setup.connect();
    main.write_all(&setup_bytes()).unwrap();
    let mut out = Vec::new();
    Init { uuid: [0; 16], id: 0 }.write(&mut out);
    write_head(&mut out, "pc.ram", &[PageIndex(1)], &[], false);
    out.resize(out.len() + PAGE_BYTES, 1);
    let mut channel = setup.connect();
    channel.write_all(&out).unwrap();
    main.write_all(&[0x55]).unwrap();
    assert!(matches!(setup.tap.join().unwrap_err(), TapError::Stream(_)));
    drop(held);
}

#[test]
fn stopping_ends_a_tap_wherever_it_waits() {
    // The tap waits for a connection, a first byte, more bytes, or a buffer.
    for stage in 0..4 {
        let setup = start(Channels::Multifd(2), 1);
        let mut held = Vec::new();
        let mut held_slots = Vec::new();
        if stage >= 1 {
            held.push(setup.connect());
        }
        if stage >= 2 {
            held[0].write_all(&setup_bytes()).unwrap();
        }
        if stage >= 3 {
            let taken = setup.pool.take().unwrap();
            let mut channel = setup.connect();
            let mut out = Vec::new();
            Init { uuid: [0; 16], id: 0 }.write(&mut out);
            write_head(&mut out, "pc.ram", &[PageIndex(1)], &[], false);
            channel.write_all(&out).unwrap();
            held.push(channel);
            held_slots.push(taken);
        }
        let stopper = setup.tap.stopper();
        stopper.stop();
        assert!(matches!(setup.tap.join().unwrap_err(), TapError::Stopped), "stage {stage}");
        stopper.cut();
    }
    assert_eq!(Epoch(0), Epoch::default());
}

#[test]
fn a_tap_that_has_stopped_takes_all_that_qemu_still_writes() {
    let setup = start(Channels::Multifd(2), 1);
    let mut main = setup.connect();
    let mut first = setup.connect();
    main.write_all(&setup_bytes()).unwrap();
    let stopper = setup.tap.stopper();
    stopper.stop();
    assert!(matches!(setup.tap.join().unwrap_err(), TapError::Stopped));
    let mut second = UnixStream::connect(&setup.path).unwrap();
    // More than any socket buffer holds.
    let plenty = vec![1; 8 << 20];
    for socket in [&mut main, &mut first, &mut second] {
        socket.write_all(&plenty).unwrap();
    }
    stopper.cut();
    assert!(main.write_all(&plenty).is_err());
}

/// The channel's thread learns that there is no block list a moment before the tap counts as
/// stopped, or a moment after.
#[test]
fn a_tap_whose_output_refuses_the_block_list_takes_all_that_qemu_still_writes() {
    let plenty = vec![1; 1 << 20];
    for _ in 0..50 {
        let kept = Kept { refuses: true, ..Kept::default() };
        let setup = start_with(Channels::Multifd(1), 2, false, kept);
        let mut main = setup.connect();
        let mut channel = setup.connect();
        let mut out = Vec::new();
        Init { uuid: [0; 16], id: 0 }.write(&mut out);
        channel.write_all(&out).unwrap();
        main.write_all(&setup_bytes()).unwrap();
        for socket in [&mut main, &mut channel] {
            socket.write_all(&plenty).unwrap();
        }
        let stopper = setup.tap.stopper();
        assert!(matches!(setup.tap.join().unwrap_err(), TapError::Stopped));
        stopper.cut();
    }
}

/// Like a stopped tap: QEMU must be cancellable even if the agent fails.
#[test]
fn a_tap_whose_thread_panics_takes_all_that_qemu_still_writes() {
    let kept = Kept { panics: true, ..Kept::default() };
    let setup = start_with(Channels::Multifd(1), 2, false, kept);
    let mut main = setup.connect();
    let mut channel = setup.connect();
    main.write_all(&setup_bytes()).unwrap();
    let mut out = Vec::new();
    Init { uuid: [0; 16], id: 0 }.write(&mut out);
    write_head(&mut out, "pc.ram", &[PageIndex(7)], &[], false);
    out.extend_from_slice(&body(7));
    write_head(&mut out, "", &[], &[], true);
    channel.write_all(&out).unwrap();
    let stopper = setup.tap.stopper();
    assert!(matches!(setup.tap.join().unwrap_err(), TapError::Stopped));
    let plenty = vec![1; 8 << 20];
    for socket in [&mut main, &mut channel] {
        socket.write_all(&plenty).unwrap();
    }
    stopper.cut();
}
