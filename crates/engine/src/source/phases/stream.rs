//! The streaming phase: the parts that live until QEMU's migration has ended, and how they
//! end.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use dedup::source::Announcer;
use parking_lot::Mutex;
use qemu::outgoing::Outgoing;
use qemu::qmp::QmpError;
use qemu::rendezvous::Rendezvous;
use stream::GlobalState;
use switchover::source::Event as Step;
use tap::Tap;

use super::Failed;
use super::connect::{Connected, PAUSED};
use super::journaled::{Journaled, Reversible};
use super::prepare::Prepared;
use super::release::Release;
use super::start::{SetUp, Started};
use crate::error::MigrationError;
use crate::source::audit::SourceAudit;
use crate::source::control::sampler::ticking::Ticking;
use crate::source::disks::{Chosen, Disks, DisksPlan};
use crate::source::flow::{Flow, tap_failed};
use crate::source::from_disks::FromDisks;
use crate::source::hinting::Hinting;
use crate::source::lanes::Lanes;
use crate::source::mapped_ram::MappedRam;

/// QEMU completes before the destination loads, and only `cont` has it take a VM back.
const GIVEN_UP: &str = "QEMU had released the paused VM when its move failed (postmigrate): before \
                        it can be moved again, `cont` it in QEMU's monitor, and `stop` it again if \
                        it is to stay paused";

/// The phase in which QEMU streams.
pub(crate) struct Streaming<'m> {
    pub(crate) connected: Connected<'m>,
    /// Queries the guest's helper.
    _storage: Option<FromDisks>,
    /// None: no disk moves, or the disks are finished.
    pub(crate) disks: Option<Disks>,
    pub(crate) outgoing: Arc<Outgoing>,
    memory: Memory,
    pub(crate) flow: Flow,
    /// Ends before the lanes do. None: no page is announced ahead of QEMU.
    announcer: Option<Announcer>,
    /// The VM's state at its stop, from QEMU's stream.
    global_state: Arc<Mutex<GlobalState>>,
    sampler: Ticking,
    /// The socket that QEMU connects to.
    _socket: Rendezvous,
    pub(crate) audit: SourceAudit,
    /// None: RAM is sent.
    pub(super) mapped: Option<MappedRam>,
    pub(super) release: Release,
}

/// QEMU's own migration.
enum Memory {
    /// It waits for disks. Whether the guest may report free pages.
    Waiting { hints: bool },
    /// It was started. None: the guest's report isn't waited for.
    Started(Option<Hinting>),
}

impl Memory {
    /// Waits no longer for the guest's report.
    fn stop_hinting(&mut self) {
        if let Self::Started(hinting) = self {
            *hinting = None;
        }
    }
}

impl<'m> Journaled<Prepared<'m>> {
    /// Starts lanes, tap and QEMU's migration into it.
    pub(crate) fn stream(self, set_up: SetUp) -> Result<Journaled<Streaming<'m>>, Failed<'m>> {
        let started = match self.phase.start(set_up) {
            Ok(started) => started,
            Err(error) => return Err(Failed::new(self, error)),
        };
        let Self { phase, driver, fate } = self;
        let Prepared { connected, storage, chosen, ram, .. } = phase;
        let (vm, audited) = (&connected.context.vm, connected.context.request.audit);
        let mapped = MappedRam::of(vm, &ram, audited);
        let Started { outgoing, flow, announcer, global_state, tap, sampler, .. } = started;
        let Started { socket, audit, hints, .. } = started;
        let streaming = Streaming {
            connected,
            _storage: storage,
            disks: None,
            outgoing,
            memory: Memory::Waiting { hints },
            flow,
            announcer,
            global_state,
            sampler,
            _socket: socket,
            audit,
            mapped,
            release: Release::Awaited,
        };
        let mut journaled = Journaled { phase: streaming, driver, fate };
        match journaled.phase.begin(tap, chosen.as_ref()) {
            Ok(()) => Ok(journaled),
            Err(error) => Err(Failed::new(journaled, error)),
        }
    }
}

impl Streaming<'_> {
    /// Starts the barrier, the disks, and QEMU's migration.
    fn begin(&mut self, tap: Tap, chosen: Option<&Chosen>) -> Result<(), MigrationError> {
        let context = &self.connected.context;
        let host = context.peer.name.clone();
        let lanes_host = host.clone();
        let read =
            move |lanes: &Lanes| tap.join().map_err(|error| tap_failed(error, lanes, lanes_host));
        self.flow.wait_in_background(host, read)?;
        self.disks = chosen.map(|chosen| self.start_disks(chosen)).transpose()?;
        // A QEMU that can't be held, or whose VM is paused, reaches its switchover as soon
        // as memory is sent. So its migration starts after the disks.
        let waits = self.outgoing.is_held() && self.connected.context.was_running;
        if self.disks.is_none() || waits { self.begin_memory() } else { Ok(()) }
    }

    /// Starts QEMU's migration, unless it has started.
    pub(super) fn begin_memory(&mut self) -> Result<(), MigrationError> {
        let Memory::Waiting { hints } = self.memory else { return Ok(()) };
        self.memory = Memory::Started(None);
        let context = &self.connected.context;
        if hints && context.was_running {
            let hinting = Hinting::begin(&self.outgoing, &context.threads)?;
            self.memory = Memory::Started(hinting);
        }
        self.outgoing.start()?;
        Ok(())
    }

    fn start_disks(&self, chosen: &Chosen) -> Result<Disks, MigrationError> {
        let Connected { context, control, .. } = &self.connected;
        let ready = &self.flow.state.disks_ready;
        ready.store(false, Relaxed);
        let plan = DisksPlan {
            machine: &context.vm.machine,
            scratch: &context.local.scratch,
            lanes: &self.flow.lanes,
            link: &control.link,
            notices: &context.notices,
            threads: &context.threads,
            report_builder: &context.report_builder,
            ready: Arc::clone(ready),
        };
        Disks::start(chosen, &plan)
    }

    /// Ends everything that lives while QEMU streams. With `in_order` everything was
    /// delivered; otherwise what QEMU still writes is discarded.
    fn stop(&mut self, in_order: bool) {
        if !in_order {
            self.connected.control.cut_if_stuck();
        }
        self.memory.stop_hinting();
        self.flow.end_prefault();
        self.sampler.stop();
        self.flow.pacing.stop();
        self.announcer = None;
        self.flow.stop(in_order);
    }

    /// Whether the VM was already paused when QEMU stopped it. Known once QEMU's stream has
    /// arrived.
    pub(super) fn was_paused(&self) -> bool {
        let global_state = self.global_state.lock();
        global_state.state().is_some_and(|state| PAUSED.contains(&state))
    }

    /// How long an answer of QEMU may be waited for that takes `most` at most: until the blackout
    /// bound, at which the VM goes on here.
    pub(super) fn time_left(&self, most: Duration) -> Duration {
        let connected = &self.connected;
        let ends = connected.blackout_ends(connected.blackout_max(self.flow.state.goal()));
        ends.map_or(most, |end| end.saturating_duration_since(Instant::now()).min(most))
    }

    fn back_out_qemu(&self, run: bool) -> Result<(), QmpError> {
        // The tap keeps reading until QEMU has ended its migration in an orderly way, and
        // no longer paces it.
        self.flow.state.end_chase();
        let outcome = self.outgoing.back_out(run);
        self.connected.control.cut_if_stuck();
        let outcome = match outcome {
            // QEMU hangs. The agent settles the migration later, and tries again.
            Err(QmpError::Timeout { .. }) => outcome,
            other => other.or_else(|_| self.outgoing.back_out(run)),
        };
        // If channels break under a QEMU that still migrates, it can hang for good: they
        // stay open and are read until it closes them.
        outcome?;
        self.flow.tap.cut();
        if !run && self.outgoing.has_given_up() {
            self.connected.context.report_builder.note(GIVEN_UP);
        }
        Ok(())
    }
}

impl<'m> Reversible<'m> for Streaming<'m> {
    fn connected(&self) -> &Connected<'m> {
        &self.connected
    }

    fn connected_mut(&mut self) -> &mut Connected<'m> {
        &mut self.connected
    }

    fn let_go(&mut self) {
        // It changes a setting of QEMU that is put back soon.
        self.memory.stop_hinting();
        self.flow.let_go();
        if let Some(disks) = &self.disks {
            disks.shut();
        }
        self.connected.control.cut_if_stuck();
        self.flow.end_prefault();
        self.sampler.stop();
    }

    /// A QEMU that ends `failed` or `cancelled` resumes the VM by itself: only one that
    /// reports `completed` and `postmigrate` has given it up.
    fn await_completed(&self) -> Step {
        let complete = self.connected.context.local.waits.complete;
        match self.outgoing.wait_completed(self.time_left(complete)) {
            Ok(()) => Step::Completed,
            Err(QmpError::Closed) => Step::QemuExited,
            Err(error) => Step::NotCompleted { reason: error.to_string().into() },
        }
    }

    fn back_out(&mut self, run: bool) -> Result<(), QmpError> {
        self.account_disks();
        self.let_go();
        // Before QEMU's migration, because one that waits for a disk can't be cancelled.
        if let Some(disks) = &mut self.disks {
            disks.undo();
        }
        let taken = self.mapped.as_mut().map_or(Ok(None), MappedRam::take_back);
        let backed_out = match taken {
            Ok(None) => self.back_out_qemu(run && !self.was_paused()),
            // It runs, or stands still, as whatever has ordered QEMU to run it left it.
            Ok(Some(why)) => {
                tracing::error!(why, "the VM ran before its RAM was put back");
                self.connected.context.report_builder.note(why);
                self.back_out_qemu(false)
            }
            Err(why) => Err(QmpError::Migration(why)),
        };
        // With the VM running, there is time to wait for threads.
        self.stop(false);
        self.disks = None;
        backed_out
    }

    fn finish(&mut self) {
        self.stop(true);
        self.account_disks();
        self.disks = None;
    }

    fn abandon(&mut self) {
        self.stop(false);
    }

    fn account_disks(&self) {
        if let Some(disks) = &self.disks {
            let disks = disks.reports();
            self.connected.context.report_builder.update(|report| report.disks = disks);
        }
    }

    fn account(&self) {
        let Connected { pools, control, .. } = &self.connected;
        self.flow.account(pools, control.link.wire_bytes());
    }
}
