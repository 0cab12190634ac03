//! Which targets can't run which VMs, as their agents report it.

use std::collections::{BTreeMap, BTreeSet};

use policy::gang;
use wire::gang::{Counted, WANTS_MAX, Want};

use super::{Planner, evacuated, left_out};
use crate::denied::Denied;
use crate::gangs::cluster::silent;
use crate::parallel::at_once;

/// By VM, and for each target in their order, why the target can't run the VM.
pub(super) type UnfitByVm = BTreeMap<String, Vec<gang::Unfit>>;

impl Planner<'_> {
    /// The targets that report what they can run, and for each VM and each of them, why the target
    /// can't run the VM. If targets were `named`, each of them has to report it.
    pub(super) fn unfit(
        &mut self,
        vms: &[Counted],
        targets: Vec<String>,
        named: bool,
    ) -> Result<(Vec<String>, UnfitByVm), Denied> {
        let kinds: BTreeSet<&Want> = vms.iter().map(|vm| &vm.want).collect();
        let mut kinds: Vec<Want> = kinds.into_iter().cloned().collect();
        // The others are checked when they arrive.
        kinds.truncate(WANTS_MAX);
        let cluster = self.cluster;
        let evacuated = self.left_out_as_evacuated(&targets, named);
        let answers = at_once(&targets, |target| cluster.able(target, kinds.clone()));
        let (mut there, mut unfit) = (Vec::new(), UnfitByVm::new());
        for (target, answer) in targets.into_iter().zip(answers) {
            let answer = match answer {
                Ok(answer) => answer,
                Err(why) if !named => {
                    self.notes.push(left_out(&target, &why));
                    continue;
                }
                Err(why) => return Err(silent(&target, &why)),
            };
            for vm in vms {
                let kind = kinds.iter().position(|kind| *kind == vm.want);
                let mut why = kind.and_then(|kind| answer.get(kind)?.clone());
                if let Ok(census) = self.census(&target)
                    && census.vms.iter().any(|other| other.name == vm.name)
                {
                    why = Some(format!("there is already a VM `{}` there", vm.name));
                }
                if evacuated.contains(&target) {
                    why = Some(evacuated::WHY.to_owned());
                }
                unfit.entry(vm.name.clone()).or_default().push(why);
            }
            there.push(target);
        }
        Ok((there, unfit))
    }
}
