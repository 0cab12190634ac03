//! Disks that move with their VM: QEMU mirrors them into the disk tap, lanes carry
//! the blocks, and the destination writes them into its own QEMU's images.

mod flushes;
pub(crate) mod room;
mod settle;
mod tap;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use api::{DiskReport, MigrateRequest};
use crossbeam_channel::{Receiver, Sender, bounded, select, tick};
use data_threads::{DataThreads, Guard, Joined};
use disk::DiskSource;
use nbd::server::Export;
use page::{DiskId, Pool};
use parking_lot::Mutex;
use policy::mirror::{Catching, Sample};
use qemu::disks::{self as images, Choice, Cleanup, Disk, Moving, WhichDisks};
use qemu::machine::Machine;
use qemu::mirror::{Late, Mirrors, Target};
use qemu::rendezvous::Rendezvous;
use qemu::shape::Shape;
use wire::ToDestination;

use self::flushes::Flushes;
use self::settle::Settle;
use self::tap::DiskTap;
use super::context::no_thread;
use super::lanes::Lanes;
use super::notice::Notice;
use crate::error::MigrationError;
use crate::link::Link;
use crate::report_builder::ReportBuilder;
use crate::resources::Pools;
use crate::waits::Waits;

/// Interval between two checks of the mirrors' progress.
const EVERY: Duration = Duration::from_millis(250);

/// The disks that will move, before anything has started.
pub(crate) struct Chosen {
    pub(crate) disks: Vec<Disk>,
    pub(crate) moving: Vec<Moving>,
    /// Buffers for data between QEMU and the destination.
    pool: Arc<Pool>,
    _cleanup: Cleanup,
}

impl Chosen {
    /// The destination has answered, so the challenge files are removed now: an
    /// agent that crashes later leaves none.
    pub(crate) fn answered(self) -> Self {
        Self { _cleanup: Cleanup::default(), ..self }
    }
}

/// Returns the disks that the operator selected, and the shape that the
/// destination's VM must have apart from them.
pub(crate) fn choose(
    machine: &Machine,
    shape: Shape,
    request: &MigrateRequest,
    id: &str,
    pools: &Pools,
    report_builder: &ReportBuilder,
) -> Result<(Option<Chosen>, Shape), MigrationError> {
    let (Some(which), Some(pool)) = (&request.disks, &pools.blocks) else {
        return Ok((None, shape));
    };
    let Ok(which) = which.parse::<WhichDisks>();
    let all = images::disks(&machine.qmp, &shape)?;
    let chosen = images::choose(&all, &which)?;
    let Choice { moving: disks, staying } = chosen;
    for (name, why) in &staying {
        report_builder.note(format!("disk {name} stays: {why}"));
    }
    for note in disks.iter().flat_map(|disk| &disk.notes) {
        report_builder.note(note);
    }
    let shape_besides = images::without_moving(&shape, &disks);
    let (moving, cleanup) = images::moving(&disks, shape.pid, id);
    let pool = Arc::clone(pool);
    Ok((Some(Chosen { disks, moving, pool, _cleanup: cleanup }), shape_besides))
}

/// The disks while they move.
pub(crate) struct Disks {
    _settling: Joined,
    draining: Option<Joined>,
    reports: Arc<Mutex<Vec<DiskReport>>>,
    sources: Vec<Arc<DiskSource>>,
    pool: Arc<Pool>,
    flushes: Arc<Flushes>,
    tap: DiskTap,
    mirrors: Arc<Mirrors>,
    watching: Watching,
    threads: Arc<DataThreads>,
}

/// The parts of a migration that its disks need.
pub(crate) struct DisksPlan<'m> {
    pub(crate) machine: &'m Machine,
    /// The directory for sockets between the agent and QEMU.
    pub(crate) scratch: &'m Path,
    pub(crate) lanes: &'m Arc<Lanes>,
    pub(crate) link: &'m Arc<Link<ToDestination>>,
    pub(crate) notices: &'m Sender<Notice>,
    pub(crate) threads: &'m Arc<DataThreads>,
    pub(crate) report_builder: &'m Arc<ReportBuilder>,
    /// Set while all disks have caught up, so that QEMU may finish.
    pub(crate) ready: Arc<AtomicBool>,
}

impl Disks {
    /// Starts QEMU's mirrors.
    pub(crate) fn start(chosen: &Chosen, plan: &DisksPlan<'_>) -> Result<Self, MigrationError> {
        let pool = Arc::clone(&chosen.pool);
        let flushes = Arc::new(Flushes::default());
        let sources: Vec<Arc<DiskSource>> = chosen
            .disks
            .iter()
            .zip(0u16..)
            .map(|(disk, number)| {
                let (flushes, link) = (Arc::clone(&flushes), Arc::clone(plan.link));
                let carry = Arc::clone(plan.lanes) as _;
                let flush = move |disk: DiskId| flushes.ask(&link, disk.0);
                let (id, pool) = (DiskId(number), Arc::clone(&pool));
                Arc::new(DiskSource::new(id, &disk.name, disk.bytes, pool, carry, flush))
            })
            .collect();
        let (listener, socket) = Rendezvous::open(plan.machine, plan.scratch)?;
        let exports =
            chosen.disks.iter().map(|disk| Export { name: disk.name.clone(), bytes: disk.bytes });
        let served = exports.zip(sources.iter().cloned()).collect();
        let tap = DiskTap::start(listener, socket, served, plan.notices.clone(), plan.threads);
        let tap = tap.map_err(no_thread)?;
        let targets: Vec<Target> = chosen
            .disks
            .iter()
            .map(|disk| Target {
                disk: disk.clone(),
                socket: tap.path().to_owned(),
                export: disk.name.clone(),
            })
            .collect();
        let mirrors = Mirrors::start(Arc::clone(&plan.machine.qmp), &targets)
            .map_err(|error| MigrationError::Mirrors(Box::new(error)))?;
        let mirrors = Arc::new(mirrors);
        let reports = chosen.disks.iter().map(|disk| DiskReport {
            name: disk.name.clone(),
            bytes: disk.bytes,
            ..DiskReport::default()
        });
        let reports = Arc::new(Mutex::new(reports.collect()));
        let guard = || Some(plan.threads.guard());
        let (settle, settling) = Settle::start(sources.clone(), guard()).map_err(no_thread)?;
        let watcher = Watcher {
            mirrors: Arc::clone(&mirrors),
            reports: Arc::clone(&reports),
            report_builder: Arc::clone(plan.report_builder),
            notices: plan.notices.clone(),
            ready: Arc::clone(&plan.ready),
            settle,
            catching: vec![Catching::default(); chosen.disks.len()],
            told: false,
        };
        let watching = Watching::start(watcher, guard());
        let watching = watching.map_err(no_thread)?;
        Ok(Self {
            _settling: settling.into(),
            draining: None,
            reports,
            sources,
            pool,
            flushes,
            tap,
            mirrors,
            watching,
            threads: Arc::clone(plan.threads),
        })
    }

    /// Notes that the destination has flushed a disk, or failed to.
    pub(crate) fn flushed(&self, ticket: u64, error: Option<String>) {
        self.flushes.answered(ticket, error);
    }

    /// How long the destination has been flushing a disk; none if it flushes none.
    pub(crate) fn flushing(&self) -> Option<Duration> {
        self.flushes.unanswered(Instant::now())
    }

    /// Lets the mirrors of a stopped VM write what is left. A notice reports when
    /// the copies are complete.
    pub(crate) fn drain(
        &mut self,
        notices: Sender<Notice>,
        waits: &Waits,
    ) -> Result<(), MigrationError> {
        if self.draining.is_some() {
            return Ok(());
        }
        self.watching.stop();
        let mirrors = Arc::clone(&self.mirrors);
        let (stall, drain) = (waits.stall, waits.drain);
        let guard = self.threads.guard();
        let drain = move || {
            let _guard = guard;
            // They are ready, unless QEMU came here by itself: a VM that its owner has paused
            // is not held.
            let outcome = mirrors.wait_ready(stall).and_then(|()| mirrors.finish(drain));
            let _ = notices.send(Notice::Disks(outcome.map_err(|error| error.to_string())));
        };
        let thread = data_threads::spawn("disk-drain", drain);
        self.draining = Some(thread.map_err(no_thread)?.into());
        Ok(())
    }

    /// Undoes everything before the commit: the VM's disks are as they were. Waits
    /// only for QEMU, and for nothing that waits for the destination.
    pub(crate) fn undo(&mut self) {
        self.shut();
        self.watching.stop();
        if let Err(error) = self.mirrors.undo() {
            tracing::warn!(%error, "cannot remove disk mirrors from QEMU");
        }
    }

    /// Ends waiting and serving, without waiting for either.
    pub(crate) fn shut(&self) {
        self.flushes.end();
        self.sources.iter().for_each(|source| source.end());
        self.pool.close();
        self.tap.shut();
    }

    /// The disks' figures for the report.
    pub(crate) fn reports(&self) -> Vec<DiskReport> {
        let mut reports = self.reports.lock().clone();
        for (report, source) in reports.iter_mut().zip(&self.sources) {
            let counts = source.counts();
            report.data_bytes = counts.data_bytes;
            report.zero_bytes = counts.zero_bytes;
        }
        reports
    }
}

impl Drop for Disks {
    fn drop(&mut self) {
        self.watching.stop();
        self.shut();
        self.tap.end();
    }
}

/// The thread that watches the mirrors.
struct Watching {
    stop: Option<Sender<()>>,
    thread: Joined,
}

impl Watching {
    fn start(watcher: Watcher, guard: Option<Guard>) -> std::io::Result<Self> {
        let (stop, stopped) = bounded(0);
        let thread = data_threads::spawn("disk-mirrors", move || {
            let _guard = guard;
            watcher.run(&stopped);
        })?;
        Ok(Self { stop: Some(stop), thread: thread.into() })
    }

    fn stop(&mut self) {
        self.stop.take();
        self.thread.join();
    }
}

struct Watcher {
    mirrors: Arc<Mirrors>,
    reports: Arc<Mutex<Vec<DiskReport>>>,
    report_builder: Arc<ReportBuilder>,
    notices: Sender<Notice>,
    ready: Arc<AtomicBool>,
    settle: Settle,
    catching: Vec<Catching>,
    /// It was reported once that they are ready.
    told: bool,
}

impl Watcher {
    fn run(mut self, stopped: &Receiver<()>) {
        let ticks = tick(EVERY);
        let events = self.mirrors.events().clone();
        loop {
            let received = select! {
                recv(stopped) -> _ => return,
                recv(events) -> event => match event {
                    Ok(event) => self.mirrors.handle(&event).map_err(|error| error.to_string()),
                    // QEMU has ended, which the leading thread notices.
                    Err(_) => return,
                },
                recv(self.settle.done) -> took => {
                    self.settle.receive(took);
                    Ok(())
                }
                recv(ticks) -> _ => self.look(),
            };
            if let Err(error) = received {
                let _ = self.notices.send(Notice::Disks(Err(error)));
                return;
            }
        }
    }

    fn look(&mut self) -> Result<(), String> {
        // A QEMU that is busy stopping its VM doesn't answer; the next check will
        // do.
        data_threads::point();
        let Ok(progress) = self.mirrors.progress() else { return Ok(()) };
        let left = progress.iter().map(qemu::mirror::MirrorProgress::remaining_bytes).sum();
        let total = progress.iter().map(|disk| disk.total_bytes).sum();
        self.report_builder.watch().update(|shown| {
            shown.disk_left_bytes = left;
            shown.disk_bytes = total;
        });
        let mut close = self.mirrors.is_ready();
        for disk in progress {
            let place = self.reports.lock().iter().position(|report| report.name == disk.disk);
            let Some(catching) = place.and_then(|place| self.catching.get_mut(place)) else {
                continue;
            };
            let sample = Sample {
                total_bytes: disk.total_bytes,
                done_bytes: disk.done_bytes,
                ready: disk.ready,
            };
            let (next, help) = catching.next(sample, EVERY);
            *catching = next;
            close &= next.is_close(sample);
            if let Some(bytes_per_s) = help {
                self.help(&disk.disk, bytes_per_s)?;
            }
        }
        let close = self.settle.may_stop(close);
        self.ready.store(close, Relaxed);
        if close && !self.told {
            self.told = true;
            let _ = self.notices.send(Notice::DisksReady);
        }
        Ok(())
    }

    /// Slows a guest that writes as fast as its disk is copied.
    fn help(&self, name: &str, bytes_per_s: u64) -> Result<(), String> {
        let late = self.mirrors.converge(name, bytes_per_s).map_err(|error| error.to_string())?;
        let how = match late {
            Late::WriteBlocking => "its writes waited for their copy".to_owned(),
            Late::Throttled { bytes_per_s } => {
                format!("its writes were limited to {} KiB/s", bytes_per_s >> 10)
            }
        };
        let at_s = self.report_builder.elapsed_s();
        let mut reports = self.reports.lock();
        if let Some(report) = reports.iter_mut().find(|report| report.name == name)
            && report.changed_s.is_none()
        {
            report.changed_s = Some(at_s);
            self.report_builder.note(format!(
                "disk {name}: the guest wrote as fast as the disk was copied; from second {at_s:.0} \
                 on {how}"
            ));
        }
        Ok(())
    }
}
