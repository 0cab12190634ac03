//! How a VM can get another QEMU on this host: `POST /v1/vms/NAME/plan-upgrade`.

use api::{ErrorCode, PlanUpgradeRequest, UpgradeHow, UpgradePlan};
use qemu::command_line::CommandLine;
use qemu::upgrade::{Known, Plan};

use super::parts::Api;
use crate::denied::Denied;

impl Api {
    /// Queries the VM's QEMU, and the program of the other one.
    pub(super) fn plan_upgrade(
        &self,
        name: &str,
        request: &PlanUpgradeRequest,
    ) -> Result<UpgradePlan, Denied> {
        self.registry.show(name).map_err(|denied| self.located(denied, name))?;
        let unknown = || Denied::Coded(ErrorCode::VmDead, format!("{name} does not run here"));
        let vm = self.registry.vm(name).ok_or_else(unknown)?;
        let machine = vm.machine().ok_or_else(unknown)?;
        let known = Known::of(&machine).map_err(|error| Denied::Qemu(error.to_string()))?;
        let program = request.program.as_ref().or(machine.argv.first()).ok_or_else(unknown)?;
        let line = CommandLine::parse(&machine.argv);
        let accelerator = line.as_ref().map(CommandLine::accelerator).unwrap_or_default();
        let next = self.examiner.probes().of(program, &machine.cwd, &accelerator);
        let next = next.map_err(|error| Denied::Conflict(error.to_string()))?;
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
            how,
            copied_bytes,
            reasons,
        })
    }
}
