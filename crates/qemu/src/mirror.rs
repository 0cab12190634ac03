//! The source's side of moving disks: QEMU mirrors them into NBD exports.
//!
//! QEMU copies each disk and then keeps the copy up to date while the guest
//! writes. When the VM is stopped, the mirrors are drained: only then is the
//! copy complete. A VM that starts from a copy that was not drained has silently
//! lost data.
//!
//! Everything that is created in QEMU for this has a name with [`PREFIX`], or a
//! throttle group with it. So undoing needs no record: an agent that finds a VM after
//! a crash removes what an earlier one left.

mod error;
mod job;
mod start;
mod throttle;
mod undo;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use parking_lot::Mutex;
use serde_json::json;

use crate::qmp::{Event, Qmp, QmpError, RunState, list};

pub use error::{MirrorError, Side};
pub use job::PREFIX;
pub use start::Target;
pub use undo::remove_left;

use job::{ASK, EVENTS, Job, LOOK, State};

/// From this version on a mirror's mode can be changed while it runs.
const CHANGES_SINCE: (u32, u32, u32) = (8, 2, 0);

/// The progress of a disk's mirror.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorProgress {
    /// The disk's name.
    pub disk: String,
    /// Bytes to be copied in all; it grows while the guest writes.
    pub total_bytes: u64,
    /// Bytes copied so far.
    pub done_bytes: u64,
    /// Whether everything was copied once, and the copy is kept up to date.
    pub ready: bool,
}

impl MirrorProgress {
    /// Bytes left to copy.
    #[must_use]
    pub fn remaining_bytes(&self) -> u64 {
        self.total_bytes.saturating_sub(self.done_bytes)
    }
}

/// What was changed so that a disk's mirror keeps up with the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Late {
    /// A guest's write completes only when the copy has it, too.
    WriteBlocking,
    /// The guest writes at most this much to the disk.
    Throttled {
        /// The limit.
        bytes_per_s: u64,
    },
}

/// The mirrors of a VM's disks. Dropping them undoes what is left of them.
#[derive(Debug)]
pub struct Mirrors {
    qmp: Arc<Qmp>,
    events: Receiver<Event>,
    jobs: Mutex<Vec<Job>>,
}

/// How long to wait for disks.
#[derive(Clone, Copy)]
enum Limit {
    /// This long in all.
    Total(Duration),
    /// As long as bytes are copied, and this long without progress.
    Stall(Duration),
}

impl Mirrors {
    /// Starts mirroring. Until it returns the NBD server must answer at once:
    /// QEMU waits for it in its main loop.
    ///
    /// # Errors
    /// If an export doesn't exist or has another size than its disk, or QEMU
    /// refuses. Nothing has changed then; only after a timeout something may be
    /// left, which [`remove_left`] removes once the server has closed its connections.
    pub fn start(qmp: Arc<Qmp>, targets: &[Target]) -> Result<Self, MirrorError> {
        remove_left(&qmp)?;
        let events = qmp.events_named(&EVENTS);
        let jobs = targets.iter().enumerate().map(|(nth, target)| Job::new(nth, &target.disk));
        // If anything here fails, dropping `mirrors` undoes what was started.
        let mirrors = Self { events, jobs: Mutex::new(jobs.collect()), qmp };
        let jobs: Vec<Job> = mirrors.jobs.lock().clone();
        start::start(&mirrors.qmp, &jobs, targets)?;
        Ok(mirrors)
    }

    /// Events of block jobs. Pass each to [`Mirrors::handle`].
    #[must_use]
    pub fn events(&self) -> &Receiver<Event> {
        &self.events
    }

    /// Processes an event.
    ///
    /// # Errors
    /// If it says that a mirror failed.
    pub fn handle(&self, event: &Event) -> Result<(), MirrorError> {
        let mut jobs = self.jobs.lock();
        let id = event.data["device"].as_str().unwrap_or_default();
        let Some(job) = jobs.iter_mut().find(|job| job.id == id) else { return Ok(()) };
        job.handle(&event.name, &event.data);
        job.check()
    }

    /// Checks that no mirror has failed, as far as QEMU has reported.
    ///
    /// # Errors
    /// If a mirror failed.
    pub fn check(&self) -> Result<(), MirrorError> {
        self.events.try_iter().try_for_each(|event| self.handle(&event))?;
        self.jobs.lock().iter().try_for_each(Job::check)
    }

    /// Blocks until every disk was copied once and is kept up to date.
    ///
    /// # Errors
    /// If a mirror failed, or nothing was copied for `stall`.
    pub fn wait_ready(&self, stall: Duration) -> Result<(), MirrorError> {
        let is_ready = |state: &State| matches!(state, State::Ready | State::Drained);
        self.wait(Limit::Stall(stall), "ready", is_ready)
    }

    /// Whether every disk was copied once and is kept up to date.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.jobs.lock().iter().all(|job| matches!(job.state, State::Ready | State::Drained))
    }

    /// The progress of each disk, in the order of the targets. One whose mirror has
    /// ended is left out.
    ///
    /// # Errors
    /// If QEMU doesn't answer.
    pub fn progress(&self) -> Result<Vec<MirrorProgress>, QmpError> {
        let running = self.running()?;
        let jobs = self.jobs.lock();
        let of = |job: &Job| {
            let (_, progress) = running.iter().find(|(id, _)| *id == job.id)?;
            Some(MirrorProgress { disk: job.disk.clone(), ..progress.clone() })
        };
        Ok(jobs.iter().filter_map(of).collect())
    }

    fn running(&self) -> Result<Vec<(String, MirrorProgress)>, QmpError> {
        let answer = self.qmp.execute_within("query-block-jobs", json!({}), LOOK)?;
        list(&answer, "query-block-jobs", |one| {
            let progress = MirrorProgress {
                disk: String::new(),
                total_bytes: one["len"].as_u64()?,
                done_bytes: one["offset"].as_u64()?,
                ready: one["ready"].as_bool()?,
            };
            Some((one["device"].as_str()?.to_owned(), progress))
        })
    }

    /// Makes a disk's mirror keep up with the guest. To be called late: while
    /// there is much left to copy, writes that wait for their copy take
    /// hundreds of milliseconds each. With a QEMU that can't change a mirror's mode,
    /// the guest's writes are throttled to `bytes_per_s` instead; then this can be
    /// called again with another rate.
    ///
    /// # Errors
    /// If there is no mirror of that disk, or QEMU refuses.
    pub fn converge(&self, disk: &str, bytes_per_s: u64) -> Result<Late, MirrorError> {
        if self.qmp.version() < CHANGES_SINCE {
            return self.slow(disk, bytes_per_s);
        }
        let job = self.job(disk)?;
        if !job.write_blocking {
            let change = json!({ "id": job.id, "type": "mirror", "copy-mode": "write-blocking" });
            self.qmp
                .execute_within("block-job-change", change, ASK)
                .map_err(|error| job.refused(error))?;
            let mut jobs = self.jobs.lock();
            if let Some(job) = jobs.iter_mut().find(|job| job.disk == disk) {
                job.write_blocking = true;
            }
        }
        Ok(Late::WriteBlocking)
    }

    /// Throttles the guest's writes to a disk, in any version of QEMU. A lower limit
    /// is kept, also that of another disk in the same throttle group of their owner.
    ///
    /// # Errors
    /// If there is no mirror of that disk, or QEMU refuses.
    pub fn slow(&self, disk: &str, bytes_per_s: u64) -> Result<Late, MirrorError> {
        let job = self.job(disk)?;
        throttle::slow(&self.qmp, &job.guest, bytes_per_s).map_err(|error| job.refused(error))?;
        Ok(Late::Throttled { bytes_per_s })
    }

    fn job(&self, disk: &str) -> Result<Job, MirrorError> {
        let jobs = self.jobs.lock();
        let job = jobs.iter().find(|job| job.disk == disk);
        job.cloned().ok_or_else(|| MirrorError::Unknown { disk: disk.to_owned() })
    }

    /// With the VM stopped: copies what is left, flushes it, and ends the
    /// mirrors. Afterwards the copies are complete.
    ///
    /// # Errors
    /// If the VM runs, if a disk could not be completed, or not within
    /// `timeout`. Then the copies are worthless.
    pub fn finish(&self, timeout: Duration) -> Result<(), MirrorError> {
        self.check()?;
        if self.qmp.run_state()? == RunState::Running {
            return Err(MirrorError::Running);
        }
        let ids: Vec<(String, String)> = {
            let mut jobs = self.jobs.lock();
            jobs.iter_mut().for_each(|job| job.finishing = true);
            jobs.iter().map(|job| (job.id.clone(), job.disk.clone())).collect()
        };
        for (id, disk) in &ids {
            let ended = self.qmp.execute_within("block-job-cancel", json!({ "device": id }), ASK);
            if let Err(source) = ended {
                // The job may have failed just before: that error says more.
                self.check()?;
                return Err(MirrorError::Qemu { disk: disk.clone(), source });
            }
        }
        self.wait(Limit::Total(timeout), "drained", |state| matches!(state, State::Drained))?;
        for (id, _) in &ids {
            // So that QEMU doesn't flush it again, while the VM is stopped.
            undo::remove_node(&self.qmp, id);
        }
        Ok(())
    }

    fn wait(
        &self,
        limit: Limit,
        what: &'static str,
        is_there: impl Fn(&State) -> bool,
    ) -> Result<(), MirrorError> {
        let (Limit::Total(time) | Limit::Stall(time)) = limit;
        let mut deadline = Instant::now() + time;
        let mut copied_bytes = 0;
        loop {
            self.check()?;
            let waiting: Vec<String> = {
                let jobs = self.jobs.lock();
                let not_there = jobs.iter().filter(|job| !is_there(&job.state));
                not_there.map(|job| job.disk.clone()).collect()
            };
            if waiting.is_empty() {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(match limit {
                    Limit::Total(waited) => MirrorError::Late { disks: waiting, what, waited },
                    Limit::Stall(waited) => MirrorError::Stalled { disks: waiting, waited },
                });
            }
            match self.events.recv_timeout(left.min(LOOK)) {
                Ok(event) => self.handle(&event)?,
                Err(crossbeam_channel::RecvTimeoutError::Timeout) => {
                    let copied = self.look()?.unwrap_or(copied_bytes);
                    if matches!(limit, Limit::Stall(_)) && copied != copied_bytes {
                        deadline = Instant::now() + time;
                    }
                    copied_bytes = copied;
                }
                Err(crossbeam_channel::RecvTimeoutError::Disconnected) => {
                    return Err(QmpError::Closed.into());
                }
            }
        }
    }

    /// Asks QEMU, in case an event was missed. Returns how much all mirrors have copied, if
    /// QEMU answers.
    fn look(&self) -> Result<Option<u64>, MirrorError> {
        let running = match self.running() {
            Ok(running) => running,
            // A QEMU that stops a VM doesn't answer for a while.
            Err(QmpError::Timeout { .. }) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        // Events that arrived before the answer are processed first.
        self.check()?;
        let mut jobs = self.jobs.lock();
        for job in jobs.iter_mut() {
            let found = running.iter().find(|(id, _)| *id == job.id);
            job.seen(found.map(|(_, progress)| progress.ready));
            job.check()?;
        }
        Ok(Some(running.iter().map(|(_, progress)| progress.done_bytes).sum()))
    }

    /// Ends the mirrors in any state, lifts throttles, and leaves the VM and its
    /// disks as they were. Call it before the migration is backed out: a QEMU that
    /// waits for a target that doesn't answer can't cancel anything.
    ///
    /// If the server of the targets no longer reads from their connections, it must
    /// have closed all of them: a QEMU that is blocked in a write to one can't be freed
    /// from this end, even by `yank`. One that only waits for replies can.
    ///
    /// # Errors
    /// If QEMU has exited or something stays behind.
    pub fn undo(&self) -> Result<(), MirrorError> {
        remove_left(&self.qmp)?;
        self.jobs.lock().clear();
        Ok(())
    }
}

impl Drop for Mirrors {
    fn drop(&mut self) {
        if self.jobs.lock().is_empty() || self.qmp.is_closed() {
            return;
        }
        if let Err(error) = self.undo() {
            tracing::warn!(%error, "cannot remove disk mirrors from QEMU");
        }
    }
}
