//! Claims of names, for VMs that are being started or adopted, or are arriving.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use qemu::launch::User;
use qemu::machine::Machine;

use super::slot::{self, Busy, Slot};
use super::{Registry, images};
use crate::denied::Denied;
use crate::state;
use crate::vms::record::{self, Record, Standing};
use crate::vms::vm::Vm;

/// The claim of a name for a VM.
///
/// If it is dropped before it is kept, the VM's QEMU is ended and everything that was made for it
/// is removed.
pub(crate) struct Claim {
    pub(super) registry: Arc<Registry>,
    pub(super) name: String,
    pub(crate) dir: PathBuf,
    pub(super) kept: bool,
}

impl Claim {
    /// Creates the VM's directory, with a record that its QEMU is about to start.
    pub(crate) fn note_starting(&self) -> Result<(), Denied> {
        fs::create_dir_all(&self.dir)
            .and_then(|()| state::flush(&self.registry.state().vms()))
            .and_then(|()| Record::starting().write(&self.dir))
            .map_err(|error| self.cannot_note(&error))
    }

    /// Reserves ordinary memory for this VM, which arrives, if it `fits` next to what other
    /// arriving VMs have yet to take.
    ///
    /// One lock is held for both steps, so that two VMs can't be promised the same memory.
    pub(crate) fn promise(
        &self,
        bytes: u64,
        fits: impl FnOnce(u64) -> Result<(), Denied>,
    ) -> Result<(), Denied> {
        let mut slots = self.registry.slots.lock();
        fits(slot::to_others(&slots, &self.name))?;
        if let Some(slot) = slots.get_mut(&self.name) {
            slot.promised = Some(bytes);
        }
        Ok(())
    }

    /// Has a QEMU that was launched for this VM moved to its own scope, before it takes much.
    pub(crate) fn launched(&self, pid: u32) {
        self.registry.scopes.take_early(&self.name, pid);
    }

    /// Adds the QEMU that was started for this VM; it now ends with the claim.
    pub(crate) fn fill(&self, machine: Machine, share_domain: &str) -> Result<Arc<Vm>, Denied> {
        // If that has not been done.
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

    /// Adds a QEMU that ran before the claim; it does not end with the claim.
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

    /// Makes it a VM of this host from now on, also after a restart, and frees it for other
    /// operations.
    pub(crate) fn keep(mut self) -> Result<(), Denied> {
        let noted = self.adopt();
        if self.kept {
            self.free();
        }
        noted
    }

    /// Makes it a VM of this host from now on, also after a restart.
    ///
    /// A VM that arrived is kept even if its record can't be written: the journal of its arrival
    /// then has to stay until [`Registry::note_here`] succeeds.
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

    /// Notes that it runs, which holds while its QEMU is too busy to answer again.
    pub(crate) fn runs(&self) {
        if let Some(vm) = self.vm() {
            vm.runs();
        }
    }

    /// Frees it for other operations.
    pub(crate) fn free(self) {
        self.registry.set_free(&self.name);
    }

    /// Notes on disk which images were made for it; they are removed with it, also after a crash.
    pub(crate) fn note_images(&self, made: &[PathBuf], user: Option<&User>) -> Result<(), Denied> {
        images::note(&self.dir, made, user).map_err(|error| self.cannot_note(&error))
    }

    /// Writes its record.
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
        let comes = |slot: &Slot| matches!(slot.busy, Busy::Arriving { .. } | Busy::Unsettled);
        slots.get(&self.name).is_some_and(comes)
    }

    fn cannot_note(&self, error: &std::io::Error) -> Denied {
        Denied::Local(format!("{}: {error}", self.dir.display()))
    }
}

impl Registry {
    /// Writes the record of a VM that has arrived, if that failed when it arrived.
    pub(crate) fn note_here(&self, name: &str) -> Result<(), String> {
        let Some(vm) = self.vm(name).filter(|vm| vm.is_unnoted()) else { return Ok(()) };
        self.take_missing_taps(name, &vm)?;
        vm.save_here().map_err(|error| format!("{}: {error}", vm.dir.display()))?;
        if self.next(name).is_none() {
            // Its own record was that of a next QEMU.
            record::remove_next(&vm.dir);
        }
        Ok(())
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        if let Some(machine) = self.vm().and_then(|vm| vm.machine()) {
            // A QEMU that the operator started to receive this VM is ended too: it may hold the
            // loaded VM, which must never run. A QEMU that ran before the claim is left alone.
            let ours = !machine.is_attached() || self.is_arriving();
            if ours && let Err(error) = machine.quit() {
                tracing::error!(vm = self.name, %error, "its QEMU can't be ended");
            }
        }
        images::remove(&self.dir);
        self.registry.remove(&self.name);
    }
}
