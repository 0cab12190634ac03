//! What the thread that leads waits for, in any phase.

use std::time::{Duration, Instant};

use api::Bounds;
use crossbeam_channel::{at, never, select};
use qemu::qmp::Event;
use switchover::{Envelope, Reason};
use wire::{ToDestination, ToSource};

use super::connect::Connected;
use crate::error::MigrationError;
use crate::link::Heard;
use crate::source::blackout::Missing;
use crate::source::context::{Notice, sched_params};

/// Something that the phase has to answer.
pub(crate) enum Happening {
    Qemu(Event),
    Peer(ToSource),
    /// Of the switchover.
    Said(Envelope<switchover::ToSource>),
    Notice(Notice),
}

/// What ends a wait.
enum Woken {
    By(Happening),
    /// The operator has changed what the migration may use.
    Rebound,
    /// The VM has stood still for as long as it may.
    BlackoutBound,
    /// What was waited for has not come in its time.
    Late,
}

/// A phase that waits for QEMU, the peer, the operator and its own threads.
pub(crate) trait Listening<'m> {
    fn connected(&self) -> &Connected<'m>;

    /// Hands on what one of its parts waits for. What comes back is for the thread that
    /// leads.
    fn hand_on(&self, message: ToSource) -> Option<ToSource>;

    /// The operator has changed what it may use.
    fn rebound(&self, bounds: &Bounds);

    /// What is accepted as downtime.
    fn goal(&self) -> Duration;

    /// What has not arrived.
    fn missing(&self) -> Missing;

    /// The next thing that matters; what ends any phase is an error here, and so
    /// is a wait that was too long.
    fn next(&self, until: Instant) -> Result<Happening, MigrationError> {
        let happening = self.next_or_late(until)?;
        happening.ok_or_else(|| self.connected().context.lost("it did not answer in time"))
    }

    /// As [`Listening::next`]; none if nothing came in time.
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
                // Of a VM that was given up, all has arrived.
                Woken::By(Happening::Notice(Notice::Panicked(thread))) => {
                    if !context.committed {
                        return Err(MigrationError::Panicked { thread });
                    }
                    let fault = format!("a fault in the agent: its thread {thread} panicked");
                    context.report_builder.note(fault);
                }
                Woken::By(happening) => return Ok(Some(happening)),
                Woken::Rebound => {
                    let bounds = connected.rebind();
                    self.rebound(&bounds);
                    connected.say_bounds(&bounds)?;
                }
                Woken::BlackoutBound => return Err(connected.blackout_error(max, self.missing())),
                Woken::Late => return Ok(None),
            }
        }
    }
}

impl Connected<'_> {
    /// Waits for one thing, at most until then. At `blackout_ends` the VM has stood still
    /// for as long as it may.
    fn wake(
        &self,
        until: Instant,
        blackout_ends: Option<Instant>,
    ) -> Result<Woken, MigrationError> {
        let context = &self.context;
        let never_cancelled = never();
        let cancelled = context.report_builder.watch().cancelled();
        let cancelled = if context.committed { &never_cancelled } else { cancelled };
        let over = context.deadline.filter(|_| !context.committed).map_or_else(never, at);
        let blackout_ends = blackout_ends.map_or_else(never, at);
        select! {
            recv(context.qemu_events) -> event => match event {
                Ok(event) => Ok(Woken::By(Happening::Qemu(event))),
                Err(_) => Err(MigrationError::VmGone("its QEMU ended".to_owned())),
            },
            recv(self.control.hear) -> heard => match heard {
                Ok(Heard::Message(ToSource::Refused { reason })) => {
                    let (host, reason) = (context.peer.name.clone(), Reason::new(reason).into());
                    Err(MigrationError::Refused { host, reason })
                }
                Ok(Heard::Message(message)) => Ok(Woken::By(Happening::Peer(message))),
                Ok(Heard::Gone(error)) => Err(context.lost(error.to_string())),
                Ok(_) => Err(context.lost("it sent device state, which only a source does")),
                Err(_) => Err(context.lost("the connection has ended")),
            },
            recv(context.noticed) -> notice => match notice {
                Ok(notice) => Ok(Woken::By(Happening::Notice(notice))),
                Err(_) => unreachable!("the context holds a sender"),
            },
            recv(cancelled) -> _ => Err(MigrationError::Cancelled),
            recv(context.report_builder.watch().rebound()) -> _ => Ok(Woken::Rebound),
            recv(at(until)) -> _ => Ok(Woken::Late),
            recv(blackout_ends) -> _ => Ok(Woken::BlackoutBound),
            recv(over) -> _ => {
                let allowed = Duration::from_secs(context.request.timeout_s.unwrap_or_default());
                Err(MigrationError::TooLong { allowed })
            }
        }
    }

    /// The operator has changed what the migration may use: so it is at this end.
    fn rebind(&self) -> Bounds {
        let context = &self.context;
        let bounds = context.report_builder.watch().bounds();
        tracing::info!(?bounds, "other bounds");
        context.report_builder.rebound(&bounds);
        context.threads.set(&sched_params(&bounds, context.blackout.has_begun()));
        bounds
    }

    /// And at the other.
    fn say_bounds(&self, bounds: &Bounds) -> Result<(), MigrationError> {
        // With the VM given up, no data thread is left to be told.
        if self.context.committed {
            return Ok(());
        }
        let params = sched_params(bounds, self.context.blackout.has_begun());
        self.send(&ToDestination::Terms(params))
    }

    /// What the destination said of the switchover before it was to.
    pub(crate) fn said_early(&self, said: &Envelope<switchover::ToSource>) -> MigrationError {
        use switchover::ToSource::{Loaded, Lost, Refused, Running, Unknown};
        let reason = match &said.message {
            Refused { reason } | Lost { reason } => reason.to_string(),
            Unknown => "its agent knows nothing of this migration any more".to_owned(),
            Loaded | Running => "it says that it has the VM, which it was not given".to_owned(),
        };
        MigrationError::DestinationFailed { host: self.context.peer.name.clone(), reason }
    }

    pub(crate) fn unexpected(&self, message: &ToSource) -> MigrationError {
        let why = Reason::new(format!("it sent a message out of turn: {message:?}"));
        self.context.lost(why)
    }
}

/// Before there is a stream.
impl<'m> Listening<'m> for Connected<'m> {
    fn connected(&self) -> &Connected<'m> {
        self
    }

    fn hand_on(&self, message: ToSource) -> Option<ToSource> {
        match message {
            // Nothing waits for them yet.
            ToSource::DiskFlushed { .. } | ToSource::NicUse(_) | ToSource::Late { .. } => None,
            message => Some(message),
        }
    }

    fn rebound(&self, _: &Bounds) {}

    fn goal(&self) -> Duration {
        Duration::ZERO
    }

    fn missing(&self) -> Missing {
        Missing::default()
    }
}
