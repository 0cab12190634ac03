//! Connections that were accepted, and partly read, before the tap.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use page::{Batch, Body, PAGE_BYTES, PageIndex, Pool, SLOT_BYTES};
use parking_lot::Mutex;
use stream::multifd::{HEAD_BYTES, write_head};
use stream::{PartSection, write};
use tap::{Block, Head, Output, Stopped, Taken, TakenChannel, Tap};

const SECTION: u32 = 3;

/// Keeps each page's number, its epoch, and its first byte.
#[derive(Default)]
struct Pages(Mutex<Vec<(u32, u32, u8)>>);

impl Output for Pages {
    fn head(&self, _: Head) -> Result<(), Stopped> {
        Ok(())
    }

    fn batch(&self, batch: Batch) -> Result<(), Stopped> {
        let page = |body: &Body| (body.page.0, batch.epoch.0, batch.bytes_of(*body)[0]);
        self.0.lock().extend(batch.bodies().iter().map(page));
        Ok(())
    }

    fn tail(&self, _: &[u8]) -> Result<(), Stopped> {
        Ok(())
    }

    fn whole(&self, _: &[u8], reason: Option<&str>) -> Result<(), Stopped> {
        panic!("it can be split: {reason:?}")
    }
}

/// The main channel: setup and RAM's last section, each of which ends an epoch.
fn stream() -> Vec<u8> {
    let mut out = Vec::new();
    write::header(&mut out, Some("pc-q35-7.2"));
    write::open_return_path(&mut out);
    let blocks = [Block { name: "pc.ram".to_owned(), bytes: 1 << 20 }];
    write::ram_setup(&mut out, SECTION, &blocks, true, false);
    PartSection::begin_end(&mut out, SECTION, true).finish();
    out.extend_from_slice(b"devices");
    out
}

/// A channel after its first message, with page 7.
fn packets() -> Vec<u8> {
    let mut out = Vec::new();
    write_head(&mut out, "", &[], &[], true);
    write_head(&mut out, "pc.ram", &[PageIndex(7)], &[], false);
    out.resize(out.len() + PAGE_BYTES, 0xab);
    write_head(&mut out, "", &[], &[], true);
    out
}

/// A tap of one channel, from which `before` was read, and QEMU's ends of both connections.
fn start(before: &[u8], pages: &Arc<Pages>) -> (Tap, UnixStream, UnixStream) {
    let (main, of_main) = UnixStream::pair().unwrap();
    let (socket, of_channel) = UnixStream::pair().unwrap();
    let channels = vec![TakenChannel { id: 0, socket, before: before.to_vec() }];
    let taken = Taken { main, before: Vec::new(), channels };
    let tap = Tap::of_taken(taken, Pool::new(4 * SLOT_BYTES), Arc::clone(pages) as _).unwrap();
    (tap, of_main, of_channel)
}

#[test]
fn what_was_read_of_a_channel_before_is_not_lost() {
    let packets = packets();
    for at in [0, 10, HEAD_BYTES, HEAD_BYTES + 10, 2 * HEAD_BYTES] {
        let pages = Arc::<Pages>::default();
        let (tap, mut main, mut channel) = start(&packets[..at], &pages);
        main.write_all(&stream()).unwrap();
        channel.write_all(&packets[at..]).unwrap();
        drop((main, channel));
        tap.join().unwrap();
        assert_eq!(*pages.0.lock(), [(7, 1, 0xab)], "read before: {at}");
    }
}

/// QEMU may wait for ever if it loses a channel before its main connection.
#[test]
fn a_tap_that_hangs_up_at_once_closes_the_main_channel_and_reads_the_others_on() {
    let (tap, mut main, mut channel) = start(&[], &Arc::default());
    let qemu = thread::spawn(move || {
        let _ = main.read(&mut [0]);
        channel.write_all(&vec![0; 1 << 20]).unwrap();
    });
    tap.stopper().hang_up(Duration::from_secs(60));
    qemu.join().unwrap();
}
