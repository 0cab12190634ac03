//! How a VM can get another QEMU on the host where it runs: what becomes of its RAM, or what
//! forbids it.

use std::path::Path;

use facts::program::Capabilities;

use crate::command_line::{CommandLine, CommandLineError, Exclusive};
use crate::machine::Machine;
use crate::outgoing;
use crate::qmp::{MemoryBackend, QmpError};
use crate::room::{Needs, NoRoom, host_memory};
use crate::shape::{self, Memory};

/// The first QEMU that leaves only named files out of its stream (`x-ignore-shared`); those before
/// leave out all shared memory.
const NAMED_FILES_SINCE: (u32, u32) = (8, 1);
const FILE: &str = "memory-backend-file";
const MEMFD: &str = "memory-backend-memfd";
/// Devices that have a device of the host for themselves.
const OF_HOST: [&str; 2] = ["vfio-", "usb-host"];
/// Devices whose back end, outside of QEMU, serves one QEMU.
const SERVED: [&str; 3] = ["vhost-user-", "vhost-vdpa", "vhost-scsi"];
/// The id that libvirt gives to its own monitor's socket.
const LIBVIRTS_MONITOR: &str = "charmonitor";

/// What is known of a VM.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// QEMU's command line, as its owner typed it.
    pub argv: Vec<String>,
    /// QEMU's version.
    pub version: (u32, u32, u32),
    /// Its machine type, with its version.
    pub machine: String,
    /// Its RAM.
    pub ram_bytes: u64,
    /// Its memory backends.
    pub backends: Vec<MemoryBackend>,
    /// The kinds of its devices.
    pub devices: Vec<String>,
    /// Why QEMU can't migrate it.
    pub blockers: Vec<String>,
    /// What this host lacks for a second copy of the RAM that only its QEMU can map; none if
    /// nothing.
    pub no_room: Option<NoRoom>,
}

/// How a VM can get another QEMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// All of its RAM stays where it is, and the other QEMU maps it.
    HandedOver,
    /// RAM that belongs to QEMU alone is copied, and exists twice meanwhile.
    Copied {
        /// How much of it.
        bytes: u64,
    },
    /// It can't.
    Not {
        /// Why not.
        reasons: Vec<Obstacle>,
    },
}

/// Why a VM can't get another QEMU in place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Obstacle {
    /// libvirt has to know its QEMU.
    #[error("libvirt started it: `virsh migrate` moves it to another host")]
    Libvirt,
    /// Another QEMU can't be started like this.
    #[error("its command line can't be used: {0}")]
    CommandLine(#[from] CommandLineError),
    /// Two QEMUs can't have it.
    #[error(transparent)]
    Exclusive(#[from] Exclusive),
    /// Two QEMUs can't have that device.
    #[error("{kind} has a device of the host for itself")]
    OfHost {
        /// The device's kind.
        kind: String,
    },
    /// Two QEMUs can't have that back end.
    #[error("the back end of {kind} serves one QEMU")]
    Served {
        /// The device's kind.
        kind: String,
    },
    /// The host lacks memory while it is copied.
    #[error("a copy of its RAM takes {} MiB, and this host has {} MiB", needed >> 20, free >> 20)]
    Room {
        /// What the copy takes.
        needed: u64,
        /// What the host has.
        free: u64,
    },
    /// QEMU can't migrate it, and neither to another process.
    #[error("QEMU can't migrate it: {0}")]
    Blocked(String),
    /// The other QEMU doesn't know the machine type.
    #[error("QEMU {version} doesn't know the machine type {machine}")]
    Machine {
        /// Its version.
        version: String,
        /// The VM's.
        machine: String,
    },
    /// The other QEMU doesn't know the CPU model.
    #[error("QEMU {version} doesn't know the CPU model {cpu}")]
    Cpu {
        /// Its version.
        version: String,
        /// The VM's.
        cpu: String,
    },
}

impl Known {
    /// Queries QEMU.
    ///
    /// # Errors
    /// If it doesn't answer.
    pub fn of(machine: &Machine) -> Result<Self, QmpError> {
        let qmp = &machine.qmp;
        let devices = shape::plugged(qmp, "")?;
        let known = Self {
            argv: machine.argv.clone(),
            version: qmp.version(),
            machine: shape::machine_of(qmp)?,
            ram_bytes: qmp.ram_bytes()?,
            backends: qmp.memory_backends()?,
            devices: devices.into_iter().map(|(_, kind)| kind).collect(),
            blockers: outgoing::blockers(qmp)?,
            no_room: None,
        };
        let no_room = known.check_room(&qmp.unplugged()?, &machine.cwd).err();
        Ok(Self { no_room, ..known })
    }

    fn check_room(&self, unplugged: &[Memory], cwd: &Path) -> Result<(), NoRoom> {
        // A command line that can't be used is an obstacle of its own.
        let Ok(line) = CommandLine::parse(&self.argv) else { return Ok(()) };
        let host = host_memory();
        Needs::of(&line, &self.private(&line), unplugged, cwd, &host).fit(&host, false)
    }

    /// How it can get a QEMU with these capabilities.
    #[must_use]
    pub fn plan(&self, next: &Capabilities) -> Plan {
        let line = match CommandLine::parse(&self.argv) {
            Ok(line) => line,
            Err(error) => return Plan::Not { reasons: vec![error.into()] },
        };
        let reasons = self.obstacles(&line, next);
        if !reasons.is_empty() {
            return Plan::Not { reasons };
        }
        let private = self.private(&line);
        match private.iter().fold(0, |sum: u64, one| sum.saturating_add(one.bytes)) {
            0 => Plan::HandedOver,
            bytes => Plan::Copied { bytes },
        }
    }

    fn obstacles(&self, line: &CommandLine, next: &Capabilities) -> Vec<Obstacle> {
        let own = format!("id={LIBVIRTS_MONITOR}");
        if line.arguments("chardev").any(|argument| argument.split(',').any(|part| part == own)) {
            // What else is in the way follows from that.
            return vec![Obstacle::Libvirt];
        }
        let mut obstacles: Vec<Obstacle> =
            self.blockers.iter().cloned().map(Obstacle::Blocked).collect();
        for kind in &self.devices {
            let starts = |kinds: &[&str]| kinds.iter().any(|start| kind.starts_with(start));
            if starts(&OF_HOST) {
                obstacles.push(Obstacle::OfHost { kind: kind.clone() });
            } else if starts(&SERVED) {
                obstacles.push(Obstacle::Served { kind: kind.clone() });
            }
        }
        obstacles.extend(line.exclusive().into_iter().map(Obstacle::from));
        obstacles.extend(self.no_room.as_ref().map(|no_room| match *no_room {
            NoRoom::Pages { needed, available } => Obstacle::Room { needed, free: available },
            NoRoom::Huge { page_bytes, needed, free } => Obstacle::Room {
                needed: needed.saturating_mul(page_bytes),
                free: free.saturating_mul(page_bytes),
            },
        }));
        let version = next.version_text();
        if !next.knows_machine(&self.machine) {
            let machine = self.machine.clone();
            obstacles.push(Obstacle::Machine { version: version.clone(), machine });
        }
        // If it lists no model, the answer was not understood.
        let unknown = |cpu: &String| !next.cpus.is_empty() && next.cpu(cpu).is_none();
        if let Some(cpu) = line.cpu_model().filter(unknown) {
            obstacles.push(Obstacle::Cpu { version, cpu });
        }
        obstacles
    }

    /// The RAM that only this QEMU can map.
    fn private(&self, line: &CommandLine) -> Vec<Memory> {
        let named = line.backends();
        let is_left_out = |backend: &MemoryBackend| {
            let kind = named.iter().find(|one| one.id == backend.id).map(|one| one.kind.as_str());
            let (major, minor, _) = self.version;
            backend.share
                && match kind {
                    Some(FILE) => true,
                    Some(MEMFD) => (major, minor) < NAMED_FILES_SINCE,
                    // What was plugged in since is on no command line.
                    _ => false,
                }
        };
        let listed = self.backends.iter().fold(0, |sum: u64, one| sum.saturating_add(one.bytes));
        // Where QEMU doesn't list its base memory.
        let base = Memory { id: String::new(), bytes: self.ram_bytes.saturating_sub(listed) };
        let private = self.backends.iter().filter(|one| !is_left_out(one));
        let private = private.map(|one| Memory { id: one.id.clone(), bytes: one.bytes });
        private.chain([base]).collect()
    }
}

#[cfg(test)]
mod tests {
    use facts::program::{CpuModel, MachineType};

    use super::*;

    const MIB: u64 = 1 << 20;
    const MACHINE: &str = "pc-q35-7.2";

    fn backend(id: &str, mib: u64, share: bool) -> MemoryBackend {
        MemoryBackend { id: id.to_owned(), bytes: mib * MIB, share }
    }

    fn known(line: &str, backends: Vec<MemoryBackend>) -> Known {
        Known {
            argv: line.split_whitespace().map(str::to_owned).collect(),
            version: (10, 0, 2),
            machine: MACHINE.to_owned(),
            ram_bytes: backends.iter().map(|one| one.bytes).sum(),
            backends,
            ..Known::default()
        }
    }

    fn next() -> Capabilities {
        let machine = MachineType { name: MACHINE.to_owned(), alias: None, deprecated: false };
        let cpu = CpuModel { name: "Haswell".to_owned(), unavailable: Vec::new() };
        Capabilities {
            version: (11, 1, 3),
            machines: vec![machine],
            cpus: vec![cpu],
            ..Capabilities::default()
        }
    }

    fn reasons(known: &Known) -> Vec<String> {
        match known.plan(&next()) {
            Plan::Not { reasons } => reasons.iter().map(ToString::to_string).collect(),
            plan => panic!("{plan:?}"),
        }
    }

    #[test]
    fn shared_files_are_handed_over_and_private_memory_is_copied() {
        let plan = |version, line: &str, backends| {
            Known { version, ..known(line, backends) }.plan(&next())
        };
        let file = "qemu -object memory-backend-file,id=r,size=64M,share=on,mem-path=/ram";
        let memfd = "qemu -object memory-backend-memfd,id=r,size=64M";
        let made = "qemu -object memory-backend-file,id=r,size=64M,share=on,\
                    mem-path=/proc/self/fd/droveway-ram";
        let copied = |mib| Plan::Copied { bytes: mib * MIB };
        for (version, line, backends, expected) in [
            ((10, 0, 2), file, vec![backend("r", 64, true)], Plan::HandedOver),
            ((7, 2, 22), file, vec![backend("r", 64, true)], Plan::HandedOver),
            // Mapped privately, whatever the file is.
            ((10, 0, 2), file, vec![backend("r", 64, false)], copied(64)),
            ((7, 2, 22), memfd, vec![backend("r", 64, true)], Plan::HandedOver),
            ((10, 0, 2), memfd, vec![backend("r", 64, true)], copied(64)),
            ((10, 0, 2), "qemu -m 64", vec![backend("pc.ram", 64, false)], copied(64)),
            ((10, 0, 2), made, vec![backend("r", 64, true)], Plan::HandedOver),
            ((7, 2, 22), made, vec![backend("r", 64, true)], Plan::HandedOver),
            // Plugged in since.
            ((10, 0, 2), file, vec![backend("r", 64, true), backend("more", 32, true)], copied(32)),
        ] {
            assert_eq!(plan(version, line, backends), expected, "{version:?}: {line}");
        }
        let unlisted = Known { ram_bytes: 96 * MIB, ..known(file, vec![backend("r", 64, true)]) };
        assert_eq!(unlisted.plan(&next()), copied(32));
    }

    #[test]
    fn what_forbids_it_is_named() {
        let plain = || known("qemu -cpu Haswell,+aes", vec![backend("pc.ram", 64, false)]);
        assert_eq!(plain().plan(&next()), Plan::Copied { bytes: 64 * MIB });
        let vm = Known { blockers: vec!["0000:00:04.0/nvme".to_owned()], ..plain() };
        assert_eq!(reasons(&vm), ["QEMU can't migrate it: 0000:00:04.0/nvme"]);
        let devices = ["virtio-net-pci", "vfio-pci-nohotplug", "vhost-user-fs-pci"];
        let vm = Known { devices: devices.map(str::to_owned).to_vec(), ..plain() };
        let expected = [
            "vfio-pci-nohotplug has a device of the host for itself",
            "the back end of vhost-user-fs-pci serves one QEMU",
        ];
        assert_eq!(reasons(&vm), expected);
        let vm = known("qemu -serial unix:/s,server=on", Vec::new());
        assert_eq!(reasons(&vm), ["-serial is connected to something outside of QEMU"]);
        let no_room = NoRoom::Pages { needed: 64 * MIB, available: 16 * MIB };
        let vm = Known { no_room: Some(no_room), ..plain() };
        assert_eq!(reasons(&vm), ["a copy of its RAM takes 64 MiB, and this host has 16 MiB"]);
        let no_room = NoRoom::Huge { page_bytes: 2 * MIB, needed: 32, free: 4 };
        let vm = Known { no_room: Some(no_room), ..plain() };
        assert_eq!(reasons(&vm), ["a copy of its RAM takes 64 MiB, and this host has 8 MiB"]);
        let vm = Known { machine: "pc-q35-12.0".to_owned(), ..plain() };
        assert_eq!(reasons(&vm), ["QEMU 11.1.3 doesn't know the machine type pc-q35-12.0"]);
        let vm = known("qemu -cpu Later", Vec::new());
        assert_eq!(reasons(&vm), ["QEMU 11.1.3 doesn't know the CPU model Later"]);
        let vm = known("qemu -m", Vec::new());
        assert_eq!(reasons(&vm), ["its command line can't be used: -m needs an argument"]);
    }

    #[test]
    fn of_libvirts_vms_only_libvirt_is_named() {
        let line = "qemu -chardev socket,id=charmonitor,fd=22,server=on,wait=off -vnc :1 -m 64";
        let vm = known(line, Vec::new());
        assert_eq!(vm.plan(&next()), Plan::Not { reasons: vec![Obstacle::Libvirt] });
    }
}
