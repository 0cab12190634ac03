//! Memory: of a host, full for some processes; and of a guest.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use qemu::process::Process;
use qemu::qmp::Qmp;
use ram::Mapping;
use serde_json::json;

use crate::{Side, World, until};

/// Bytes that they may take besides those that they have.
const MORE_BYTES: u64 = 1 << 20;

/// Hierarchies of memory cgroups: version 1, or 2.
const HIERARCHIES: [(&str, &str); 2] =
    [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")];

/// Processes that get next to no more memory, until this is dropped: when one needs more, the
/// kernel kills the largest of them.
pub struct Full {
    dir: PathBuf,
    above: &'static Path,
}

impl Full {
    /// Limits these processes, and those that they start.
    ///
    /// # Panics
    /// If the kernel has no memory cgroups.
    #[must_use]
    pub fn new(pids: &[u32]) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("droveway-lab-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed));
        for (root, limit) in HIERARCHIES {
            let dir = Path::new(root).join(&name);
            if fs::create_dir(&dir).is_err() {
                continue;
            }
            let full = Self { dir, above: Path::new(root) };
            if fs::write(full.dir.join(limit), MORE_BYTES.to_string()).is_ok() {
                for pid in pids {
                    // It may have ended by itself.
                    let _ = fs::write(full.dir.join("cgroup.procs"), pid.to_string());
                }
                return full;
            }
        }
        panic!("no cgroup here counts memory");
    }
}

impl Drop for Full {
    fn drop(&mut self) {
        until("the group is gone", || {
            let pids = fs::read_to_string(self.dir.join("cgroup.procs")).unwrap_or_default();
            for pid in pids.lines() {
                let _ = fs::write(self.above.join("cgroup.procs"), pid);
            }
            fs::remove_dir(&self.dir).is_ok()
        });
    }
}

/// A guest's memory of this size, which is one piece below the PCI hole. Its QEMU has a separate
/// QMP socket.
///
/// # Panics
/// If it can't be reached.
#[must_use]
pub fn guest_ram(world: &World, side: Side, name: &str, bytes: u64) -> Mapping {
    ram_of(&world.own_qmp(side, name), world.vm(side, name).unwrap().pid, bytes)
}

/// The same of this QEMU.
///
/// # Panics
/// If it can't be reached.
#[must_use]
pub fn ram_of(qmp: &Qmp, pid: u32, bytes: u64) -> Mapping {
    let command = json!({ "command-line": "gpa2hva 0" });
    let answer = qmp.execute("human-monitor-command", command).unwrap();
    let text = answer.as_str().unwrap().trim().to_owned();
    let address = text.rsplit_once("0x").expect("an address").1;
    let address = u64::from_str_radix(address, 16).unwrap();
    let process = Process::now(pid).unwrap();
    Mapping::of_process(process.pidfd(), pid, address, bytes).unwrap()
}

/// The kernel's pool of huge pages; dropped, the pool gets its former size.
pub struct HugePages(String);

const POOL: &str = "/proc/sys/vm/nr_hugepages";

impl HugePages {
    /// Sets the size of the pool.
    ///
    /// # Panics
    /// If the kernel has too little contiguous memory.
    pub fn set(count: u64) {
        fs::write(POOL, count.to_string()).unwrap();
        let has: u64 = fs::read_to_string(POOL).unwrap().trim().parse().unwrap();
        assert!(has >= count, "the kernel gives {has} huge pages of {count}: no memory is whole");
    }

    /// Sets the size of the pool until this is dropped.
    ///
    /// # Panics
    /// As [`HugePages::set`].
    #[must_use]
    pub fn reserve(count: u64) -> Self {
        let before = Self(fs::read_to_string(POOL).unwrap());
        Self::set(count);
        before
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = fs::write(POOL, &self.0);
    }
}
