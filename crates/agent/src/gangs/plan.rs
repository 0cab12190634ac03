//! The plan of a gang: which VM moves to which host.

mod by_content;
mod evacuated;
mod shares;
mod unfit;

pub(super) use evacuated::already;

use std::collections::{BTreeMap, BTreeSet, HashSet};

use api::{
    ErrorCode, Evacuation, GangPlan, GangRequest, HostRoom, PARALLEL_MAX, PlannedMove,
    RequestedMove, VmStatus,
};
use policy::gang::{self, Host};
use qemu::lost_writes;

use super::cluster::{Cluster, silent};
use super::limits;
use crate::denied::Denied;
use crate::parallel::at_once;
use shares::Leaving;
use wire::gang::{Census, Counted};

/// The most VMs in one gang; a rack of hosts has about that many.
const MOVES_MAX: usize = 1000;
/// VMs that are named in an error or a note.
const NAMED_MAX: usize = 12;

/// Plans a gang.
pub(super) fn plan(request: &GangRequest, cluster: &dyn Cluster) -> Result<GangPlan, Denied> {
    check(request)?;
    let mut planner = Planner::new(request, cluster);
    let moves = match &request.evacuate {
        Some(evacuation) => planner.evacuate(evacuation)?,
        None => planner.by_name(&request.moves)?,
    };
    if moves.len() > MOVES_MAX {
        let count = moves.len();
        return Err(Denied::Invalid(format!(
            "{count} VMs are more than {MOVES_MAX}: start two gangs"
        )));
    }
    check_writes(&moves, request.options.accept_lost_writes)?;
    Ok(planner.sum_up(moves))
}

fn check(request: &GangRequest) -> Result<(), Denied> {
    let invalid = |text: &str| Err(Denied::Invalid(text.to_owned()));
    match (request.moves.is_empty(), &request.evacuate) {
        (true, None) => return invalid("the gang has no VM to move: name one, or a host"),
        (false, Some(_)) => return invalid("name VMs, or a host to evacuate, and not both"),
        _ => {}
    }
    if !(1..=PARALLEL_MAX).contains(&request.parallel) {
        return Err(Denied::Invalid(format!(
            "{} VMs at a time are outside 1 to {PARALLEL_MAX}",
            request.parallel
        )));
    }
    let options = &request.options;
    api::check_times(options.downtime_ms, options.blackout_max_s, options.timeout_s)
        .map_err(Denied::Invalid)?;
    request.options.slowing.check().map_err(|error| Denied::Invalid(error.to_string()))?;
    request.options.sharing.check().map_err(|error| Denied::Invalid(error.to_string()))?;
    let mut seen = HashSet::new();
    for wanted in &request.moves {
        if !seen.insert((&wanted.vm, &wanted.from)) {
            return Err(Denied::Invalid(format!("{} is named twice: name it once", wanted.vm)));
        }
        if wanted.from.as_ref() == Some(&wanted.to) {
            let text = format!("{} is at that host already", wanted.vm);
            return Err(Denied::Coded(ErrorCode::AlreadyThere, text));
        }
    }
    Ok(())
}

/// Refuses VMs that would lose writes of their guests, unless the operator accepts that.
fn check_writes(moves: &[Chosen], accepted: bool) -> Result<(), Denied> {
    let losing = moves.iter().filter(|one| one.vm.loses_writes && !accepted);
    let names: Vec<&str> = losing.map(|one| one.vm.name.as_str()).collect();
    if names.is_empty() {
        return Ok(());
    }
    Err(Denied::Conflict(format!(
        "{} would lose writes: {}. Restart them with QEMU 9.0 or newer, or with KVM; \
         --accept-lost-writes moves them anyway",
        named(names),
        lost_writes::WHY
    )))
}

/// VMs' names for a text, of which only some are written out.
fn named(mut names: Vec<&str>) -> String {
    let more = names.len().saturating_sub(NAMED_MAX);
    names.truncate(NAMED_MAX);
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    names.join(", ") + &more
}

/// A VM with its source and destination host.
struct Chosen {
    vm: Counted,
    from: String,
    to: String,
}

impl Chosen {
    /// The VM, with the host that it leaves.
    fn leaving(&self) -> (&str, &Counted) {
        (&self.from, &self.vm)
    }
}

struct Planner<'r> {
    request: &'r GangRequest,
    cluster: &'r dyn Cluster,
    racks: BTreeMap<String, Option<String>>,
    /// The answers of hosts.
    known: BTreeMap<String, Result<Census, String>>,
    notes: Vec<String>,
}

impl<'r> Planner<'r> {
    fn new(request: &'r GangRequest, cluster: &'r dyn Cluster) -> Self {
        Self { request, cluster, racks: cluster.racks(), known: BTreeMap::new(), notes: Vec::new() }
    }

    /// Finds each of these VMs.
    fn by_name(&mut self, wanted: &[RequestedMove]) -> Result<Vec<Chosen>, Denied> {
        for one in wanted {
            for host in one.from.iter().chain([&one.to]) {
                self.check_host(host)?;
            }
        }
        let everywhere = wanted.iter().any(|one| one.from.is_none());
        let hosts: BTreeSet<String> = if everywhere {
            self.racks.keys().cloned().collect()
        } else {
            wanted.iter().flat_map(|one| one.from.iter().chain([&one.to])).cloned().collect()
        };
        self.ask(hosts);
        self.note_evacuated(wanted.iter().map(|one| &one.to));
        let chosen: Vec<Chosen> =
            wanted.iter().map(|one| self.find(one)).collect::<Result<_, _>>()?;
        let mut named = HashSet::new();
        if let Some(twice) = chosen.iter().find(|one| !named.insert((&one.vm.name, &one.from))) {
            return Err(Denied::Invalid(format!("{} is named twice: name it once", twice.vm.name)));
        }
        if self.request.dry_run {
            self.note_refusals(&chosen);
        }
        Ok(chosen)
    }

    /// Notes which VMs their destinations would refuse.
    fn note_refusals(&mut self, chosen: &[Chosen]) {
        let targets: BTreeSet<&String> = chosen.iter().map(|one| &one.to).collect();
        let mut notes = Vec::new();
        for target in targets {
            let coming = chosen.iter().filter(|one| one.to == *target);
            let coming: Vec<_> = coming.map(Chosen::leaving).collect();
            match self.unfit(&coming, vec![target.clone()], true) {
                Ok((_, unfit)) => notes.extend(unfit.into_iter().filter_map(|(vm, why)| {
                    let why = why.into_iter().flatten().next()?;
                    Some(format!("{vm} would be refused by {target}: {why}"))
                })),
                Err(denied) => notes.push(denied.to_string()),
            }
        }
        self.notes.extend(notes);
    }

    fn find(&self, wanted: &RequestedMove) -> Result<Chosen, Denied> {
        let RequestedMove { vm: name, from, to } = wanted;
        // The destination has to answer too.
        self.census(to)?;
        let mut found = Vec::new();
        let mut silent_hosts = Vec::new();
        for (host, census) in &self.known {
            match census {
                Ok(census) if from.as_ref().is_none_or(|from| from == host) => {
                    let of_it = census.vms.iter().filter(|vm| vm.name == *name);
                    let here = of_it.filter(|vm| !vm.is_arriving());
                    found.extend(here.map(|vm| (vm, host)));
                }
                Ok(_) => {}
                Err(_) => silent_hosts.push(host.as_str()),
            }
        }
        let (vm, at) = match found.as_slice() {
            [(vm, at)] => (*vm, *at),
            [] => {
                let silent = match silent_hosts.as_slice() {
                    [] => String::new(),
                    hosts => format!(" ({} did not answer)", hosts.join(", ")),
                };
                let place = from.as_deref().unwrap_or("any host");
                let text = format!("there is no VM `{name}` on {place}{silent}");
                return Err(Denied::Coded(ErrorCode::NoSuchVm, text));
            }
            several => {
                let hosts: Vec<&str> = several.iter().map(|(_, host)| host.as_str()).collect();
                let text = format!(
                    "{} have a VM `{name}` each: name the host, as HOST/{name}={to}, or with \
                     `from` in a plan file",
                    hosts.join(" and ")
                );
                return Err(Denied::Coded(ErrorCode::AmbiguousVm, text));
            }
        };
        if at == to {
            let text = format!("{name} is on {to} already");
            return Err(Denied::Coded(ErrorCode::AlreadyThere, text));
        }
        if let Some((code, why)) = cannot_move(vm) {
            return Err(Denied::Coded(code, format!("{name} on {at} {why}")));
        }
        Ok(Chosen { vm: vm.clone(), from: at.clone(), to: to.clone() })
    }

    /// Places all VMs of a host by their content and the free memory of other hosts.
    fn evacuate(&mut self, evacuation: &Evacuation) -> Result<Vec<Chosen>, Denied> {
        let Evacuation { host, to } = evacuation;
        self.check_host(host)?;
        for target in to {
            self.check_host(target)?;
            if target == host {
                return Err(Denied::Invalid(format!("{host} can't be evacuated to itself")));
            }
        }
        let named = !to.is_empty();
        let all = self.racks.keys().filter(|name| *name != host).cloned();
        let targets: BTreeSet<String> =
            if named { to.iter().cloned().collect() } else { all.collect() };
        self.ask(targets.iter().chain([host]).cloned().collect());
        self.check_evacuated_once(host)?;
        let vms = self.leaving(host)?;
        let targets = self.answering(targets, named)?;
        self.note_evacuated(to.iter());
        if vms.is_empty() {
            self.notes.push(format!("{host} has no VM to move"));
            return Ok(Vec::new());
        }
        let leaving: Vec<_> = vms.iter().map(|vm| (host.as_str(), vm)).collect();
        let (targets, mut unfit) = self.unfit(&leaving, targets, named)?;
        let contents = self.contents_to_place(host, &vms, &targets);
        let rooms = targets.iter().map(|target| self.room(target, &leaving));
        let rooms: Vec<Host<'_>> = rooms.collect();
        let rack = self.racks.get(host).cloned().flatten();
        let to_place: Vec<gang::Vm<'_>> = vms
            .iter()
            .map(|vm| gang::Vm {
                name: &vm.name,
                at: host,
                rack: rack.as_deref(),
                ram_bytes: vm.needed_bytes,
                vcpus: vm.vcpus,
                unfit: unfit.remove(&vm.name).unwrap_or_default(),
            })
            .collect();
        let overcommit = self.request.options.overcommit_memory;
        let placed = gang::place(&to_place, &rooms, &contents, overcommit)
            .map_err(|no_place| Denied::Coded(ErrorCode::NoRoom, no_place.to_string()))?;
        self.note_by_content(&vms, &targets, &placed);
        let chosen = vms.iter().zip(placed).map(|(vm, placed)| Chosen {
            vm: vm.clone(),
            from: host.clone(),
            to: targets[placed.host].clone(),
        });
        Ok(chosen.collect())
    }

    /// The VMs of a host that can leave it; the others are noted.
    fn leaving(&mut self, host: &str) -> Result<Vec<Counted>, Denied> {
        let all = self.census(host)?.vms.clone();
        let (leaving, staying): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|vm| cannot_move(vm).is_none());
        for vm in staying {
            let why = cannot_move(&vm).map(|(_, why)| why).unwrap_or_default();
            self.notes.push(format!("{} on {host} {why}: it is left out", vm.name));
        }
        Ok(leaving)
    }

    /// The hosts that answered; if they were `named`, each of them has to.
    fn answering(&mut self, targets: BTreeSet<String>, named: bool) -> Result<Vec<String>, Denied> {
        let mut there = Vec::new();
        for target in targets {
            match self.known.get(&target) {
                Some(Ok(_)) => there.push(target),
                Some(Err(why)) if !named => self.notes.push(left_out(&target, why)),
                Some(Err(why)) => return Err(silent(&target, why)),
                None => {}
            }
        }
        Ok(there)
    }

    fn room<'s>(&'s self, host: &'s str, leaving: &Leaving<'_>) -> Host<'s> {
        Host {
            name: host,
            rack: self.racks.get(host).and_then(Option::as_deref),
            // If the kernel doesn't report it, the check at the arrival is skipped as well.
            free_bytes: self.free_bytes(host, leaving).unwrap_or(u64::MAX),
        }
    }

    fn check_host(&self, host: &str) -> Result<(), Denied> {
        if self.racks.contains_key(host) {
            return Ok(());
        }
        let known: Vec<&str> = self.racks.keys().map(String::as_str).collect();
        let known = known.join(", ");
        let text = format!("there is no host `{host}` in the peers file; there is: {known}");
        Err(Denied::Coded(ErrorCode::NoSuchHost, text))
    }

    fn ask(&mut self, hosts: BTreeSet<String>) {
        let hosts: Vec<String> = hosts.into_iter().collect();
        let answers = at_once(&hosts, |host| self.cluster.census(host));
        self.known.extend(hosts.into_iter().zip(answers));
    }

    fn census(&self, host: &str) -> Result<&Census, Denied> {
        match self.known.get(host) {
            Some(Ok(census)) => Ok(census),
            Some(Err(why)) => Err(silent(host, why)),
            None => Err(silent(host, "it was not queried")),
        }
    }

    fn sum_up(mut self, mut chosen: Vec<Chosen>) -> GangPlan {
        chosen.sort_by(|one, other| {
            let larger = other.vm.used_bytes.cmp(&one.vm.used_bytes);
            larger.then_with(|| one.vm.name.cmp(&other.vm.name))
        });
        let shares = if self.request.dry_run { self.shares(&chosen) } else { Vec::new() };
        let mut needed: BTreeMap<&str, u64> = BTreeMap::new();
        for one in &chosen {
            let sum = needed.entry(&one.to).or_default();
            *sum = sum.saturating_add(one.vm.needed_bytes);
        }
        let leaving: Vec<_> = chosen.iter().map(Chosen::leaving).collect();
        let mut rooms = Vec::new();
        let mut short = Vec::new();
        for (host, needed) in needed {
            let Some(free_bytes) = self.free_bytes(host, &leaving) else { continue };
            if needed > free_bytes {
                short.push(format!(
                    "{host} has {} MiB free now, and {} MiB are to arrive: VMs without room are \
                     refused",
                    free_bytes >> 20,
                    needed >> 20
                ));
            }
            let left_bytes = free_bytes.saturating_sub(needed);
            rooms.push(HostRoom { host: host.to_owned(), free_bytes, left_bytes });
        }
        self.notes.extend(short);
        let shares = shares.into_iter().chain(std::iter::repeat(None));
        let moves = chosen.into_iter().zip(shares).map(|(chosen, shared)| {
            let Chosen { vm, from, to } = chosen;
            PlannedMove {
                vm: vm.name,
                from,
                to,
                ram_bytes: vm.ram_bytes,
                used_bytes: vm.used_bytes,
                shared_bytes: shared.map(|parts| parts.bytes()),
                shared,
                limit_bits_per_s: None,
            }
        });
        let mut moves: Vec<PlannedMove> = moves.collect();
        if self.request.dry_run {
            limits::at_first(self.request, &mut moves, self.cluster);
        }
        GangPlan { moves, rooms, notes: self.notes }
    }
}

/// The note about a host that does not answer and was not named.
fn left_out(host: &str, why: &str) -> String {
    format!("{host} is left out, since it can't be queried: {why}")
}

/// Why a VM can't be moved.
fn cannot_move(vm: &Counted) -> Option<(ErrorCode, String)> {
    let (code, why) = match (vm.status, &vm.migration) {
        (VmStatus::Dead, _) => (ErrorCode::VmDead, "is dead".to_owned()),
        (VmStatus::Arriving, _) => (ErrorCode::VmBusy, "is arriving there".to_owned()),
        (VmStatus::InDoubt, _) => (ErrorCode::VmInDoubt, "is in doubt".to_owned()),
        (VmStatus::Unreadable, _) => (ErrorCode::VmUnreadable, "is unreadable".to_owned()),
        (_, Some(id)) => (ErrorCode::VmBusy, format!("is being moved by migration {id}")),
        (VmStatus::Running | VmStatus::Paused, None) => return None,
    };
    Some((code, why))
}

#[cfg(test)]
mod tests;
