//! A VM that is on its way into the registry.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use qemu::launch::User;
use qemu::machine::Machine;

use super::{Busy, Registry, Slot, images};
use crate::denied::Denied;
use crate::record::{Record, Standing};
use crate::state;
use crate::vm::Vm;

/// A name that a VM is about to have. Dropped before it is kept, the VM's QEMU
/// is ended and everything that was made for it is removed.
pub(crate) struct Claim {
    pub(super) registry: Arc<Registry>,
    pub(super) name: String,
    pub(crate) dir: PathBuf,
    pub(super) kept: bool,
}

impl Claim {
    /// Makes the VM's directory, with a word that its QEMU is about to start.
    pub(crate) fn note_starting(&self) -> Result<(), Denied> {
        fs::create_dir_all(&self.dir)
            .and_then(|()| state::flush(&self.registry.state().vms()))
            .and_then(|()| Record::starting().write(&self.dir))
            .map_err(|error| self.cannot_note(&error))
    }

    /// A QEMU that was started for this VM: from here on it ends with the
    /// claim.
    pub(crate) fn fill(&self, machine: Machine, share_domain: &str) -> Result<Arc<Vm>, Denied> {
        self.registry.scopes.take(&self.name, machine.process.pid());
        match machine.qmp.ram_bytes() {
            Ok(bytes) => {
                let vm = Vm::new(&self.name, self.dir.clone(), machine, bytes);
                Ok(self.put(vm.within(share_domain)))
            }
            Err(error) => {
                if let Err(error) = machine.quit() {
                    tracing::error!(vm = self.name, %error, "its QEMU can't be ended");
                }
                Err(Denied::Qemu(error.to_string()))
            }
        }
    }

    /// A QEMU that ran before we came: it never ends with the claim.
    pub(crate) fn fill_attached(
        &self,
        machine: Machine,
        share_domain: &str,
    ) -> Result<Arc<Vm>, Denied> {
        let bytes = machine.qmp.ram_bytes().map_err(|error| Denied::Qemu(error.to_string()))?;
        fs::create_dir_all(&self.dir).map_err(|error| self.cannot_note(&error))?;
        let vm = Vm::new(&self.name, self.dir.clone(), machine, bytes);
        Ok(self.put(vm.within(share_domain)))
    }

    /// It is ours from now on, also after a restart, and free for whoever wants
    /// something of it.
    pub(crate) fn keep(mut self) -> Result<(), Denied> {
        let noted = self.adopt();
        if self.kept {
            self.free();
        }
        noted
    }

    /// It is ours from now on, also after a restart. One that arrived is so as well
    /// if that can't be noted down: then the journal of its arrival has to stay until
    /// [`Registry::note_here`] could.
    pub(crate) fn adopt(&mut self) -> Result<(), Denied> {
        let noted = match self.vm() {
            Some(vm) => vm.save_here().map_err(|error| self.cannot_note(&error)),
            None => Err(self.no_qemu()),
        };
        if noted.is_ok() || self.is_arriving() {
            self.kept = true;
            images::forget(&self.dir);
        }
        noted
    }

    /// It runs: that holds also while its QEMU is too busy to say so again.
    pub(crate) fn runs(&self) {
        if let Some(vm) = self.vm() {
            vm.runs();
        }
    }

    /// Whoever wants something of it may have it.
    pub(crate) fn free(self) {
        self.registry.set_free(&self.name);
    }

    /// Notes on disk which images were made for it: they go with it, also after
    /// a crash.
    pub(crate) fn note_images(&self, made: &[PathBuf], user: Option<&User>) -> Result<(), Denied> {
        images::note(&self.dir, made, user).map_err(|error| self.cannot_note(&error))
    }

    /// Notes on disk that it comes.
    pub(crate) fn note(&self, standing: Standing) -> Result<(), Denied> {
        match self.vm() {
            Some(vm) => vm.save(standing).map_err(|error| self.cannot_note(&error)),
            None => Err(self.no_qemu()),
        }
    }

    fn no_qemu(&self) -> Denied {
        Denied::Local(format!("{} has no QEMU", self.name))
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
        let comes = |slot: &Slot| matches!(slot.busy, Busy::Arriving(_) | Busy::Unsettled);
        slots.get(&self.name).is_some_and(comes)
    }

    fn cannot_note(&self, error: &std::io::Error) -> Denied {
        Denied::Local(format!("{}: {error}", self.dir.display()))
    }
}

impl Registry {
    /// Notes on disk that a VM which has arrived is here, if that could not be done
    /// when it arrived.
    pub(crate) fn note_here(&self, name: &str) -> Result<(), String> {
        match self.vm(name).filter(|vm| vm.is_unnoted()) {
            Some(vm) => vm.save_here().map_err(|error| format!("{}: {error}", vm.dir.display())),
            None => Ok(()),
        }
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
        images::remove(&self.dir);
        self.registry.remove(&self.name);
    }
}
