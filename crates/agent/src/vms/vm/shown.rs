//! What the API shows of a VM.

use std::time::Duration;

use api::{GuestHelper, VmStatus, VmSummary};
use cachemap::Clears;
use qemu::command_line::CommandLine;
use qemu::guest_port::{GuestError, HasGuest};
use qemu::machine;

use super::alive::Qemu;
use super::{Presence, Vm};

/// For QEMU to report the helper's port, and for other clients to leave it.
const PORT_WAIT: Duration = Duration::from_millis(500);
/// For the helper's answer; it is immediate unless its guest has no CPU for it.
const HELPER_WAIT: Duration = Duration::from_secs(1);

impl Vm {
    /// Greets the helper in its guest; takes as long as the guest needs, up to the two limits.
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
                // The reason was found when it was started.
                let mut notes = machine.notes.iter();
                let noted = notes.find(|note| note.starts_with(machine::NO_GUEST_PORT));
                GuestHelper::NoPort { why: noted.cloned().unwrap_or_else(|| why.to_string()) }
            }
            Err(why) => GuestHelper::Silent { why: why.to_string() },
        })
    }

    /// What the API shows.
    pub(crate) fn summary(&self, place: Presence, migration: Option<String>) -> VmSummary {
        let status = self.status(migration.is_some() || place != Presence::Here);
        // Not under the lock: a file system that hangs holds this up.
        let machine = self.machine();
        let program_replaced = machine.is_some_and(|machine| machine.runs_replaced_program());
        let known = self.known.lock();
        let dead = [&known.doubt, &known.unreadable, &known.unnoted, &known.ran_early];
        let (status, pid, qemu, attached, argv, problem) = match &known.qemu {
            Qemu::Alive { machine, .. } => {
                let (pid, attached) = (machine.process.pid(), machine.is_attached());
                (status, pid, &machine.version, attached, &machine.argv, known.problem())
            }
            Qemu::Dead { pid, version, argv, attached, why } => {
                let problem = dead.into_iter().find_map(Clone::clone);
                let problem = problem.or_else(|| Some(why.clone()));
                (VmStatus::Dead, *pid, version, *attached, argv, problem)
            }
        };
        let mut summary = VmSummary {
            name: self.name.clone(),
            status,
            pid,
            qemu: qemu.clone(),
            program_replaced,
            ram_bytes: self.ram_bytes(),
            free_page_hint: hints(argv),
            attached,
            migration,
            problem,
            left_over: known.left_over.clone(),
            share_domain: self.share_domain.clone(),
            content: None,
            helper: None,
            argv: argv.clone(),
        };
        match place {
            Presence::Arriving if summary.status != VmStatus::Dead => {
                summary.status = VmStatus::Arriving;
            }
            Presence::Unsettled => summary.status = VmStatus::InDoubt,
            Presence::Here if known.unreadable.is_some() => summary.status = VmStatus::Unreadable,
            Presence::Arriving | Presence::Here => {}
        }
        summary
    }
}

/// Whether the VM has free-page hinting.
fn hints(argv: &[String]) -> bool {
    CommandLine::parse(argv).is_ok_and(|line| line.has_free_page_hint())
}
