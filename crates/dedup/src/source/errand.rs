//! The stage's own loads for lanes.

use page::{BATCH_PAGES, Batch};

use super::naming::Labels;
use super::reread::RereadPages;

/// A load that only the stage can send, and whose answer only it understands.
#[derive(Debug)]
pub struct Errand(pub(super) Kind);

#[derive(Debug)]
pub(super) enum Kind {
    /// Asks by name which pages the destination lacks; their bodies are kept until it
    /// has answered.
    Query(Query),
    /// The same for pages whose bodies are read again if it lacks them.
    LightQuery(LightQuery),
    /// Pages that are announced before QEMU hands them over.
    Announce(Announcement),
    /// Pages that the destination requested after a query.
    Requested(Batch),
    /// Pages that are read again because the destination requested them.
    Reread(RereadPages),
}

/// A batch that is offered by name.
#[derive(Debug)]
pub(super) struct Query {
    pub(super) batch: Batch,
    /// How the destination refers to it.
    pub(super) ticket: u32,
}

/// Pages that are offered by name and can be read again.
#[derive(Debug)]
pub(super) struct LightQuery {
    pub(super) reread: RereadPages,
    /// How the destination refers to them.
    pub(super) ticket: u32,
}

/// Pages and the names of what they contain now.
#[derive(Debug)]
pub(super) struct Announcement {
    pub(super) reread: RereadPages,
    pub(super) labels: Labels,
}

impl Announcement {
    /// Writes the message that announces them to `head`.
    pub(super) fn write(&self, ticket: u32, head: &mut Vec<u8>) {
        let Self { reread, labels } = self;
        let names = labels.message(reread.block, reread.epoch, ticket);
        names.write(reread.pages.iter().copied(), head);
    }
}

impl Errand {
    /// Whether the destination looks up its pages, or will.
    pub(super) fn is_query(&self) -> bool {
        match &self.0 {
            Kind::Query(_) | Kind::LightQuery(_) | Kind::Announce(_) => true,
            Kind::Requested(_) | Kind::Reread(_) => false,
        }
    }

    /// How many pages count as queued for lanes. Kept batches count as whole batches.
    pub(super) fn queued_pages(&self) -> u64 {
        match &self.0 {
            Kind::Reread(reread) | Kind::LightQuery(LightQuery { reread, .. }) => {
                reread.pages.len() as u64
            }
            Kind::Query(_) | Kind::Announce(_) | Kind::Requested(_) => BATCH_PAGES as u64,
        }
    }
}
