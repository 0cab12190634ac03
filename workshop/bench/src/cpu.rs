//! CPU time that a migration took, measured from outside: that of every process on the hosts
//! (agents, the command, QEMUs at both ends), without their vCPU threads, whose work is the
//! guest's.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::machine::CpuTime;
use lab::error::{FileContext, Result, SystemContext};
use lab::hosts::Host;

/// How often figures are read: those of a process are lost when it ends.
pub(super) const OFTEN: Duration = Duration::from_millis(20);
/// New processes are searched for once in so many readings.
const LOOK_ONCE_IN: usize = 4;
/// Time until a new thread has its name.
const NAMED_WITHIN: Duration = Duration::from_secs(1);

/// What was read so far.
#[derive(Default)]
struct Samples {
    processes: HashMap<u32, Process>,
    /// The machine's stolen seconds.
    stolen: Vec<(Instant, f64)>,
}

/// Seconds spent on a migration.
pub(super) struct Spent {
    /// By processes.
    pub(super) processes_s: f64,
    /// By the hypervisor, on something else.
    pub(super) stolen_s: f64,
}

/// Figures of a process.
#[derive(Default)]
struct Process {
    /// CPU seconds, with those of ended threads and without those of vCPUs.
    samples: Vec<(Instant, f64)>,
    /// CPU seconds by vCPU thread, which QEMU names `CPU 0/TCG` and so on. The time of an ended one
    /// stays in the process's sum, and so must still be subtracted.
    vcpus: HashMap<OsString, f64>,
    /// Other threads, and since when they are known, so that they can be skipped: to read all each
    /// time took more of a gang's CPUs than some of what is measured.
    others: HashMap<OsString, Instant>,
}

impl Process {
    fn read(&mut self, pid: u32, now: Instant) {
        // Threads first, so that none can end unseen between the two readings.
        let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        for thread in threads {
            let id = thread.file_name();
            let known = self.others.get(&id);
            if known.is_some_and(|since| now.duration_since(*since) > NAMED_WITHIN) {
                continue;
            }
            match stat(&thread.path().join("stat")) {
                Some((name, seconds)) if name.starts_with("CPU ") => {
                    self.others.remove(&id);
                    self.vcpus.insert(id, seconds);
                }
                _ => {
                    self.others.entry(id).or_insert(now);
                }
            }
        }
        if let Some((_, whole)) = stat(Path::new(&format!("/proc/{pid}/stat"))) {
            self.samples.push((now, whole - self.vcpus.values().sum::<f64>()));
        }
    }
}

/// Reads CPU times until the result is asked for.
pub(super) struct CpuMeter {
    stop: Sender<()>,
    thread: JoinHandle<Samples>,
}

impl CpuMeter {
    /// Watches all processes on these hosts except `but`, also those that start later, and reads
    /// them once in `every`: to read many takes time.
    ///
    /// # Errors
    /// If a host's namespace can't be identified.
    pub(super) fn start(hosts: &[&Host], but: Vec<u32>, every: Duration) -> Result<Self> {
        let networks: Vec<u64> = hosts.iter().map(|host| network(host)).collect::<Result<_>>()?;
        let (stop, stopped) = mpsc::channel();
        let watch = move || {
            let mut samples = Samples::default();
            let mut here = Vec::new();
            for reading in 0.. {
                if usize::is_multiple_of(reading, LOOK_ONCE_IN) {
                    here = processes(&networks);
                    here.retain(|pid| !but.contains(pid));
                }
                read(&here, &mut samples);
                if stopped.recv_timeout(every) != Err(RecvTimeoutError::Timeout) {
                    break;
                }
            }
            read(&here, &mut samples);
            samples
        };
        let thread = std::thread::Builder::new().name("cpu".to_owned()).spawn(watch);
        Ok(Self { stop, thread: thread.doing("start a thread")? })
    }

    /// What was spent since `from`, until now.
    #[must_use]
    pub(super) fn since(self, from: Instant) -> Spent {
        // The thread ends at this message, or when the sender is dropped.
        let _ = self.stop.send(());
        let samples = self.thread.join().unwrap_or_default();
        let processes = samples.processes.values();
        Spent {
            processes_s: processes.map(|process| spent(&process.samples, from)).sum(),
            stolen_s: spent(&samples.stolen, from),
        }
    }
}

/// Identifies a host's network namespace.
fn network(host: &Host) -> Result<u64> {
    let path = Path::new("/run/netns").join(&host.name);
    Ok(fs::metadata(&path).at("look at", &path)?.ino())
}

fn processes(networks: &[u64]) -> Vec<u32> {
    let network = |pid: &u32| {
        let link = fs::read_link(format!("/proc/{pid}/ns/net")).ok()?;
        link.to_str()?.strip_prefix("net:[")?.strip_suffix(']')?.parse().ok()
    };
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| network(pid).is_some_and(|network| networks.contains(&network))).collect()
}

fn read(processes: &[u32], samples: &mut Samples) {
    let now = Instant::now();
    for pid in processes {
        samples.processes.entry(*pid).or_default().read(*pid, now);
    }
    if let Ok(machine) = CpuTime::now() {
        samples.stolen.push((now, machine.stolen_s));
    }
}

fn spent(samples: &[(Instant, f64)], from: Instant) -> f64 {
    let before = samples.iter().rev().find(|(at, _)| *at <= from).or(samples.first());
    match (before, samples.last()) {
        (Some((_, before)), Some((_, last))) => (last - before).max(0.0),
        _ => 0.0,
    }
}

/// Name and CPU seconds from a `stat` file.
fn stat(path: &Path) -> Option<(String, f64)> {
    parse_stat(&fs::read_to_string(path).ok()?)
}

fn parse_stat(text: &str) -> Option<(String, f64)> {
    let (start, rest) = text.rsplit_once(')')?;
    let name = start.split_once('(')?.1.to_owned();
    let mut fields = rest.split_whitespace().skip(11);
    let user: f64 = fields.next()?.parse().ok()?;
    let system: f64 = fields.next()?.parse().ok()?;
    let ticks_per_s = rustix::param::clock_ticks_per_second() as f64;
    Some((name, (user + system) / ticks_per_s))
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
