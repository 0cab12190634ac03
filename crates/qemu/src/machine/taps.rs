//! The tap devices of a VM's network cards, for its next QEMU on the same host.
//!
//! A QEMU sets a tap up when it starts, although it waits for its VM: offloads, and the length of
//! headers, which are the device's and not the open file's. So the next one starts with a device
//! of its own, which is down and on no bridge. When the former one has ended, the next one's open
//! files join the former one's device, which is otherwise left as it is.

use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::path::Path;

use host::nic;
use host::taps::{self, DRIVER, Device, Joining, Packets, Queue, TapError};

use super::inherit_error::InheritError;
use super::{Machine, open_files};
use crate::command_line::{CommandLine, OpenTap, PassedTap};
use crate::process::{Process, command_line_of, proc_path};

/// A tap that a VM's QEMU has open.
#[derive(Debug)]
struct FormerTap {
    device: Device,
    queues: Vec<Queue>,
}

/// The taps of a VM's former QEMU, in the order of its command line. As long as this exists, they
/// stay, even if that QEMU ends.
#[derive(Debug, Default)]
pub struct FormerTaps(Vec<FormerTap>);

impl FormerTaps {
    /// Those of this QEMU, if its next one can have all of them. Nothing of it changes.
    ///
    /// # Errors
    /// If one of those on its command line is not found, or would not be as it was.
    pub fn of(machine: &Machine) -> Result<Self, InheritError> {
        let passed = passed(machine);
        if passed.is_empty() {
            return Ok(Self::default());
        }
        let mut open = open_in(&machine.process);
        let pid = machine.process.pid();
        let taps = passed.iter().map(|tap| former(tap, &mut open, pid, &machine.cwd));
        taps.collect::<Result<_, _>>().map(Self)
    }

    /// What is left of those of this QEMU, which is to end now.
    #[must_use]
    pub fn left(machine: &Machine) -> Self {
        let passed = passed(machine);
        let mut open = open_in(&machine.process);
        Self(passed.iter().filter_map(|tap| opened(tap, &mut open)).collect())
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Open files for the next QEMU, of devices of its own.
    ///
    /// # Errors
    /// If they can't be made.
    pub fn for_next(&self) -> Result<NextTaps, InheritError> {
        let made = self.0.iter().map(|tap| Queue::make(tap.device.kind, tap.queues.len()));
        let made = made.collect::<Result<Vec<_>, _>>();
        let made = made.map_err(|error| InheritError::NoOwnTap { why: error.to_string() })?;
        Ok(NextTaps(made))
    }

    /// Notes which of these devices have to vanish with their last queue.
    pub fn note(&self, joining: &mut [Joining]) {
        for one in joining {
            let is_it = |tap: &&FormerTap| tap.device.name == one.name;
            let device = self.0.iter().find(is_it).map(|tap| &tap.device);
            one.is_temporary = device.is_some_and(|device| !device.is_persistent);
        }
    }

    /// Has these devices stay without a queue.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn keep(&self, joining: &[Joining]) -> Result<(), String> {
        self.persist(joining, true)
    }

    /// Has them vanish with their last queue again: their QEMU keeps them.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn release(&self, joining: &[Joining]) -> Result<(), String> {
        self.persist(joining, false)
    }

    fn persist(&self, joining: &[Joining], stays: bool) -> Result<(), String> {
        for one in joining.iter().filter(|one| one.is_temporary) {
            let queues = self.0.iter().filter(|tap| tap.device.name == one.name);
            if let Some(queue) = queues.flat_map(|tap| &tap.queues).next() {
                queue.persist(stays).map_err(|error| format!("the tap {}: {error}", one.name))?;
            }
        }
        Ok(())
    }

    /// Takes the packets that wait for their QEMU, which has ended, or does nothing any more.
    #[must_use]
    pub fn waiting(&self) -> Waiting {
        let packets = self.0.iter().map(|tap| {
            let packets = Packets::waiting_in(&tap.queues);
            (tap.device.name.clone(), packets)
        });
        Waiting(packets.collect())
    }

    /// Whether all of these devices may have more queues than those that their QEMU has open, which
    /// then need not be closed before others join.
    #[must_use]
    pub fn may_leave(&self, joining: &[Joining]) -> bool {
        let may_leave = |one: &Joining| {
            let mut taps = self.0.iter();
            let its = taps.find(|tap| tap.device.name == one.name && tap.device.kind.multi_queue);
            its.is_some_and(|tap| tap.queues.len() == one.enabled.len())
        };
        joining.iter().all(may_leave)
    }

    /// Has their queues leave them. Their QEMU does nothing any more.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn leave(&self) -> Result<(), String> {
        for FormerTap { device, queues } in &self.0 {
            let left = queues.iter().try_for_each(Queue::leave);
            left.map_err(|error| format!("the tap {}: {error}", device.name))?;
        }
        Ok(())
    }
}

/// Packets for taps.
#[derive(Debug, Default)]
pub struct Waiting(Vec<(String, Packets)>);

impl Waiting {
    /// Delivers them. What can't be delivered is lost, as if it had been on its way a moment
    /// earlier.
    pub fn deliver(&self) {
        for (name, packets) in &self.0 {
            match packets.deliver(name) {
                Ok(0) => {}
                Ok(lost) => tracing::info!(tap = name, lost, "packets were lost at a tap"),
                Err(error) => tracing::info!(tap = name, %error, "packets were lost at a tap"),
            }
        }
    }
}

/// The open files for taps of a VM's next QEMU, in the order of its command line.
#[derive(Debug, Default)]
pub struct NextTaps(Vec<Vec<Queue>>);

impl NextTaps {
    /// Their numbers.
    pub(super) fn numbers(&self) -> Vec<Vec<RawFd>> {
        self.0.iter().map(|queues| queues.iter().map(AsRawFd::as_raw_fd).collect()).collect()
    }

    /// All of them.
    pub(super) fn borrowed(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().flatten().map(AsFd::as_fd)
    }
}

/// A tap, and the open files that a QEMU has for it.
#[derive(Debug)]
struct JoiningTap {
    name: String,
    queues: Vec<Queue>,
}

/// The taps that a VM's next QEMU is to have, with its open files for them.
#[derive(Debug, Default)]
pub struct JoiningTaps(Vec<JoiningTap>);

impl JoiningTaps {
    /// Those of this QEMU, which was started with open files.
    ///
    /// # Errors
    /// If one is not found.
    pub fn of(machine: &Machine) -> Result<Self, InheritError> {
        let passed = passed(machine);
        if passed.is_empty() {
            return Ok(Self::default());
        }
        let pid = machine.process.pid();
        let running = command_line_of(pid).unwrap_or_default();
        let running = CommandLine::parse(&CommandLine::of_running(&running)).ok();
        let files = running.map(|line| line.tap_files()).unwrap_or_default();
        let mut files = files.into_iter();
        let taps = passed.into_iter().map(|PassedTap { name, queues: count, .. }| {
            let numbers = files.next().filter(|numbers| numbers.len() == count);
            let queues: Option<Vec<Queue>> = numbers.and_then(|numbers| {
                numbers.into_iter().map(|number| take(&machine.process, number)).collect()
            });
            match queues {
                Some(queues) => Ok(JoiningTap { name, queues }),
                None => Err(InheritError::NoTap { name, pid }),
            }
        });
        taps.collect::<Result<_, _>>().map(Self)
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether all have joined their devices.
    ///
    /// # Errors
    /// If that can't be read.
    pub fn have_joined(&self) -> Result<bool, TapError> {
        for tap in &self.0 {
            if !taps::are_of(&tap.queues, &tap.name)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// How they join their devices, as the VM that was loaded has set them up.
    ///
    /// # Errors
    /// If one is of no device of its own.
    pub fn joining(&self) -> Result<Vec<Joining>, TapError> {
        self.0.iter().map(|tap| taps::joining(&tap.queues, &tap.name)).collect()
    }

    /// Has them join their devices, which no other QEMU has any more. May be called again.
    ///
    /// # Errors
    /// If one can't.
    pub fn join(&self, joining: &[Joining]) -> Result<(), TapError> {
        for tap in &self.0 {
            let to = joining.iter().find(|to| to.name == tap.name);
            let missing = || TapError::Missing { name: tap.name.clone() };
            taps::join(&tap.queues, to.ok_or_else(missing)?)?;
        }
        Ok(())
    }
}

impl Machine {
    /// Whether a next QEMU on this host gets its taps, for which this one has to end first.
    #[must_use]
    pub fn passes_taps(&self) -> bool {
        !passed(self).is_empty()
    }
}

/// The taps on its command line; none if that can't be used.
fn passed(machine: &Machine) -> Vec<PassedTap> {
    CommandLine::parse(&machine.argv).map(|line| line.passed_taps()).unwrap_or_default()
}

/// A tap, if another QEMU can have it as it is.
fn former(
    tap: &PassedTap,
    open: &mut Vec<(Device, Queue)>,
    pid: u32,
    cwd: &Path,
) -> Result<FormerTap, InheritError> {
    let name = || tap.name.clone();
    let former = opened(tap, open).filter(|former| former.queues.len() == tap.queues);
    let former = former.ok_or_else(|| InheritError::NoTap { name: name(), pid })?;
    for queue in &former.queues {
        match queue.is_here() {
            Ok(true) => {}
            Ok(false) => return Err(InheritError::TapElsewhere { name: name() }),
            Err(error) => {
                let why = format!("the tap {} (CAP_NET_ADMIN is needed): {error}", tap.name);
                return Err(InheritError::NoOwnTap { why });
            }
        }
    }
    // Without it, the failure to run it is all that happens.
    if let Some(script) = tap.down_script.as_ref().filter(|script| cwd.join(script).exists()) {
        return Err(InheritError::TapScript { name: name(), script: script.clone() });
    }
    match nic::has_spanning_tree(&tap.name) {
        Ok(false) => Ok(former),
        Ok(true) => Err(InheritError::TapSilent { name: name() }),
        Err(error) => Err(InheritError::NoOwnTap { why: error.to_string() }),
    }
}

/// Takes the queues of a tap from those that a process has open; none if it has none.
fn opened(tap: &PassedTap, open: &mut Vec<(Device, Queue)>) -> Option<FormerTap> {
    let mut found: Option<FormerTap> = None;
    for (device, queue) in open.extract_if(.., |(device, _)| device.name == tap.name) {
        found.get_or_insert_with(|| FormerTap { device, queues: Vec::new() }).queues.push(queue);
    }
    found
}

/// The queues of taps that a process has open.
fn open_in(process: &Process) -> Vec<(Device, Queue)> {
    let entries = fs::read_dir(proc_path(process.pid(), "fd"));
    let entries = entries.into_iter().flatten().flatten();
    let is_driver = |path: &Path| fs::read_link(path).is_ok_and(|link| link == Path::new(DRIVER));
    let files = entries.filter(|entry| is_driver(&entry.path()));
    let mut numbers: Vec<RawFd> =
        files.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    numbers.sort_unstable();
    let queues = numbers.into_iter().filter_map(|number| take(process, number));
    queues.filter_map(|queue| Some((queue.device().ok()??, queue))).collect()
}

/// A process's open file of this number.
fn take(process: &Process, number: RawFd) -> Option<Queue> {
    open_files::take(process, number).map(Queue::of)
}

/// The tap of a process's open file.
pub(super) fn tap_of(process: &Process, number: RawFd) -> Option<OpenTap> {
    let device = take(process, number)?.device().ok()??;
    Some(OpenTap { name: device.name, virtio_header: device.kind.virtio_header })
}
