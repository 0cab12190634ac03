//! Who races: QEMU's own migration in its best settings, and Droveway.

mod droveway;
pub mod gang;
mod qemu;
mod virsh;

use std::time::{Duration, Instant};

pub use droveway::{Droveway, Options};
pub use qemu::{Mode, Qemu};
pub use virsh::{Virsh, Way, can_compress};

use lab::error::Result;
use lab::guest::{Guest, GuestSpec};
use lab::hosts::Hosts;
use lab::setup::Kit;

use crate::image::Image;

/// Where a contest takes place.
pub struct Ground<'g> {
    /// What guests are made of.
    pub kit: &'g Kit,
    /// From the first to the second.
    pub hosts: &'g Hosts,
    /// The VM's disk, which moves too.
    pub disk: Option<Image>,
    /// The blackout that is asked for.
    pub downtime_goal: Duration,
    /// What to give up after.
    pub timeout: Duration,
}

/// One move, as the mover measured it.
#[derive(Clone, Debug)]
pub struct Moved {
    /// When the migration proper began: the destination's QEMU was there.
    pub began: Instant,
    /// When the VM ran at the destination.
    pub ran: Instant,
    /// What came before `began`.
    pub prepare: Duration,
    /// From the source's stop to the destination's start.
    pub downtime: Duration,
    /// Sweeps over the memory, if known.
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

    /// Moves it.
    ///
    /// # Errors
    /// If it does not come.
    fn migrate(&mut self, ground: &Ground<'_>) -> Result<Moved>;

    /// What it tells of the last move by itself.
    fn report(&self) -> Option<&api::Report> {
        None
    }

    /// Most memory that each of its agents has had, the source's first.
    fn agents_peak_bytes(&self) -> Option<[u64; 2]> {
        None
    }

    /// Ends the guest, wherever it is, and all that was started.
    fn stop(&mut self);
}
