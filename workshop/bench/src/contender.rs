//! The contenders: QEMU's own migration in its best settings, and Droveway.

mod carried;
mod droveway;
pub mod gang;
mod in_place;
mod qemu;
mod stays;
mod tls;
mod virsh;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ::qemu::qmp::Qmp;
use serde_json::json;

pub(crate) use carried::carrying;
pub use carried::{Carried, CarriedFromDisks};
pub(crate) use droveway::certify;
pub use droveway::{Droveway, Options};
pub(crate) use in_place::{ByAgent, ByQemu, Changed, Commanded};
pub use qemu::{Mode, Qemu};
pub use stays::{STAYS, Stays};
pub use virsh::{Virsh, Way, can_compress};

use lab::error::{LabError, Result};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::Hosts;
use lab::setup::Kit;

use crate::image::Image;

/// Longest time until a guest that continues from a snapshot reports.
const RESUMED_MAX: Duration = Duration::from_secs(60);

/// Where a contest takes place.
pub struct Ground<'g> {
    /// What guests are made of.
    pub kit: &'g Kit,
    /// The VM moves from the first to the second.
    pub hosts: &'g Hosts,
    /// The VM's disk, which moves with it.
    pub disk: Option<Image>,
    /// The requested downtime.
    pub downtime_goal: Duration,
    /// When the contender gives up.
    pub timeout: Duration,
    /// QEMU's argument by which the guest goes on from a snapshot, paused. None if it boots.
    pub from: Option<&'g str>,
}

impl Ground<'_> {
    /// The guest, which was started on host a, once it runs. `qmp` is a connection to its QEMU.
    fn meet(&self, spec: &GuestSpec, qmp: impl FnOnce() -> Result<Arc<Qmp>>) -> Result<Guest> {
        if self.from.is_none() {
            return Guest::meet(spec.clone(), &self.hosts.a);
        }
        let qmp = qmp()?;
        resume(&qmp)?;
        let guest = Guest::listen(spec.clone(), &self.hosts.a)?;
        guest.wait_beat(RESUMED_MAX)?;
        Ok(guest)
    }
}

/// Has a VM run that QEMU loads from a snapshot.
fn resume(qmp: &Qmp) -> Result<()> {
    let ask = |command: &str| {
        qmp.execute(command, json!({})).map_err(|error| LabError::Qmp {
            command: command.to_owned(),
            answer: error.to_string(),
        })
    };
    let until = Instant::now() + RESUMED_MAX;
    // It is `inmigrate` until all is loaded.
    while ask("query-status")?["status"] != "paused" {
        if Instant::now() > until {
            let what = "a VM that goes on from a snapshot".to_owned();
            return Err(LabError::Silent { what, waited: RESUMED_MAX, detail: String::new() });
        }
        thread::sleep(Duration::from_millis(50));
    }
    ask("cont").map(drop)
}

/// One move, as the mover measured it.
#[derive(Clone, Debug)]
pub struct Moved {
    /// When the migration proper began: the destination's QEMU was ready.
    pub began: Instant,
    /// When the VM ran at the destination.
    pub ran: Instant,
    /// Time from the command to `began`.
    pub prepare: Duration,
    /// From the VM's stop at the source to its start at the destination.
    pub downtime: Duration,
    /// Passes over the memory, if known.
    pub passes: Option<u64>,
}

/// A way to move a guest from host a to host b.
pub trait Contender {
    /// Its name in tables.
    fn name(&self) -> String;

    /// Starts a guest on host a, and waits until it has booted.
    ///
    /// # Errors
    /// If it does not start.
    fn start(&mut self, ground: &Ground<'_>, spec: &GuestSpec) -> Result<Guest>;

    /// Moves the guest.
    ///
    /// # Errors
    /// If the guest doesn't arrive.
    fn migrate(&mut self, ground: &Ground<'_>) -> Result<Moved>;

    /// The contender's own report of the last move.
    fn report(&self) -> Option<&api::Report> {
        None
    }

    /// Peak memory of each of its agents, the source's first.
    fn agents_peak_bytes(&self) -> Option<[u64; 2]> {
        None
    }

    /// Ends the guest, on either host, and everything that was started.
    fn stop(&mut self);
}
