//! Makes one QEMU of a VM its only one, where two have mapped the same RAM, or get the same taps.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Receiver;
use engine::{HandOver, NotAlone, RamBack};
use qemu::machine::{self, Machine, StartError};
use qemu::process::{ProcessError, Until};
use qemu::qmp::{Event, RunState};
use qemu::ram_blocks::RamBlocks;

use super::{Registry, Seat};
use crate::vms::ram_before;
use crate::vms::record::{Record, RecordError};
use crate::vms::vm::Vm;

/// For a former QEMU to report the VM's state. The VM stands still.
const STATE_MAX: Duration = Duration::from_secs(1);

impl Registry {
    /// Ends every other QEMU of a VM than this one, so far.
    pub(super) fn end_besides(
        &self,
        name: &str,
        one: &machine::Record,
        until: Until,
    ) -> Result<(), String> {
        let here = [self.vm(name), self.next(name)].into_iter().flatten();
        let here = here.filter_map(|vm| Some(vm.machine()?.record()));
        // One that this run of the agent has not reached yet is on disk.
        let dir = self.state().vm(name);
        let noted = [Record::read(&dir), Record::read_next(&dir)].into_iter().flatten();
        let all = here.chain(noted.filter_map(|record| record.machine));
        let mut those = vec![one.clone()];
        for other in all {
            if those.iter().any(|one| other.is_of(one)) {
                continue;
            }
            other.end(until).map_err(|error| error.to_string())?;
            those.push(other);
        }
        if self.may_live_besides_those(name, &those) {
            return Err("another QEMU of the VM may live, and has its RAM or its taps".to_owned());
        }
        Ok(())
    }

    /// Whether another QEMU of the VM than this one may live.
    pub(crate) fn may_live_besides(&self, name: &str, one: &machine::Record) -> bool {
        self.may_live_besides_those(name, std::slice::from_ref(one))
    }

    fn may_live_besides_those(&self, name: &str, those: &[machine::Record]) -> bool {
        let is_one = |its: &machine::Record| those.iter().any(|one| its.is_of(one));
        let lives = |vm: Arc<Vm>| {
            let machine = vm.machine().filter(|machine| !is_one(&machine.record()));
            machine.is_some_and(|machine| machine.process.is_alive())
        };
        if [self.vm(name), self.next(name)].into_iter().flatten().any(lives) {
            return true;
        }
        let dir = self.state.vm(name);
        let may_live = |record: Result<Record, RecordError>| match record {
            Ok(Record { machine: Some(its), .. }) => !is_one(&its) && !has_exited(&its, &dir),
            // It was being started, or that can't be read. The VM's own record was lost if it is
            // missing.
            Ok(_) | Err(_) => true,
        };
        let may_next_live = match Record::read_next(&dir) {
            Err(RecordError::Missing(_)) => false,
            next => may_live(next),
        };
        may_next_live || may_live(Record::read(&dir))
    }

    /// Ends the next QEMU of a VM, leaves the taps to the former one, and puts back what the load
    /// may have written to RAM, unless the VM runs again.
    pub(crate) fn take_ram_back(&self, name: &str, former: &Machine) -> Result<RamBack, String> {
        self.end_besides(name, &former.record(), Until::Exited)?;
        self.leave_taps(name, former);
        let back = ram_before::put_back(&self.state().vm(name), former)?;
        if let RamBack::Ran(why) = &back {
            tracing::error!(vm = name, why, "the RAM of a VM that runs was not put back");
            self.vm(name).iter().for_each(|vm| vm.ran_early(why));
        }
        Ok(back)
    }
}

/// What a former QEMU counts as that does not answer whether it runs the VM.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Silent {
    /// It has answered a moment ago, before the commit.
    Released,
    /// It may have been ordered to run the VM since.
    MayRun,
}

/// A former QEMU that has released its VM.
pub(super) struct Released<'m> {
    former: &'m Machine,
    resumed: Receiver<Event>,
}

impl<'m> Released<'m> {
    /// Checks that nothing has ordered it to run the VM since.
    pub(super) fn of(former: &'m Machine, silent: Silent) -> Result<Self, NotAlone> {
        // Events come in order with the answers to queries.
        let resumed = former.qmp.events_named(&["RESUME"]);
        match former.qmp.run_state_within(STATE_MAX) {
            Ok(RunState::PostMigrate) => Ok(Self { former, resumed }),
            Err(_) if silent == Silent::Released || former.process.has_halted() => {
                Ok(Self { former, resumed })
            }
            Err(error) => Err(may_run(former.process.pid(), &error.to_string())),
            Ok(state) => Err(NotAlone::Runs(format!(
                "something else than the agent ordered the former QEMU to run the VM, which is \
                 {state} there"
            ))),
        }
    }

    /// Checks the same of one that was ended since. QEMU sends the event before a device or a vCPU
    /// continues.
    pub(super) fn check_ended(&self) -> Result<(), NotAlone> {
        // It may not have been read yet. It sends no more.
        self.former.qmp.close();
        if self.resumed.recv().is_err() {
            return Ok(());
        }
        let why = "something else than the agent ordered the former QEMU to run the VM when that \
                   was about to be ended: neither of its two QEMUs has the VM as it was. Start it \
                   anew";
        Err(NotAlone::Ran(why.to_owned()))
    }
}

fn may_run(pid: u32, why: &str) -> NotAlone {
    NotAlone::MayLive(format!(
        "whether its former QEMU, process {pid}, runs the VM is not known: {why}. If that one \
         never answers, end that process"
    ))
}

impl Registry {
    /// Ends the former QEMU of a VM, of which this one then gets the taps. May be called again,
    /// long after the former one has released the VM: one that does not answer is not ended.
    pub(crate) fn be_alone(&self, name: &str, one: &Machine) -> Result<(), NotAlone> {
        self.end_released(name, one, Silent::MayRun)
    }

    fn end_released(&self, name: &str, one: &Machine, silent: Silent) -> Result<(), NotAlone> {
        let vm = self.vm(name);
        let former = vm.as_ref().and_then(|vm| vm.machine());
        let former = former.filter(|machine| !machine.record().is_of(&one.record()));
        if former.is_none()
            && let Some(pid) = self.unreached(name, &one.record())
        {
            return Err(may_run(pid, "the agent has not reached it since its start"));
        }
        let released = former.as_deref().map(|former| Released::of(former, silent)).transpose()?;
        self.end_former(name, one).map_err(NotAlone::MayLive)?;
        let checked = released.as_ref().map_or(Ok(()), Released::check_ended);
        if let (Err(why), Some(vm)) = (&checked, vm) {
            tracing::error!(vm = name, %why, "the VM is lost");
            vm.ran_early(&why.to_string());
        }
        checked
    }

    /// The process of a former QEMU that is on record and does something, if this is not it.
    fn unreached(&self, name: &str, one: &machine::Record) -> Option<u32> {
        let former = Record::read(&self.state().vm(name)).ok()?.machine?;
        (!former.is_of(one) && !former.has_halted()).then(|| former.pid())
    }
}

impl Seat {
    /// Notes that its QEMU has mapped the former one's RAM.
    pub(crate) fn maps_ram(&mut self) {
        self.has_same_ram = true;
    }

    /// Ends the former QEMU, if both have the same RAM or its QEMU gets taps: these too.
    pub(crate) fn be_alone(&self) -> Result<(), NotAlone> {
        let machine = self.vm.as_ref().and_then(|vm| vm.machine());
        let ended = || NotAlone::MayLive("its QEMU has ended".to_owned());
        let machine = machine.ok_or_else(ended)?;
        if !self.has_same_ram && !machine.passes_taps() {
            return Ok(());
        }
        self.registry.end_released(&self.name, &machine, Silent::Released)
    }
}

/// A VM whose next QEMU maps its RAM.
pub(crate) struct HandedOver {
    registry: Arc<Registry>,
    name: String,
    former: Arc<Machine>,
}

impl HandedOver {
    pub(crate) fn new(registry: &Arc<Registry>, name: &str, former: Arc<Machine>) -> Self {
        Self { registry: Arc::clone(registry), name: name.to_owned(), former }
    }
}

impl HandOver for HandedOver {
    fn keep(&self, ram: &RamBlocks) -> Result<(), String> {
        ram_before::keep(&self.registry.state().vm(&self.name), ram)
    }

    fn take_back(&self) -> Result<RamBack, String> {
        self.registry.take_ram_back(&self.name, &self.former)
    }

    fn changed(&self, why: &str) {
        ram_before::changed(&self.registry.state().vm(&self.name), why);
    }
}

fn has_exited(recorded: &machine::Record, dir: &Path) -> bool {
    let found = machine::reopen(recorded, dir);
    matches!(found, Err(StartError::Process(ProcessError::Exited { .. })))
}
