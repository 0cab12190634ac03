//! Moves whose source agent gives the answers that a test chooses.

use std::collections::VecDeque;
use std::sync::Arc;

use api::GangOptions;
use crossbeam_channel::{Sender, bounded};
use parking_lot::Mutex;
use wire::gang::{Census, VmNeeds};

use super::*;
use crate::gangs::limit_order::Answered;

const ID: &str = "0a0b0c0d";
/// The patience of moves that don't use it up, and of moves that do.
const LONG: Duration = Duration::from_secs(600);
const SHORT: Duration = Duration::from_secs(1);

/// The agent of the source.
#[derive(Clone, Default)]
struct Source(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// Refused connections.
    refusals: VecDeque<Cause>,
    /// The answers to orders but cancels. After these there is no such migration.
    answers: VecDeque<Result<Answer, String>>,
    orders: Vec<&'static str>,
    /// What it was ordered to start.
    requests: Vec<MigrateRequest>,
    /// The migration that moves the VM, as the census has it.
    migration: Option<String>,
    /// Whether the VM is dead.
    is_dead: bool,
}

impl Reach for Source {
    type Session = Self;

    fn open(&self, _: &str) -> Result<Self, Unreached> {
        match self.0.lock().refusals.pop_front() {
            None => Ok(self.clone()),
            Some(cause) => Err(Unreached { why: "it is busy".to_owned(), cause }),
        }
    }

    fn census(&self, host: &str) -> Result<Census, String> {
        let state = self.0.lock();
        let here = Counted {
            name: "web1".to_owned(),
            status: if state.is_dead { VmStatus::Dead } else { VmStatus::Running },
            migration: state.migration.clone(),
            arrives_from: None,
            ram_bytes: 1,
            used_bytes: 1,
            needed_bytes: 1,
            vcpus: 1,
            needs: VmNeeds::default(),
            share_domain: String::new(),
            loses_writes: false,
            program_replaced: false,
        };
        let vms = if host == "a" { vec![here] } else { Vec::new() };
        Ok(Census { vms, ..Census::default() })
    }
}

impl Give for Source {
    fn give(&mut self, order: &Order, _: Duration) -> Result<Answer, String> {
        let mut state = self.0.lock();
        let name = match order {
            Order::Start { .. } => "start",
            Order::Watch { .. } => "watch",
            Order::Cancel { .. } => "cancel",
            Order::Set { .. } => "set",
            _ => "another",
        };
        state.orders.push(name);
        if let Order::Start { request, .. } = order {
            state.requests.push((**request).clone());
        }
        if name == "cancel" {
            return Ok(refused("there is none"));
        }
        state.answers.pop_front().unwrap_or(Ok(Answer::NoSuch))
    }
}

impl Source {
    fn new(
        refusals: impl IntoIterator<Item = Cause>,
        answers: impl IntoIterator<Item = Result<Answer, String>>,
    ) -> Self {
        let (refusals, answers) = (refusals.into_iter().collect(), answers.into_iter().collect());
        Self(Arc::new(Mutex::new(State { refusals, answers, ..State::default() })))
    }

    /// A move that waits for its agent for `longest`.
    fn flight(&self, longest: Duration) -> (Flight<Self>, Sender<Recall>) {
        let (tell, recall) = bounded(2);
        let ms = Duration::from_millis;
        let flight = Flight {
            agents: self.clone(),
            patience: Patience { silence_max: longest, order_max: longest, retry: ms(2) },
            from: "a".to_owned(),
            to: "b".to_owned(),
            migration: ID.to_owned(),
            request: GangOptions::default().request("web1", "b"),
            is_started: false,
            recall,
            limit: Arc::default(),
        };
        (flight, tell)
    }

    /// How a move ends if it is not recalled: its state and the reason.
    fn moves(&self, longest: Duration) -> (MoveState, String) {
        let (flight, _recall) = self.flight(longest);
        let end = flight.fly(|_| {}).expect("it was not left alone");
        (end.state, end.reason.unwrap_or_default())
    }

    fn orders(&self) -> Vec<&'static str> {
        self.0.lock().orders.clone()
    }
}

fn refused(reason: &str) -> Answer {
    Answer::Refused { reason: reason.to_owned(), is_stopping: false }
}

fn lost() -> Result<Answer, String> {
    Err("it is late".to_owned())
}

fn done() -> Result<Answer, String> {
    let started = Progress::new((ID, "web1"), ("a", "b"), 1);
    let progress = Box::new(Progress { outcome: Some(Outcome::Done), ..started });
    Ok(Answer::Progress { progress, figures: None })
}

#[test]
fn an_agent_that_is_busy_for_a_while_is_asked_again() {
    let source = Source::new([Cause::Busy; 3], [Ok(Answer::Started), done()]);
    assert_eq!(source.moves(LONG), (MoveState::Done, String::new()));
    assert_eq!(source.orders(), ["start", "watch"]);
    for cause in [Cause::Busy, Cause::Silence, Cause::Lasting] {
        let source = Source::new([cause; 1000], []);
        let (state, why) = source.moves(SHORT);
        assert_eq!(state, MoveState::Failed);
        assert!(
            why.contains("can't be reached: it is busy. The migration has not started"),
            "{why}"
        );
        assert!(source.orders().is_empty());
        let at_once = source.0.lock().refusals.len() == 999;
        assert_eq!(at_once, cause == Cause::Lasting, "what stays so fails at once");
    }
}

/// Otherwise a restart of it fails all VMs of the gang that wait to leave its host.
#[test]
fn an_agent_that_is_stopping_is_ordered_again_when_it_runs_again() {
    let stopping = || Answer::Refused { reason: "it is stopping".to_owned(), is_stopping: true };
    let answers = [Ok(stopping()), Ok(stopping()), Ok(Answer::Started), done()];
    let source = Source::new([], answers);
    assert_eq!(source.moves(LONG), (MoveState::Done, String::new()));
    assert_eq!(source.orders(), ["start", "start", "start", "watch"]);
    // It is waited for no longer than for one that is not reached, and not at all when recalled.
    let endless = || Source::new([], (0..10_000).map(|_| Ok(stopping())));
    assert_eq!(endless().moves(SHORT), (MoveState::Failed, "it is stopping".to_owned()));
    let (flight, recall) = endless().flight(LONG);
    recall.send(Recall::Cancel).unwrap();
    assert_eq!(flight.fly(|_| {}).unwrap().state, MoveState::Cancelled);
    // Any other refusal stays.
    let source = Source::new([], [Ok(refused("it has no such VM")), done()]);
    assert_eq!(source.moves(LONG), (MoveState::Failed, "it has no such VM".to_owned()));
}

/// Then the gang's other VMs there need not wait as long.
#[test]
fn an_agent_that_is_never_heard_is_told_from_one_that_is_busy() {
    let [silence, busy, lasting] = [Cause::Silence, Cause::Busy, Cause::Lasting];
    for (first, then, is_silent) in [
        (silence, silence, true),
        (busy, busy, false),
        (busy, silence, false),
        (silence, lasting, false),
    ] {
        let refusals = std::iter::once(first).chain([then; 1000]);
        let (flight, _recall) = Source::new(refusals, []).flight(Duration::from_millis(50));
        let end = flight.fly(|_| {}).unwrap();
        assert_eq!((end.is_silent, end.in_doubt), (is_silent, false), "{first:?}, {then:?}");
    }
    let (flight, _recall) = Source::new([], [Ok(Answer::Started), done()]).flight(LONG);
    assert!(!flight.fly(|_| {}).unwrap().is_silent);
}

#[test]
fn a_move_that_leaves_its_vm_in_doubt_says_so() {
    for in_doubt in [true, false] {
        let started = Progress::new((ID, "web1"), ("a", "b"), 1);
        let outcome = Some(Outcome::Failed("why".to_owned()));
        let progress = Box::new(Progress { outcome, in_doubt, ..started });
        let answer = Answer::Progress { progress, figures: None };
        let source = Source::new([], [Ok(Answer::Started), Ok(answer)]);
        let (flight, _recall) = source.flight(LONG);
        let end = flight.fly(|_| {}).unwrap();
        assert_eq!((end.state, end.in_doubt), (MoveState::Failed, in_doubt));
    }
}

#[test]
fn an_agent_of_the_first_release_is_ordered_in_its_own_words() {
    let source = Source::new([], [Ok(Answer::Unknown), Ok(Answer::Started), done()]);
    let (mut flight, _recall) = source.flight(LONG);
    flight.request.sharing.together = true;
    flight.request.storage.read = ReadDisks::On;
    flight.request.accept_lost_writes = true;
    assert_eq!(flight.fly(|_| {}).unwrap().state, MoveState::Done);
    assert_eq!(source.orders(), ["start", "start", "watch"]);
    let said: Vec<serde_json::Value> = source
        .0
        .lock()
        .requests
        .iter()
        .map(|request| {
            let accepts = request.accept_lost_writes;
            serde_json::json!([request.sharing, request.storage.read, accepts])
        })
        .collect();
    assert_eq!(said[0], serde_json::json!([{ "share": "auto", "together": true }, "on", true]));
    assert_eq!(said[1], serde_json::json!([{ "share": "off" }, "auto", false]));
    // An option that it knows stays, and an agent that refuses this too has no orders at all.
    let source = Source::new([], [Ok(Answer::Unknown), Ok(Answer::Unknown)]);
    let (mut flight, _recall) = source.flight(LONG);
    flight.request.sharing.share = Share::Rack;
    let end = flight.fly(|_| {}).unwrap();
    assert!(end.reason.unwrap().contains("does not support such orders") && !end.in_doubt);
    assert_eq!(source.0.lock().requests[1].sharing.share, Share::Rack);
}

#[test]
fn a_limit_is_ordered_until_that_is_answered() {
    let limit: api::BitRate = "1G".parse().unwrap();
    for (answer, expected) in [
        (Answer::Set, LimitAnswer::Set),
        (refused("it is past its commit"), LimitAnswer::Refused),
        // An agent of the first release.
        (Answer::Unknown, LimitAnswer::Refused),
    ] {
        for was_lost in [false, true] {
            let first = was_lost.then(lost);
            let answers = [Ok(Answer::Started)].into_iter().chain(first);
            let source = Source::new([], answers.chain([Ok(answer.clone()), done()]));
            let (flight, _recall) = source.flight(LONG);
            let order = Arc::clone(&flight.limit);
            order.request(limit);
            assert_eq!(flight.fly(|_| {}).unwrap().state, MoveState::Done);
            let sets = if was_lost { vec!["set"; 2] } else { vec!["set"] };
            assert_eq!(source.orders(), [vec!["start"], sets, vec!["watch"]].concat());
            assert_eq!(order.take_answer(), Some(Answered { answer: expected, was_lost }));
            assert_eq!((order.take_answer(), order.due()), (None, None));
        }
    }
}

#[test]
fn a_migration_that_is_not_told_of_may_go_on() {
    let refused = refused("host-c is not in the peers file");
    let silent = || std::iter::repeat_with(lost).take(100_000);
    for (answers, says) in [
        (vec![Ok(refused)], "the agent of a does not report progress: host-c is not in the peers"),
        (silent().collect(), "the agent of a has not answered for 1 s: it is late"),
    ] {
        let source = Source::new([], std::iter::once(Ok(Answer::Started)).chain(answers));
        let (flight, _recall) = source.flight(SHORT);
        let end = flight.fly(|_| {}).unwrap();
        assert_eq!((end.state, end.in_doubt), (MoveState::Failed, true));
        let why = end.reason.unwrap();
        assert!(why.starts_with(says) && why.contains("may continue"), "{why}");
    }
}

#[test]
fn a_move_that_waits_for_its_agent_can_be_recalled() {
    let busy = || Source::new([Cause::Busy; 1000], []);
    let (flight, recall) = busy().flight(LONG);
    recall.send(Recall::Cancel).unwrap();
    assert_eq!(flight.fly(|_| {}).unwrap().state, MoveState::Cancelled);
    let (flight, recall) = busy().flight(LONG);
    recall.send(Recall::Leave).unwrap();
    assert!(flight.fly(|_| {}).is_none());
}

#[test]
fn an_order_whose_answer_is_lost_may_still_be_carried_out() {
    let source = Source::new([], [lost(), Ok(Answer::NoSuch), Ok(Answer::NoSuch), done()]);
    assert_eq!(source.moves(LONG), (MoveState::Done, String::new()));
    assert_eq!(source.orders(), ["start", "watch", "watch", "watch"]);
}

#[test]
fn an_order_that_was_never_heard_is_taken_back_before_the_move_fails() {
    let source = Source::new([], [lost()]);
    let (state, why) = source.moves(SHORT);
    assert_eq!(state, MoveState::Failed);
    assert_eq!(why, "the agent of a has not received the order. web1 continues at a");
    assert_eq!(source.orders().iter().filter(|order| **order == "cancel").count(), 1);
    assert_eq!(source.orders()[source.orders().len() - 2..], ["cancel", "watch"]);
    // By the census, the order is being carried out after all.
    let source = Source::new([], [lost()]);
    source.0.lock().migration = Some(ID.to_owned());
    assert!(source.moves(SHORT).1.contains("may continue"));
}

#[test]
fn a_migration_that_had_begun_and_is_not_known_was_lost_in_a_restart() {
    let source = Source::new([], [Ok(Answer::Started)]);
    let why = source.moves(SHORT).1;
    assert_eq!(why, "the agent of a was restarted. web1 continues at a");
    assert_eq!(source.orders(), ["start", "watch"]);
    let source = Source::new([], [Ok(Answer::Started)]);
    source.0.lock().is_dead = true;
    let why = source.moves(SHORT).1;
    assert!(why.contains("web1 is dead there: `droveway show web1` on a shows why"), "{why}");
}
