//! Which target each VM moves to: in turn, or by the agents' policy.

use std::collections::HashSet;

use clap::ValueEnum;
use policy::gang::{CONTENTS_MAX, Contents, Host, Vm, place};

use super::content::hint;
use super::ground::Ground;
use super::trace::{Trace, TracedVm};
use crate::Share;
use lab::error::{LabError, Result};

/// Room at each target, in even shares of what moves: with less, hosts are chosen by what fits.
const ROOM: u64 = 2;

/// How targets are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Placement {
    /// One after the other.
    Turn,
    /// By free memory.
    Memory,
    /// By content, then by free memory.
    Content,
}

/// The target of each VM that moves. The VMs of the trace after the first `going` are residents.
pub(super) fn targets(
    share: Share,
    ground: &Ground,
    placement: Placement,
    trace: &Trace,
    going: usize,
) -> Result<Vec<usize>> {
    if placement == Placement::Turn {
        return Ok((0..going).map(|nth| ground.target_of(nth)).collect());
    }
    let leaving = &trace.vms[..going];
    let bytes = |vm: &TracedVm| vm.contents.len() as u64 * trace.grain_bytes;
    let all: u64 = leaving.iter().map(bytes).sum();
    let largest = leaving.iter().map(bytes).max().unwrap_or(0);
    let free_bytes = (all / ground.targets() as u64).max(largest) * ROOM;
    let named = |prefix: &str, count: usize| -> Vec<String> {
        (0..count).map(|nth| format!("{prefix}{nth:05}")).collect()
    };
    let (vm_names, host_names) = (named("v", going), named("t", ground.targets()));
    let vms: Vec<Vm<'_>> = leaving
        .iter()
        .zip(&vm_names)
        .map(|(vm, name)| Vm {
            name,
            at: "source",
            rack: None,
            ram_bytes: bytes(vm),
            vcpus: 1,
            unfit: Vec::new(),
        })
        .collect();
    let hosts: Vec<Host<'_>> =
        host_names.iter().map(|name| Host { name, rack: None, free_bytes }).collect();
    let contents = match placement {
        Placement::Content => contents(share, ground, trace, going),
        Placement::Turn | Placement::Memory => Contents::default(),
    };
    let placed = place(&vms, &hosts, &contents, false);
    let placed = placed.map_err(|no_place| LabError::Unsupported(no_place.to_string()))?;
    Ok(placed.into_iter().map(|to| to.host).collect())
}

/// What agents would know of the VMs that move, and of the residents.
fn contents(share: Share, ground: &Ground, trace: &Trace, going: usize) -> Contents {
    let group = |target: usize| match share {
        Share::Off => None,
        Share::Host => Some(target),
        Share::Rack => Some(ground.target_rack(target)),
    };
    let groups: Option<Vec<usize>> = (0..ground.targets()).map(group).collect();
    let Some(groups) = groups else { return Contents::default() };
    let grains: u64 = trace.vms.iter().map(|vm| vm.contents.len() as u64).sum();
    let one_in = u32::try_from(grains / CONTENTS_MAX + 1).unwrap_or(u32::MAX);
    let sample = |vm: &TracedVm| -> Vec<u32> {
        let hints = vm.contents.iter().filter(|content| **content != 0).map(|one| hint(*one));
        let mut hints: Vec<u32> = hints.filter(|hint| *hint <= u32::MAX / one_in).collect();
        hints.sort_unstable();
        hints.dedup();
        hints
    };
    let mut held = vec![HashSet::new(); groups.iter().max().map_or(0, |last| last + 1)];
    for (nth, vm) in trace.vms[going..].iter().enumerate() {
        held[groups[ground.target_of(nth)]].extend(sample(vm));
    }
    Contents { vms: trace.vms[..going].iter().map(sample).collect(), groups, held }
}
