//! The destination side: the agent starts a QEMU for an arriving VM from the source's
//! description, and compares it with that description.

pub(crate) mod fitness;
mod next;
mod published;
mod taps;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::{Arriving, Waits};
use qemu::command_line::{check_overrides, overridden};
use qemu::disks::{self as images, GoesOn, PreparedImage, Promises};
use qemu::launch::User;
use qemu::machine::{self, By, GuestPort, Machine, Start};
use qemu::process;
use qemu::programs::Programs;
use qemu::qmp::RunState;
use qemu::room::host_memory;
use qemu::shape;
use wire::{Part, Prepare};

use crate::denied::Denied;
use crate::examiner::{Examiner, sight, vms};
use crate::moves::recovery::Settlers;
use crate::peers::Peers;
use crate::vms::record::Standing;
use crate::vms::registry::{Claim, Registry, check_domain};
use fitness::QemuToStart;
pub(crate) use next::NextHost;
use published::PublishedArrival;

/// Disks of one VM; the check reads storage for each.
const DISKS_MAX: usize = 256;
/// Disks that are named in a refusal.
const UNSHOWN_MAX: usize = 8;
/// What is left for a QEMU to start, however long everything before it took.
const UP_LEAST: Duration = Duration::from_secs(5);
/// An earlier arrival of the same VM, which was cancelled or has failed at its source, ends here a
/// moment later, and the VM may be sent again at once.
const ENDS_MAX: Duration = Duration::from_secs(10);
/// A QEMU that does nothing at its start is ended after this part of `prepare`.
const IDLE_PARTS: u32 = 4;

/// This host as a destination.
pub(crate) struct Arrivals {
    registry: Arc<Registry>,
    settlers: Arc<Settlers>,
    examiner: Arc<Examiner>,
    peers: Peers,
    /// The room for the disks that arrive.
    promises: Promises,
    /// How long an order may take until its QEMU answers.
    prepare_max: Duration,
    /// How long its QEMU may do nothing until it answers.
    idle_max: Duration,
}

impl Arrivals {
    pub(crate) fn new(
        settlers: &Arc<Settlers>,
        examiner: &Arc<Examiner>,
        peers: Peers,
        waits: &Waits,
    ) -> Self {
        Self {
            registry: Arc::clone(&settlers.registry),
            settlers: Arc::clone(settlers),
            examiner: Arc::clone(examiner),
            peers,
            promises: Promises::default(),
            // A source that waits as long is still connected to receive the reason.
            prepare_max: waits.prepare - waits.prepare / 8,
            idle_max: waits.prepare / IDLE_PARTS,
        }
    }

    /// Starts a QEMU for a VM that another host sends, if the VM fits here.
    pub(crate) fn receive(
        &self,
        order: &Prepare,
        goes_on: GoesOn<'_>,
    ) -> Result<Box<dyn Arriving>, Denied> {
        Ok(Box::new(self.admit(order, goes_on)?))
    }

    fn admit(&self, order: &Prepare, goes_on: GoesOn<'_>) -> Result<Arrival, Denied> {
        let until = Instant::now() + self.prepare_max;
        let ends_max = ENDS_MAX.min(self.prepare_max);
        self.registry.wait_ended(&order.vm, &order.from, ends_max, goes_on)?;
        if !self.registry.is_free(&order.vm) {
            return Err(Denied::Conflict(format!(
                "there is already a VM `{}` there: stop it, or give one of the two another name",
                order.vm
            )));
        }
        // These names become parts of logs and journals.
        for name in [&order.from, &order.migration] {
            identity::check_name(name).map_err(|error| Denied::Invalid(error.to_string()))?;
        }
        check_domain(&order.share_domain.0)?;
        check_overrides(&order.overrides).map_err(|error| Denied::Invalid(error.to_string()))?;
        self.settlers.have_room()?;
        let claim = self.registry.expect(&order.vm, &order.migration, &order.from)?;
        let shape = understood("what the VM is made of", &order.shape)?;
        let probes = self.examiner.probes();
        let wanted = match &order.incoming_qmp {
            // Its QEMU is started already.
            Some(_) => None,
            None => Some(QemuToStart::of(order, probes.programs())?),
        };
        if let Some(wanted) = &wanted {
            let needs = wanted.check(shape, probes)?;
            claim.promise(needs.pages_bytes, |promised| {
                fitness::has_room(&needs, host_memory(), promised, order.overcommit)
            })?;
        }
        let taps = wanted.as_ref().map(QemuToStart::taps).unwrap_or_default();
        let mut notes = taps::before(&taps, order.accept_missing_taps, sight::tap)?;
        let user = probes.programs().user();
        check_disks(order, user, &|| goes_on().and_then(|()| in_time(until)))?;
        let qemu = wanted.as_ref().map(|wanted| &*wanted.program);
        let images = prepare_images(order, probes.programs(), qemu, &self.promises)?;
        let made: Vec<PathBuf> = images.created().map(Path::to_owned).collect();
        claim.note_starting()?;
        claim.note_images(&made, probes.programs().user())?;
        let machine = match &wanted {
            Some(wanted) => self.start(&claim, order, wanted, &shape.machine, until)?,
            None => {
                let socket = order.incoming_qmp.as_deref().unwrap_or_default();
                waiting(&self.registry, socket, &claim.dir, probes.programs().user())?
            }
        };
        notes.extend(taps::after(&taps, sight::tap));
        let vm = claim.fill(machine, &order.share_domain.0)?;
        let machine =
            vm.machine().ok_or_else(|| Denied::Qemu("the waiting QEMU has ended".to_owned()))?;
        // Noted now, because a QEMU that is loading may take long to answer.
        let (ram_bytes, unplugged) = (vm.ram_bytes(), &shape.unplugged);
        let needs = vms::needs_of_arriving(&machine, ram_bytes, &host_memory(), unplugged);
        if let Some(needs) = needs {
            vm.takes_pages(needs.pages_bytes);
        }
        claim.note(Standing::Arriving)?;
        let here = shape::of(&machine.qmp).map_err(|error| Denied::Qemu(error.to_string()))?;
        fitness::check_features(shape, &here)?;
        let differences = shape::differences(shape, &here, &order.overrides);
        if differences.is_empty() {
            let peer = self.peers.named(&order.from);
            let source_address = peer.map(|peer| peer.address);
            let published = PublishedArrival::begin(&self.settlers.events, order);
            return Ok(Arrival { claim, machine, images, source_address, notes, published });
        }
        Err(Denied::Conflict(format!(
            "the VM no longer matches its command line: {}",
            differences.join("; ")
        )))
    }

    fn start(
        &self,
        claim: &Claim,
        order: &Prepare,
        wanted: &QemuToStart,
        machine: &str,
        until: Instant,
    ) -> Result<Machine, Denied> {
        let probes = self.examiner.probes();
        let start = Start {
            name: &order.vm,
            argv: &wanted.argv,
            cwd: &wanted.cwd,
            dir: &claim.dir,
            incoming: true,
            machine: Some(machine),
            by: By::Peer { program: &wanted.program },
            user: probes.programs().user(),
            guest_port: if order.guest_port { GuestPort::Needed } else { GuestPort::None },
            knows_legacy_ack: probes.knows_legacy_ack(&wanted.argv, &wanted.cwd),
            up_max: until.saturating_duration_since(Instant::now()).max(UP_LEAST),
            idle_max: self.idle_max,
        };
        let explain = |error| wanted.explain(error, machine, probes);
        machine::start_reporting(&start, &|pid| claim.launched(pid)).map_err(explain)
    }
}

/// Checks the VM's disks before there is a QEMU that could write to them.
fn check_disks(order: &Prepare, user: Option<&User>, goes_on: GoesOn<'_>) -> Result<(), Denied> {
    let disks = understood("the VM's disks", &order.disks)?;
    if disks.len() > DISKS_MAX {
        return Err(Denied::Invalid(format!("{} disks are more than {DISKS_MAX}", disks.len())));
    }
    if order.shared_disks {
        return Ok(());
    }
    let unshown: Vec<String> = disks
        .iter()
        .filter_map(|disk| images::verify(disk, &order.overrides, user, goes_on).err())
        .inspect(|not_shared| {
            let (image, reason) = (&not_shared.image, not_shared.reason.for_log());
            tracing::warn!(image, reason, "cannot prove that a disk is the source's");
        })
        .map(|not_shared| not_shared.to_string())
        .take(UNSHOWN_MAX)
        .collect();
    if unshown.is_empty() {
        return Ok(());
    }
    Err(Denied::Conflict(format!(
        "{}. `--disks all --create-disks` moves the disks with the VM: it creates their images here \
         and copies their content. Disks on storage that both hosts see stay there. \
         `--shared-disks` only skips this check: if the images differ, it destroys the VM's data",
        unshown.join("; ")
    )))
}

fn in_time(until: Instant) -> Result<(), String> {
    if Instant::now() < until {
        return Ok(());
    }
    let why = "its content takes longer to compare than `prepare` under [waits] in the agent's \
               file allows";
    Err(why.to_owned())
}

/// Creates the images of the disks that move with the VM.
///
/// They belong to its QEMU, so the `qemu-img` of that QEMU makes them, as its user.
fn prepare_images(
    order: &Prepare,
    programs: &Programs,
    qemu: Option<&Path>,
    promises: &Promises,
) -> Result<images::Prepared, Denied> {
    let moving = understood("the disks that move", &order.moving)?;
    let allowed = *understood("what may be done to images", &order.allowed)?;
    if moving.len() > DISKS_MAX {
        return Err(Denied::Invalid(format!("{} disks are more than {DISKS_MAX}", moving.len())));
    }
    if moving.is_empty() {
        return Ok(images::Prepared::default());
    }
    let cwd = overridden(&order.cwd, &order.overrides)
        .map_err(|error| Denied::Invalid(error.to_string()))?;
    let tool = programs.tool("qemu-img", qemu);
    let tool = tool.map_err(|not_allowed| Denied::Local(not_allowed.to_string()))?;
    let tool = images::QemuImg::new(tool, programs.user());
    images::prepare(moving, &order.overrides, Path::new(&cwd), allowed, &tool, promises)
        .map_err(|error| Denied::Conflict(error.to_string()))
}

/// The QEMU that the operator started to receive this VM.
///
/// A QEMU in any other state is left alone, so that a wrong socket name does not end a VM.
fn waiting(
    registry: &Registry,
    socket: &str,
    dir: &Path,
    user: Option<&User>,
) -> Result<Machine, Denied> {
    let machine = machine::attach(Path::new(socket), dir)?;
    // The listener may pose as another QEMU, which the agent would then write to and end. So
    // the kernel has to confirm the process, or the process belongs to QEMU's user, who could
    // end it anyway.
    let pid = machine.process.pid();
    let is_users =
        || user.is_some_and(|user| process::user_of(pid).is_ok_and(|of| of.uid == user.uid));
    if machine.qmp.peer_pid() != Some(pid) && !is_users() {
        return Err(Denied::Conflict(format!(
            "the program at {socket} reports process ID {pid}, and the kernel reports another: let \
             QEMU create that socket itself"
        )));
    }
    // The QEMU of another arriving VM also waits.
    if let Some(name) = registry.who_has(machine.process.pid()) {
        return Err(Denied::Conflict(format!(
            "the QEMU at {socket} already runs the VM {name} here"
        )));
    }
    match machine.qmp.run_state() {
        Ok(RunState::InMigrate) => Ok(machine),
        Ok(state) => Err(Denied::Conflict(format!(
            "the QEMU at {socket} is {state} and doesn't wait for a VM: start one with -incoming \
             defer -S"
        ))),
        Err(error) => Err(Denied::Qemu(error.to_string())),
    }
}

/// Reads a part of the order that another version may encode differently.
fn understood<'p, T>(what: &str, part: &'p Part<T>) -> Result<&'p T, Denied> {
    part.read().map_err(|why| {
        Denied::Invalid(format!(
            "{what} can't be read ({why}): run the same version of droveway on both hosts"
        ))
    })
}

/// An arriving VM; the order of fields makes its QEMU end before its images are removed.
struct Arrival {
    claim: Claim,
    machine: Arc<Machine>,
    images: images::Prepared,
    source_address: Option<SocketAddr>,
    notes: Vec<String>,
    /// Last, so that the end is published when everything else is done.
    published: PublishedArrival,
}

impl Arriving for Arrival {
    fn machine(&self) -> Arc<Machine> {
        Arc::clone(&self.machine)
    }

    fn notes(&self) -> &[String] {
        &self.notes
    }

    fn images(&self) -> &[PreparedImage] {
        self.images.images()
    }

    fn source_address(&self) -> Option<SocketAddr> {
        self.source_address
    }

    fn adopt(&mut self) -> Result<(), String> {
        self.images.keep();
        self.claim.adopt().map_err(|denied| denied.to_string())
    }

    fn runs(&self) {
        self.claim.runs();
    }

    fn settled(mut self: Box<Self>) {
        self.published.arrived = true;
        self.claim.free();
    }

    fn discard(self: Box<Self>) {
        let Self { claim, images, .. } = *self;
        // Before the name is free: the VM's next arrival may wait for it, to make the same images.
        // QEMU has ended, or has no data of the VM yet.
        drop(images);
        drop(claim);
    }
}
