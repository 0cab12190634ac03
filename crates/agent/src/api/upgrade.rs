//! Another QEMU for a VM on this host: `POST /v1/vms/NAME/upgrade`, and its plan.

use api::{PlanUpgradeRequest, UpgradePlan, UpgradeRequest};

use super::parts::Api;
use crate::denied::Denied;

impl Api {
    /// Queries the VM's QEMU, and the program of the other one.
    pub(super) fn plan_upgrade(
        &self,
        name: &str,
        request: &PlanUpgradeRequest,
    ) -> Result<UpgradePlan, Denied> {
        let plan = self.migrations.plan_upgrade(&self.examiner, name, request.program.as_ref());
        plan.map_err(|denied| self.located(denied, name))
    }

    /// Starts it; returns the migration's id.
    pub(super) fn upgrade(&self, name: &str, request: UpgradeRequest) -> Result<String, Denied> {
        let started = self.migrations.upgrade(&self.examiner, name, request);
        started.map_err(|denied| self.located(denied, name))
    }
}
