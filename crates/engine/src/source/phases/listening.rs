//! What the leading thread waits for, in whatever phase, and what it says.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crossbeam_channel::select;
use switchover::{Envelope, Reason};
use wire::{Late, ToDestination, ToSource};

use crate::error::MigrationError;
use crate::link::Heard;
use crate::source::control::pacing::{Pacing, pace_bounds};
use crate::source::{Happening, LOOK, Notice, Source, sched_params};
use crate::waits::Pulse;

/// A QEMU that is not finishing answers in a millisecond or two.
const STATUS_MAX: Duration = Duration::from_millis(200);

impl Source<'_> {
    /// Whether a stop is its owner's. QEMU's own, to finish, shows as
    /// `finish-migrate`, or QEMU is too busy finishing to answer.
    pub(crate) fn owner_paused(&self) -> bool {
        let status =
            self.vm.machine.qmp.execute_within("query-status", serde_json::json!({}), STATUS_MAX);
        status.is_ok_and(|status| status["status"] == "paused")
    }

    /// Whether anything of the VM still arrives.
    pub(crate) fn check_progress(&self, pulse: &mut Pulse) -> Result<(), MigrationError> {
        let Some(stream) = &self.stream else { return Ok(()) };
        let come = stream.lanes.delivered();
        let memory = come.body_bytes + come.found_bytes + come.fill_bytes + come.dropped_bytes;
        let disks = come.block_bytes + come.block_zero_bytes;
        let tapped = stream.state.residue_bytes.load(Relaxed) + stream.state.taken().0;
        let waited = pulse.beat(memory + disks + tapped, LOOK);
        if waited < self.local.waits.stall {
            return Ok(());
        }
        Err(MigrationError::Stalled { host: self.peer.name.clone(), waited })
    }

    /// The next thing that matters; what ends any phase is an error here, and so
    /// is a wait that was too long.
    pub(crate) fn next(&mut self, until: Instant) -> Result<Happening, MigrationError> {
        match self.next_or_late(Some(until))? {
            Happening::Late => Err(MigrationError::PeerLost {
                host: self.peer.name.clone(),
                why: "it did not answer in time".to_owned(),
            }),
            happening => Ok(happening),
        }
    }

    pub(crate) fn next_or_late(
        &mut self,
        until: Option<Instant>,
    ) -> Result<Happening, MigrationError> {
        loop {
            match self.happening(until)? {
                // In whatever phase, somebody else waits for it.
                Some(Happening::Peer(ToSource::DiskFlushed { ticket, error })) => {
                    if let Some(disks) = &self.disks {
                        disks.flushed(ticket, error);
                    }
                }
                Some(Happening::Peer(ToSource::NicUse(used))) => {
                    if let Some(pacing) = self.pacing() {
                        pacing.hear(used);
                    }
                }
                Some(Happening::Peer(ToSource::Late { batches })) => {
                    let stage = self.stream.as_ref().and_then(|stream| stream.stage.as_ref());
                    if let Some(stage) = stage {
                        for Late { ticket, wanted, more } in batches {
                            stage.late(ticket, wanted, more);
                        }
                    }
                }
                Some(Happening::Peer(ToSource::Note { text })) => self.report_builder.note(text),
                // Of a VM that was given up, all has arrived.
                Some(Happening::Notice(Notice::Panicked(thread))) => {
                    if !self.committed {
                        return Err(MigrationError::Panicked { thread });
                    }
                    self.report_builder
                        .note(format!("a fault in the agent: its thread {thread} panicked"));
                }
                Some(Happening::Peer(ToSource::Switchover { said })) => {
                    return Ok(Happening::Said(said));
                }
                Some(happening) => return Ok(happening),
                None => self.rebind()?,
            }
        }
    }

    /// None: the operator has changed what it may use.
    fn happening(&self, until: Option<Instant>) -> Result<Option<Happening>, MigrationError> {
        let control = self.control.as_ref().expect("connected");
        let cancelled = self.report_builder.watch().cancelled();
        let never = crossbeam_channel::never();
        let late = until.map_or_else(crossbeam_channel::never, crossbeam_channel::at);
        let cancelled = if self.committed { &never } else { cancelled };
        let over = self.over.filter(|_| !self.committed);
        let over = over.map_or_else(crossbeam_channel::never, crossbeam_channel::at);
        let dark = self.blackout_ends();
        let dark = dark.map_or_else(crossbeam_channel::never, crossbeam_channel::at);
        let host = &self.peer.name;
        let lost = |why: String| MigrationError::PeerLost { host: host.clone(), why };
        select! {
            recv(self.qemu_events) -> event => match event {
                Ok(event) => Ok(Some(Happening::Qemu(event))),
                Err(_) => Err(MigrationError::VmGone("its QEMU ended".to_owned())),
            },
            recv(control.hear) -> heard => match heard {
                Ok(Heard::Message(ToSource::Refused { reason })) => {
                    let reason = Reason::new(reason).into();
                    Err(MigrationError::Refused { host: host.clone(), reason })
                }
                Ok(Heard::Message(message)) => Ok(Some(Happening::Peer(message))),
                Ok(Heard::Gone(error)) => Err(lost(error.to_string())),
                Ok(_) => Err(lost("it sent device state, which only a source does".to_owned())),
                Err(_) => Err(lost("the connection has ended".to_owned())),
            },
            recv(self.notices.1) -> notice => match notice {
                Ok(notice) => Ok(Some(Happening::Notice(notice))),
                Err(_) => unreachable!("this struct holds a sender"),
            },
            recv(cancelled) -> _ => Err(MigrationError::Cancelled),
            recv(self.report_builder.watch().rebound()) -> _ => Ok(None),
            recv(late) -> _ => Ok(Some(Happening::Late)),
            recv(dark) -> _ => Err(self.blackout_error()),
            recv(over) -> _ => {
                let allowed = Duration::from_secs(self.request.timeout_s.unwrap_or_default());
                Err(MigrationError::TooLong { allowed })
            }
        }
    }

    pub(crate) fn pacing(&self) -> Option<&Pacing> {
        self.stream.as_ref().and_then(|stream| stream.pacing.as_ref())
    }

    /// The operator has changed what it may use: that holds at both ends.
    pub(crate) fn rebind(&self) -> Result<(), MigrationError> {
        let bounds = self.report_builder.watch().bounds();
        tracing::info!(vm = self.vm.name, ?bounds, "other bounds");
        self.report_builder.rebound(&bounds);
        let params = sched_params(&bounds, self.blackout.has_begun());
        self.threads.set(&params);
        if let Some(pacing) = self.pacing() {
            pacing.set(pace_bounds(&bounds));
        }
        // With the VM given up, no data thread is left to be told.
        if self.committed { Ok(()) } else { self.send(&ToDestination::Terms(params)) }
    }

    /// Does not wait for the destination, which may read slowly.
    pub(crate) fn send(&self, message: &ToDestination) -> Result<(), MigrationError> {
        let control = self.control.as_ref().expect("connected");
        control.saying.say(message).map_err(|error| MigrationError::PeerLost {
            host: self.peer.name.clone(),
            why: error.to_string(),
        })
    }

    /// What the destination said of the switchover before it was to.
    pub(crate) fn said_early(&self, said: &Envelope<switchover::ToSource>) -> MigrationError {
        use switchover::ToSource::{Loaded, Lost, Refused, Running, Unknown};
        let reason = match &said.message {
            Refused { reason } | Lost { reason } => reason.to_string(),
            Unknown => "its agent knows nothing of this migration any more".to_owned(),
            Loaded | Running => "it says that it has the VM, which it was not given".to_owned(),
        };
        MigrationError::DestinationFailed { host: self.peer.name.clone(), reason }
    }

    pub(crate) fn unexpected(&self, message: &ToSource) -> MigrationError {
        MigrationError::PeerLost {
            host: self.peer.name.clone(),
            why: Reason::new(format!("it sent a message out of turn: {message:?}")).into(),
        }
    }
}
