//! The content that VMs of a gang need not send, by samples of their content and of that of
//! VMs at their destinations.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::mem;

use api::{Share, SharedParts};
use engine::{Estimate, Tally};
use page::PAGE_BYTES;

use super::{Chosen, Planner};
use crate::gangs::sampled::Content;
use crate::parallel::at_once;
use wire::gang::Counted;
use wire::gang::HINTS_MAX;

/// The most names in the samples of all VMs for a dry run: 16 MiB of them.
const ALL_HINTS_MAX: u64 = 1 << 22;

/// A VM, by its host and its name.
type Which = (String, String);

/// VMs that leave their hosts, each with its host.
pub(super) type Leaving<'l> = [(&'l str, &'l Counted)];

/// What is known of VMs' content.
#[derive(Default)]
pub(super) struct Known {
    /// Their samples, all of the same rate.
    pub(super) contents: HashMap<Which, Content>,
    /// What is not known, and why.
    unknown: Vec<String>,
}

impl Planner<'_> {
    /// For each VM, the content that it need not send, if that is known.
    ///
    /// If not, the reason is noted.
    pub(super) fn shares(&mut self, chosen: &[Chosen]) -> Vec<Option<SharedParts>> {
        if self.request.options.sharing.share == Share::Off {
            return vec![None; chosen.len()];
        }
        let leaving: Vec<_> = chosen.iter().map(Chosen::leaving).collect();
        let hosts: BTreeSet<String> = chosen.iter().flat_map(|one| self.mates(&one.to)).collect();
        let Known { contents, unknown } = self.contents(&leaving, &hosts, ALL_HINTS_MAX);
        unknown.into_iter().for_each(|note| self.note(note));
        let held = self.held(&leaving, &hosts, &contents);
        let places: Vec<String> = chosen.iter().map(|one| self.place(&one.to)).collect();
        let nothing = HashSet::new();
        let mut tallies: HashMap<&str, Tally> = HashMap::new();
        let mut shares = Vec::with_capacity(chosen.len());
        for (one, place) in chosen.iter().zip(&places) {
            let Some(content) = contents.get(&which(&one.from, &one.vm)) else {
                shares.push(None);
                continue;
            };
            let there = held.get(place).unwrap_or(&nothing);
            let tally = tallies.entry(place).or_default();
            let estimate = tally.add(&content.sample, |hint| there.contains(&hint));
            if content.rounds == 0 {
                self.note(format!(
                    "{} on {} has not been scanned completely yet, so it may share more",
                    one.vm.name, one.from
                ));
            }
            shares.push(Some(parts(estimate.of_pages(content.pages))));
        }
        shares
    }

    /// Adds a note, but not with [`Share::Auto`], where unknown content is normal.
    fn note(&mut self, note: String) {
        if self.request.options.sharing.share != Share::Auto {
            self.notes.push(note);
        }
    }

    /// The content of the VMs that leave, and of the VMs that stay at these hosts, from samples
    /// with at most `hints_max` names.
    pub(super) fn contents(
        &mut self,
        leaving: &Leaving<'_>,
        hosts: &BTreeSet<String>,
        hints_max: u64,
    ) -> Known {
        let mut known = Known::default();
        let mut wanted: BTreeMap<String, Vec<Counted>> = BTreeMap::new();
        for (from, vm) in leaving {
            if self.stays_in_domain(vm) {
                wanted.entry((*from).to_owned()).or_default().push((*vm).clone());
            } else {
                let vm = &vm.name;
                let note = format!("what {vm} shares in another domain is not known in advance");
                known.unknown.push(note);
            }
        }
        self.ask(hosts.iter().filter(|host| !self.known.contains_key(*host)).cloned().collect());
        for host in hosts {
            if let Some(Err(why)) = self.known.get(host) {
                known.unknown.push(format!("what VMs on {host} contain isn't known: {why}"));
            }
            let residents = self.residents(host, leaving);
            wanted.entry(host.clone()).or_default().extend(residents);
        }
        let one_in = one_in(wanted.values().flatten(), hints_max);
        let wanted: Vec<(String, Vec<Counted>)> = wanted.into_iter().collect();
        let answers = at_once(&wanted, |(host, vms)| self.cluster.contents(host, vms, one_in));
        for ((host, vms), answers) in wanted.iter().zip(answers) {
            for (vm, answer) in vms.iter().zip(answers) {
                match answer {
                    Ok(content) => drop(known.contents.insert(which(host, vm), content)),
                    Err(why) => {
                        let vm = &vm.name;
                        let note = format!("what {vm} on {host} contains isn't known: {why}");
                        known.unknown.push(note);
                    }
                }
            }
        }
        let samples = known.contents.values().map(|content| content.sample.one_in);
        let coarsest = samples.max().unwrap_or(1);
        for content in known.contents.values_mut() {
            content.sample = mem::take(&mut content.sample).thinned(coarsest);
        }
        known
    }

    /// Whether the VM stays in its domain; in another domain, equal content has other names.
    fn stays_in_domain(&self, vm: &Counted) -> bool {
        let wanted = self.request.options.sharing.domain.as_ref();
        wanted.is_none_or(|domain| *domain == vm.share_domain)
    }

    /// The hosts that share content with this one: its rack, or only itself.
    pub(super) fn mates(&self, host: &str) -> Vec<String> {
        let rack = match self.request.options.sharing.share {
            Share::Auto | Share::Rack => self.racks.get(host).and_then(Option::as_ref),
            Share::Off | Share::Host => None,
        };
        let Some(rack) = rack else { return vec![host.to_owned()] };
        let of_it = self.racks.iter().filter(|(_, of)| of.as_ref() == Some(rack));
        of_it.map(|(host, _)| host.clone()).collect()
    }

    /// The first of these hosts, as a key for all of them.
    pub(super) fn place(&self, host: &str) -> String {
        self.mates(host).swap_remove(0)
    }

    /// The VMs that are at a host and stay there.
    fn residents(&self, host: &str, leaving: &Leaving<'_>) -> Vec<Counted> {
        let leaves =
            |vm: &Counted| leaving.iter().any(|(from, one)| *from == host && one.name == vm.name);
        let census = self.census(host).ok();
        let there = census.into_iter().flat_map(|census| &census.vms);
        there.filter(|vm| vm.is_settled() && !leaves(vm)).cloned().collect()
    }

    /// The content at each place, of VMs that stay.
    pub(super) fn held(
        &self,
        leaving: &Leaving<'_>,
        hosts: &BTreeSet<String>,
        contents: &HashMap<Which, Content>,
    ) -> BTreeMap<String, HashSet<u32>> {
        let mut held: BTreeMap<String, HashSet<u32>> = BTreeMap::new();
        for host in hosts {
            let there = held.entry(self.place(host)).or_default();
            for vm in self.residents(host, leaving) {
                let Some(content) = contents.get(&which(host, &vm)) else { continue };
                there.extend(&content.sample.hints);
            }
        }
        held
    }
}

pub(super) fn which(host: &str, vm: &Counted) -> Which {
    (host.to_owned(), vm.name.clone())
}

/// The rate of samples: as fine as the limits for one VM and for all VMs permit.
fn one_in<'v>(vms: impl Iterator<Item = &'v Counted>, hints_max: u64) -> u32 {
    let (mut most, mut all) = (0_u64, 0_u64);
    for vm in vms {
        let pages = vm.used_bytes / PAGE_BYTES as u64;
        most = most.max(pages);
        all = all.saturating_add(pages);
    }
    let needed = (most / HINTS_MAX as u64).max(all / hints_max) + 1;
    u32::try_from(needed).unwrap_or(1 << 31).next_power_of_two()
}

fn parts(estimate: Estimate) -> SharedParts {
    let bytes = |pages: u64| pages.saturating_mul(PAGE_BYTES as u64);
    SharedParts {
        held_bytes: bytes(estimate.held),
        within_bytes: bytes(estimate.within),
        common_bytes: bytes(estimate.common),
    }
}
