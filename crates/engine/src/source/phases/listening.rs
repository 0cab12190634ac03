//! The events that the leading thread waits for, in any phase.

use std::time::{Duration, Instant};

use crossbeam_channel::{at, never, select};
use qemu::qmp::Event;
use switchover::{Envelope, Reason};
use wire::{ToDestination, ToSource};

use super::connect::Connected;
use crate::error::MigrationError;
use crate::link::Received;
use crate::source::blackout::Missing;
use crate::source::bounds::rebind;
use crate::source::context::Context;
use crate::source::control::pacing::Pacing;
use crate::source::notice::Notice;

/// An event that the phase must handle.
pub(crate) enum Happening {
    Qemu(Event),
    Peer(ToSource),
    /// A message of the switchover.
    Said(Envelope<switchover::ToSource>),
    Notice(Notice),
}

/// The end of a wait.
enum Woken {
    By(Happening),
    /// The operator has changed the migration's bounds.
    Rebound,
    /// The VM has reached its blackout bound.
    BlackoutBound,
    /// The wait timed out.
    Late,
}

/// A phase that waits for QEMU, the peer, the operator and its own threads.
pub(crate) trait Listening<'m> {
    fn connected(&self) -> &Connected<'m>;

    /// Hands a message to the part that waits for it; returns messages for the leading
    /// thread.
    fn hand_on(&self, message: ToSource) -> Option<ToSource>;

    /// What paces the lanes; none before there are any.
    fn pacing(&self) -> Option<&Pacing>;

    /// The accepted downtime.
    fn goal(&self) -> Duration;

    /// The data that has not arrived.
    fn missing(&self) -> Missing;

    /// The next event for the phase. Events that end any phase are errors here, and so is
    /// a timeout.
    fn next(&self, until: Instant) -> Result<Happening, MigrationError> {
        let happening = self.next_or_late(until)?;
        happening.ok_or_else(|| self.connected().context.lost("it did not answer in time"))
    }

    /// As [`Listening::next`], but none on a timeout.
    fn next_or_late(&self, until: Instant) -> Result<Option<Happening>, MigrationError> {
        let connected = self.connected();
        let context = &connected.context;
        loop {
            let max = connected.blackout_max(self.goal());
            match connected.wake(until, connected.blackout_ends(max))? {
                Woken::By(Happening::Peer(ToSource::Note { text })) => {
                    context.report_builder.note(text);
                }
                Woken::By(Happening::Peer(ToSource::Switchover { said })) => {
                    return Ok(Some(Happening::Said(said)));
                }
                Woken::By(Happening::Peer(message)) => {
                    if let Some(message) = self.hand_on(message) {
                        return Ok(Some(Happening::Peer(message)));
                    }
                }
                // After the commit everything has arrived.
                Woken::By(Happening::Notice(Notice::Panicked(thread))) => {
                    if !context.committed {
                        return Err(MigrationError::Panicked { thread });
                    }
                    let fault = format!("a fault in the agent: its thread {thread} panicked");
                    context.report_builder.note(fault);
                }
                Woken::By(happening) => return Ok(Some(happening)),
                Woken::Rebound => {
                    let Context { report_builder, threads, blackout, committed, .. } = context;
                    let stands_still = blackout.has_begun();
                    let terms = rebind(report_builder, threads, self.pacing(), stands_still);
                    // After the commit no data thread is left.
                    if !committed {
                        connected.send(&ToDestination::Terms(terms))?;
                    }
                }
                Woken::BlackoutBound => return Err(connected.blackout_error(max, self.missing())),
                Woken::Late => return Ok(None),
            }
        }
    }
}

impl Connected<'_> {
    /// Waits for one event, at most until `until`. At `blackout_ends` the VM reaches its
    /// blackout bound.
    fn wake(
        &self,
        until: Instant,
        blackout_ends: Option<Instant>,
    ) -> Result<Woken, MigrationError> {
        let context = &self.context;
        let (never_cancelled, never_ended) = (never(), never());
        let watch = context.report_builder.watch();
        let (cancelled, ended) = match context.may_end() {
            true => (watch.cancelled(), watch.lost()),
            false => (&never_cancelled, &never_ended),
        };
        let over = context.deadline.filter(|_| context.may_end()).map_or_else(never, at);
        let blackout_ends = blackout_ends.map_or_else(never, at);
        select! {
            recv(context.qemu_events) -> event => match event {
                Ok(event) => Ok(Woken::By(Happening::Qemu(event))),
                Err(_) => Err(MigrationError::VmGone("its QEMU ended".to_owned())),
            },
            recv(self.control.inbox) -> received => match received {
                Ok(Received::Message(ToSource::Refused { reason })) => Err(self.refused(reason)),
                Ok(Received::Message(message)) => Ok(Woken::By(Happening::Peer(message))),
                Ok(Received::Disconnected(error)) => Err(context.lost(error)),
                Ok(_) => Err(context.lost("it sent device state, which only a source does")),
                Err(_) => Err(context.lost("the connection has ended")),
            },
            recv(context.noticed) -> notice => match notice {
                Ok(notice) => Ok(Woken::By(Happening::Notice(notice))),
                Err(_) => unreachable!("the context holds a sender"),
            },
            recv(cancelled) -> _ => Err(MigrationError::Cancelled),
            recv(ended) -> why => Err(MigrationError::Ended(why.unwrap_or_default())),
            recv(context.report_builder.watch().rebound()) -> _ => Ok(Woken::Rebound),
            recv(at(until)) -> _ => Ok(Woken::Late),
            recv(blackout_ends) -> _ => Ok(Woken::BlackoutBound),
            recv(over) -> _ => Err(context.too_long()),
        }
    }

    /// The error for a destination that refuses.
    pub(crate) fn refused(&self, reason: String) -> MigrationError {
        let host = self.context.peer.name.clone();
        MigrationError::Refused { host, reason: Reason::new(reason).into() }
    }

    /// The error for a message of the switchover that came too early.
    pub(crate) fn said_early(&self, said: &Envelope<switchover::ToSource>) -> MigrationError {
        use switchover::ToSource::{Loaded, Lost, Refused, Running, Unknown};
        let reason = match &said.message {
            Refused { reason } | Lost { reason } => reason.to_string(),
            Unknown => "its agent no longer knows this migration".to_owned(),
            Loaded | Running => "it claims the VM, which was not released to it".to_owned(),
        };
        MigrationError::DestinationFailed { host: self.context.peer.name.clone(), reason }
    }

    pub(crate) fn unexpected(&self, message: &ToSource) -> MigrationError {
        let why = Reason::new(format!("it sent a message out of turn: {message:?}"));
        self.context.lost(why)
    }
}

/// The phases before the stream.
impl<'m> Listening<'m> for Connected<'m> {
    fn connected(&self) -> &Connected<'m> {
        self
    }

    fn hand_on(&self, message: ToSource) -> Option<ToSource> {
        match message {
            // Nothing waits for these yet.
            ToSource::DiskFlushed { .. } | ToSource::NicUse(_) | ToSource::Late { .. } => None,
            message => Some(message),
        }
    }

    fn pacing(&self) -> Option<&Pacing> {
        None
    }

    fn goal(&self) -> Duration {
        Duration::ZERO
    }

    fn missing(&self) -> Missing {
        Missing::default()
    }
}
