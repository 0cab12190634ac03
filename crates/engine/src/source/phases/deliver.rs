//! Follows QEMU's stream until it has stopped the VM and handed over everything, and
//! everything is placed.

use std::time::{Duration, Instant};

use api::Phase;
use crossbeam_channel::{at, select};
use qemu::qmp::Event;
use switchover::source::Event as Step;
use wire::ToSource;

use super::Failed;
use super::connect::Connected;
use super::journaled::Journaled;
use super::listening::{Happening, Listening};
use super::release::{Release, TAKEN_BACK};
use super::stream::Streaming;
use crate::error::MigrationError;
use crate::link::Received;
use crate::source::blackout::Missing;
use crate::source::control::pacing::Pacing;
use crate::source::disks::Disks;
use crate::source::notice::Notice;
use crate::waits::Pulse;

/// Interval at which a waiting migration checks for progress.
const LOOK: Duration = Duration::from_secs(1);
/// QEMU's last events, and the destination's last message, arrive on another socket than the
/// error that they explain, on a busy host a moment later.
const LAST_WORD: Duration = Duration::from_millis(500);

/// The VM is stopped, and all of its pages are placed.
pub(crate) struct Delivered<'m>(pub(crate) Journaled<Streaming<'m>>);

impl<'m> Journaled<Streaming<'m>> {
    /// Waits for the barrier.
    pub(crate) fn deliver(mut self) -> Result<Delivered<'m>, Failed<'m>> {
        match self.wait_delivered() {
            Ok(()) => Ok(Delivered(self)),
            Err(error) => Err(Failed::new(self, error)),
        }
    }

    fn wait_delivered(&mut self) -> Result<(), MigrationError> {
        let (mut pulse, mut look) = (Pulse::new(), Instant::now());
        loop {
            match self.phase.next_or_late(look)? {
                None => {
                    self.phase.check_progress(&mut pulse)?;
                    self.phase.connected.ask_again();
                    self.note_owner();
                    look = Instant::now() + LOOK;
                }
                Some(Happening::Notice(Notice::Placed(outcome))) => {
                    outcome.map_err(|error| self.last_word(error))?;
                    self.receive_stream();
                    self.phase.note_broken_hold();
                    return Ok(());
                }
                Some(Happening::Notice(notice)) => self.notice(notice)?,
                Some(Happening::Qemu(event)) => self.follow(&event)?,
                Some(Happening::Peer(other)) => {
                    return Err(self.phase.connected.unexpected(&other));
                }
                Some(Happening::Said(said)) => return Err(self.phase.connected.said_early(&said)),
            }
        }
    }

    fn notice(&mut self, notice: Notice) -> Result<(), MigrationError> {
        let Streaming { connected, outgoing, .. } = &mut self.phase;
        let context = &mut connected.context;
        match notice {
            Notice::FirstPassBegins => context.report_builder.enter(Phase::FirstPass),
            Notice::TailBegins => {
                context.report_builder.enter(Phase::Stopped);
                context.stop_unclear = false;
                connected.stands_still(Instant::now());
                // QEMU reports no stop for a VM that its owner had paused.
                let run = connected.context.was_running;
                self.step(Step::Stopped { run });
            }
            Notice::Unsplittable(reason) => {
                context.report_builder.enter(Phase::FirstPass);
                context.report_builder.note(format!("the stream is relayed unchanged: {reason}"));
                context.report_builder.update(|report| report.tap = "whole".to_owned());
            }
            Notice::DisksReady => self.phase.begin_memory()?,
            Notice::Disks(drained) => {
                drained.map_err(MigrationError::Disks)?;
                context.blackout.drained();
                outgoing.continue_switchover()?;
            }
            Notice::Stalled(why) => return Err(MigrationError::NotFollowed(why)),
            Notice::Panicked(thread) => return Err(MigrationError::Panicked { thread }),
            // Placed is awaited above, and the others concern carried migrations.
            Notice::Placed(_)
            | Notice::FirstPassEnds
            | Notice::SplitEnds(_)
            | Notice::RamOver
            | Notice::PageAfterRam
            | Notice::Ended(_) => {}
        }
        Ok(())
    }

    pub(crate) fn follow(&mut self, event: &Event) -> Result<(), MigrationError> {
        if self.phase.follow(event)? {
            let run = self.phase.connected.context.was_running;
            self.step(Step::Stopped { run });
        } else {
            self.note_owner();
        }
        Ok(())
    }

    /// Journals whether the owner paused the VM, for an agent that restarts in the middle
    /// of the move.
    fn note_owner(&mut self) {
        let run = self.phase.connected.context.was_running;
        self.step(Step::ByOwner { run });
    }

    /// QEMU's whole stream has arrived, which also tells whether the VM ran until QEMU
    /// stopped it. Its owner may have paused it just before.
    fn receive_stream(&mut self) {
        if self.phase.was_paused() {
            let context = &mut self.phase.connected.context;
            context.was_running = false;
            context.blackout.forget();
            self.note_owner();
        }
    }

    /// The reason why the stream can't be read: the end of QEMU, or what made the destination end
    /// the connection that the tap writes to.
    fn last_word(&mut self, error: MigrationError) -> MigrationError {
        if !matches!(error, MigrationError::Tap(_)) {
            return error;
        }
        let until = at(Instant::now() + LAST_WORD);
        loop {
            let Connected { context, control, .. } = &self.phase.connected;
            let event = select! {
                recv(context.qemu_events) -> event => event,
                recv(control.inbox) -> message => match message {
                    Ok(Received::Message(message)) => match self.reason_of_peer(&message) {
                        Some(reason) => return reason,
                        None => continue,
                    },
                    // QEMU would have ended first.
                    _ => return error,
                },
                recv(until) -> _ => return error,
            };
            match event.map(|event| self.follow(&event)) {
                Ok(Ok(())) => {}
                Ok(Err(gone @ (MigrationError::VmGone(_) | MigrationError::PoweredOff(_)))) => {
                    return gone;
                }
                // QEMU is alive.
                Ok(Err(_)) => return error,
                Err(_) => return MigrationError::VmGone("its QEMU ended".to_owned()),
            }
        }
    }

    /// Why the destination ends the migration, if this message says so.
    fn reason_of_peer(&self, message: &ToSource) -> Option<MigrationError> {
        let connected = &self.phase.connected;
        match message {
            ToSource::Refused { reason } => Some(connected.refused(reason.clone())),
            ToSource::Switchover { said } => Some(connected.said_early(said)),
            _ => None,
        }
    }
}

impl Streaming<'_> {
    /// Follows a QEMU event. True: QEMU has stopped the VM for its switchover.
    fn follow(&mut self, event: &Event) -> Result<bool, MigrationError> {
        self.release = self.release.after(event);
        match (event.name.as_str(), event.data["status"].as_str()) {
            ("MIGRATION", Some("pre-switchover")) => {
                let context = &self.connected.context;
                if let Some(disks) = &mut self.disks {
                    disks.drain(context.notices.clone(), &context.local.waits)?;
                }
                return Ok(false);
            }
            ("MIGRATION", Some("failed")) => {
                if let Some(why) = self.outgoing.error() {
                    return Err(MigrationError::Qemu(why));
                }
            }
            _ => {}
        }
        let stops = self.connected.follow(event)?;
        if self.release == Release::TakenBack {
            return Err(MigrationError::Qemu(TAKEN_BACK.to_owned()));
        }
        if stops {
            self.connected.stopped(event.at, self.flow.lanes.delivered());
        }
        Ok(stops)
    }

    /// Fails if nothing of the VM has arrived for too long.
    fn check_progress(&self, pulse: &mut Pulse) -> Result<(), MigrationError> {
        let context = &self.connected.context;
        let waited = pulse.beat(self.flow.moved_bytes(), LOOK);
        let limit = context.local.waits.stall;
        if waited < limit {
            return Ok(());
        }
        let flushing = self.disks.as_ref().and_then(Disks::flushing);
        let why = stalled(&self.missing(), flushing, &context.peer.name, (waited, limit));
        why.map_or(Ok(()), Err)
    }

    /// Notes that a QEMU that was held stopped the VM by itself: more was in flight than
    /// the downtime goal has room for.
    fn note_broken_hold(&self) {
        let context = &self.connected.context;
        if self.flow.tap.ended_early() && context.blackout.stop().is_some() {
            context.report_builder.note(
                "QEMU stopped the VM before it was allowed to: more was in flight than the \
                 downtime goal has room for",
            );
        }
    }
}

/// Why nothing has arrived within the limit. If nothing is on its way, the destination is flushing
/// disks, or else QEMU is to blame. A flush has all of that time from its own start: QEMU may hang
/// while disks are flushed now and then.
fn stalled(
    missing: &Missing,
    flushing: Option<Duration>,
    host: &str,
    (waited, limit): (Duration, Duration),
) -> Option<MigrationError> {
    let host = host.to_owned();
    if missing.memory_bytes > 0 || missing.disk_bytes > 0 {
        return Some(MigrationError::Stalled { host, waited });
    }
    match flushing {
        None => Some(MigrationError::QemuSilent { waited }),
        Some(waited) if waited >= limit => Some(MigrationError::DisksNotFlushed { host, waited }),
        Some(_) => None,
    }
}

impl<'m> Listening<'m> for Streaming<'m> {
    fn connected(&self) -> &Connected<'m> {
        &self.connected
    }

    fn hand_on(&self, message: ToSource) -> Option<ToSource> {
        match message {
            ToSource::DiskFlushed { ticket, error } => {
                if let Some(disks) = &self.disks {
                    disks.flushed(ticket, error);
                }
                None
            }
            message => self.flow.receive(message),
        }
    }

    fn pacing(&self) -> Option<&Pacing> {
        Some(&self.flow.pacing)
    }

    fn goal(&self) -> Duration {
        self.flow.state.goal()
    }

    fn missing(&self) -> Missing {
        let delivered = self.flow.lanes.delivered();
        Missing {
            memory_bytes: delivered.backlog_bytes,
            disk_bytes: delivered.block_backlog_bytes,
            disks_move: self.disks.is_some(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Under TCG QEMU 10.0 hangs in the migration of a VM that had a vCPU unplugged: the network is
    /// not to blame.
    #[test]
    fn a_qemu_that_hangs_is_distinguished_from_a_destination_that_hangs() {
        let (limit, second) = (Duration::from_secs(60), Duration::from_secs(1));
        let why = |memory_bytes, disk_bytes, flushing| {
            let missing = Missing { memory_bytes, disk_bytes, disks_move: true };
            let why = stalled(&missing, flushing, "host-b", (limit + second, limit));
            why.map_or_else(String::new, |why| why.to_string())
        };
        let (qemu, disks) = (why(0, 0, None), why(0, 0, Some(limit)));
        assert!(qemu.contains("QEMU has handed over no data for 61 s"), "{qemu}");
        assert!(disks.contains("the VM's disks at host-b were not flushed within 60 s"), "{disks}");
        assert_eq!(why(0, 0, Some(limit - second)), "", "it may end in time");
        for (memory_bytes, disk_bytes) in [(4096, 0), (0, 4096)] {
            for flushing in [None, Some(limit)] {
                let why = why(memory_bytes, disk_bytes, flushing);
                assert!(why.contains("nothing of the VM has arrived at host-b for 61 s"), "{why}");
            }
        }
    }
}
