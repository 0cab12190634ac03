//! With the kernel's own cgroups, as root.

use std::fs;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use quota::{Notes, Slowed, used};

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

    /// CPU time for each second, over so long.
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
    let mut slowed = Slowed::new(&notes, busy.pid()).unwrap();
    assert_eq!(busy.groups(), before, "nothing is slowed yet");
    slowed.add(busy.pid()).unwrap();
    for cpus in [0.2, 0.05] {
        slowed.set(Some(cpus)).unwrap();
        let share = busy.share(Duration::from_secs(1));
        // A bound from above, however busy the machine is.
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
fn whoever_is_killed_leaves_a_note_by_which_the_threads_are_let_go() {
    let dir = tempfile::tempdir().unwrap();
    let notes = Notes::open(dir.path()).unwrap();
    let (busy, ended) = (Busy::start(), Busy::start());
    for process in [&busy, &ended] {
        let mut slowed = Slowed::new(&notes, process.pid()).unwrap();
        slowed.add(process.pid()).unwrap();
        slowed.set(Some(0.1)).unwrap();
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
fn a_process_that_has_ended_is_no_place() {
    let dir = tempfile::tempdir().unwrap();
    let notes = Notes::open(dir.path()).unwrap();
    let gone = Busy::start();
    let pid = gone.pid();
    drop(gone);
    assert!(Slowed::new(&notes, pid).is_err());
    assert!(notes.left().unwrap().is_empty());
}
