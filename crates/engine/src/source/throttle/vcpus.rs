//! What the VM's vCPUs use of the CPUs, and which of them are worth slowing.

use std::time::{Duration, Instant};

use qemu::machine::Machine;
use qemu::qmp::QmpError;
use quota::used;

/// Between two looks: the kernel's count is exact, but a guest works in bursts.
const EVERY: Duration = Duration::from_millis(200);
/// A vCPU that uses less than this, and less than this share of the busiest one,
/// writes little: it is left alone.
const CPUS_LEAST: f64 = 0.02;
const SHARE_LEAST: f64 = 0.1;

pub(super) struct Vcpus {
    pub(super) pid: u32,
    threads: Vec<Thread>,
    looked: Instant,
}

#[derive(Clone, Copy, Debug)]
struct Thread {
    id: u32,
    time: Duration,
    /// CPU seconds a second.
    cpus: f64,
    writes: bool,
}

impl Vcpus {
    pub(super) fn of(machine: &Machine) -> Result<Self, QmpError> {
        let mut ids: Vec<u32> = machine.qmp.vcpus()?.iter().map(|vcpu| vcpu.thread).collect();
        // One thread may run several.
        ids.sort_unstable();
        ids.dedup();
        let pid = machine.process.pid();
        let threads = used(pid, &ids);
        let threads = threads.iter().map(|used| Thread {
            id: used.thread,
            time: used.time,
            cpus: 0.0,
            writes: false,
        });
        Ok(Self { pid, threads: threads.collect(), looked: Instant::now() })
    }

    /// CPU seconds a second that the busy vCPUs use together, if it is time for
    /// another look.
    pub(super) fn look(&mut self) -> Option<f64> {
        let elapsed = self.looked.elapsed();
        if elapsed < EVERY {
            return None;
        }
        self.looked += elapsed;
        let ids: Vec<u32> = self.threads.iter().map(|thread| thread.id).collect();
        let used = used(self.pid, &ids);
        for thread in &mut self.threads {
            // One that has ended, with its vCPU unplugged, uses nothing.
            let now = used.iter().find(|used| used.thread == thread.id).map(|used| used.time);
            let time = now.unwrap_or(thread.time);
            thread.cpus = time.saturating_sub(thread.time).as_secs_f64() / elapsed.as_secs_f64();
            thread.time = time;
        }
        mark(&mut self.threads);
        Some(self.threads.iter().filter(|thread| thread.writes).map(|thread| thread.cpus).sum())
    }

    /// The threads of those that are worth slowing. One that was stays it: the
    /// guest may move its work around.
    pub(super) fn writers(&self) -> impl Iterator<Item = u32> {
        self.threads.iter().filter(|thread| thread.writes).map(|thread| thread.id)
    }
}

fn mark(threads: &mut [Thread]) {
    let most = threads.iter().map(|thread| thread.cpus).fold(0.0, f64::max);
    for thread in threads {
        thread.writes |= thread.cpus >= CPUS_LEAST.max(most * SHARE_LEAST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_idle_beside_a_busy_one_are_left_alone() {
        let thread = |id, cpus| Thread { id, time: Duration::ZERO, cpus, writes: false };
        let mut threads = [thread(1, 0.9), thread(2, 0.05), thread(3, 0.0), thread(4, 0.3)];
        let writers = |threads: &[Thread]| -> Vec<u32> {
            threads.iter().filter(|thread| thread.writes).map(|thread| thread.id).collect()
        };
        mark(&mut threads);
        assert_eq!(writers(&threads), [1, 4]);
        // The work moves, and slowed ones use less.
        threads[0].cpus = 0.1;
        threads[1].cpus = 0.5;
        mark(&mut threads);
        assert_eq!(writers(&threads), [1, 2, 4]);
        let mut idle = [thread(1, 0.001), thread(2, 0.0)];
        mark(&mut idle);
        assert!(writers(&idle).is_empty());
    }
}
