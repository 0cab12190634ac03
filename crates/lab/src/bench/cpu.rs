//! CPU time that a migration took, from outside: all of the processes' time
//! but that of their vCPU threads.

use std::collections::HashMap;
use std::fs;
use std::sync::{Arc, Mutex, PoisonError};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A process that ends takes its figures with it: they are read this often.
const EVERY: Duration = Duration::from_millis(20);
/// What the kernel counts CPU time in.
const TICKS_PER_S: f64 = 100.0;

type Samples = HashMap<u32, Vec<(Instant, f64)>>;

/// Reads CPU times until it is dropped.
pub(super) struct CpuMeter {
    samples: Arc<Mutex<Samples>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl CpuMeter {
    /// Watches these processes and all their descendants.
    #[must_use]
    pub(super) fn start(processes: Vec<u32>) -> Self {
        let samples: Arc<Mutex<Samples>> = Arc::default();
        let stop = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let (samples, stop) = (Arc::clone(&samples), Arc::clone(&stop));
            move || {
                while !stop.load(Relaxed) {
                    read_all(&processes, &samples);
                    std::thread::sleep(EVERY);
                }
                read_all(&processes, &samples);
            }
        });
        Self { samples, stop, thread: Some(thread) }
    }

    /// Seconds spent since `from`.
    #[must_use]
    pub(super) fn since(mut self, from: Instant) -> f64 {
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let samples = self.samples.lock().unwrap_or_else(PoisonError::into_inner);
        samples.values().map(|samples| spent(samples, from)).sum()
    }
}

impl Drop for CpuMeter {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
    }
}

fn spent(samples: &[(Instant, f64)], from: Instant) -> f64 {
    let before = samples.iter().rev().find(|(at, _)| *at <= from).or(samples.first());
    match (before, samples.last()) {
        (Some((_, before)), Some((_, last))) => (last - before).max(0.0),
        _ => 0.0,
    }
}

fn read_all(processes: &[u32], samples: &Mutex<Samples>) {
    let now = Instant::now();
    for pid in with_descendants(processes) {
        if let Some(seconds) = seconds(pid) {
            let mut samples = samples.lock().unwrap_or_else(PoisonError::into_inner);
            samples.entry(pid).or_default().push((now, seconds));
        }
    }
}

fn with_descendants(processes: &[u32]) -> Vec<u32> {
    let mut all = processes.to_vec();
    let mut next = 0;
    while let Some(pid) = all.get(next).copied() {
        next += 1;
        let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { continue };
        for thread in threads.flatten() {
            let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            let children = children.split_whitespace().filter_map(|pid| pid.parse().ok());
            for child in children {
                if !all.contains(&child) {
                    all.push(child);
                }
            }
        }
    }
    all
}

/// A process's CPU seconds without its vCPU threads.
fn seconds(pid: u32) -> Option<f64> {
    let whole = stat(&format!("/proc/{pid}/stat"))?.1;
    let threads = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let vcpus: f64 = threads
        .flatten()
        .filter_map(|thread| stat(&thread.path().join("stat").display().to_string()))
        .filter(|(name, _)| name.starts_with("CPU "))
        .map(|(_, seconds)| seconds)
        .sum();
    Some(whole - vcpus)
}

/// Name and CPU seconds from a `stat` file.
fn stat(path: &str) -> Option<(String, f64)> {
    parse_stat(&fs::read_to_string(path).ok()?)
}

fn parse_stat(text: &str) -> Option<(String, f64)> {
    let (start, rest) = text.rsplit_once(')')?;
    let name = start.split_once('(')?.1.to_owned();
    let mut fields = rest.split_whitespace().skip(11);
    let user: f64 = fields.next()?.parse().ok()?;
    let system: f64 = fields.next()?.parse().ok()?;
    Some((name, (user + system) / TICKS_PER_S))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_names_are_read_from_stat() {
        let text = "42 (CPU 0/TCG) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0 20 0 4 0 99";
        assert_eq!(parse_stat(text), Some(("CPU 0/TCG".to_owned(), 3.0)));
    }

    #[test]
    fn what_was_spent_before_does_not_count() {
        let start = Instant::now();
        let at = |ms: u64, seconds: f64| (start + Duration::from_millis(ms), seconds);
        let samples = [at(0, 1.0), at(20, 1.5), at(40, 2.5)];
        assert_eq!(spent(&samples, start + Duration::from_millis(25)), 1.0);
        assert_eq!(spent(&samples[2..], start), 0.0);
    }
}
