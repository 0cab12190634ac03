//! How a VM can get another QEMU on the host where it runs: what becomes of its RAM, or what
//! forbids it.

use std::path::Path;

use facts::program::Capabilities;

use crate::command_line::{CommandLine, CommandLineError, Exclusive};
use crate::disks::{ElsewhereError, check_names};
use crate::machine::{FormerTaps, InheritError, InheritedSockets, Machine, SharedRam};
use crate::outgoing;
use crate::qmp::{MemoryBackend, QmpError};
use crate::room::{Needs, NoRoom, host_memory};
use crate::shape::{self, Memory};

/// Backends in named files: only these are left out by every QEMU (`x-ignore-shared`). 7.2 leaves
/// out all shared memory.
const FILE: &str = "memory-backend-file";
/// Devices that have a device of the host for themselves.
const OF_HOST: [&str; 2] = ["vfio-", "usb-host"];
/// Devices whose back end, outside of QEMU, serves one QEMU. Of vsock, each guest has a number of
/// its own.
const SERVED: [&str; 4] = ["vhost-user-", "vhost-vdpa", "vhost-scsi", "vhost-vsock-"];
/// A version of QEMU.
type Release = (u32, u32, u32);
/// Devices with which another QEMU writes to RAM that a VM uses: as it starts, when the VM still
/// runs, or as it loads the VM, outside of what is kept. With each, the first release that doesn't;
/// `None` if there is none.
const WRITERS: [(&str, Option<Release>); 3] = [
    // It discards its memory.
    ("virtio-mem", Some((8, 1, 0))),
    // Its `data` is written at each reset.
    ("loader", None),
    // With `guid=auto` each QEMU has another one.
    ("vmgenid", None),
];
/// The part of a VM's untouched memory for which there has to be room in its cgroup while it is
/// copied: one in so many bytes. What the VM touches meanwhile exists twice as well.
const UNTOUCHED_PARTS: u64 = 4;
/// The id that libvirt gives to its own monitor's socket.
const LIBVIRTS_MONITOR: &str = "charmonitor";

/// What is known of a VM.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// QEMU's command line, as its owner typed it.
    pub argv: Vec<String>,
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
    /// The ids of backends in files that another QEMU would write to as well.
    pub in_files: Vec<String>,
    /// Whether its guest may report free pages.
    pub hints_free_pages: bool,
    /// Why another QEMU can't have the same sockets, taps or images.
    pub apart: Vec<Obstacle>,
    /// What this host lacks for a second copy of its RAM; none if nothing.
    pub no_room: Option<NoRoom>,
    /// The ordinary memory that a second copy of its RAM takes.
    pub pages_bytes: u64,
    /// The private memory that its QEMU has touched; none if that isn't known.
    pub touched_bytes: Option<u64>,
    /// The memory that cgroups leave for it; none if they don't limit it, or that isn't known.
    pub group_room: Option<u64>,
}

/// How a VM can get another QEMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Plan {
    /// All of its RAM stays where it is, and the other QEMU maps it.
    HandedOver,
    /// Some belongs to QEMU alone: all of it is copied, and exists twice meanwhile.
    Copied {
        /// All of it.
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
    /// The other QEMU can't get a socket, a tap or a file with RAM.
    #[error(transparent)]
    Inherit(#[from] InheritError),
    /// The other QEMU would have another image.
    #[error(transparent)]
    Elsewhere(#[from] ElsewhereError),
    /// RAM that can't be copied, next to RAM that can't be handed over.
    #[error(
        "its RAM {id} is in a file that another QEMU would write to as well, and it has other RAM \
         that belongs to its QEMU alone, and can't be handed over"
    )]
    InFile {
        /// Its backend.
        id: String,
    },
    /// QEMU subtracts pages that the guest reports as free also where it counts none, in RAM that it
    /// leaves out: its count of what is left would wrap.
    #[error(
        "all of its RAM is in files that another QEMU would write to as well, and its balloon \
         reports free pages (free-page-hint=on), with which QEMU can't hand RAM over"
    )]
    FreePageHint,
    /// RAM would not be as it was.
    #[error(
        "all of its RAM is in files that another QEMU would write to as well, and that QEMU would \
         change it with its {kind} before it has the VM"
    )]
    Writer {
        /// The device's kind.
        kind: String,
    },
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
    /// Its cgroup has less memory than that takes.
    #[error(
        "a copy of its RAM takes {} MiB (what it has touched, and a quarter of the rest for what \
         it touches meanwhile), and its cgroup leaves {} MiB: raise its limit (MemoryMax= of its \
         scope, or of a slice above it)",
        needed >> 20,
        free >> 20
    )]
    Group {
        /// What the copy takes.
        needed: u64,
        /// What the limits leave.
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
        let shape = shape::of(qmp)?;
        let named = check_names(&shape).err().map(Obstacle::from);
        let inherited = InheritedSockets::of(machine).err().map(Obstacle::from);
        let unmapped = SharedRam::of(machine).err().map(Obstacle::from);
        let taps = FormerTaps::of(machine).err().map(Obstacle::from);
        let known = Self {
            argv: machine.argv.clone(),
            machine: shape.machine,
            ram_bytes: qmp.ram_bytes()?,
            backends: qmp.memory_backends()?,
            devices: devices.into_iter().map(|(_, kind)| kind).collect(),
            blockers: outgoing::blockers(qmp)?,
            in_files: in_files(&machine.argv, &machine.cwd),
            hints_free_pages: shape::has_free_page_hint(qmp)?,
            apart: named.into_iter().chain(inherited).chain(unmapped).chain(taps).collect(),
            no_room: None,
            pages_bytes: 0,
            touched_bytes: None,
            group_room: None,
        };
        // A command line that can't be used is an obstacle of its own.
        let Ok(line) = CommandLine::parse(&known.argv) else { return Ok(known) };
        let host = host_memory();
        let all = known.memory(|_| true);
        let needs = Needs::of(&line, &all, &shape.unplugged, &machine.cwd, &host);
        let no_room = needs.fit(&host, false).err();
        Ok(Self { no_room, pages_bytes: needs.pages_bytes, ..known })
    }

    /// How it gets a QEMU with these capabilities.
    #[must_use]
    pub fn plan(&self, next: &Capabilities) -> Plan {
        let line = match CommandLine::parse(&self.argv) {
            Ok(line) => line,
            Err(error) => return Plan::Not { reasons: vec![error.into()] },
        };
        let mut reasons = self.obstacles(&line, next);
        let is_shared = self.private(&line).iter().all(|one| one.bytes == 0);
        let writer = self.writer(next);
        let is_handed_over = is_shared && !self.hints_free_pages && writer.is_none();
        // What is in the way of libvirt's follows from that.
        if !is_handed_over && reasons != [Obstacle::Libvirt] {
            match is_shared && !self.in_files.is_empty() {
                true => {
                    reasons.extend(self.hints_free_pages.then_some(Obstacle::FreePageHint));
                    reasons.extend(writer.map(|kind| Obstacle::Writer { kind: kind.clone() }));
                }
                false => reasons
                    .extend(self.in_files.iter().map(|id| Obstacle::InFile { id: id.clone() })),
            }
            reasons.extend(self.no_room.as_ref().map(lacks_room));
            let needed = self.copy_bytes();
            let narrow = self.group_room.filter(|free| *free < needed);
            reasons.extend(narrow.map(|free| Obstacle::Group { needed, free }));
        }
        if !reasons.is_empty() {
            return Plan::Not { reasons };
        }
        if is_handed_over {
            return Plan::HandedOver;
        }
        let all = self.memory(|_| true);
        Plan::Copied { bytes: all.iter().fold(0, |sum: u64, one| sum.saturating_add(one.bytes)) }
    }

    /// The ordinary memory that a second copy of its RAM takes within its cgroup, where both are:
    /// less than on the host, whose other VMs count on what this one may touch later.
    ///
    /// QEMU reads all RAM, which allocates what is shared, and leaves private memory as it is.
    fn copy_bytes(&self) -> u64 {
        let Some(touched) = self.touched_bytes else { return self.pages_bytes };
        let shared = self.backends.iter().filter(|one| one.share);
        let shared = shared.fold(0, |sum: u64, one| sum.saturating_add(one.bytes));
        let private = self.pages_bytes.saturating_sub(shared);
        let rest = private.saturating_sub(touched) / UNTOUCHED_PARTS;
        (self.pages_bytes - private).saturating_add(touched).saturating_add(rest)
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
        obstacles.extend(self.apart.iter().cloned());
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

    /// The kind of a device with which that QEMU would write to RAM that the VM uses.
    fn writer(&self, next: &Capabilities) -> Option<&String> {
        let writes = |kind: &&String| {
            WRITERS.iter().any(|(prefix, fixed)| {
                kind.starts_with(prefix) && fixed.is_none_or(|fixed| next.version < fixed)
            })
        };
        self.devices.iter().find(writes)
    }

    /// The RAM that only this QEMU can map. What was plugged in since is on no command line.
    fn private(&self, line: &CommandLine) -> Vec<Memory> {
        let named = line.backends();
        let is_named = |id: &str| named.iter().any(|one| one.id == id && one.kind == FILE);
        self.memory(|backend| !(backend.share && is_named(&backend.id)))
    }

    /// Its RAM in these backends, and in none.
    fn memory(&self, of: impl Fn(&MemoryBackend) -> bool) -> Vec<Memory> {
        let listed = self.backends.iter().fold(0, |sum: u64, one| sum.saturating_add(one.bytes));
        // Where QEMU doesn't list its base memory.
        let base = Memory { id: String::new(), bytes: self.ram_bytes.saturating_sub(listed) };
        let those = self.backends.iter().filter(|one| of(one));
        let those = those.map(|one| Memory { id: one.id.clone(), bytes: one.bytes });
        those.chain([base]).collect()
    }
}

fn lacks_room(no_room: &NoRoom) -> Obstacle {
    match *no_room {
        NoRoom::Pages { needed, available } => Obstacle::Room { needed, free: available },
        NoRoom::Huge { page_bytes, needed, free } => Obstacle::Room {
            needed: needed.saturating_mul(page_bytes),
            free: free.saturating_mul(page_bytes),
        },
    }
}

/// The ids of backends in files that each QEMU with that command line would write to. In a
/// directory, and from the agent, each gets a file of its own.
fn in_files(argv: &[String], cwd: &Path) -> Vec<String> {
    // A command line that can't be used is an obstacle of its own.
    let backends = CommandLine::parse(argv).map(|line| line.backends()).unwrap_or_default();
    let is_named = |path: &String| !cwd.join(path).is_dir();
    let shared = backends.into_iter().filter(|backend| backend.kind == FILE && backend.share);
    let named = shared.filter(|backend| backend.path.as_ref().is_some_and(is_named));
    named.map(|backend| backend.id).collect()
}

#[cfg(test)]
mod tests;
