//! State shared by all phases of one migration.

use std::sync::Arc;
use std::time::{Duration, Instant};

use api::MigrateRequest;
use crossbeam_channel::{Receiver, Sender, unbounded};
use data_threads::DataThreads;
use qemu::qmp::Event;
use switchover::Doubt;

use super::blackout::Blackout;
use super::bounds::bounded_threads;
use super::notice::Notice;
use crate::error::MigrationError;
use crate::host::{Local, Peer, SourceVm};
use crate::report_builder::ReportBuilder;

/// The QEMU events that a migration follows. Others, such as disk errors, may arrive by
/// the thousand.
const FOLLOWED: [&str; 4] = ["STOP", "RESUME", "MIGRATION", "SHUTDOWN"];

/// State shared by all phases. State of later phases is in their types.
pub(crate) struct Context<'m> {
    pub(crate) local: &'m Local,
    pub(crate) peer: &'m Peer,
    pub(crate) vm: SourceVm,
    pub(crate) request: &'m MigrateRequest,
    pub(crate) report_builder: Arc<ReportBuilder>,
    /// Used by the migration's threads.
    pub(crate) notices: Sender<Notice>,
    /// Used by the leading thread.
    pub(crate) noticed: Receiver<Notice>,
    pub(crate) qemu_events: Receiver<Event>,
    /// The data threads at this end.
    pub(crate) threads: Arc<DataThreads>,
    /// Whether the VM runs, as QEMU last reported; false before the first query.
    pub(crate) was_running: bool,
    /// It is still unknown why QEMU last stopped the VM.
    pub(crate) stop_unclear: bool,
    pub(crate) blackout: Blackout,
    /// `--timeout`.
    pub(crate) deadline: Option<Instant>,
    /// `go` was sent.
    pub(crate) committed: bool,
    /// QEMU has ended after it had released the VM, before `go` was sent.
    pub(crate) qemu_exited: bool,
}

impl<'m> Context<'m> {
    pub(crate) fn new(
        local: &'m Local,
        peer: &'m Peer,
        vm: SourceVm,
        request: &'m MigrateRequest,
        report_builder: Arc<ReportBuilder>,
    ) -> Self {
        let qemu_events = vm.machine.qmp.events_named(&FOLLOWED);
        let (notices, noticed) = unbounded();
        let threads = bounded_threads(&report_builder, &notices);
        Self {
            local,
            peer,
            vm,
            request,
            report_builder,
            notices,
            noticed,
            qemu_events,
            threads,
            was_running: false,
            stop_unclear: false,
            blackout: Blackout::default(),
            deadline: request
                .timeout_s
                .and_then(|s| Instant::now().checked_add(Duration::from_secs(s))),
            committed: false,
            qemu_exited: false,
        }
    }

    /// Whether the operator or a limit may still end the migration: the VM would go on here.
    pub(crate) fn may_end(&self) -> bool {
        !self.committed && !self.qemu_exited
    }

    /// Fails if the operator has ended the migration, or its time has ended: for what may take long
    /// while the leading thread waits for nothing else.
    pub(crate) fn check_wanted(&self) -> Result<(), MigrationError> {
        if !self.report_builder.watch().cancelled().is_empty() {
            return Err(MigrationError::Cancelled);
        }
        match self.deadline {
            Some(deadline) if Instant::now() >= deadline => Err(self.too_long()),
            _ => Ok(()),
        }
    }

    /// The error for a migration whose `--timeout` has passed.
    pub(crate) fn too_long(&self) -> MigrationError {
        let allowed = Duration::from_secs(self.request.timeout_s.unwrap_or_default());
        MigrationError::TooLong { allowed }
    }

    pub(crate) fn lost(&self, why: impl std::fmt::Display) -> MigrationError {
        MigrationError::lost(&self.peer.name, why)
    }

    /// Whether the VM gets another QEMU on this host.
    pub(crate) fn is_within_host(&self) -> bool {
        self.local.security.is_within_process()
    }

    /// What is in doubt and what to do, for the operator.
    pub(crate) fn advice(&self, doubt: &Doubt) -> String {
        match self.is_within_host() {
            true => doubt.advice_within_host(&self.vm.name),
            false => doubt.advice(&self.vm.name, &self.peer.name),
        }
    }
}

/// An error of this host.
pub(crate) fn local(what: &'static str, source: std::io::Error) -> MigrationError {
    MigrationError::Local { what, source }
}

pub(crate) fn no_thread(source: std::io::Error) -> MigrationError {
    local("starting a thread", source)
}
