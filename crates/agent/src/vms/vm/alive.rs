//! A VM's QEMU: whether it lives, and what it reports.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use api::VmStatus;
use qemu::launch::log_tail;
use qemu::machine::{self, Machine};
use qemu::outgoing;
use qemu::process::Process;
use qemu::qmp::QmpError;
use serde_json::json;

use super::shut_down::{Ends, ShutDown, WITHOUT_A_WORD};
use super::{Known, Vm};

/// A QEMU that moves its VM may hold its main lock for longer.
///
/// A list of VMs does not wait for that.
const STATUS_WAIT: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(super) enum Qemu {
    Alive { machine: Arc<Machine>, ends: Ends },
    Dead { pid: u32, version: String, argv: Vec<String>, attached: bool, why: String },
}

impl Qemu {
    pub(super) fn alive(machine: impl Into<Arc<Machine>>) -> Self {
        let machine = machine.into();
        let ends = Ends::of(&machine.qmp);
        Self::Alive { machine, ends }
    }
}

impl Vm {
    /// Its QEMU, if it lives.
    pub(crate) fn machine(&self) -> Option<Arc<Machine>> {
        match &self.known.lock().qemu {
            Qemu::Alive { machine, .. } => Some(Arc::clone(machine)),
            Qemu::Dead { .. } => None,
        }
    }

    /// Whether its QEMU is this one, as far as that is known.
    pub(crate) fn may_be_of(&self, qemu: &machine::Record) -> bool {
        match &self.known.lock().qemu {
            Qemu::Alive { machine, .. } => machine.record().is_of(qemu),
            Qemu::Dead { pid, .. } => *pid == 0 || *pid == qemu.pid(),
        }
    }

    /// Whether it is known which process its QEMU is, or was.
    pub(crate) fn knows_its_qemu(&self) -> bool {
        !matches!(self.known.lock().qemu, Qemu::Dead { pid: 0, .. })
    }

    /// Connects the VM to its QEMU, which answers after all.
    pub(crate) fn met(&self, machine: Machine) {
        if self.ram_bytes() == 0 {
            self.ram_bytes.store(machine.qmp.ram_bytes().unwrap_or(0), Relaxed);
        }
        self.known.lock().qemu = Qemu::alive(machine);
    }

    /// Ends a migration that a crashed agent left behind, and restores QEMU's settings.
    ///
    /// If that fails, the reason becomes the VM's problem.
    pub(crate) fn make_up(&self, machine: &Machine) {
        let left = match outgoing::make_up(machine) {
            Ok(false) => None,
            Ok(true) => {
                tracing::info!(vm = self.name, "ended a migration that was left behind");
                None
            }
            Err(error) => Some(error),
        };
        self.stuck_by(left);
    }

    /// Notes what of an earlier migration is left in its QEMU; `None` if nothing is.
    pub(crate) fn stuck_by(&self, left: Option<QmpError>) {
        let stuck_by = left.map(|error| {
            tracing::warn!(vm = self.name, %error, "a migration is left behind");
            format!(
                "QEMU still has parts of a migration that an earlier run of the agent started, and \
                 its settings: {error}. The VM keeps running; it can be moved once that is fixed, \
                 or its QEMU was restarted"
            )
        });
        self.known.lock().stuck_by = stuck_by;
    }

    /// Notes that its QEMU has reported it as running.
    pub(crate) fn runs(&self) {
        self.known.lock().status = VmStatus::Running;
    }

    /// Asks QEMU for the VM's status.
    ///
    /// If the VM is `busy` with a migration, a lost connection is left to that migration.
    pub(crate) fn status(&self, busy: bool) -> VmStatus {
        let Some(machine) = self.machine() else {
            return VmStatus::Dead;
        };
        if machine.qmp.is_closed() || !machine.process.is_alive() {
            return self.look_again(&machine, busy);
        }
        let asked = Instant::now();
        let answer = machine.qmp.execute_within("query-status", json!({}), STATUS_WAIT);
        if answer.is_ok() {
            self.measure(&machine);
        }
        let mut known = self.known.lock();
        known.receive();
        match answer {
            Ok(status) => {
                let status = match status["status"].as_str() {
                    Some("running" | "suspended") => VmStatus::Running,
                    _ => VmStatus::Paused,
                };
                known.answered(asked, status);
            }
            Err(QmpError::Closed) => {
                drop(known);
                return self.look_again(&machine, busy);
            }
            // QEMU is busy: its last answer still holds.
            Err(_) => {
                if let Some(shut_down) = known.shut_down {
                    self.hangs(&mut known, shut_down, &machine.process);
                }
            }
        }
        known.status
    }

    /// Asks QEMU how much memory the VM has now.
    ///
    /// Memory may have been plugged since QEMU was last queried. And a QEMU that waits for its VM
    /// has none of a virtio-mem device plugged until it has loaded the VM.
    fn measure(&self, machine: &Machine) {
        if let Ok(bytes) = machine.qmp.ram_bytes_within(STATUS_WAIT) {
            self.ram_bytes.store(bytes, Relaxed);
        }
    }

    /// Handles a QEMU that neither answers nor ends after its guest has shut down.
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

    /// Finds out whether QEMU has ended, or only the connection to it.
    fn look_again(&self, machine: &Machine, busy: bool) -> VmStatus {
        if machine.process.is_alive() {
            let meeting = self.meeting.try_lock();
            if busy || meeting.is_none() {
                return self.known.lock().status;
            }
            if let Ok(machine) = machine.reopened() {
                tracing::info!(vm = self.name, "connected to its QEMU again");
                self.make_up(&machine);
                let mut known = self.known.lock();
                known.qemu = Qemu::alive(machine);
                return known.status;
            }
            // It may be ending right now. If it is not, the next query finds it by its record.
            if machine.process.is_alive() {
                return self.known.lock().status;
            }
        }
        machine.clear_after_exit();
        let why = self.epitaph(machine);
        tracing::info!(vm = self.name, why, "its QEMU has exited");
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

    fn epitaph(&self, machine: &Machine) -> String {
        let mut known = self.known.lock();
        known.receive();
        let why = known.shut_down.map_or(WITHOUT_A_WORD, |shut_down| shut_down.how);
        with_log(why, machine.log().unwrap_or(&self.dir.join("qemu.log")))
    }

    /// Closes the connection to its QEMU, which keeps running, so that the agent can reconnect.
    pub(crate) fn let_go(&self) {
        let mut known = self.known.lock();
        if let Qemu::Alive { machine, .. } = &known.qemu {
            let (pid, version) = (machine.process.pid(), machine.version.clone());
            let (argv, attached) = (machine.argv.clone(), machine.is_attached());
            let why = "connecting to its QEMU again".to_owned();
            known.qemu = Qemu::Dead { pid, version, argv, attached, why };
        }
    }
}

/// The reason, followed by the end of QEMU's log.
pub(crate) fn with_log(why: &str, log: &Path) -> String {
    match log_tail(log, 0) {
        Some(tail) => format!("{why}; the end of {}:\n{tail}", log.display()),
        None => why.to_owned(),
    }
}
