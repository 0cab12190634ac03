//! Quotas with the kernel's own cgroups, as root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use host::quota::{Notes, Throttled, check, cpu_weights, memory_left, used};

/// A process that wants a whole CPU.
struct Busy(Child);

impl Busy {
    fn start() -> Self {
        let child = Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        Self(child)
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    fn used(&self) -> Duration {
        used(self.pid(), &[self.pid()])[0].time
    }

    fn groups(&self) -> String {
        fs::read_to_string(format!("/proc/{}/cgroup", self.pid())).unwrap()
    }

    /// CPU time per second, measured over this time.
    fn share(&self, over: Duration) -> f64 {
        let (from, begun) = (self.used(), Instant::now());
        std::thread::sleep(over);
        (self.used() - from).as_secs_f64() / begun.elapsed().as_secs_f64()
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn left_groups(busy: &Busy) -> usize {
    busy.groups().matches("droveway-slow").count()
}

#[test]
fn threads_get_no_more_than_their_quota_and_go_back() {
    let dir = tempfile::tempdir().unwrap();
    let notes = Notes::open(dir.path()).unwrap();
    let busy = Busy::start();
    let before = busy.groups();
    check(busy.pid(), &[busy.pid()]).unwrap();
    let mut slowed = Throttled::new(&notes, busy.pid(), &[busy.pid()]).unwrap();
    assert_eq!(busy.groups(), before, "nothing is slowed yet");
    slowed.add([busy.pid()]).unwrap();
    for cpus in [0.2, 0.05] {
        slowed.set(Some(cpus), |_| 1.0).unwrap();
        let share = busy.share(Duration::from_secs(1));
        // An upper bound, which holds however busy the machine is.
        assert!(share < cpus + 0.1, "{share} of {cpus}");
        assert!(share > 0.0);
    }
    assert_ne!(busy.groups(), before);
    slowed.lift().unwrap();
    slowed.lift().unwrap();
    assert_eq!(busy.groups(), before);
    assert!(notes.left().unwrap().is_empty());
}

#[test]
fn processes_in_groups_of_their_own_compete_by_the_groups_weights() {
    let dir = tempfile::tempdir().unwrap();
    let notes = Notes::open(dir.path()).unwrap();
    let pair = [Busy::start(), Busy::start()];
    let weights = || cpu_weights(pair[0].pid(), pair[1].pid());
    assert_eq!(weights(), None, "both are in one group");
    let mut slowed = pair.each_ref().map(|busy| {
        let mut slowed = Throttled::new(&notes, busy.pid(), &[busy.pid()]).unwrap();
        slowed.add([busy.pid()]).unwrap();
        slowed
    });
    for ((group, weight), busy) in weights().unwrap().iter().zip(&pair) {
        assert!(group.ends_with(&format!("droveway-slow-{}", busy.pid())), "{group}");
        // The kernel's defaults, with version 2 and 1.
        assert!([100, 1024].contains(weight), "{weight}");
    }
    for slowed in &mut slowed {
        slowed.lift().unwrap();
    }
    assert_eq!(weights(), None);
}

#[test]
fn a_killed_program_leaves_a_note_that_releases_the_threads() {
    let dir = tempfile::tempdir().unwrap();
    let notes = Notes::open(dir.path()).unwrap();
    let (busy, ended) = (Busy::start(), Busy::start());
    for process in [&busy, &ended] {
        let mut slowed = Throttled::new(&notes, process.pid(), &[]).unwrap();
        slowed.add([process.pid()]).unwrap();
        slowed.set(Some(0.1), |_| 1.0).unwrap();
        // As if it were killed.
        std::mem::forget(slowed);
    }
    drop(ended);
    let left = notes.left().unwrap();
    assert_eq!(left.len(), 2);
    for one in left {
        one.unwrap().lift().unwrap();
    }
    assert_eq!(left_groups(&busy), 0);
    assert!(notes.left().unwrap().is_empty());
}

#[test]
fn threads_of_an_ended_process_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let notes = Notes::open(dir.path()).unwrap();
    let gone = Busy::start();
    let pid = gone.pid();
    drop(gone);
    assert!(Throttled::new(&notes, pid, &[]).is_err());
    assert!(check(pid, &[]).is_err());
    assert!(notes.left().unwrap().is_empty());
}

/// This process's group in the cgroups that limit CPU time, the file of its threads, and the file
/// of its quota.
fn hierarchy() -> (PathBuf, &'static str, &'static str) {
    let first = Path::new("/sys/fs/cgroup/cpu");
    let is_first = first.join("tasks").exists();
    let is_its = |line: &&str| {
        let controllers = line.split(':').nth(1).unwrap();
        if is_first {
            controllers.split(',').any(|controller| controller == "cpu")
        } else {
            controllers.is_empty()
        }
    };
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap();
    let own = groups.lines().find(is_its).and_then(|line| line.splitn(3, ':').nth(2)).unwrap();
    let own = own.trim_start_matches('/');
    if is_first {
        (first.join(own), "tasks", "cpu.cfs_quota_us")
    } else {
        (Path::new("/sys/fs/cgroup").join(own), "cgroup.threads", "cpu.max")
    }
}

/// A group with limited memory and one process, until it is dropped.
struct Bounded(PathBuf);

impl Bounded {
    fn with(process: &Busy, bytes: u64) -> Self {
        let first = Path::new("/sys/fs/cgroup/memory");
        let (root, bound) = if first.join("tasks").exists() {
            (first, "memory.limit_in_bytes")
        } else {
            (Path::new("/sys/fs/cgroup"), "memory.max")
        };
        // Only version 2 has this file.
        let _ = fs::write(root.join("cgroup.subtree_control"), "+memory");
        let dir = root.join(format!("quota-test-{}", process.pid()));
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join(bound), bytes.to_string()).unwrap();
        fs::write(dir.join("cgroup.procs"), process.pid().to_string()).unwrap();
        Self(dir)
    }
}

impl Drop for Bounded {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn the_memory_that_a_group_leaves_is_known() {
    const BOUND: u64 = 64 << 20;
    let busy = Busy::start();
    let free = memory_left(busy.pid());
    assert!(free.is_none_or(|left| left > BOUND), "{free:?}");
    let group = Bounded::with(&busy, BOUND);
    let left = memory_left(busy.pid()).unwrap();
    assert!(left <= BOUND, "{left}");
    drop(busy);
    drop(group);
}

/// A group like the one that libvirt makes for each vCPU, with its own quota.
struct Own {
    dir: PathBuf,
    quota: PathBuf,
}

impl Own {
    fn of(thread: u32) -> Self {
        let (root, threads, quota) = hierarchy();
        let dir = root.join(format!("quota-test-{thread}"));
        fs::create_dir(&dir).unwrap();
        // Only version 2 has this file, where a group can hold single threads only if it is
        // threaded.
        let _ = fs::write(root.join("cgroup.subtree_control"), "+cpu");
        if threads != "tasks" {
            fs::write(dir.join("cgroup.type"), "threaded").unwrap();
        }
        fs::write(dir.join(threads), thread.to_string()).unwrap();
        let quota = dir.join(quota);
        fs::write(&quota, "90000").unwrap();
        Self { dir, quota }
    }

    fn quota(&self) -> String {
        fs::read_to_string(&self.quota).unwrap()
    }

    /// The quota of a group below it.
    fn quota_of(&self, below: &str) -> String {
        let file = self.quota.file_name().unwrap();
        fs::read_to_string(self.dir.join(below).join(file)).unwrap()
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let (root, threads, _) = hierarchy();
        for thread in fs::read_to_string(self.dir.join(threads)).unwrap_or_default().lines() {
            let _ = fs::write(root.join(threads), thread);
        }
        let _ = fs::remove_dir(&self.dir);
    }
}

/// Two threads of this process, which end when this is dropped.
struct Threads {
    ids: Vec<u32>,
    _stop: Vec<Sender<()>>,
}

impl Threads {
    fn start() -> Self {
        let (mut ids, mut stops) = (Vec::new(), Vec::new());
        for _ in 0..2 {
            let (tell, id) = channel();
            let (stop, stopped) = channel::<()>();
            std::thread::spawn(move || {
                let path = fs::read_link("/proc/thread-self").unwrap();
                let id: u32 = path.file_name().unwrap().to_str().unwrap().parse().unwrap();
                tell.send(id).unwrap();
                let _ = stopped.recv();
            });
            ids.push(id.recv().unwrap());
            stops.push(stop);
        }
        Self { ids, _stop: stops }
    }

    fn groups(&self) -> Vec<String> {
        let of = |id| fs::read_to_string(format!("/proc/self/task/{id}/cgroup")).unwrap();
        self.ids.iter().map(of).collect()
    }
}

#[test]
fn threads_return_to_their_own_groups() {
    let dir = tempfile::tempdir().unwrap();
    let notes = Notes::open(dir.path()).unwrap();
    let threads = Threads::start();
    let own: Vec<Own> = threads.ids.iter().map(|id| Own::of(*id)).collect();
    let (before, quotas) = (threads.groups(), own.iter().map(Own::quota).collect::<Vec<_>>());
    for is_killed in [false, true] {
        // The second thread is added later.
        let pid = std::process::id();
        let mut slowed = Throttled::new(&notes, pid, &threads.ids[..1]).unwrap();
        slowed.add(threads.ids.iter().copied()).unwrap();
        let wants = |id: u32| if id == threads.ids[0] { 0.9 } else { 0.1 };
        slowed.set(Some(0.5), wants).unwrap();
        for (groups, id) in threads.groups().iter().zip(&threads.ids) {
            let ours = format!("quota-test-{id}/droveway-slow-{pid}");
            assert!(groups.contains(&ours), "{groups}");
        }
        // 45 % and 5 % of a CPU, in periods of 10 and 20 ms.
        for (own, expected) in own.iter().zip(["4500", "1000"]) {
            let quota = own.quota_of(&format!("droveway-slow-{pid}"));
            assert!(quota.starts_with(expected), "{quota}");
        }
        if is_killed {
            std::mem::forget(slowed);
            let left = notes.left().unwrap();
            left.into_iter().for_each(|one| one.unwrap().lift().unwrap());
        } else {
            slowed.lift().unwrap();
        }
        assert_eq!(threads.groups(), before);
        assert_eq!(own.iter().map(Own::quota).collect::<Vec<_>>(), quotas);
        assert!(notes.left().unwrap().is_empty());
    }
}
