//! A QEMU that another program, such as libvirt, has started and commands. The agent
//! sends it no commands: the command line shows which VM it is and what it has, and the
//! kernel shows where its RAM may be and which files it has open.

mod asked;
mod disks;
mod memory;
mod port;
mod words;

use std::fs;
use std::path::{Path, PathBuf};

use host::rights::User;
use ram::Mapping;

use crate::guest_disks::{GuestDisk, Reading};
use crate::guest_memory::PcMemory;
use crate::guest_port::NoPort;
use crate::process::{Process, ProcessError, command_line_of, directory_of, user_of};
use crate::ram_blocks::{RamBlocks, Reached};

use disks::OpenFiles;
use words::{Argument, Words};

/// Longest name that is passed on.
const NAME_BYTES_MAX: usize = 255;

/// Reads a command line of any process, for the fuzzer.
pub(crate) fn read(argv: &[String]) {
    let words = Words(argv);
    let _ = (disks::of(words, Path::new("/"), &OpenFiles::default()), memory::of(words));
    let _ = (words.last("name").and_then(guest_name), port::of(words, std::process::id()));
}

/// A QEMU that another program commands.
#[derive(Debug)]
pub struct Commanded {
    /// Its process.
    pub process: Process,
    /// The VM's name, if the command line has one.
    pub name: Option<String>,
    /// The VM's UUID, if the command line has one.
    pub uuid: Option<String>,
    argv: Vec<String>,
}

impl Commanded {
    /// The QEMU that has this process id now.
    ///
    /// # Errors
    /// If it has exited, or the agent may not inspect it.
    pub fn of_process(pid: u32) -> Result<Self, ProcessError> {
        let process = Process::now(pid)?;
        let argv = command_line_of(pid)?;
        let words = Words(&argv);
        let name = words.last("name").and_then(guest_name);
        let uuid = words.last("uuid").map(|uuid| uuid.0.to_owned()).filter(|uuid| is_uuid(uuid));
        Ok(Self { process, name, uuid, argv })
    }

    /// Its virtio disks, from its command line. A disk whose image is not a file that
    /// QEMU has open can't be read.
    ///
    /// # Errors
    /// If it has exited, or the agent may not inspect it.
    pub fn disks(&self) -> Result<Vec<GuestDisk>, ProcessError> {
        let pid = self.process.pid();
        let cwd = directory_of(pid)?;
        let open = OpenFiles::of(pid);
        let mut disks = disks::of(Words(&self.argv), &cwd, &open);
        for disk in &mut disks {
            let files = disk.reading.files();
            if let Some(other) = files.iter().find(|file| !open.has(file)) {
                let reason = format!("its QEMU does not have {} open", other.display());
                disk.reading = Reading::No { reason };
            }
        }
        Ok(disks)
    }

    /// The socket of the port for the helper in its guest.
    ///
    /// # Errors
    /// If there is none that can be used.
    pub fn guest_port(&self) -> Result<PathBuf, NoPort> {
        port::of(Words(&self.argv), self.process.pid())
    }

    /// Its command line.
    #[must_use]
    pub fn argv(&self) -> &[String] {
        &self.argv
    }

    /// The user with whose rights it opens files.
    ///
    /// # Errors
    /// If it has exited, or the agent may not inspect it.
    pub fn user(&self) -> Result<User, ProcessError> {
        user_of(self.process.pid())
    }

    /// The layout of its guest's memory.
    ///
    /// # Errors
    /// Why it isn't known.
    pub fn memory(&self) -> Result<PcMemory, String> {
        memory::of(Words(&self.argv))
    }

    /// Finds its RAM blocks by their sizes: each only if exactly one mapping of its
    /// memory has that size. Other blocks are noted, and get their pages through QEMU's
    /// stream.
    #[must_use]
    pub fn ram<'b>(&self, blocks: impl Iterator<Item = (&'b str, u64)> + Clone) -> RamBlocks {
        let mut found = RamBlocks::default();
        let large = blocks.filter(|(_, bytes)| *bytes >= RamBlocks::BYTES_MIN);
        for (name, bytes) in large.clone() {
            let alike = large.clone().filter(|(_, others)| *others == bytes).count();
            let mapping = if alike == 1 { self.only_of_size(bytes) } else { Err(ALIKE.to_owned()) };
            match mapping {
                Ok(mapping) => {
                    found.reached.push(Reached {
                        name: name.to_owned(),
                        bytes,
                        mapping: mapping.into(),
                        may_be_unplugged: false,
                    });
                }
                Err(why) => found.notes.push(format!("RAM `{name}` is placed inline: {why}")),
            }
        }
        found
    }

    fn only_of_size(&self, bytes: u64) -> Result<Mapping, String> {
        let found = Mapping::only_of_size(self.process.pidfd(), self.process.pid(), bytes);
        found
            .map_err(|error| error.to_string())?
            .ok_or_else(|| format!("not exactly one piece of QEMU's memory has its {bytes} bytes"))
    }
}

/// The threads of a QEMU that are vCPUs, by their names. QEMU names threads only with
/// `-name debug-threads=on`, which libvirt always sets; otherwise none are found.
#[must_use]
pub fn vcpu_threads(pid: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let of = |task: fs::DirEntry| {
        let name = fs::read_to_string(task.path().join("comm")).ok()?;
        let id = task.file_name().to_str()?.parse().ok()?;
        vcpu_accelerator(name.trim_end()).map(|_| id)
    };
    tasks.filter_map(of).collect()
}

/// Whether a QEMU runs its vCPUs under TCG, by the names of their threads, as far as these are
/// known (see [`vcpu_threads`]).
pub(crate) fn is_under_tcg(pid: u32) -> bool {
    let name = |vcpu| fs::read_to_string(format!("/proc/{pid}/task/{vcpu}/comm")).ok();
    let mut names = vcpu_threads(pid).into_iter().filter_map(name);
    names.any(|name| vcpu_accelerator(name.trim_end()) == Some("TCG"))
}

/// Whether a QEMU has a VFIO device now, such as a vGPU, by its open files.
#[must_use]
pub fn has_vfio_device(pid: u32) -> bool {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    files.filter_map(|file| fs::read_link(file.path()).ok()).any(|path| is_of_vfio(&path))
}

/// A group, a device, or the container.
fn is_of_vfio(path: &Path) -> bool {
    path.starts_with("/dev/vfio")
}

/// The accelerator in the name of a vCPU's thread: `CPU 3/KVM`, or TCG's one thread for all vCPUs.
fn vcpu_accelerator(name: &str) -> Option<&str> {
    let (cpus, accelerator) = name.split_once('/')?;
    let number = cpus.strip_prefix("CPU ");
    let is_one = number.is_some_and(|number| number.parse::<u32>().is_ok());
    let is_vcpu = (is_one || cpus == "ALL CPUs") && matches!(accelerator, "KVM" | "TCG");
    is_vcpu.then_some(accelerator)
}

const ALIKE: &str = "another block of RAM is as large";

/// `NAME`, or `guest=NAME` among other settings.
fn guest_name(value: Argument<'_>) -> Option<String> {
    let named = value.get("guest").or_else(|| value.first())?;
    let is_printable =
        !named.is_empty() && named.len() <= NAME_BYTES_MAX && !named.chars().any(char::is_control);
    is_printable.then_some(named)
}

fn is_uuid(text: &str) -> bool {
    let parts: Vec<_> = text.split('-').map(str::len).collect();
    parts == [8, 4, 4, 4, 12] && text.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    #[test]
    fn a_vm_has_the_name_that_its_qemu_was_told() {
        let names = [
            ("guest=web1,debug-threads=on", Some("web1")),
            ("web1,debug-threads=on", Some("web1")),
            ("debug-threads=on,guest=a,,b", Some("a,b")),
            ("debug-threads=on", None),
            ("guest=", None),
            ("guest=a\nb", None),
        ];
        for (value, name) in names {
            assert_eq!(guest_name(Argument(value)).as_deref(), name, "{value}");
        }
        let argv = ["qemu", "-name", "a", "--uuid", "x", "-name"].map(str::to_owned);
        let last = |argv, name| Words(argv).last(name).map(|it| it.0.to_owned());
        // An option without its argument doesn't count.
        assert_eq!(last(&argv, "name").as_deref(), Some("a"));
        assert_eq!(last(&argv, "uuid").as_deref(), Some("x"));
        assert!(is_uuid("4dea22b3-1d52-d8f3-2516-782e98ab3fa0") && !is_uuid("4dea22b3"));
    }

    #[test]
    fn vcpus_are_known_by_their_names() {
        for (name, accelerator) in
            [("CPU 0/KVM", "KVM"), ("CPU 17/TCG", "TCG"), ("ALL CPUs/TCG", "TCG")]
        {
            assert_eq!(vcpu_accelerator(name), Some(accelerator), "{name}");
        }
        let others = ["qemu-system-x86", "live_migration", "IO mon_iothread", "CPU 0", "CPU /KVM"];
        for name in others.into_iter().chain(["CPU x/KVM", "vhost-7/KVM", ""]) {
            assert_eq!(vcpu_accelerator(name), None, "{name}");
        }
        let (told, named) = channel();
        let (_stop, stopped) = channel::<()>();
        let vcpu = thread::Builder::new().name("CPU 1/KVM".to_owned());
        vcpu.spawn(move || {
            let link = fs::read_link("/proc/thread-self").unwrap();
            told.send(link.file_name().unwrap().to_str().unwrap().parse().unwrap()).unwrap();
            let _ = stopped.recv();
        })
        .unwrap();
        let id: u32 = named.recv().unwrap();
        assert_eq!(vcpu_threads(std::process::id()), [id]);
        assert!(!is_under_tcg(std::process::id()));
        assert!(vcpu_threads(u32::MAX).is_empty());
    }

    #[test]
    fn vfio_devices_are_known_by_their_files() {
        for path in ["/dev/vfio/17", "/dev/vfio/devices/vfio0", "/dev/vfio/17 (deleted)"] {
            assert!(is_of_vfio(Path::new(path)), "{path}");
        }
        assert!(!is_of_vfio(Path::new("/dev/vfio-other")) && !is_of_vfio(Path::new("/dev/kvm")));
        assert!(!has_vfio_device(std::process::id()) && !has_vfio_device(u32::MAX));
    }

    #[test]
    fn blocks_of_one_size_are_not_told_apart() {
        let us = Commanded::of_process(std::process::id()).unwrap();
        let mine = Mapping::own(RamBlocks::BYTES_MIN * 3 + (12 << 10));
        let bytes = mine.bytes();
        let one = [("pc.ram", bytes), ("pc.bios", 4096)];
        let ram = us.ram(one.into_iter());
        assert_eq!((ram.reached.len(), ram.notes.len()), (1, 0), "{:?}", ram.notes);
        assert!(ram.mapping("pc.ram", bytes).is_some());
        let two = [("ram-node0", bytes), ("ram-node1", bytes), ("other", bytes + 4096)];
        let ram = us.ram(two.into_iter());
        assert_eq!((ram.reached.len(), ram.notes.len()), (0, 3), "{:?}", ram.notes);
    }
}
