//! Requests of the init to its kernel.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::volume;

/// The serial port where the lab listens.
pub(crate) const PORT: &str = "/dev/ttyS1";
const MODULES: &str = "/modules";
/// Longest time until memory is plugged on a busy machine.
const PLUGGED_MAX: Duration = Duration::from_secs(60);

pub(crate) fn mount(kind: &str, at: &str) -> std::io::Result<()> {
    fs::create_dir_all(at)?;
    rustix::mount::mount(kind, at, kind, rustix::mount::MountFlags::empty(), None)?;
    Ok(())
}

/// Loads the drivers. Their order depends on the kernel, so those that fail are tried again after
/// the others. Large ones come last: each try reads all of a module, and small ones are needed by
/// others.
pub(crate) fn load_modules() -> std::io::Result<()> {
    let mut left: Vec<_> = fs::read_dir(MODULES)?.filter_map(|e| Some(e.ok()?.path())).collect();
    left.sort_by_key(|path| fs::metadata(path).map_or(0, |module| module.len()));
    let mut before = usize::MAX;
    while left.len() < before {
        before = left.len();
        left.retain(|path| {
            let module = File::open(path);
            module.is_ok_and(|file| rustix::system::finit_module(file, c"", 0).is_err())
        });
    }
    for path in left {
        eprintln!("guest: the kernel does not take {}", path.display());
    }
    Ok(())
}

/// Waits until the kernel has so much memory: memory is plugged a while after its driver is loaded.
pub(crate) fn wait_memory(bytes: u64) -> std::io::Result<()> {
    let end = Instant::now() + PLUGGED_MAX;
    while memory_bytes()? < bytes && Instant::now() < end {
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// The kernel's total memory.
fn memory_bytes() -> std::io::Result<u64> {
    let info = fs::read_to_string("/proc/meminfo")?;
    let total = info.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = total.and_then(|total| total.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| std::io::Error::other("how much memory there is"))
}

/// Mounts the file system of each disk, or of its first partition if it has one. A disk on SCSI
/// without partitions has a volume with a file system.
pub(crate) fn mount_disks() -> std::io::Result<Vec<PathBuf>> {
    let mut places = Vec::new();
    let disks = |kind: &str| -> Vec<String> {
        let paths = ('a'..='z').map(|letter| format!("/dev/{kind}{letter}"));
        paths.take_while(|path| Path::new(path).exists()).collect()
    };
    for disk in [disks("vd"), disks("sd")].concat() {
        let partition = format!("{disk}1");
        let source = match Path::new(&partition).exists() {
            true => partition,
            false if disk.starts_with("/dev/sd") => volume::of(&disk)?,
            false => disk,
        };
        let at = format!("/disks/{}", places.len());
        fs::create_dir_all(&at)?;
        let flags = rustix::mount::MountFlags::empty();
        let kinds = ["ext4", "xfs", "btrfs"];
        let mount = |kind| rustix::mount::mount(&source, &at, kind, flags, None);
        if !kinds.into_iter().any(|kind| mount(kind).is_ok()) {
            let text = format!("{source} has none of {kinds:?}");
            return Err(std::io::Error::other(text));
        }
        places.push(PathBuf::from(at));
    }
    Ok(places)
}

/// Caches for the kernel to drop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Caches {
    /// Names and attributes of files, but not their content.
    Names,
    /// Content of files, but not their names.
    Contents,
    /// All that it can read again from disks.
    All,
}

pub(crate) fn drop_caches(caches: Caches) -> std::io::Result<()> {
    let number = match caches {
        Caches::Contents => "1",
        Caches::Names => "2",
        Caches::All => "3",
    };
    fs::write("/proc/sys/vm/drop_caches", number)
}

/// Sizes of the kernel's caches, in KiB: `cached=N active=N inactive=N dirty=N slab=N`.
pub(crate) fn memory() -> std::io::Result<String> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let number = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|rest| rest.split_whitespace().next()).unwrap_or("0")
    };
    let names = ["Cached", "Active(file)", "Inactive(file)", "Dirty", "Slab"];
    let [cached, active, inactive, dirty, slab] = names.map(number);
    Ok(format!("cached={cached} active={active} inactive={inactive} dirty={dirty} slab={slab}"))
}

pub(crate) fn open_port() -> std::io::Result<File> {
    let port = OpenOptions::new().read(true).write(true).open(PORT)?;
    let mut settings = rustix::termios::tcgetattr(&port)?;
    settings.make_raw();
    settings.set_speed(115_200)?;
    rustix::termios::tcsetattr(&port, rustix::termios::OptionalActions::Now, &settings)?;
    Ok(port)
}

/// Pins the calling thread to a CPU, counted from 1; 0 for any.
pub(crate) fn keep_to(cpu: u64) {
    let Some(cpu) = usize::try_from(cpu).ok().and_then(|cpu| cpu.checked_sub(1)) else { return };
    let mut cpus = rustix::thread::CpuSet::new();
    cpus.set(cpu);
    if let Err(error) = rustix::thread::sched_setaffinity(None, &cpus) {
        eprintln!("guest: there is no CPU {}: {error}", cpu + 1);
    }
}

pub(crate) fn end(command: rustix::system::RebootCommand) -> Result<String, String> {
    match rustix::system::reboot(command) {
        Ok(()) => Ok(String::new()),
        Err(error) => Err(error.to_string()),
    }
}
