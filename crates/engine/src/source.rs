//! The source's side of one migration.
//!
//! [`run`] is the ordered list of phases. Whatever fails before the commit is undone:
//! the VM goes on here, and the destination's QEMU ends. `switchover::source`
//! alone decides who has the VM, and keeps a journal; `phases/effects.rs` does what it
//! decides.

mod blackout;
mod by_name;
pub(crate) mod carried;
mod collector;
mod connection;
mod context;
mod control;
mod disks;
mod flow;
mod from_disks;
mod lanes;
mod phases;
mod prefault;
mod saying;

use std::sync::Arc;

use api::{MigrateRequest, Report};
use switchover::source::Driver;

use crate::host::{Local, Peer, SourceVm};
use crate::report_builder::ReportBuilder;
use crate::watch::Watch;
use context::Context;
pub(crate) use control::throttle::settings as throttle_settings;
use phases::{Ended, Failed};

/// A migration that has ended here.
#[derive(Debug)]
pub struct Migrated {
    /// How it went. With [`Outcome::Done`](api::Outcome::Done) the VM runs at the
    /// destination and its QEMU here has ended; else it goes on here, unless the reason
    /// says otherwise.
    pub report: Report,
    /// A switchover that is not over on this side: the VM is in doubt, or the
    /// other side has not heard all yet.
    pub unsettled: Option<Driver>,
    /// Whether it is settled what becomes of the VM here.
    pub decided: bool,
}

/// Moves `vm` to `peer`. Blocks until it is over; watch it meanwhile.
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
    let Ended { outcome, unsettled, decided } = ended;
    Migrated { report: report_builder.end(outcome), unsettled, decided }
}

fn run(context: Context<'_>) -> Result<Ended, Failed<'_>> {
    let connected = context.connect()?;
    let ordered = connected.order()?;
    let (prepared, set_up) = ordered.wait_prepared()?;
    let journaled = prepared.open_journal()?;
    let streaming = journaled.stream(set_up)?;
    let delivered = streaming.deliver()?;
    let loaded = delivered.load()?;
    // The point of no return: what fails from here on is not simply undone.
    loaded.commit()
}
