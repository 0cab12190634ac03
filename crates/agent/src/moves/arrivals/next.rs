//! The destination side of a migration within this host: the VM's next QEMU, next to its former
//! one.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::{Arriving, Host, NotAlone, Refusal, Unsettled, Waits};
use parking_lot::Mutex;
use qemu::command_line::CommandLine;
use qemu::disks::{GoesOn, PreparedImage};
use qemu::launch::User;
use qemu::machine::{
    self, By, FormerTaps, GuestPort, Inherited, InheritedSockets, Machine, SharedRam, Start,
};
use qemu::process::{self, Process};
use qemu::room::host_memory;
use qemu::shape;
use switchover::MigrationId;
use wire::{Inquiry, Prepare, SwitchoverMessage};

use super::fitness::{self, QemuToStart};
use super::{IDLE_PARTS, UP_LEAST, understood};
use crate::denied::Denied;
use crate::examiner::{Examiner, vms};
use crate::moves::recovery::Settlers;
use crate::vms::registry::{Registry, Seat};

/// Starts the next QEMU of one VM.
pub(crate) struct NextHost {
    registry: Arc<Registry>,
    settlers: Arc<Settlers>,
    examiner: Arc<Examiner>,
    /// The QEMU that was checked.
    checked: machine::Record,
    /// The program of the next one; by default that of the VM's command line.
    program: Option<String>,
    /// Whether it maps the former one's RAM, rather than get a copy of it.
    maps_ram: bool,
    prepare_max: Duration,
    idle_max: Duration,
    launching: Launching,
}

/// The QEMU that is being started. It has no VM yet, so it may be ended.
#[derive(Default)]
struct Launching(Mutex<Launched>);

#[derive(Default)]
enum Launched {
    /// None was launched, or it has answered.
    #[default]
    Nothing,
    /// It has not answered yet.
    Process(Process),
    /// Nothing waits for it any more.
    Abandoned,
}

impl Launching {
    fn launched(&self, pid: u32) {
        let Ok(process) = Process::now(pid) else { return };
        let mut launched = self.0.lock();
        match *launched {
            Launched::Abandoned => end(&process),
            Launched::Nothing | Launched::Process(_) => *launched = Launched::Process(process),
        }
    }

    /// From now on it may get the VM, and its arrival decides.
    fn has_answered(&self) {
        let mut launched = self.0.lock();
        if let Launched::Process(_) = *launched {
            *launched = Launched::Nothing;
        }
    }

    fn abandon(&self) {
        let mut launched = self.0.lock();
        if let Launched::Process(process) = &*launched {
            end(process);
        }
        *launched = Launched::Abandoned;
    }
}

fn end(process: &Process) {
    if let Err(error) = process.kill() {
        tracing::warn!(%error, "a QEMU that is not needed any more can't be ended");
    }
}

impl NextHost {
    pub(crate) fn new(
        settlers: &Arc<Settlers>,
        examiner: &Arc<Examiner>,
        checked: machine::Record,
        (program, maps_ram): (Option<String>, bool),
        waits: &Waits,
    ) -> Self {
        Self {
            registry: Arc::clone(&settlers.registry),
            settlers: Arc::clone(settlers),
            examiner: Arc::clone(examiner),
            checked,
            program,
            maps_ram,
            prepare_max: waits.prepare - waits.prepare / 8,
            idle_max: waits.prepare / IDLE_PARTS,
            launching: Launching::default(),
        }
    }

    /// Its source's side has ended: a QEMU that is being started is ended, rather than waited for.
    pub(crate) fn abandon(&self) {
        self.launching.abandon();
    }

    fn start(&self, order: &Prepare) -> Result<NextArrival, Denied> {
        let until = Instant::now() + self.prepare_max;
        self.settlers.have_room()?;
        let ended = || Denied::Qemu(format!("the QEMU of {} has ended", order.vm));
        let vm = self.registry.vm(&order.vm).ok_or_else(ended)?;
        let former = vm.machine().ok_or_else(ended)?;
        // Another one of that name may have RAM that two QEMUs would write to.
        if !former.record().is_of(&self.checked) {
            return Err(ended());
        }
        let order = self.with_program(order);
        let shape = understood("what the VM is made of", &order.shape)?;
        let probes = self.examiner.probes();
        let wanted = QemuToStart::of(&order, probes.programs())?;
        let user = user(&former, probes.programs().user())?;
        let sockets = InheritedSockets::of(&former);
        let sockets = sockets.map_err(|error| Denied::Conflict(error.to_string()))?;
        let ram = if self.maps_ram { SharedRam::of(&former) } else { Ok(SharedRam::default()) };
        let ram = ram.map_err(|error| Denied::Conflict(error.to_string()))?;
        let held = FormerTaps::of(&former).map_err(|error| Denied::Conflict(error.to_string()))?;
        let taps = held.for_next().map_err(|error| Denied::Local(error.to_string()))?;
        let inherited = Inherited { sockets, ram, taps };
        let needs = wanted.check(shape, probes)?;

        let mut seat = self.registry.seat(&vm, &former)?;
        if self.maps_ram {
            seat.maps_ram();
        } else {
            seat.promise(needs.pages_bytes, |promised| {
                fitness::has_room(&needs, host_memory(), promised, order.overcommit)
            })?;
        }
        seat.note_starting()?;
        seat.keep_taps(held);
        let home = seat.home.clone();
        let start = Start {
            name: &order.vm,
            argv: &wanted.argv,
            cwd: &wanted.cwd,
            dir: &home,
            incoming: true,
            machine: Some(&shape.machine),
            by: By::Peer { program: &wanted.program },
            user,
            guest_port: if order.guest_port { GuestPort::Needed } else { GuestPort::None },
            knows_legacy_ack: probes.knows_legacy_ack(&wanted.argv, &wanted.cwd),
            up_max: until.saturating_duration_since(Instant::now()).max(UP_LEAST),
            idle_max: self.idle_max,
        };
        let machine = machine::start_next(&start, &inherited, &|pid| {
            seat.launched(pid);
            self.launching.launched(pid);
        });
        self.launching.has_answered();
        let machine = machine.map_err(|error| wanted.explain(error, &shape.machine, probes))?;
        let next = seat.fill(machine)?;
        let machine = next.machine().ok_or_else(ended)?;
        // Noted now, because a QEMU that is loading may take long to answer.
        let (ram_bytes, unplugged) = (next.ram_bytes(), &shape.unplugged);
        let needs = vms::needs_of_arriving(&machine, ram_bytes, &host_memory(), unplugged);
        if let Some(needs) = needs.filter(|_| !self.maps_ram) {
            next.takes_pages(needs.pages_bytes);
        }
        seat.note()?;
        let here = shape::of(&machine.qmp).map_err(|error| Denied::Qemu(error.to_string()))?;
        fitness::check_features(shape, &here)?;
        let differences = shape::differences(shape, &here, &order.overrides);
        if differences.is_empty() {
            return Ok(NextArrival { seat, machine, maps_ram: self.maps_ram });
        }
        Err(Denied::Conflict(format!(
            "the VM no longer matches its command line: {}",
            differences.join("; ")
        )))
    }

    /// The order, for the chosen program.
    fn with_program(&self, order: &Prepare) -> Prepare {
        let mut order = order.clone();
        if let (Some(program), Some(first)) = (&self.program, order.argv.first_mut()) {
            first.clone_from(program);
        }
        order
    }
}

/// The user as whom the next QEMU starts: that of the former one, whose files it has to open.
fn user<'u>(former: &Machine, configured: Option<&'u User>) -> Result<Option<&'u User>, Denied> {
    let runs_as = process::user_of(former.process.pid());
    let runs_as = runs_as.map_err(|error| Denied::Local(error.to_string()))?.uid;
    if let Some(user) = configured.filter(|user| user.uid == runs_as) {
        return Ok(Some(user));
    }
    // It changes to that user itself, as the former one did.
    let names_user = CommandLine::parse(&former.argv)?.names_user();
    if names_user || runs_as == rustix::process::geteuid().as_raw() {
        return Ok(None);
    }
    Err(Denied::Conflict(format!(
        "its QEMU runs as the user with the id {runs_as}, and the agent would start another one as \
         another user: set that user in the agent's file (qemu-user)"
    )))
}

impl Host for NextHost {
    fn receive(&self, order: &Prepare, _: GoesOn<'_>) -> Result<Box<dyn Arriving>, Refusal> {
        match self.start(order) {
            Ok(next) => Ok(Box::new(next)),
            Err(denied) => Err(Refusal(denied.to_string())),
        }
    }

    fn settle(&self, left: Unsettled) {
        self.settlers.coming(left);
    }

    fn take_up(&self, vm: &str, migration: &MigrationId) -> bool {
        self.settlers.take_up_after_fault(vm, self.settlers.kept_of(migration))
    }

    /// No inquiry comes: both sides are here.
    fn answer(&self, _: Inquiry) -> Option<SwitchoverMessage> {
        None
    }

    /// It is this agent itself.
    fn admits(&self, _: &str) -> bool {
        true
    }
}

/// The next QEMU of a VM.
struct NextArrival {
    seat: Seat,
    machine: Arc<Machine>,
    maps_ram: bool,
}

impl Arriving for NextArrival {
    fn machine(&self) -> Arc<Machine> {
        Arc::clone(&self.machine)
    }

    fn maps_ram(&self) -> bool {
        self.maps_ram
    }

    fn ends_former(&self) -> bool {
        self.maps_ram || self.machine.passes_taps()
    }

    fn be_alone(&self) -> Result<(), NotAlone> {
        self.seat.be_alone()
    }

    /// Disks stay where they are.
    fn images(&self) -> &[PreparedImage] {
        &[]
    }

    fn source_address(&self) -> Option<SocketAddr> {
        None
    }

    fn adopt(&mut self) -> Result<(), String> {
        self.seat.adopt().map_err(|denied| denied.to_string())
    }

    /// The former one may still have the VM.
    fn lost(&mut self) -> Result<(), String> {
        Ok(())
    }

    fn runs(&self) {
        self.seat.runs();
    }

    fn settled(self: Box<Self>) {}

    fn discard(self: Box<Self>) {}
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    /// It ends by itself only long after the test.
    fn launched() -> Child {
        Command::new("sleep").arg("600").spawn().unwrap()
    }

    fn assert_ends(process: &Process) {
        process.wait_exited(Duration::from_secs(60)).unwrap();
    }

    #[test]
    fn a_qemu_that_nothing_waits_for_is_ended_unless_it_has_answered() {
        let children = [launched(), launched(), launched()];
        // Not by the children: any `Process` that finds one ended reaps it.
        let processes = children.each_ref().map(|child| Process::now(child.id()).unwrap());
        let [first, late, answered] = processes;

        let launching = Launching::default();
        launching.launched(first.pid());
        launching.abandon();
        assert_ends(&first);
        // As where its launch takes long.
        launching.launched(late.pid());
        assert_ends(&late);

        let launching = Launching::default();
        launching.launched(answered.pid());
        launching.has_answered();
        launching.abandon();
        assert!(answered.is_alive());
        answered.kill().unwrap();
        assert_ends(&answered);
    }
}
