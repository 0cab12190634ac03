//! One move of a gang: started, watched and, if needed, cancelled, by orders to the agent of
//! the source host.
//!
//! That agent moves the VM by itself. If it can't be reached for a while, only progress is
//! missed. If it stays silent, this VM's part in the gang ends, but its migration may not.

use std::sync::Arc;
use std::time::{Duration, Instant};

use api::{Figures, MigrateRequest, MoveState, Outcome, Progress, ReadDisks, Share, VmStatus};
use crossbeam_channel::{Receiver, RecvTimeoutError, TryRecvError};

use super::cluster::{ANSWER_MAX, Agents, Cause, Give, Reach, Unreached, unexpected};
use super::limit_order::{self, LimitAnswer, LimitOrder};
use wire::gang::{Answer, Counted, Order};

/// The interval between queries about a migration whose phase does not change.
const LOOK: Duration = Duration::from_millis(500);

/// How long a move waits for an agent.
#[derive(Clone, Copy)]
pub(super) struct Patience {
    /// An agent that is silent, or busy, for longer is no longer waited for; a restart takes less.
    silence_max: Duration,
    /// How long an agent may carry out an order whose answer is lost.
    order_max: Duration,
    /// The interval between attempts to reach it.
    retry: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        let (silence_max, retry) = (Duration::from_secs(30), Duration::from_secs(1));
        Self { silence_max, order_max: ANSWER_MAX, retry }
    }
}

/// What to do with a move.
pub(super) enum Recall {
    /// Cancel it; the VM stays.
    Cancel,
    /// Leave it alone, because this agent ends.
    Leave,
}

/// How a move ended.
pub(super) struct MoveEnd {
    pub(super) state: MoveState,
    pub(super) reason: Option<String>,
    pub(super) in_doubt: bool,
    pub(super) figures: Option<Figures>,
    /// The source's agent did not answer any more, so it was not ordered to begin.
    pub(super) is_silent: bool,
}

impl MoveEnd {
    fn of(state: MoveState) -> Self {
        Self { state, reason: None, in_doubt: false, figures: None, is_silent: false }
    }

    pub(super) fn failed(reason: String) -> Self {
        Self { reason: Some(reason), ..Self::of(MoveState::Failed) }
    }

    /// It is not known how the migration ended, or whether it did: the VM may be at either host.
    pub(super) fn unknown(reason: String) -> Self {
        Self { in_doubt: true, ..Self::failed(reason) }
    }
}

/// The result of the order to start.
enum Started<S> {
    Running(S),
    /// The answer is lost: the migration may have started, or may still begin.
    Unanswered,
    /// It has not started; none if it was left alone.
    Over(Option<MoveEnd>),
}

/// One move.
pub(super) struct Flight<A = Agents> {
    pub(super) agents: A,
    pub(super) patience: Patience,
    pub(super) from: String,
    pub(super) to: String,
    pub(super) migration: String,
    pub(super) request: MigrateRequest,
    /// It was started by an earlier run of this agent.
    pub(super) is_started: bool,
    pub(super) recall: Receiver<Recall>,
    pub(super) limit: Arc<LimitOrder>,
}

impl<A: Reach> Flight<A> {
    /// Leads the move to its end; none if it was left alone.
    pub(super) fn fly(self, mut show: impl FnMut(Progress)) -> Option<MoveEnd> {
        let mut session = None;
        // Since when the order to start is without an answer.
        let mut unanswered: Option<Instant> = None;
        if !self.is_started {
            match self.begin() {
                Started::Running(started) => session = Some(started),
                Started::Unanswered => unanswered = Some(Instant::now()),
                Started::Over(end) => return end,
            }
        }
        let mut seen = None;
        let mut silent_since: Option<Instant> = None;
        let (mut cancel, mut was_cancelled) = (false, false);
        loop {
            match self.recall.try_recv() {
                Ok(Recall::Cancel) => cancel = true,
                Ok(Recall::Leave) | Err(TryRecvError::Disconnected) => return None,
                Err(TryRecvError::Empty) => {}
            }
            was_cancelled |= cancel;
            let asked = Instant::now();
            match self.look(&mut session, &mut cancel, seen) {
                Ok(Answer::Progress { progress, figures }) => {
                    (silent_since, unanswered) = (None, None);
                    if let Some(outcome) = &progress.outcome {
                        return Some(ended(outcome, progress.in_doubt, figures));
                    }
                    let is_news = seen.replace(progress.phase) != Some(progress.phase);
                    show(self.named(*progress));
                    // Limits the rate of queries if the agent answers without waiting.
                    if !is_news && asked.elapsed() < LOOK / 2 && self.pause(LOOK / 2, &mut cancel) {
                        return None;
                    }
                }
                // The order may still be carried out, and is cancelled then if it has to be.
                Ok(Answer::NoSuch) if self.may_begin(unanswered) => {
                    (silent_since, cancel) = (None, was_cancelled);
                    if self.pause(self.patience.retry, &mut cancel) {
                        return None;
                    }
                }
                // If it began later, it would run unwatched.
                Ok(Answer::NoSuch) if unanswered.is_some() && !was_cancelled => cancel = true,
                Ok(Answer::NoSuch) => return Some(self.look_for_it(unanswered.is_none())),
                Ok(answer) => return Some(self.untold(&unexpected(answer))),
                Err(why) => {
                    session = None;
                    let since = *silent_since.get_or_insert_with(Instant::now);
                    if since.elapsed() > self.patience.silence_max {
                        return Some(self.given_up(&why));
                    }
                    if self.pause(self.patience.retry, &mut cancel) {
                        return None;
                    }
                }
            }
        }
    }

    /// Waits, unless the move is recalled; returns whether it is to be left alone.
    fn pause(&self, time: Duration, cancel: &mut bool) -> bool {
        match self.recall.recv_timeout(time) {
            Ok(Recall::Cancel) => {
                *cancel = true;
                false
            }
            Ok(Recall::Leave) | Err(RecvTimeoutError::Disconnected) => true,
            Err(RecvTimeoutError::Timeout) => false,
        }
    }

    /// Orders the start. An agent that is stopping may be starting anew, so it is ordered again.
    fn begin(&self) -> Started<A::Session> {
        let since = Instant::now();
        loop {
            let mut session = match self.reach(since) {
                Ok(session) => session,
                Err(end) => return Started::Over(end),
            };
            match self.order_start(&mut session) {
                Ok(Answer::Started) => return Started::Running(session),
                Ok(Answer::Refused { is_stopping: true, .. }) if self.has_patience(since) => {}
                Ok(answer) => return Started::Over(Some(MoveEnd::failed(unexpected(answer)))),
                Err(why) => {
                    tracing::debug!(vm = self.request.vm, why, "the answer to an order is lost");
                    return Started::Unanswered;
                }
            }
            if let Err(end) = self.wait_to_begin() {
                return Started::Over(end);
            }
        }
    }

    fn order_start(&self, session: &mut A::Session) -> Result<Answer, String> {
        let order = |request: MigrateRequest| {
            let (migration, request) = (self.migration.clone(), Box::new(request));
            Order::Start { migration, request }
        };
        match session.give(&order(self.request.clone()), ANSWER_MAX)? {
            Answer::Unknown => {
                let request = for_the_first_release(self.request.clone());
                session.give(&order(request), ANSWER_MAX)
            }
            answer => Ok(answer),
        }
    }

    /// Opens the first session, which is waited for `since` then; the error is as in
    /// [`Started::Over`].
    ///
    /// Nothing has started, so there is time for an agent that is busy or starts anew.
    fn reach(&self, since: Instant) -> Result<A::Session, Option<MoveEnd>> {
        let mut is_silent = true;
        loop {
            let Unreached { why, cause } = match self.agents.open(&self.from) {
                Ok(session) => return Ok(session),
                Err(unreached) => unreached,
            };
            is_silent &= cause == Cause::Silence;
            if cause == Cause::Lasting || !self.has_patience(since) {
                let from = &self.from;
                let why = format!(
                    "the agent of {from} can't be reached: {why}. The migration has not started"
                );
                return Err(Some(MoveEnd { is_silent, ..MoveEnd::failed(why) }));
            }
            self.wait_to_begin()?;
        }
    }

    fn has_patience(&self, since: Instant) -> bool {
        since.elapsed() <= self.patience.silence_max
    }

    /// Waits before the next attempt to begin; the error is as in [`Started::Over`].
    fn wait_to_begin(&self) -> Result<(), Option<MoveEnd>> {
        let mut cancel = false;
        match self.pause(self.patience.retry, &mut cancel) {
            true => Err(None),
            false if cancel => Err(Some(MoveEnd::of(MoveState::Cancelled))),
            false => Ok(()),
        }
    }

    /// Whether the order to start, which has no answer since then, may still be carried out.
    fn may_begin(&self, unanswered: Option<Instant>) -> bool {
        unanswered.is_some_and(|since| since.elapsed() < self.patience.order_max)
    }

    /// Queries the progress, after ordering a cancel or another limit if one is due.
    fn look(
        &self,
        session: &mut Option<A::Session>,
        cancel: &mut bool,
        seen: Option<api::Phase>,
    ) -> Result<Answer, String> {
        let open = match session {
            Some(open) => open,
            None => session.insert(self.agents.open(&self.from)?),
        };
        let migration = self.migration.clone();
        if *cancel {
            // Whether it was too late, the query below shows.
            open.give(&Order::Cancel { migration: migration.clone() }, ANSWER_MAX)?;
            *cancel = false;
        }
        if let Some(limit) = self.limit.due() {
            let (migration, change) = (migration.clone(), limit_order::change(limit));
            let answer = open.give(&Order::Set { migration, change }, ANSWER_MAX);
            match answer.inspect_err(|_| self.limit.lose())? {
                Answer::Set => self.limit.answer(LimitAnswer::Set),
                // It may still begin, and starts with the limit of its request.
                Answer::NoSuch => {}
                _ => self.limit.answer(LimitAnswer::Refused),
            }
        }
        let wait_ms = u64::try_from(LOOK.as_millis()).unwrap_or_default();
        open.give(&Order::Watch { migration, seen, wait_ms }, ANSWER_MAX)
    }

    /// Finds out where the VM is.
    ///
    /// The source agent doesn't know the migration. If it was started, the agent was restarted, and
    /// the journals of both sides decide the VM's fate.
    fn look_for_it(&self, was_started: bool) -> MoveEnd {
        let Self { from, to, migration, .. } = self;
        let vm = &self.request.vm;
        let what = if was_started { "was restarted" } else { "has not received the order" };
        let at = |host: &str| -> Result<Option<Counted>, String> {
            let census = self.agents.census(host)?;
            Ok(census.vms.into_iter().find(|one| one.name == *vm))
        };
        let has_come = |one: &Counted| matches!(one.status, VmStatus::Running | VmStatus::Paused);
        match (at(from), at(to)) {
            (Ok(None), Ok(Some(there))) if has_come(&there) => MoveEnd::of(MoveState::Done),
            (Ok(Some(here)), _) if here.migration.as_ref() == Some(migration) => {
                MoveEnd::unknown(format!(
                    "the agent of {from} has not reported the start. Migration {migration} may \
                     continue: `droveway list` there shows where the VM is"
                ))
            }
            (Ok(Some(here)), _) if here.status == VmStatus::Dead => MoveEnd::failed(format!(
                "the agent of {from} {what}, and {vm} is dead there: `droveway show {vm}` on \
                 {from} shows why"
            )),
            (Ok(Some(here)), _)
                if !matches!(here.status, VmStatus::InDoubt | VmStatus::Unreadable) =>
            {
                MoveEnd::failed(format!("the agent of {from} {what}. {vm} continues at {from}"))
            }
            _ => MoveEnd::unknown(format!(
                "the agent of {from} {what}, and it is not settled where {vm} is: see `droveway \
                 list` on {from} and {to}"
            )),
        }
    }

    /// The agent answers, and does not report how the migration goes.
    fn untold(&self, why: &str) -> MoveEnd {
        let Self { from, migration, .. } = self;
        MoveEnd::unknown(format!(
            "the agent of {from} does not report progress: {why}. Migration {migration} may \
             continue: `droveway list` there shows where the VM is"
        ))
    }

    fn given_up(&self, why: &str) -> MoveEnd {
        let Self { from, migration, .. } = self;
        MoveEnd::unknown(format!(
            "the agent of {from} has not answered for {} s: {why}. Migration {migration} may \
             continue: `droveway list` there shows where the VM is",
            self.patience.silence_max.as_secs()
        ))
    }

    /// Replaces the id and names in the progress, which come from a peer, by this agent's own.
    fn named(&self, progress: Progress) -> Progress {
        Progress {
            id: self.migration.clone(),
            vm: self.request.vm.clone(),
            from: self.from.clone(),
            to: self.to.clone(),
            ..progress
        }
    }
}

/// A request without the options that came after release 0.1.0, whose agents don't understand an
/// order that has one of them.
fn for_the_first_release(mut request: MigrateRequest) -> MigrateRequest {
    request.sharing.together = false;
    request.bounds.reserve_min_bits_per_s = None;
    request.bounds.cpu_floor = None;
    (request.accept_lost_writes, request.accept_missing_taps) = (false, false);
    if request.sharing.share == Share::Auto {
        request.sharing.share = Share::Off;
    }
    if request.storage.read == ReadDisks::On {
        request.storage.read = ReadDisks::Auto;
    }
    request
}

fn ended(outcome: &Outcome, in_doubt: bool, figures: Option<Figures>) -> MoveEnd {
    let reason = match outcome {
        Outcome::Failed(why) => Some(why.clone()),
        Outcome::Done | Outcome::Cancelled => None,
    };
    MoveEnd { reason, in_doubt, figures, ..MoveEnd::of(MoveState::from(outcome)) }
}

#[cfg(test)]
mod tests;
