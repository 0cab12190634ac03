//! Which targets can't run which VMs, as their agents report it.

use std::collections::{BTreeMap, BTreeSet};

use policy::gang;
use wire::gang::{Counted, NEEDS_MAX, VmNeeds};

use super::shares::Leaving;
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
        leaving: &Leaving<'_>,
        targets: Vec<String>,
        named: bool,
    ) -> Result<(Vec<String>, UnfitByVm), Denied> {
        let kinds: BTreeSet<&VmNeeds> = leaving.iter().map(|(_, vm)| &vm.needs).collect();
        let mut kinds: Vec<VmNeeds> = kinds.into_iter().cloned().collect();
        // The others are checked when they arrive.
        kinds.truncate(NEEDS_MAX);
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
            for (from, vm) in leaving {
                let kind = kinds.iter().position(|kind| *kind == vm.needs);
                let mut why = kind.and_then(|kind| answer.get(kind)?.clone());
                if let Ok(census) = self.census(&target)
                    && census.vms.iter().any(|other| has_its_name(other, from, vm))
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

    /// The memory that a host has free for these VMs, with that of their earlier arrivals: such a
    /// VM may go elsewhere, but what is left of it there ends all the same. None if the kernel
    /// there doesn't report it.
    pub(super) fn free_bytes(&self, host: &str, leaving: &Leaving<'_>) -> Option<u64> {
        let census = self.census(host).ok()?;
        let is_ending =
            |other: &Counted| leaving.iter().any(|(from, vm)| is_earlier(other, from, vm));
        let ending = census.vms.iter().filter(|other| is_ending(other));
        let ending = ending.map(|other| other.needed_bytes);
        Some(ending.fold(census.free_bytes?, u64::saturating_add))
    }
}

/// Whether this VM of a target keeps out one that leaves the host `from`.
fn has_its_name(other: &Counted, from: &str, vm: &Counted) -> bool {
    other.name == vm.name && !is_earlier(other, from, vm)
}

/// Whether this VM of a target is an earlier arrival of one that leaves the host `from`.
///
/// Its source can send the VM again, so its migration has ended there, and it ends at the target a
/// moment later: there the next arrival waits for that before name and memory are checked. An
/// arrival of that name from any other host is another VM.
fn is_earlier(other: &Counted, from: &str, vm: &Counted) -> bool {
    other.arrives_from.as_deref() == Some(from) && other.name == vm.name
}
