//! What all phases of one migration share.

use std::sync::Arc;
use std::time::{Duration, Instant};

use api::{Bounds, MigrateRequest, Priority};
use crossbeam_channel::{Receiver, Sender, unbounded};
use data_threads::{DataThreads, SchedParams};
use qemu::qmp::Event;

use super::blackout::Blackout;
use crate::error::MigrationError;
use crate::host::{Local, Peer, SourceVm};
use crate::report_builder::ReportBuilder;

/// Events of QEMU's that a migration goes by. Others, such as errors of a disk, may come
/// by thousands.
const FOLLOWED: [&str; 4] = ["STOP", "RESUME", "MIGRATION", "SHUTDOWN"];

/// Something that a thread of this migration tells the one that leads it.
pub(crate) enum Notice {
    /// QEMU has set its migration up, and begins with RAM.
    FirstPassBegins,
    /// RAM has ended; what follows is the tail of the non-RAM stream.
    TailBegins,
    /// The stream is passed through whole, and why.
    Unsplittable(String),
    /// All disks were copied once, and are kept up to date.
    DisksReady,
    /// The VM does not converge, however far it may be throttled.
    Stalled(String),
    /// The mirrors have written all of the stopped VM's disks; or one failed.
    Disks(Result<(), String>),
    /// A thread of this name that the migration needs has panicked.
    Panicked(String),
    /// The tap has read QEMU's stream to its end, and all pages are placed; or
    /// not.
    Delivered(Result<tap::Summary, MigrationError>),
}

/// What all phases share. What only later phases have is in their types.
pub(crate) struct Context<'m> {
    pub(crate) local: &'m Local,
    pub(crate) peer: &'m Peer,
    pub(crate) vm: SourceVm,
    pub(crate) request: &'m MigrateRequest,
    pub(crate) report_builder: Arc<ReportBuilder>,
    /// For the migration's threads.
    pub(crate) notices: Sender<Notice>,
    /// For the thread that leads.
    pub(crate) noticed: Receiver<Notice>,
    pub(crate) qemu_events: Receiver<Event>,
    /// The data threads at this end.
    pub(crate) threads: Arc<DataThreads>,
    /// Whether the VM runs, as QEMU said last; false until it was asked.
    pub(crate) was_running: bool,
    /// QEMU has not said yet what its last stop of the VM was for.
    pub(crate) stop_unclear: bool,
    pub(crate) blackout: Blackout,
    /// `--timeout`.
    pub(crate) deadline: Option<Instant>,
    /// `go` was said: neither the operator nor a limit ends the migration any more.
    pub(crate) committed: bool,
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
        let panicked: Sender<Notice> = notices.clone();
        let threads = DataThreads::new(
            sched_params(&report_builder.watch().bounds(), false),
            move |thread| {
                let _ = panicked.send(Notice::Panicked(thread.to_owned()));
            },
        );
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
            deadline: request.timeout_s.map(|s| Instant::now() + Duration::from_secs(s)),
            committed: false,
        }
    }

    pub(crate) fn lost(&self, why: impl Into<String>) -> MigrationError {
        MigrationError::PeerLost { host: self.peer.name.clone(), why: why.into() }
    }
}

/// How data threads are scheduled: those of a VM that stands still are no nicer than
/// the agent.
pub(crate) fn sched_params(bounds: &Bounds, stands_still: bool) -> SchedParams {
    let least = if stands_still { Priority::Normal } else { Priority::Low };
    SchedParams { priority: bounds.priority.max(least), cpus: bounds.cpus.clone() }
}

/// What this host lacks.
pub(crate) fn local(what: &'static str, source: std::io::Error) -> MigrationError {
    MigrationError::Local { what, source }
}

pub(crate) fn no_thread(source: std::io::Error) -> MigrationError {
    local("starting a thread", source)
}
