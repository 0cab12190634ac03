//! The thread of one switchover of a domain: it sends, receives, waits, and shows what is in doubt.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use api::Happening;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use engine::{ArrivingDomain, DepartingDomain, XlPipes, domain_of};
use parking_lot::Mutex;
use switchover::journal::{Opened, Reopened, Side};
use switchover::{Found, Resolution, destination, source};
use wire::SwitchoverMessage;

use super::case::Case;
use super::settlers::DomainSettlers;
use crate::denied::Denied;
use crate::events::shortened;
use crate::moves::recovery::either_side::{MESSAGES_MAX, PATIENCE_MAX, pause};
use crate::moves::recovery::inquiring::inquire;

/// xl's transport tries twice a second to hand over its pipes again.
const PIPES_MAX: Duration = Duration::from_secs(15);
/// The interval between retries while xl does not answer.
const ASK_AGAIN: Duration = Duration::from_secs(2);

/// A request to a switchover's thread.
pub(super) enum Request {
    /// The other side's message, and the channel for the answer.
    Message(SwitchoverMessage, Sender<Option<SwitchoverMessage>>),
    /// The operator's decision, and the channel for the result.
    Resolve(Resolution, Sender<Result<(), Denied>>),
    /// xl's transport has handed over its pipes again.
    Pipes(XlPipes),
}

/// The agent ends.
struct Closing;

pub(super) struct Settler {
    pub(super) settlers: Arc<DomainSettlers>,
    pub(super) opened: Opened,
    pub(super) side: Side,
    pub(super) told: Receiver<Request>,
    /// What is in doubt, for the operator.
    pub(super) doubt: Arc<Mutex<Option<String>>>,
    /// Whether the domain's fate is decided at its source.
    pub(super) is_decided: Arc<AtomicBool>,
}

impl Settler {
    /// Settles a switchover; none: the agent ends.
    pub(super) fn run(self, begin: impl FnOnce(&Self) -> Option<Case>) {
        let Some(mut case) = begin(&self) else { return };
        let mut tries = 0;
        while let Some(wait) = case.wait() {
            self.deliver(&mut case);
            self.show(&mut case);
            if case.wait() != Some(wait) {
                continue;
            }
            match self.told.recv_timeout(pause(wait, tries)) {
                Ok(request) => {
                    tries = 0;
                    self.receive(request, &mut case);
                }
                Err(RecvTimeoutError::Timeout) => {
                    tries = (tries + 1).min(PATIENCE_MAX);
                    case.late();
                }
                // The agent ends; its next run continues.
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
        self.show(&mut case);
        self.settlers.close_desk(&self.opened, self.side);
        tracing::info!(peer = self.opened.peer, "settled");
        self.deliver(&mut case);
    }

    fn receive(&self, request: Request, case: &mut Case) {
        match request {
            Request::Message(message, reply) => {
                // The queued messages are older than the answer to this one.
                case.take_messages();
                case.received(message);
                let _ = reply.send(case.take_messages().pop_front());
            }
            Request::Resolve(resolution, reply) => {
                let _ = reply.send(self.decide(resolution, case));
            }
            Request::Pipes(pipes) => {
                if let Case::Source(_, domain) = case {
                    domain.take_pipes(pipes);
                    // xl waits for an answer.
                    case.late();
                }
            }
        }
    }

    /// Applies the operator's decision.
    fn decide(&self, resolution: Resolution, case: &mut Case) -> Result<(), Denied> {
        let vm = &self.opened.vm;
        if case.takes(resolution) && resolution == Resolution::There {
            // Nothing here would ever end it, and it may be running.
            match case.is_owners() {
                Ok(false) => {}
                Ok(true) => {
                    return Err(Denied::Conflict(format!(
                        "{vm} is here under its own name, and no agent destroys such a domain: if \
                         it is to be {peer}'s, `xl destroy {vm}` first",
                        peer = self.opened.peer
                    )));
                }
                Err(error) => {
                    return Err(Denied::Conflict(format!("{vm}: cannot query xl ({error})")));
                }
            }
        }
        if case.resolve(resolution) {
            return Ok(());
        }
        Err(Denied::Conflict(format!("{vm}: this decision is not possible at the moment")))
    }

    /// Shows what is in doubt, or that nothing is, and notes a decision in the report.
    fn show(&self, case: &mut Case) {
        if let Some(fate) = case.take_fate() {
            self.is_decided.store(true, SeqCst);
            self.settlers.wake_those_that_begin();
            self.settlers.history.settled(&self.opened, &fate);
        }
        let Opened { vm, peer, .. } = &self.opened;
        self.doubts(case.doubt().map(|doubt| doubt.advice_on_domain(vm, peer)));
    }

    fn doubts(&self, doubt: Option<String>) {
        let was = std::mem::replace(&mut *self.doubt.lock(), doubt.clone());
        let vm = self.opened.vm.clone();
        let happening = match (was, doubt) {
            (None, Some(problem)) => {
                if self.side == Side::Source {
                    self.settlers.history.in_doubt(&self.opened);
                }
                Happening::VmInDoubt { vm, problem: shortened(&problem) }
            }
            (Some(_), None) => Happening::VmSettled { vm },
            _ => return,
        };
        self.settlers.events.publish(happening);
    }

    /// Sends all messages, and handles the answers.
    fn deliver(&self, case: &mut Case) {
        let DomainSettlers { agent, security, peers, .. } = &*self.settlers;
        let mut messages = case.take_messages();
        for _ in 0..MESSAGES_MAX {
            let Some(message) = messages.pop_front() else { return };
            match inquire((agent, security), (peers, &self.opened), message) {
                Ok(Some(answer)) => {
                    case.received(answer);
                    messages.extend(case.take_messages());
                }
                Ok(None) => {}
                // It is sent again later; the others in the queue are older.
                Err(why) => {
                    let peer = &self.opened.peer;
                    tracing::warn!(peer, why, "cannot send a switchover message to the peer");
                    return;
                }
            }
        }
    }

    /// Continues a domain that was to leave.
    pub(super) fn leaving(
        &self,
        kept: Reopened<source::Record>,
        pipes: Option<XlPipes>,
    ) -> Option<Case> {
        let domain = self.domain()?;
        let noted = kept.noted();
        // From its first record on, xl may have "ready".
        let offered = !kept.records.is_empty();
        let xl = &self.settlers.host.xl;
        let peer = &self.opened.peer;
        let mut departing = DepartingDomain::after_restart(xl, domain, peer, offered, PIPES_MAX);
        let is_given = pipes.is_some();
        pipes.into_iter().for_each(|pipes| departing.take_pipes(pipes));
        if kept.same_boot && !is_given {
            self.await_pipes(&mut departing).ok()?;
        }
        let found = self.ask(|| departing.found().map_err(|error| error.to_string())).ok()?;
        let driver = source::Driver::restart(kept, found, &mut departing);
        if departing.fate.is_none() {
            departing.fate = noted.decided(found);
        }
        Some(Case::Source(driver, departing))
    }

    /// Continues a domain that was to arrive.
    pub(super) fn coming(&self, kept: Reopened<destination::Record>) -> Option<Case> {
        let (xl, noted) = (&self.settlers.host.xl, kept.noted());
        let starts =
            |record: &destination::Record| matches!(record, destination::Record::Starting { .. });
        let permitted = kept.records.iter().any(starts);
        let mut arriving = ArrivingDomain::after_restart(xl, self.domain()?, permitted);
        let found = self.ask(|| arriving.found(noted).map_err(|error| error.to_string())).ok()?;
        let driver = destination::Driver::restart(kept, found, &mut arriving);
        Some(Case::Destination(driver, arriving))
    }

    fn domain(&self) -> Option<managers::xen::MovingDomain> {
        let domain = domain_of(&self.opened);
        if domain.is_none() {
            tracing::error!("the journal of a domain does not name it; it is not touched");
        }
        domain
    }

    /// Waits for xl's pipes, without which xl can't be answered.
    fn await_pipes(&self, departing: &mut DepartingDomain) -> Result<(), Closing> {
        let until = Instant::now() + PIPES_MAX;
        loop {
            match self.told.recv_deadline(until) {
                Ok(Request::Pipes(pipes)) => {
                    departing.take_pipes(pipes);
                    return Ok(());
                }
                // They get no answer, and are repeated.
                Ok(Request::Message(..) | Request::Resolve(..)) => {}
                Err(RecvTimeoutError::Timeout) => return Ok(()),
                Err(RecvTimeoutError::Disconnected) => return Err(Closing),
            }
        }
    }

    /// Queries xl until it answers: the state of a domain must not be guessed.
    fn ask(&self, found: impl Fn() -> Result<Found, String>) -> Result<Found, Closing> {
        loop {
            let why = match found() {
                Ok(found) => return Ok(found),
                Err(why) => why,
            };
            let vm = &self.opened.vm;
            self.doubts(Some(format!(
                "the fate of {vm} is not known: cannot query xl ({why}); the agent retries"
            )));
            match self.told.recv_timeout(ASK_AGAIN) {
                Err(RecvTimeoutError::Disconnected) => return Err(Closing),
                Ok(_) | Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}
