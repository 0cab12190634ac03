//! Allocates holes of shared RAM ahead of QEMU.
//!
//! QEMU reads all of RAM, including what the guest has never used. In anonymous memory that
//! costs little. In a memfd, which virtiofs and vhost-user need, the kernel allocates each
//! page that is read, and QEMU has nothing to send meanwhile. So this thread does it while
//! the link is busy: from the end of RAM downwards, because QEMU scans upwards, until the
//! two meet. The pages are charged to QEMU's cgroup, as if QEMU had read them.
//!
//! This hides no page from QEMU, which still reads and reports every hole itself.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use data_threads::DataThreads;
use host::quota;
use qemu::ram_blocks::RamBlocks;
use qemu::room::host_memory;
use ram::Mapping;
use transport::thread_cpu;

use super::control::stream_state::StreamState;
use crate::report_builder::ReportBuilder;

/// Less than this is read too quickly to matter.
const LEAST_BYTES: u64 = 64 << 20;
/// Bytes filled between two checks.
const CHUNK_BYTES: u64 = 4 << 20;
const PAGE_BYTES: u64 = page::PAGE_BYTES as u64;
/// Consecutive chunks found present that mean the thread has met QEMU. The guest may use
/// some of a hole meanwhile, but QEMU has read everything up to its position.
const MET_CHUNKS: usize = 4;
/// The fraction (1/16) that must remain free: of the host's memory, and of the filled bytes
/// in the cgroup.
const SPARE: u64 = 16;

/// Interval between checks whether the link is busy.
const LOOK: Duration = Duration::from_millis(5);

/// Fills holes until it is dropped or has met QEMU.
pub(crate) struct Prefault {
    stopped: Arc<AtomicBool>,
    /// Returns its CPU time.
    thread: Option<JoinHandle<Duration>>,
}

impl Prefault {
    /// Starts the thread. None if the guest may report free pages, which QEMU then never
    /// reads, or if no thread can be started.
    pub(crate) fn start(
        hints_free_pages: bool,
        ram: &RamBlocks,
        state: &Arc<StreamState>,
        threads: &Arc<DataThreads>,
        report_builder: &Arc<ReportBuilder>,
    ) -> Option<Self> {
        if hints_free_pages {
            return None;
        }
        let stopped = Arc::<AtomicBool>::default();
        // QEMU never reads what a virtio-mem device has unplugged, which are holes as well.
        let read = ram.reached.iter().filter(|block| !block.may_be_unplugged);
        let filling = Filling {
            ram: read.map(|block| Arc::clone(&block.mapping)).collect(),
            stopped: Arc::clone(&stopped),
            state: Arc::clone(state),
            report_builder: Arc::clone(report_builder),
        };
        let threads = Arc::clone(threads);
        let run = move || {
            let _member = threads.join();
            filling.run();
            thread_cpu()
        };
        let thread = data_threads::spawn("prefault", run);
        let thread =
            thread.inspect_err(|error| tracing::warn!(%error, "cannot start a thread to prefault"));
        Some(Self { stopped, thread: Some(thread.ok()?) })
    }

    /// Ends it and returns its CPU time.
    pub(crate) fn stop(mut self) -> Duration {
        self.end()
    }

    fn end(&mut self) -> Duration {
        self.stopped.store(true, Relaxed);
        self.thread.take().and_then(|thread| thread.join().ok()).unwrap_or_default()
    }
}

impl Drop for Prefault {
    fn drop(&mut self) {
        self.end();
    }
}

struct Filling {
    ram: Vec<Arc<Mapping>>,
    stopped: Arc<AtomicBool>,
    state: Arc<StreamState>,
    report_builder: Arc<ReportBuilder>,
}

impl Filling {
    fn run(&self) {
        let holes: Vec<_> = self.ram.iter().flat_map(of_mapping).collect();
        let bytes: u64 = holes.iter().map(|(_, hole)| hole.end - hole.start).sum();
        if bytes < LEAST_BYTES {
            return;
        }
        self.state.expect_holes();
        let filled = if self.has_room(bytes) { self.fill(&holes) } else { 0 };
        self.report_builder.note(format!(
            "{} MiB of the VM's shared memory were never used: QEMU reads them, and so they are \
             allocated here; {} MiB were allocated ahead of QEMU",
            bytes >> 20,
            filled >> 20
        ));
    }

    /// Whether filling leaves memory on this host and to QEMU's cgroup: a migration
    /// cancelled in time would not have allocated it.
    fn has_room(&self, bytes: u64) -> bool {
        let host = host_memory();
        let left = host.available_bytes.is_some_and(|it| it >= bytes + host.total_bytes / SPARE);
        let of_group = self.ram.first().and_then(|ram| quota::memory_left(ram.pid()));
        left && of_group.is_none_or(|left| left >= bytes + bytes / SPARE)
    }

    /// Fills from the last hole downwards. Returns the bytes filled.
    fn fill(&self, holes: &[(&Arc<Mapping>, Range<u64>)]) -> u64 {
        let (mut filled, mut met) = (0, 0);
        for (mapping, hole) in holes.iter().rev() {
            for chunk in downwards(hole) {
                while !self.is_over() && !self.link_is_busy() {
                    thread::sleep(LOOK);
                }
                if self.is_over() || met == MET_CHUNKS {
                    return filled;
                }
                let was_there = all_present(mapping, &chunk);
                if was_there == Some(true) {
                    met += 1;
                    continue;
                }
                met = 0;
                if was_there.is_none() || mapping.prefault(chunk.clone()).is_err() {
                    return filled;
                }
                filled += chunk.end - chunk.start;
            }
        }
        filled
    }

    /// Whether the tap waits for lanes, and so QEMU for the tap. Otherwise QEMU is the
    /// bottleneck, and gets the CPU.
    fn link_is_busy(&self) -> bool {
        self.state.pool.is_used_up()
    }

    fn is_over(&self) -> bool {
        self.stopped.load(Relaxed) || self.state.first_pass_over.load(Relaxed)
    }
}

fn of_mapping(mapping: &Arc<Mapping>) -> impl Iterator<Item = (&Arc<Mapping>, Range<u64>)> {
    let holes = mapping.holes_in_memory().unwrap_or_default();
    holes.into_iter().map(move |hole| (mapping, hole))
}

/// The chunks of a hole, the last one first.
fn downwards(hole: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let start = hole.start;
    let chunk = move |end: u64| end.saturating_sub(CHUNK_BYTES).max(start)..end;
    let first = Some(chunk(hole.end)).filter(|chunk| chunk.start < chunk.end);
    std::iter::successors(first, move |above| {
        Some(chunk(above.start)).filter(|it| it.start < it.end)
    })
}

/// Whether QEMU's page tables contain all of the chunk. None if QEMU has ended.
fn all_present(mapping: &Mapping, chunk: &Range<u64>) -> Option<bool> {
    let pages = (chunk.end - chunk.start) / PAGE_BYTES;
    let mut present = [false; (CHUNK_BYTES / PAGE_BYTES) as usize];
    let present = &mut present[..usize::try_from(pages).ok()?];
    mapping.present(chunk.start, present).ok()?;
    Some(present.iter().all(|present| *present))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hole_is_filled_from_its_end() {
        let of = |hole: Range<u64>| downwards(&hole).collect::<Vec<_>>();
        const MIB: u64 = 1 << 20;
        assert_eq!(of(MIB..10 * MIB), [6 * MIB..10 * MIB, 2 * MIB..6 * MIB, MIB..2 * MIB]);
        assert_eq!(of(4 * MIB..9 * MIB), [5 * MIB..9 * MIB, 4 * MIB..5 * MIB]);
        assert!(of(5..5).is_empty());
    }
}
