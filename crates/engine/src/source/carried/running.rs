//! A carried migration while its pages go on lanes: the notices of its threads, and its
//! end.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use api::Phase;
use crossbeam_channel::{Receiver, at, never, select};
use wire::ToDestination;

use super::by_passes::ByPasses;
use super::caller::{CLOSED_MAX, CLOSING_MAX};
use super::convergence::Convergence;
use super::from_disks::Reading;
use super::passes::Passes;
use super::process;
use super::split::Split;
use super::tail::Tail;
use super::waiting::Waiting;
use super::way_back::WayBack;
use crate::error::MigrationError;
use crate::link::Received;
use crate::report_builder::ReportBuilder;
use crate::resources::Pools;
use crate::source::audit::SourceAudit;
use crate::source::bounds::{rebind, reschedule};
use crate::source::context::no_thread;
use crate::source::control::sampler::Sampler;
use crate::source::control::sampler::ticking::Ticking;
use crate::source::flow::Flow;
use crate::source::notice::Notice;

/// Time for the destination's last messages; a QEMU that has loaded its VM closes at
/// once.
const REST_MAX: Duration = Duration::from_secs(1);

/// The state while pages are sent.
pub(super) struct Running<'r> {
    pub(super) split: &'r mut Split,
    pub(super) report_builder: &'r Arc<ReportBuilder>,
    pub(super) notices: Receiver<Notice>,
    pub(super) audit: SourceAudit,
    pub(super) flow: Flow,
    pub(super) tail: Arc<Tail>,
    pub(super) passes: Arc<Passes>,
    /// QEMU's main connection.
    pub(super) main: UnixStream,
    /// The return path on it.
    pub(super) way_back: Arc<WayBack>,
    /// The destination has reported its costs.
    pub(super) is_accounted: bool,
    /// When RAM ended.
    pub(super) stopped: Option<Instant>,
    pub(super) pools: Pools,
    /// Kept until the end.
    pub(super) _reading: Option<Reading>,
}

impl Running<'_> {
    pub(super) fn sampler(&self) -> Result<Ticking, MigrationError> {
        let deciding = ByPasses {
            sampler: Sampler::new(&self.flow, self.split.agents.request.compress),
            convergence: Convergence::new(
                Arc::clone(&self.passes),
                process::of(&self.main),
                self.split.agents.local.quota_notes.clone(),
                &self.split.agents.request,
                Arc::clone(self.report_builder),
            ),
            passes: Arc::clone(&self.passes),
            way_back: Arc::clone(&self.way_back),
            fixed: self.split.agents.local.fixed_cost.expected(&self.split.agents.peer.name),
            waiting: Waiting::default(),
        };
        deciding.start().map_err(no_thread)
    }

    /// Follows both ends until QEMU has closed its connections after the destination's
    /// last answer, or an error occurs.
    pub(super) fn follow(&mut self) -> Result<(), MigrationError> {
        let mut closed_until = None;
        loop {
            if self.is_loaded() {
                closed_until.get_or_insert_with(|| Instant::now() + CLOSED_MAX);
            }
            let late = closed_until.map_or_else(never, at);
            let watch = self.report_builder.watch();
            select! {
                recv(self.split.agents.inbox) -> received => match received {
                    Ok(received) => self.receive(received)?,
                    // Everything was answered: QEMU here is about to close.
                    Err(_) if self.is_loaded() => {
                        self.wait_closed();
                        return Ok(());
                    }
                    Err(_) => return Err(self.split.agents.lost("the connection has ended")),
                },
                recv(self.notices) -> notice => match notice {
                    Ok(Notice::Ended(ended)) => {
                        self.ended(ended)?;
                        return self.receive_the_rest();
                    }
                    Ok(notice) => self.notice(notice)?,
                    Err(_) => unreachable!("the flow holds a sender"),
                },
                // Too late for a VM that is loaded: it belongs to the destination.
                recv(watch.cancelled()) -> _ => if !self.is_loaded() {
                    return Err(MigrationError::Cancelled);
                },
                recv(watch.rebound()) -> _ => self.rebind()?,
                recv(late) -> _ => {
                    self.leave_qemu();
                    return Ok(());
                }
            }
        }
    }

    fn notice(&mut self, notice: Notice) -> Result<(), MigrationError> {
        match notice {
            Notice::FirstPassBegins => self.report_builder.enter(Phase::FirstPass),
            Notice::TailBegins => {
                self.way_back.let_stop();
                // RAM's last section may have ended before it was seen to begin.
                let _ = self.split.agents.link.set_dead_after(transport::DEAD_AFTER);
                self.stopped = Some(Instant::now());
                self.report_builder.enter(Phase::Stopped);
                if let Some(terms) = reschedule(self.report_builder, &self.flow.threads, true) {
                    // A destination that misses this is only slower.
                    let _ = self.split.agents.send(&ToDestination::Terms(terms));
                }
            }
            Notice::Unsplittable(why) => {
                self.way_back.let_stop();
                self.report_builder.enter(Phase::FirstPass);
                self.report_builder.note(format!(
                    "the stream is relayed unchanged, and the VM is never throttled: {why}"
                ));
                self.report_builder.update(|report| report.tap = "relayed".to_owned());
            }
            Notice::SplitEnds(why) => {
                self.way_back.let_stop();
                self.report_builder.note(format!(
                    "from its {} on, the stream is relayed unchanged, without audit and \
                     throttling: {why}",
                    if self.flow.state.first_pass_over.load(Relaxed) {
                        "later passes"
                    } else {
                        "first pass"
                    }
                ));
            }
            Notice::RamOver => {
                let host = self.split.agents.peer.name.clone();
                self.flow.wait_in_background(host, |_| Ok(()))?;
            }
            Notice::Placed(placed) => self.placed(placed)?,
            Notice::PageAfterRam => return Err(MigrationError::PageAfterRam),
            Notice::Panicked(thread) => return Err(MigrationError::Panicked { thread }),
            // Ended is awaited above, and the others concern other migrations.
            Notice::Ended(_)
            | Notice::FirstPassEnds
            | Notice::DisksReady
            | Notice::Disks(_)
            | Notice::Stalled(_) => {}
        }
        Ok(())
    }

    fn placed(&mut self, placed: Result<(), MigrationError>) -> Result<(), MigrationError> {
        placed?;
        let said = self.tail.placed(&self.split.agents.link, self.audit.begin());
        said.map_err(|error| self.split.agents.lost(error))
    }

    /// Handles the end of QEMU's connections, or an error in its stream.
    fn ended(&self, ended: Result<(), MigrationError>) -> Result<(), MigrationError> {
        if self.is_loaded() {
            return Ok(());
        }
        ended?;
        Err(MigrationError::Qemu(
            "it ended its migration before the destination had loaded the VM: it was cancelled, or \
             has failed"
                .to_owned(),
        ))
    }

    /// Reads the destination's messages after its QEMU has also closed. The VM belongs to
    /// it by now.
    fn receive_the_rest(&mut self) -> Result<(), MigrationError> {
        let until = Instant::now() + REST_MAX;
        while !self.is_accounted
            && let Ok(received) = self.split.agents.inbox.recv_deadline(until)
        {
            let is_disconnected = matches!(received, Received::Disconnected(_));
            self.receive(received)?;
            if is_disconnected {
                break;
            }
        }
        Ok(())
    }

    /// Waits until QEMU here has closed, whose VM is loaded. One that hangs is not waited for
    /// without end.
    fn wait_closed(&self) {
        let until = Instant::now() + CLOSED_MAX;
        loop {
            match self.notices.recv_deadline(until) {
                Ok(Notice::Ended(_)) => return,
                Ok(_) => {}
                Err(_) => return self.leave_qemu(),
            }
        }
    }

    /// Closes the connection of a QEMU that hangs. Its VM is the destination's.
    fn leave_qemu(&self) {
        tracing::warn!("QEMU here has not closed its completed migration");
        // Without a reset, which could take from QEMU what it has not read yet.
        let _ = self.main.shutdown(Shutdown::Both);
    }

    /// Applies the operator's new bounds at both ends.
    fn rebind(&self) -> Result<(), MigrationError> {
        let stands_still = self.stopped.is_some();
        let Flow { threads, pacing, .. } = &self.flow;
        let terms = rebind(self.report_builder, threads, Some(pacing), stands_still);
        if self.is_loaded() { Ok(()) } else { self.split.agents.send(&ToDestination::Terms(terms)) }
    }

    /// Closes everything of the migration at once, and reports its figures.
    pub(super) fn close(self) {
        let Self { split, mut flow, tail, pools, .. } = self;
        // First end all writing to the destination, so that no thread waits for it.
        let control_bytes = split.agents.link.wire_bytes();
        flow.lanes.shut();
        split.agents.link.close();
        tail.end();
        flow.hang_up(CLOSING_MAX);
        flow.pacing.stop();
        flow.end_prefault();
        flow.stop(false);
        flow.account(&pools, control_bytes);
    }
}
