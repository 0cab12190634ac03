//! The thread of one switchover: it sends, receives, waits, and shows what is in doubt.

use std::cell::Cell;
use std::io::Read;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::Happening;
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use switchover::journal::{Opened, Side};
use switchover::{Resolution, Wait};
use transport::{Endpoint, connect};
use wire::{Frame, Inquiry, Kind, WireError, Word, read_frame, read_message};

use super::Settlers;
use super::case::Case;
use crate::denied::Denied;
use crate::events::shortened;
use crate::vm::Vm;

/// For the other side's answer: it may have to write to disk and to ask its QEMU.
const ANSWER_MAX: Duration = Duration::from_secs(6);
/// Messages to send in a row, each in reply to an answer, before the thread waits again.
const WORDS_MAX: usize = 8;
/// How often the wait doubles while nothing changes: up to eight times as long.
const PATIENCE_MAX: u32 = 3;

/// A request to a switchover's thread.
pub(super) enum Request {
    /// The other side's message, and the channel for the answer.
    Word(Word, Sender<Option<Word>>),
    /// The operator's decision, and the channel for the result.
    Resolve(Resolution, Sender<Result<(), Denied>>),
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
}

impl Settler {
    pub(super) fn new(
        settlers: Arc<Settlers>,
        opened: Opened,
        side: Side,
        told: Receiver<Request>,
    ) -> Self {
        Self { settlers, opened, side, told, tries: 0, in_doubt: Cell::new(false) }
    }

    pub(super) fn run(mut self, begin: impl FnOnce(&Self) -> Option<Case>) {
        let Some(mut case) = begin(&self) else { return };
        while let Some(wait) = case.wait() {
            self.deliver(&mut case);
            self.show(case.doubt().map(|doubt| doubt.advice(&self.opened.vm, &self.opened.peer)));
            if case.wait() != Some(wait) {
                continue;
            }
            match self.told.recv_timeout(self.pause(wait)) {
                Ok(told) => {
                    self.tries = 0;
                    hear(told, &mut case, &self.opened.vm);
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
        // while. A peer that asks gets the same answer without a journal.
        self.show(None);
        self.settlers.close_desk(&self.opened, self.side);
        tracing::info!(peer = self.opened.peer, "settled");
        self.deliver(&mut case);
    }

    fn pause(&self, wait: Wait) -> Duration {
        let first = match wait {
            Wait::Answer | Wait::Retry => Duration::from_secs(1),
            Wait::Peer | Wait::Settled => Duration::from_secs(5),
        };
        first * (1 << self.tries)
    }

    /// Whether this switchover is of the VM that has its name here, as far as that is known.
    pub(super) fn is_about(&self, vm: &Vm) -> bool {
        super::is_about(&self.opened, vm)
    }

    /// Shows the operator what is in doubt, or that nothing is.
    pub(super) fn show(&self, doubt: Option<String>) {
        let vm = self.settlers.registry.vm(&self.opened.vm).filter(|vm| self.is_about(vm));
        let problem = doubt.as_ref().filter(|_| vm.is_some());
        let was_in_doubt = self.in_doubt.replace(problem.is_some());
        let name = self.opened.vm.clone();
        let happening = match problem {
            Some(problem) if !was_in_doubt => {
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
            self.settlers.events.tell(happening);
        }
    }

    /// Sends all messages, and handles the answers.
    fn deliver(&self, case: &mut Case) {
        for _ in 0..WORDS_MAX {
            let Some(word) = case.outbox().pop_front() else { return };
            match self.say(word) {
                Ok(Some(answer)) => case.heard(answer),
                Ok(None) => {}
                Err(error) => {
                    tracing::debug!(peer = self.opened.peer, error, "not said");
                    // The message is sent again later; the others in the queue are older.
                    case.outbox().clear();
                }
            }
        }
    }

    fn say(&self, word: Word) -> Result<Option<Word>, String> {
        let Some(remote) = self.settlers.address(&self.opened) else {
            return Err(format!("where {} is, is not known", self.opened.peer));
        };
        let talk = |word| -> Result<Option<Word>, WireError> {
            let Settlers { security, agent, .. } = &*self.settlers;
            let endpoint = Endpoint { local: None, remote };
            let mut stream = connect(endpoint, &self.opened.peer, security, Kind::Inquiry)
                .map_err(|error| WireError::Io(std::io::Error::other(error)))?;
            stream.set_read_deadline(Some(Instant::now() + ANSWER_MAX))?;
            let inquiry = Inquiry { from: agent.clone(), word };
            Frame::message(&inquiry)?.write_to(&mut stream)?;
            match read_frame(&mut stream.by_ref())? {
                Some(Frame::Message(json)) => Ok(Some(read_message(&json)?)),
                _ => Ok(None),
            }
        };
        talk(word).map_err(|error| error.to_string())
    }
}

fn hear(told: Request, case: &mut Case, vm: &str) {
    match told {
        Request::Word(word, reply) => {
            // The queued messages are older than the answer to this one.
            case.outbox().clear();
            case.heard(word);
            let answer = case.outbox().pop_front();
            if let Err(unheard) = reply.send(answer)
                && let Some(answer) = unheard.into_inner()
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
                    "{vm}: that can't be decided so, or there is nothing to decide any more: look \
                     again with `droveway show {vm}`"
                )))
            });
        }
        Request::Left(reply) => {
            case.left();
            let _ = reply.send(());
        }
    }
}
