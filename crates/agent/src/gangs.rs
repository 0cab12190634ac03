//! Many VMs moved as one operation.
//!
//! Any agent can coordinate: it orders the agents of the source hosts to move their VMs, and
//! watches. Each of these moves its VMs by itself, as if an operator had ordered it, so the end of
//! a coordinator harms no VM.

mod cluster;
mod course;
mod evacuations;
mod event;
mod flight;
mod gang;
mod limit_order;
mod limits;
mod order_handler;
mod plan;
mod resume;
mod run;
mod sampled;
mod store;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use api::{
    ErrorCode, GangOutcome, GangPlan, GangProgress, GangReport, GangRequest, GangStarted,
    HostCensus, HostVm, PlannedMove, Progress,
};
use crossbeam_channel::bounded;
use parking_lot::Mutex;

use crate::denied::Denied;
use crate::events::Events;
use crate::parallel::at_once;

use cluster::{Agents, Cluster};
use evacuations::Evacuating;
use event::{EVENTS_MAX, Event};
use gang::{Gang, progress_of};
pub(crate) use order_handler::OrderHandler;
use resume::TakenUp;
use run::Run;
use store::GangStore;
use wire::gang::Counted;

/// Gangs that one agent coordinates at a time.
const RUNNING_MAX: usize = 16;

/// The gangs that this agent coordinates, or did.
pub(crate) struct Gangs {
    agents: Agents,
    events: Arc<Events>,
    store: GangStore,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    running: BTreeMap<String, Running>,
    /// Ids of gangs that are being resumed.
    resuming: BTreeSet<String>,
    closing: bool,
}

struct Running {
    gang: Arc<Gang>,
    thread: JoinHandle<()>,
}

/// The right to resume a gang, which only one request has at a time.
struct Turn<'g> {
    table: &'g Mutex<Table>,
    id: &'g str,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.table.lock().resuming.remove(self.id);
    }
}

impl Gangs {
    pub(crate) fn new(order_handler: &Arc<OrderHandler>, events: &Arc<Events>) -> Self {
        let store = GangStore::new(order_handler.registry().state().gangs());
        if let Err(error) = store.prune_at_start() {
            tracing::warn!(%error, "cannot remove old gangs");
        }
        let (agents, events) = (Agents::new(order_handler), Arc::clone(events));
        Self { agents, events, store, table: Mutex::default() }
    }

    /// Plans a gang, and begins it unless it is a dry run.
    pub(crate) fn start(&self, request: &GangRequest) -> Result<GangStarted, Denied> {
        // From before other hosts are queried: of two plans made at once, one sees the other.
        let evacuation = request.evacuate.as_ref().filter(|_| !request.dry_run);
        let evacuating = self.evacuating(evacuation.map(|one| one.host.as_str()))?;
        let plan = plan::plan(request, &self.agents)?;
        if request.dry_run {
            return Ok(GangStarted { id: None, plan });
        }
        let id = self.store.unused_id().map_err(cannot_note)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let report = gang::started(&id, request, &plan, now);
        self.launch(report, Vec::new(), evacuating)?;
        Ok(GangStarted { id: Some(id), plan })
    }

    /// Resumes a gang that has not moved all of its VMs.
    pub(crate) fn resume(&self, id: &str) -> Result<GangStarted, Denied> {
        // Held from before the saved report is read until the gang runs: hosts are queried in
        // between, and a report from before another run would move VMs again.
        let _turn = self.take_turn(id)?;
        let kept = self.kept(id)?;
        if kept.outcome == Some(GangOutcome::Done) {
            let text = format!("gang {id} has moved all of its VMs");
            return Err(Denied::Coded(ErrorCode::GangEnded, text));
        }
        let evacuating = self.evacuating(kept.evacuates.as_deref())?;
        let TakenUp { report, started } = resume::taken_up(kept, &self.agents);
        let plan = planned(&report);
        self.launch(report, started, evacuating)?;
        Ok(GangStarted { id: Some(id.to_owned()), plan })
    }

    /// Notes the host that a gang evacuates, if it evacuates one. This is refused while another gang
    /// of this agent evacuates that host.
    fn evacuating(&self, host: Option<&str>) -> Result<Option<Evacuating>, Denied> {
        let Some(host) = host else { return Ok(None) };
        let started = self.agents.evacuations().begin(host);
        started.map(Some).ok_or_else(|| plan::already(host, self.agents.here()))
    }

    fn take_turn<'g>(&'g self, id: &'g str) -> Result<Turn<'g>, Denied> {
        let mut table = self.table.lock();
        if table.running.get(id).is_some_and(|running| !running.gang.is_over()) {
            return Err(still_runs(id));
        }
        if !table.resuming.insert(id.to_owned()) {
            let text = format!(
                "gang {id} is being resumed already: `droveway gang` shows it once it runs again"
            );
            return Err(Denied::Coded(ErrorCode::GangRunning, text));
        }
        Ok(Turn { table: &self.table, id })
    }

    fn launch(
        &self,
        report: GangReport,
        started: Vec<usize>,
        evacuating: Option<Evacuating>,
    ) -> Result<(), Denied> {
        let id = report.id.clone();
        let mut table = self.table.lock();
        // All that is read of them is on disk by now.
        table.running.retain(|_, running| !running.gang.is_over());
        if table.closing {
            return Err(Denied::Closing);
        }
        if table.running.contains_key(&id) {
            return Err(still_runs(&id));
        }
        if table.running.len() >= RUNNING_MAX {
            let text = format!("{RUNNING_MAX} gangs run here: wait until one has ended");
            return Err(Denied::Coded(ErrorCode::TooManyGangs, text));
        }
        self.store.save(&report).map_err(cannot_note)?;
        let (tell, inbox) = bounded(EVENTS_MAX);
        let gang = Arc::new(Gang::new(report, tell));
        let (agents, store) = (self.agents.clone(), self.store.clone());
        let events = Arc::clone(&self.events);
        let run = Run::new(Arc::clone(&gang), inbox, agents, store, events, started, evacuating);
        let thread =
            thread::Builder::new().name(id.clone()).spawn(move || run.lead()).map_err(|error| {
                Denied::Local(format!("cannot start a thread for the gang: {error}"))
            })?;
        tracing::info!(id, "a gang starts");
        table.running.insert(id, Running { gang, thread });
        Ok(())
    }

    /// The memory and VMs of a host, as its own agent reports them.
    pub(crate) fn census(&self, host: &str) -> Result<HostCensus, Denied> {
        let Some(rack) = self.agents.racks().remove(host) else {
            let text = format!("there is no host `{host}` in the peers file");
            return Err(Denied::Coded(ErrorCode::NoSuchHost, text));
        };
        let census = self.agents.census(host).map_err(|why| cluster::silent(host, &why))?;
        let vms = census.vms.into_iter().map(|vm| HostVm {
            name: vm.name,
            status: vm.status,
            migration: vm.migration,
            ram_bytes: vm.ram_bytes,
            used_bytes: vm.used_bytes,
            vcpus: vm.vcpus,
            program_replaced: vm.program_replaced,
        });
        let free_bytes = census.free_bytes;
        // They are from that host, whatever it reports.
        let moving = census.moving.into_iter();
        let moving = moving.map(|one| Progress { from: host.to_owned(), ..one }).collect();
        Ok(HostCensus { name: host.to_owned(), rack, free_bytes, vms: vms.collect(), moving })
    }

    /// The other hosts that have a VM of this name, as far as their agents answer. One that it
    /// arrives at does not have it yet.
    pub(crate) fn hosts_of(&self, vm: &str) -> Vec<String> {
        let mut others = self.agents.racks();
        others.remove(self.agents.here());
        let others: Vec<String> = others.into_keys().collect();
        let has_it = |one: &Counted| one.name == vm && !one.is_arriving();
        let found = at_once(&others, |host| {
            self.agents.census(host).is_ok_and(|census| census.vms.iter().any(has_it))
        });
        others.into_iter().zip(found).filter_map(|(host, has_it)| has_it.then_some(host)).collect()
    }

    /// All known gangs, the latest first.
    pub(crate) fn list(&self) -> Result<Vec<GangProgress>, Denied> {
        let kept = self.store.all().map_err(cannot_read)?;
        Ok(kept.iter().map(|kept| self.of_kept(kept)).collect())
    }

    /// The progress of a gang, or how it ended.
    pub(crate) fn show(&self, id: &str) -> Result<GangProgress, Denied> {
        match self.running(id) {
            Some(gang) => Ok(gang.progress()),
            None => Ok(self.of_kept(&self.kept(id)?)),
        }
    }

    /// Blocks until there is a state newer than `version`, at most `timeout`.
    pub(crate) fn wait(
        &self,
        id: &str,
        version: u64,
        timeout: Duration,
    ) -> Result<(u64, GangProgress), Denied> {
        match self.running(id) {
            Some(gang) => Ok(gang.wait(version, timeout)),
            None => Ok((version, self.of_kept(&self.kept(id)?))),
        }
    }

    /// The report of a gang, which may still run.
    pub(crate) fn report(&self, id: &str) -> Result<GangReport, Denied> {
        match self.running(id) {
            Some(gang) => Ok(gang.report()),
            None => {
                let mut kept = self.kept(id)?;
                kept.outcome.get_or_insert(GangOutcome::Interrupted);
                Ok(kept)
            }
        }
    }

    /// Cancels the VMs that have not moved.
    pub(crate) fn cancel(&self, id: &str) -> Result<(), Denied> {
        match self.running(id).filter(|gang| !gang.is_over()) {
            Some(gang) => {
                gang.send(Event::Cancel);
                Ok(())
            }
            None => {
                self.kept(id)?;
                let text = format!("gang {id} does not run");
                Err(Denied::Coded(ErrorCode::GangEnded, text))
            }
        }
    }

    /// Starts no more gangs, and leaves the migrations of running ones alone.
    pub(crate) fn close(&self) {
        let running = {
            let mut table = self.table.lock();
            table.closing = true;
            std::mem::take(&mut table.running)
        };
        for (id, running) in &running {
            if !running.gang.is_over() {
                tracing::info!(id, "left as it is: the agent is stopping");
                running.gang.send(Event::Leave);
            }
        }
        for running in running.into_values() {
            // A panic in the thread was logged there.
            let _ = running.thread.join();
        }
    }

    fn running(&self, id: &str) -> Option<Arc<Gang>> {
        self.table.lock().running.get(id).map(|running| Arc::clone(&running.gang))
    }

    fn kept(&self, id: &str) -> Result<GangReport, Denied> {
        let kept = self.store.read(id).map_err(cannot_read)?;
        kept.ok_or_else(|| {
            Denied::Coded(ErrorCode::NoSuchGang, format!("there is no gang `{id}` here"))
        })
    }

    fn of_kept(&self, kept: &GangReport) -> GangProgress {
        if let Some(gang) = self.running(&kept.id) {
            return gang.progress();
        }
        let mut progress = progress_of(kept, std::iter::repeat(None));
        progress.outcome.get_or_insert(GangOutcome::Interrupted);
        progress
    }
}

/// The plan of the moves that are left.
fn planned(report: &GangReport) -> GangPlan {
    let left = report.moves.iter().filter(|one| !one.state.has_ended());
    let moves = left.map(|one| PlannedMove {
        vm: one.vm.clone(),
        from: one.from.clone(),
        to: one.to.clone(),
        ram_bytes: one.ram_bytes,
        used_bytes: one.used_bytes,
        shared_bytes: None,
        shared: None,
        limit_bits_per_s: None,
    });
    GangPlan { moves: moves.collect(), rooms: Vec::new(), notes: report.notes.clone() }
}

fn still_runs(id: &str) -> Denied {
    Denied::Coded(ErrorCode::GangRunning, format!("gang {id} still runs"))
}

#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn cannot_note(error: std::io::Error) -> Denied {
    Denied::Local(format!("the gang can't be recorded: {error}"))
}

#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn cannot_read(error: std::io::Error) -> Denied {
    Denied::Local(format!("the records of gangs can't be read: {error}"))
}
