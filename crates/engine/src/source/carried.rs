//! The source's side of a migration that somebody else commands, such as libvirt. Two
//! agents carry it from QEMU to QEMU; neither of them has started or asks one.
//!
//! ```text
//! opening     somebody has connected to this agent's door; the agent of the destination
//!             connects to the QEMU there, and says whose it is
//! setup       QEMU has set its migration up, and made its channels: the tap takes them
//! first pass, pages go by lanes; the pool's bound keeps little in flight
//! later pass
//! stopped     RAM has ended; when all is placed, the destination compares it, and only
//!             then feeds what comes after RAM to its QEMU
//! loaded      that QEMU has said SHUT, which was passed on; QEMU here closes
//! ```
//!
//! Whoever commands both QEMUs decides what becomes of the VM. All that this can do is to
//! fail, by closing the migration's connections at both ends (see `caller` for how QEMU's
//! are): then the VM goes on here. So there is no journal, and nothing is ever answered in
//! the name of the destination's QEMU. Its word that the VM may be stopped is kept until
//! the downtime goal can be met (`way_back`).

mod agents;
mod by_lanes;
mod caller;
mod collector;
mod convergence;
mod from_disks;
mod hearing;
mod notice;
mod opening;
mod passes;
mod process;
mod relay;
mod running;
mod sampler;
mod setup;
mod split;
mod waiting;
mod way_back;

use std::sync::Arc;

use api::{Audit, Bounds, Compress, FromStorage, Outcome, Report, Sharing, Slowing};

use content::Domain;

use crate::error::MigrationError;
use crate::report_builder::ReportBuilder;
use crate::watch::Watch;
pub use caller::Caller;
pub use opening::{More, Opening};
pub use relay::Relay;
use setup::Reason;
pub use split::Split;

/// What an agent's operator has set for migrations that others command.
#[derive(Clone, Debug)]
pub struct CarryRequest {
    /// Connections to carry it; by default as many as for the agent's own.
    pub lanes: Option<u16>,
    /// The downtime that little enough is kept in flight for.
    pub downtime_ms: u64,
    /// How bodies are encoded.
    pub compress: Compress,
    /// What is compared before the VM is loaded.
    pub audit: Audit,
    /// How far a VM may be throttled that does not converge. A deadline is none of this,
    /// nor what is done where the floor isn't enough: nothing is.
    pub slowing: Slowing,
    /// With whom their content is shared.
    pub sharing: Sharing,
    /// Whether pages are read from disks that both hosts see.
    pub storage: FromStorage,
    /// What each may use.
    pub bounds: Bounds,
}

impl CarryRequest {
    /// That of all VMs that are carried from here.
    fn domain(&self) -> Domain {
        Domain(self.sharing.domain.clone().unwrap_or_default())
    }
}

impl Default for CarryRequest {
    fn default() -> Self {
        Self {
            lanes: None,
            downtime_ms: 300,
            compress: Compress::default(),
            audit: Audit::default(),
            slowing: Slowing::default(),
            sharing: Sharing::default(),
            storage: FromStorage::default(),
            bounds: Bounds::default(),
        }
    }
}

/// What somebody connected for.
pub enum Content {
    /// A migration.
    Stream(Carried),
    /// Something else: a disk.
    Other(Box<Relay>),
}

/// A migration, about to be carried.
pub enum Carried {
    /// Its pages by lanes.
    Split(Box<Split>),
    /// As it is.
    Relayed {
        /// Its only connection.
        relay: Box<Relay>,
        /// Why, if that is known.
        why: Option<Reason>,
    },
}

impl Carried {
    /// Carries it until it is over, which those who watch it see.
    #[must_use]
    pub fn run(self, request: &CarryRequest, watch: &Arc<Watch>) -> Report {
        let report_builder = Arc::new(ReportBuilder::new(Arc::clone(watch), request.downtime_ms));
        report_builder
            .note("carried for whoever commands its QEMUs: they decide, and measure the downtime");
        let ended = match self {
            Self::Split(split) => split.carry(&report_builder),
            Self::Relayed { relay, why } => relay::relayed(*relay, why, &report_builder),
        };
        report_builder.end(outcome(ended))
    }
}

fn outcome(ended: Result<(), MigrationError>) -> Outcome {
    match ended {
        Ok(()) => Outcome::Done,
        Err(MigrationError::Cancelled) => Outcome::Cancelled,
        Err(error) => Outcome::Failed(error.to_string()),
    }
}
