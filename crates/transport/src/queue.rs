//! The queue that all lanes pull from.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::error::LanesError;
use crate::load::{Amount, Asked, Load, Named, Told};
use crate::meter::Delivered;
use crate::namer::{Namer, Unkept, bits_of, is_set};
use crate::pending::{Nonsense, Pending, Resolved};
use crate::spare::Spare;

/// So many batches that wait for lanes are little.
const LITTLE: usize = 4;
/// Batches that have gone by name and have no answer yet: 8 MiB of pages. What a VM
/// claims long before its source sends it others wait for.
const ASKED_MAX: usize = 16;

const BATCH_BYTES: usize = page::BATCH_PAGES * page::PAGE_BYTES;
/// The destination waits for so much at most before it is told of more: a fourth of
/// what it would wait for at all.
const TOLD_MAX_BYTES: u64 = 1 << 30;

/// How long there may be no lane at all before the migration fails: two
/// rounds of noticing a dead path.
const ALL_DEAD_MAX: Duration = Duration::from_secs(16);

#[derive(Debug)]
struct State {
    /// What lanes that died had taken: before anything else, since it is the
    /// oldest.
    again: VecDeque<Load>,
    /// Blocks that the destination has no room for yet; older than what waits.
    held: VecDeque<Load>,
    /// What the destination is told of ahead: a few bytes for each page.
    told: VecDeque<Load>,
    waiting: VecDeque<Load>,
    /// How many batches of blocks the destination has room for, of all that are
    /// ever sent; none if it has not said.
    block_room: Option<u64>,
    /// How many lanes have taken. One that is sent again counts once: of two
    /// copies the destination keeps one.
    blocks_taken: u64,
    /// Batches submitted and not acknowledged, and how many of them are pages.
    out: usize,
    pages_out: usize,
    /// No more will be submitted; lanes end when all is delivered.
    closed: bool,
    failed: Option<LanesError>,
    alive: usize,
    none_alive_since: Instant,
    delivered: Delivered,
    busy_since: Option<Instant>,
    pending: Pending,
    /// Batches whose names are on their way, or the answers are.
    asked: usize,
    spare: Spare,
    /// The next batch of names is called by.
    ticket: u32,
}

impl State {
    /// Pages are out that were not counted yet.
    fn enters(&mut self) {
        self.out += 1;
        self.pages_out += 1;
    }

    /// Pages that were out are not any more.
    fn leaves(&mut self) {
        self.out -= 1;
        self.pages_out -= 1;
    }

    fn comes_again(&mut self, load: Load) {
        self.enters();
        self.again.push_back(load);
    }

    fn has_named(&mut self, bytes: u64) {
        self.delivered.named_bytes += bytes;
        self.delivered.backlog_bytes -= bytes;
    }

    fn resolve(&mut self, Resolved { placed_bytes, wanted, is_over }: Resolved) {
        self.has_named(placed_bytes);
        if is_over {
            self.leaves();
        }
        if let Some(unkept) = wanted {
            self.spare.came(unkept.pages.len() as u64);
            self.comes_again(Load::Again(unkept));
        }
    }

    fn is_drained(&self) -> bool {
        self.out == 0
    }

    fn is_over(&self) -> bool {
        self.closed && self.is_drained()
    }

    /// How many pages that are waited for lanes could send, all that they ever could
    /// counted, if that is news.
    fn spare(&mut self, namer: &dyn Namer) -> Option<u64> {
        if self.pending.bytes() == 0 || self.waiting.len() > LITTLE {
            return None;
        }
        let again = self.again.iter().map(|load| match load {
            Load::Again(unkept) => unkept.pages.len() as u64,
            _ => page::BATCH_PAGES as u64,
        });
        let queued = again.sum::<u64>() + (self.waiting.len() * page::BATCH_PAGES) as u64;
        self.spare.more(queued, namer.spare_pages())
    }

    /// The next batch that may go. Blocks without room are passed by: pages
    /// that come behind them don't wait for the destination's disks.
    fn next(&mut self) -> Option<Load> {
        let first = self.again.pop_front().or_else(|| self.told.pop_front());
        if first.is_some() {
            return first;
        }
        let has_room = self.block_room.is_none_or(|room| self.blocks_taken < room);
        if has_room && let Some(load) = self.held.pop_front() {
            self.blocks_taken += 1;
            return Some(load);
        }
        if self.asked >= ASKED_MAX {
            return None;
        }
        while let Some(load) = self.waiting.pop_front() {
            match load {
                Load::Blocks(_) if has_room => {
                    self.blocks_taken += 1;
                    return Some(load);
                }
                Load::Blocks(_) => self.held.push_back(load),
                pages => return Some(pages),
            }
        }
        None
    }
}

/// Batches on their way, shared by the tap's threads and the lanes'.
#[derive(Debug)]
pub(crate) struct Queue {
    state: Mutex<State>,
    /// For lanes: a batch, the end, or a broken connection. Only who takes
    /// batches waits here: a new batch wakes one of them.
    work: Condvar,
    /// For lanes that can't connect: the end.
    over: Condvar,
    /// For the barrier: everything placed, or failed.
    drained: Condvar,
    /// For who tells ahead: less is waited for.
    has_room: Condvar,
}

/// What a lane that asked for work gets.
pub(crate) enum Work {
    Send(Load),
    /// The connection was found broken meanwhile.
    Broken,
    /// Nothing will come any more.
    End,
}

impl Queue {
    pub(crate) fn new() -> Self {
        Self {
            state: Mutex::new(State {
                again: VecDeque::new(),
                held: VecDeque::new(),
                told: VecDeque::new(),
                waiting: VecDeque::new(),
                block_room: None,
                blocks_taken: 0,
                out: 0,
                pages_out: 0,
                closed: false,
                failed: None,
                alive: 0,
                none_alive_since: Instant::now(),
                delivered: Delivered::default(),
                busy_since: None,
                pending: Pending::default(),
                asked: 0,
                spare: Spare::default(),
                ticket: 0,
            }),
            work: Condvar::new(),
            over: Condvar::new(),
            drained: Condvar::new(),
            has_room: Condvar::new(),
        }
    }

    pub(crate) fn submit(&self, load: Load) -> Result<(), LanesError> {
        let mut state = self.state.lock();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        if state.closed {
            return Err(LanesError::Stopped);
        }
        state.out += 1;
        match load.amount() {
            Amount::Pages { body_bytes, .. } => {
                state.pages_out += 1;
                state.busy_since.get_or_insert_with(Instant::now);
                state.delivered.backlog_bytes += body_bytes;
            }
            Amount::Blocks { data_bytes, .. } => {
                state.delivered.block_backlog_bytes += data_bytes;
            }
        }
        state.waiting.push_back(load);
        drop(state);
        self.work.notify_one();
        Ok(())
    }

    /// A batch that is told ahead is as good as submitted: nothing is drained before it
    /// is delivered. Blocks while the destination waits for too much. None if there
    /// will be no more batches, or once it is `over`.
    pub(crate) fn reserve(&self, over: impl Fn() -> bool) -> Option<()> {
        let mut state = self.state.lock();
        loop {
            if over() || state.failed.is_some() || state.closed {
                return None;
            }
            if state.pending.bytes() + (state.told.len() * BATCH_BYTES) as u64 <= TOLD_MAX_BYTES {
                state.enters();
                state.busy_since.get_or_insert_with(Instant::now);
                return Some(());
            }
            self.has_room.wait(&mut state);
        }
    }

    /// Who waits to reserve looks again.
    pub(crate) fn wake_reserving(&self) {
        let _state = self.state.lock();
        self.has_room.notify_all();
    }

    /// What was reserved is told, or is nothing.
    pub(crate) fn tell(&self, told: Option<Told>) {
        let mut state = self.state.lock();
        match told {
            Some(told) if state.failed.is_none() => {
                state.delivered.backlog_bytes += told.unkept.bytes();
                state.told.push_back(Load::Told(told));
                drop(state);
                self.work.notify_one();
            }
            _ => {
                state.leaves();
                self.has_less(state);
            }
        }
    }

    /// Pages of a batch that a lane has taken were told of ahead.
    pub(crate) fn came_after_told(&self, pages: usize) {
        if pages > 0 {
            let mut state = self.state.lock();
            state.delivered.backlog_bytes -= (pages * page::PAGE_BYTES) as u64;
        }
    }

    /// The next batch for a lane, or why there is none. Blocks. If the lanes have
    /// little left, `spare` says how many of the pages that the destination waits
    /// for they should have to send, and is told how many they could.
    pub(crate) fn take(&self, broken: impl Fn() -> bool, namer: Option<&dyn Namer>) -> Work {
        let mut state = self.state.lock();
        loop {
            if let Some(namer) = namer
                && let Some(pages) = state.spare(namer)
            {
                MutexGuard::unlocked(&mut state, || namer.has_spare(pages));
            }
            if state.failed.is_some() || state.is_over() {
                return Work::End;
            }
            if broken() {
                // It may have been woken for a batch: another takes it.
                self.work.notify_one();
                return Work::Broken;
            }
            if let Some(load) = state.next() {
                return Work::Send(load);
            }
            self.work.wait(&mut state);
        }
    }

    /// The destination has room for so many batches of blocks, all that were
    /// ever sent counted. It never takes back what it said.
    pub(crate) fn set_block_room(&self, batches: u64) {
        let mut state = self.state.lock();
        let known = state.block_room.unwrap_or(0);
        state.block_room = Some(known.max(batches));
        drop(state);
        self.work.notify_all();
    }

    /// A batch is placed, or taken over. Its buffer goes back to the pool here.
    pub(crate) fn placed(&self, load: Load) {
        let amount = load.amount();
        load.acknowledged();
        let mut state = self.state.lock();
        state.out -= 1;
        match amount {
            Amount::Pages { body_bytes, fill_bytes } => {
                state.pages_out -= 1;
                state.delivered.body_bytes += body_bytes;
                state.delivered.fill_bytes += fill_bytes;
                state.delivered.backlog_bytes -= body_bytes;
            }
            Amount::Blocks { data_bytes, zero_bytes } => {
                state.delivered.block_bytes += data_bytes;
                state.delivered.block_zero_bytes += zero_bytes;
                state.delivered.block_backlog_bytes -= data_bytes;
            }
        }
        self.has_less(state);
    }

    /// Something that was out is not any more.
    fn has_less(&self, mut state: MutexGuard<'_, State>) {
        self.has_room.notify_one();
        if state.pages_out == 0
            && let Some(since) = state.busy_since.take()
        {
            state.delivered.busy += since.elapsed();
        }
        if state.is_drained() {
            drop(state);
            self.drained.notify_all();
            self.wake_for_end();
        }
    }

    /// What a batch of names is to be called by.
    pub(crate) fn ticket(&self) -> u32 {
        let mut state = self.state.lock();
        state.ticket = state.ticket.wrapping_add(1);
        state.ticket
    }

    /// A batch goes by name.
    pub(crate) fn asks(&self) {
        self.state.lock().asked += 1;
    }

    /// The destination says what of a batch of names it wants, and what it has
    /// later; it has placed the rest.
    pub(crate) fn answered(&self, named: Named, wanted: u128, later: u128) -> Result<(), Nonsense> {
        let Named { mut batch, ticket } = named;
        let all = bits_of(batch.bodies().len());
        if (wanted | later) & !all != 0 || wanted & later != 0 {
            return Err(Nonsense);
        }
        let body_bytes = (batch.bodies().len() * page::PAGE_BYTES) as u64;
        let fill_bytes = batch.guest_bytes() - body_bytes;
        let placed = (all & !(wanted | later)).count_ones();
        let unkept = (later != 0).then(|| Unkept::of(&batch, later));
        batch.retain_bodies(|nth, _| is_set(wanted, nth));
        // They are placed already.
        batch.clear_fills();
        // Its buffer goes back to the pool before the lock is taken.
        let left = Some(batch).filter(|batch| !batch.is_empty());
        let mut state = self.state.lock();
        state.asked -= 1;
        state.delivered.fill_bytes += fill_bytes;
        state.has_named(u64::from(placed) * page::PAGE_BYTES as u64);
        state.leaves();
        if let Some(batch) = left {
            state.comes_again(Load::Wanted(batch));
        }
        if let Some(unkept) = unkept {
            state.enters();
            if let Some(resolved) = state.pending.wait(ticket, unkept, later)? {
                state.resolve(resolved);
            }
        }
        self.work.notify_all();
        self.has_less(state);
        Ok(())
    }

    /// The same of pages whose bodies are not kept.
    pub(crate) fn answered_of(
        &self,
        asked: Asked,
        wanted: u128,
        later: u128,
    ) -> Result<(), Nonsense> {
        let Asked { unkept, ticket } = asked;
        let all = bits_of(unkept.pages.len());
        if (wanted | later) & !all != 0 || wanted & later != 0 {
            return Err(Nonsense);
        }
        let placed = unkept.chosen(all & !(wanted | later));
        let mut state = self.state.lock();
        state.has_named(placed.bytes());
        state.leaves();
        if wanted != 0 {
            state.comes_again(Load::Again(unkept.chosen(wanted)));
        }
        if later != 0 {
            state.enters();
            if let Some(resolved) = state.pending.wait(ticket, unkept.chosen(later), later)? {
                state.resolve(resolved);
            }
        }
        self.work.notify_all();
        self.has_less(state);
        Ok(())
    }

    /// A batch that a lane has taken goes in two parts.
    pub(crate) fn divided(&self) {
        self.state.lock().enters();
    }

    /// The destination says what has become of pages that it waited for.
    pub(crate) fn late(&self, ticket: u32, wanted: Vec<u8>, more: bool) -> Result<(), Nonsense> {
        let mut state = self.state.lock();
        if let Some(resolved) = state.pending.late(ticket, wanted, more)? {
            state.resolve(resolved);
        }
        self.work.notify_all();
        self.has_less(state);
        Ok(())
    }

    /// Pages of a batch that a lane has taken are not sent after all.
    pub(crate) fn dropped(&self, pages: usize) {
        if pages > 0 {
            let bytes = pages as u64 * page::PAGE_BYTES as u64;
            let mut state = self.state.lock();
            state.delivered.backlog_bytes -= bytes;
            state.delivered.dropped_bytes += bytes;
        }
    }

    /// A lane died with these batches not acknowledged: others carry them, and
    /// before anything else, since they are the oldest. After a failure nobody
    /// does, and they are dropped: what waits for them learns it now.
    pub(crate) fn hand_back(&self, loads: impl DoubleEndedIterator<Item = Load>) {
        let mut state = self.state.lock();
        if state.failed.is_some() {
            drop(state);
            drop(loads.collect::<Vec<_>>());
            return;
        }
        for load in loads.rev() {
            if matches!(load, Load::Named(_) | Load::Asked(_)) {
                state.pending.void();
            }
            if matches!(load, Load::Named(_)) {
                state.asked -= 1;
            }
            let load = match load {
                // What they are named for is not known any more.
                Load::Asked(Asked { unkept, .. }) | Load::Told(Told { unkept, .. }) => {
                    Load::Again(unkept)
                }
                load => load,
            };
            state.again.push_front(load);
        }
        drop(state);
        self.work.notify_all();
    }

    /// Wakes all lanes, so that one sees that its connection broke.
    pub(crate) fn wake_lanes(&self) {
        let _state = self.state.lock();
        self.work.notify_all();
    }

    pub(crate) fn lane_up(&self) {
        self.state.lock().alive += 1;
    }

    pub(crate) fn lane_down(&self) {
        let mut state = self.state.lock();
        state.alive -= 1;
        if state.alive == 0 {
            state.none_alive_since = Instant::now();
        }
    }

    /// A lane could not connect. Fails everything if that is so for all lanes
    /// and for too long; returns whether to go on trying, after `pause`.
    pub(crate) fn could_not_connect(&self, why: &str, pause: Duration) -> bool {
        let mut state = self.state.lock();
        if state.alive == 0 && state.none_alive_since.elapsed() > ALL_DEAD_MAX {
            drop(state);
            let seconds = ALL_DEAD_MAX.as_secs();
            self.fail(LanesError::AllDead { seconds, last: why.to_owned() });
            return false;
        }
        let until = Instant::now() + pause;
        loop {
            if state.failed.is_some() || state.is_over() {
                return false;
            }
            if self.over.wait_until(&mut state, until).timed_out() {
                return true;
            }
        }
    }

    /// Blocks until all that was submitted is placed.
    pub(crate) fn wait_drained(&self) -> Result<(), LanesError> {
        let mut state = self.state.lock();
        loop {
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            if state.is_drained() {
                return Ok(());
            }
            self.drained.wait(&mut state);
        }
    }

    /// No more batches; lanes end once all is delivered.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.wake_for_end();
    }

    /// Ends everything now; batches that wait are dropped.
    pub(crate) fn fail(&self, error: LanesError) {
        let mut state = self.state.lock();
        state.failed.get_or_insert(error);
        let State { again, held, told, waiting, .. } = &mut *state;
        let lost = [again, held, told, waiting].map(std::mem::take);
        drop(state);
        self.wake_for_end();
        self.drained.notify_all();
        // Whoever issued them is told: not under the queue's lock.
        drop(lost);
    }

    fn wake_for_end(&self) {
        self.work.notify_all();
        self.has_room.notify_all();
        self.over.notify_all();
    }

    pub(crate) fn failure(&self) -> Option<LanesError> {
        self.state.lock().failed.clone()
    }

    pub(crate) fn delivered(&self) -> Delivered {
        let state = self.state.lock();
        let mut delivered = state.delivered;
        delivered.blocks_held = state.held.len() as u64;
        delivered.pending_bytes = state.pending.bytes();
        if let Some(since) = state.busy_since {
            delivered.busy += since.elapsed();
        }
        delivered
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use page::Pool;
    use proptest::prelude::*;

    use super::*;

    /// Lanes that can't connect wait beside those that carry, and have no use
    /// for a batch: woken for one, they would leave it lying for ever.
    #[test]
    fn a_batch_wakes_a_lane_that_takes_it() {
        const DEAD: usize = 8;
        let pool = page::Pool::new(1 << 20);
        let queue = Queue::new();
        queue.lane_up();
        thread::scope(|scope| {
            for _ in 0..DEAD {
                scope.spawn(|| while queue.could_not_connect("x", Duration::from_secs(1)) {});
            }
            // Most of them wait by now; which ones does not matter.
            thread::sleep(Duration::from_millis(50));
            let carrier = scope.spawn(|| {
                let mut carried = 0;
                while let Work::Send(load) = queue.take(|| false, None) {
                    carried += 1;
                    queue.placed(load);
                }
                carried
            });
            for _ in 0..100 {
                queue.submit(pool.take().unwrap().into()).unwrap();
                queue.wait_drained().unwrap();
            }
            queue.close();
            assert_eq!(carrier.join().unwrap(), 100);
        });
    }

    #[test]
    fn blocks_count_apart_from_pages_and_only_pages_make_lanes_busy() {
        let pool = page::Pool::new(4 * page::SLOT_BYTES);
        let queue = Queue::new();
        let mut blocks = pool.take_blocks().unwrap();
        blocks.push_data(1024);
        blocks.push_zero(4096);
        queue.submit(blocks.into()).unwrap();
        assert!(queue.state.lock().busy_since.is_none());
        let mut pages = pool.take().unwrap();
        pages.push_body(page::PageIndex(3), 0);
        queue.submit(pages.into()).unwrap();
        let counted = queue.delivered();
        assert_eq!((counted.backlog_bytes, counted.block_backlog_bytes), (4096, 1024));
        for _ in 0..2 {
            let Work::Send(load) = queue.take(|| false, None) else { panic!("two are there") };
            queue.placed(load);
        }
        let counted = queue.delivered();
        assert_eq!((counted.body_bytes, counted.backlog_bytes), (4096, 0));
        assert_eq!((counted.block_bytes, counted.block_zero_bytes), (1024, 4096));
        assert_eq!(counted.block_backlog_bytes, 0);
        queue.wait_drained().unwrap();
    }

    fn page(pool: &Arc<Pool>) -> Load {
        let mut pages = pool.take().unwrap();
        pages.push_body(page::PageIndex(0), 0);
        pages.into()
    }

    fn blocks(pool: &Arc<Pool>, sequence: u64) -> Load {
        let mut blocks = pool.take_blocks().unwrap();
        blocks.sequence = sequence;
        blocks.push_data(512);
        blocks.into()
    }

    /// What would go next: a batch of blocks by its number, or a page.
    fn number(load: &Load) -> Option<u64> {
        match load {
            Load::Blocks(batch) => Some(batch.sequence),
            _ => None,
        }
    }

    #[test]
    fn pages_pass_blocks_that_have_no_room() {
        let pool = Pool::new(16 * page::SLOT_BYTES);
        let queue = Queue::new();
        queue.set_block_room(2);
        for sequence in 0..4 {
            queue.submit(blocks(&pool, sequence)).unwrap();
            queue.submit(page(&pool)).unwrap();
        }
        let take = || queue.state.lock().next();
        let went: Vec<_> = std::iter::from_fn(take).collect();
        let numbers: Vec<_> = went.iter().map(number).collect();
        assert_eq!(numbers, [Some(0), None, Some(1), None, None, None]);
        assert_eq!(queue.delivered().blocks_held, 2);
        // It is a count of all, and what was promised stays so.
        queue.set_block_room(3);
        queue.set_block_room(1);
        let third = take().unwrap();
        assert_eq!(number(&third), Some(2));
        assert!(take().is_none());
        // What a dead lane had needs no room: it has some already.
        queue.hand_back([third].into_iter());
        let third = take().unwrap();
        assert_eq!(number(&third), Some(2));
        for load in went.into_iter().chain([third]) {
            queue.placed(load);
        }
        queue.close();
        queue.set_block_room(4);
        let Work::Send(last) = queue.take(|| false, None) else { panic!("there is room for it") };
        queue.placed(last);
        assert!(matches!(queue.take(|| false, None), Work::End));
    }

    #[test]
    fn what_has_no_answer_yet_holds_up_the_next_names() {
        let pool = Pool::new((ASKED_MAX + 4) * page::SLOT_BYTES);
        let queue = Queue::new();
        let mut asked: Vec<Load> = (0..ASKED_MAX)
            .map(|_| {
                queue.submit(Load::from(pool.take().unwrap())).unwrap();
                let Some(Load::Pages(batch)) = queue.state.lock().next() else { panic!() };
                queue.asks();
                Load::Named(Named { batch, ticket: queue.ticket() })
            })
            .collect();
        queue.submit(Load::from(pool.take().unwrap())).unwrap();
        assert!(queue.state.lock().next().is_none());
        let Some(Load::Named(named)) = asked.pop() else { panic!() };
        queue.answered(named, 0, 0).unwrap();
        let next = queue.state.lock().next().unwrap();
        queue.placed(next);
        // A lane has died: all of it is asked anew.
        queue.hand_back(asked.into_iter());
        queue.submit(Load::from(pool.take().unwrap())).unwrap();
        let mut left = 0;
        while let Some(load) = queue.state.lock().next() {
            assert_eq!(matches!(load, Load::Named(_)), left < ASKED_MAX - 1);
            left += 1;
        }
        assert_eq!(left, ASKED_MAX);
    }

    #[test]
    fn room_wakes_a_lane_and_a_failure_drops_what_has_none() {
        let pool = Pool::new(4 * page::SLOT_BYTES);
        let queue = Queue::new();
        queue.set_block_room(0);
        thread::scope(|scope| {
            let lane = scope.spawn(|| match queue.take(|| false, None) {
                Work::Send(load) => queue.placed(load),
                _ => panic!("there is a batch"),
            });
            queue.submit(blocks(&pool, 0)).unwrap();
            queue.set_block_room(1);
            lane.join().unwrap();
        });
        queue.wait_drained().unwrap();
        queue.submit(blocks(&pool, 1)).unwrap();
        assert!(queue.state.lock().next().is_none());
        queue.fail(LanesError::Stopped);
        assert_eq!(pool.out_bytes(), 0);
    }

    /// What happens to a queue.
    #[derive(Clone, Debug)]
    enum Step {
        Submit { is_page: bool },
        Room(u64),
        Take,
        Place,
        Die,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => any::<bool>().prop_map(|is_page| Step::Submit { is_page }),
            1 => (0..12_u64).prop_map(Step::Room),
            4 => Just(Step::Take),
            2 => Just(Step::Place),
            1 => Just(Step::Die),
        ]
    }

    proptest! {
        /// Whatever lanes take, place and lose: never more batches of blocks
        /// are out than there is room for, each is placed once and in the end
        /// all are, and no page waits for room.
        #[test]
        fn room_bounds_blocks_and_holds_nothing_else_up(
            steps in prop::collection::vec(step(), 1..120),
        ) {
            let pool = Pool::new(256 * page::SLOT_BYTES);
            let queue = Queue::new();
            let (mut room, mut submitted, mut pages_waiting) = (0, 0, 0_usize);
            let mut flying: Vec<Load> = Vec::new();
            let mut taken = std::collections::BTreeSet::new();
            let mut placed = Vec::new();
            queue.set_block_room(0);
            for step in steps.into_iter().chain([Step::Room(u64::MAX)]) {
                match step {
                    Step::Submit { is_page: true } => {
                        queue.submit(page(&pool)).unwrap();
                        pages_waiting += 1;
                    }
                    Step::Submit { is_page: false } => {
                        queue.submit(blocks(&pool, submitted)).unwrap();
                        submitted += 1;
                    }
                    Step::Room(batches) => {
                        room = room.max(batches);
                        queue.set_block_room(batches);
                    }
                    Step::Take => match queue.state.lock().next() {
                        Some(load) => {
                            match number(&load) {
                                Some(sequence) => drop(taken.insert(sequence)),
                                None => pages_waiting -= 1,
                            }
                            prop_assert!(taken.len() as u64 <= room);
                            // Those that were never sent go in their order.
                            prop_assert!(taken.iter().copied().eq(0..taken.len() as u64));
                            flying.push(load);
                        }
                        None => prop_assert_eq!(pages_waiting, 0),
                    },
                    Step::Place if !flying.is_empty() => {
                        let load = flying.remove(0);
                        placed.extend(number(&load));
                        queue.placed(load);
                    }
                    Step::Place => {}
                    Step::Die => {
                        pages_waiting += flying.iter().filter(|load| number(load).is_none()).count();
                        queue.hand_back(std::mem::take(&mut flying).into_iter());
                    }
                }
            }
            flying.extend(std::iter::from_fn(|| queue.state.lock().next()));
            for load in flying {
                placed.extend(number(&load));
                queue.placed(load);
            }
            queue.wait_drained().unwrap();
            placed.sort_unstable();
            prop_assert!(placed.into_iter().eq(0..submitted));
            prop_assert_eq!(pool.out_bytes(), 0);
        }
    }

    #[test]
    fn what_is_handed_back_after_a_failure_is_dropped() {
        let pool = page::Pool::new(4 * page::SLOT_BYTES);
        let queue = Queue::new();
        queue.submit(pool.take().unwrap().into()).unwrap();
        let Work::Send(load) = queue.take(|| false, None) else { panic!("one is there") };
        queue.fail(LanesError::Stopped);
        queue.hand_back(std::iter::once(load));
        assert_eq!(pool.out_bytes(), 0);
    }
}
