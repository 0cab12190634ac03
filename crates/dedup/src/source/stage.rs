//! The stage between the queue and the lanes: batches that go by name, and what follows from
//! their answers.

use std::sync::Arc;

use page::{BlockId, Epoch, PAGE_BYTES, PageSet};
use parking_lot::Mutex;
use transport::{Acks, Change, LanesError, Load, Queue, Released};
use wire::Answer;

use super::at_lane::AtLane;
use super::errand::{Errand, Kind, LightQuery, Query};
use super::naming::{Naming, Waits};
use super::pending::{Nonsense, Pending, Resolved};
use super::reread::{Kept, RereadPages};
use super::reserved::Reserved;
use super::spare::Spare;

const BATCH_BYTES: usize = page::BATCH_PAGES * PAGE_BYTES;
/// The most that the destination awaits before more is announced to it: a quarter of what it
/// would ever await.
const ANNOUNCED_MAX_BYTES: u64 = 1 << 30;

/// Queries by name, handles the answers, and has lanes send what the destination wants.
#[derive(Debug)]
pub struct Stage {
    naming: Arc<Naming>,
    queue: Arc<Queue<Errand>>,
    open: Mutex<Open>,
}

/// What goes on after an answer. The queue's lock is taken within this one's.
#[derive(Debug, Default)]
struct Open {
    pending: Pending,
    spare: Spare,
}

impl Open {
    /// What happened to awaited pages, as a change of the queue.
    fn resolve(&self, resolved: Option<Resolved>) -> Change<Errand> {
        let Resolved { placed_bytes, wanted, is_over } = resolved.unwrap_or_default();
        Change {
            found_bytes: placed_bytes,
            left: usize::from(is_over),
            again: [wanted.map(|reread| Errand(Kind::Reread(reread))), None],
            awaited_bytes: Some(self.pending.bytes()),
            ..Change::default()
        }
    }
}

impl Stage {
    /// A stage for the lanes with this queue.
    #[must_use]
    pub fn new(naming: Arc<Naming>, queue: Arc<Queue<Errand>>) -> Self {
        Self { naming, queue, open: Mutex::default() }
    }

    /// The stage's part in a lane's sending thread.
    #[must_use]
    pub fn at_lane(&self) -> AtLane<'_> {
        AtLane::new(self)
    }

    /// What names the pages.
    #[must_use]
    pub fn naming(&self) -> &Naming {
        &self.naming
    }

    /// QEMU's first pass has ended. Batches of it that wait for a lane still go by name, if QEMU is
    /// held until the destination has their pages, or if the destination waits for none of them. If
    /// not, nothing does from now on.
    pub fn end_first_pass(&self) {
        self.naming.end_first_pass();
        match self.naming.waits() {
            Waits::Held => {}
            Waits::WhileBuffered => self.give_up(&mut self.open.lock()),
            Waits::Never | Waits::FirstPass => {
                self.end_naming();
            }
        }
    }

    /// Nothing goes by name from now on. Returns whether the destination is done with what did: it
    /// awaits no page, and looks none up. If QEMU is not held, awaited pages are sent now.
    pub fn end_naming(&self) -> bool {
        let mut open = self.open.lock();
        // Locked, so no batch gets a ticket afterwards.
        self.naming.end();
        if self.naming.waits() != Waits::Held {
            self.give_up(&mut open);
        }
        open.pending.is_settled()
    }

    /// Has awaited pages sent.
    fn give_up(&self, open: &mut Open) {
        for resolved in open.pending.give_up() {
            let change = open.resolve(Some(resolved));
            self.queue.settle(change);
        }
    }

    /// Whether the destination awaits pages or looks them up, or will: batches of the first pass
    /// wait for a lane. A VM that is stopped now would stand still meanwhile.
    #[must_use]
    pub fn is_querying(&self) -> bool {
        let goes_by_name = |load: &Load<Errand>| match load {
            Load::Pages(batch) => {
                !batch.bodies().is_empty() && self.naming.names(batch.block, batch.epoch)
            }
            Load::Other(errand) => errand.is_query(),
            Load::Blocks(_) => false,
        };
        let open = self.open.lock();
        !open.pending.is_settled() || self.naming.queries() && self.queue.has(goes_by_name)
    }

    pub(super) fn queue(&self) -> &Queue<Errand> {
        &self.queue
    }

    /// A ticket for a batch of names. None once nothing goes by name any more.
    pub(super) fn ticket(&self) -> Option<u32> {
        let mut open = self.open.lock();
        (!self.naming.has_ended()).then(|| open.pending.ticket())
    }

    /// A batch was not answered on its connection, and is queried again.
    pub(super) fn void(&self) {
        self.open.lock().pending.void();
    }

    /// Room to announce one batch of pages of a block. Blocks while the destination awaits too
    /// much. None once no more is accepted, or if it is `over`: code that makes it so calls
    /// [`Stage::wake_reserving`].
    pub(super) fn reserve(
        &self,
        (block, epoch): (BlockId, Epoch),
        over: impl Fn() -> bool,
    ) -> Option<Reserved<'_>> {
        let may = |awaited_bytes, announced: usize| {
            awaited_bytes + (announced * BATCH_BYTES) as u64 <= ANNOUNCED_MAX_BYTES
        };
        self.queue.reserve(over, may)?;
        Some(Reserved::new(&self.queue, (block, epoch)))
    }

    /// Makes callers that wait for room check whether it has ended.
    pub(super) fn wake_reserving(&self) {
        self.queue.wake_reserving();
    }

    /// Pages of a batch that a lane has taken were announced.
    pub(super) fn came_after_announcement(&self, pages: usize) {
        if pages > 0 {
            let covered_bytes = (pages * PAGE_BYTES) as u64;
            self.queue.count(Change { covered_bytes, ..Change::default() });
        }
    }

    /// How many of the pages that the destination awaits lanes could send, counted from the
    /// beginning, if that is new. Lanes have little else to send then.
    #[must_use]
    pub fn spare(&self) -> Option<u64> {
        let mut open = self.open.lock();
        if open.pending.bytes() == 0 {
            return None;
        }
        let queued = self.queue.queued(Errand::queued_pages)?;
        open.spare.more(queued, self.naming.spare_pages())
    }

    /// Handles the destination's answers on one connection until it ends.
    ///
    /// # Errors
    /// When it ends, or an answer is invalid.
    pub fn receive(&self, acks: &mut Acks<'_, Errand>) -> std::io::Result<()> {
        loop {
            let released = acks.wait()?;
            self.settle(released)?;
        }
    }

    /// Released loads are finished, or continue in another way.
    pub(super) fn settle(&self, released: Released<'_, Errand>) -> std::io::Result<()> {
        while let Some((load, answer)) = released.next() {
            match load {
                Load::Other(errand) => {
                    self.received(errand, answer).map_err(|Nonsense| released.nonsense())?;
                }
                load => released.placed(load, answer)?,
            }
        }
        Ok(())
    }

    fn received(&self, errand: Errand, answer: Option<Answer>) -> Result<(), Nonsense> {
        let body_bytes = match (errand.0, answer) {
            (Kind::Query(query), Some(answer)) => return self.answered(query, answer),
            (Kind::LightQuery(query), Some(answer)) => return self.answered_light(query, answer),
            (Kind::Requested(batch), None) => (batch.bodies().len() * PAGE_BYTES) as u64,
            (Kind::Reread(reread), None) => reread.bytes(),
            // An answer without a question, or a question without an answer.
            _ => return Err(Nonsense),
        };
        self.queue.count(Change { left: 1, body_bytes, ..Change::default() });
        Ok(())
    }

    /// The destination wants some pages of a batch of names and awaits others; it has placed the
    /// rest.
    fn answered(&self, query: Query, answer: Answer) -> Result<(), Nonsense> {
        let Query { mut batch, ticket } = query;
        let Answer { requested: wanted, later, .. } = answer;
        let placed = placed(batch.bodies().len(), answer)?;
        self.naming.found(placed.len() + later.len(), batch.bodies().len());
        let body_bytes = (batch.bodies().len() * PAGE_BYTES) as u64;
        let fill_bytes = batch.guest_bytes() - body_bytes;
        // The fills are placed already.
        batch.clear_fills();
        let (requested, reread) = if !later.is_empty() && self.naming.keeps(batch.block) {
            let kept = Kept::new(batch);
            let requested = (!wanted.is_empty()).then(|| Kind::Reread(kept.pages(wanted)));
            (requested, kept.pages(later))
        } else {
            let reread = RereadPages::of(&batch, later);
            batch.retain_bodies(|nth, _| wanted.has(nth));
            // The buffer returns to the pool before any lock is taken.
            let requested = Some(batch).filter(|batch| !batch.is_empty());
            (requested.map(Kind::Requested), reread)
        };
        let requested = requested.map(Errand);
        let found_bytes = (placed.len() * PAGE_BYTES) as u64;
        let change = Change { answered: 1, fill_bytes, found_bytes, ..Change::default() };
        self.is_answered(change, requested, (ticket, reread, later))
    }

    /// The same of pages whose bodies are not kept.
    fn answered_light(&self, query: LightQuery, answer: Answer) -> Result<(), Nonsense> {
        let LightQuery { reread, ticket } = query;
        let Answer { requested: wanted, later, .. } = answer;
        let placed = placed(reread.pages.len(), answer)?;
        let found_bytes = reread.chosen(placed).bytes();
        let requested = (!wanted.is_empty()).then(|| Errand(Kind::Reread(reread.chosen(wanted))));
        let change = Change { found_bytes, ..Change::default() };
        self.is_answered(change, requested, (ticket, reread.chosen(later), later))
    }

    /// Requested pages are sent at once; the others are awaited.
    fn is_answered(
        &self,
        mut change: Change<Errand>,
        requested: Option<Errand>,
        (ticket, reread, later): (u32, RereadPages, PageSet),
    ) -> Result<(), Nonsense> {
        let mut open = self.open.lock();
        open.pending.answered();
        let is_awaited = !later.is_empty();
        let resolved = if is_awaited { open.pending.wait(ticket, reread, later)? } else { None };
        let resolved = open.resolve(resolved);
        change.entered = usize::from(is_awaited);
        change.left = 1 + resolved.left;
        change.found_bytes += resolved.found_bytes;
        change.awaited_bytes = resolved.awaited_bytes;
        let [reread, _] = resolved.again;
        change.again = [requested, reread];
        self.queue.settle(change);
        Ok(())
    }

    /// A report on awaited pages of a batch: those with these indices are wanted, and all others
    /// placed, or still awaited if there are `more`.
    pub fn late(&self, ticket: u32, wanted: Vec<u8>, more: bool) {
        let mut open = self.open.lock();
        // Also on tickets that are void: the destination has used what lanes offered it.
        open.spare.came(wanted.len() as u64);
        let Ok(resolved) = open.pending.late(ticket, wanted, more) else {
            drop(open);
            return self.queue.fail(LanesError::Nonsense);
        };
        let change = open.resolve(resolved);
        self.queue.settle(change);
    }
}

/// Which of so many pages are placed, by an answer.
fn placed(pages: usize, answer: Answer) -> Result<PageSet, Nonsense> {
    let Answer { requested: wanted, later, .. } = answer;
    let (all, others) = (PageSet::all(pages), wanted | later);
    if !others.without(all).is_empty() || !(wanted & later).is_empty() {
        return Err(Nonsense);
    }
    Ok(all.without(others))
}

#[cfg(test)]
pub(super) mod tests {
    use content::{Domain, Key};
    use identity::Security;
    use page::{Batch, Encoding, PageIndex, Pool};
    use ram::{Mapping, Numbered};
    use transport::{Lanes, LanesPlan};
    use wire::Token;

    use super::super::naming::{Labels, Offered, Plan};
    use super::*;

    /// Lanes without connections.
    pub(crate) fn lanes() -> Lanes<Errand> {
        let plan = LanesPlan {
            endpoints: Vec::new(),
            peer: "b".to_owned(),
            security: Security::Plaintext,
            token: Token([0; 16]),
            encoding: Encoding::Raw,
            stale_filter: None,
            deltas: None,
        };
        Lanes::new(plan, None)
    }

    pub(crate) fn naming(waits: Waits) -> Naming {
        let key = Key::new(b"test", &Domain::default());
        let ram = Arc::<Numbered>::default();
        ram.announce([Some(Arc::new(Mapping::own(1 << 20)))].into_iter());
        Naming::new(Plan {
            key,
            before: None,
            shares: true,
            names_with_bodies: false,
            only: None,
            cached: None,
            ram,
            handed_over: Arc::default(),
            sleeps: false,
            is_fixed: false,
            waits,
        })
    }

    pub(crate) fn stage(lanes: &Lanes<Errand>) -> Stage {
        Stage::new(Arc::new(naming(Waits::Held)), Arc::clone(lanes.queue()))
    }

    fn answer(wanted: u128, later: u128) -> Answer {
        let [wanted, later] = [wanted, later].map(PageSet::from_bits);
        Answer { placed: 1, requested: wanted, later }
    }

    fn batch(pool: &Arc<Pool>) -> Batch {
        let mut batch = pool.take().unwrap();
        (0..3).for_each(|page| batch.push_body(PageIndex(page), 4096 * page as usize));
        batch
    }

    #[test]
    fn only_queries_have_answers() {
        let pool = Pool::new(8 << 20);
        let query = || Errand(Kind::Query(Query { batch: batch(&pool), ticket: 1 }));
        let answer = |wanted, later| Some(answer(wanted, later));
        let said = |errand, answer| {
            let lanes = lanes();
            let stage = stage(&lanes);
            assert_eq!(stage.ticket(), Some(1));
            lanes.submit(batch(&pool)).unwrap();
            stage.queue.adds_query();
            let received = stage.received(errand, answer);
            (received, lanes, stage)
        };
        assert_eq!(said(query(), None).0, Err(Nonsense), "a question wants an answer");
        let requested = || Errand(Kind::Requested(batch(&pool)));
        assert_eq!(said(requested(), answer(0, 0)).0, Err(Nonsense), "nothing was asked");
        for (wanted, later) in [(8, 0), (0, 8), (1 << 127, 0), (1, 1)] {
            assert_eq!(said(query(), answer(wanted, later)).0, Err(Nonsense), "there are three");
        }
        let (received, lanes, stage) = said(query(), answer(0b001, 0b100));
        assert_eq!(received, Ok(()));
        let delivered = lanes.delivered();
        assert_eq!((delivered.found_bytes, delivered.awaited_bytes), (4096, 4096));
        // The batch that this test submitted counts as queued, too.
        let queued = || stage.queue.queued(Errand::queued_pages);
        assert_eq!(queued(), Some(128 + 128));
        stage.late(1, vec![2], false);
        assert_eq!((queued(), lanes.delivered().awaited_bytes), (Some(128 + 128 + 1), 0));
        let mut one = batch(&pool);
        one.retain_bodies(|nth, _| nth == 0);
        let reread = Errand(Kind::Reread(RereadPages::of(&one, PageSet::all(1))));
        for delivered in [Errand(Kind::Requested(one)), reread] {
            let before = lanes.delivered().body_bytes;
            stage.received(delivered, None).unwrap();
            assert!(lanes.delivered().body_bytes > before);
        }
    }

    /// A batch of a dead lane gets a new ticket. If what is requested on the old one still counted
    /// as offered, soon nothing would be offered any more, and disks alone would deliver.
    #[test]
    fn the_destination_requests_what_was_offered_on_any_ticket() {
        let lanes = lanes();
        let stage = stage(&lanes);
        let more = || stage.open.lock().spare.more(0, 4);
        assert_eq!((stage.ticket(), more(), more()), (Some(1), Some(4), None));
        stage.void();
        stage.late(1, vec![0, 2], false);
        assert_eq!((more(), more()), (Some(6), None));
        // A report that overtakes its answer counts once.
        assert_eq!(stage.ticket(), Some(2));
        lanes.submit(batch(&Pool::new(8 << 20))).unwrap();
        stage.late(2, vec![1, 2], false);
        assert_eq!(more(), Some(8));
        let pages = [0, 1, 2].map(PageIndex).to_vec();
        let reread = RereadPages::new(BlockId(0), Epoch(1), pages);
        let query = Errand(Kind::LightQuery(LightQuery { reread, ticket: 2 }));
        let answer = answer(0, 0b111);
        assert_eq!((stage.received(query, Some(answer)), more()), (Ok(()), None));
        assert!(lanes.failure().is_none());
    }

    #[test]
    fn what_is_left_of_the_first_pass_is_waited_for() {
        let pool = Pool::new(8 << 20);
        let is_querying = |epoch| {
            let lanes = lanes();
            let stage = stage(&lanes);
            stage.naming.hand_over(&mut batch(&pool));
            stage.end_first_pass();
            let mut waits = batch(&pool);
            waits.epoch = Epoch(epoch);
            lanes.submit(waits).unwrap();
            stage.is_querying()
        };
        assert_eq!([0, 1].map(is_querying), [true, false]);
    }

    /// Its guest would stand still for as long as the destination waits.
    #[test]
    fn no_vm_is_stopped_before_all_pages_by_name_are_settled() {
        let (lanes, pool) = (lanes(), Pool::new(8 << 20));
        let stage = stage(&lanes);
        assert_eq!(stage.ticket(), Some(1));
        lanes.submit(batch(&pool)).unwrap();
        stage.queue.adds_query();
        assert!(!stage.end_naming() && stage.is_querying(), "a batch is not answered");
        assert_eq!(stage.ticket(), None, "no other is named");
        let query = Errand(Kind::Query(Query { batch: batch(&pool), ticket: 1 }));
        stage.received(query, Some(answer(0, 0b100))).unwrap();
        assert!(!stage.end_naming() && stage.is_querying(), "a page is awaited");
        stage.late(1, Vec::new(), false);
        assert!(stage.end_naming() && !stage.is_querying());
    }

    #[test]
    fn what_is_awaited_when_the_first_pass_ends_is_sent_and_what_is_left_of_it_still_named() {
        let (lanes, pool) = (lanes(), Pool::new(8 << 20));
        let naming = Arc::new(naming(Waits::WhileBuffered));
        let stage = Stage::new(naming, Arc::clone(lanes.queue()));
        let query = |ticket| Errand(Kind::Query(Query { batch: batch(&pool), ticket }));
        assert_eq!(stage.ticket(), Some(1));
        lanes.submit(batch(&pool)).unwrap();
        stage.queue.adds_query();
        stage.received(query(1), Some(answer(0, 0b111))).unwrap();
        assert_eq!(stage.open.lock().pending.bytes(), 3 * 4096);
        stage.end_first_pass();
        assert_eq!(stage.open.lock().pending.bytes(), 0);
        assert!(stage.queue.has(|load| matches!(load, Load::Other(Errand(Kind::Reread(_))))));
        assert_eq!(stage.ticket(), Some(2));
    }

    #[test]
    fn a_sleeping_source_names_nothing_until_it_is_woken() {
        let mut plan = naming(Waits::FirstPass).into_plan();
        plan.sleeps = true;
        let (naming, pool) = (Naming::new(plan), Pool::new(1 << 20));
        let mut labels = Labels::default();
        let batch = batch(&pool);
        assert_eq!((naming.queries(), naming.name(&batch, &mut labels)), (false, Offered::No));
        assert!(labels.names.is_empty());
        naming.wake();
        assert_eq!((naming.queries(), naming.name(&batch, &mut labels)), (true, Offered::All));
        assert_eq!(labels.names.len(), 3);
    }

    #[test]
    fn an_invalid_message_ends_the_lanes() {
        let lanes = lanes();
        let stage = stage(&lanes);
        stage.ticket();
        stage.late(1, vec![3], true);
        assert!(lanes.failure().is_none(), "the answer may come yet");
        stage.late(1, vec![0; 200], false);
        assert!(matches!(lanes.failure(), Some(LanesError::Nonsense)));
    }
}
