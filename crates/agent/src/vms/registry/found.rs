//! VMs that an earlier run of the agent left: reconnected to, or cleaned up.
//!
//! A QEMU is ended, and a VM's directory or images are removed, only if a valid record says
//! that this QEMU was never to run. Every other VM is left alone, and shown with what the
//! operator can do.

mod next;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use qemu::machine::{self, Machine, StartError};
use qemu::process::ProcessError;
use qemu::qmp::{QmpError, RunState};

use super::images;
use crate::parallel::by_threads;
use crate::state::StateDir;
use crate::vms::record::{self, Record, RecordError, Standing};
use crate::vms::vm::{Vm, with_log};

/// VMs that are searched for in parallel: a QEMU that does not answer takes seconds, and a
/// host may have hundreds.
const FINDERS: usize = 8;

/// How long a QEMU may take to exit once it closes its connections. The kernel may have ended it
/// with the agent, as it does when memory runs out.
const DYING_MAX: Duration = Duration::from_secs(5);

/// Pauses between attempts to reach it.
const DYING_PAUSE: Duration = Duration::from_millis(50);

/// VMs whose switchover an earlier run of the agent left unfinished, each with its QEMU.
///
/// An entry without one matches any QEMU of that VM.
#[derive(Debug, Default)]
pub(crate) struct Held(pub(crate) Vec<(String, Option<machine::Record>)>);

impl Held {
    /// Whether that VM is among them, with this QEMU.
    pub(crate) fn holds(&self, name: &str, recorded: &machine::Record) -> bool {
        let is_it = |machine: &Option<machine::Record>| {
            machine.as_ref().is_none_or(|machine| machine.is_of(recorded))
        };
        self.0.iter().any(|(vm, machine)| vm == name && is_it(machine))
    }

    /// Whether a VM of that name is among them.
    pub(crate) fn names(&self, name: &str) -> bool {
        self.0.iter().any(|(vm, _)| vm == name)
    }
}

/// A VM that was found.
pub(super) struct FoundVm {
    pub(super) vm: Vm,
    pub(super) held: bool,
}

/// Every VM of the state directory.
pub(super) fn all(state: &StateDir, held: &Held) -> io::Result<Vec<FoundVm>> {
    let mut dirs = Vec::new();
    for entry in fs::read_dir(state.vms())? {
        let entry = entry?;
        let named =
            entry.file_name().into_string().ok().filter(|n| identity::check_name(n).is_ok());
        match named {
            Some(name) if entry.file_type()?.is_dir() => dirs.push((name, entry.path())),
            _ => {
                tracing::warn!(
                    path = %entry.path().display(),
                    "ignoring a file that is not a VM's directory"
                );
            }
        }
    }
    let found = by_threads(FINDERS, &dirs, |(name, dir)| one(name, dir.clone(), held));
    Ok(found.into_iter().flatten().collect())
}

fn one(name: &str, dir: PathBuf, held: &Held) -> Option<FoundVm> {
    let next = next::look(name, &dir, held);
    let found = by_record(name, dir, held, next.is_held)?;
    // The agent may have ended just after an upgrade. A QEMU that was left may have the VM: nothing
    // of it is removed.
    if !found.held
        && next.left_over.is_none()
        && let Some(machine) = found.vm.machine()
    {
        machine.take_over();
    }
    found.vm.note_left_over(next.left_over);
    Some(found)
}

/// With `is_next_held`, a journal decides about its next QEMU.
fn by_record(name: &str, dir: PathBuf, held: &Held, is_next_held: bool) -> Option<FoundVm> {
    let record = match Record::read(&dir) {
        Ok(record) => record,
        Err(RecordError::Missing(_)) if record::is_blank(&dir) && !held.names(name) => {
            record::remove_dir(&dir);
            return None;
        }
        // Its switchover continues by its journal, if it has one.
        Err(error) => {
            let found = left_alone(name, dir, None, &error.to_string());
            return Some(FoundVm { held: held.names(name), ..found });
        }
    };
    let Some(recorded) = &record.machine else { return unfinished(name, dir, record) };
    let reopened = reach(|| machine::reopen(recorded, &dir));
    if held.holds(name, recorded) || is_next_held {
        let vm = match reopened {
            Ok(machine) => known(name, dir, machine, &record),
            Err(error) => {
                let why = with_log(&error.to_string(), &record.home(&dir).join("qemu.log"));
                Vm::lost(name, dir, record, why)
            }
        };
        return Some(FoundVm { vm, held: true });
    }
    match (reopened, record.standing) {
        (Ok(machine), Standing::Arriving) => arrived(name, dir, machine, record),
        (Ok(machine), _) => Some(meet(name, dir, machine, &record)),
        (Err(StartError::Process(error @ ProcessError::Exited { .. })), _) => {
            Some(dead(name, dir, record, &error))
        }
        (Err(error), _) => {
            let why = format!("its QEMU, process {}, can't be reached: {error}", recorded.pid());
            Some(left_alone(name, dir, Some(record), &why))
        }
    }
}

/// Ends a QEMU whose start the agent did not finish.
///
/// The caller that requested it got an error, so it is not needed.
fn unfinished(name: &str, dir: PathBuf, record: Record) -> Option<FoundVm> {
    let why = match unrecorded(&dir) {
        Ok(None) => None,
        Ok(Some(machine)) => machine.quit().err().map(|error| error.to_string()),
        Err(error) => Some(error.to_string()),
    };
    match why {
        None => {
            tracing::info!(vm = name, "it was being started when the agent ended; removed");
            remove(&dir);
            None
        }
        Some(why) => {
            let why = format!("its QEMU was being started, and can't be ended: {why}");
            Some(left_alone(name, dir, Some(record), &why))
        }
    }
}

/// Connects to a QEMU that the agent started in `home` but did not record before it ended; none if
/// none lives there.
fn unrecorded(home: &Path) -> Result<Option<Machine>, StartError> {
    match reach(|| machine::attach(&home.join("qmp"), home)) {
        Ok(machine) => Ok(Some(machine)),
        Err(StartError::Qmp(QmpError::Connect { source, .. })) if nobody_listens(&source) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Repeats `connect` while a QEMU closes the connection: it is exiting, and soon has.
fn reach(connect: impl Fn() -> Result<Machine, StartError>) -> Result<Machine, StartError> {
    let until = Instant::now() + DYING_MAX;
    loop {
        match connect() {
            Err(StartError::Qmp(QmpError::Closed)) if Instant::now() < until => {
                thread::sleep(DYING_PAUSE);
            }
            result => return result,
        }
    }
}

/// Whether the error means that no QEMU lives at the socket: a live one listens there.
pub(super) fn nobody_listens(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

/// Handles a VM that its record says was arriving, without a journal of the outcome.
fn arrived(name: &str, dir: PathBuf, machine: Machine, record: Record) -> Option<FoundVm> {
    let why = match machine.qmp.run_state() {
        // The source gives a VM up once it is loaded, and this one never was.
        Ok(RunState::InMigrate) => match machine.quit() {
            Ok(()) => {
                tracing::info!(vm = name, "it was arriving when the agent ended; removed");
                remove(&dir);
                return None;
            }
            Err(error) => format!("it was arriving, and its QEMU can't be ended: {error}"),
        },
        Ok(state @ (RunState::Paused | RunState::Prelaunch)) => format!(
            "its record shows that it was arriving, and no journal shows whether its source \
             released it: its QEMU has it, {state}. First check whether it runs at the host that \
             it came from"
        ),
        // Only a VM that its source gave up runs.
        Ok(_) => return Some(meet(name, dir, machine, &record)),
        Err(error) => format!("it was arriving, and its QEMU doesn't report its state: {error}"),
    };
    drop(machine);
    Some(left_alone(name, dir, Some(record), &why))
}

fn known(name: &str, dir: PathBuf, machine: Machine, record: &Record) -> Vm {
    let ram_bytes = machine.qmp.ram_bytes().unwrap_or(record.ram_bytes);
    Vm::new(name, dir, machine, ram_bytes).within(&record.share_domain)
}

fn meet(name: &str, dir: PathBuf, machine: Machine, record: &Record) -> FoundVm {
    let vm = known(name, dir, machine, record);
    tracing::info!(vm = name, "found again");
    if let Some(machine) = vm.machine() {
        vm.make_up(&machine);
    }
    if record.standing != Standing::Here && vm.save_here().is_err() {
        tracing::warn!(vm = name, "its record can't be written");
    }
    FoundVm { vm, held: false }
}

/// A VM whose QEMU has ended.
///
/// Images that were made for its arrival stay: it may have run here, and they may be its only
/// disks.
fn dead(name: &str, dir: PathBuf, record: Record, gone: &ProcessError) -> FoundVm {
    let why = match record.standing {
        Standing::Arriving => format!(
            "{gone}; {name} was arriving when its record was written, and it is not known here \
             whether its source released it. Its images are kept"
        ),
        Standing::Starting | Standing::Here => gone.to_string(),
    };
    let why = with_log(&why, &record.home(&dir).join("qemu.log"));
    tracing::info!(vm = name, why, "not found again");
    FoundVm { vm: Vm::lost(name, dir, record, why), held: false }
}

fn left_alone(name: &str, dir: PathBuf, record: Option<Record>, why: &str) -> FoundVm {
    let advice = format!("{why}.\n{}", advice(name, &dir));
    tracing::error!(vm = name, why, "not touching a VM until the operator decides");
    FoundVm { vm: Vm::unreadable(name, dir, record, advice), held: false }
}

fn advice(name: &str, dir: &Path) -> String {
    let mut sockets = record::seats(dir).into_iter().map(|seat| seat.join("qmp"));
    let own = sockets.find(|socket| socket.exists());
    let socket = own.map_or_else(|| "SOCKET".to_owned(), |own| own.display().to_string());
    format!(
        "The agent does not touch {name} until you decide: a QEMU of it may run.\nIf one does, and \
         is to continue here: `droveway attach {name} --qmp {socket}` adopts it as it is, and \
         `droveway resolve {name} --here` has it run as well.\nIf none runs here: `droveway \
         resolve {name} --there` forgets it, and ends nothing."
    )
}

fn remove(dir: &Path) {
    images::remove(dir);
    record::remove_dir(dir);
}
