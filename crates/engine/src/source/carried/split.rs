//! A carried migration whose pages go on lanes: its state before they do, and its
//! start.

use std::mem;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crossbeam_channel::unbounded;
use qemu::command_line::CommandLine;
use qemu::commanded::Commanded;
use qemu::ram_blocks::RamBlocks;
use tap::{Taken, Tap, TapError};
use wire::ToDestination;
use wire::carry::Channels;

use super::agents::Agents;
use super::caller::{CLOSING_MAX, Caller, Channel, refuse_taken};
use super::observed::Observed;
use super::passes::{Order, Passes};
use super::process;
use super::running::Running;
use super::tail::Tail;
use super::way_back::WayBack;
use crate::caught::caught;
use crate::error::MigrationError;
use crate::report_builder::ReportBuilder;
use crate::source::audit::SourceAudit;
use crate::source::bounds::bounded_threads;
use crate::source::context::local as local_error;
use crate::source::control::stream_state::{HIDDEN_BYTES, StreamState, Traits};
use crate::source::flow::{Flow, FlowPlan, tap_failed};
use crate::source::notice::Notice;

/// A migration whose pages will go on lanes.
pub struct Split {
    pub(super) agents: Agents,
    pub(super) caller: Caller,
    /// Bytes already read from its main connection.
    pub(super) before: Vec<u8>,
    pub(super) channels: Option<Channels>,
}

impl Split {
    pub(super) fn carry(
        mut self,
        report_builder: &Arc<ReportBuilder>,
    ) -> Result<(), MigrationError> {
        report_builder.update(|report| {
            report.tap = if self.channels.is_some() { "multifd" } else { "classic" }.to_owned();
        });
        for note in &self.agents.carrying.notes {
            report_builder.note(note.clone());
        }
        if let Some(why) = self.agents.unshared {
            report_builder.note(why);
        }
        let mut running = self.start(report_builder)?;
        let ended = caught(|| {
            let sampler = running.sampler()?;
            let ended = running.follow();
            drop(sampler);
            ended
        });
        running.close();
        ended.or_go_on()
    }

    /// Starts lanes and tap.
    fn start<'r>(
        &'r mut self,
        report_builder: &'r Arc<ReportBuilder>,
    ) -> Result<Running<'r>, MigrationError> {
        let pools = self.agents.local.resources.leaving(false)?;
        let (notices, noticed) = unbounded();
        let threads = bounded_threads(report_builder, &notices);
        let audited = (self.agents.request.audit, "it is turned off: `audit` under [carry]");
        let (hash, host) = (self.agents.carrying.hash.as_deref(), &self.agents.peer.name);
        let audit = SourceAudit::new(audited, hash, host, report_builder)?;
        let traits = Traits { hidden_bytes: HIDDEN_BYTES, told_limit: false, held: false };
        let goal = Duration::from_millis(self.agents.request.downtime_ms.max(1));
        let state = Arc::new(StreamState::new(&pools, goal, traits));
        let lanes = self.agents.lanes_plan()?;
        let reading = self.agents.read_disks(self.caller.main(), &pools, report_builder)?;
        let tail = Arc::new(Tail::new(&self.agents.local.resources.leaving_tails));
        let passes = Arc::new(Passes::new(match &self.channels {
            None => Order::Pages,
            Some(channels) if channels.sync_by_section => Order::Sections,
            Some(_) => Order::Epochs,
        }));
        let main = self.caller.main().try_clone();
        let back = main.and_then(|main| Ok((main.try_clone()?, main)));
        let (back, main) = back.map_err(|error| local_error("keeping QEMU's connection", error))?;
        let way_back = Arc::new(WayBack::new(back));
        let ram = self.ram();
        let pid = || process::of(self.caller.main()).ok().map(|qemu| qemu.pid);
        let link = Arc::clone(&self.agents.link);
        let network = Arc::clone(&self.agents.local.resources.network);
        let plan = FlowPlan {
            state: Arc::clone(&state),
            lanes,
            naming: self.agents.naming(reading.as_ref(), pid),
            handed_over: audit.handed_over(),
            link: &link,
            network: &network,
            notices: &notices,
            threads: &threads,
            report_builder,
        };
        let (mut flow, tap) = Flow::start(plan, |collector| {
            if let Some(channels) = &self.channels {
                self.agents.send(&ToDestination::Channels(channels.clone()))?;
            }
            let output = Observed {
                collector,
                tail: Arc::clone(&tail),
                passes: Arc::clone(&passes),
                way_back: Arc::clone(&way_back),
                fixed: self.agents.local.fixed_cost.expected(&self.agents.peer.name),
                first_swept: AtomicBool::new(false),
                ram_over: AtomicBool::new(false),
            };
            self.take_over(&state, output)
        })?;
        if let Some((hints, ram)) = ram {
            flow.prefault(hints, &ram);
        }
        let (host, notify) = (self.agents.peer.name.clone(), notices.clone());
        let waiting = flow.in_background("carry-end", move |lanes| {
            let failed =
                |error| of_stream(error).unwrap_or_else(|error| tap_failed(error, lanes, host));
            let _ = notify.send(Notice::Ended(tap.join().map_err(failed)));
        });
        waiting.inspect_err(|_| flow.hang_up(CLOSING_MAX))?;
        Ok(Running {
            split: self,
            report_builder,
            notices: noticed,
            audit,
            flow,
            tail,
            passes,
            main,
            way_back,
            is_accounted: false,
            stopped: None,
            pools,
            _reading: reading,
        })
    }
}

impl Split {
    /// Has a tap read QEMU's connections from now on.
    fn take_over(&mut self, state: &StreamState, output: Observed) -> Result<Tap, MigrationError> {
        let (main, channels) = mem::take(&mut self.caller).take_over();
        let channels = channels.into_iter().map(Channel::into_taken).collect();
        let taken = Taken { main, before: mem::take(&mut self.before), channels };
        let tap = Tap::of_taken(taken, Arc::clone(&state.pool), Arc::new(output));
        tap.map_err(|refused| {
            let (error, taken) = *refused;
            refuse_taken(taken);
            of_stream(error).unwrap_or_else(MigrationError::Tap)
        })
    }

    /// QEMU's RAM, and whether its guest may report free pages; none if it can't be found.
    fn ram(&self) -> Option<(bool, RamBlocks)> {
        let qemu = process::of(self.caller.main()).ok()?;
        let vm = Commanded::of_process(qemu.pid).ok()?;
        let blocks = vm.memory().ok()?.blocks;
        let ram = vm.ram(blocks.iter().map(|(name, bytes)| (name.as_str(), *bytes)));
        Some((CommandLine::may_hint_free_pages(vm.argv()), ram))
    }
}

/// The error of a stream that the agents can't read; other errors are returned as they are.
fn of_stream(error: TapError) -> Result<MigrationError, TapError> {
    if error.is_of_stream() { Ok(MigrationError::Unsplittable(error)) } else { Err(error) }
}
