//! One VM of this host: its QEMU, and its record on disk.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::{GuestHelper, VmStatus, VmSummary};
use crossbeam_channel::Receiver;
use parking_lot::Mutex;
use qemu::guest_port::GuestError;
use qemu::launch::log_tail;
use qemu::machine::{self, Machine, StartError};
use qemu::outgoing;
use qemu::qmp::{Event, QmpError};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::state;

/// A QEMU that moves its VM may hold its main lock for a while; a list of VMs
/// does not wait for it.
const STATUS_WAIT: Duration = Duration::from_millis(500);
/// Until QEMU has said where the helper's port is, and nobody else speaks there.
const PORT_WAIT: Duration = Duration::from_millis(500);
/// A helper answers at once, unless its guest has no CPU for it.
const HELPER_WAIT: Duration = Duration::from_secs(1);

/// Whether a VM of a record is this host's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Standing {
    /// Its QEMU is being started.
    Starting,
    /// It comes from another host, and has not been given up there.
    Arriving,
    /// It is ours.
    Here,
}

/// Where a VM is, for who lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Here,
    Arriving,
    /// Its switchover is not over, and nobody moves it any more.
    Unsettled,
}

/// What is kept of a VM on disk.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) standing: Standing,
    /// None until QEMU answers.
    pub(crate) machine: Option<machine::Record>,
    pub(crate) ram_bytes: u64,
    pub(crate) qemu: String,
    /// See [`Vm::share_domain`].
    #[serde(default)]
    pub(crate) share_domain: String,
}

impl Record {
    /// Before there is a QEMU.
    pub(crate) fn starting() -> Self {
        Self {
            standing: Standing::Starting,
            machine: None,
            ram_bytes: 0,
            qemu: String::new(),
            share_domain: String::new(),
        }
    }

    pub(crate) fn read(dir: &Path) -> io::Result<Self> {
        let text = fs::read(dir.join("record.json"))?;
        serde_json::from_slice(&text).map_err(io::Error::other)
    }

    pub(crate) fn write(&self, dir: &Path) -> io::Result<()> {
        let text = serde_json::to_vec_pretty(self).map_err(io::Error::other)?;
        state::replace(&dir.join("record.json"), &text)
    }
}

/// One VM.
#[derive(Debug)]
pub(crate) struct Vm {
    pub(crate) name: String,
    pub(crate) dir: PathBuf,
    /// With which VMs it shares content; empty is the cluster's own domain.
    pub(crate) share_domain: String,
    ram_bytes: u64,
    known: Mutex<Known>,
    /// Held while QEMU is met again: it serves one client at a time.
    meeting: Mutex<()>,
}

/// What changes of it.
#[derive(Debug)]
struct Known {
    qemu: Qemu,
    /// What QEMU said last, for when it doesn't answer.
    status: VmStatus,
    /// What stopped it, until it runs again.
    stopped_by: Option<String>,
    /// What keeps it from moving, though it runs.
    stuck_by: Option<String>,
    /// What can't be known or done about its last switchover.
    doubt: Option<String>,
}

impl Known {
    fn new(qemu: Qemu, status: VmStatus) -> Self {
        Self { qemu, status, stopped_by: None, stuck_by: None, doubt: None }
    }
}

#[derive(Clone, Debug)]
enum Qemu {
    Alive { machine: Arc<Machine>, ends: Receiver<Event> },
    Dead { pid: u32, version: String, argv: Vec<String>, attached: bool, why: String },
}

impl Qemu {
    fn alive(machine: Machine) -> Self {
        let ends = machine.qmp.events_named(&["SHUTDOWN"]);
        Self::Alive { machine: Arc::new(machine), ends }
    }
}

impl Vm {
    /// A VM whose QEMU answers.
    pub(crate) fn new(name: &str, dir: PathBuf, machine: Machine, ram_bytes: u64) -> Self {
        let qemu = Qemu::alive(machine);
        let known = Known::new(qemu, VmStatus::Paused);
        Self {
            name: name.to_owned(),
            dir,
            share_domain: String::new(),
            ram_bytes,
            known: Mutex::new(known),
            meeting: Mutex::default(),
        }
    }

    /// The same, in another sharing domain.
    pub(crate) fn within(self, share_domain: &str) -> Self {
        Self { share_domain: share_domain.to_owned(), ..self }
    }

    /// A VM of a record whose QEMU can't be found or met.
    pub(crate) fn lost(name: &str, dir: PathBuf, record: Record, why: String) -> Self {
        let (pid, argv) = record
            .machine
            .as_ref()
            .map_or((0, Vec::new()), |machine| (machine.pid(), machine.argv().to_vec()));
        let attached = !dir.join("qemu.log").exists();
        let qemu = Qemu::Dead { pid, version: record.qemu, argv, attached, why };
        let known = Known::new(qemu, VmStatus::Dead);
        let ram_bytes = record.ram_bytes;
        Self {
            name: name.to_owned(),
            dir,
            share_domain: record.share_domain,
            ram_bytes,
            known: Mutex::new(known),
            meeting: Mutex::default(),
        }
    }

    /// Its QEMU, if it lives.
    pub(crate) fn machine(&self) -> Option<Arc<Machine>> {
        match &self.known.lock().qemu {
            Qemu::Alive { machine, .. } => Some(Arc::clone(machine)),
            Qemu::Dead { .. } => None,
        }
    }

    /// Notes on disk what it is.
    pub(crate) fn save(&self, standing: Standing) -> io::Result<()> {
        let Some(machine) = self.machine() else {
            return Err(io::Error::other("its QEMU is gone"));
        };
        Record {
            standing,
            machine: Some(machine.record()),
            ram_bytes: self.ram_bytes,
            qemu: machine.version.clone(),
            share_domain: self.share_domain.clone(),
        }
        .write(&self.dir)
    }

    pub(crate) fn ram_bytes(&self) -> u64 {
        self.ram_bytes
    }

    /// Remembers why it doesn't run, until it does.
    pub(crate) fn stopped_by(&self, why: String) {
        self.known.lock().stopped_by = Some(why);
    }

    /// What an operator has to know of its last switchover, if anything.
    pub(crate) fn doubt(&self, doubt: Option<String>) {
        self.known.lock().doubt = doubt;
    }

    /// Its QEMU answers after all.
    pub(crate) fn met(&self, machine: Machine) {
        self.known.lock().qemu = Qemu::alive(machine);
    }

    /// Ends what an agent that crashed left of a migration, and puts QEMU's
    /// settings back; remembers why, if that can't be done.
    pub(crate) fn make_up(&self, machine: &Machine) {
        let stuck_by = match outgoing::make_up(machine) {
            Ok(false) => None,
            Ok(true) => {
                tracing::info!(vm = self.name, "ended a migration that was left behind");
                None
            }
            Err(error) => {
                tracing::warn!(vm = self.name, %error, "a migration is left behind");
                Some(format!(
                    "QEMU still has what is left of a migration that an earlier run of the agent \
                     began, and its settings: {error}. The VM runs on; it can be moved once that \
                     is mended, or its QEMU was restarted"
                ))
            }
        };
        self.known.lock().stuck_by = stuck_by;
    }

    /// Asks QEMU. `busy` with a migration, a lost connection is that one's to
    /// notice.
    pub(crate) fn status(&self, busy: bool) -> VmStatus {
        let qemu = self.known.lock().qemu.clone();
        let Qemu::Alive { machine, ends } = qemu else {
            return VmStatus::Dead;
        };
        if machine.qmp.is_closed() || !machine.process.is_alive() {
            return self.look_again(&machine, &ends, busy);
        }
        let answer = machine.qmp.execute_within("query-status", json!({}), STATUS_WAIT);
        let mut known = self.known.lock();
        match answer {
            Ok(status) => {
                known.status = match status["status"].as_str() {
                    Some("running" | "suspended") => VmStatus::Running,
                    _ => VmStatus::Paused,
                };
                if known.status == VmStatus::Running {
                    known.stopped_by = None;
                }
            }
            Err(QmpError::Closed) => {
                drop(known);
                return self.look_again(&machine, &ends, busy);
            }
            // It is busy: what it said last still holds.
            Err(_) => {}
        }
        known.status
    }

    /// Asks the helper in its guest for its name; takes as long as the guest lets
    /// it, with a bound.
    pub(crate) fn helper(&self) -> Option<GuestHelper> {
        let machine = self.machine()?;
        let port = machine.open_guest_port(PORT_WAIT);
        Some(match port.and_then(|port| port.greet(HELPER_WAIT)) {
            Ok(greeting) => GuestHelper::Answers { version: greeting.program },
            Err(GuestError::NoPort(why)) => {
                // Why it could not have one was learnt when it started.
                let mut notes = machine.notes.iter();
                let noted = notes.find(|note| note.starts_with(machine::NO_GUEST_PORT));
                GuestHelper::NoPort { why: noted.cloned().unwrap_or_else(|| why.to_string()) }
            }
            Err(why) => GuestHelper::Silent { why: why.to_string() },
        })
    }

    /// QEMU is gone, or only our connection to it.
    fn look_again(&self, machine: &Arc<Machine>, ends: &Receiver<Event>, busy: bool) -> VmStatus {
        if machine.process.is_alive() {
            let meeting = self.meeting.try_lock();
            if busy || meeting.is_none() {
                return self.known.lock().status;
            }
            if let Ok(machine) = machine::reopen(&machine.record(), &self.dir) {
                tracing::info!(vm = self.name, "met its QEMU again");
                self.make_up(&machine);
                let mut known = self.known.lock();
                known.qemu = Qemu::alive(machine);
                return known.status;
            }
            // It may be ending right now. If it is not, the record still finds
            // it, at the next look.
            if machine.process.is_alive() {
                return self.known.lock().status;
            }
        }
        let why = self.epitaph(machine, ends);
        tracing::info!(vm = self.name, why, "its QEMU is gone");
        let mut known = self.known.lock();
        known.status = VmStatus::Dead;
        known.qemu = Qemu::Dead {
            pid: machine.process.pid(),
            version: machine.version.clone(),
            argv: machine.argv.clone(),
            attached: machine.is_attached(),
            why,
        };
        VmStatus::Dead
    }

    fn epitaph(&self, machine: &Machine, ends: &Receiver<Event>) -> String {
        let why = match ends.try_iter().last().as_ref().and_then(|e| e.data["reason"].as_str()) {
            Some("guest-shutdown") => "the guest shut down",
            Some("guest-reset") => "the guest rebooted, and QEMU was told not to",
            Some("guest-panic") => "the guest's kernel crashed",
            Some("host-signal") => "QEMU was ended by a signal",
            Some("host-qmp-quit") => "QEMU was told to quit",
            _ => "QEMU ended without a word",
        };
        with_log(why, machine.log().unwrap_or(&self.dir.join("qemu.log")))
    }

    /// What the API shows.
    pub(crate) fn summary(&self, place: Place, migration: Option<String>) -> VmSummary {
        let status = self.status(migration.is_some() || place != Place::Here);
        let known = self.known.lock();
        let mut summary = match &known.qemu {
            Qemu::Alive { machine, .. } => VmSummary {
                name: self.name.clone(),
                status,
                pid: machine.process.pid(),
                qemu: machine.version.clone(),
                ram_bytes: self.ram_bytes,
                attached: machine.is_attached(),
                migration,
                problem: [&known.doubt, &known.stopped_by, &known.stuck_by]
                    .into_iter()
                    .find_map(Clone::clone),
                share_domain: self.share_domain.clone(),
                content: None,
                helper: None,
                argv: machine.argv.clone(),
            },
            Qemu::Dead { pid, version, argv, attached, why } => VmSummary {
                name: self.name.clone(),
                status: VmStatus::Dead,
                pid: *pid,
                qemu: version.clone(),
                ram_bytes: self.ram_bytes,
                attached: *attached,
                migration,
                problem: Some(known.doubt.clone().unwrap_or_else(|| why.clone())),
                share_domain: self.share_domain.clone(),
                content: None,
                helper: None,
                argv: argv.clone(),
            },
        };
        match place {
            Place::Arriving if summary.status != VmStatus::Dead => {
                summary.status = VmStatus::Arriving;
            }
            Place::Unsettled => summary.status = VmStatus::InDoubt,
            Place::Arriving | Place::Here => {}
        }
        summary
    }
}

/// Why, and what QEMU wrote last.
pub(crate) fn with_log(why: &str, log: &Path) -> String {
    match log_tail(log, 0) {
        Some(tail) => format!("{why}; the end of {}:\n{tail}", log.display()),
        None => why.to_owned(),
    }
}

/// A QEMU of a directory that has no record of it: started, and the agent
/// ended before it could note it down.
pub(crate) fn unrecorded(dir: &Path) -> Result<Machine, StartError> {
    machine::attach(&dir.join("qmp"), dir)
}
