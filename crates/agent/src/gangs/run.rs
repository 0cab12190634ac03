//! A running gang: a leading thread, and one for each VM that moves.
//!
//! Each step is on disk before it is done: a migration's id is saved before the source agent
//! is ordered to begin, so that the migration is found again.

use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use api::{BitRate, GangOutcome, GangReport, Happening, MoveState, Phase, Progress};
use crossbeam_channel::{Receiver, Sender, bounded};
use policy::gang::{Limits, Move, Need, Stage, UNLIMITED, admit, is_landing};

use super::cluster::Agents;
use super::course::GangCourse;
use super::evacuations::Evacuating;
use super::event::Event;
use super::flight::{Flight, MoveEnd, Patience, Recall};
use super::gang::{Gang, fail_waiting};
use super::limit_order::{Answered, LimitAnswer, LimitOrder};
use super::limits;
use super::store::GangStore;
use crate::events::Events;
use crate::id::random_id;

/// The leading thread.
pub(super) struct Run {
    pub(super) gang: Arc<Gang>,
    pub(super) inbox: Receiver<Event>,
    pub(super) agents: Agents,
    pub(super) store: GangStore,
    events: Arc<Events>,
    /// VMs whose migrations an earlier run of this agent has started.
    pub(super) started: Vec<usize>,
    /// The host that it evacuates, if it does and has not ended.
    evacuating: Option<Evacuating>,
    flights: HashMap<usize, InFlight>,
    /// What each may use of the gang's bandwidth, if that is limited.
    limits: Limits,
    began: Instant,
    course: GangCourse,
}

struct InFlight {
    recall: Sender<Recall>,
    thread: JoinHandle<()>,
    stage: Stage,
    limit: Arc<LimitOrder>,
    need: Need,
}

impl Run {
    pub(super) fn new(
        gang: Arc<Gang>,
        inbox: Receiver<Event>,
        agents: Agents,
        store: GangStore,
        events: Arc<Events>,
        started: Vec<usize>,
        evacuating: Option<Evacuating>,
    ) -> Self {
        let report = gang.report();
        let ends = report.moves.iter().map(|one| (one.from.as_str(), one.to.as_str()));
        let mut limits = Limits::new(limits::links(&report.options, ends, &agents));
        let own = report.options.bounds.limit_bits_per_s.map_or(UNLIMITED, BitRate::bits_per_s);
        for (number, one) in report.moves.iter().enumerate() {
            let limit = one.limit_bits_per_s.map(BitRate::bits_per_s);
            // It began when no limit applied to it, for instance because its rack had no uplink.
            let limit = limit.or_else(|| started.contains(&number).then_some(own));
            if let Some(limit) = limit {
                limits.has(number, limit);
            }
        }
        Self {
            gang,
            inbox,
            agents,
            store,
            events,
            started,
            evacuating,
            flights: HashMap::new(),
            limits,
            began: Instant::now(),
            course: GangCourse::Continues,
        }
    }

    /// Leads the gang to its end. After a fault its migrations go on at their hosts, and it can be
    /// resumed.
    pub(super) fn lead(mut self) {
        if catch_unwind(AssertUnwindSafe(|| self.follow())).is_err() {
            let id = self.gang.report().id;
            tracing::error!(id, "a fault in the agent ends a gang: it can be resumed");
            self.leave();
        }
        self.close();
    }

    /// Begins its moves and follows them until none is left.
    fn follow(&mut self) {
        self.publish_begin();
        for number in std::mem::take(&mut self.started) {
            self.launch(number, true);
        }
        // A VM of a gang that is resumed may be lost already.
        self.call_off_if_lost();
        loop {
            if self.course.continues() {
                self.begin_next();
            }
            if self.flights.is_empty() {
                if !self.course.continues() || !self.any_waits() {
                    break;
                }
                // No thread could be started for the last VMs: try the next ones.
                continue;
            }
            match self.inbox.recv() {
                Ok(Event::Progress(number, progress)) => self.note(number, *progress),
                Ok(Event::Ended(number, end)) => self.end(number, end),
                Ok(Event::Cancel) => {
                    self.call_off("the gang was cancelled");
                    self.course.note_cancelled();
                }
                Ok(Event::Leave) | Err(_) => self.leave(),
            }
        }
    }

    /// Calls the gang off if it moves all or stops, and one of its VMs has failed.
    fn call_off_if_lost(&mut self) {
        let report = self.gang.report();
        let lost = report.moves.iter().find(|one| one.state == MoveState::Failed);
        if let Some(one) = lost.filter(|_| report.atomic) {
            self.call_off(&all_or_none(&one.vm));
        }
    }

    fn any_waits(&self) -> bool {
        self.gang.report().moves.iter().any(|one| one.state == MoveState::Waiting)
    }

    fn begin_next(&mut self) {
        let report = self.gang.report();
        let stage = |number: usize, state: MoveState| match state {
            MoveState::Waiting => Stage::Waiting,
            MoveState::Moving => self.flights.get(&number).map_or(Stage::Over, |one| one.stage),
            MoveState::Done | MoveState::Failed | MoveState::Cancelled => Stage::Over,
        };
        let moves: Vec<Move<'_>> = report
            .moves
            .iter()
            .enumerate()
            .map(|(number, one)| Move {
                vm: &one.vm,
                from: &one.from,
                to: &one.to,
                bytes: one.used_bytes,
                stage: stage(number, one.state),
            })
            .collect();
        let admitted = admit(&moves, report.parallel.into());
        let next = self.limited(&admitted, &report);
        if next.is_empty() {
            if self.flights.is_empty() && !admitted.is_empty() {
                self.fail_without_bandwidth(&admitted);
                self.call_off_if_lost();
            }
            return;
        }
        let ids: Vec<std::io::Result<String>> = next.iter().map(|_| random_id()).collect();
        let noted = self.gang.update(|report| {
            for (number, id) in next.iter().zip(&ids) {
                let Some(one) = report.moves.get_mut(*number) else { continue };
                match id {
                    Ok(id) => (one.state, one.migration) = (MoveState::Moving, Some(id.clone())),
                    Err(error) => {
                        (one.state, one.limit_bits_per_s) = (MoveState::Failed, None);
                        one.reason = Some(format!("cannot make a random ID: {error}"));
                    }
                }
            }
        });
        self.save(&noted);
        for (number, id) in next.into_iter().zip(ids) {
            if id.is_ok() {
                self.launch(number, false);
            } else {
                self.limits.release(number);
            }
        }
    }

    /// Divides the gang's bandwidth. Returns which of these VMs may begin: those that get some of
    /// it, or share none.
    fn limited(&mut self, admitted: &[usize], report: &GangReport) -> Vec<usize> {
        let used_bytes = |number: usize| report.moves.get(number).map_or(0, |one| one.used_bytes);
        let fresh = |number: &usize| {
            let number = *number;
            (number, limits::fresh(&report.options, used_bytes(number)))
        };
        let mut needs: BTreeMap<usize, Need> = admitted.iter().map(fresh).collect();
        needs.extend(self.flights.iter().map(|(number, flight)| (*number, flight.need)));
        needs.retain(|number, _| self.limits.apply_to(*number));
        let changes = self.limits.next(&needs, self.began.elapsed().as_secs_f64());
        if !changes.is_empty() {
            self.request_limits(&changes);
        }
        let may_begin =
            |number: &usize| self.limits.of(*number).is_some() || !self.limits.apply_to(*number);
        admitted.iter().copied().filter(may_begin).collect()
    }

    /// Requests other limits of moves, or notes them for moves that begin.
    fn request_limits(&self, changes: &[(usize, u64)]) {
        // On disk before, so that it is known what each may use if the gang is resumed.
        self.note_limits(changes.iter().map(|(number, _)| *number));
        for (number, limit) in changes {
            let flight = self.flights.get(number);
            if let (Some(flight), Some(limit)) = (flight, BitRate::from_bits(*limit)) {
                flight.limit.request(limit);
            }
        }
    }

    fn note_answer(&mut self, number: usize, answered: Answered) {
        if answered.was_lost {
            self.limits.lose(number);
        }
        match answered.answer {
            LimitAnswer::Set => self.limits.confirm(number),
            LimitAnswer::Refused => self.limits.refuse(number),
        }
        self.note_limits(std::iter::once(number));
    }

    /// Records what these moves may use.
    fn note_limits(&self, numbers: impl Iterator<Item = usize>) {
        let noted = self.gang.update(|report| {
            for number in numbers {
                let Some(one) = report.moves.get_mut(number) else { continue };
                one.limit_bits_per_s = self.limits.of(number).and_then(BitRate::from_bits);
            }
        });
        self.save(&noted);
    }

    /// Fails these VMs, for which moves in doubt leave no bandwidth.
    fn fail_without_bandwidth(&self, admitted: &[usize]) {
        let noted = self.gang.update(|report| {
            for number in admitted {
                let Some(one) = report.moves.get_mut(*number) else { continue };
                one.state = MoveState::Failed;
                one.reason = Some(NO_BANDWIDTH.to_owned());
            }
        });
        self.save(&noted);
    }

    fn launch(&mut self, number: usize, is_started: bool) {
        let report = self.gang.report();
        let Some(one) = report.moves.get(number) else { return };
        let (recall, recalled) = bounded(2);
        let limit = Arc::new(LimitOrder::default());
        let mut request = report.options.request(&one.vm, &one.to);
        request.sharing.together = true;
        let own = request.bounds.limit_bits_per_s;
        request.bounds.limit_bits_per_s = one.limit_bits_per_s.or(own);
        let need = limits::fresh(&report.options, one.used_bytes);
        let flight = Flight {
            agents: self.agents.clone(),
            patience: Patience::default(),
            from: one.from.clone(),
            to: one.to.clone(),
            migration: one.migration.clone().unwrap_or_default(),
            request,
            is_started,
            recall: recalled,
            limit: Arc::clone(&limit),
        };
        let gang = Arc::clone(&self.gang);
        let spawned = thread::Builder::new().name(format!("gang-{}", one.vm)).spawn(move || {
            let show = |progress| gang.send(Event::Progress(number, Box::new(progress)));
            let end = catch_unwind(AssertUnwindSafe(|| flight.fly(show))).unwrap_or_else(|_| {
                let why = "a fault in the coordinating agent; see its log".to_owned();
                // Its migration may continue.
                Some(MoveEnd::unknown(why))
            });
            gang.send(Event::Ended(number, end));
        });
        match spawned {
            Ok(thread) => {
                let stage = Stage::Flying;
                self.flights.insert(number, InFlight { recall, thread, stage, limit, need });
            }
            Err(error) => {
                let why = format!("cannot start a thread for it: {error}");
                let end = if is_started { MoveEnd::unknown(why) } else { MoveEnd::failed(why) };
                self.end(number, Some(end));
            }
        }
    }

    fn note(&mut self, number: usize, progress: Progress) {
        if let Some(flight) = self.flights.get_mut(&number) {
            let landing = is_landing(progress.phase >= Phase::Stopped, progress.time_left_s);
            flight.stage = if landing { Stage::Landing } else { Stage::Flying };
            flight.need = limits::followed(flight.need, self.limits.of(number), &progress);
            if let Some(answered) = flight.limit.take_answer() {
                self.note_answer(number, answered);
            }
        }
        self.gang.show(number, progress);
    }

    fn end(&mut self, number: usize, end: Option<MoveEnd>) {
        if let Some(flight) = self.flights.remove(&number) {
            // The thread has sent its last message, and a panic in it was caught.
            let _ = flight.thread.join();
        }
        let Some(end) = end else { return };
        // A migration in doubt may continue, with its limit.
        let is_over = !end.in_doubt;
        if is_over {
            self.limits.release(number);
        }
        let called_off = self.course.called_off();
        let silent = end.reason.clone().filter(|_| end.is_silent);
        let mut failed = None;
        let report = self.gang.end(number, |one| {
            one.state = end.state;
            one.figures = end.figures;
            one.in_doubt = end.in_doubt;
            one.limit_bits_per_s = one.limit_bits_per_s.filter(|_| !is_over);
            one.reason = match end.state {
                MoveState::Cancelled => {
                    Some(called_off.unwrap_or("its migration was cancelled").to_owned())
                }
                _ => end.reason,
            };
            failed = Some(one.vm.clone()).filter(|_| one.state != MoveState::Done);
        });
        let failed = failed.filter(|_| report.atomic);
        self.save(&report);
        if let Some(vm) = failed {
            self.call_off(&all_or_none(&vm));
        }
        if let Some(why) = silent {
            let report = self.gang.update(|report| fail_waiting(report, number, &why));
            self.save(&report);
        }
    }

    /// Cancels the VMs that have not moved, and begins no more.
    fn call_off(&mut self, why: &str) {
        if !self.course.call_off(why) {
            return;
        }
        let report = self.gang.update(|report| {
            let waiting = report.moves.iter_mut().filter(|one| one.state == MoveState::Waiting);
            for one in waiting {
                one.state = MoveState::Cancelled;
                one.reason = Some(why.to_owned());
            }
        });
        self.save(&report);
        for flight in self.flights.values() {
            // A move that is ending does not receive it.
            let _ = flight.recall.try_send(Recall::Cancel);
        }
    }

    /// Leaves the migrations alone, which continue at their hosts.
    fn leave(&mut self) {
        self.course.leave();
        for flight in self.flights.values() {
            let _ = flight.recall.try_send(Recall::Leave);
        }
    }

    fn close(&mut self) {
        // Saved before the outcome is visible, because it could then be resumed at once.
        let mut report = self.gang.update(|_| {});
        report.outcome = Some(self.course.outcome(&report));
        self.save(&report);
        // Then another may evacuate that host at once, too.
        drop(self.evacuating.take());
        let report = self.gang.update(|shown| shown.outcome = report.outcome);
        self.publish_end(&report);
        tracing::info!(id = report.id, outcome = ?report.outcome, "a gang has ended");
        if let Err(error) = self.store.prune(&report.id) {
            tracing::warn!(%error, "cannot remove old gangs");
        }
    }

    fn publish_begin(&self) {
        let report = self.gang.report();
        let vms = report.moves.iter().filter(|one| !one.state.has_ended()).count();
        self.events.publish(Happening::GangBegan { gang: report.id, vms });
    }

    fn publish_end(&self, report: &GangReport) {
        let count = |state| report.moves.iter().filter(|one| one.state == state).count();
        self.events.publish(Happening::GangEnded {
            gang: report.id.clone(),
            result: report.outcome.unwrap_or(GangOutcome::Interrupted),
            done: count(MoveState::Done),
            failed: count(MoveState::Failed),
            cancelled: count(MoveState::Cancelled),
            total_s: report.total_s,
        });
    }

    fn save(&self, report: &GangReport) {
        if let Err(error) = self.store.save(report) {
            tracing::error!(
                id = report.id,
                %error,
                "cannot record a gang: it may not be resumable"
            );
        }
    }
}

/// Why VMs are not moved although nothing else moves.
const NO_BANDWIDTH: &str = "VMs of this gang that are in doubt may use all of the bandwidth: settle \
                            them, then resume the gang";

/// Why the other VMs of a gang stay after one has failed.
fn all_or_none(failed: &str) -> String {
    format!("{failed} failed, and this gang moves all or stops (--atomic)")
}
