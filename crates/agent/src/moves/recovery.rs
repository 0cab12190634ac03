//! Unfinished switchovers without a control connection: after a lost connection, or after a
//! restart of the agent on either side.
//!
//! Each has its own thread, which drives its state machine. The thread sends the machine's
//! messages on new connections and retries them, takes the other host's messages and the
//! operator's decision, and shows the operator what is in doubt.

mod case;
mod decide;
mod destination_effects;
pub(crate) mod either_side;
pub(crate) mod inquiring;
pub(crate) mod kept;
mod restart;
mod source_effects;
mod thread;
mod within;

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use api::{ErrorCode, Happening};
use crossbeam_channel::{Sender, bounded, unbounded};
use engine::{Settlement, Unsettled};
use identity::Security;
use parking_lot::Mutex;
use switchover::journal::{JournalDir, Opened, Side};
use switchover::{Kept, MigrationId};
use wire::{Inquiry, SwitchoverMessage};

use crate::denied::Denied;
use crate::events::{self, Events};
use crate::moves::history::History;
use crate::peers::Peers;
use crate::vms::registry::Registry;
use crate::vms::vm::Vm;
use case::Case;
use destination_effects::{DestinationEffects, VmClaim};
use source_effects::SourceEffects;
use thread::{Request, Settler, is_about};

/// For an answer to a peer that waits on its connection: less than the peer waits.
///
/// A later answer is sent on a connection that this agent opens.
pub(crate) const ANSWER_MAX: Duration = Duration::from_secs(4);

/// The most journals for one more VM to arrive: each is a file, and a thread until both hosts agree.
const JOURNALS_MAX: usize = 2048;

/// The unfinished switchovers of this host.
pub(crate) struct Settlers {
    pub(crate) registry: Arc<Registry>,
    pub(crate) events: Arc<Events>,
    pub(crate) history: Arc<History>,
    journals: JournalDir,
    agent: String,
    security: Security,
    peers: Peers,
    desks: Mutex<HashMap<(MigrationId, Side), Desk>>,
}

/// A switchover's thread, and the channel of its requests.
struct Desk {
    opened: Opened,
    tell: Sender<Request>,
    thread: Option<JoinHandle<()>>,
}

impl Desk {
    /// Whether it is of the VM that has this name here. `known` is that VM, if there is one: an
    /// earlier VM of the name may have left a switchover that is not settled yet.
    fn is_of(&self, vm: &str, known: Option<&Vm>) -> bool {
        self.opened.vm == vm && known.is_none_or(|known| is_about(&self.opened, known))
    }

    /// Whether it is of a switchover of that VM within this host.
    fn is_within(&self, vm: &str) -> bool {
        self.opened.is_within_host() && self.opened.vm == vm
    }
}

impl Settlers {
    pub(crate) fn new(
        registry: Arc<Registry>,
        events: Arc<Events>,
        history: Arc<History>,
        journals: JournalDir,
        agent: &str,
        security: Security,
        peers: Peers,
    ) -> Arc<Self> {
        let agent = agent.to_owned();
        Arc::new(Self {
            registry,
            events,
            history,
            journals,
            agent,
            security,
            peers,
            desks: Mutex::default(),
        })
    }

    /// Continues the switchovers that an earlier run of the agent left.
    pub(crate) fn take_up(self: &Arc<Self>, kept: Vec<Kept>) {
        let leaving = kept::leaving(&kept);
        for one in kept {
            match one {
                Kept::Source(kept) => {
                    let opened = kept.journal.opened().clone();
                    self.open_desk(opened, Side::Source, |settler| restart::leaving(settler, kept));
                }
                Kept::Destination(kept) => {
                    let opened = kept.journal.opened().clone();
                    let leaves = kept::is_among(&leaving, &opened);
                    let begin = move |settler: &Settler| restart::coming(settler, kept, leaves);
                    self.open_desk(opened, Side::Destination, begin);
                }
                Kept::Unreadable(error) => {
                    tracing::error!(%error, "cannot read a journal; its VM is not touched");
                    if let Some(vm) = error.vm().and_then(|vm| self.registry.vm(vm)) {
                        self.cannot_read(&vm, error.to_string());
                    }
                }
            }
        }
    }

    /// Whether one more VM may arrive. Its source decides how long its journal stays.
    pub(crate) fn have_room(&self) -> Result<(), Denied> {
        match self.journals.count() {
            Ok(count) if count < JOURNALS_MAX => Ok(()),
            Ok(count) => Err(Denied::Conflict(format!(
                "{count} switchovers there are running or not settled: make the agents of their \
                 other hosts reachable, or decide with `droveway resolve`"
            ))),
            Err(error) => Err(Denied::Local(error.to_string())),
        }
    }

    fn cannot_read(&self, vm: &Vm, problem: String) {
        self.events.publish(Happening::VmInDoubt {
            vm: vm.name.clone(),
            problem: events::shortened(&problem),
        });
        vm.doubt(Some(problem));
    }

    /// The journal of a migration that arrives here, if there is one.
    pub(crate) fn kept_of(&self, migration: &MigrationId) -> Option<Kept> {
        self.journals.find(migration, Side::Destination)
    }

    /// The journal of a VM that was to leave, if no thread continues it.
    pub(crate) fn kept_leaving(&self, name: &str) -> Option<Kept> {
        let contents = match self.journals.contents() {
            Ok(contents) => contents,
            // The VM may have a journal.
            Err(error) => vec![Kept::Unreadable(error)],
        };
        let desks = self.desks.lock();
        contents.into_iter().find(|kept| match kept {
            Kept::Source(kept) => {
                let opened = kept.journal.opened();
                let key = (opened.migration.clone(), Side::Source);
                opened.vm == name && !desks.contains_key(&key)
            }
            Kept::Destination(_) => false,
            Kept::Unreadable(error) => error.vm().is_none_or(|vm| vm == name),
        })
    }

    /// Continues a switchover from its journal, as after a restart of the agent, because a panic
    /// has ended its thread.
    ///
    /// Returns whether there is a journal. If so, no other operation is permitted on the VM until
    /// it is settled.
    pub(crate) fn take_up_after_fault(self: &Arc<Self>, vm: &str, kept: Option<Kept>) -> bool {
        let Some(kept) = kept else { return false };
        self.registry.unsettled(vm);
        if let (Kept::Unreadable(error), Some(vm)) = (&kept, self.registry.vm(vm)) {
            self.cannot_read(&vm, error.to_string());
        }
        self.take_up(vec![kept]);
        true
    }

    /// Continues the switchover of a VM that was to leave, if it is not settled.
    pub(crate) fn leaving(self: &Arc<Self>, settlement: Settlement, vm: &Arc<Vm>) {
        let (driver, holds) = match settlement {
            Settlement::Undelivered(driver) => (driver, false),
            Settlement::InDoubt(Some(driver)) => (driver, true),
            Settlement::Settled | Settlement::InDoubt(None) => return,
        };
        let opened = driver.journal().opened().clone();
        if holds {
            self.registry.unsettled(&vm.name);
        }
        let machine = vm.machine().filter(|_| holds);
        let effects = SourceEffects::new(&self.registry, &self.history, &opened, machine, holds);
        self.open_desk(opened, Side::Source, move |_| Some(Case::Source(driver, effects)));
    }

    /// Continues the switchover of a VM that was to arrive.
    pub(crate) fn coming(self: &Arc<Self>, left: Unsettled) {
        let Unsettled { driver, machine, incoming, arriving } = left;
        let opened = driver.journal().opened().clone();
        // Within this host, the thread of the migration sees to that: the VM has not left yet.
        if arriving.is_some() && !opened.is_within_host() {
            self.registry.unsettled(&opened.vm);
        }
        let (registry, place) = (Arc::clone(&self.registry), arriving.map(VmClaim::Live));
        let effects = DestinationEffects::new(registry, &opened, Some(machine), incoming, place);
        self.open_desk(opened, Side::Destination, move |_| {
            Some(Case::Destination(driver, effects))
        });
    }

    /// Starts a switchover's thread; `begin` runs on that thread, because it may take long.
    fn open_desk(
        self: &Arc<Self>,
        opened: Opened,
        side: Side,
        begin: impl FnOnce(&Settler) -> Option<Case> + Send + 'static,
    ) {
        let (tell, told) = unbounded();
        let key = (opened.migration.clone(), side);
        let vm = opened.vm.clone();
        let name = format!("settle-{vm}");
        let log_id = opened.log_id().clone();
        let settler = Settler::new(Arc::clone(self), opened.clone(), side, told);
        let span = data_threads::migration_span(log_id, &vm);
        let mut desks = self.desks.lock();
        match span.in_scope(|| data_threads::spawn(name, move || settler.run(begin))) {
            Ok(thread) => {
                desks.insert(key, Desk { opened, tell, thread: Some(thread) });
            }
            Err(error) => {
                tracing::error!(
                    vm,
                    %error,
                    "cannot start the recovery thread; the agent retries at its next start"
                );
            }
        }
    }

    fn close_desk(&self, opened: &Opened, side: Side) {
        let mut desks = self.desks.lock();
        desks.remove(&(opened.migration.clone(), side));
        // The VM is free when both sides are settled. One may have no thread yet.
        let other = match side {
            Side::Source => Side::Destination,
            Side::Destination => Side::Source,
        };
        let is_free = opened.is_within_host()
            && !desks.values().any(|desk| desk.is_within(&opened.vm))
            && !self.journals.keeps(&opened.migration, other)
            && self.registry.settled_here(&opened.vm);
        // Other switchovers don't wait for a QEMU that is slow to answer.
        drop(desks);
        if is_free {
            self.registry.free_upgraded(&opened.vm);
        }
    }

    /// Handles another agent's message about a switchover; returns the answer, if there is one
    /// now.
    pub(crate) fn answer(&self, inquiry: Inquiry) -> Option<SwitchoverMessage> {
        let Inquiry { from, message } = inquiry;
        let (id, side) = (message.migration().clone(), message.to());
        let tell = match self.desks.lock().get(&(id.clone(), side)) {
            // Both sides of a migration within this host are here.
            Some(desk) if desk.opened.is_within_host() => {
                tracing::warn!(from, %id, "ignoring a message about a switchover within this host");
                return None;
            }
            Some(desk) if desk.opened.peer == from => Some(desk.tell.clone()),
            Some(desk) => {
                let of = &desk.opened.peer;
                tracing::warn!(
                    from,
                    expected = of,
                    %id,
                    "ignoring a switchover message for another host's migration"
                );
                return None;
            }
            None => None,
        };
        let Some(tell) = tell else {
            // A migration that runs right now, or whose journal can't be read, gives no answer.
            let has_journal = self.journals.keeps(&id, side);
            return if has_journal { None } else { message.answer_without_journal() };
        };
        let (reply, answer) = bounded(1);
        tell.send(Request::Message(message, reply)).ok()?;
        answer.recv_timeout(ANSWER_MAX).ok().flatten()
    }

    /// Notes that the owner is about to stop or move a VM that arrived here: its further fate
    /// no longer concerns the switchover of its arrival.
    pub(crate) fn left(&self, vm: &str) {
        for tell in self.tells(vm, Side::Destination) {
            let (reply, noted) = bounded(1);
            if tell.send(Request::Left(reply)).is_ok() {
                let _ = noted.recv_timeout(ANSWER_MAX);
            }
        }
    }

    /// Refuses a move of a VM whose last migration is not settled yet.
    pub(crate) fn keeps_here(&self, vm: &str) -> Result<(), Denied> {
        let known = self.registry.vm(vm);
        let desks = self.desks.lock();
        // Within this host, the VM is in doubt meanwhile.
        let mut leaving = desks
            .iter()
            .filter(|((_, side), desk)| *side == Side::Source && !desk.opened.is_within_host());
        match leaving.find(|(_, desk)| desk.is_of(vm, known.as_deref())) {
            None => Ok(()),
            Some((_, desk)) => Err(Denied::Coded(
                ErrorCode::VmInDoubt,
                format!(
                    "the last migration of {vm} is not settled with {0} yet: `droveway show {vm}` \
                     may show more; the agent keeps retrying. If {0} never comes back: make sure \
                     that {vm} can't run there, then `droveway resolve {vm} --here`; if you have \
                     taken it back before, once more",
                    desk.opened.peer
                ),
            )),
        }
    }

    fn tells(&self, vm: &str, side: Side) -> Vec<Sender<Request>> {
        let desks = self.desks.lock();
        let theirs = desks.iter().filter(|((_, of), desk)| {
            *of == side && desk.opened.vm == vm && !desk.opened.is_within_host()
        });
        theirs.map(|(_, desk)| desk.tell.clone()).collect()
    }

    /// Ends all threads; their state is on disk.
    pub(crate) fn close(&self) {
        let desks = std::mem::take(&mut *self.desks.lock());
        // All are notified before one is waited for: each may take seconds to connect to a host
        // that is down, and an evacuation to it may have left many.
        let threads: Vec<_> = desks.into_values().filter_map(|desk| desk.thread).collect();
        for thread in threads {
            // A panic was logged by the thread.
            let _ = thread.join();
        }
    }
}
