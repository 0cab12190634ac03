//! The thread of one switchover: it sends, receives, waits, and shows what is in doubt.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use api::Happening;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use qemu::machine;
use serde::Deserialize;
use switchover::journal::{Opened, Side};
use switchover::{Doubt, Resolution};
use wire::SwitchoverMessage;

use super::Settlers;
use super::case::Case;
use super::either_side::{MESSAGES_MAX, PATIENCE_MAX, pause};
use super::inquiring::inquire;
use crate::denied::Denied;
use crate::events::shortened;
use crate::vms::vm::Vm;

/// A request to a switchover's thread.
pub(super) enum Request {
    /// The other side's message, and the channel for the answer.
    Message(SwitchoverMessage, Sender<Option<SwitchoverMessage>>),
    /// The operator's decision, and the channel for the result.
    Resolve(Resolution, Sender<Result<(), Denied>>),
    /// Whether that decision would change anything.
    Takes(Resolution, Sender<bool>),
    /// The VM's owner is about to stop or move it, and waits for the confirmation.
    Left(Sender<()>),
}

pub(super) struct Settler {
    pub(super) settlers: Arc<Settlers>,
    pub(super) opened: Opened,
    side: Side,
    pub(super) told: Receiver<Request>,
    tries: u32,
    /// Whether the VM was published as in doubt.
    in_doubt: Cell<bool>,
    /// Why the other side could not be reached last time, until it is.
    unreached: RefCell<Option<String>>,
}

impl Settler {
    pub(super) fn new(
        settlers: Arc<Settlers>,
        opened: Opened,
        side: Side,
        told: Receiver<Request>,
    ) -> Self {
        let (in_doubt, unreached) = (Cell::new(false), RefCell::default());
        Self { settlers, opened, side, told, tries: 0, in_doubt, unreached }
    }

    pub(super) fn run(mut self, begin: impl FnOnce(&Self) -> Option<Case>) {
        let Some(mut case) = begin(&self) else { return };
        while let Some(wait) = case.wait() {
            self.deliver(&mut case);
            self.show(case.doubt().map(|doubt| self.advice(doubt)));
            if case.wait() != Some(wait) {
                continue;
            }
            match self.told.recv_timeout(pause(wait, self.tries)) {
                Ok(told) => {
                    self.tries = 0;
                    if let Request::Message(..) = &told {
                        self.note(None);
                    }
                    receive(told, &mut case, &self.opened.vm);
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.tries = (self.tries + 1).min(PATIENCE_MAX);
                    case.late();
                }
                // The agent ends; its next run continues.
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
        // The VM is free before the last message reaches the other side, which may take a
        // while. A peer that inquires gets the same answer without a journal.
        self.show(None);
        self.settlers.close_desk(&self.opened, self.side);
        tracing::info!(peer = self.opened.peer, "settled");
        self.deliver(&mut case);
    }

    /// Whether this switchover is of the VM that has its name here, as far as that is known.
    pub(super) fn is_about(&self, vm: &Vm) -> bool {
        is_about(&self.opened, vm)
    }

    /// What is in doubt and what to do, and why the other side can't be queried, if that is so: an
    /// expired certificate, for instance, is no reason to decide without it.
    fn advice(&self, doubt: &Doubt) -> String {
        let Opened { vm, peer, .. } = &self.opened;
        if self.opened.is_within_host() {
            return doubt.advice_within_host(vm);
        }
        let advice = doubt.advice(vm, peer);
        match &*self.unreached.borrow() {
            Some(why) => format!("{advice}. The agent of {peer} can't be queried now: {why}"),
            None => advice,
        }
    }

    /// Shows the operator what is in doubt, or that nothing is.
    pub(super) fn show(&self, doubt: Option<String>) {
        // Within this host, it may be about the QEMU that the VM has, or about the next one.
        let is_it = |vm: &Arc<Vm>| self.opened.is_within_host() || self.is_about(vm);
        let vm = self.settlers.registry.vm(&self.opened.vm).filter(is_it);
        let problem = doubt.as_ref().filter(|_| vm.is_some());
        let was_in_doubt = self.in_doubt.replace(problem.is_some());
        let name = self.opened.vm.clone();
        let happening = match problem {
            Some(problem) if !was_in_doubt => {
                if self.side == Side::Source {
                    self.settlers.history.in_doubt(&self.opened);
                }
                Some(Happening::VmInDoubt { vm: name, problem: shortened(problem) })
            }
            None if was_in_doubt => Some(Happening::VmSettled { vm: name }),
            _ => None,
        };
        // Another switchover of the VM may be in doubt, or its journal unreadable.
        if let Some(vm) = vm
            && (doubt.is_some() || was_in_doubt)
        {
            vm.doubt(doubt);
        }
        if let Some(happening) = happening {
            self.settlers.events.publish(happening);
        }
    }

    /// Sends all messages, and handles the answers.
    fn deliver(&self, case: &mut Case) {
        for _ in 0..MESSAGES_MAX {
            let Some(message) = case.outbox().pop_front() else { return };
            let answer = self.send(message);
            self.note(answer.as_ref().err());
            match answer {
                Ok(Some(answer)) => case.received(answer),
                Ok(None) => {}
                // The message is sent again later; the others in the queue are older.
                Err(_) => case.outbox().clear(),
            }
        }
    }

    /// Notes whether the other side could be reached. Each new reason is logged once.
    fn note(&self, why: Option<&String>) {
        let before = self.unreached.replace(why.cloned());
        if let Some(why) = why.filter(|why| before.as_ref() != Some(*why)) {
            let peer = &self.opened.peer;
            tracing::warn!(peer, why, "cannot send a switchover message to the peer");
        }
    }

    fn send(&self, message: SwitchoverMessage) -> Result<Option<SwitchoverMessage>, String> {
        if self.opened.is_within_host() {
            return Ok(self.settlers.pass(message));
        }
        let Settlers { security, agent, peers, .. } = &*self.settlers;
        inquire((agent, security), (peers, &self.opened), message)
    }
}

/// Whether a switchover is of the VM that has its name here, as far as that is known.
pub(super) fn is_about(opened: &Opened, vm: &Vm) -> bool {
    let qemu = machine::Record::deserialize(&opened.qemu).ok();
    qemu.is_none_or(|qemu| vm.may_be_of(&qemu))
}

fn receive(told: Request, case: &mut Case, vm: &str) {
    match told {
        Request::Message(message, reply) => {
            // The queued messages are older than the answer to this one.
            case.outbox().clear();
            case.received(message);
            let answer = case.outbox().pop_front();
            if let Err(undelivered) = reply.send(answer)
                && let Some(answer) = undelivered.into_inner()
            {
                case.outbox().push_front(answer);
            }
        }
        Request::Resolve(resolution, reply) => {
            let taken = case.resolve(resolution);
            let _ = reply.send(if taken {
                Ok(())
            } else {
                Err(Denied::Conflict(format!(
                    "{vm}: this decision is not possible, or nothing is left to decide: check with \
                     `droveway show {vm}`"
                )))
            });
        }
        Request::Takes(resolution, reply) => {
            let _ = reply.send(case.takes(resolution));
        }
        Request::Left(reply) => {
            case.left();
            let _ = reply.send(());
        }
    }
}

#[cfg(test)]
mod tests {
    use crossbeam_channel::unbounded;
    use identity::Security;
    use serde_json::Value;
    use switchover::journal::{Journal, JournalDir};
    use switchover::{Found, Kept, MigrationId, source};

    use super::super::source_effects::SourceEffects;
    use super::*;
    use crate::events::{Events, Limits};
    use crate::moves::history::History;
    use crate::peers::Peers;
    use crate::state::StateDir;
    use crate::vms::registry::{Held, Registry};

    #[test]
    fn a_doubt_says_why_the_other_side_cannot_be_asked() {
        let dir = tempfile::tempdir().unwrap();
        let state = StateDir::open(dir.path()).unwrap();
        let registry = Arc::new(Registry::open(state, &Held::default()).unwrap());
        let journals = JournalDir::open(&registry.state().journals()).unwrap();
        let opened = Opened {
            migration: MigrationId::random().unwrap(),
            vm: "web1".to_owned(),
            peer: "host-b".to_owned(),
            // Nothing listens there.
            peer_address: "127.0.0.1:1".to_owned(),
            run: false,
            qemu: Value::Null,
            listed: None,
            handed_over: false,
        };
        let mut left: Journal<source::Record> = journals.create(opened.clone()).unwrap();
        left.append(&source::Record::Committed { run: false }).unwrap();
        drop(left);
        let Some(Kept::Source(kept)) = journals.contents().unwrap().pop() else { panic!() };
        let settlers = Settlers::new(
            Arc::clone(&registry),
            Events::new(Limits::default()).unwrap(),
            Arc::new(History::open("host-a", registry.state().reports())),
            journals,
            "host-a",
            Security::Plaintext,
            Peers::default(),
        );
        let (_tell, told) = unbounded();
        let settler = Settler::new(settlers, opened, Side::Source, told);
        let Settlers { registry, history, .. } = &*settler.settlers;
        let mut effects = SourceEffects::new(registry, history, &settler.opened, None, false);
        let driver = source::Driver::restart(kept, Found::Missing, &mut effects);
        let mut case = Case::Source(driver, effects);
        settler.deliver(&mut case);
        let said = settler.advice(case.doubt().unwrap());
        assert!(said.contains("which has not answered since"), "{said}");
        let why = "of host-b can't be queried now: cannot connect to 127.0.0.1:1";
        assert!(said.contains(why), "{said}");
        settler.note(None);
        let said = settler.advice(case.doubt().unwrap());
        assert!(!said.contains("can't be queried"), "{said}");
    }
}
