//! Memory that the guest doesn't use, and the time in which QEMU reads it nonetheless.

use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use api::FreeMemory;
use qemu::command_line::CommandLine;
use qemu::machine::Machine;
use qemu::shape;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

const PAGE: usize = page::PAGE_BYTES;
/// Memory that is allocated here for a moment, to measure how long that takes.
const TRIED_BYTES: u64 = 32 << 20;

/// The figures for a VM, without what the guest's kernel does. `busy` is how long the link is busy
/// in the first pass.
pub(super) fn of(machine: &Machine, busy: Duration) -> FreeMemory {
    // QEMU reads nothing that is unplugged.
    let backends = machine.qmp.plugged_backends().unwrap_or_default();
    let shared = backends.iter().filter(|backend| backend.share);
    let shared_bytes = shared.fold(0_u64, |sum, backend| sum.saturating_add(backend.bytes));
    let used_bytes = super::used_shared(machine.process.pid()).unwrap_or(shared_bytes);
    let hinted = shape::has_free_page_hint(&machine.qmp).unwrap_or_else(|_| {
        CommandLine::parse(&machine.argv).is_ok_and(|line| line.has_free_page_hint())
    });
    let unused_shared_bytes = if hinted { 0 } else { shared_bytes.saturating_sub(used_bytes) };
    let reading_s = match unused_shared_bytes {
        0 => 0.0,
        bytes => reading(bytes).map_or(0.0, |time| added(time, busy).as_secs_f64()),
    };
    FreeMemory { unused_shared_bytes, reading_s, hinted, guest_clears: None }
}

/// The additional time. The positions of holes in RAM are not examined: for half of them, QEMU is
/// assumed to find as many filled as could be while the link was busy.
fn added(reading: Duration, busy: Duration) -> Duration {
    reading - (reading / 2).min(busy)
}

/// The time in which QEMU reads this much unwritten shared memory on this host, because the kernel
/// allocates each page of it. None if that can't be measured.
fn reading(bytes: u64) -> Option<Duration> {
    let fd = memfd_create("droveway-predict", MemfdFlags::CLOEXEC).ok()?;
    ftruncate(&fd, TRIED_BYTES).ok()?;
    let (file, mut page) = (File::from(fd), [0; PAGE]);
    let began = Instant::now();
    for at in (0..TRIED_BYTES).step_by(PAGE) {
        file.write_all_at(&[0], at).ok()?;
        file.read_exact_at(&mut page, at).ok()?;
        black_box(page.iter().all(|byte| *byte == 0));
    }
    Some(began.elapsed().mul_f64(bytes as f64 / TRIED_BYTES as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_link_hides_up_to_half() {
        let s = Duration::from_secs;
        assert_eq!(added(s(8), s(20)), s(4));
        assert_eq!(added(s(8), s(1)), s(7));
        assert_eq!(added(s(0), s(20)), s(0));
    }

    #[test]
    fn reading_takes_longer_the_more_there_is() {
        let twice = reading(2 * TRIED_BYTES).unwrap();
        assert!(twice > Duration::from_micros(100), "{twice:?}");
        assert_eq!(reading(0), Some(Duration::ZERO));
    }
}
