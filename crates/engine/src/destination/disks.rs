//! The disks of a VM that arrives: from the lanes through a sink into exports of the waiting QEMU.

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use data_threads::Guard;
use disk::{DiskSink, NbdWriter, SinkDisk, SinkError};
use nbd::client::Settings;
use page::{DiskId, Pool};
use parking_lot::Mutex;
use qemu::disks::PreparedImage;
use qemu::export::Exports;
use qemu::machine::Machine;
use transport::BlockSink;
use wire::ToSource;

use super::lanes::ArrivingLanes;
use crate::link::Link;

/// Flushes that may be pending: QEMU requests a handful for each disk at a time.
const FLUSHES_MAX: usize = 1024;

/// A flush requested by the source: its ticket, and the disk.
type Flush = (u64, u16);

pub(super) struct ArrivingDisks {
    sink: Arc<DiskSink>,
    exports: Exports,
    flushes: Mutex<Option<Sender<Flush>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl ArrivingDisks {
    /// Makes QEMU export the images at `socket`, and writes to them what lanes deliver. A later
    /// failure is reported like one of a lane.
    pub(super) fn open(
        machine: &Machine,
        socket: &Path,
        images: &[PreparedImage],
        (pool, room): (&Arc<Pool>, u64),
        link: Arc<Link<ToSource>>,
        lanes: &ArrivingLanes,
    ) -> Result<Self, String> {
        let exports = Exports::start(Arc::clone(&machine.qmp), socket, images)
            .map_err(|error| error.to_string())?;
        let disks = connect(&exports, lanes)?;
        let broken = lanes.broken();
        let on_failure = move |error: &SinkError| {
            // Only the first error matters; a full channel has one already.
            let _ = broken.try_send(error.to_string());
        };
        let local = |error: std::io::Error| format!("starting a thread: {error}");
        let sink = DiskSink::start(disks, Arc::clone(pool), Some(lanes.threads()), on_failure)
            .map_err(local)?;
        let sink = Arc::new(sink);
        let (requests, flushes) = bounded(FLUSHES_MAX);
        let disks =
            Self { sink, exports, flushes: Mutex::new(Some(requests)), threads: Mutex::default() };
        let (sink, flushing) = (Arc::clone(&disks.sink), Arc::clone(&link));
        let guard = || lanes.threads().guard();
        disks
            .start("disk-flush", guard(), move || flush(&sink, &flushes, &flushing))
            .map_err(local)?;
        let sink = Arc::clone(&disks.sink);
        disks
            .start("disk-room", guard(), move || report_room(&sink, room, &link))
            .map_err(local)?;
        Ok(disks)
    }

    fn start(
        &self,
        name: &str,
        guard: Guard,
        run: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<()> {
        let thread = data_threads::spawn(name.to_owned(), move || {
            let _guard = guard;
            run();
        })?;
        self.threads.lock().push(thread);
        Ok(())
    }

    /// The sink that lanes pass blocks to.
    pub(super) fn sink(&self) -> Arc<dyn BlockSink> {
        Arc::clone(&self.sink) as _
    }

    /// Queues a flush of a disk; the answer follows later.
    pub(super) fn flush(&self, ticket: u64, disk: u16) -> Result<(), String> {
        let flushes = self.flushes.lock();
        match flushes.as_ref().map(|flushes| flushes.try_send((ticket, disk))) {
            Some(Err(TrySendError::Full(_))) => {
                Err(format!("the source waits for more than {FLUSHES_MAX} flushes of disks"))
            }
            // The answering thread has ended, and reported why.
            Some(Ok(()) | Err(TrySendError::Disconnected(_))) | None => Ok(()),
        }
    }

    /// Flushes the disks after everything was delivered, and makes QEMU close the images. Only then
    /// may it load the VM.
    pub(super) fn finish(&self) -> Result<(), String> {
        self.sink.flush_all().map_err(|error| error.to_string())?;
        self.close();
        self.exports.stop().map_err(|error| error.to_string())
    }

    /// Stops writing, so that no thread waits for QEMU to write: lanes that wait in the sink wake
    /// up.
    pub(super) fn shut(&self) {
        self.sink.abort();
        self.flushes.lock().take();
    }

    /// The same, and waits until the threads have ended.
    fn close(&self) {
        self.sink.stop();
        self.flushes.lock().take();
        for thread in self.threads.lock().drain(..) {
            let _ = thread.join();
        }
    }
}

impl Drop for ArrivingDisks {
    fn drop(&mut self) {
        self.close();
        // A QEMU that ends while it still exports leaves its socket behind.
        let _ = std::fs::remove_file(self.exports.socket());
    }
}

/// Connects to each export.
fn connect(exports: &Exports, lanes: &ArrivingLanes) -> Result<Vec<SinkDisk>, String> {
    let disks = exports.exports().iter().map(|export| {
        let settings = Settings {
            thread: format!("disk-{}", export.disk),
            threads: Some(Arc::clone(lanes.threads())),
            ..Settings::default()
        };
        let writer = NbdWriter::connect(exports.socket(), &export.name, &settings)
            .map_err(|error| format!("disk {}: {error}", export.disk))?;
        let name = export.disk.clone();
        Ok(SinkDisk { name, bytes: export.bytes, writer: Arc::new(writer) })
    });
    disks.collect()
}

/// Reports to the source that there is room for `room` batches more than were handled, at once and
/// then whenever that has grown by a quarter. All batches that the source may send are handled
/// eventually, so there is always a next report.
fn report_room(sink: &DiskSink, room: u64, link: &Link<ToSource>) {
    let mut finished = 0;
    loop {
        data_threads::point();
        let batches = room.saturating_add(finished);
        if link.send(&ToSource::DiskRoom { batches }).is_err() {
            return;
        }
        match sink.wait_finished(finished + (room / 4).max(1)) {
            Some(now) => finished = now,
            None => return,
        }
    }
}

/// Answers the source's flush requests one after the other.
fn flush(sink: &DiskSink, flushes: &Receiver<Flush>, link: &Link<ToSource>) {
    for (ticket, disk) in flushes {
        data_threads::point();
        let error = match sink.flush(DiskId(disk)) {
            // The source receives why the migration ends, which is no fault of the disk.
            Err(SinkError::Closed) => return,
            flushed => flushed.err().map(|error| error.to_string()),
        };
        if link.send(&ToSource::DiskFlushed { ticket, error }).is_err() {
            return;
        }
    }
}
