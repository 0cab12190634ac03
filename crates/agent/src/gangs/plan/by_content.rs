//! Destinations by content: what the VMs that leave a host contain, and what there is of it where
//! they may go.

use std::collections::{BTreeMap, BTreeSet};

use api::Share;
use policy::gang::{CONTENTS_MAX, Contents, Placed};
use wire::gang::Counted;

use super::shares::{Known, which};
use super::{Planner, named};

impl Planner<'_> {
    /// The content of the VMs of a host, and what each of the targets has, as far as it is known.
    ///
    /// What is not known is not noted: without it, memory decides. A dry run notes it for the hosts
    /// that were chosen.
    pub(super) fn contents_to_place(
        &mut self,
        host: &str,
        vms: &[Counted],
        targets: &[String],
    ) -> Contents {
        if targets.len() < 2 || self.request.options.sharing.share == Share::Off {
            return Contents::default();
        }
        let leaving: Vec<(&str, &Counted)> = vms.iter().map(|vm| (host, vm)).collect();
        let hosts: BTreeSet<String> =
            targets.iter().flat_map(|target| self.mates(target)).collect();
        let Known { contents, .. } = self.contents(&leaving, &hosts, CONTENTS_MAX);
        let held = self.held(&leaving, &hosts, &contents);
        let of_vm = |vm: &Counted| {
            let content = contents.get(&which(host, vm));
            let mut hints = content.map_or_else(Vec::new, |known| known.sample.hints.clone());
            hints.sort_unstable();
            hints.dedup();
            hints
        };
        let group = |target: &String| {
            let place = self.place(target);
            held.keys().take_while(|other| **other != place).count()
        };
        Contents {
            vms: vms.iter().map(of_vm).collect(),
            groups: targets.iter().map(group).collect(),
            held: held.into_values().collect(),
        }
    }

    /// Notes which VMs go elsewhere than they would by memory.
    pub(super) fn note_by_content(
        &mut self,
        vms: &[Counted],
        targets: &[String],
        placed: &[Placed],
    ) {
        let mut by_target: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (vm, to) in vms.iter().zip(placed).filter(|(_, to)| to.by_content) {
            by_target.entry(&targets[to.host]).or_default().push(&vm.name);
        }
        for (target, mut vms) in by_target {
            vms.sort_unstable();
            let place = if self.mates(target).len() > 1 { "in its rack" } else { "there" };
            self.notes.push(format!(
                "{target} is chosen for {} because more of their content is {place}, or comes \
                 there with this gang, than at the host with most memory left",
                named(vms)
            ));
        }
    }
}
