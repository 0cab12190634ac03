//! VMs whose records can't be read.
//!
//! The operator names the QEMU that is theirs, or that there is none. In either case, nothing here
//! ends a QEMU.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::{ErrorCode, VmSummary};
use qemu::machine::{self, Machine, StartError};
use qemu::process::ProcessError;
use qemu::qmp::{QmpError, RunState};
use qemu::socket;

use super::slot::Busy;
use super::{Registry, found, images, in_the_way, unknown, unreached};
use crate::denied::Denied;
use crate::vms::record::{self, Record};
use crate::vms::vm::{Presence, Vm};

impl Registry {
    /// Whether the operator has to decide what this VM is.
    pub(crate) fn is_unreadable(&self, name: &str) -> bool {
        self.vm(name).is_some_and(|vm| vm.unreadable_why().is_some())
    }

    /// Adopts the QEMU at `socket` as the VM's own, with a new record.
    pub(super) fn attach_again(
        &self,
        name: &str,
        socket: &Path,
        share_domain: &str,
    ) -> Result<VmSummary, Denied> {
        self.adopt_again(name, share_domain, |vm| {
            let own = own_sockets(vm);
            let is_it =
                |(_, own): &&(_, PathBuf)| own.canonicalize().ok() == socket.canonicalize().ok();
            match (own.iter().find(is_it), own.first()) {
                (Some((home, _)), _) => machine::attach(socket, home).map_err(unreached),
                (None, None) => machine::attach(socket, &vm.dir).map_err(unreached),
                (None, Some((_, own))) => Err(Denied::Conflict(format!(
                    "the QEMU of {name} listens at {}: attach that one. If that QEMU never comes \
                     back, `droveway resolve {name} --there` removes the record and frees the name",
                    own.display()
                ))),
            }
        })
    }

    /// Adopts the VM's own QEMU, with a new record, and resumes the VM.
    pub(crate) fn take_again(&self, name: &str) -> Result<VmSummary, Denied> {
        let domain = self.vm(name).map(|vm| vm.share_domain.clone()).unwrap_or_default();
        self.adopt_again(name, &domain, |vm| {
            let machine = own_machine(vm)?;
            match machine.qmp.run_state() {
                Ok(RunState::InMigrate) => Err(Denied::Conflict(format!(
                    "the QEMU of {name} waits for a VM and has none: it can't run here. `droveway \
                     attach` adopts it as it is, and then `droveway stop {name} --force` ends it"
                ))),
                Ok(_) => Ok(machine),
                Err(error) => Err(Denied::Qemu(error.to_string())),
            }
        })?;
        let machine = self.vm(name).and_then(|vm| vm.machine());
        machine.map_or(Ok(()), |machine| machine.qmp.cont()).map_err(|error| {
            Denied::Qemu(format!("{name} is adopted, and QEMU doesn't let it run: {error}"))
        })?;
        self.show(name)
    }

    /// Forgets a VM that has no QEMU here, by the operator's word and by all that can be checked.
    ///
    /// Images stay.
    pub(crate) fn forget_unreadable(&self, name: &str) -> Result<(), Denied> {
        let vm = self.begin_again(name)?;
        match none_runs(&vm) {
            Ok(()) => {
                tracing::info!(
                    vm = name,
                    "record removed: the operator confirmed that the VM doesn't run here"
                );
                self.remove(name);
                Ok(())
            }
            Err(denied) => {
                self.set_free(name);
                Err(denied)
            }
        }
    }

    fn adopt_again(
        &self,
        name: &str,
        share_domain: &str,
        meet: impl FnOnce(&Vm) -> Result<Machine, Denied>,
    ) -> Result<VmSummary, Denied> {
        let old = self.begin_again(name)?;
        old.let_go();
        let adopted = meet(&old).and_then(|machine| self.renew(&old, machine, share_domain));
        if let (Ok(vm), Some(slot)) = (&adopted, self.slots.lock().get_mut(name)) {
            slot.vm = Some(Arc::clone(vm));
        }
        self.set_free(name);
        let vm = adopted?;
        tracing::info!(vm = name, "adopted again");
        Ok(vm.summary(Presence::Here, None))
    }

    /// Reserves the VM; no other operation is permitted on it until it is free or removed.
    fn begin_again(&self, name: &str) -> Result<Arc<Vm>, Denied> {
        let mut slots = self.slots.lock();
        let slot = slots.get_mut(name).ok_or_else(|| unknown(name))?;
        match &slot.vm {
            Some(vm) if slot.busy == Busy::Nothing && vm.unreadable_why().is_some() => {
                slot.busy = Busy::Starting;
                Ok(Arc::clone(vm))
            }
            _ => Err(in_the_way(name, &slot.busy)),
        }
    }

    fn renew(&self, old: &Vm, machine: Machine, share_domain: &str) -> Result<Arc<Vm>, Denied> {
        if let Some(other) = self.who_has(machine.process.pid()).filter(|other| *other != old.name)
        {
            let text = format!("that VM is already here, as {other}");
            return Err(Denied::Coded(ErrorCode::VmExists, text));
        }
        let bytes = machine.qmp.ram_bytes().map_err(|error| Denied::Qemu(error.to_string()))?;
        let adopted = machine.record();
        let vm = Vm::new(&old.name, old.dir.clone(), machine, bytes).within(share_domain);
        // It may be the one that an upgrade left.
        let was_left = Record::read_next(&vm.dir)
            .is_ok_and(|next| next.machine.is_some_and(|left| left.is_of(&adopted)));
        vm.note_left_over(old.left_over().filter(|_| !was_left));
        record::set_aside(&vm.dir)
            .and_then(|()| vm.save_here())
            .map_err(|error| Denied::Local(format!("{}: {error}", vm.dir.display())))?;
        if was_left {
            record::remove_next(&vm.dir);
        }
        images::forget(&vm.dir);
        if let Some(machine) = vm.machine() {
            vm.make_up(&machine);
        }
        Ok(Arc::new(vm))
    }
}

/// The VM's QEMU by its record, if that can be read, or else by the socket in its directory.
fn own_machine(vm: &Vm) -> Result<Machine, Denied> {
    let recorded = Record::read(&vm.dir).ok().and_then(|record| record.machine);
    match recorded {
        Some(recorded) => Ok(machine::reopen(&recorded, &vm.dir)?),
        None => {
            let own = own_sockets(vm).into_iter().next();
            let (home, own) = own.unwrap_or_else(|| (vm.dir.clone(), vm.dir.join("qmp")));
            machine::attach(&own, &home).map_err(|error| match error {
                StartError::Qmp(QmpError::Connect { .. }) => Denied::Conflict(format!(
                    "{error}: if {0} runs, `droveway attach {0} --qmp SOCKET` names its QEMU",
                    vm.name
                )),
                error => error.into(),
            })
        }
    }
}

/// The seats in a VM's directory where a QEMU of it may listen, and the sockets there.
fn own_sockets(vm: &Vm) -> Vec<(PathBuf, PathBuf)> {
    let seats = record::seats(&vm.dir).into_iter().map(|seat| (seat.clone(), seat.join("qmp")));
    // If that can't be determined, it may exist.
    seats.filter(|(_, socket)| socket.try_exists().unwrap_or(true)).collect()
}

/// How long to wait for a QEMU's monitor, which may be busy with another client.
const SEEN_MAX: Duration = Duration::from_secs(1);

/// Checks, as far as possible, that the VM has no QEMU here.
fn none_runs(vm: &Vm) -> Result<(), Denied> {
    let name = &vm.name;
    let runs = || {
        Denied::Conflict(format!(
            "a QEMU of {name} runs here, and removing the record never ends it: `droveway attach` \
             adopts it, and then `droveway stop {name}` ends it"
        ))
    };
    if vm.machine().is_some_and(|machine| machine.process.is_alive()) {
        return Err(runs());
    }
    for (_, own) in own_sockets(vm) {
        match socket::connect(own, SEEN_MAX) {
            Ok(_) => return Err(runs()),
            Err(error) if found::nobody_listens(&error) => {}
            Err(error) => {
                let why = format!("cannot detect whether a QEMU of {name} runs here: {error}");
                return Err(Denied::Local(why));
            }
        }
    }
    let Some(recorded) = Record::read(&vm.dir).ok().and_then(|record| record.machine) else {
        return Ok(());
    };
    match machine::reopen(&recorded, &vm.dir) {
        Err(StartError::Process(ProcessError::Exited { .. })) => Ok(()),
        Ok(_) => Err(runs()),
        Err(error) => Err(Denied::Conflict(format!(
            "a QEMU of {name} may run here: {error}. Removing the record never ends a QEMU: end \
             that one first"
        ))),
    }
}
