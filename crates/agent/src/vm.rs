//! One VM of this host: its QEMU, and its record on disk.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use api::{GuestHelper, VmStatus, VmSummary};
use cachemap::Clears;
use crossbeam_channel::Receiver;
use parking_lot::Mutex;
use qemu::command_line::CommandLine;
use qemu::guest_port::{GuestError, HasGuest};
use qemu::launch::log_tail;
use qemu::machine::{self, Machine, StartError};
use qemu::outgoing;
use qemu::process::Process;
use qemu::qmp::{Event, QmpError};
use serde_json::json;

use crate::record::{self, Record, Standing};

/// A QEMU that moves its VM may hold its main lock for a while; a list of VMs
/// does not wait for it.
const STATUS_WAIT: Duration = Duration::from_millis(500);
/// Until QEMU has said where the helper's port is, and nobody else speaks there.
const PORT_WAIT: Duration = Duration::from_millis(500);
/// A helper answers at once, unless its guest has no CPU for it.
const HELPER_WAIT: Duration = Duration::from_secs(1);

/// A QEMU that ends has closed its disks and is gone by then, or is at it still, which
/// a second request to end does not disturb.
const SHUT_DOWN_WAIT: Duration = Duration::from_secs(2);
const WITHOUT_A_WORD: &str = "QEMU ended without a word";

/// Where a VM is, for who lists it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Here,
    Arriving,
    /// Its switchover is not over, and nobody moves it any more.
    Unsettled,
}

/// One VM.
#[derive(Debug)]
pub(crate) struct Vm {
    pub(crate) name: String,
    pub(crate) dir: PathBuf,
    /// With which VMs it shares content; empty is the cluster's own domain.
    pub(crate) share_domain: String,
    /// 0 until its QEMU was asked.
    ram_bytes: AtomicU64,
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
    /// How its guest ended, if QEMU has said so and not ended yet.
    shut_down: Option<ShutDown>,
    /// What keeps it from moving, though it runs.
    stuck_by: Option<String>,
    /// What can't be known or done about its last switchover.
    doubt: Option<String>,
    /// Why its record doesn't say what it is, and what to do.
    unreadable: Option<String>,
    /// Why its record doesn't say yet that it is here.
    unnoted: Option<String>,
}

impl Known {
    fn new(qemu: Qemu, status: VmStatus) -> Self {
        Self {
            qemu,
            status,
            stopped_by: None,
            shut_down: None,
            stuck_by: None,
            doubt: None,
            unreadable: None,
            unnoted: None,
        }
    }
}

impl Known {
    /// What QEMU has said of its guest's end.
    fn hear(&mut self, ends: &Receiver<Event>) {
        for event in ends.try_iter() {
            self.shut_down = ShutDown::after(self.shut_down, &event);
        }
    }

    /// What an operator should know of it, the worst only.
    fn problem(&self) -> Option<String> {
        let all = [&self.doubt, &self.unreadable, &self.unnoted, &self.stopped_by, &self.stuck_by];
        all.into_iter().find_map(Clone::clone)
    }
}

/// The end of a guest.
#[derive(Clone, Copy, Debug)]
struct ShutDown {
    how: &'static str,
    /// When that was first known.
    at: Instant,
    /// QEMU keeps the VM, stopped, as with `-no-shutdown`. Otherwise it ends.
    is_kept: bool,
}

impl ShutDown {
    fn after(before: Option<Self>, event: &Event) -> Option<Self> {
        if event.name == "STOP" {
            return before.map(|shut_down| Self { is_kept: true, ..shut_down });
        }
        let how = match event.data["reason"].as_str() {
            Some("guest-shutdown") => "the guest shut down",
            Some("guest-reset") => "the guest rebooted, and QEMU was told not to",
            Some("guest-panic") => "the guest's kernel crashed",
            Some("host-signal") => "QEMU was ended by a signal",
            Some("host-qmp-quit") => "QEMU was told to quit",
            _ => WITHOUT_A_WORD,
        };
        Some(Self { how, at: Instant::now(), is_kept: false })
    }

    /// A QEMU that ends and does not answer may wait for ever for its QMP monitor,
    /// after it has closed all disks (10.0 can, if it is asked something
    /// just then). A signal that it handles wakes it up.
    fn needs_a_signal(self) -> bool {
        !self.is_kept && self.at.elapsed() > SHUT_DOWN_WAIT
    }
}

#[derive(Clone, Debug)]
enum Qemu {
    Alive { machine: Arc<Machine>, ends: Receiver<Event> },
    Dead { pid: u32, version: String, argv: Vec<String>, attached: bool, why: String },
}

impl Qemu {
    fn alive(machine: Machine) -> Self {
        let ends = machine.qmp.events_named(&["SHUTDOWN", "STOP"]);
        Self::Alive { machine: Arc::new(machine), ends }
    }
}

impl Vm {
    /// A VM whose QEMU answers.
    pub(crate) fn new(name: &str, dir: PathBuf, machine: Machine, ram_bytes: u64) -> Self {
        let qemu = Qemu::alive(machine);
        Self::of(name, dir, "", ram_bytes, Known::new(qemu, VmStatus::Paused))
    }

    fn of(name: &str, dir: PathBuf, share_domain: &str, ram_bytes: u64, known: Known) -> Self {
        Self {
            name: name.to_owned(),
            dir,
            share_domain: share_domain.to_owned(),
            ram_bytes: ram_bytes.into(),
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
        Self::of(name, dir, &record.share_domain, record.ram_bytes, known)
    }

    /// A VM whose record can't be read, or doesn't say what is to become of its
    /// QEMU: that may run, and nothing is done with it. With the record, if there
    /// is one; `why` also says what to do.
    pub(crate) fn unreadable(
        name: &str,
        dir: PathBuf,
        record: Option<Record>,
        why: String,
    ) -> Self {
        let record = record.unwrap_or_else(|| {
            // Which domain it is of is not known: it shares with no other VM.
            let alone: String =
                format!("unreadable.{name}").chars().take(api::Sharing::DOMAIN_MAX).collect();
            Record::new(Standing::Here, None, 0, "", &alone)
        });
        let vm = Self::lost(name, dir, record, why.clone());
        vm.known.lock().unreadable = Some(why);
        vm
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
        let (ram_bytes, domain) = (self.ram_bytes(), self.share_domain.as_str());
        Record::new(standing, Some(machine.record()), ram_bytes, &machine.version, domain)
            .write(&self.dir)?;
        let mut known = self.known.lock();
        (known.unreadable, known.unnoted) = (None, None);
        Ok(())
    }

    /// Notes on disk that it is here. Until that is done an operator sees why not. A
    /// record that can't be read is kept beside the new one.
    pub(crate) fn save_here(&self) -> io::Result<()> {
        let aside = match self.unreadable_why() {
            Some(_) => record::set_aside(&self.dir),
            None => Ok(()),
        };
        let saved = match aside.and_then(|()| self.save(Standing::Here)) {
            // It was here, and died.
            Err(_) if self.machine().is_none() => self.save_dead(),
            saved => saved,
        };
        self.known.lock().unnoted = saved.as_ref().err().map(|error| {
            format!(
                "{} is here, and its record in {} can't be written ({error}): make room or mend \
                 the disk of the agent's state directory. The journal of its move stands in for \
                 the record until then; it is tried again",
                self.name,
                self.dir.display()
            )
        });
        saved
    }

    fn save_dead(&self) -> io::Result<()> {
        let mut record = Record::read(&self.dir).map_err(io::Error::other)?;
        record.standing = Standing::Here;
        record.write(&self.dir)
    }

    /// Whether it is here, and its record doesn't say so yet.
    pub(crate) fn is_unnoted(&self) -> bool {
        self.known.lock().unnoted.is_some()
    }

    /// Why its record doesn't say what it is, and what to do about that.
    pub(crate) fn unreadable_why(&self) -> Option<String> {
        self.known.lock().unreadable.clone()
    }

    pub(crate) fn ram_bytes(&self) -> u64 {
        self.ram_bytes.load(Relaxed)
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
        if self.ram_bytes() == 0 {
            self.ram_bytes.store(machine.qmp.ram_bytes().unwrap_or(0), Relaxed);
        }
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

    /// Its QEMU has said that it runs.
    pub(crate) fn runs(&self) {
        self.known.lock().status = VmStatus::Running;
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
        known.hear(&ends);
        match answer {
            Ok(status) => {
                known.status = match status["status"].as_str() {
                    Some("running" | "suspended") => VmStatus::Running,
                    _ => VmStatus::Paused,
                };
                if known.status == VmStatus::Running {
                    known.stopped_by = None;
                    known.shut_down = None;
                }
            }
            Err(QmpError::Closed) => {
                drop(known);
                return self.look_again(&machine, &ends, busy);
            }
            // It is busy: what it said last still holds.
            Err(_) => {
                if let Some(shut_down) = known.shut_down {
                    self.hangs(&mut known, shut_down, &machine.process);
                }
            }
        }
        known.status
    }

    /// Its guest has shut down, and QEMU neither answers nor ends.
    fn hangs(&self, known: &mut Known, shut_down: ShutDown, process: &Process) {
        let (name, pid) = (&self.name, process.pid());
        known.status = VmStatus::Paused;
        known.stopped_by = Some(format!(
            "{}, and QEMU (process {pid}) neither answers nor ends: `droveway stop --force {name}` \
             ends it",
            shut_down.how
        ));
        if shut_down.needs_a_signal() {
            let sent = process.terminate();
            tracing::info!(
                vm = name,
                pid,
                ?sent,
                "its guest has shut down, its QEMU hangs: SIGTERM"
            );
        }
    }

    /// Asks the helper in its guest for its name; takes as long as the guest lets
    /// it, with a bound.
    pub(crate) fn helper(&self) -> Option<GuestHelper> {
        let machine = self.machine()?;
        let port = machine.open_guest_port(PORT_WAIT);
        Some(match port.and_then(|port| port.greet(HELPER_WAIT)) {
            Ok(greeting) => GuestHelper::Answers {
                version: greeting.program,
                clears_memory: match greeting.clears {
                    Clears::Unknown => None,
                    Clears::No => Some(false),
                    Clears::Yes => Some(true),
                },
            },
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
                tracing::info!(vm = self.name, "connected to its QEMU again");
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
        let mut known = self.known.lock();
        known.hear(ends);
        let why = known.shut_down.map_or(WITHOUT_A_WORD, |shut_down| shut_down.how);
        with_log(why, machine.log().unwrap_or(&self.dir.join("qemu.log")))
    }

    /// Lets go of its QEMU, which goes on, so that it can be met anew.
    pub(crate) fn let_go(&self) {
        let mut known = self.known.lock();
        if let Qemu::Alive { machine, .. } = &known.qemu {
            let (pid, version) = (machine.process.pid(), machine.version.clone());
            let (argv, attached) = (machine.argv.clone(), machine.is_attached());
            let why = "connecting to its QEMU again".to_owned();
            known.qemu = Qemu::Dead { pid, version, argv, attached, why };
        }
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
                ram_bytes: self.ram_bytes(),
                free_page_hint: hints(&machine.argv),
                attached: machine.is_attached(),
                migration,
                problem: known.problem(),
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
                ram_bytes: self.ram_bytes(),
                free_page_hint: hints(argv),
                attached: *attached,
                migration,
                problem: [&known.doubt, &known.unreadable, &known.unnoted]
                    .into_iter()
                    .find_map(Clone::clone)
                    .or_else(|| Some(why.clone())),
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
            Place::Here if known.unreadable.is_some() => summary.status = VmStatus::Unreadable,
            Place::Arriving | Place::Here => {}
        }
        summary
    }
}

/// Whether the guest says which of its memory is free.
fn hints(argv: &[String]) -> bool {
    CommandLine::parse(argv).is_ok_and(|line| line.has_free_page_hint())
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

#[cfg(test)]
mod tests {
    use super::*;

    fn event(name: &str, data: serde_json::Value) -> Event {
        Event { name: name.to_owned(), data, at: Instant::now(), happened: None }
    }

    #[test]
    fn only_a_qemu_that_ends_is_sent_a_signal() {
        let shutdown = event("SHUTDOWN", json!({ "guest": true, "reason": "guest-shutdown" }));
        let stop = event("STOP", json!({}));
        assert!(ShutDown::after(None, &stop).is_none(), "its owner stopped it");
        let ends = ShutDown::after(None, &shutdown).unwrap();
        assert!(!ends.needs_a_signal(), "it has just begun to end");
        let long_ago =
            ShutDown { at: Instant::now().checked_sub(SHUT_DOWN_WAIT * 2).unwrap(), ..ends };
        assert!(long_ago.needs_a_signal());
        let kept = ShutDown::after(Some(long_ago), &stop).unwrap();
        assert!(!kept.needs_a_signal(), "it was told to keep it");
        assert_eq!(kept.how, "the guest shut down");
    }
}
