//! The seat of a VM's next QEMU on this host, next to that of its former one.
//!
//! The former one has the VM's name until the next one has the VM. The record of the next one is a
//! file of its own until then: one that replaces the VM's record shows that the next one has it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use host::quota;
use parking_lot::Mutex;
use qemu::machine::{self, FormerTaps, Machine};
use qemu::outgoing::forget_settings;
use qemu::process::Process;
use qemu::room::host_memory;
use qemu::socket;

use super::slot::{Busy, Next, Slot};
use super::{Registry, found, taps, unknown};
use crate::denied::Denied;
use crate::vms::ram_before;
use crate::vms::record::{self, Record, Standing};
use crate::vms::vm::Vm;

/// How long to wait for the monitor of a QEMU that an earlier upgrade may have left.
const SEEN_MAX: Duration = Duration::from_secs(1);
/// How long a killed QEMU may take to end.
const GONE_MAX: Duration = Duration::from_secs(3);

/// The seat of a QEMU that is to have a VM.
///
/// If it is dropped before that QEMU has the VM, that QEMU is ended, and its seat is emptied.
pub(crate) struct Seat {
    pub(super) registry: Arc<Registry>,
    pub(super) name: String,
    /// The VM's directory, which has the records.
    dir: PathBuf,
    /// For what that QEMU makes.
    pub(crate) home: PathBuf,
    share_domain: String,
    /// The VM as it will be; none until that QEMU answers.
    pub(super) vm: Option<Arc<Vm>>,
    /// That QEMU, before it answers.
    launched: Mutex<Option<Process>>,
    kept: bool,
    /// Whether its QEMU has mapped the former one's RAM.
    pub(super) has_same_ram: bool,
}

impl Seat {
    /// Reserves ordinary memory for that QEMU, if it `fits` next to what arriving VMs have yet to
    /// take.
    pub(crate) fn promise(
        &self,
        bytes: u64,
        fits: impl FnOnce(u64) -> Result<(), Denied>,
    ) -> Result<(), Denied> {
        let mut slots = self.registry.slots.lock();
        fits(slots.values().map(Slot::yet_to_take).fold(0, u64::saturating_add))?;
        if let Some(next) = slots.get_mut(&self.name).and_then(|slot| slot.next.as_mut()) {
            next.promised = Some(bytes);
        }
        Ok(())
    }

    /// Makes the seat, with a record that its QEMU is about to start.
    pub(crate) fn note_starting(&self) -> Result<(), Denied> {
        let noted = fs::create_dir_all(&self.home)
            .and_then(|()| forget_settings(&self.home))
            .and_then(|()| ram_before::forget(&self.dir))
            .and_then(|()| taps::forget(&self.dir).map_err(io::Error::other))
            .and_then(|()| Record::starting().write_next(&self.dir));
        noted.map_err(|error| self.cannot_note(&error))
    }

    /// Keeps the taps of the former QEMU for its QEMU.
    pub(crate) fn keep_taps(&self, taps: FormerTaps) {
        self.registry.hold_taps(&self.name, taps);
    }

    /// Has a QEMU that was launched for it moved to the VM's scope, before it takes much.
    pub(crate) fn launched(&self, pid: u32) {
        *self.launched.lock() = Process::now(pid).ok();
        self.registry.scopes.join_early(&self.name, pid);
    }

    /// Adds the QEMU that was started for it; it now ends with the seat.
    pub(crate) fn fill(&mut self, machine: Machine) -> Result<Arc<Vm>, Denied> {
        // If that has not been done.
        self.registry.scopes.join(&self.name, machine.process.pid());
        let bytes = machine.qmp.ram_bytes();
        let ram_bytes = bytes.as_ref().copied().unwrap_or(0);
        let vm = Vm::new(&self.name, self.dir.clone(), machine, ram_bytes);
        let vm = self.put(vm.within(&self.share_domain));
        bytes.map(|_| vm).map_err(|error| Denied::Qemu(error.to_string()))
    }

    /// Writes its record.
    pub(crate) fn note(&self) -> Result<(), Denied> {
        let vm = self.vm.as_ref().ok_or_else(|| self.no_qemu())?;
        vm.save_next().map_err(|error| self.cannot_note(&error))
    }

    /// Makes it the VM's QEMU from now on, also after a restart; may be called again.
    ///
    /// It has the VM even if that can't be noted: the journal then has to stay until
    /// [`Registry::note_here`] succeeds.
    pub(crate) fn adopt(&mut self) -> Result<(), Denied> {
        let vm = self.vm.clone().ok_or_else(|| self.no_qemu())?;
        self.kept = true;
        let taken = self.registry.take_taps(&self.name, &vm);
        if let Some(slot) = self.registry.slots.lock().get_mut(&self.name) {
            slot.vm = Some(Arc::clone(&vm));
            if taken.is_ok() {
                slot.next = None;
            }
        }
        if let Err(why) = taken {
            vm.lacks_taps(&why);
            return Err(Denied::Local(why));
        }
        vm.save_here().map_err(|error| self.cannot_note(&error))?;
        record::remove_next(&self.dir);
        if let Err(error) = ram_before::forget(&self.dir) {
            tracing::warn!(vm = self.name, %error, "cannot remove what was kept of its RAM");
        }
        Ok(())
    }

    /// Notes that it runs the VM.
    pub(crate) fn runs(&self) {
        self.vm.iter().for_each(|vm| vm.runs());
    }

    fn put(&mut self, vm: Vm) -> Arc<Vm> {
        let vm = Arc::new(vm);
        self.vm = Some(Arc::clone(&vm));
        let mut slots = self.registry.slots.lock();
        if let Some(next) = slots.get_mut(&self.name).and_then(|slot| slot.next.as_mut()) {
            next.vm = Some(Arc::clone(&vm));
        }
        vm
    }

    fn no_qemu(&self) -> Denied {
        Denied::Local(format!("{} has no next QEMU", self.name))
    }

    fn cannot_note(&self, error: &io::Error) -> Denied {
        Denied::Local(format!("{}: {error}", self.dir.display()))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        let ended = match self.vm.as_ref().and_then(|vm| vm.machine()) {
            Some(machine) => machine.quit(),
            // One that did not answer was killed.
            None => match &*self.launched.lock() {
                Some(process) => process.wait_exited(GONE_MAX),
                None => Ok(()),
            },
        };
        if let Err(error) = ended {
            // Its record stays, so that it is found again, and no other one takes the seat.
            tracing::error!(vm = self.name, %error, "its next QEMU can't be ended");
            return;
        }
        record::remove_next(&self.dir);
        record::clear_seat(&self.dir, &self.home);
        if let Some(slot) = self.registry.slots.lock().get_mut(&self.name) {
            slot.next = None;
        }
    }
}

impl Registry {
    /// A seat for the next QEMU of a VM.
    pub(crate) fn seat(self: &Arc<Self>, vm: &Vm, former: &Machine) -> Result<Seat, Denied> {
        let name = vm.name.clone();
        let dir = self.state.vm(&name);
        let home = record::other_seat(&dir, &former.dir);
        let more = home.as_os_str().len() - dir.as_os_str().len();
        if name.len() + more > self.state.name_letters_max() {
            return Err(Denied::Conflict(format!(
                "the name {name} is too long for a second QEMU in this agent's state directory, \
                 as paths of sockets are short: give the agent a shorter --state"
            )));
        }
        let in_use = || {
            Denied::Conflict(format!(
                "an earlier upgrade of {name} may have left a QEMU that never had the VM: end the \
                 process that has {} open, and restart the agent",
                home.join("qmp").display()
            ))
        };
        let may_listen = match socket::connect(home.join("qmp"), SEEN_MAX) {
            Ok(_) => true,
            Err(error) => !found::nobody_listens(&error),
        };
        if may_listen || record::may_have_next(&dir) {
            return Err(in_use());
        }
        let mut slots = self.slots.lock();
        let slot = slots.get_mut(&name).ok_or_else(|| unknown(&name))?;
        if slot.next.is_some() {
            return Err(in_use());
        }
        slot.next = Some(Next::default());
        drop(slots);
        Ok(self.new_seat(name, (dir, home), &vm.share_domain))
    }

    fn new_seat(
        self: &Arc<Self>,
        name: String,
        (dir, home): (PathBuf, PathBuf),
        share_domain: &str,
    ) -> Seat {
        Seat {
            registry: Arc::clone(self),
            name,
            dir,
            home,
            share_domain: share_domain.to_owned(),
            vm: None,
            launched: Mutex::default(),
            kept: false,
            has_same_ram: false,
        }
    }

    /// The seat of a next QEMU that an earlier run of the agent left; none if the VM has that QEMU
    /// already, or waits for no switchover: then another one may have the seat. `machine` is none
    /// if that QEMU has ended.
    pub(crate) fn seat_found(
        self: &Arc<Self>,
        name: &str,
        machine: Option<Arc<Machine>>,
        recorded: &machine::Record,
    ) -> Option<Seat> {
        let dir = self.state.vm(name);
        let former = self.vm(name)?;
        let is_its = |record: &Record| {
            record.machine.as_ref().is_some_and(|machine| machine.is_of(recorded))
        };
        let next = Record::read_next(&dir).ok().filter(is_its);
        // Without the VM's own record, it has that QEMU once there is no record of a next one.
        let may_have_it = match &next {
            Some(_) if !former.knows_its_qemu() => false,
            _ => former.may_be_of(recorded),
        };
        if may_have_it || !self.is_unsettled(name) {
            return None;
        }
        let known = next.as_ref().map_or(&former.share_domain, |next| &next.share_domain);
        let domain = &known.clone();
        let vm = match machine {
            Some(machine) => {
                self.scopes.join(name, machine.process.pid());
                let bytes = machine.qmp.ram_bytes().unwrap_or_else(|_| former.ram_bytes());
                Vm::new(name, dir.clone(), machine, bytes).within(domain)
            }
            None => {
                let next = next.unwrap_or_else(|| {
                    let (machine, bytes) = (Some(recorded.clone()), former.ram_bytes());
                    Record::new(Standing::Arriving, machine, bytes, "", domain)
                });
                Vm::lost(name, dir.clone(), next, "its QEMU has exited".to_owned())
            }
        };
        let home = recorded.dir().map_or_else(|| dir.clone(), Path::to_owned);
        if let Some(slot) = self.slots.lock().get_mut(name) {
            slot.next = Some(Next::default());
        }
        let mut seat = self.new_seat(name.to_owned(), (dir, home), domain);
        seat.put(vm);
        Some(seat)
    }

    /// The QEMU on this host that is to have a VM, if there is one that has answered.
    pub(crate) fn next(&self, name: &str) -> Option<Arc<Vm>> {
        self.slots.lock().get(name)?.next.as_ref()?.vm.clone()
    }

    /// Gives a VM back to its former QEMU, if its next one had it already.
    pub(crate) fn keeps(&self, name: &str, former: &Arc<Machine>) {
        let mut slots = self.slots.lock();
        let Some(slot) = slots.get_mut(name) else { return };
        let Some(now) = &slot.vm else { return };
        if now.machine().is_some_and(|machine| machine.record().is_of(&former.record())) {
            return;
        }
        let vm = Vm::new(name, now.dir.clone(), Arc::clone(former), now.ram_bytes());
        let vm = Arc::new(vm.within(&now.share_domain));
        slot.vm = Some(Arc::clone(&vm));
        drop(slots);
        if let Err(error) = vm.save_here() {
            tracing::error!(vm = name, %error, "its former QEMU has it; that can't be noted");
        }
    }

    /// The memory that cgroups leave to the next QEMU of a VM, next to its former one; none if they
    /// don't limit it, or that isn't known.
    pub(crate) fn room_for_next(&self, name: &str, former: &Machine) -> Option<u64> {
        let pid = former.process.pid();
        let joins = self.scopes.next_joins(name, pid);
        joins.then(|| quota::memory_room(pid, host_memory().swap_free_bytes))?
    }

    /// Empties the seat of a VM's former QEMU, which has ended.
    pub(crate) fn empty_seat(&self, name: &str, former: &machine::Record) {
        let dir = self.state.vm(name);
        let home = former.dir().unwrap_or(&dir);
        // Whose seat it is now is not known without a record.
        let Ok(now) = Record::read(&dir) else { return };
        if now.machine.is_some() && now.home(&dir) != home {
            record::clear_seat(&dir, home);
        }
    }

    /// Whether the caller has to [free](Registry::free_upgraded) a VM whose migration `id` within
    /// this host has ended, on either of its QEMUs. That may have been done, and another operation
    /// have started.
    #[must_use]
    pub(crate) fn upgraded(&self, name: &str, id: &str) -> bool {
        self.is_first(name, |busy| match busy {
            Busy::Moving(its) => its == id,
            busy => *busy == Busy::Unsettled,
        })
    }

    /// The same of a VM whose switchover within this host is settled.
    #[must_use]
    pub(crate) fn settled_here(&self, name: &str) -> bool {
        self.is_first(name, |busy| *busy == Busy::Unsettled)
    }

    /// One caller frees it: after that another operation may have it.
    fn is_first(&self, name: &str, is_it: impl FnOnce(&Busy) -> bool) -> bool {
        let mut slots = self.slots.lock();
        let Some(slot) = slots.get_mut(name).filter(|slot| is_it(&slot.busy)) else { return false };
        !std::mem::replace(&mut slot.takes_over, true)
    }

    /// Gives the QEMU that has the VM, if there is no other one, what only one can have, and frees
    /// the VM. That queries QEMU, so no lock may be held.
    pub(crate) fn free_upgraded(&self, name: &str) {
        let alone = {
            let slots = self.slots.lock();
            let slot = slots.get(name).filter(|slot| slot.next.is_none());
            slot.and_then(|slot| slot.vm.clone())
        };
        if let Some(machine) = alone.and_then(|vm| vm.machine()) {
            machine.take_over();
            machine.is_one_of_two(false);
        }
        if let Some(slot) = self.slots.lock().get_mut(name) {
            slot.takes_over = false;
        }
        self.set_free(name);
    }
}
