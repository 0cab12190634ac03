//! The destination's side of QEMU's migration: wait, load, run.

use std::fmt::Display;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use parking_lot::Mutex;
use serde_json::json;

use crate::launch::log_tail;
use crate::machine::Machine;
use crate::outgoing::{Progress, Ram, Settings, Status};
use crate::qmp::{Event, Qmp, QmpError, RunState};

/// How long a query may take while QEMU loads device state under its big lock.
const ASK: Duration = Duration::from_secs(1);
/// How long QEMU may take to report why its stream has broken.
const EXPLAIN: Duration = Duration::from_secs(2);
/// From this version on, a QEMU that can't load the VM stays and reports why.
const STAYS_SINCE: (u32, u32, u32) = (9, 1, 0);
/// QEMU's name for the connection until it uses it.
const FD_NAME: &str = "droveway-incoming";

/// QEMU's migration to this host.
#[derive(Debug)]
pub struct Incoming {
    qmp: Arc<Qmp>,
    settings: Mutex<Settings>,
    events: Receiver<Event>,
    log: Option<(PathBuf, u64)>,
}

impl Incoming {
    /// Sets up a QEMU that waits with `-incoming defer -S`. Its log explains
    /// its end: a QEMU before 9.1 that can't load a VM writes the reason there, and
    /// exits.
    ///
    /// # Errors
    /// If it doesn't wait for a migration, or refuses a setting.
    pub fn of(machine: &Machine) -> Result<Self, QmpError> {
        Self::with(machine, Ram::Sent)
    }

    /// As [`Incoming::of`], for a QEMU that has mapped the other one's shared files, which its
    /// migration leaves out.
    ///
    /// # Errors
    /// As [`Incoming::of`].
    pub fn mapped(machine: &Machine) -> Result<Self, QmpError> {
        Self::with(machine, Ram::HandedOver)
    }

    fn with(machine: &Machine, ram: Ram) -> Result<Self, QmpError> {
        let qmp = Arc::clone(&machine.qmp);
        let state = qmp.run_state()?;
        if state != RunState::InMigrate {
            return Err(QmpError::Migration(format!(
                "the destination's QEMU is {state} and doesn't wait for a VM: start it with \
                 -incoming defer -S"
            )));
        }
        let events = qmp.events_named(&["MIGRATION", "STOP", "RESUME"]);
        let mut settings = Settings::of(&qmp)?;
        let outcome = set_up(machine, &mut settings, ram);
        let log = machine.log().map(|path| {
            let length = std::fs::metadata(path).map_or(0, |file| file.len());
            (path.to_owned(), length)
        });
        // On an error, dropping `incoming` restores what was already changed.
        let incoming = Self { qmp, settings: Mutex::new(settings), events, log };
        outcome.map(|()| incoming)
    }

    /// Passes one end of a connection to QEMU, which loads what is written to the other.
    /// So there is no path that QEMU would have to be able to open.
    ///
    /// # Errors
    /// If QEMU refuses, or the system has no sockets left.
    pub fn open(&self) -> Result<UnixStream, QmpError> {
        let (ours, theirs) = UnixStream::pair()
            .map_err(|error| QmpError::Migration(format!("no socket to it: {error}")))?;
        self.qmp.execute_with(theirs.as_fd(), "getfd", json!({ "fdname": FD_NAME }))?;
        let mut arguments = json!({ "uri": format!("fd:{FD_NAME}") });
        if self.qmp.version() >= STAYS_SINCE {
            arguments["exit-on-error"] = false.into();
        }
        self.qmp.execute("migrate-incoming", arguments)?;
        Ok(ours)
    }

    /// Blocks until the VM is loaded and paused.
    ///
    /// # Errors
    /// With QEMU's own message if it can't load the VM; after `timeout`.
    pub fn wait_loaded(&self, timeout: Duration) -> Result<(), QmpError> {
        let deadline = Instant::now() + timeout;
        loop {
            match Progress::query(&self.qmp, ASK) {
                Ok(Progress { status: Status::Completed, .. }) => break,
                Ok(Progress { status: Status::Failed | Status::Cancelled, error, .. }) => {
                    return Err(self.failed(error));
                }
                Ok(_) | Err(QmpError::Timeout { .. }) => {}
                Err(QmpError::Closed) => return Err(self.died()),
                Err(error) => return Err(error),
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(cannot_load(&format!("not loaded after {} s", timeout.as_secs())));
            }
            // An event means that there is something to query. So does the end
            // of the connection, which the next query notices.
            let _ = self.events.recv_timeout(left.min(ASK));
        }
        self.wait_paused(deadline)
    }

    /// Waits for the VM's final state, which QEMU reaches a moment after `completed`.
    fn wait_paused(&self, deadline: Instant) -> Result<(), QmpError> {
        loop {
            match self.qmp.run_state()? {
                RunState::InMigrate if Instant::now() < deadline => {
                    // There is no event for it, and the VM stands still meanwhile.
                    let _ = self.events.recv_timeout(Duration::from_millis(1));
                }
                RunState::InMigrate => return Err(cannot_load("it stays in `inmigrate`")),
                RunState::Running => {
                    return Err(cannot_load(
                        "it started the VM by itself: start the destination's QEMU with -S",
                    ));
                }
                _ => return Ok(()),
            }
        }
    }

    /// QEMU's own message on a stream that broke, if it has one, else `error`.
    #[must_use]
    pub fn explain(&self, error: &impl Display) -> String {
        let deadline = Instant::now() + EXPLAIN;
        loop {
            match Progress::query(&self.qmp, ASK) {
                Ok(Progress { status: Status::Failed, error, .. }) => {
                    return self.failed(error).to_string();
                }
                Err(QmpError::Closed) => return self.died().to_string(),
                _ => {}
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return error.to_string();
            }
            let _ = self.events.recv_timeout(left);
        }
    }

    /// Runs the VM. QEMU activates and locks its disks here.
    ///
    /// # Errors
    /// If QEMU can't; then the VM never ran here.
    pub fn cont(&self) -> Result<(), QmpError> {
        self.qmp.execute_within("cont", json!({}), Duration::from_secs(30)).map(drop)
    }

    /// Announces the VM to the network's switches as often as its owner has set, and restores
    /// QEMU's settings. The VM runs even if that fails.
    pub fn announce(&self) {
        self.settings.lock().announce(&self.qmp);
        self.restore();
    }

    /// Restores QEMU's settings, for a VM that stays paused.
    pub fn restore(&self) {
        self.settings.lock().restore(&self.qmp);
    }

    fn died(&self) -> QmpError {
        let output = self.written();
        cannot_load(&output.unwrap_or_else(|| "it ended while it loaded the VM".to_owned()))
    }

    /// QEMU's answer is a summary; the details are in its log.
    fn failed(&self, error: Option<String>) -> QmpError {
        let said = [error, self.written()];
        let said: Vec<String> = said.into_iter().flatten().collect();
        if said.is_empty() {
            return cannot_load("it gives no reason");
        }
        cannot_load(&said.join("; "))
    }

    /// What it wrote since it was set up, in one line.
    fn written(&self) -> Option<String> {
        let (path, from) = self.log.as_ref()?;
        let output = log_tail(path, *from)?;
        Some(output.lines().map(str::trim).collect::<Vec<_>>().join("; "))
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        self.restore();
    }
}

fn set_up(machine: &Machine, settings: &mut Settings, ram: Ram) -> Result<(), QmpError> {
    ram.check(settings)?;
    // Disks are activated and locked when the VM runs, not when it is loaded: a
    // source that has to resume must find them unlocked.
    let wanted =
        |name: &str| matches!(name, "events" | "late-block-activate") || ram.switches_on(name);
    // One announcement, which leaves when the VM runs: until then, QEMU keeps what its network
    // cards send. With none, QEMU would remove the timer of each virtio card whose guest announces
    // itself, and crash when the guest resets the card, as a reboot does.
    let parameters = [
        ("announce-rounds", 1.into()),
        ("tls-creds", "".into()),
        ("tls-hostname", "".into()),
        ("tls-authz", "".into()),
    ];
    settings.change(machine, wanted, &parameters)
}

fn cannot_load(why: &str) -> QmpError {
    QmpError::Migration(format!("the destination's QEMU can't load the VM: {why}"))
}
