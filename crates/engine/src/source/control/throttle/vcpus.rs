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
const SHARE_LEAST: f64 = 0.2;
/// What a look adds to what is known of a vCPU: a tick of the guest's clock is
/// no work.
const NEW: f64 = 0.3;

pub(crate) struct Vcpus {
    pub(super) pid: u32,
    threads: Vec<Thread>,
    /// The most that one of them ever used: slowed, they use less.
    most: f64,
    looked: Instant,
}

#[derive(Clone, Copy, Debug)]
struct Thread {
    id: u32,
    time: Duration,
    /// CPU seconds a second.
    cpus: f64,
    /// The same over the last second or two.
    mean: f64,
    writes: bool,
}

impl Vcpus {
    pub(crate) fn of(machine: &Machine) -> Result<Self, QmpError> {
        let mut ids: Vec<u32> = machine.qmp.vcpus()?.iter().map(|vcpu| vcpu.thread).collect();
        // One thread may run several.
        ids.sort_unstable();
        ids.dedup();
        Ok(Self::of_threads(machine.process.pid(), &ids))
    }

    /// These threads of a process.
    pub(crate) fn of_threads(pid: u32, ids: &[u32]) -> Self {
        let threads = used(pid, ids);
        let threads = threads.iter().map(|used| Thread {
            id: used.thread,
            time: used.time,
            cpus: 0.0,
            mean: 0.0,
            writes: false,
        });
        Self { pid, threads: threads.collect(), most: 0.0, looked: Instant::now() }
    }

    /// CPU seconds a second that the busy vCPUs use together, if it is time for
    /// another look. With `slow`, they are being slowed by now.
    pub(super) fn look(&mut self, slow: bool) -> Option<f64> {
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
            thread.mean += (thread.cpus - thread.mean) * NEW;
            thread.time = time;
        }
        self.most = mark(&mut self.threads, self.most, slow);
        Some(self.threads.iter().filter(|thread| thread.writes).map(|thread| thread.cpus).sum())
    }

    /// The threads of those that are worth slowing.
    pub(super) fn writers(&self) -> impl Iterator<Item = u32> {
        self.threads.iter().filter(|thread| thread.writes).map(|thread| thread.id)
    }
}

/// Marks those that are worth slowing, where one used `most` before. Says what
/// one has used at most by now. One that is slowed stays marked: the guest may
/// move its work around. Before that, what counts is what they do just now.
fn mark(threads: &mut [Thread], most: f64, slow: bool) -> f64 {
    let most = threads.iter().map(|thread| thread.mean).fold(most, f64::max);
    for thread in threads {
        let writes = thread.mean >= CPUS_LEAST.max(most * SHARE_LEAST);
        thread.writes = writes || (slow && thread.writes);
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_idle_beside_a_busy_one_are_left_alone() {
        let thread =
            |id, mean| Thread { id, time: Duration::ZERO, cpus: mean, mean, writes: false };
        let mut threads = [thread(1, 0.9), thread(2, 0.05), thread(3, 0.0), thread(4, 0.3)];
        let writers = |threads: &[Thread]| -> Vec<u32> {
            threads.iter().filter(|thread| thread.writes).map(|thread| thread.id).collect()
        };
        let most = mark(&mut threads, 0.0, false);
        assert_eq!(writers(&threads), [1, 4]);
        // What was a burst is over.
        threads[1].mean = 0.5;
        mark(&mut threads, most, false);
        threads[1].mean = 0.05;
        mark(&mut threads, most, false);
        assert_eq!(writers(&threads), [1, 4]);
        // Slowed ones use less: the others are no busier for that.
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
}
