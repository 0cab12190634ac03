//! Touches memory before it is measured. On a virtual machine, memory that is
//! touched for the first time is slower by a factor of ten and more, because
//! its own host must find it. A kernel that reports free pages gives them back
//! within seconds, so this is done right before each migration.

use std::fs;
use std::hint::black_box;

use memmap2::{Advice, MmapMut};

const PAGE_BYTES: usize = 4096;

/// Touches `bytes`, or most of what is free: in huge pages, as QEMU asks for
/// its RAM, and an eighth of it in small ones, as sockets use them. Each kind
/// comes from other free memory.
pub(super) fn memory(bytes: u64) {
    let free = fs::read_to_string("/proc/meminfo").ok().and_then(|text| available(&text));
    let bytes = bytes.min(free.unwrap_or(0) / 2);
    touch(bytes / 8, Advice::NoHugePage);
    touch(bytes, Advice::HugePage);
}

fn touch(bytes: u64, pages: Advice) {
    let bytes = usize::try_from(bytes).unwrap_or(0);
    let Ok(mut memory) = MmapMut::map_anon(bytes.max(PAGE_BYTES)) else { return };
    // A kernel without huge pages refuses: it has one kind of memory.
    let _ = memory.advise(pages);
    for page in memory.chunks_mut(PAGE_BYTES) {
        page[0] = 1;
        black_box(page);
    }
}

fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::available;

    #[test]
    fn reads_what_the_kernel_says() {
        assert_eq!(available("MemTotal: 9 kB\nMemAvailable:     2048 kB\n"), Some(2 << 20));
        assert_eq!(available("MemTotal: 9 kB\n"), None);
    }
}
