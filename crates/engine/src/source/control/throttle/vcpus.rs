//! The VM's vCPUs' use of CPUs, and which of them are worth throttling.

use std::time::{Duration, Instant};

use host::quota::used;
use qemu::machine::Machine;

/// Interval between samples: the kernel's count is exact, but a guest works in
/// bursts.
const EVERY: Duration = Duration::from_millis(200);
/// A vCPU that uses less than this, and less than this fraction of the busiest
/// one, writes little and is left alone.
const CPUS_LEAST: f64 = 0.02;
const SHARE_LEAST: f64 = 0.2;
/// The weight of a new sample: a tick of the guest's clock is no work.
const NEW: f64 = 0.3;
/// A throttled vCPU that uses less than this fraction of its quota has no work: its guest may have
/// moved it to another vCPU. It keeps a bit more of its quota, so that its return shows.
const IDLE: f64 = 0.1;
const KEPT: f64 = 0.125;

pub(crate) struct Vcpus {
    pub(super) pid: u32,
    threads: Vec<Thread>,
    /// The most that one of them ever used; throttled vCPUs use less.
    most: f64,
    looked: Instant,
}

#[derive(Clone, Copy, Debug)]
struct Thread {
    id: u32,
    time: Duration,
    /// CPU seconds a second.
    cpus: f64,
    /// The mean over the last second or two.
    mean: f64,
    /// The mean while it is not throttled.
    free: f64,
    writes: bool,
}

impl Vcpus {
    /// Measures a VM's vCPUs, or reports why not.
    pub(crate) fn of(machine: &Machine) -> Result<Self, String> {
        let mut ids = machine.qmp.vcpus().map_err(|error| error.to_string())?;
        // One thread may run several vCPUs.
        ids.sort_unstable();
        ids.dedup();
        Self::seen(machine.process.pid(), &ids)
    }

    /// Measures these threads of a process, as QEMU numbers them: in another PID namespace they
    /// have other numbers here.
    fn seen(pid: u32, ids: &[u32]) -> Result<Self, String> {
        let vcpus = Self::of_threads(pid, ids);
        if vcpus.threads.is_empty() {
            return Err(format!(
                "process {pid} has no such threads: is it in another PID namespace?"
            ));
        }
        Ok(vcpus)
    }

    /// Measures these threads of a process.
    pub(crate) fn of_threads(pid: u32, ids: &[u32]) -> Self {
        let threads = used(pid, ids);
        let threads = threads.iter().map(|used| Thread {
            id: used.thread,
            time: used.time,
            cpus: 0.0,
            mean: 0.0,
            free: 0.0,
            writes: false,
        });
        Self { pid, threads: threads.collect(), most: 0.0, looked: Instant::now() }
    }

    /// CPU seconds per second that the busy vCPUs use together, if a sample is
    /// due. `slow` means that they have been throttled, `throttled` that they are now.
    pub(super) fn look(&mut self, slow: bool, throttled: bool) -> Option<f64> {
        let elapsed = self.looked.elapsed();
        if elapsed < EVERY {
            return None;
        }
        self.looked += elapsed;
        let ids: Vec<u32> = self.threads.iter().map(|thread| thread.id).collect();
        let used = used(self.pid, &ids);
        let least = least(self.most);
        for thread in &mut self.threads {
            // A thread that has ended, with its vCPU unplugged, uses nothing.
            let now = used.iter().find(|used| used.thread == thread.id).map(|used| used.time);
            let time = now.unwrap_or(thread.time);
            let cpus = time.saturating_sub(thread.time).as_secs_f64() / elapsed.as_secs_f64();
            thread.time = time;
            thread.use_cpus(cpus, throttled, least);
        }
        self.most = mark(&mut self.threads, self.most, slow);
        Some(self.threads.iter().filter(|thread| thread.writes).map(|thread| thread.cpus).sum())
    }

    /// What a thread wants of the CPU time that all throttled ones have together, while they have
    /// this share of what they used before.
    pub(super) fn wants(&self, id: u32, share: f64) -> f64 {
        let thread = self.threads.iter().find(|thread| thread.id == id);
        thread.map_or(0.0, |thread| thread.wants(share))
    }

    /// The threads that are worth throttling.
    pub(super) fn writers(&self) -> impl Iterator<Item = u32> {
        self.threads.iter().filter(|thread| thread.writes).map(|thread| thread.id)
    }
}

impl Thread {
    /// Notes the CPU time that it used a second; a thread that writes uses `least`.
    fn use_cpus(&mut self, cpus: f64, throttled: bool, least: f64) {
        self.cpus = cpus;
        self.mean += (cpus - self.mean) * NEW;
        self.free = match (throttled, self.writes) {
            (true, true) => self.free,
            // Work that has just been moved here is not yet in the mean.
            (true, false) => self.mean.max(cpus),
            // It may have idled since it was last throttled, and would never get a quota again.
            (false, true) => self.mean.max(least),
            (false, false) => self.mean,
        };
    }

    fn wants(&self, share: f64) -> f64 {
        if self.mean < self.free * share * IDLE { self.free * KEPT } else { self.free }
    }
}

/// The least CPU seconds a second of a thread that is worth throttling, where one used `most`.
fn least(most: f64) -> f64 {
    CPUS_LEAST.max(most * SHARE_LEAST)
}

/// Marks the threads that are worth throttling, where one used `most` before;
/// returns the most used so far. While throttled, a marked thread stays marked,
/// because the guest may move its work around. Before that, only current use
/// counts.
fn mark(threads: &mut [Thread], most: f64, slow: bool) -> f64 {
    let most = threads.iter().map(|thread| thread.mean).fold(most, f64::max);
    for thread in threads {
        let writes = thread.mean >= least(most);
        thread.writes = writes || (slow && thread.writes);
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise the VM would count as throttled, and no thread of it would be.
    #[test]
    fn threads_of_no_such_process_are_not_vcpus() {
        let pid = std::process::id();
        assert_eq!(Vcpus::seen(pid, &[pid, u32::MAX]).unwrap().threads.len(), 1);
        assert!(Vcpus::seen(pid, &[u32::MAX]).is_err());
    }

    #[test]
    fn vcpus_that_idle_beside_a_busy_one_are_left_alone() {
        let thread = |id, mean| Thread {
            id,
            time: Duration::ZERO,
            cpus: mean,
            mean,
            free: mean,
            writes: false,
        };
        let mut threads = [thread(1, 0.9), thread(2, 0.05), thread(3, 0.0), thread(4, 0.3)];
        let writers = |threads: &[Thread]| -> Vec<u32> {
            threads.iter().filter(|thread| thread.writes).map(|thread| thread.id).collect()
        };
        let most = mark(&mut threads, 0.0, false);
        assert_eq!(writers(&threads), [1, 4]);
        // A burst has ended.
        threads[1].mean = 0.5;
        mark(&mut threads, most, false);
        threads[1].mean = 0.05;
        mark(&mut threads, most, false);
        assert_eq!(writers(&threads), [1, 4]);
        // Throttled ones use less, which makes the others no busier.
        threads[0].mean = 0.1;
        threads[1].mean = 0.1;
        mark(&mut threads, most, true);
        assert_eq!(writers(&threads), [1, 4]);
        // The work moves.
        threads[1].mean = 0.5;
        mark(&mut threads, most, true);
        assert_eq!(writers(&threads), [1, 2, 4]);
        let mut idle = [thread(1, 0.001), thread(2, 0.0)];
        mark(&mut idle, 0.0, false);
        assert!(writers(&idle).is_empty());
    }

    #[test]
    fn a_vcpu_wants_what_it_uses_whenever_it_is_not_throttled() {
        let thread =
            Thread { id: 1, time: Duration::ZERO, cpus: 0.9, mean: 0.9, free: 0.9, writes: true };
        let free_after = |mut thread: Thread, cpus, throttled| {
            for _ in 0..50 {
                thread.use_cpus(cpus, throttled, 0.2);
            }
            thread.free
        };
        assert_eq!(free_after(thread, 0.1, true), 0.9, "its quota says nothing");
        assert!((free_after(thread, 0.5, false) - 0.5).abs() < 1e-3, "its work has changed");
        assert_eq!(free_after(thread, 0.0, false), 0.2, "it may work again");
        let other = Thread { writes: false, ..thread };
        assert!((free_after(other, 0.1, true) - 0.1).abs() < 1e-3, "it has no quota");
    }

    /// Each vCPU has what it used, times the share, unless its work has moved.
    #[test]
    fn a_vcpu_wants_what_it_used_before_it_was_throttled() {
        let wants = |free, mean, share| {
            let thread =
                Thread { id: 1, time: Duration::ZERO, cpus: mean, mean, free, writes: true };
            thread.wants(share)
        };
        assert_eq!(wants(1.0, 1.0, 1.0), 1.0);
        assert_eq!(wants(1.0, 0.2, 0.2), 1.0, "it uses all of its quota");
        assert_eq!(wants(0.25, 0.04, 0.2), 0.25);
        assert_eq!(wants(1.0, 0.01, 0.2), 0.125, "it idles");
        // With what it keeps, a vCPU that works again is seen to.
        let share = 0.2;
        assert_eq!(wants(1.0, 0.125 * share, share), 1.0);
    }
}
