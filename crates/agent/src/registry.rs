//! The VMs of this host, by name.
//!
//! A name belongs to one VM at a time, from before its QEMU starts until after
//! it is gone; and one thing at a time happens to a VM: it starts, arrives,
//! moves away or stops. Both are decided under one lock, which is never held
//! while QEMU is asked.

mod found;
mod stop;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::{AttachRequest, RunRequest, VmStatus, VmSummary};
use parking_lot::{Condvar, Mutex};
use qemu::machine::{self, Machine, Start};

use crate::denied::Denied;
use crate::name;
use crate::state::StateDir;
use crate::vm::{Record, Standing, Vm};

/// What happens to a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Busy {
    Nothing,
    Starting,
    Arriving(String),
    Moving(String),
    Stopping,
}

#[derive(Debug)]
struct Slot {
    /// None until its QEMU answers.
    vm: Option<Arc<Vm>>,
    busy: Busy,
}

/// The VMs of this host.
#[derive(Debug)]
pub(crate) struct Registry {
    state: StateDir,
    slots: Mutex<BTreeMap<String, Slot>>,
    /// Told when a slot goes or is free again.
    settled: Condvar,
}

impl Registry {
    /// Finds the VMs again that an earlier run of the agent left.
    pub(crate) fn open(state: StateDir) -> std::io::Result<Self> {
        let mut slots = BTreeMap::new();
        for vm in found::all(&state)? {
            slots.insert(vm.name.clone(), Slot { vm: Some(Arc::new(vm)), busy: Busy::Nothing });
        }
        Ok(Self { state, slots: Mutex::new(slots), settled: Condvar::new() })
    }

    pub(crate) fn state(&self) -> &StateDir {
        &self.state
    }

    /// Starts a VM.
    pub(crate) fn run(self: &Arc<Self>, request: &RunRequest) -> Result<VmSummary, Denied> {
        let cwd = Path::new(&request.cwd);
        if !cwd.is_absolute() {
            return Err(Denied::Asked(format!("the directory `{}` is not absolute", request.cwd)));
        }
        let claim = self.claim(&request.name, Busy::Starting)?;
        claim.note_starting()?;
        let machine = machine::start(&Start {
            name: &request.name,
            argv: &request.argv,
            cwd,
            dir: &claim.dir,
            incoming: false,
            machine: None,
        })?;
        let vm = claim.fill(machine)?;
        claim.keep()?;
        tracing::info!(vm = request.name, "started");
        Ok(vm.summary(false, None))
    }

    /// Adopts a VM that somebody else started.
    pub(crate) fn attach(self: &Arc<Self>, request: &AttachRequest) -> Result<VmSummary, Denied> {
        let claim = self.claim(&request.name, Busy::Starting)?;
        let machine = machine::attach(Path::new(&request.qmp), &claim.dir)?;
        if let Some(name) = self.who_has(machine.process.pid()) {
            return Err(Denied::Conflict(format!("that VM is here already, as {name}")));
        }
        let vm = claim.fill_attached(machine)?;
        claim.keep()?;
        tracing::info!(vm = request.name, "adopted");
        Ok(vm.summary(false, None))
    }

    fn who_has(&self, pid: u32) -> Option<String> {
        let slots = self.slots.lock();
        let mut vms = slots.values().filter_map(|slot| slot.vm.as_ref());
        let held = vms.find(|vm| vm.machine().is_some_and(|m| m.process.pid() == pid))?;
        Some(held.name.clone())
    }

    /// All VMs, by name.
    pub(crate) fn list(&self) -> Vec<VmSummary> {
        let known: Vec<(Arc<Vm>, Busy)> = self
            .slots
            .lock()
            .values()
            .filter_map(|slot| Some((Arc::clone(slot.vm.as_ref()?), slot.busy.clone())))
            .collect();
        known.into_iter().map(|(vm, busy)| summary(&vm, busy)).collect()
    }

    /// One VM.
    pub(crate) fn show(&self, name: &str) -> Result<VmSummary, Denied> {
        let (vm, busy) = {
            let slots = self.slots.lock();
            let slot = slots.get(name).ok_or_else(|| unknown(name))?;
            let vm = slot.vm.clone().ok_or_else(|| in_the_way(name, &slot.busy))?;
            (vm, slot.busy.clone())
        };
        Ok(summary(&vm, busy))
    }

    /// Whether a VM of that name could come.
    pub(crate) fn is_free(&self, name: &str) -> bool {
        !self.slots.lock().contains_key(name)
    }

    /// A VM for migration `id` to move; nothing else happens to it until
    /// [`Registry::moved`] or [`Registry::stays`].
    pub(crate) fn begin_move(&self, name: &str, id: &str) -> Result<Arc<Vm>, Denied> {
        // Asked first, outside the lock: a VM that is dead can't be moved.
        if self.show(name)?.status == VmStatus::Dead {
            return Err(Denied::Conflict(format!(
                "{name} is dead: `droveway show {name}` says why, `droveway stop {name}` removes it"
            )));
        }
        self.set_busy(name, Busy::Moving(id.to_owned()))
    }

    /// It runs elsewhere: its QEMU here has ended.
    pub(crate) fn moved(&self, name: &str) {
        self.remove(name);
    }

    /// It goes on here.
    pub(crate) fn stays(&self, name: &str) {
        self.set_free(name);
    }

    /// A name for a VM that arrives with migration `id`.
    pub(crate) fn expect(self: &Arc<Self>, name: &str, id: &str) -> Result<Claim, Denied> {
        self.claim(name, Busy::Arriving(id.to_owned()))
    }

    /// Waits until no VM is arriving any more; false after `timeout`.
    pub(crate) fn wait_none_arriving(&self, timeout: Duration) -> bool {
        let mut slots = self.slots.lock();
        let any = |slots: &mut BTreeMap<String, Slot>| {
            slots.values().any(|slot| matches!(slot.busy, Busy::Arriving(_)))
        };
        !self.settled.wait_while_for(&mut slots, any, timeout).timed_out()
    }

    fn claim(self: &Arc<Self>, name: &str, busy: Busy) -> Result<Claim, Denied> {
        name::check(name)?;
        if name.len() > self.state.name_letters_max() {
            return Err(Denied::Asked(format!(
                "the name `{name}` is too long for this agent's state directory: use {} letters \
                 at most (paths of sockets are short), or give the agent a shorter --state",
                self.state.name_letters_max()
            )));
        }
        let mut slots = self.slots.lock();
        if let Some(slot) = slots.get(name) {
            return Err(in_the_way(name, &slot.busy));
        }
        slots.insert(name.to_owned(), Slot { vm: None, busy });
        let dir = self.state.vm(name);
        Ok(Claim { registry: Arc::clone(self), name: name.to_owned(), dir, kept: false })
    }

    fn set_busy(&self, name: &str, busy: Busy) -> Result<Arc<Vm>, Denied> {
        let mut slots = self.slots.lock();
        let slot = slots.get_mut(name).ok_or_else(|| unknown(name))?;
        match (&slot.vm, &slot.busy) {
            (Some(vm), Busy::Nothing) => {
                slot.busy = busy;
                Ok(Arc::clone(vm))
            }
            _ => Err(in_the_way(name, &slot.busy)),
        }
    }

    fn set_free(&self, name: &str) {
        if let Some(slot) = self.slots.lock().get_mut(name) {
            slot.busy = Busy::Nothing;
        }
        self.settled.notify_all();
    }

    /// Forgets a VM whose QEMU is gone.
    fn remove(&self, name: &str) {
        remove_dir(&self.state.vm(name));
        self.slots.lock().remove(name);
        self.settled.notify_all();
    }
}

/// A name that a VM is about to have. Dropped before it is kept, the VM's QEMU
/// is ended and everything that was made for it is removed.
pub(crate) struct Claim {
    registry: Arc<Registry>,
    name: String,
    pub(crate) dir: PathBuf,
    kept: bool,
}

impl Claim {
    /// Makes the VM's directory, with a word that its QEMU is about to start.
    pub(crate) fn note_starting(&self) -> Result<(), Denied> {
        fs::create_dir_all(&self.dir)
            .and_then(|()| Record::starting().write(&self.dir))
            .map_err(|error| self.cannot_note(&error))
    }

    /// A QEMU that was started for this VM: from here on it ends with the
    /// claim.
    pub(crate) fn fill(&self, machine: Machine) -> Result<Arc<Vm>, Denied> {
        match machine.qmp.ram_bytes() {
            Ok(bytes) => Ok(self.put(Vm::new(&self.name, self.dir.clone(), machine, bytes))),
            Err(error) => {
                if let Err(error) = machine.quit() {
                    tracing::error!(vm = self.name, %error, "its QEMU can't be ended");
                }
                Err(Denied::Qemu(error.to_string()))
            }
        }
    }

    /// A QEMU that ran before we came: it never ends with the claim.
    pub(crate) fn fill_attached(&self, machine: Machine) -> Result<Arc<Vm>, Denied> {
        let bytes = machine.qmp.ram_bytes().map_err(|error| Denied::Qemu(error.to_string()))?;
        fs::create_dir_all(&self.dir).map_err(|error| self.cannot_note(&error))?;
        Ok(self.put(Vm::new(&self.name, self.dir.clone(), machine, bytes)))
    }

    /// It is ours from now on, also after a restart.
    pub(crate) fn keep(mut self) -> Result<(), Denied> {
        let noted = self.note(Standing::Here);
        // A VM that arrived runs, whether that can be noted down or not.
        if noted.is_ok() || self.is_arriving() {
            self.kept = true;
            self.registry.set_free(&self.name);
        }
        noted
    }

    /// Notes on disk that it comes.
    pub(crate) fn note(&self, standing: Standing) -> Result<(), Denied> {
        match self.vm() {
            Some(vm) => vm.save(standing).map_err(|error| self.cannot_note(&error)),
            None => Err(Denied::Local(format!("{} has no QEMU", self.name))),
        }
    }

    fn put(&self, vm: Vm) -> Arc<Vm> {
        let vm = Arc::new(vm);
        if let Some(slot) = self.registry.slots.lock().get_mut(&self.name) {
            slot.vm = Some(Arc::clone(&vm));
        }
        vm
    }

    fn vm(&self) -> Option<Arc<Vm>> {
        self.registry.slots.lock().get(&self.name)?.vm.clone()
    }

    fn is_arriving(&self) -> bool {
        let slots = self.registry.slots.lock();
        slots.get(&self.name).is_some_and(|slot| matches!(slot.busy, Busy::Arriving(_)))
    }

    fn cannot_note(&self, error: &std::io::Error) -> Denied {
        Denied::Local(format!("{}: {error}", self.dir.display()))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        if let Some(machine) = self.vm().and_then(|vm| vm.machine()) {
            // One that somebody else started to receive this VM goes too: it
            // may hold the loaded VM, and must never be let run. One that ran
            // before we came is left alone.
            let ours = !machine.is_attached() || self.is_arriving();
            if ours && let Err(error) = machine.quit() {
                tracing::error!(vm = self.name, %error, "its QEMU can't be ended");
            }
        }
        self.registry.remove(&self.name);
    }
}

fn summary(vm: &Vm, busy: Busy) -> VmSummary {
    match busy {
        Busy::Arriving(id) => vm.summary(true, Some(id)),
        Busy::Moving(id) => vm.summary(false, Some(id)),
        Busy::Nothing | Busy::Starting | Busy::Stopping => vm.summary(false, None),
    }
}

fn unknown(name: &str) -> Denied {
    Denied::Unknown(format!("there is no VM `{name}` here: `droveway list` shows those there are"))
}

/// Why a name or a VM can't be had right now.
fn in_the_way(name: &str, busy: &Busy) -> Denied {
    Denied::Conflict(match busy {
        Busy::Nothing => format!("there is a VM `{name}` here already"),
        Busy::Starting => format!("{name} is starting"),
        Busy::Arriving(id) => format!("{name} is arriving here with migration {id}"),
        Busy::Moving(id) => {
            format!("{name} is being moved by migration {id}: `droveway cancel {id}` ends that")
        }
        Busy::Stopping => format!("{name} is being stopped"),
    })
}

fn remove_dir(dir: &Path) {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!(dir = %dir.display(), %error, "a VM's directory stays behind");
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests;
