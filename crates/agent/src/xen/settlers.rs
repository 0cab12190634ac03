//! Switchovers of domains that are not settled: after a lost connection, or after a restart of the
//! agent on either side. Each has its own thread.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::Duration;

use api::{ErrorCode, ResolveRequest, ResolveSide, VmStatus, VmSummary};
use crossbeam_channel::{Sender, bounded, unbounded};
use engine::{DepartingDomain, UnsettledDomain, XenHost, XlPipes, domain_of};
use identity::Security;
use parking_lot::{Condvar, Mutex};
use switchover::journal::{Opened, Side};
use switchover::{Kept, MigrationId, Resolution, source};
use wire::{Inquiry, SwitchoverMessage};

use super::case::Case;
use super::settler::{Request, Settler};
use crate::denied::Denied;
use crate::events::Events;
use crate::moves::history::History;
use crate::moves::recovery::ANSWER_MAX;
use crate::peers::Peers;

/// xl resumes a domain, or destroys it.
const RESOLVE_MAX: Duration = Duration::from_secs(120);
/// A migration that has failed for xl ends here a moment later, and xl may be started again at
/// once.
const ENDS_MAX: Duration = Duration::from_secs(10);

/// The unsettled switchovers of this host's domains.
pub(crate) struct DomainSettlers {
    pub(super) host: Arc<XenHost>,
    pub(super) events: Arc<Events>,
    pub(super) history: Arc<History>,
    pub(super) agent: String,
    pub(super) security: Security,
    pub(super) peers: Peers,
    /// The migrations that run now, whose engines have their journals.
    running: Mutex<HashSet<MigrationId>>,
    /// The UUIDs of their domains.
    moving: Mutex<HashSet<String>>,
    /// One of them has ended, or a domain's fate is decided.
    decided: Condvar,
    desks: Mutex<HashMap<(MigrationId, Side), Desk>>,
}

/// A switchover's thread, and the channel of its requests.
struct Desk {
    opened: Opened,
    tell: Sender<Request>,
    doubt: Arc<Mutex<Option<String>>>,
    /// Whether the domain's fate is decided at its source.
    is_decided: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// A migration that runs, until this is dropped.
pub(super) struct Running<'s> {
    settlers: &'s DomainSettlers,
    uuid: String,
    migration: Mutex<Option<MigrationId>>,
}

impl Running<'_> {
    /// It has this id.
    pub(super) fn is(&self, switchover: &str) {
        if let Ok(id) = MigrationId::new(switchover) {
            self.settlers.running.lock().insert(id.clone());
            *self.migration.lock() = Some(id);
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.migration.lock().take() {
            self.settlers.running.lock().remove(&id);
        }
        self.settlers.moving.lock().remove(&self.uuid);
        self.settlers.decided.notify_all();
    }
}

impl DomainSettlers {
    pub(crate) fn new(
        host: Arc<XenHost>,
        (events, history): (Arc<Events>, Arc<History>),
        (agent, security): (&str, Security),
        peers: Peers,
    ) -> Arc<Self> {
        Arc::new(Self {
            host,
            events,
            history,
            agent: agent.to_owned(),
            security,
            peers,
            running: Mutex::default(),
            moving: Mutex::default(),
            decided: Condvar::new(),
            desks: Mutex::default(),
        })
    }

    /// Continues the switchovers that an earlier run of the agent left.
    pub(crate) fn take_up(self: &Arc<Self>, kept: Vec<Kept>) {
        kept.into_iter().for_each(|kept| self.take_up_one(kept, None));
    }

    /// Continues the switchover of a domain that was to arrive, whose thread has panicked.
    pub(crate) fn take_up_after_fault(self: &Arc<Self>, migration: &MigrationId) {
        if let Some(kept) = self.host.journals.find(migration, Side::Destination) {
            self.take_up_one(kept, None);
        }
    }

    fn take_up_one(self: &Arc<Self>, kept: Kept, pipes: Option<XlPipes>) {
        match kept {
            Kept::Source(kept) => {
                let opened = kept.journal.opened().clone();
                let begin = move |settler: &Settler| settler.leaving(kept, pipes);
                self.open_desk(opened, Side::Source, begin);
            }
            Kept::Destination(kept) => {
                let opened = kept.journal.opened().clone();
                let begin = move |settler: &Settler| settler.coming(kept);
                self.open_desk(opened, Side::Destination, begin);
            }
            Kept::Unreadable(error) => {
                tracing::error!(%error, "cannot read a domain's journal; it is not touched");
            }
        }
    }

    /// Continues the switchover of a domain that was to leave.
    pub(super) fn leaving(self: &Arc<Self>, driver: source::Driver, domain: DepartingDomain) {
        let opened = driver.journal().opened().clone();
        self.open_desk(opened, Side::Source, move |_| Some(Case::Source(driver, domain)));
    }

    /// Continues the switchover of a domain that was to arrive.
    pub(crate) fn coming(self: &Arc<Self>, left: UnsettledDomain) {
        let UnsettledDomain { driver, arriving } = left;
        let opened = driver.journal().opened().clone();
        self.open_desk(opened, Side::Destination, move |_| {
            Some(Case::Destination(driver, arriving))
        });
    }

    /// A migration of a domain that begins; none while another one of it runs or is undecided. Both
    /// could release it, each to another host.
    pub(super) fn begins(&self, uuid: &str) -> Option<Running<'_>> {
        let is_taken =
            |moving: &mut HashSet<String>| moving.contains(uuid) || self.is_undecided(uuid);
        let mut moving = self.moving.lock();
        if self.decided.wait_while_for(&mut moving, is_taken, ENDS_MAX).timed_out()
            && is_taken(&mut moving)
        {
            return None;
        }
        moving.insert(uuid.to_owned());
        Some(Running { settlers: self, uuid: uuid.to_owned(), migration: Mutex::new(None) })
    }

    /// Whether an earlier migration from here has left it open which host has the domain.
    fn is_undecided(&self, uuid: &str) -> bool {
        self.desks.lock().iter().any(|((_, side), desk)| {
            *side == Side::Source
                && !desk.is_decided.load(SeqCst)
                && domain_of(&desk.opened).is_some_and(|domain| domain.uuid == uuid)
        })
    }

    /// A domain's fate is decided, or its desk is closed.
    pub(super) fn wake_those_that_begin(&self) {
        drop(self.moving.lock());
        self.decided.notify_all();
    }

    /// xl's transport hands over its pipes again, for that switchover.
    pub(super) fn hand_over(self: &Arc<Self>, again: &str, pipes: XlPipes) {
        let settled = "its migration is settled: `droveway list --migrations` shows how";
        let Ok(id) = MigrationId::new(again) else { return pipes.ended(false, settled) };
        if self.running.lock().contains(&id) {
            // It has lost the transport, and ends. Dropped here, they are handed over again.
            return;
        }
        let key = (id, Side::Source);
        let tell = self.desks.lock().get(&key).map(|desk| desk.tell.clone());
        match tell {
            Some(tell) => {
                if let Err(unsent) = tell.send(Request::Pipes(pipes))
                    && let Request::Pipes(pipes) = unsent.into_inner()
                {
                    pipes.ended(false, settled);
                }
            }
            // A fault has ended the thread that led it.
            None => match self.host.journals.find(&key.0, Side::Source) {
                Some(kept) => self.take_up_one(kept, Some(pipes)),
                None => pipes.ended(false, settled),
            },
        }
    }

    fn open_desk(
        self: &Arc<Self>,
        opened: Opened,
        side: Side,
        begin: impl FnOnce(&Settler) -> Option<Case> + Send + 'static,
    ) {
        let (tell, told) = unbounded();
        let key = (opened.migration.clone(), side);
        let doubt = Arc::<Mutex<Option<String>>>::default();
        let is_decided = Arc::<AtomicBool>::default();
        let settler = Settler {
            settlers: Arc::clone(self),
            opened: opened.clone(),
            side,
            told,
            doubt: Arc::clone(&doubt),
            is_decided: Arc::clone(&is_decided),
        };
        let span = data_threads::migration_span(opened.log_id(), &opened.vm);
        let name = format!("settle-{}", opened.vm);
        let mut desks = self.desks.lock();
        match span.in_scope(|| data_threads::spawn(name, move || settler.run(begin))) {
            Ok(thread) => {
                let thread = Some(thread);
                desks.insert(key, Desk { opened, tell, doubt, is_decided, thread });
            }
            Err(error) => {
                tracing::error!(
                    vm = opened.vm,
                    %error,
                    "cannot start the recovery thread; the agent retries at its next start"
                );
            }
        }
    }

    pub(super) fn close_desk(&self, opened: &Opened, side: Side) {
        self.desks.lock().remove(&(opened.migration.clone(), side));
        self.wake_those_that_begin();
    }

    /// Whether a message is about a domain of this host.
    pub(crate) fn knows(&self, message: &SwitchoverMessage) -> bool {
        let (id, side) = (message.migration(), message.to());
        self.host.journals.keeps(id, side) || self.desks.lock().contains_key(&(id.clone(), side))
    }

    /// Handles another agent's message; returns the answer, if there is one now.
    pub(crate) fn answer(&self, inquiry: Inquiry) -> Option<SwitchoverMessage> {
        let Inquiry { from, message } = inquiry;
        let key = (message.migration().clone(), message.to());
        let tell = match self.desks.lock().get(&key) {
            Some(desk) if desk.opened.peer == from => desk.tell.clone(),
            Some(_) => {
                let id = &key.0;
                tracing::warn!(from, %id, "ignoring a message for another host's migration");
                return None;
            }
            // It runs right now, or its journal can't be read.
            None => return None,
        };
        let (reply, answer) = bounded(1);
        tell.send(Request::Message(message, reply)).ok()?;
        answer.recv_timeout(ANSWER_MAX).ok().flatten()
    }

    /// The domains that are in doubt, in the form of VMs.
    pub(crate) fn in_doubt(&self) -> Vec<VmSummary> {
        let desks = self.desks.lock();
        let doubt = |desk: &Desk| Some(summary(&desk.opened.vm, desk.doubt.lock().clone()?));
        desks.values().filter_map(doubt).collect()
    }

    /// Applies the operator's decision about a domain in doubt; none if there is no such domain.
    pub(crate) fn decide(&self, name: &str, request: ResolveRequest) -> Option<Result<(), Denied>> {
        let tell = {
            let desks = self.desks.lock();
            let is_it = |desk: &&Desk| desk.opened.vm == name && desk.doubt.lock().is_some();
            desks.values().find(is_it)?.tell.clone()
        };
        if !request.certain {
            let text = format!(
                "first make sure on both hosts, with `xl list`, where {name} runs, and confirm it"
            );
            return Some(Err(Denied::Coded(ErrorCode::NotCertain, text)));
        }
        let resolution = match request.side {
            ResolveSide::Here => Resolution::Here,
            ResolveSide::There => Resolution::There,
        };
        let (reply, done) = bounded(1);
        let unsettled = || Err(Denied::Local(format!("{name}: not settled yet; check again soon")));
        Some(match tell.send(Request::Resolve(resolution, reply)) {
            Ok(()) => done.recv_timeout(RESOLVE_MAX).unwrap_or_else(|_| unsettled()),
            Err(_) => unsettled(),
        })
    }

    /// Ends all threads; their state is on disk.
    pub(crate) fn close(&self) {
        let desks = std::mem::take(&mut *self.desks.lock());
        let threads: Vec<_> = desks.into_values().filter_map(|desk| desk.thread).collect();
        for thread in threads {
            // A panic was logged by the thread.
            let _ = thread.join();
        }
    }
}

/// A domain in doubt as a VM, of which nothing else is known.
fn summary(name: &str, problem: String) -> VmSummary {
    VmSummary {
        name: name.to_owned(),
        status: VmStatus::InDoubt,
        pid: 0,
        qemu: "xl".to_owned(),
        program_replaced: false,
        ram_bytes: 0,
        free_page_hint: false,
        attached: false,
        migration: None,
        problem: Some(problem),
        left_over: None,
        share_domain: String::new(),
        content: None,
        helper: None,
        argv: Vec::new(),
    }
}
