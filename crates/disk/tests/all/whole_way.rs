//! From an NBD client like QEMU's mirror, over lanes, to an NBD server.

#![allow(clippy::cast_possible_truncation, reason = "sizes of a test")]

use std::cell::Cell;
use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};

use disk::{Carry, DiskSink, DiskSource, NbdWriter, SinkDisk, SinkError, serve};
use nbd::client::{Client, Outcome, Settings};
use nbd::server::{Export, RequestKind, negotiate};
use nbd::transmission::{Command, RequestHeader};
use nbd::{Errno, client::Failure};
use page::{DiskId, Encoding, Pool, SLOT_BYTES};

use crate::ends::{Destination, Dice};

const DISK_BYTES: usize = 2 << 20;

fn export() -> Export {
    Export { name: "disk".to_owned(), bytes: DISK_BYTES as u64 }
}

/// The destination's QEMU: an export in memory, with space for `space_bytes`.
fn qemu(path: &Path, space_bytes: usize) -> JoinHandle<Vec<u8>> {
    let listener = UnixListener::bind(path).unwrap();
    thread::spawn(move || {
        let (socket, _) = listener.accept().unwrap();
        let mut connection = negotiate(socket, &[export()]).unwrap().unwrap();
        let (mut image, mut durable) = (vec![0xee; DISK_BYTES], Vec::new());
        while let Ok(Some(request)) = connection.requests.next_request() {
            let place = request.offset as usize..request.offset as usize + request.bytes as usize;
            match request.kind {
                RequestKind::Write if place.end > space_bytes => {
                    connection.replier.fail(request.cookie, Errno::NO_SPACE).unwrap();
                    continue;
                }
                RequestKind::Write => {
                    connection.requests.read_payload(&mut image[place]).unwrap();
                }
                RequestKind::WriteZeroes | RequestKind::Trim => image[place].fill(0),
                RequestKind::Flush => durable.clone_from(&image),
            }
            connection.replier.ok(request.cookie).unwrap();
        }
        durable
    })
}

/// QEMU's end of a mirror.
struct Mirror {
    client: Client<()>,
    outcomes: mpsc::Receiver<Outcome>,
    /// Requests without an outcome.
    open: Cell<usize>,
}

impl Mirror {
    fn new(socket: UnixStream) -> Self {
        let (tell, outcomes) = mpsc::channel();
        let client = Client::over(socket, "disk", &Settings::default(), move |(), outcome| {
            let _ = tell.send(outcome);
        });
        Self { client: client.unwrap(), outcomes, open: Cell::new(0) }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.client.write(offset, data, ()).unwrap();
        self.open.update(|open| open + 1);
    }

    fn write_zeroes(&self, offset: u64, bytes: u64) {
        self.client.write_zeroes(offset, bytes, ()).unwrap();
        self.open.update(|open| open + 1);
    }

    /// Waits until all is written, and then until it is durable. Returns the first failure.
    fn sync(&self) -> Outcome {
        let written: Vec<_> = self.outcomes.iter().take(self.open.take()).collect();
        written.into_iter().collect::<Outcome>()?;
        self.client.flush(()).unwrap();
        self.outcomes.recv().unwrap()
    }
}

/// Mirrors to the destination's export at `path`: `write` writes through the client, and a sync
/// follows. Returns the outcome of the sync, and what failed in the sink.
fn mirror(path: &Path, write: impl FnOnce(&Mirror)) -> (Outcome, Option<SinkError>) {
    let (tell, failed) = mpsc::channel();
    let writer = NbdWriter::connect(path, "disk", &Settings::default()).unwrap();
    assert_eq!(writer.bytes(), DISK_BYTES as u64);
    let disk = SinkDisk { name: "vda".to_owned(), bytes: writer.bytes(), writer: Arc::new(writer) };
    let sink = DiskSink::start(vec![disk], Pool::new(4 * SLOT_BYTES), None, move |error| {
        tell.send(error.clone()).unwrap();
    });
    let destination =
        Destination::start(sink.unwrap(), |nth| (nth < 3).then_some(100_000 * (nth as usize + 1)));
    let lanes = destination.lanes(2, Encoding::Zstd);
    let sink = Arc::clone(&destination.sink);
    let source = DiskSource::new(
        DiskId(0),
        "vda",
        DISK_BYTES as u64,
        Pool::new(4 * SLOT_BYTES),
        Arc::clone(&lanes) as Arc<dyn Carry>,
        move |disk| sink.flush(disk).map_err(|error| error.to_string()),
    );
    // As the control connection does in a migration: the source learns of it, and gives up.
    let control = thread::spawn({
        let lanes = Arc::clone(&lanes);
        move || {
            let failed = failed.recv().ok();
            lanes.stop();
            failed
        }
    });
    let (ours, qemus) = UnixStream::pair().unwrap();
    let serving = thread::spawn(move || {
        let mut connection = negotiate(ours, &[export()]).unwrap().unwrap();
        serve(&mut connection, &source)
    });
    let mut goodbye = qemus.try_clone().unwrap();
    let mirror = Mirror::new(qemus);
    write(&mirror);
    let outcome = mirror.sync();
    if outcome.is_ok() {
        let command = Command::DISCONNECT;
        let header = RequestHeader { flags: 0, command, cookie: 0, offset: 0, bytes: 0 };
        goodbye.write_all(&header.to_bytes()).unwrap();
        serving.join().unwrap().unwrap();
    } else {
        drop(mirror);
        serving.join().unwrap().unwrap_err();
    }
    lanes.stop();
    drop(destination);
    (outcome, control.join().unwrap())
}

/// Like QEMU's mirror, never has two overlapping writes in flight.
fn write_something(mirror: &Mirror, model: &mut [u8]) {
    let mut dice = Dice(5);
    for round in 0..40_u64 {
        for part in 0..8 {
            let part_bytes = DISK_BYTES as u64 / 8;
            let start = part * part_bytes + dice.below(part_bytes / 1024) * 512;
            let bytes = (1 + dice.below(part_bytes / 1024)) * 512;
            let place = start as usize..(start + bytes) as usize;
            if dice.below(4) == 0 {
                mirror.write_zeroes(start, bytes);
                model[place].fill(0);
            } else {
                let content: Vec<_> = (0..bytes).map(|at| (at * round + part) as u8 | 1).collect();
                mirror.write(start, &content);
                model[place].copy_from_slice(&content);
            }
        }
        mirror.sync().unwrap();
    }
}

#[test]
fn what_a_mirror_writes_is_durable_at_the_destination() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nbd");
    let qemu = qemu(&path, DISK_BYTES);
    let mut model = vec![0xee; DISK_BYTES];
    let (outcome, failed) = mirror(&path, |mirror| write_something(mirror, &mut model));
    assert_eq!((outcome, failed), (Ok(()), None));
    assert!(qemu.join().unwrap() == model);
}

#[test]
fn a_full_destination_fails_the_mirror_and_says_which_disk() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nbd");
    let qemu = qemu(&path, DISK_BYTES / 2);
    let (outcome, failed) = mirror(&path, |mirror| {
        mirror.write(0, &[1; 4096]);
        mirror.write(DISK_BYTES as u64 - 4096, &[1; 4096]);
    });
    assert!(matches!(outcome, Err(Failure::Disk { .. })), "{outcome:?}");
    let failed = failed.unwrap().to_string();
    assert_eq!(failed, "disk vda: no space left at the destination");
    qemu.join().unwrap();
}
