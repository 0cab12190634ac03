//! Migrations within this host: a VM gets another QEMU.

use std::net::Ipv4Addr;
use std::sync::Arc;

use api::{
    Compress, ErrorCode, FromStorage, GangOptions, MigrateRequest, Outcome, ReadDisks, Share,
    Sharing, UpgradeHow, UpgradePlan, UpgradeRequest,
};
use engine::{HandOver, Host, Migrated, Peer, SameHost, Settlement, Watch};
use qemu::command_line::CommandLine;
use qemu::machine::Machine;
use qemu::upgrade::{Known, Plan};

use super::Migrations;
use super::copy_room::CopyRoom;
use super::happenings::began;
use crate::denied::Denied;
use crate::examiner::Examiner;
use crate::moves::arrivals::NextHost;
use crate::vms::registry::HandedOver;
use crate::vms::vm::Vm;

/// Its pages cross no network.
const DOWNTIME_MS: u64 = 100;

impl Migrations {
    /// How a VM could get another QEMU, or why not.
    pub(crate) fn plan_upgrade(
        &self,
        examiner: &Examiner,
        name: &str,
        program: Option<&String>,
    ) -> Result<UpgradePlan, Denied> {
        let machine = self.machine_of(name)?;
        self.plan(&machine, examiner, name, program)
    }

    fn machine_of(&self, name: &str) -> Result<Arc<Machine>, Denied> {
        self.registry.show(name)?;
        let machine = self.registry.vm(name).and_then(|vm| vm.machine());
        machine.ok_or_else(|| dead(name))
    }

    fn plan(
        &self,
        machine: &Machine,
        examiner: &Examiner,
        name: &str,
        program: Option<&String>,
    ) -> Result<UpgradePlan, Denied> {
        let known = Known::of(machine).map_err(|error| Denied::Qemu(error.to_string()))?;
        let known = Known {
            touched_bytes: engine::used_private(machine.process.pid()),
            group_room: self.registry.room_for_next(name, machine),
            ..known
        };
        let program = program.or(machine.argv.first()).ok_or_else(|| dead(name))?;
        let line = CommandLine::parse(&machine.argv);
        let accelerator = line.as_ref().map(CommandLine::accelerator).unwrap_or_default();
        let probes = examiner.probes();
        let next = probes.of(program, &machine.cwd, &accelerator);
        let next = next.map_err(|error| Denied::Conflict(error.to_string()))?;
        let file = probes.programs().find(program, &machine.cwd);
        let already = file.is_ok_and(|file| machine.runs_program(&file));
        let (how, copied_bytes, reasons) = match known.plan(&next) {
            Plan::HandedOver => (UpgradeHow::HandedOver, 0, Vec::new()),
            Plan::Copied { bytes } => (UpgradeHow::Copied, bytes, Vec::new()),
            Plan::Not { reasons } => {
                (UpgradeHow::Not, 0, reasons.iter().map(ToString::to_string).collect())
            }
        };
        Ok(UpgradePlan {
            vm: name.to_owned(),
            qemu: machine.version.clone(),
            program: program.clone(),
            version: next.version_text(),
            already,
            how,
            copied_bytes,
            reasons,
        })
    }

    /// Starts to give a VM another QEMU, on a thread of its own.
    pub(crate) fn upgrade(
        self: &Arc<Self>,
        examiner: &Arc<Examiner>,
        name: &str,
        request: UpgradeRequest,
    ) -> Result<String, Denied> {
        // Before anything is touched.
        let machine = self.machine_of(name)?;
        let plan = self.plan(&machine, examiner, name, request.program.as_ref())?;
        if plan.how == UpgradeHow::Not {
            let reasons = plan.reasons.join("; ");
            return Err(Denied::Conflict(format!("{name} can't get another QEMU: {reasons}")));
        }
        let id = self.unused_id(&self.table())?;
        let order = order(name, &self.local.agent, &request);
        let waits = &self.local.waits;
        let checked = machine.record();
        let maps_ram = plan.how == UpgradeHow::HandedOver;
        let next = (request.program, maps_ram);
        let next = NextHost::new(&self.settlers, examiner, checked, next, waits);
        self.begin_with(&id, order, {
            let id = id.clone();
            move |this, vm, order, watch| {
                this.perform_here(&id, (next, maps_ram), vm, order, watch);
            }
        })?;
        Ok(id)
    }

    /// Runs a migration within this host, and then frees the VM, on one of its two QEMUs.
    fn perform_here(
        &self,
        id: &str,
        (next, maps_ram): (NextHost, bool),
        vm: &Arc<Vm>,
        order: &MigrateRequest,
        watch: &Arc<Watch>,
    ) {
        self.events.publish(began(watch));
        let ran = self.registry.is_running(&vm.name);
        let former = vm.machine();
        former.iter().for_each(|machine| machine.is_one_of_two(true));
        let hand_over = former.clone().filter(|_| maps_ram);
        let hand_over = hand_over.map(|former| {
            Arc::new(HandedOver::new(&self.registry, &vm.name, former)) as Arc<dyn HandOver>
        });
        let copied = former.as_ref().filter(|_| !maps_ram);
        let room = copied.and_then(|former| CopyRoom::of(&self.registry, &vm.name, former, watch));
        let next = Arc::new(next);
        let same = SameHost::new(Arc::clone(&next) as Arc<dyn Host>, &self.local);
        let peer = Peer {
            name: self.local.agent.clone(),
            address: (Ipv4Addr::LOCALHOST, self.local.agent_port).into(),
            nics: Vec::new(),
        };
        let Migrated { report, settlement } =
            self.run(same.source(), &peer, (vm, hand_over), order, watch);
        drop(room);
        // A cancelled one may still start its QEMU.
        next.abandon();
        // Its other side ends, or has a thread of its own from now on.
        same.wait_ended();
        match (&report.outcome, former) {
            _ if settlement.is_in_doubt() => {}
            (Outcome::Done, Some(former)) => {
                self.registry.empty_seat(&vm.name, &former.record());
            }
            (outcome, _) => self.note_stop(id, vm, ran, outcome),
        }
        match settlement {
            Settlement::Settled => self.settlers.ended_within(&vm.name, id),
            Settlement::InDoubt(None) => {
                // After a fault, nothing frees a VM whose journal can't be read.
                if self.settlers.kept_leaving(&vm.name).is_none() {
                    self.settlers.ended_within(&vm.name, id);
                }
            }
            Settlement::Undelivered(_) | Settlement::InDoubt(Some(_)) => {
                // Its thread frees the VM.
                self.registry.unsettled(&vm.name);
                self.settlers.leaving(settlement, vm);
            }
        }
        self.keep(id, report);
    }
}

fn dead(name: &str) -> Denied {
    Denied::Coded(ErrorCode::VmDead, format!("{name} does not run here"))
}

/// The order to move a VM within this host: nothing is shared or packed for a network.
fn order(vm: &str, here: &str, request: &UpgradeRequest) -> MigrateRequest {
    let options = GangOptions {
        downtime_ms: DOWNTIME_MS,
        sharing: Sharing { share: Share::Off, ..Sharing::default() },
        storage: FromStorage { read: ReadDisks::Off, ..FromStorage::default() },
        compress: Compress::Off,
        // They are the same files: that was checked.
        shared_disks: true,
        accept_lost_writes: request.accept_lost_writes,
        // The next QEMU has the same ones.
        accept_missing_taps: true,
        audit: request.audit,
        ..GangOptions::default()
    };
    options.request(vm, here)
}
