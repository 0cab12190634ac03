//! The prediction of a migration: `POST /v1/vms/NAME/predict`.

use api::{ErrorCode, GuestHelper, PredictRequest, Prediction};
use engine::{Domain, MigrationError, SourceVm};

use super::parts::Api;
use crate::denied::Denied;

impl Api {
    /// Samples the VM for some seconds.
    pub(super) fn predict(
        &self,
        name: &str,
        request: &PredictRequest,
    ) -> Result<Prediction, Denied> {
        api::check_downtime(request.downtime_ms).map_err(Denied::Invalid)?;
        request.slowing.check().map_err(|error| Denied::Invalid(error.to_string()))?;
        self.examiner.peer(&request.to)?;
        let wire_bytes_per_s = match request.rate_bits_per_s {
            Some(rate) => rate.bytes_per_s(),
            None => self.examiner.carries()?,
        };
        self.registry.show(name).map_err(|denied| self.located(denied, name))?;
        let unknown = || Denied::Coded(ErrorCode::VmDead, format!("{name} does not run here"));
        let vm = self.registry.vm(name).ok_or_else(unknown)?;
        let machine = vm.machine().ok_or_else(unknown)?;
        let (name, share_domain) = (name.to_owned(), Domain::default());
        let cwd = String::new();
        let source = SourceVm { name, machine, cwd, share_domain, hand_over: None };
        let predicted = engine::predict(self.examiner.local(), &source, request, wire_bytes_per_s);
        let mut prediction = predicted.map_err(|error| match error {
            MigrationError::VmGone(why) => Denied::Coded(ErrorCode::VmDead, why),
            error => Denied::Qemu(error.to_string()),
        })?;
        let free = &mut prediction.free_memory;
        if (free.hinted || free.unused_shared_bytes > 0)
            && let Some(GuestHelper::Answers { clears_memory, .. }) = vm.helper()
        {
            free.guest_clears = clears_memory;
        }
        Ok(prediction)
    }
}
