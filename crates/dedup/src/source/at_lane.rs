//! The stage at a lane's sending end: batches that should go by name do, and pages that the
//! destination requests are sent.

use std::io;
use std::sync::Arc;

use page::{Batch, PageSet, Pool, SLOT_BYTES};
use transport::{Change, Load, Sender};
use wire::Names;

use super::errand::{Announcement, Errand, Kind, LightQuery, Query};
use super::naming::{Labels, Offered};
use super::reread::RereadPages;
use super::stage::Stage;

/// The stage's part in one lane, with buffers that are reused for each batch.
#[derive(Debug)]
pub struct AtLane<'s> {
    stage: &'s Stage,
    labels: Labels,
    head: Vec<u8>,
    /// Buffers for pages that are read again. They are apart from the migration's pool, because
    /// draining that pool must not wait for them.
    spare: Arc<Pool>,
}

impl<'s> AtLane<'s> {
    pub(super) fn new(stage: &'s Stage) -> Self {
        let (labels, head) = (Labels::default(), Vec::new());
        Self { stage, labels, head, spare: Pool::new(SLOT_BYTES) }
    }

    /// Sends a load that the lane has taken, or queries it by name.
    ///
    /// # Errors
    /// If the connection breaks, or the destination's answer is invalid.
    pub fn send(&mut self, lane: &mut Sender<'_, Errand>, load: Load<Errand>) -> io::Result<()> {
        match load {
            // Other VMs may wait for content under this name, as it was when named. So stale
            // pages have been dropped before.
            Load::Pages(mut batch) => {
                let pages = self.stage.naming().take_out_announced(&mut batch);
                self.stage.came_after_announcement(pages);
                self.offer(lane, batch, false)?;
            }
            load @ Load::Blocks(_) => lane.send(load)?,
            Load::Other(Errand(errand)) => self.run(lane, errand)?,
        }
        self.stage.settle(lane.released())
    }

    fn run(&mut self, lane: &mut Sender<'_, Errand>, errand: Kind) -> io::Result<()> {
        match errand {
            // Queries return to a lane only if another lane has died.
            Kind::Query(Query { batch, .. }) => {
                self.stage.void();
                self.offer(lane, batch, true)
            }
            Kind::LightQuery(LightQuery { reread, .. }) => {
                self.stage.void();
                // Their names are no longer known.
                self.reread(lane, reread)
            }
            Kind::Announce(announcement) => self.announce(lane, announcement),
            Kind::Requested(batch) => {
                let written = lane.write_pages(&batch);
                lane.sent(Load::Other(Errand(Kind::Requested(batch))), written)
            }
            Kind::Reread(reread) => self.reread(lane, reread),
        }
    }

    /// Queries a batch by name if it should go so, and sends it otherwise. A batch that
    /// `has_asked` was queried before.
    fn offer(
        &mut self,
        lane: &mut Sender<'_, Errand>,
        batch: Batch,
        has_asked: bool,
    ) -> io::Result<()> {
        let asking = if batch.bodies().is_empty() {
            Offered::No
        } else {
            self.labels.clear();
            self.stage.naming().name(&batch, &mut self.labels)
        };
        // Naming may have ended since.
        let is_asked = matches!(asking, Offered::All | Offered::Only(_));
        let ticket = if is_asked { self.stage.ticket() } else { None };
        let queue = self.stage.queue();
        let is_kept = asking == Offered::All && ticket.is_some();
        if is_kept && !has_asked {
            queue.adds_query();
        } else if has_asked && !is_kept {
            queue.settle(Change { answered: 1, ..Change::default() });
        }
        match (asking, ticket) {
            (Offered::Along, _) => lane.send_with_names(batch, &self.labels.names),
            (Offered::No, _) | (_, None) => lane.send(Load::Pages(batch)),
            (Offered::All, Some(ticket)) => {
                let pages = batch.bodies().iter().map(|body| body.page);
                let names = Names {
                    fills: batch.fills(),
                    may_wait: self.stage.naming().may_wait(batch.block),
                    ..self.labels.message(batch.block, batch.epoch, ticket)
                };
                self.head.clear();
                names.write(pages, &mut self.head);
                let written = lane.write_other(&self.head);
                lane.sent(Load::Other(Errand(Kind::Query(Query { batch, ticket }))), written)
            }
            (Offered::Only(set), Some(ticket)) => self.offer_some(lane, batch, set, ticket),
        }
    }

    /// These pages go by name, and are read again if requested. The others go as bytes.
    fn offer_some(
        &mut self,
        lane: &mut Sender<'_, Errand>,
        mut batch: Batch,
        set: PageSet,
        ticket: u32,
    ) -> io::Result<()> {
        let reread = RereadPages::of(&batch, set);
        self.head.clear();
        let names = self.labels.message(batch.block, batch.epoch, ticket);
        names.write(reread.pages.iter().copied(), &mut self.head);
        batch.retain_bodies(|nth, _| !set.has(nth));
        let rest = Some(batch).filter(|batch| !batch.is_empty());
        if rest.is_some() {
            // The batch is two loads now.
            self.stage.queue().count(Change { entered: 1, ..Change::default() });
        }
        let written = lane.write_other(&self.head);
        let query = Errand(Kind::LightQuery(LightQuery { reread, ticket }));
        let sent = lane.sent(Load::Other(query), written);
        match (rest, sent) {
            (Some(batch), Ok(())) => lane.send(Load::Pages(batch)),
            (Some(batch), broken) => lane.sent(Load::Pages(batch), broken),
            (None, sent) => sent,
        }
    }

    fn announce(
        &mut self,
        lane: &mut Sender<'_, Errand>,
        announcement: Announcement,
    ) -> io::Result<()> {
        let Some(ticket) = self.stage.ticket() else {
            return self.reread(lane, announcement.reread);
        };
        self.head.clear();
        announcement.write(ticket, &mut self.head);
        let written = lane.write_other(&self.head);
        let query = LightQuery { reread: announcement.reread, ticket };
        lane.sent(Load::Other(Errand(Kind::LightQuery(query))), written)
    }

    /// Sends the current content of pages that were not kept.
    fn reread(&mut self, lane: &mut Sender<'_, Errand>, reread: RereadPages) -> io::Result<()> {
        let mut batch = self.spare.take().map_err(io::Error::other)?;
        if !reread.fill(self.stage.naming(), &mut batch) {
            return Err(lane.source_has_exited());
        }
        let written = lane.write_pages(&batch);
        lane.sent(Load::Other(Errand(Kind::Reread(reread))), written)
    }
}
