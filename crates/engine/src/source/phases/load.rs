//! Lets the destination load the VM, once the audit has proved it identical.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use api::{Audited, Phase};
use crossbeam_channel::RecvTimeoutError;
use qemu::qmp::Event;
use switchover::Envelope;
use switchover::source::Event as Step;
use wire::ToDestination;

use super::Failed;
use super::deliver::Delivered;
use super::journaled::Journaled;
use super::listening::{Happening, Listening};
use super::release::Release;
use super::stream::Streaming;
use crate::error::MigrationError;
use crate::source::audit::Compared;
use crate::source::mapped_ram::MappedRam;

/// A QEMU that ends closes its connections before it exits.
const EXIT_MAX: Duration = Duration::from_secs(5);

/// The destination reports that it has loaded the VM.
pub(crate) struct Loaded<'m> {
    pub(crate) streamed: Journaled<Streaming<'m>>,
    pub(crate) said: Envelope<switchover::ToSource>,
}

impl<'m> Delivered<'m> {
    /// Lets the destination load the VM, and waits until it has.
    pub(crate) fn load(self) -> Result<Loaded<'m>, Failed<'m>> {
        let Self(mut streamed) = self;
        let loaded = streamed.keep_mapped().and_then(|()| streamed.wait_loaded());
        match loaded {
            Ok(said) => Ok(Loaded { streamed, said }),
            Err(error) => Err(Failed::new(streamed, error)),
        }
    }
}

impl Journaled<Streaming<'_>> {
    /// Notes what RAM that is handed over holds. QEMU has to release it here before it is loaded.
    fn keep_mapped(&mut self) -> Result<(), MigrationError> {
        if self.phase.mapped.is_none() {
            return Ok(());
        }
        let complete = self.phase.connected.context.local.waits.complete;
        self.phase.outgoing.wait_completed(self.phase.time_left(complete))?;
        self.step(Step::Completed);
        self.phase.mapped.as_mut().map_or(Ok(()), MappedRam::keep)
    }

    fn wait_loaded(&mut self) -> Result<Envelope<switchover::ToSource>, MigrationError> {
        let residue_bytes = self.phase.flow.state.residue_bytes.load(Relaxed);
        self.phase.connected.context.blackout.loads();
        let complete = ToDestination::Complete { residue_bytes, audit: self.phase.audit.begin() };
        self.phase.connected.send(&complete)?;
        // Now, because it takes no time of its own while the destination loads.
        self.phase.connected.check_drives()?;
        self.note_released();
        let until = Instant::now() + self.phase.connected.context.local.waits.load;
        let said = loop {
            match self.next_while_loading(until)? {
                None | Some(Happening::Notice(_) | Happening::Qemu(_)) => {}
                Some(Happening::Said(said)) if said.message == switchover::ToSource::Loaded => {
                    if self.phase.audit.is_open() {
                        return Err(self.phase.connected.said_early(&said));
                    }
                    self.phase.connected.context.report_builder.enter(Phase::Loaded);
                    break said;
                }
                Some(Happening::Said(said)) => return Err(self.phase.connected.said_early(&said)),
                Some(Happening::Peer(other)) => match self.phase.audit.receive(&other)? {
                    Some(Compared::Asks(said)) => self.phase.connected.send(&said)?,
                    Some(Compared::Waits | Compared::Same) => {}
                    None => return Err(self.phase.connected.unexpected(&other)),
                },
            }
        };
        self.phase.check_lanes()?;
        Ok(said)
    }

    /// The next event for the load; none if it was QEMU's.
    fn next_while_loading(&mut self, until: Instant) -> Result<Option<Happening>, MigrationError> {
        let next = match self.phase.next(until) {
            Ok(Happening::Qemu(event)) => self.follow_while_loading(&event).map(|()| None),
            next => next.map(Some),
        };
        let is_gone = matches!(next, Err(MigrationError::VmGone(_)));
        if is_gone && self.driver.machine().is_released() && self.has_exited() {
            self.qemu_exited();
            return Ok(None);
        }
        next
    }

    fn follow_while_loading(&mut self, event: &Event) -> Result<(), MigrationError> {
        self.follow(event)?;
        self.note_released();
        Ok(())
    }

    /// Notes that QEMU has released the VM, once it reports that: should it end then, the
    /// destination has all of the VM. If that is not seen here, the commit waits for it.
    fn note_released(&mut self) {
        let Streaming { outgoing, release, .. } = &self.phase;
        let is_reported = *release == Release::Reported;
        if is_reported && !self.driver.machine().is_released() && outgoing.has_completed() {
            self.step(Step::Completed);
        }
    }

    /// Whether QEMU, whose connection has ended, exits as well, and has not run the VM since it
    /// released it. One that lives could still be ordered to.
    pub(super) fn has_exited(&mut self) -> bool {
        let Streaming { connected, release, .. } = &mut self.phase;
        let context = &connected.context;
        if context.vm.machine.process.wait_exited(EXIT_MAX).is_err() {
            return false;
        }
        // Its last events may not have been followed yet, or not even been read.
        let until = Instant::now() + EXIT_MAX;
        loop {
            match context.qemu_events.recv_deadline(until) {
                Ok(event) => *release = release.after(&event),
                Err(RecvTimeoutError::Disconnected) => return *release == Release::Reported,
                Err(RecvTimeoutError::Timeout) => return false,
            }
        }
    }

    /// QEMU ended when it had released the VM: whether the destination loads it is all that counts.
    pub(super) fn qemu_exited(&mut self) {
        let context = &mut self.phase.connected.context;
        context.qemu_events = crossbeam_channel::never();
        context.qemu_exited = true;
        context.report_builder.note("the source's QEMU ended when it had released the VM");
        self.step(Step::QemuExited);
    }
}

impl Streaming<'_> {
    /// Fails if RAM that is handed over is not as it was before the load.
    pub(super) fn compare_mapped(&self) -> Result<(), MigrationError> {
        let context = &self.connected.context;
        let Some(mapped) = &self.mapped else { return Ok(()) };
        let Some(audited) = mapped.compare()? else { return Ok(()) };
        if mapped.is_sampled() {
            context.report_builder.note(
                "the audit compared a part of the RAM that was handed over: --audit deep compares \
                 all of it",
            );
        }
        let failed = match &audited {
            Audited::Differences { pages, examples } => {
                let (host, pages) = (context.peer.name.clone(), *pages);
                let first = examples.first().cloned().unwrap_or_default();
                Err(MigrationError::Audit { host, pages, first })
            }
            Audited::Same { .. } | Audited::Nothing { .. } => Ok(()),
        };
        context.report_builder.update(|report| report.audit = audited);
        failed
    }

    /// Fails if lanes failed, even if the VM was loaded.
    fn check_lanes(&self) -> Result<(), MigrationError> {
        let host = &self.connected.context.peer.name;
        match self.flow.lanes.failure() {
            Some(source) => Err(MigrationError::Lanes { host: host.clone(), source }),
            None => Ok(()),
        }
    }
}
