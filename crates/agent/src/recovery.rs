//! Switchovers that are not over and whose control connection is gone: after a
//! cut, or after a restart of the agent on either side.
//!
//! Each has a thread of its own that drives its machine: it says what is to be
//! said on connections of its own, again and again, hears what the other host
//! or the operator says, and shows the operator what can't be known.

mod case;
mod destination_effects;
pub(crate) mod kept;
mod restart;
mod source_effects;
mod thread;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use api::{ErrorCode, Happening, ResolveRequest, ResolveSide, VmSummary};
use crossbeam_channel::{Sender, bounded, unbounded};
use engine::Unsettled;
use identity::Security;
use parking_lot::Mutex;
use switchover::Kept;
use switchover::journal::{JournalDir, Opened, Side};
use switchover::{MigrationId, Resolution, source};
use wire::{Inquiry, Word};

use crate::denied::Denied;
use crate::events::{self, Events};
use crate::peers::Peers;
use crate::registry::Registry;
use crate::vm::Vm;
use case::Case;
use destination_effects::{DestinationEffects, Place};
use source_effects::SourceEffects;
use thread::{Request, Settler};

/// For an answer to somebody who waits for it on a connection: less than he
/// waits. A later one is said on a connection of our own.
const ANSWER_MAX: Duration = Duration::from_secs(4);
/// For what follows from an operator's decision: QEMU may have to end.
const RESOLVE_MAX: Duration = Duration::from_secs(60);

/// The switchovers of this host that are not over.
pub(crate) struct Settlers {
    pub(crate) registry: Arc<Registry>,
    pub(crate) events: Arc<Events>,
    journals: JournalDir,
    agent: String,
    security: Security,
    peers: Peers,
    desks: Mutex<HashMap<(MigrationId, Side), Desk>>,
}

/// Where a switchover's thread is told things.
struct Desk {
    vm: String,
    peer: String,
    tell: Sender<Request>,
    thread: Option<JoinHandle<()>>,
}

impl Settlers {
    pub(crate) fn new(
        registry: Arc<Registry>,
        events: Arc<Events>,
        journals: JournalDir,
        agent: &str,
        security: Security,
        peers: Peers,
    ) -> Arc<Self> {
        let agent = agent.to_owned();
        Arc::new(Self {
            registry,
            events,
            journals,
            agent,
            security,
            peers,
            desks: Mutex::default(),
        })
    }

    /// Goes on with what an earlier run of the agent left.
    pub(crate) fn take_up(self: &Arc<Self>, kept: Vec<Kept>) {
        for one in kept {
            match one {
                Kept::Source(kept) => {
                    let opened = kept.journal.opened().clone();
                    self.open_desk(opened, Side::Source, |settler| restart::leaving(settler, kept));
                }
                Kept::Destination(kept) => {
                    let opened = kept.journal.opened().clone();
                    let begin = |settler: &Settler| restart::coming(settler, kept);
                    self.open_desk(opened, Side::Destination, begin);
                }
                Kept::Unreadable(error) => {
                    tracing::error!(%error, "a journal can't be read; its VM is left as it is");
                    if let Some(vm) = error.vm().and_then(|vm| self.registry.vm(vm)) {
                        self.cannot_read(&vm, error.to_string());
                    }
                }
            }
        }
    }

    fn cannot_read(&self, vm: &Vm, problem: String) {
        self.events.tell(Happening::VmInDoubt {
            vm: vm.name.clone(),
            problem: events::shortened(&problem),
        });
        vm.doubt(Some(problem));
    }

    /// A migration's journal at its destination, if it is kept.
    pub(crate) fn kept_of(&self, migration: &MigrationId) -> Option<Kept> {
        self.journals.find(migration, Side::Destination)
    }

    /// The journal of a VM that was to leave, if there is one that nobody goes on
    /// with.
    pub(crate) fn kept_leaving(&self, name: &str) -> Option<Kept> {
        let contents = match self.journals.contents() {
            Ok(contents) => contents,
            // There may be one.
            Err(error) => vec![Kept::Unreadable(error)],
        };
        contents.into_iter().find(|kept| match kept {
            Kept::Source(kept) => kept.journal.opened().vm == name,
            Kept::Destination(_) => false,
            Kept::Unreadable(error) => error.vm().is_none_or(|vm| vm == name),
        })
    }

    /// A fault of ours has ended the thread that had a switchover in hand: goes
    /// on from its journal, as after a restart of the agent. Says whether there
    /// is one; until it is settled nothing else happens to the VM.
    pub(crate) fn take_up_after_fault(self: &Arc<Self>, vm: &str, kept: Option<Kept>) -> bool {
        let Some(kept) = kept else { return false };
        self.registry.unsettled(vm);
        if let (Kept::Unreadable(error), Some(vm)) = (&kept, self.registry.vm(vm)) {
            self.cannot_read(&vm, error.to_string());
        }
        self.take_up(vec![kept]);
        true
    }

    /// Goes on with a VM that was to leave. With `decided` it is settled what
    /// becomes of it here, and only the other side is still to hear something.
    pub(crate) fn leaving(self: &Arc<Self>, driver: source::Driver, vm: &Arc<Vm>, decided: bool) {
        let opened = driver.journal().opened().clone();
        if !decided {
            self.registry.unsettled(&vm.name);
        }
        let registry = Arc::clone(&self.registry);
        let effects =
            SourceEffects::new(registry, &opened, vm.machine().filter(|_| !decided), !decided);
        self.open_desk(opened, Side::Source, move |_| Some(Case::Source(driver, effects)));
    }

    /// Goes on with a VM that was to come.
    pub(crate) fn coming(self: &Arc<Self>, left: Unsettled) {
        let Unsettled { driver, machine, incoming, arriving } = left;
        let opened = driver.journal().opened().clone();
        if arriving.is_some() {
            self.registry.unsettled(&opened.vm);
        }
        let (registry, place) = (Arc::clone(&self.registry), arriving.map(Place::Live));
        let effects = DestinationEffects::new(registry, &opened.vm, Some(machine), incoming, place);
        self.open_desk(opened, Side::Destination, move |_| {
            Some(Case::Destination(driver, effects))
        });
    }

    /// `begin` runs on the switchover's thread: it may take its time.
    fn open_desk(
        self: &Arc<Self>,
        opened: Opened,
        side: Side,
        begin: impl FnOnce(&Settler) -> Option<Case> + Send + 'static,
    ) {
        let (tell, told) = unbounded();
        let key = (opened.migration.clone(), side);
        let (vm, peer) = (opened.vm.clone(), opened.peer.clone());
        let name = format!("settle-{vm}");
        let settler = Settler::new(Arc::clone(self), opened, side, told);
        let span = data_threads::migration_span(&key.0, &vm);
        let mut desks = self.desks.lock();
        match span.in_scope(|| data_threads::spawn(name, move || settler.run(begin))) {
            Ok(thread) => {
                desks.insert(key, Desk { vm, peer, tell, thread: Some(thread) });
            }
            Err(error) => {
                tracing::error!(vm, %error, "no thread settles it; the next start of the agent does");
            }
        }
    }

    fn close_desk(&self, opened: &Opened, side: Side) {
        self.desks.lock().remove(&(opened.migration.clone(), side));
    }

    /// What somebody says on a connection of its own; and our answer, if there
    /// is one now.
    pub(crate) fn answer(&self, inquiry: Inquiry) -> Option<Word> {
        let Inquiry { from, word } = inquiry;
        let (id, side) = (word.migration().clone(), word.to());
        let tell = match self.desks.lock().get(&(id.clone(), side)) {
            Some(desk) if desk.peer == from => Some(desk.tell.clone()),
            Some(desk) => {
                tracing::warn!(from, of = desk.peer, %id, "a word of another host's migration");
                return None;
            }
            None => None,
        };
        let Some(tell) = tell else {
            // One that moves right now, or that can't be read, has no answer.
            let strange = !self.journals.keeps(&id, side);
            return if strange { word.from_a_stranger() } else { None };
        };
        let (reply, answer) = bounded(1);
        tell.send(Request::Word(word, reply)).ok()?;
        answer.recv_timeout(ANSWER_MAX).ok().flatten()
    }

    /// The operator decides about a VM that is in doubt. Answers with how it is
    /// then; one that is the other host's may be gone already.
    pub(crate) fn decide(
        &self,
        name: &str,
        request: ResolveRequest,
    ) -> Result<Option<VmSummary>, Denied> {
        self.registry.show(name)?;
        if self.registry.is_unreadable(name) && !self.registry.is_unsettled(name) {
            return self.decide_unreadable(name, request);
        }
        let resolution = match request.side {
            ResolveSide::Here => Resolution::Here,
            ResolveSide::There => Resolution::There,
        };
        if !request.certain {
            let text = match resolution {
                Resolution::Here => format!(
                    "first make sure that {name} can't run on the other host any more, and say so"
                ),
                Resolution::There => {
                    format!("first make sure that {name} runs on the other host, and say so")
                }
            };
            return Err(Denied::Coded(ErrorCode::NotCertain, text));
        }
        self.resolve(name, resolution)?;
        Ok(self.registry.show(name).ok())
    }

    /// As [`Settlers::decide`], for one whose record doesn't say what it is.
    fn decide_unreadable(
        &self,
        name: &str,
        request: ResolveRequest,
    ) -> Result<Option<VmSummary>, Denied> {
        match request.side {
            ResolveSide::Here if request.certain => self.registry.take_again(name).map(Some),
            ResolveSide::There if request.certain => {
                self.registry.forget_unreadable(name).map(|()| None)
            }
            ResolveSide::Here => Err(Denied::Coded(
                ErrorCode::NotCertain,
                format!("first make sure that {name} can't run on another host, and say so"),
            )),
            ResolveSide::There => Err(Denied::Coded(
                ErrorCode::NotCertain,
                format!("first make sure that {name} doesn't run here"),
            )),
        }
    }

    fn resolve(&self, vm: &str, resolution: Resolution) -> Result<(), Denied> {
        let desks: Vec<_> = {
            let desks = self.desks.lock();
            desks.values().filter(|desk| desk.vm == vm).map(|desk| desk.tell.clone()).collect()
        };
        let text = format!("{vm} is not in doubt: there is nothing to decide");
        let mut denied = Denied::Coded(ErrorCode::VmNotInDoubt, text);
        for tell in desks {
            let (reply, done) = bounded(1);
            if tell.send(Request::Resolve(resolution, reply)).is_err() {
                continue;
            }
            match done.recv_timeout(RESOLVE_MAX) {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(reason)) => denied = reason,
                Err(_) => {
                    denied = Denied::Local(format!("{vm}: this takes a while; look again soon"));
                }
            }
        }
        Err(denied)
    }

    /// A VM that came here is about to end or to move on by its owner's will:
    /// what becomes of it is no matter of its arrival any more.
    pub(crate) fn left(&self, vm: &str) {
        for tell in self.tells(vm, Side::Destination) {
            let (reply, noted) = bounded(1);
            if tell.send(Request::Left(reply)).is_ok() {
                let _ = noted.recv_timeout(ANSWER_MAX);
            }
        }
    }

    /// Whether a VM may not leave yet, and why.
    pub(crate) fn keeps_here(&self, vm: &str) -> Result<(), Denied> {
        let desks = self.desks.lock();
        match desks.iter().find(|((_, side), desk)| *side == Side::Source && desk.vm == vm) {
            None => Ok(()),
            Some((_, desk)) => Err(Denied::Coded(
                ErrorCode::VmInDoubt,
                format!(
                    "the last migration of {vm} is not settled with {} yet: `droveway show {vm}` \
                     says more; it is asked again and again",
                    desk.peer
                ),
            )),
        }
    }

    fn tells(&self, vm: &str, side: Side) -> Vec<Sender<Request>> {
        let desks = self.desks.lock();
        let theirs = desks.iter().filter(|((_, of), desk)| *of == side && desk.vm == vm);
        theirs.map(|(_, desk)| desk.tell.clone()).collect()
    }

    /// Ends all threads; what they keep is on disk.
    pub(crate) fn close(&self) {
        let desks = std::mem::take(&mut *self.desks.lock());
        for (_, mut desk) in desks {
            let thread = desk.thread.take();
            drop(desk);
            if let Some(thread) = thread {
                // One that panicked has said why.
                let _ = thread.join();
            }
        }
    }

    /// Where the other host's agent is.
    fn address(&self, opened: &Opened) -> Option<SocketAddr> {
        let known = self.peers.named(&opened.peer);
        known.map(|peer| peer.address).or_else(|| opened.peer_address.parse().ok())
    }
}
