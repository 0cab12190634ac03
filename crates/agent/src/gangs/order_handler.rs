//! Orders of agents that coordinate gangs: this host reports its state, and moves VMs.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use api::{BitRate, ErrorCode, Figures, MigrateRequest, Phase, VmSummary};
use engine::Local;
use qemu::command_line::CommandLine;
use qemu::machine::Machine;
use qemu::room::{HostMemory, host_memory};
use qemu::shape;
use serde_json::json;
use wire::Part;
use wire::examine::PROGRAMS_MAX;
use wire::gang::{Answer, Census, Counted, NEEDS_MAX, Order, Sampled, VmNeeds};

use super::evacuations::Evacuations;
use super::sampled;
use crate::denied::Denied;
use crate::examiner::{Examiner, vms};
use crate::moves::arrivals::fitness;
use crate::moves::migrations::Migrations;
use crate::parallel::at_once;
use crate::peers::{Peers, Routes};
use crate::vms::registry::Registry;

/// How long one query about a migration may wait.
const WATCH_MAX: Duration = Duration::from_secs(2);
/// A QEMU that takes longer to answer gets no more queries.
const QEMU_WAIT: Duration = Duration::from_millis(500);

/// Carries out orders.
pub(crate) struct OrderHandler {
    migrations: Arc<Migrations>,
    examiner: Arc<Examiner>,
    registry: Arc<Registry>,
    coordinators: Option<Vec<String>>,
    rack: Option<String>,
    /// What gangs may use of its uplink.
    uplink: Option<BitRate>,
    evacuations: Evacuations,
}

impl OrderHandler {
    pub(crate) fn new(
        migrations: Arc<Migrations>,
        examiner: Arc<Examiner>,
        registry: Arc<Registry>,
        coordinators: Option<Vec<String>>,
        rack: Option<String>,
        uplink: Option<BitRate>,
    ) -> Self {
        let evacuations = Evacuations::default();
        Self { migrations, examiner, registry, coordinators, rack, uplink, evacuations }
    }

    pub(super) fn rack(&self) -> Option<String> {
        self.rack.clone()
    }

    pub(super) fn uplink(&self) -> Option<BitRate> {
        self.uplink
    }

    pub(super) fn local(&self) -> &Local {
        self.examiner.local()
    }

    pub(super) fn peers(&self) -> &Peers {
        &self.routes().peers
    }

    pub(super) fn registry(&self) -> &Registry {
        &self.registry
    }

    pub(super) fn evacuations(&self) -> &Evacuations {
        &self.evacuations
    }

    fn routes(&self) -> &Routes {
        self.migrations.routes()
    }

    /// Carries out another agent's order, if that agent may give orders.
    pub(crate) fn obey(&self, from: &str, order: &Part<Order>) -> Result<Answer, Denied> {
        self.may_order(from)
            .inspect_err(|denied| tracing::warn!(from, %denied, "refused an order"))?;
        let Part::Read(order) = order else { return Ok(Answer::Unknown) };
        if let Order::Start { request, .. } = order {
            tracing::info!(
                from,
                vm = request.vm,
                to = request.to,
                "received an order to move a VM"
            );
        }
        Ok(self.follow(order))
    }

    fn may_order(&self, from: &str) -> Result<(), Denied> {
        let here = &self.local().agent;
        if self.peers().named(from).is_none() {
            return Err(Denied::Forbidden(format!("{from} is not in the peers file of {here}")));
        }
        match &self.coordinators {
            Some(named) if !named.iter().any(|name| name == from) => Err(Denied::Forbidden(
                format!("{from} is not one of the coordinators that {here} accepts orders from"),
            )),
            _ => Ok(()),
        }
    }

    /// Carries out an order.
    pub(super) fn follow(&self, order: &Order) -> Answer {
        match order {
            Order::Census => Answer::Census(self.census()),
            Order::Able { needs } => {
                let mut programs = BTreeSet::new();
                let unfit = needs.iter().take(NEEDS_MAX).map(|needs| {
                    programs.insert((&needs.program, &needs.accelerator));
                    // Each program may have to be started. The other VMs are checked when they
                    // arrive.
                    if programs.len() > PROGRAMS_MAX { None } else { self.unfit(needs) }
                });
                Answer::Able { unfit: unfit.collect() }
            }
            Order::Sample { vm, one_in } => match self.sample(vm, *one_in) {
                Ok(sampled) => Answer::Sample(sampled),
                Err(denied) => refused(&denied),
            },
            Order::Start { migration, request } => match self.start(migration, request) {
                Ok(()) => Answer::Started,
                Err(denied) => refused(&denied),
            },
            Order::Watch { migration, seen, wait_ms } => self.watch(migration, *seen, *wait_ms),
            Order::Set { migration, change } => {
                match self.migrations.set(migration, change.clone()) {
                    Ok(_) => Answer::Set,
                    Err(denied) if denied.code() == ErrorCode::NoSuchMigration => Answer::NoSuch,
                    Err(denied) => refused(&denied),
                }
            }
            Order::Cancel { migration } => match self.migrations.cancel(migration) {
                Ok(()) => Answer::Cancelling,
                Err(denied) => refused(&denied),
            },
            Order::Unknown => Answer::Unknown,
        }
    }

    /// A sample of a VM's content.
    fn sample(&self, name: &str, one_in: u32) -> Result<Sampled, Denied> {
        let nobody = || {
            let why = "its agent scans no VM (scan-cpu is 0, or sharing = false)";
            Denied::Conflict(why.to_owned())
        };
        let holdings = self.registry.holdings().ok_or_else(nobody)?;
        let machine = self.registry.vm(name).and_then(|vm| vm.machine());
        let pid = machine.map(|machine| machine.process.pid());
        let sampled = pid.and_then(|pid| {
            let known = holdings.known(pid)?;
            let pages = known.named_bytes / page::PAGE_BYTES as u64;
            let sample = holdings.sample(pid, sampled::one_in(pages, one_in))?;
            Some(sampled::said(known.rounds, pages, sample))
        });
        sampled.ok_or_else(|| {
            Denied::Conflict("its agent has not scanned it, or may not read it".to_owned())
        })
    }

    /// Starts a migration.
    ///
    /// Options that decide which program starts at the destination, or that destroy data there, are
    /// only for an operator of this host.
    fn start(&self, id: &str, request: &MigrateRequest) -> Result<(), Denied> {
        let more =
            !request.set.is_empty() || request.incoming_qmp.is_some() || request.overwrite_disks;
        if more {
            let what = "--set, --incoming-qmp and --overwrite-disks are not for gangs";
            return Err(Denied::Forbidden(what.to_owned()));
        }
        self.migrations.start_as(id, request.clone())
    }

    fn watch(&self, id: &str, seen: Option<Phase>, wait_ms: u64) -> Answer {
        let wait = Duration::from_millis(wait_ms).min(WATCH_MAX);
        let progress = match self.migrations.wait_phase(id, seen, wait) {
            Ok(progress) => progress,
            Err(denied) if denied.code() == ErrorCode::NoSuchMigration => return Answer::NoSuch,
            // It is ending right now, and its report takes long.
            Err(denied) if denied.code() == ErrorCode::MigrationRunning => {
                match self.migrations.show(id) {
                    Ok(progress) => progress,
                    Err(denied) => return refused(&denied),
                }
            }
            Err(denied) => return refused(&denied),
        };
        let figures = match &progress.outcome {
            Some(_) => self.migrations.report(id).ok().map(|report| Figures {
                total_s: report.total_s,
                downtime_ms: report.downtime_ms,
                wire_bytes: report.wire_bytes,
                body_bytes: report.body_bytes,
                named_bytes: report.named_bytes,
                notes: report.notes.clone(),
            }),
            None => None,
        };
        Answer::Progress { progress: Box::new(progress), figures }
    }

    fn census(&self) -> Census {
        // First, so that what is taken in between is counted twice rather than not at all.
        let promised = self.registry.promised();
        let memory = host_memory();
        let vms = at_once(&self.registry.list(), |vm| self.counted(vm, &memory));
        // As in the check of arriving VMs.
        let free = memory.available_bytes.map(|free| free.saturating_add(memory.swap_free_bytes));
        let free_bytes = free.map(|free| free.saturating_sub(promised));
        let (evacuating, moving) = (self.evacuations.hosts(), self.migrations.moving());
        Census { free_bytes, vms, evacuating, moving }
    }

    fn counted(&self, vm: &VmSummary, memory: &HostMemory) -> Counted {
        let known = self.registry.vm(&vm.name);
        let machine = known.as_ref().and_then(|known| known.machine());
        let used = machine.as_ref().and_then(|machine| engine::used(machine.process.pid()));
        let mut counted = Counted {
            name: vm.name.clone(),
            status: vm.status,
            migration: vm.migration.clone(),
            arrives_from: self.registry.sender_of(&vm.name),
            ram_bytes: vm.ram_bytes,
            used_bytes: used.map_or(vm.ram_bytes, |used| used.min(vm.ram_bytes)),
            needed_bytes: known.and_then(|known| known.pages_bytes()).unwrap_or(vm.ram_bytes),
            vcpus: 1,
            needs: VmNeeds::default(),
            share_domain: vm.share_domain.clone(),
            loses_writes: false,
            program_replaced: vm.program_replaced,
        };
        // A QEMU that moves its VM may take long to answer, and that VM can't be moved
        // elsewhere now.
        if let Some(machine) = machine.filter(|_| counted.is_settled()) {
            read_command_line(&machine, &mut counted);
            // A list of VMs must not wait for a QEMU that hangs either.
            let answers = machine.qmp.execute_within("query-status", json!({}), QEMU_WAIT).is_ok();
            if answers {
                ask(&machine, &mut counted, memory);
            }
        }
        counted
    }

    fn unfit(&self, needs: &VmNeeds) -> Option<String> {
        if needs.program.is_empty() {
            // The source did not report it; the check at the arrival knows it.
            return None;
        }
        let able = fitness::able(needs, self.examiner.probes());
        able.err().map(|denied| denied.to_string())
    }
}

fn read_command_line(machine: &Machine, counted: &mut Counted) {
    let program = machine.argv.first().map(|program| vms::absolute(program, &machine.cwd));
    counted.needs.program = program.unwrap_or_default();
    let Ok(line) = CommandLine::parse(&machine.argv) else { return };
    counted.needs.accelerator = line.accelerator();
    counted.needs.cpu = line.cpu_model();
}

/// Adds what only QEMU knows.
fn ask(machine: &Machine, counted: &mut Counted, memory: &HostMemory) {
    if let Ok(vcpus) = machine.qmp.vcpus() {
        counted.vcpus = u32::try_from(vcpus.len()).unwrap_or(u32::MAX);
    }
    // If QEMU doesn't report it, the move finds out.
    counted.loses_writes = machine.qmp.loses_writes().unwrap_or(false);
    counted.needs.machine = shape::machine_of(&machine.qmp).unwrap_or_default();
    if let Some(needs) = vms::needs(machine, counted.ram_bytes, memory) {
        counted.needed_bytes = needs.pages_bytes;
        counted.needs.huge_bytes = needs.huge_bytes.into_iter().collect();
    }
}

fn refused(denied: &Denied) -> Answer {
    let is_stopping = denied.code() == ErrorCode::AgentStopping;
    Answer::Refused { reason: denied.to_string(), is_stopping }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A coordinator orders again then.
    #[test]
    fn a_refusal_says_whether_the_agent_is_stopping() {
        for (denied, expected) in
            [(Denied::Closing, true), (Denied::Conflict("web1 is being moved".to_owned()), false)]
        {
            let Answer::Refused { is_stopping, .. } = refused(&denied) else { panic!() };
            assert_eq!(is_stopping, expected, "{denied}");
        }
    }
}
