//! Who moves a gang: all of its VMs at the same time.

mod droveway;
mod qemu;

use std::time::{Duration, Instant};

pub use droveway::{DrovewayGang, Share, sharing};
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
    /// From the source racks to the target rack.
    pub racks: &'g Racks,
    /// The blackout of each VM that is asked for.
    pub downtime_goal: Duration,
    /// What to give up after.
    pub timeout: Duration,
}

/// A VM of the gang, or one that stays where it is.
pub struct Member<'g> {
    /// What it is.
    pub spec: GuestSpec,
    /// Where it starts.
    pub from: &'g RackHost,
    /// Where it goes; none if it stays.
    pub to: Option<&'g RackHost>,
}

/// All moves of a gang, as the mover measured them.
pub struct GangMoved {
    /// When the first VM began to move: a QEMU was there for it.
    pub began: Instant,
    /// What came before that.
    pub prepare: Duration,
    /// Each VM that moved, in the order of the members.
    pub vms: Vec<Moved>,
}

impl GangMoved {
    fn new(started: Instant, vms: Vec<Moved>) -> Self {
        let began = vms.iter().map(|moved| moved.began).min().unwrap_or(started);
        Self { began, prepare: began.saturating_duration_since(started), vms }
    }

    /// When the last VM ran.
    #[must_use]
    pub fn ran(&self) -> Instant {
        self.vms.iter().map(|moved| moved.ran).max().unwrap_or(self.began)
    }
}

/// A way to move a gang.
pub trait GangContender {
    /// Its name in tables.
    fn name(&self) -> String;

    /// Starts every member where it is to start. Somebody else waits for their
    /// boot.
    ///
    /// # Errors
    /// If one does not start.
    fn start(&mut self, ground: &GangGround<'_>, members: &[Member<'_>]) -> Result<()>;

    /// Moves all that go somewhere, at the same time.
    ///
    /// # Errors
    /// If one does not come.
    fn migrate(&mut self, ground: &GangGround<'_>, members: &[Member<'_>]) -> Result<GangMoved>;

    /// What it tells of the last moves by itself.
    fn reports(&self) -> &[api::Report] {
        &[]
    }

    /// Ends the guests, wherever they are, and all that was started.
    fn stop(&mut self);
}
