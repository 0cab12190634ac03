//! Contenders that move a gang: all of its VMs at the same time.

mod droveway;
mod qemu;

use std::time::{Duration, Instant};

pub use droveway::{DrovewayGang, sharing};
pub use qemu::QemuGang;

use super::Moved;
use lab::error::Result;
use lab::guest::GuestSpec;
use lab::hosts::{RackHost, Racks};
use lab::setup::Kit;

/// Where a gang moves.
pub struct GangGround<'g> {
    /// What guests are made of.
    pub kit: &'g Kit,
    /// The gang moves from the source racks to the target rack.
    pub racks: &'g Racks,
    /// The requested downtime of each VM.
    pub downtime_goal: Duration,
    /// When the contender gives up.
    pub timeout: Duration,
}

/// A VM of the gang, or one that stays on its host.
pub struct Member<'g> {
    /// The VM.
    pub spec: GuestSpec,
    /// Host that it starts on.
    pub from: &'g RackHost,
    /// Host that it moves to; none if it stays.
    pub to: Option<&'g RackHost>,
}

/// All moves of a gang, as the mover measured them.
pub struct GangMoved {
    /// When the first VM began to move: its destination's QEMU was ready.
    pub began: Instant,
    /// Time from the command to `began`.
    pub prepare: Duration,
    /// The VMs that moved, in the order of the members.
    pub vms: Vec<Moved>,
}

impl GangMoved {
    fn new(started: Instant, vms: Vec<Moved>) -> Self {
        let began = vms.iter().map(|moved| moved.began).min().unwrap_or(started);
        Self { began, prepare: began.saturating_duration_since(started), vms }
    }

    /// When the last VM ran at its destination.
    #[must_use]
    pub fn ran(&self) -> Instant {
        self.vms.iter().map(|moved| moved.ran).max().unwrap_or(self.began)
    }
}

/// A way to move a gang.
pub trait GangContender {
    /// Its name in tables.
    fn name(&self) -> String;

    /// Whether it chooses itself to which hosts of the target rack members go.
    fn chooses_hosts(&self) -> bool {
        false
    }

    /// Starts every member on its host. The caller waits for their boot.
    ///
    /// # Errors
    /// If one does not start.
    fn start(&mut self, ground: &GangGround<'_>, members: &[Member<'_>]) -> Result<()>;

    /// Waits until all is known of the members that is found out while they rest.
    ///
    /// # Errors
    /// If that takes too long.
    fn rest(&mut self, members: &[Member<'_>]) -> Result<()> {
        let _ = members;
        Ok(())
    }

    /// Moves all members that have a destination, at the same time.
    ///
    /// # Errors
    /// If one doesn't arrive.
    fn migrate(&mut self, ground: &GangGround<'_>, members: &[Member<'_>]) -> Result<GangMoved>;

    /// The contender's own reports of the last moves.
    fn reports(&self) -> &[api::Report] {
        &[]
    }

    /// Ends the guests, on all hosts, and everything that was started.
    fn stop(&mut self);
}
