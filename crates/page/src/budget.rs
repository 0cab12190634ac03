//! The memory that all pools of one direction share.
//!
//! The budget is one bound for many migrations. Each pool reserves a minimum
//! when it is created, enough to make progress, so no pool depends on another
//! returning its batches. The rest is common: a pool that has used up its
//! minimum borrows from it, and blocks while it is empty.
//!
//! A pool that joins while everything is lent out is owed its minimum. Returned
//! slots go to owed pools before any pool borrows again; another pool's minimum
//! is never touched. A new pool is refused only if the minimums themselves don't
//! fit, so a promised minimum can always be kept.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use crate::slot::{SLOT_BYTES, Slot};

/// Slots that a pool always gets: one that QEMU's side fills, one being encoded,
/// one on the wire, one being placed.
const MINIMUM_SLOTS: usize = 4;

/// The budget can't promise the minimum of another migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetFull {
    /// Bytes that the migration needs.
    pub needed_bytes: usize,
    /// Bytes of the whole budget.
    pub total_bytes: usize,
}

/// The pool was closed, because the migration has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the buffer pool was closed")]
pub struct PoolClosed;

/// A pool's slots, held and allowed.
#[derive(Debug)]
struct Member {
    minimum: usize,
    /// Slots of the minimum that are reserved; the rest is owed.
    backed: usize,
    out: usize,
    high_water: usize,
    limit: usize,
    waiting: usize,
    closed: bool,
    freed: Arc<Condvar>,
}

impl Member {
    fn owed(&self) -> usize {
        self.minimum - self.backed
    }
}

#[derive(Debug)]
struct State {
    total: usize,
    /// The sum of all minimums; never more than the total.
    promised: usize,
    /// Slots neither reserved nor lent. Zero while any pool is owed.
    common: usize,
    out: usize,
    high_water: usize,
    /// Buffers that no batch uses, kept for the next one.
    free: Vec<Slot>,
    members: Vec<Option<Member>>,
}

impl State {
    fn member(&mut self, place: usize) -> &mut Member {
        self.members[place].as_mut().expect("a pool keeps its place until it is dropped")
    }

    fn members(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().flatten()
    }

    fn admit(&mut self, mut member: Member) -> Result<usize, BudgetFull> {
        if member.minimum > self.total - self.promised {
            return Err(BudgetFull {
                needed_bytes: member.minimum.saturating_mul(SLOT_BYTES),
                total_bytes: self.total * SLOT_BYTES,
            });
        }
        self.promised += member.minimum;
        member.backed = member.minimum.min(self.common);
        self.common -= member.backed;
        let place = self.members.iter().position(Option::is_none).unwrap_or(self.members.len());
        if place == self.members.len() {
            self.members.push(None);
        }
        self.members[place] = Some(member);
        Ok(place)
    }

    fn may_take(&self, member: &Member) -> bool {
        member.out < member.limit && (member.out < member.backed || self.common > 0)
    }

    fn take(&mut self, place: usize) -> bool {
        let common = self.common;
        let member = self.member(place);
        let borrows = member.out >= member.backed;
        if member.out >= member.limit || (borrows && common == 0) {
            return false;
        }
        member.out += 1;
        member.high_water = member.high_water.max(member.out);
        self.common -= usize::from(borrows);
        self.out += 1;
        self.high_water = self.high_water.max(self.out);
        true
    }

    /// Takes a slot back; returns whether other pools can have it.
    fn give_back(&mut self, place: usize) -> bool {
        let member = self.member(place);
        let was_borrowed = member.out > member.backed;
        member.out -= 1;
        self.out -= 1;
        if was_borrowed {
            self.share_out(1);
        }
        was_borrowed
    }

    fn leave(&mut self, place: usize) {
        let Some(member) = self.members[place].take() else { return };
        debug_assert_eq!(member.out, 0, "each batch keeps its pool");
        self.promised -= member.minimum;
        self.share_out(member.backed);
    }

    /// Gives slots to pools that are owed, and the rest to the common reserve.
    fn share_out(&mut self, mut slots: usize) {
        for member in self.members.iter_mut().flatten() {
            let now = member.owed().min(slots);
            member.backed += now;
            slots -= now;
        }
        self.common += slots;
    }

    /// Keeps as many buffers as the pools can use at once, no more.
    fn trim(&mut self) {
        let limits = self.members().map(|one| one.limit).fold(0, usize::saturating_add);
        let keep = limits.min(self.total).saturating_sub(self.out);
        self.free.truncate(keep);
    }

    /// Wakes one waiting thread of each pool that can take a slot (at least as
    /// many as there are free slots), or all of them.
    fn wake(&self, all: bool) {
        for member in self.members().filter(|one| one.waiting > 0 && self.may_take(one)) {
            if all {
                member.freed.notify_all();
            } else {
                member.freed.notify_one();
            }
        }
    }
}

/// Bytes shared by many pools; see the module documentation.
#[derive(Debug)]
pub struct Budget {
    state: Mutex<State>,
}

impl Budget {
    /// A budget of `bytes`, rounded down to whole slots of [`SLOT_BYTES`].
    #[must_use]
    pub fn new(bytes: usize) -> Arc<Self> {
        let total = bytes / SLOT_BYTES;
        let state = State {
            total,
            promised: 0,
            common: total,
            out: 0,
            high_water: 0,
            free: Vec::new(),
            members: Vec::new(),
        };
        Arc::new(Self { state: Mutex::new(state) })
    }

    /// Bytes of the whole budget.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.state.lock().total * SLOT_BYTES
    }

    /// Bytes of all batches in use.
    #[must_use]
    pub fn out_bytes(&self) -> usize {
        self.state.lock().out * SLOT_BYTES
    }

    /// The most bytes that were ever in use at once.
    #[must_use]
    pub fn high_water_bytes(&self) -> usize {
        self.state.lock().high_water * SLOT_BYTES
    }

    pub(crate) fn join(&self, limit_bytes: usize) -> Result<Seat, BudgetFull> {
        let limit = slots_of(limit_bytes);
        let freed = Arc::new(Condvar::new());
        let minimum = MINIMUM_SLOTS.min(limit);
        let member = Member { minimum, limit, ..Member::new(Arc::clone(&freed)) };
        let place = self.state.lock().admit(member)?;
        Ok(Seat { place, freed })
    }

    /// Takes a slot for the pool at `seat`, with a buffer if a free one exists.
    /// Blocks while there is no slot.
    pub(crate) fn take(&self, seat: &Seat) -> Result<Option<Slot>, PoolClosed> {
        let mut state = self.state.lock();
        loop {
            if state.member(seat.place).closed {
                return Err(PoolClosed);
            }
            if state.take(seat.place) {
                return Ok(state.free.pop());
            }
            state.member(seat.place).waiting += 1;
            seat.freed.wait(&mut state);
            state.member(seat.place).waiting -= 1;
        }
    }

    /// Takes back a slot, with its buffer if it had one.
    pub(crate) fn give_back(&self, seat: &Seat, slot: Option<Slot>) {
        let mut state = self.state.lock();
        let for_others = state.give_back(seat.place);
        state.free.extend(slot);
        state.trim();
        if for_others {
            state.wake(false);
        }
        drop(state);
        if !for_others {
            seat.freed.notify_one();
        }
    }

    pub(crate) fn set_limit_bytes(&self, seat: &Seat, limit_bytes: usize) {
        let limit = slots_of(limit_bytes);
        let mut state = self.state.lock();
        let grown = limit > state.member(seat.place).limit;
        state.member(seat.place).limit = limit;
        state.trim();
        drop(state);
        if grown {
            seat.freed.notify_all();
        }
    }

    pub(crate) fn close(&self, seat: &Seat) {
        self.state.lock().member(seat.place).closed = true;
        seat.freed.notify_all();
    }

    pub(crate) fn leave(&self, seat: &Seat) {
        let mut state = self.state.lock();
        state.leave(seat.place);
        state.trim();
        state.wake(true);
    }

    /// Whether a thread waits for a slot of the pool at `seat`.
    pub(crate) fn is_used_up(&self, seat: &Seat) -> bool {
        self.state.lock().member(seat.place).waiting > 0
    }

    /// Bytes of a pool's batches in use, and the most that ever were.
    pub(crate) fn used_bytes(&self, seat: &Seat) -> (usize, usize) {
        let mut state = self.state.lock();
        let member = state.member(seat.place);
        (member.out * SLOT_BYTES, member.high_water * SLOT_BYTES)
    }
}

impl Member {
    fn new(freed: Arc<Condvar>) -> Self {
        Self {
            minimum: 0,
            backed: 0,
            out: 0,
            high_water: 0,
            limit: 0,
            waiting: 0,
            closed: false,
            freed,
        }
    }
}

/// A pool's place in a budget.
#[derive(Debug)]
pub(crate) struct Seat {
    place: usize,
    freed: Arc<Condvar>,
}

/// A limit in slots, at least one.
fn slots_of(limit_bytes: usize) -> usize {
    (limit_bytes / SLOT_BYTES).max(1)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use proptest::prelude::*;

    use super::*;
    use crate::Pool;

    #[derive(Clone, Debug)]
    enum Step {
        Join { limit: usize },
        Take(usize),
        GiveBack(usize),
        Limit(usize, usize),
        Leave(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        let which = 0..8_usize;
        prop_oneof![
            1 => (1..20_usize).prop_map(|limit| Step::Join { limit }),
            8 => which.clone().prop_map(Step::Take),
            6 => which.clone().prop_map(Step::GiveBack),
            1 => (which.clone(), 1..20_usize).prop_map(|(one, limit)| Step::Limit(one, limit)),
            1 => which.prop_map(Step::Leave),
        ]
    }

    /// The invariants between any two steps.
    fn check(state: &State) -> Result<(), TestCaseError> {
        let sum = |of: fn(&Member) -> usize| state.members().map(of).sum::<usize>();
        let lent = sum(|one| one.out.saturating_sub(one.backed));
        prop_assert_eq!(sum(|one| one.backed) + lent + state.common, state.total);
        prop_assert_eq!(sum(|one| one.minimum), state.promised);
        prop_assert_eq!(sum(|one| one.out), state.out);
        prop_assert!(state.promised <= state.total);
        prop_assert!(state.out <= state.total, "the bound holds");
        prop_assert!(state.common == 0 || sum(Member::owed) == 0, "debts first");
        for member in state.members().filter(|one| one.owed() == 0) {
            let below = member.out < member.minimum.min(member.limit);
            prop_assert!(!below || state.may_take(member), "a minimum can always be had");
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn the_bound_and_each_minimum_hold_whatever_happens(
            total in 0..24_usize,
            steps in proptest::collection::vec(step(), 1..300),
        ) {
            let budget = Budget::new(total * SLOT_BYTES);
            let mut state = budget.state.lock();
            let member = || Member::new(Arc::new(Condvar::new()));
            for step in steps {
                let places: Vec<_> =
                    (0..state.members.len()).filter(|place| state.members[*place].is_some()).collect();
                let one = |nth: usize| places.get(nth).copied();
                match step {
                    Step::Join { limit } => {
                        let minimum = MINIMUM_SLOTS.min(limit);
                        let fits = state.promised + minimum <= total;
                        let place = state.admit(Member { minimum, limit, ..member() });
                        prop_assert_eq!(place.is_ok(), fits);
                    }
                    Step::Take(nth) => {
                        if let Some(place) = one(nth) {
                            let before = state.member(place).out;
                            let took = state.take(place);
                            prop_assert_eq!(state.member(place).out, before + usize::from(took));
                            prop_assert!(!took || before < state.member(place).limit);
                        }
                    }
                    Step::GiveBack(nth) => {
                        if let Some(place) = one(nth).filter(|place| state.member(*place).out > 0) {
                            state.give_back(place);
                        }
                    }
                    Step::Limit(nth, limit) => {
                        if let Some(place) = one(nth) {
                            state.member(place).limit = limit;
                        }
                    }
                    Step::Leave(nth) => {
                        if let Some(place) = one(nth).filter(|place| state.member(*place).out == 0) {
                            state.leave(place);
                        }
                    }
                }
                check(&state)?;
            }
        }
    }

    /// Batches of one migration: each keeps its slot at the source until it has
    /// one at the destination.
    fn migrate(source: &Arc<Pool>, destination: &Arc<Pool>, batches: usize, fillers: usize) {
        let (lane, arrived) = mpsc::channel();
        thread::scope(|scope| {
            for _ in 0..fillers {
                let lane = lane.clone();
                scope.spawn(move || {
                    for nth in 0..batches / fillers {
                        let batch = source.take().unwrap();
                        if nth % 7 == 0 {
                            thread::yield_now();
                        }
                        lane.send(batch).unwrap();
                    }
                });
            }
            drop(lane);
            for batch in arrived {
                let placed = destination.take().unwrap();
                drop(batch);
                drop(placed);
            }
        });
    }

    #[test]
    fn migrations_that_cross_end_and_never_use_more_than_there_is() {
        const MIGRATIONS: usize = 3;
        for slots in [2 * MINIMUM_SLOTS * MIGRATIONS, 2 * MINIMUM_SLOTS * MIGRATIONS + 5] {
            // One budget per host for both directions, which is harder than in
            // production.
            let hosts = [(); 2].map(|()| Budget::new(slots * SLOT_BYTES));
            thread::scope(|scope| {
                for nth in 0..2 * MIGRATIONS {
                    let [here, there] = [&hosts[nth % 2], &hosts[(nth + 1) % 2]];
                    let source = Pool::within(here, slots * SLOT_BYTES).unwrap();
                    let destination = Pool::within(there, slots * SLOT_BYTES).unwrap();
                    scope.spawn(move || migrate(&source, &destination, 600, 1 + nth % 3));
                }
            });
            for host in hosts {
                assert!(host.high_water_bytes() <= host.bytes());
                assert_eq!((host.out_bytes(), host.state.lock().promised), (0, 0));
                assert!(host.state.lock().free.is_empty(), "an idle agent keeps no buffers");
            }
        }
    }

    #[test]
    fn a_pool_that_hoards_slots_does_not_stop_the_others() {
        let budget = Budget::new(20 * SLOT_BYTES);
        let hoarder = Pool::within(&budget, usize::MAX).unwrap();
        let mut kept: Vec<_> = (0..20).map(|_| hoarder.take().unwrap()).collect();
        let lent = kept.split_off(4);
        let others = [(); 4].map(|()| Pool::within(&budget, usize::MAX).unwrap());
        thread::scope(|scope| {
            for pool in &others {
                scope.spawn(|| (0..500).for_each(|_| drop(pool.take().unwrap())));
            }
            // The pools are owed their minimums, and get them as slots come
            // back.
            drop(lent);
        });
        let refused = Pool::within(&budget, SLOT_BYTES).unwrap_err();
        let (needed_bytes, total_bytes) = (SLOT_BYTES, budget.bytes());
        assert_eq!(refused, BudgetFull { needed_bytes, total_bytes });
        for pool in &others {
            // All at once: each pool has its own minimum.
            kept.extend((0..4).map(|_| pool.take().unwrap()));
        }
        assert_eq!(budget.out_bytes(), budget.bytes());
    }

    #[test]
    fn closing_one_pool_leaves_the_others_alone() {
        let budget = Budget::new(8 * SLOT_BYTES);
        let [one, other] = [(); 2].map(|()| Pool::within(&budget, usize::MAX).unwrap());
        let held: Vec<_> = (0..4).map(|_| one.take().unwrap()).collect();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| one.take().map(drop));
            one.close();
            assert_eq!(waiting.join().unwrap(), Err(PoolClosed));
        });
        drop(other.take().unwrap());
        drop(held);
        assert_eq!(budget.out_bytes(), 0);
    }
}
