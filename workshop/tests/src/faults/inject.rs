//! Injects a fault, and undoes it.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use lab::hosts::{Host, RUN_DIR};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};

use super::plan::{End, Fault};
use crate::memory::Full;
use crate::moving::Frozen;
use crate::proxy::Proxies;
use crate::world::{Side, World};

/// A process some of whose system calls are delayed or fail.
pub struct Traced(Child);

impl Traced {
    /// Delays each note that the process writes to disk. It waits for none of a migration within
    /// one host: see [`Traced::slow_within`].
    #[must_use]
    pub fn slow(pid: u32, by: Duration) -> Self {
        Self::attach(pid, "fdatasync", &format!("delay_exit={}", by.as_micros()))
    }

    /// Delays each note in a journal, also of a migration within one host.
    #[must_use]
    pub fn slow_within(pid: u32, by: Duration) -> Self {
        Self::attach(pid, "pwrite64", &format!("delay_exit={}", by.as_micros()))
    }

    /// Delays each command that the process gives a device.
    #[must_use]
    pub fn slow_commands(pid: u32, by: Duration) -> Self {
        Self::attach(pid, "ioctl", &format!("delay_exit={}", by.as_micros()))
    }

    /// Fails each note, as on a full disk.
    #[must_use]
    pub fn full(pid: u32) -> Self {
        Self::attach(pid, "fdatasync,fsync", "error=ENOSPC")
    }

    /// Fails each replacement of a file, as on a full disk. Notes in a journal succeed, since its
    /// space is allocated from the beginning.
    #[must_use]
    pub fn records_full(pid: u32) -> Self {
        Self::attach(pid, "fsync", "error=ENOSPC")
    }

    fn attach(pid: u32, calls: &str, what: &str) -> Self {
        let mut child = Command::new("strace")
            .args(["--follow-forks", "--detach-on=execve", "--output=/dev/null"])
            .arg(format!("--trace={calls}"))
            .arg(format!("--inject={calls}:{what}"))
            .arg(format!("--attach={pid}"))
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("strace comes with the lab");
        let mut heard = BufReader::new(child.stderr.take().expect("it is piped"));
        let mut line = String::new();
        heard.read_line(&mut line).expect("strace says that it has attached");
        assert!(line.contains("attached"), "{line}");
        // strace prints a line for each thread, and must not block on the pipe.
        std::thread::spawn(move || std::io::copy(&mut heard, &mut std::io::sink()));
        Self(child)
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        // The kernel detaches the process then.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A full file system with an agent's state.
pub(super) struct Filled(PathBuf);

impl Filled {
    /// Small enough to be filled quickly.
    const STATE_BYTES: &str = "24m";

    /// Gives a host a file system of its own for the state. Its agent must not run.
    pub(super) fn prepare(host: &Host) {
        let state = format!("{RUN_DIR}/state");
        for command in [
            &["mkdir", "-p", &state][..],
            &[
                "mount",
                "-t",
                "tmpfs",
                "-o",
                &format!("mode=700,size={}", Self::STATE_BYTES),
                "state",
                &state,
            ],
        ] {
            let done = host.command(command[0]).args(&command[1..]).output().unwrap();
            assert!(done.status.success(), "{done:?}");
        }
    }

    fn new(host: &Host) -> Self {
        let path = host.inside("state/full");
        let mut file = File::create(&path).expect("it has space until now");
        let piece = vec![0; 1 << 20];
        while file.write_all(&piece).is_ok() {}
        // Less than a piece is left.
        while file.write_all(&[0]).is_ok() {}
        Self(path)
    }
}

impl Drop for Filled {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A process that can open no more file descriptors.
pub(super) struct Starved(Pid, Rlimit);

impl Starved {
    fn new(pid: u32) -> Self {
        let process = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a process");
        let open = std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
        // Agents have the limits of the process that starts them.
        let maximum = getrlimit(Resource::Nofile).maximum;
        let few = Rlimit { current: Some(open as u64), maximum };
        let before = prlimit(Some(process), Resource::Nofile, few).expect("root may");
        Self(process, before)
    }
}

impl Drop for Starved {
    fn drop(&mut self) {
        // It may have ended.
        let _ = prlimit(Some(self.0), Resource::Nofile, self.1);
    }
}

/// Damaged files.
pub(super) struct Damaged(Vec<Spoilt>);

struct Spoilt {
    path: PathBuf,
    whole: Vec<u8>,
    damaged: Vec<u8>,
}

impl Damaged {
    /// Drops half of the VM's record.
    fn record(host: &Host) -> Self {
        Self::those(vec![host.inside("state/vms/web1/record.json")], |content| {
            content.truncate(content.len() / 2);
        })
    }

    /// Flips a bit in the first note of each journal.
    fn journals(host: &Host) -> Self {
        let files = std::fs::read_dir(host.inside("state/journals")).into_iter().flatten();
        Self::those(files.flatten().map(|file| file.path()).collect(), |content| {
            if let Some(byte) = content.get_mut(FLIPPED) {
                *byte ^= 1;
            }
        })
    }

    fn those(paths: Vec<PathBuf>, damage: impl Fn(&mut Vec<u8>)) -> Self {
        let damage = |path: PathBuf| {
            // The file may not exist.
            let whole = std::fs::read(&path).ok()?;
            let mut damaged = whole.clone();
            damage(&mut damaged);
            std::fs::write(&path, &damaged).unwrap();
            Some(Spoilt { path, whole, damaged })
        };
        Self(paths.into_iter().filter_map(damage).collect())
    }

    /// Restores files that the agent has neither replaced nor removed.
    fn restore(self) {
        for Spoilt { path, whole, damaged } in self.0 {
            if std::fs::read(&path).is_ok_and(|content| content == damaged) {
                std::fs::write(path, whole).unwrap();
            }
        }
    }
}

/// An offset inside the first note of a journal.
const FLIPPED: usize = 40;

/// Threads that carry data at a source.
const AT_SOURCE: [&str; 4] = ["tap-", "ahead", "lane-0-send", "lane-0-ack"];

/// Longest delay of a piece.
const LATE_MS_MAX: usize = 120;

/// A fault that lasts until it is undone.
pub(super) enum Broken {
    Agents(Vec<Side>),
    Frozen(#[expect(dead_code, reason = "goes on when it is dropped")] Frozen),
    Disk(#[expect(dead_code, reason = "goes on when it is dropped")] Traced),
    Memory(Full, Side),
    Space(#[expect(dead_code, reason = "goes when it is dropped")] Filled),
    Descriptors(#[expect(dead_code, reason = "goes on when it is dropped")] Starved),
    Storage(#[expect(dead_code, reason = "goes on when it is dropped")] Vec<Frozen>),
    Damaged(Side, Damaged),
    Trigger(PathBuf),
    Cut,
    Lost(Side),
    Slow,
    Road,
    Nothing,
}

/// Sides and processes of a migration.
pub(super) struct Ends {
    pub(super) from: Side,
    /// The same as `from` if it stays on its host.
    pub(super) to: Side,
    pub(super) source_qemu: u32,
    pub(super) destination_qemu: Option<u32>,
    /// Servers of the VM's disks.
    pub(super) storage: Vec<u32>,
}

impl Ends {
    pub(super) fn side(&self, end: End) -> Side {
        match end {
            End::Source => self.from,
            End::Destination => self.to,
        }
    }

    fn qemu(&self, end: End) -> Option<u32> {
        match end {
            End::Source => Some(self.source_qemu),
            End::Destination => self.destination_qemu,
        }
    }
}

pub(super) fn break_it(world: &mut World, proxies: &Proxies, fault: Fault, ends: &Ends) -> Broken {
    match fault {
        Fault::KillAgent(end) => {
            world.kill_agent(ends.side(end));
            Broken::Agents(vec![ends.side(end)])
        }
        Fault::KillBothAgents => {
            let both = vec![Side::A, Side::B];
            both.iter().for_each(|side| world.kill_agent(*side));
            Broken::Agents(both)
        }
        Fault::Panic(thread) => {
            let side = if AT_SOURCE.contains(&thread) { End::Source } else { End::Destination };
            let path = world.host(ends.side(side)).inside("panic");
            // Renamed into place, since a thread may look for it at any time.
            let new = path.with_extension("new");
            std::fs::write(&new, thread).and_then(|()| std::fs::rename(new, &path)).unwrap();
            Broken::Trigger(path)
        }
        Fault::DamageRecord(end) | Fault::DamageJournal(end) => {
            let side = ends.side(end);
            world.kill_agent(side);
            let damaged = if matches!(fault, Fault::DamageRecord(_)) {
                Damaged::record(world.host(side))
            } else {
                Damaged::journals(world.host(side))
            };
            world.start_agent(side);
            Broken::Damaged(side, damaged)
        }
        Fault::KillQemu(end) => {
            if let Some(pid) = ends.qemu(end) {
                crate::moving::kill(pid);
            }
            Broken::Nothing
        }
        Fault::FreezeAgent(end) => Broken::Frozen(Frozen::new(world.agent(ends.side(end)).pid())),
        Fault::FreezeQemu(end) | Fault::HangQemu(end) => {
            ends.qemu(end).map_or(Broken::Nothing, |pid| Broken::Frozen(Frozen::new(pid)))
        }
        Fault::Cut => {
            world.hosts.a.set_nic(0, false).unwrap();
            Broken::Cut
        }
        Fault::CutOneWay(end) => {
            let side = ends.side(end);
            world.hosts.lose_packets_of(world.host(side)).unwrap();
            Broken::Lost(side)
        }
        Fault::Reset => {
            for side in [Side::A, Side::B] {
                let reset = world.host(side).command("ss").args(["-Kt"]).output().unwrap();
                assert!(reset.status.success(), "{reset:?}");
            }
            Broken::Nothing
        }
        Fault::Slow => {
            for side in [Side::A, Side::B] {
                world.hosts.slow(world.host(side), 1).unwrap();
            }
            Broken::Slow
        }
        Fault::Late => {
            proxies.late(LATE_MS_MAX);
            Broken::Road
        }
        Fault::HeldUp(end) => {
            proxies.hold_up(ends.side(end));
            Broken::Road
        }
        Fault::MemoryFull(end) => {
            let side = ends.side(end);
            let pids: Vec<u32> =
                std::iter::once(world.agent(side).pid()).chain(ends.qemu(end)).collect();
            Broken::Memory(Full::new(&pids), side)
        }
        Fault::DiskFull(end) => Broken::Disk(Traced::full(world.agent(ends.side(end)).pid())),
        Fault::NoSpace(end) => Broken::Space(Filled::new(world.host(ends.side(end)))),
        Fault::NoDescriptors(end) => {
            Broken::Descriptors(Starved::new(world.agent(ends.side(end)).pid()))
        }
        Fault::Trickle(end) => {
            proxies.trickle(ends.side(end), 1 << 10);
            Broken::Road
        }
        Fault::FreezeStorage => {
            Broken::Storage(ends.storage.iter().map(|pid| Frozen::new(*pid)).collect())
        }
    }
}

pub(super) fn mend(world: &mut World, proxies: &Proxies, broken: Broken) {
    match broken {
        Broken::Agents(sides) => sides.into_iter().for_each(|side| world.start_agent(side)),
        Broken::Cut => world.hosts.a.set_nic(0, true).unwrap(),
        Broken::Lost(side) => world.hosts.find_packets_of(world.host(side)).unwrap(),
        Broken::Slow => {
            for side in [Side::A, Side::B] {
                world.hosts.unslow(world.host(side)).unwrap();
            }
        }
        Broken::Road => proxies.mend(),
        Broken::Damaged(side, damaged) => {
            world.kill_agent(side);
            damaged.restore();
            world.start_agent(side);
        }
        // Maybe no thread has found it.
        Broken::Trigger(path) => drop(std::fs::remove_file(path)),
        Broken::Memory(full, side) => {
            drop(full);
            if world.has_ended(side) {
                world.start_agent(side);
            }
        }
        Broken::Frozen(_)
        | Broken::Disk(_)
        | Broken::Space(_)
        | Broken::Descriptors(_)
        | Broken::Storage(_)
        | Broken::Nothing => {}
    }
}
