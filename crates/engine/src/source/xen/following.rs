//! Follows a domain's migration: its threads, the destination and the operator, until the domain
//! was released.

use std::time::{Duration, Instant};

use api::Phase;
use crossbeam_channel::{Receiver, at, never, select};
use switchover::Envelope;
use switchover::source::{Event, Outcome as Fate};
use transport::DEAD_AFTER;
use wire::{ToDestination, ToSource};

use super::leading::Leading;
use super::streaming::Streaming;
use crate::error::MigrationError;
use crate::link::Received;
use crate::source::audit::Compared;
use crate::source::blackout::{self, LEAST_OF_DOMAIN};
use crate::source::bounds::{rebind, reschedule, sched_params};
use crate::source::notice::Notice;
use crate::waits::Pulse;

/// How often progress is checked.
const LOOK: Duration = Duration::from_secs(1);

/// The next event.
pub(super) enum Next {
    Notice(Notice),
    Received(Received<ToSource>),
    Rebound,
    Look,
}

impl Leading<'_> {
    /// Follows the migration until the domain was released, and then until it runs.
    pub(super) fn follow(&mut self, streaming: &mut Streaming) -> Result<(), MigrationError> {
        let (mut pulse, mut look) = (Pulse::new(), Instant::now() + LOOK);
        while !self.driver.machine().is_committed() {
            match self.next(&streaming.notices, look)? {
                Next::Notice(notice) => self.notice(notice, streaming)?,
                Next::Received(received) => self.receive(received, streaming)?,
                Next::Rebound => self.rebound(streaming)?,
                Next::Look => {
                    self.check_progress(&mut pulse, streaming)?;
                    look = Instant::now() + LOOK;
                }
            }
        }
        self.report_builder.enter(Phase::Committed);
        self.wait_running(streaming);
        Ok(())
    }

    /// Applies the operator's new bounds.
    fn rebound(&self, streaming: &Streaming) -> Result<(), MigrationError> {
        let stands_still = self.suspended.is_some();
        let flow = &streaming.flow;
        let pacing = Some(&flow.pacing);
        let mut terms = rebind(self.report_builder, &flow.threads, pacing, stands_still);
        if self.is_floor_over && terms.cpu_floor.take().is_some() {
            flow.threads.set(&terms);
        }
        self.send_message(&ToDestination::Terms(terms))
    }

    /// Ends the CPU floor: after the first pass, a suspended domain may wait for data threads, and
    /// nothing in xl's stream shows it.
    fn end_floor(&mut self, streaming: &Streaming) -> Result<(), MigrationError> {
        self.is_floor_over = true;
        let bounds = self.report_builder.watch().bounds();
        let mut terms = sched_params(&bounds, self.suspended.is_some());
        if terms.cpu_floor.take().is_none() {
            return Ok(());
        }
        streaming.flow.threads.set(&terms);
        self.send_message(&ToDestination::Terms(terms))
    }

    /// The next event, or the time to check progress.
    pub(super) fn next(
        &self,
        notices: &Receiver<Notice>,
        look: Instant,
    ) -> Result<Next, MigrationError> {
        let watch = self.report_builder.watch();
        let limits = [self.deadline, self.blackout_ends()];
        let limit = limits.into_iter().flatten().min();
        let late = limit.map_or_else(never, at);
        select! {
            recv(self.inbox) -> received => {
                received.map(Next::Received).map_err(|_| self.lost("its connection has ended"))
            }
            recv(notices) -> notice => {
                notice.map(Next::Notice).map_err(|_| self.lost("its threads have ended"))
            }
            recv(watch.cancelled()) -> _ => Err(MigrationError::Cancelled),
            recv(watch.rebound()) -> _ => Ok(Next::Rebound),
            recv(self.gone) -> _ => {
                Err(MigrationError::Xl("its transport (droveway xen-send) was ended".to_owned()))
            }
            recv(late) -> _ => Err(self.too_late()),
            recv(at(look)) -> _ => Ok(Next::Look),
        }
    }

    fn blackout_max(&self) -> Duration {
        let goal = Duration::from_millis(self.request.downtime_ms);
        blackout::allowed(self.request.blackout_max_s, goal, LEAST_OF_DOMAIN)
    }

    fn blackout_ends(&self) -> Option<Instant> {
        self.suspended?.checked_add(self.blackout_max())
    }

    fn too_late(&self) -> MigrationError {
        if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            let allowed = Duration::from_secs(self.request.timeout_s.unwrap_or_default());
            return MigrationError::TooLong { allowed };
        }
        let host = self.peer.name.clone();
        let left = format!("{host} had not loaded it");
        let (allowed, least) = (self.blackout_max(), LEAST_OF_DOMAIN);
        MigrationError::Blackout { host, allowed, least, left }
    }

    fn notice(&mut self, notice: Notice, streaming: &mut Streaming) -> Result<(), MigrationError> {
        match notice {
            Notice::FirstPassBegins => self.report_builder.enter(Phase::FirstPass),
            Notice::FirstPassEnds => {
                if let Some(stage) = &streaming.flow.stage {
                    // What is awaited holds buffers. Without any, the end of the pass is not read,
                    // and xl may have suspended the domain meanwhile.
                    stage.end_first_pass();
                }
                self.end_floor(streaming)?;
            }
            Notice::TailBegins => {
                let now = Instant::now();
                self.suspended = Some(streaming.passes.suspended_at().unwrap_or(now));
                self.report_builder.enter(Phase::Stopped);
                if let Some(stage) = &streaming.flow.stage {
                    // The domain stands still: what is still awaited is sent.
                    stage.end_naming();
                }
                // Until the commit the domain is taken back if the destination is silent.
                let _ = self.link.set_dead_after(DEAD_AFTER);
                let threads = &streaming.flow.threads;
                if let Some(terms) = reschedule(self.report_builder, threads, true) {
                    self.send_message(&ToDestination::Terms(terms))?;
                }
            }
            Notice::Ended(ended) => {
                ended?;
                // From now on xl may get "ready".
                self.step(Event::Stopped { run: true });
                streaming.sent = Some(Instant::now());
                let audit = streaming.audit.begin();
                self.send_message(&ToDestination::Placed { audit })?;
            }
            Notice::Panicked(thread) => return Err(MigrationError::Panicked { thread }),
            // The others are of QEMU's streams.
            Notice::Unsplittable(_)
            | Notice::Placed(_)
            | Notice::DisksReady
            | Notice::Disks(_)
            | Notice::Stalled(_)
            | Notice::SplitEnds(_)
            | Notice::RamOver
            | Notice::PageAfterRam => {}
        }
        Ok(())
    }

    fn receive(
        &mut self,
        received: Received<ToSource>,
        streaming: &mut Streaming,
    ) -> Result<(), MigrationError> {
        let message = match received {
            Received::Message(message) => streaming.flow.receive(message),
            other => return Err(self.unexpected(other)),
        };
        match message {
            None => Ok(()),
            Some(ToSource::Note { text }) => {
                self.report_builder.note(text);
                Ok(())
            }
            Some(ToSource::Switchover { said }) => self.switchover_said(said, streaming),
            Some(other) => match streaming.audit.receive(&other)? {
                None => Err(self.unexpected(Received::Message(other))),
                Some(Compared::Waits | Compared::Same) => Ok(()),
                Some(Compared::Asks(said)) => self.send_message(&said),
            },
        }
    }

    /// The receiver has the domain, or the destination ends the migration.
    fn switchover_said(
        &mut self,
        said: Envelope<switchover::ToSource>,
        streaming: &Streaming,
    ) -> Result<(), MigrationError> {
        match said.message {
            switchover::ToSource::Loaded
                if streaming.sent.is_some() && !streaming.audit.is_open() =>
            {
                self.report_builder.enter(Phase::Loaded);
                // Gives xl "ready", and commits if xl releases the domain.
                self.step(Event::Received(said));
                if self.driver.machine().is_committed() {
                    return Ok(());
                }
                Err(MigrationError::Xl(match &self.departing.fate {
                    Some(Fate::Stays { reason } | Fate::Lost { reason }) => reason.to_string(),
                    _ => "it has not released the domain".to_owned(),
                }))
            }
            switchover::ToSource::Refused { reason } | switchover::ToSource::Lost { reason } => {
                let (host, reason) = (self.peer.name.clone(), reason.into());
                Err(MigrationError::DestinationFailed { host, reason })
            }
            _ => Err(self.lost("it sent a message out of turn")),
        }
    }

    /// Ends a migration in which nothing happens.
    fn check_progress(
        &self,
        pulse: &mut Pulse,
        streaming: &Streaming,
    ) -> Result<(), MigrationError> {
        let waits = &self.local.waits;
        if let Some(sent) = streaming.sent {
            if sent.elapsed() < waits.load {
                return Ok(());
            }
            let (host, seconds) = (self.peer.name.clone(), waits.load.as_secs());
            let reason = format!("xl there has not loaded the domain within {seconds} s");
            return Err(MigrationError::DestinationFailed { host, reason });
        }
        let waited = pulse.beat(streaming.flow.moved_bytes(), LOOK);
        if waited < waits.stall {
            return Ok(());
        }
        if streaming.flow.lanes.delivered().backlog_bytes > 0 {
            return Err(MigrationError::Stalled { host: self.peer.name.clone(), waited });
        }
        let seconds = waited.as_secs();
        Err(MigrationError::Xl(format!("it has sent nothing of the domain for {seconds} s")))
    }

    /// Interprets what was not expected now.
    pub(super) fn unexpected(&self, received: Received<ToSource>) -> MigrationError {
        let host = self.peer.name.clone();
        match received {
            Received::Message(ToSource::Refused { reason }) => {
                MigrationError::DestinationFailed { host, reason: of_peer(reason) }
            }
            Received::Message(ToSource::Switchover { said }) => match said.message {
                switchover::ToSource::Refused { reason } => {
                    MigrationError::DestinationFailed { host, reason: reason.into() }
                }
                _ => self.lost("it sent a message out of turn"),
            },
            Received::Disconnected(error) => MigrationError::lost(&host, error),
            _ => self.lost("it sent a message out of turn"),
        }
    }
}

/// A peer's text, without what a text must not have.
pub(super) fn of_peer(reason: String) -> String {
    switchover::Reason::new(reason).into()
}
