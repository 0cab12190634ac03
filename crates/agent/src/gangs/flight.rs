//! One VM of a gang on its way: begun, watched and, if need be, taken back, by
//! orders to the agent of the host that it leaves.
//!
//! That agent moves the VM by itself. So an agent that can't be reached for a
//! while costs nothing but news, and one that stays silent ends this VM's part
//! in the gang, but perhaps not its migration.

use std::time::{Duration, Instant};

use api::{Figures, MigrateRequest, MoveState, Outcome, Progress, VmStatus};
use crossbeam_channel::{Receiver, TryRecvError};

use super::cluster::{ANSWER_MAX, Agents, Cluster, Session, unexpected};
use wire::gang::{Answer, Counted, Order};

/// Between two looks at a migration whose phase does not change.
const LOOK: Duration = Duration::from_millis(500);
/// An agent that is silent for so long is given up: longer than it takes to be
/// started again.
const SILENCE_MAX: Duration = Duration::from_secs(30);
/// Between two tries to reach it.
const RETRY: Duration = Duration::from_secs(1);

/// What to do with it.
pub(super) enum Recall {
    /// End it; the VM stays.
    Cancel,
    /// Leave it alone: this agent ends.
    Leave,
}

/// How it ended.
pub(super) struct End {
    pub(super) state: MoveState,
    pub(super) reason: Option<String>,
    pub(super) figures: Option<Figures>,
}

impl End {
    fn failed(reason: String) -> Self {
        Self { state: MoveState::Failed, reason: Some(reason), figures: None }
    }
}

/// One VM's part.
pub(super) struct Flight {
    pub(super) agents: Agents,
    pub(super) from: String,
    pub(super) to: String,
    pub(super) migration: String,
    pub(super) request: MigrateRequest,
    /// It was begun already, by an earlier run of this agent.
    pub(super) is_begun: bool,
    pub(super) recall: Receiver<Recall>,
}

impl Flight {
    /// Goes through with it; none if it was left alone.
    pub(super) fn fly(self, mut show: impl FnMut(Progress)) -> Option<End> {
        let mut session = None;
        if !self.is_begun {
            match self.begin() {
                Ok(begun) => session = begun,
                Err(end) => return Some(end),
            }
        }
        let mut seen = None;
        let mut silent_since: Option<Instant> = None;
        let mut cancel = false;
        loop {
            match self.recall.try_recv() {
                Ok(Recall::Cancel) => cancel = true,
                Ok(Recall::Leave) | Err(TryRecvError::Disconnected) => return None,
                Err(TryRecvError::Empty) => {}
            }
            let asked = Instant::now();
            match self.look(&mut session, &mut cancel, seen) {
                Ok(Answer::Progress { progress, figures }) => {
                    silent_since = None;
                    if let Some(outcome) = &progress.outcome {
                        return Some(ended(outcome, figures));
                    }
                    let is_news = seen.replace(progress.phase) != Some(progress.phase);
                    show(self.named(*progress));
                    // An agent that doesn't wait is not asked all the time.
                    if !is_news && asked.elapsed() < LOOK / 2 && self.pause(LOOK / 2, &mut cancel) {
                        return None;
                    }
                }
                Ok(Answer::NoSuch) => return Some(self.look_for_it()),
                Ok(answer) => {
                    let why = unexpected(answer);
                    return Some(End::failed(format!("the agent of {}: {why}", self.from)));
                }
                Err(why) => {
                    session = None;
                    let since = *silent_since.get_or_insert_with(Instant::now);
                    if since.elapsed() > SILENCE_MAX {
                        return Some(self.given_up(&why));
                    }
                    if self.pause(RETRY, &mut cancel) {
                        return None;
                    }
                }
            }
        }
    }

    /// Waits, unless it is recalled. Says whether it is left alone.
    fn pause(&self, time: Duration, cancel: &mut bool) -> bool {
        match self.recall.recv_timeout(time) {
            Ok(Recall::Cancel) => {
                *cancel = true;
                false
            }
            Ok(Recall::Leave) => true,
            Err(_) => false,
        }
    }

    /// Has it begin. No session if it may have begun, and the answer was lost.
    fn begin(&self) -> Result<Option<Session>, End> {
        let mut session = self.agents.open(&self.from).map_err(|why| {
            let from = &self.from;
            End::failed(format!("the agent of {from} can't be reached: {why}. It has not begun"))
        })?;
        let (migration, request) = (self.migration.clone(), Box::new(self.request.clone()));
        match session.give(&Order::Start { migration, request }, ANSWER_MAX) {
            Ok(Answer::Started) => Ok(Some(session)),
            Ok(answer) => Err(End::failed(unexpected(answer))),
            Err(why) => {
                tracing::debug!(vm = self.request.vm, why, "an order's answer is lost");
                Ok(None)
            }
        }
    }

    /// Asks how it goes, after it was told to end if it is to.
    fn look(
        &self,
        session: &mut Option<Session>,
        cancel: &mut bool,
        seen: Option<api::Phase>,
    ) -> Result<Answer, String> {
        let open = match session {
            Some(open) => open,
            None => session.insert(self.agents.open(&self.from)?),
        };
        let migration = self.migration.clone();
        if *cancel {
            // Too late, or ended already: which, is seen at once.
            open.give(&Order::Cancel { migration: migration.clone() }, ANSWER_MAX)?;
            *cancel = false;
        }
        let wait_ms = u64::try_from(LOOK.as_millis()).unwrap_or_default();
        open.give(&Order::Watch { migration, seen, wait_ms }, ANSWER_MAX)
    }

    /// The agent of its source was started anew, and has forgotten it: what
    /// becomes of the VM is decided by the journals of both ends.
    fn look_for_it(&self) -> End {
        let (vm, from, to) = (&self.request.vm, &self.from, &self.to);
        let at = |host: &str| -> Result<Option<Counted>, String> {
            let census = self.agents.census(host)?;
            Ok(census.vms.into_iter().find(|one| one.name == *vm))
        };
        let has_come = |one: &Counted| matches!(one.status, VmStatus::Running | VmStatus::Paused);
        match (at(from), at(to)) {
            (Ok(None), Ok(Some(there))) if has_come(&there) => {
                End { state: MoveState::Done, reason: None, figures: None }
            }
            (Ok(Some(here)), _)
                if !matches!(here.status, VmStatus::InDoubt | VmStatus::Unreadable) =>
            {
                End::failed(format!("the agent of {from} was started anew. {vm} goes on at {from}"))
            }
            _ => End::failed(format!(
                "the agent of {from} was started anew, and it is not settled where {vm} is: \
                 `droveway list` on {from} and {to} says so"
            )),
        }
    }

    fn given_up(&self, why: &str) -> End {
        let Self { from, migration, .. } = self;
        End::failed(format!(
            "the agent of {from} has not answered for {} s: {why}. Its migration {migration} may \
             go on: `droveway list` there says where it is",
            SILENCE_MAX.as_secs()
        ))
    }

    /// With the names that we know it by.
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

fn ended(outcome: &Outcome, figures: Option<Figures>) -> End {
    let reason = match outcome {
        Outcome::Failed(why) => Some(why.clone()),
        Outcome::Done | Outcome::Cancelled => None,
    };
    End { state: MoveState::from(outcome), reason, figures }
}
