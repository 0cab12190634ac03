//! The source's side of one migration.
//!
//! [`run`] is the ordered list of phases. A failure before the commit is undone: the VM
//! goes on here, and the destination's QEMU ends. `switchover::source` alone decides
//! who owns the VM, and keeps a journal; `phases/effects.rs` carries out its decisions.

mod audit;
mod blackout;
mod bounds;
mod by_name;
pub(crate) mod carried;
mod collector;
mod connection;
mod context;
mod control;
mod control_writer;
mod disks;
mod flow;
mod from_disks;
mod hinting;
mod lanes;
mod mapped_ram;
mod notice;
mod own;
mod phases;
mod prefault;
pub(crate) mod xen;

use std::sync::Arc;

use api::{MigrateRequest, Report};
use switchover::source::Driver;

use crate::host::{Local, Peer, SourceVm};
use crate::report_builder::ReportBuilder;
use crate::watch::Watch;
use context::Context;
pub(crate) use control::throttle::settings as throttle_settings;
use phases::{Ended, Failed};

/// A migration that has ended on this side.
#[derive(Debug)]
pub struct Migrated {
    /// The outcome. With [`Outcome::Done`](api::Outcome::Done) the VM runs at the
    /// destination and its QEMU here has ended; otherwise it goes on here, unless the
    /// reason says otherwise.
    pub report: Report,
    /// What is left of its switchover.
    pub settlement: Settlement,
}

/// How far a switchover is settled on this side when its migration has ended.
#[derive(Debug)]
pub enum Settlement {
    /// Nothing is left to do.
    Settled,
    /// The VM's fate here is decided. The destination has not received everything yet.
    Undelivered(Driver),
    /// It is not known who has the VM. `None` if another thread continues from the journal.
    InDoubt(Option<Driver>),
}

impl Settlement {
    /// Whether the VM's fate on this side is not decided.
    #[must_use]
    pub fn is_in_doubt(&self) -> bool {
        matches!(self, Self::InDoubt(_))
    }
}

/// Moves `vm` to `peer`. Blocks until the end; `watch` shows the progress.
#[must_use]
pub fn migrate(
    local: &Local,
    peer: &Peer,
    vm: SourceVm,
    request: &MigrateRequest,
    watch: &Arc<Watch>,
) -> Migrated {
    let _until_it_is_over = local.sharing.as_ref().and_then(|sharing| sharing.give_way());
    let report_builder = Arc::new(ReportBuilder::new(Arc::clone(watch), request.downtime_ms));
    let context = Context::new(local, peer, vm, request, Arc::clone(&report_builder));
    let ended = run(context).unwrap_or_else(|Failed { phase, error }| phase.undo(&error));
    let Ended { outcome, settlement } = ended;
    report_builder.update(|report| report.in_doubt = settlement.is_in_doubt());
    Migrated { report: report_builder.end(outcome), settlement }
}

fn run(context: Context<'_>) -> Result<Ended, Failed<'_>> {
    let (connected, description) = context.connect()?;
    let ordered = connected.order(description)?;
    let (prepared, set_up) = ordered.wait_prepared()?;
    let journaled = prepared.open_journal()?;
    let streaming = journaled.stream(set_up)?;
    let delivered = streaming.deliver()?;
    let loaded = delivered.load()?;
    // The point of no return: failures from here on can't simply be undone.
    loaded.commit()
}
