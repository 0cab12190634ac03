//! Touches memory before a measurement. On a virtual machine, memory that is touched for the first
//! time is slower by a factor of ten and more, because its own host must find it. A kernel that
//! reports free pages gives them back within two seconds, so this is done right before each
//! migration, and some of the memory is freed only while the migration runs.

use std::fs;
use std::hint::black_box;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use memmap2::{Advice, MmapMut};

const PAGE_BYTES: usize = 4096;
/// A reserve is freed in such pieces,
const PIECE_BYTES: u64 = 64 << 20;
/// when half as much was taken from free memory, which is checked this often,
const LOOK: Duration = Duration::from_millis(50);
/// or after this: free memory doesn't stay warm.
const PIECE_MAX: Duration = Duration::from_millis(400);

/// Touches `bytes`, or half of what is available if that is less: in huge pages, as QEMU asks for
/// its RAM, and as an eighth more in small ones, as sockets use them. Each kind comes from other
/// free memory.
pub(super) fn memory(bytes: u64) {
    let bytes = bytes.min(free("MemAvailable:") / 2);
    touch(bytes / 8, Advice::NoHugePage);
    touch(bytes, Advice::HugePage);
}

fn touch(bytes: u64, pages: Advice) -> Option<MmapMut> {
    let bytes = usize::try_from(bytes).unwrap_or(0);
    let mut memory = MmapMut::map_anon(bytes.max(PAGE_BYTES)).ok()?;
    // A kernel without huge pages refuses: it has only one kind of memory.
    let _ = memory.advise(pages);
    for page in memory.chunks_mut(PAGE_BYTES) {
        page[0] = 1;
        black_box(page);
    }
    Some(memory)
}

/// Warm memory that is freed as free memory is taken, for migrations that take longer than free
/// memory stays warm. Dropping it frees the rest.
pub(super) struct Reserve {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Reserve {
    /// Keeps `bytes`, or half of what is available if that is less.
    pub(super) fn keep(bytes: u64) -> Self {
        let pieces = bytes.min(free("MemAvailable:") / 2) / PIECE_BYTES;
        let pieces = (0..pieces).filter_map(|_| touch(PIECE_BYTES, Advice::HugePage)).collect();
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::Builder::new().name("warm".to_owned());
        let thread = thread.spawn(move || let_go(pieces, &stopped)).ok();
        Self { stop: Some(stop), thread }
    }
}

impl Drop for Reserve {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn let_go(mut pieces: Vec<MmapMut>, stopped: &Receiver<()>) {
    let (mut before, mut last) = (free("MemFree:"), Instant::now());
    while !pieces.is_empty() && stopped.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
        let now = free("MemFree:");
        if before.saturating_sub(now) >= PIECE_BYTES / 2 || last.elapsed() >= PIECE_MAX {
            drop(pieces.pop());
            (before, last) = (free("MemFree:"), Instant::now());
        } else {
            // Memory that others free is warm, too.
            before = before.max(now);
        }
    }
}

/// The kernel's figure of this name.
fn free(name: &str) -> u64 {
    let meminfo = fs::read_to_string("/proc/meminfo").ok();
    meminfo.and_then(|text| bytes_of(&text, name)).unwrap_or(0)
}

fn bytes_of(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_figures_of_meminfo() {
        let text = "MemTotal: 9 kB\nMemFree:  12 kB\nMemAvailable:     2048 kB\n";
        assert_eq!(bytes_of(text, "MemAvailable:"), Some(2 << 20));
        assert_eq!(bytes_of(text, "MemFree:"), Some(12 << 10));
        assert_eq!(bytes_of("MemTotal: 9 kB\n", "MemAvailable:"), None);
    }

    #[test]
    fn a_reserve_is_freed_piece_by_piece() {
        let pieces = || (0..2).filter_map(|_| touch(1, Advice::HugePage)).collect();
        let (stop, stopped) = mpsc::channel();
        // It ends when no piece is left, or before that when the sender is dropped.
        let_go(pieces(), &stopped);
        drop(stop);
        let_go(pieces(), &stopped);
        drop(Reserve::keep(PIECE_BYTES));
    }
}
