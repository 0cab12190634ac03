//! The source's side of a migration that another program, such as libvirt, commands. Two
//! agents carry it from QEMU to QEMU; neither agent starts or queries a QEMU.
//!
//! ```text
//! opening     a caller connects to this agent's listener; the destination's agent
//!             connects to the QEMU there, and reports its VM
//! setup       QEMU has set up its migration and connected its channels: the tap takes
//!             them over
//! first pass, pages go on lanes; the pool's bound keeps little in flight
//! later pass
//! stopped     RAM has ended; once everything is placed, the destination audits it, and
//!             only then feeds the stream after RAM to its QEMU
//! loaded      that QEMU has sent SHUT, which was passed on; QEMU here closes
//! ```
//!
//! The program that commands both QEMUs decides the VM's fate. The agents can only fail
//! the migration, by closing its connections at both ends (see `caller` for QEMU's
//! connections); the VM then goes on here. So there is no journal, and the agent never
//! answers in the name of the destination's QEMU. It only holds back that QEMU's
//! permission to stop the VM until the downtime goal can be met (`way_back`).

mod agents;
mod by_lanes;
mod by_passes;
mod caller;
mod convergence;
mod first_packets;
mod from_disks;
mod observed;
mod opening;
mod passed;
mod passes;
mod piece_size;
mod process;
mod receiving;
mod relay;
mod request;
mod running;
#[cfg(test)]
mod same_report;
mod setup;
mod split;
mod tail;
mod waiting;
mod way_back;

use std::mem;
use std::sync::Arc;
use std::thread;

use api::{Outcome, Report};

use crate::error::MigrationError;
use crate::report_builder::ReportBuilder;
use crate::watch::Watch;
pub use caller::Caller;
pub use opening::{More, Opening};
pub use relay::Relay;
pub use request::CarryRequest;
use setup::Reason;
pub use split::Split;

/// The content of a connection.
pub enum Content {
    /// A migration.
    Stream(Carried),
    /// Another connection: a disk.
    Other(Box<Relay>),
}

/// How a carried migration has ended.
pub struct CarriedEnd {
    /// Its report.
    pub report: Report,
    /// Whether it failed by what its stream has, so that the next one would fail as well.
    pub is_unfit: bool,
}

/// A migration to carry.
pub enum Carried {
    /// Its pages go on lanes.
    Split(Box<Split>),
    /// It is passed through unchanged.
    Relayed {
        /// Its main connection.
        relay: Box<Relay>,
        /// The reason, if known.
        why: Option<Reason>,
        /// Its multifd channels, if they were accepted already. Each is carried by itself, in
        /// their order and after this.
        channels: Vec<Caller>,
    },
}

impl Carried {
    /// Whether it may be another connection of a migration that is passed on already: a
    /// multifd channel, or one for urgent pages of a post-copy.
    #[must_use]
    pub fn may_be_secondary(&self) -> bool {
        match self {
            Self::Split(_) => false,
            Self::Relayed { why, .. } => {
                why.as_ref().is_none_or(|why| !why.is_answered && !why.resumes)
            }
        }
    }

    /// Whether it is a multifd channel: never a migration of its own, even if that has ended
    /// just before.
    #[must_use]
    pub fn is_channel(&self) -> bool {
        matches!(self, Self::Relayed { relay, .. } if relay.is_channel)
    }

    /// Notes that it is another connection of a migration that is passed on.
    pub fn mark_secondary(&mut self) {
        if let Self::Relayed { relay, .. } = self {
            relay.mark_secondary();
        }
    }

    /// Takes its multifd channels that were accepted already.
    #[must_use]
    pub fn take_channels(&mut self) -> Vec<Caller> {
        match self {
            Self::Split(_) => Vec::new(),
            Self::Relayed { channels, .. } => mem::take(channels),
        }
    }

    /// The process of the QEMU that migrates, if that is known.
    #[must_use]
    pub fn qemu(&self) -> Option<u32> {
        let main = match self {
            Self::Split(split) => split.caller.main(),
            Self::Relayed { relay, .. } => &relay.socket,
        };
        process::of(main).ok().map(|qemu| qemu.pid)
    }

    /// Carries it until it has ended; `watch` shows its progress. What `note` finds out, on a thread
    /// of its own, is for the report.
    #[must_use]
    pub fn run(
        self,
        request: &CarryRequest,
        note: impl FnOnce() -> Option<&'static str> + Send,
        watch: &Arc<Watch>,
    ) -> CarriedEnd {
        let report_builder = Arc::new(ReportBuilder::new(Arc::clone(watch), request.downtime_ms));
        report_builder
            .note("carried for the VM's manager, which decides, and measures the downtime");
        let ended = thread::scope(|scope| {
            let noting = || note().into_iter().for_each(|note| report_builder.note(note));
            let noted = thread::Builder::new().name("note".to_owned()).spawn_scoped(scope, noting);
            let ended = match self {
                Self::Split(split) => split.carry(&report_builder),
                Self::Relayed { relay, why, .. } => relay::relayed(*relay, why, &report_builder),
            };
            // Without a thread, or if it has panicked, only the note is missing.
            let _ = noted.map(thread::ScopedJoinHandle::join);
            ended
        });
        let in_doubt = matches!(ended, Err(MigrationError::InDoubt(_)));
        report_builder.update(|report| report.in_doubt = in_doubt);
        let is_unfit =
            matches!(ended, Err(MigrationError::Unsplittable(_) | MigrationError::PageAfterRam));
        CarriedEnd { report: report_builder.end(outcome(ended)), is_unfit }
    }
}

fn outcome(ended: Result<(), MigrationError>) -> Outcome {
    match ended {
        Ok(()) => Outcome::Done,
        Err(MigrationError::Cancelled) => Outcome::Cancelled,
        Err(error) => Outcome::Failed(error.to_string()),
    }
}
