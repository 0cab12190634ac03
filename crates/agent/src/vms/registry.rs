//! The VMs of this host, by name.
//!
//! A name belongs to one VM at a time, from before its QEMU starts until after it has ended.
//! One operation at a time happens to a VM: it starts, arrives, moves away, stops, or waits
//! for the end of its switchover. One lock decides both; it is never held during a query to
//! QEMU.

mod again;
mod alone;
mod arriving;
mod claim;
mod found;
mod images;
mod living;
mod seat;
mod slot;
mod stop;
mod taps;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use api::{AttachRequest, ErrorCode, GuestHelper, RunRequest, VmStatus, VmSummary};
use parking_lot::{Condvar, Mutex};
use qemu::command_line::CommandLine;
use qemu::launch::User;
use qemu::machine::{self, By, GuestPort, Start, StartError};
use qemu::probe::Probes;
use qemu::qmp::QmpError;
use qemu::room::huge_page_bytes;

use crate::denied::Denied;
use crate::parallel::at_once;
use crate::state::StateDir;
use crate::vms::holdings::Holdings;
use crate::vms::record;
use crate::vms::scopes::Scopes;
use crate::vms::vm::{Presence, Vm};
pub(crate) use alone::HandedOver;
pub(crate) use claim::Claim;
pub(crate) use found::Held;
pub(crate) use living::Living;
pub(crate) use seat::Seat;
use slot::{Busy, Slot};

/// The most VMs here, with those in doubt and those that arrive, for one more to arrive. Each has a
/// QEMU, a connection to it and a directory, and other hosts decide how many there are.
const VMS_MAX: usize = 1024;

/// The VMs of this host.
#[derive(Debug)]
pub(crate) struct Registry {
    state: StateDir,
    qemu_user: Option<User>,
    /// Their content; none if VMs are not scanned.
    holdings: Option<Holdings>,
    /// The systemd scopes of its QEMUs.
    scopes: Scopes,
    slots: Mutex<BTreeMap<String, Slot>>,
    /// Notified when a slot is removed or free again.
    settled: Condvar,
}

impl Registry {
    /// Finds the VMs that an earlier run of the agent left.
    ///
    /// Those that `held` names are left as they are, for the threads that settle them.
    pub(crate) fn open(state: StateDir, held: &Held) -> std::io::Result<Self> {
        let mut slots = BTreeMap::new();
        for found in found::all(&state, held)? {
            let busy = if found.held { Busy::Unsettled } else { Busy::Nothing };
            let name = found.vm.name.clone();
            slots.insert(name, Slot::new(Some(Arc::new(found.vm)), busy));
        }
        let (slots, settled) = (Mutex::new(slots), Condvar::new());
        Ok(Self {
            state,
            qemu_user: None,
            holdings: None,
            scopes: Scopes::default(),
            slots,
            settled,
        })
    }

    /// Starts QEMUs as this user from now on.
    pub(crate) fn with_qemu_user(self, qemu_user: Option<User>) -> Self {
        Self { qemu_user, ..self }
    }

    /// Has its VMs scanned while they are here.
    pub(crate) fn with_holdings(self, holdings: Option<Holdings>) -> Self {
        if let Some(holdings) = &holdings {
            for slot in self.slots.lock().values().filter(|slot| slot.busy == Busy::Nothing) {
                slot.vm.iter().for_each(|vm| holdings.watch(vm));
            }
        }
        Self { holdings, ..self }
    }

    /// Gives its QEMUs their own scopes, including those that have none yet.
    pub(crate) fn with_scopes(self, scopes: Scopes) -> Self {
        for (name, slot) in self.slots.lock().iter() {
            if let Some(machine) = slot.vm.as_ref().and_then(|vm| vm.machine()) {
                scopes.take(name, machine.process.pid());
            }
        }
        Self { scopes, ..self }
    }

    /// The number of its VMs, including those that are arriving.
    pub(crate) fn count(&self) -> usize {
        self.slots.lock().values().filter(|slot| slot.vm.is_some()).count()
    }

    /// The ordinary memory that arriving VMs have yet to take, also before their QEMUs answer.
    pub(crate) fn promised(&self) -> u64 {
        self.slots.lock().values().map(Slot::yet_to_take).fold(0, u64::saturating_add)
    }

    /// The content of its VMs; none if they are not scanned.
    pub(crate) fn holdings(&self) -> Option<&Holdings> {
        self.holdings.as_ref()
    }

    /// The user that QEMUs are started as, if it is not the agent's own.
    pub(crate) fn qemu_user(&self) -> Option<&User> {
        self.qemu_user.as_ref()
    }

    pub(crate) fn state(&self) -> &StateDir {
        &self.state
    }

    /// Starts a VM; `probes` knows the capabilities of its QEMU.
    pub(crate) fn run(
        self: &Arc<Self>,
        request: &RunRequest,
        probes: &Probes,
    ) -> Result<VmSummary, Denied> {
        let cwd = Path::new(&request.cwd);
        if !cwd.is_absolute() {
            return Err(Denied::Invalid(format!(
                "the directory `{}` is not absolute",
                request.cwd
            )));
        }
        check_domain(&request.share_domain)?;
        let mut argv = Cow::Borrowed(&request.argv);
        if request.free_page_hint {
            let line = CommandLine::parse(&argv)?;
            argv = Cow::Owned(line.with_free_page_hint()?.argv());
        }
        if request.hand_over {
            let line = CommandLine::parse(&argv)?;
            let line = line.with_hand_over(|path| huge_page_bytes(cwd, path))?;
            argv = Cow::Owned(line.argv());
        }
        let claim = self.claim(&request.name, Busy::Starting)?;
        claim.note_starting()?;
        let start = Start {
            name: &request.name,
            argv: &argv,
            cwd,
            dir: &claim.dir,
            incoming: false,
            machine: None,
            by: By::Operator,
            user: self.qemu_user(),
            guest_port: if request.guest_port { GuestPort::IfPossible } else { GuestPort::None },
            knows_legacy_ack: probes.knows_legacy_ack(&request.argv, cwd),
            up_max: machine::UP_MAX,
            idle_max: machine::UP_MAX,
        };
        let machine = machine::start_reporting(&start, &|pid| claim.launched(pid))?;
        let vm = claim.fill(machine, &request.share_domain)?;
        claim.keep()?;
        tracing::info!(vm = request.name, "started");
        Ok(vm.summary(Presence::Here, None))
    }

    /// Adopts a VM that the agent did not start, or one of its own whose record can't be
    /// read.
    pub(crate) fn attach(self: &Arc<Self>, request: &AttachRequest) -> Result<VmSummary, Denied> {
        check_domain(&request.share_domain)?;
        if self.is_unreadable(&request.name) {
            let socket = Path::new(&request.qmp);
            return self.attach_again(&request.name, socket, &request.share_domain);
        }
        let claim = self.claim(&request.name, Busy::Starting)?;
        let machine = machine::attach(Path::new(&request.qmp), &claim.dir).map_err(unreached)?;
        if let Some(name) = self.who_has(machine.process.pid()) {
            let text = format!("that VM is already here, as {name}");
            return Err(Denied::Coded(ErrorCode::VmExists, text));
        }
        let vm = claim.fill_attached(machine, &request.share_domain)?;
        claim.keep()?;
        tracing::info!(vm = request.name, "adopted");
        Ok(vm.summary(Presence::Here, None))
    }

    pub(crate) fn who_has(&self, pid: u32) -> Option<String> {
        let slots = self.slots.lock();
        let (name, _) = slots.iter().find(|(_, slot)| slot.has(pid))?;
        Some(name.clone())
    }

    /// All VMs, by name.
    ///
    /// They are queried in parallel: a QEMU that hangs takes half a second, and many may hang at
    /// once while storage is missing.
    pub(crate) fn list(&self) -> Vec<VmSummary> {
        let known: Vec<(Arc<Vm>, Busy)> = self
            .slots
            .lock()
            .values()
            .filter_map(|slot| Some((Arc::clone(slot.vm.as_ref()?), slot.busy.clone())))
            .collect();
        at_once(&known, |(vm, busy)| summary(vm, busy.clone()))
    }

    /// One VM.
    pub(crate) fn show(&self, name: &str) -> Result<VmSummary, Denied> {
        let (vm, busy) = {
            let slots = self.slots.lock();
            let slot = slots.get(name).ok_or_else(|| unknown(name))?;
            let vm = slot.vm.clone().ok_or_else(|| in_the_way(name, &slot.busy))?;
            (vm, slot.busy.clone())
        };
        let mut shown = summary(&vm, busy);
        shown.content = self.holdings.as_ref().and_then(|holdings| holdings.known(shown.pid));
        Ok(shown)
    }

    /// One VM, with its guest's helper; takes a second or two if the helper does not answer.
    pub(crate) fn examine(&self, name: &str) -> Result<VmSummary, Denied> {
        let mut shown = self.show(name)?;
        let not_asked = |why: &str| Some(GuestHelper::NotAsked { why: why.to_owned() });
        shown.helper = match (&shown.migration, shown.status) {
            (_, VmStatus::Dead | VmStatus::Unreadable) => None,
            // The migration may be using the helper's port.
            (Some(_), _) => not_asked("the VM is being moved"),
            (None, VmStatus::Running) => self.vm(name).and_then(|vm| vm.helper()),
            (None, _) => not_asked("the VM doesn't run"),
        };
        Ok(shown)
    }

    /// Whether a VM of that name could arrive.
    pub(crate) fn is_free(&self, name: &str) -> bool {
        !self.slots.lock().contains_key(name)
    }

    /// Reserves a VM for migration `id`.
    ///
    /// No other operation is permitted on it until [`Registry::moved`] or [`Registry::stays`].
    pub(crate) fn begin_move(&self, name: &str, id: &str) -> Result<Arc<Vm>, Denied> {
        // First, outside the lock: a dead VM can't be moved.
        if self.show(name)?.status == VmStatus::Dead {
            let text = format!(
                "{name} is dead: `droveway show {name}` shows why, `droveway stop {name}` removes \
                 it"
            );
            return Err(Denied::Coded(ErrorCode::VmDead, text));
        }
        self.set_busy(name, Busy::Moving(id.to_owned()))
    }

    /// Removes a VM that now runs elsewhere; its QEMU here has ended.
    pub(crate) fn moved(&self, name: &str) {
        self.remove(name);
    }

    /// Frees a VM that goes on here.
    pub(crate) fn stays(&self, name: &str) {
        self.set_free(name);
    }

    /// Notes that a VM's migration has ended and its owner is not decided.
    ///
    /// No other operation is permitted on it until [`Registry::moved`] or [`Registry::stays`].
    pub(crate) fn unsettled(&self, name: &str) {
        if let Some(slot) = self.slots.lock().get_mut(name) {
            slot.busy = Busy::Unsettled;
        }
        self.settled.notify_all();
    }

    /// Whether it waits for the end of its switchover.
    pub(crate) fn is_unsettled(&self, name: &str) -> bool {
        self.slots.lock().get(name).is_some_and(|slot| slot.busy == Busy::Unsettled)
    }

    /// A VM by its name, whatever operation is in progress.
    pub(crate) fn vm(&self, name: &str) -> Option<Arc<Vm>> {
        self.slots.lock().get(name)?.vm.clone()
    }

    /// The claim of a VM that was arriving when an earlier run of the agent ended.
    ///
    /// It is kept or dropped as for a VM that arrives now.
    pub(crate) fn claim_found(self: &Arc<Self>, name: &str) -> Claim {
        let dir = self.state.vm(name);
        Claim { registry: Arc::clone(self), name: name.to_owned(), dir, kept: false }
    }

    fn claim(self: &Arc<Self>, name: &str, busy: Busy) -> Result<Claim, Denied> {
        identity::check_name(name)?;
        if name.len() > self.state.name_letters_max() {
            return Err(Denied::Invalid(format!(
                "the name `{name}` is too long for this agent's state directory: use {} letters \
                 at most (paths of sockets are short), or give the agent a shorter --state",
                self.state.name_letters_max()
            )));
        }
        let mut slots = self.slots.lock();
        if let Some(slot) = slots.get(name) {
            return Err(in_the_way(name, &slot.busy));
        }
        if matches!(busy, Busy::Arriving { .. }) && slots.len() >= VMS_MAX {
            return Err(Denied::Conflict(format!(
                "there are {VMS_MAX} VMs there, with those in doubt and those that arrive: no \
                 other host can send more"
            )));
        }
        slots.insert(name.to_owned(), Slot::new(None, busy));
        let dir = self.state.vm(name);
        Ok(Claim { registry: Arc::clone(self), name: name.to_owned(), dir, kept: false })
    }

    fn set_busy(&self, name: &str, busy: Busy) -> Result<Arc<Vm>, Denied> {
        let mut slots = self.slots.lock();
        let slot = slots.get_mut(name).ok_or_else(|| unknown(name))?;
        match (&slot.vm, &slot.busy) {
            (Some(vm), Busy::Nothing) if vm.unreadable_why().is_some() => Err(Denied::Coded(
                ErrorCode::VmUnreadable,
                format!("{name} is unreadable: `droveway show {name}` shows why, and what to do"),
            )),
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
            if let (Some(holdings), Some(vm)) = (&self.holdings, &slot.vm) {
                holdings.watch(vm);
            }
        }
        self.settled.notify_all();
    }

    /// Forgets a VM whose QEMU has ended.
    fn remove(&self, name: &str) {
        record::remove_dir(&self.state.vm(name));
        self.slots.lock().remove(name);
        self.settled.notify_all();
    }
}

fn summary(vm: &Vm, busy: Busy) -> VmSummary {
    match busy {
        Busy::Arriving { id, .. } => vm.summary(Presence::Arriving, Some(id)),
        Busy::Moving(id) => vm.summary(Presence::Here, Some(id)),
        Busy::Unsettled => vm.summary(Presence::Unsettled, None),
        Busy::Nothing | Busy::Starting | Busy::Stopping => vm.summary(Presence::Here, None),
    }
}

/// Says what to do if QEMU can't be reached at the socket that a caller named.
fn unreached(error: StartError) -> Denied {
    let StartError::Qmp(QmpError::Connect { source, .. }) = &error else { return error.into() };
    let why = match source.kind() {
        io::ErrorKind::NotFound => "it does not exist",
        io::ErrorKind::ConnectionRefused => {
            "it is not a socket, or the QEMU that made it has ended"
        }
        io::ErrorKind::PermissionDenied => "the agent may not open it",
        _ => return error.into(),
    };
    Denied::Qemu(format!(
        "{error}: {why}. Give the socket of an option `-qmp unix:SOCKET,server=on,wait=off` in the \
         command line of the VM's QEMU, which `pgrep -a qemu` shows; a VM that was started without \
         such a socket can't be adopted"
    ))
}

/// Checks a VM's sharing domain.
pub(crate) fn check_domain(domain: &str) -> Result<(), Denied> {
    api::check_domain(domain).map_err(|error| Denied::Invalid(error.to_string()))
}

fn unknown(name: &str) -> Denied {
    let text = format!("there is no VM `{name}` here: `droveway list` shows those there are");
    Denied::Coded(ErrorCode::NoSuchVm, text)
}

/// Why a name or a VM is not available now.
fn in_the_way(name: &str, busy: &Busy) -> Denied {
    let code = match busy {
        Busy::Nothing => ErrorCode::VmExists,
        Busy::Unsettled => ErrorCode::VmInDoubt,
        Busy::Starting | Busy::Arriving { .. } | Busy::Moving(_) | Busy::Stopping => {
            ErrorCode::VmBusy
        }
    };
    let text = match busy {
        Busy::Nothing => format!("there is already a VM `{name}` here"),
        Busy::Starting => format!("{name} is starting"),
        Busy::Arriving { id, .. } => format!("{name} is arriving here with migration {id}"),
        Busy::Moving(id) => {
            format!("{name} is being moved by migration {id}: `droveway cancel {id}` ends that")
        }
        Busy::Stopping => format!("{name} is being stopped"),
        Busy::Unsettled => {
            format!("{name} is in doubt: `droveway show {name}` shows why, and what to do")
        }
    };
    Denied::Coded(code, text)
}

#[cfg(test)]
mod tests;
