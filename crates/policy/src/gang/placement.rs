//! Decides which VM goes to which host: where most of its content is, if that saves much, as far as
//! hosts keep about the same free memory; or packed, if the VMs fit only that way.
//!
//! The largest VM goes first. Of the hosts that have most of its content it gets the one with the
//! most memory left (worst fit, decreasing). The result is deterministic and independent of the
//! order of the lists, so that a dry run shows what the run will do.

use std::cmp::Reverse;
use std::collections::HashSet;

/// The most contents in the samples of all VMs by which hosts are chosen: 2 MiB as they are sent.
pub const CONTENTS_MAX: u64 = 1 << 18;
/// A host with less than one in so many parts of the memory that the roomiest host has left gets
/// no VM for its content: VMs that are all alike would fill one host.
const EVEN: i128 = 2;
/// Less than one in so many parts of a VM is not worth an uneven distribution, and samples aren't
/// much more precise.
const WORTH: usize = 8;

/// Why a host can't take a VM at all, whatever its memory.
pub type Unfit = Option<String>;

/// A host that VMs may go to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host<'h> {
    /// Its name.
    pub name: &'h str,
    /// The rack it stands in.
    pub rack: Option<&'h str>,
    /// Memory that it can give to arriving VMs.
    pub free_bytes: u64,
}

/// A VM to be moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vm<'v> {
    /// Its name.
    pub name: &'v str,
    /// The host that it is on.
    pub at: &'v str,
    /// The rack of that host.
    pub rack: Option<&'v str>,
    /// The host memory that it takes.
    pub ram_bytes: u64,
    /// Its virtual CPUs.
    pub vcpus: u32,
    /// For each host, in their order, why it can't take the VM, if so.
    pub unfit: Vec<Unfit>,
}

/// What is known of the content of VMs and hosts: samples, in which equal numbers are equal
/// content.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// For each VM, in their order, what it contains, each content once; empty if not known.
    pub vms: Vec<Vec<u32>>,
    /// For each host, in their order, its group in `held`: hosts of a group provide each other with
    /// content.
    pub groups: Vec<usize>,
    /// What the VMs at the hosts of each group contain.
    pub held: Vec<HashSet<u32>>,
}

impl Contents {
    /// For each group, how much of a VM's content it holds.
    fn found(&self, vm: usize) -> Vec<usize> {
        let of_vm = self.vms.get(vm).map(Vec::as_slice).unwrap_or_default();
        let in_group = |held: &HashSet<u32>| of_vm.iter().filter(|one| held.contains(*one)).count();
        self.held.iter().map(in_group).collect()
    }

    /// Adds the content of a VM to that of its host's group. Returns how much the group lacked.
    fn bring(&mut self, vm: usize, host: usize) -> usize {
        let Some(group) = self.groups.get(host) else { return 0 };
        match (self.held.get_mut(*group), self.vms.get(vm)) {
            (Some(held), Some(of_vm)) => of_vm.iter().filter(|one| held.insert(**one)).count(),
            _ => 0,
        }
    }

    /// How much is sent: each content once to every group that lacks it.
    fn sent(&self, placed: &[Placed]) -> usize {
        let mut there = self.clone();
        placed.iter().enumerate().map(|(vm, to)| there.bring(vm, to.host)).sum()
    }

    /// Whether placing by content saves enough of the VMs that go elsewhere because of it.
    ///
    /// Content that most VMs have draws each of them to the same host, and comes to the others with
    /// the VMs for which that host has no room: nothing is saved then.
    fn pays(&self, by_content: &[Placed], by_memory: &[Placed]) -> bool {
        let saved = self.sent(by_memory).saturating_sub(self.sent(by_content));
        let elsewhere = self.vms.iter().zip(by_content).filter(|(_, to)| to.by_content);
        let moved: usize = elsewhere.map(|(of_vm, _)| of_vm.len()).sum();
        saved > 0 && saved * WORTH >= moved
    }
}

/// The host for a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Its index.
    pub host: usize,
    /// Whether it was chosen for its content: by memory it would be another one.
    pub by_content: bool,
}

/// Why there is no place for a VM.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoPlace {
    /// There is not enough memory.
    #[error(
        "no room for {vm}: it has {} MiB of RAM, and {host} has most left of those that can have \
         it, {} MiB: {} MiB are missing. Leave some VMs out, name more hosts, or use \
         --overcommit-memory if you know that its guests never use all",
        ram_bytes >> 20,
        left_bytes >> 20,
        (ram_bytes - left_bytes).div_ceil(1 << 20)
    )]
    Memory {
        /// Which VM.
        vm: String,
        /// Its RAM.
        ram_bytes: u64,
        /// The host with the most memory left.
        host: String,
        /// What that host has left after the VMs that were placed there before this one.
        left_bytes: u64,
    },
    /// No host can take it.
    #[error("no host can have {vm}: {}", .why.join("; "))]
    Hosts {
        /// Which VM.
        vm: String,
        /// The reason for each host.
        why: Vec<String>,
    },
}

/// Each VM's host. With `overcommit`, memory decides where VMs go, but refuses none.
///
/// # Errors
/// With the first VM that has no place.
pub fn place(
    vms: &[Vm<'_>],
    hosts: &[Host<'_>],
    contents: &Contents,
    overcommit: bool,
) -> Result<Vec<Placed>, NoPlace> {
    // Spreading may leave a small hole on every host and none large enough for the last VM; packed,
    // it may fit.
    let by = |way| assign(vms, hosts, Contents::default(), overcommit, way);
    let by_memory = by(Way::Spread).or_else(|refused| by(Way::Packed).map_err(|_| refused));
    let Ok(by_content) = assign(vms, hosts, contents.clone(), false, Way::Spread) else {
        return by_memory;
    };
    match by_memory {
        Ok(placed) if !contents.pays(&by_content, &placed) => Ok(placed),
        _ => Ok(by_content),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Spread,
    Packed,
}

/// What is left of a host.
struct Left {
    bytes: i128,
    vcpus: u64,
}

fn assign(
    vms: &[Vm<'_>],
    hosts: &[Host<'_>],
    mut contents: Contents,
    overcommit: bool,
    way: Way,
) -> Result<Vec<Placed>, NoPlace> {
    let mut left: Vec<Left> =
        hosts.iter().map(|host| Left { bytes: host.free_bytes.into(), vcpus: 0 }).collect();
    let mut order: Vec<usize> = (0..vms.len()).collect();
    order.sort_by_key(|&vm| (Reverse(vms[vm].ram_bytes), vms[vm].name, vms[vm].at));
    let mut placed = vec![Placed { host: 0, by_content: false }; vms.len()];
    for index in order {
        let vm = &vms[index];
        let needed = i128::from(vm.ram_bytes);
        let able = || (0..hosts.len()).filter(|&host| refusal(vm, host, &hosts[host]).is_none());
        let rank = |&host: &usize| {
            let bytes = if way == Way::Spread { -left[host].bytes } else { left[host].bytes };
            // The VM's clients and storage are near in its own rack.
            let elsewhere = vm.rack.is_none() || vm.rack != hosts[host].rack;
            (bytes, left[host].vcpus, elsewhere, hosts[host].name)
        };
        let fitting: Vec<usize> = able().filter(|&host| left[host].bytes >= needed).collect();
        let by_memory = fitting.iter().copied().min_by_key(rank);
        let rich = with_content(fitting, &left, &contents, index);
        let fitting = rich.into_iter().min_by_key(rank).or(by_memory);
        let roomiest = || able().min_by_key(|&host| (-left[host].bytes, hosts[host].name));
        let chosen = match (fitting, overcommit) {
            (Some(host), _) => host,
            (None, true) => roomiest().ok_or_else(|| nowhere(vm, hosts))?,
            (None, false) => {
                let host = roomiest().ok_or_else(|| nowhere(vm, hosts))?;
                return Err(NoPlace::Memory {
                    vm: vm.name.to_owned(),
                    ram_bytes: vm.ram_bytes,
                    host: hosts[host].name.to_owned(),
                    left_bytes: u64::try_from(left[host].bytes).unwrap_or(0),
                });
            }
        };
        let by_content = by_memory.is_some_and(|host| host != chosen);
        placed[index] = Placed { host: chosen, by_content };
        left[chosen].bytes -= needed;
        left[chosen].vcpus += u64::from(vm.vcpus);
        contents.bring(index, chosen);
    }
    Ok(placed)
}

/// Those of the hosts that have most of a VM's content, or nearly as much, and not much less memory
/// left than others. None if no host has any of it.
fn with_content(
    mut hosts: Vec<usize>,
    left: &[Left],
    contents: &Contents,
    vm: usize,
) -> Vec<usize> {
    let of_vm = contents.vms.get(vm).map_or(0, Vec::len);
    let by_group = contents.found(vm);
    let found = |host: usize| {
        let group = contents.groups.get(host).and_then(|group| by_group.get(*group));
        group.copied().unwrap_or(0)
    };
    let most_left = hosts.iter().map(|&host| left[host].bytes).max().unwrap_or(0);
    hosts.retain(|&host| left[host].bytes * EVEN >= most_left);
    let most = hosts.iter().map(|&host| found(host)).max().unwrap_or(0);
    hosts.retain(|&host| most > 0 && (most - found(host)) * WORTH < of_vm);
    hosts
}

fn refusal<'v>(vm: &'v Vm<'_>, number: usize, host: &Host<'_>) -> Option<&'v str> {
    if host.name == vm.at {
        return Some("is already there");
    }
    vm.unfit.get(number)?.as_deref()
}

fn nowhere(vm: &Vm<'_>, hosts: &[Host<'_>]) -> NoPlace {
    let why = hosts.iter().enumerate().map(|(number, host)| {
        format!("{}: {}", host.name, refusal(vm, number, host).unwrap_or_default())
    });
    let mut why: Vec<String> = why.collect();
    if why.is_empty() {
        why.push("there is none to choose from".to_owned());
    }
    NoPlace::Hosts { vm: vm.name.to_owned(), why }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use proptest::prelude::*;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn host(name: &'static str, free_gib: u64) -> Host<'static> {
        Host { name, rack: None, free_bytes: free_gib * GIB }
    }

    fn vm(name: &'static str, ram_gib: u64) -> Vm<'static> {
        Vm { name, at: "old", rack: None, ram_bytes: ram_gib * GIB, vcpus: 1, unfit: Vec::new() }
    }

    fn names<'h>(
        vms: &[Vm<'_>],
        hosts: &[Host<'h>],
        overcommit: bool,
    ) -> Result<Vec<&'h str>, NoPlace> {
        let placed = place(vms, hosts, &Contents::default(), overcommit)?;
        assert!(placed.iter().all(|one| !one.by_content));
        Ok(placed.into_iter().map(|one| hosts[one.host].name).collect())
    }

    /// VMs, hosts, and the host of each VM.
    #[test]
    fn vms_are_spread_by_free_memory() {
        type Case = (Vec<Vm<'static>>, Vec<Host<'static>>, Vec<&'static str>);
        let table: Vec<Case> = vec![
            (vec![], vec![], vec![]),
            (vec![vm("a", 4)], vec![host("x", 8), host("y", 9)], vec!["y"]),
            // The largest first, then by name; ties go to the first name.
            (vec![vm("b", 2), vm("a", 2)], vec![host("y", 8), host("x", 8)], vec!["y", "x"]),
            (
                vec![vm("a", 1), vm("b", 6), vm("c", 3)],
                vec![host("x", 8), host("y", 8)],
                vec!["y", "x", "y"],
            ),
            // Spread, each host would have 1 left, and the last VM needs 2; packed, they fit.
            (
                vec![vm("a", 3), vm("b", 3), vm("c", 2), vm("d", 2), vm("e", 2)],
                vec![host("x", 6), host("y", 6)],
                vec!["x", "x", "y", "y", "y"],
            ),
        ];
        for (vms, hosts, expected) in table {
            assert_eq!(names(&vms, &hosts, false), Ok(expected), "{vms:?}");
        }
    }

    #[test]
    fn vcpus_break_ties_and_then_the_rack() {
        let busy = Vm { vcpus: 8, ..vm("a", 3) };
        let hosts = [host("x", 9), host("y", 9)];
        let vms = [busy, vm("b", 3), vm("c", 3)];
        assert_eq!(names(&vms, &hosts, false).unwrap(), ["x", "y", "y"]);
        let hosts = [host("x", 9), Host { rack: Some("r1"), ..host("y", 9) }];
        let near = Vm { rack: Some("r1"), ..vm("a", 1) };
        assert_eq!(names(&[near], &hosts, false).unwrap(), ["y"]);
    }

    #[test]
    fn what_does_not_fit_is_named_with_what_is_missing() {
        let hosts = [host("x", 3), host("y", 4)];
        let error = names(&[vm("a", 3), vm("big", 6)], &hosts, false).unwrap_err();
        let expected = NoPlace::Memory {
            vm: "big".to_owned(),
            ram_bytes: 6 * GIB,
            host: "y".to_owned(),
            left_bytes: 4 * GIB,
        };
        assert_eq!(error, expected);
        let text = error.to_string();
        assert!(text.contains("big") && text.contains("2048 MiB are missing"), "{text}");
        // With overcommit, it goes to the host with the most memory left.
        assert_eq!(names(&[vm("a", 3), vm("big", 6)], &hosts, true).unwrap(), ["x", "y"]);
    }

    #[test]
    fn a_host_that_cannot_have_it_is_left_out_and_says_why() {
        let old = Some("QEMU 7.2 doesn't know pc-q35-10.0".to_owned());
        let hosts = [host("x", 9), host("y", 4)];
        let picky = Vm { unfit: vec![old.clone(), None], ..vm("a", 3) };
        assert_eq!(names(&[picky], &hosts, false).unwrap(), ["y"]);
        let homeless = Vm { at: "y", unfit: vec![old, None], ..vm("a", 3) };
        let text = names(&[homeless], &hosts, true).unwrap_err().to_string();
        let expected = "no host can have a: x: QEMU 7.2 doesn't know pc-q35-10.0; y: is already \
                        there";
        assert_eq!(text, expected);
        assert!(names(&[vm("a", 3)], &[], false).unwrap_err().to_string().contains("none"));
    }

    /// Contents of these hosts and VMs, each a range of numbers; each host is a group.
    fn contents(held: &[Range<u32>], vms: &[Range<u32>]) -> Contents {
        Contents {
            vms: vms.iter().map(|of_vm| of_vm.clone().collect()).collect(),
            groups: (0..held.len()).collect(),
            held: held.iter().map(|of_host| of_host.clone().collect()).collect(),
        }
    }

    fn by_content(
        vms: &[Vm<'_>],
        hosts: &[Host<'_>],
        contents: &Contents,
    ) -> Vec<(&'static str, bool)> {
        let placed = place(vms, hosts, contents, false).unwrap();
        let names = ["x", "y", "z"];
        placed.iter().map(|one| (names[one.host], one.by_content)).collect()
    }

    #[test]
    fn a_vm_goes_where_its_content_is_or_goes() {
        let hosts = [host("x", 16), host("y", 15), host("z", 10)];
        let vms = ["a", "b", "c", "d"].map(|name| vm(name, 1));
        // What a has is at z, and c is like it; b and d are alike, and like nothing there.
        let known = contents(&[0..0, 0..0, 0..8], &[0..8, 20..28, 0..8, 20..28]);
        // After b, y has as much left as x, and no vCPU.
        let expected = [("z", true), ("x", false), ("z", true), ("x", true)];
        assert_eq!(by_content(&vms, &hosts, &known), expected);
    }

    #[test]
    fn content_does_not_outweigh_memory_if_it_is_little_or_the_host_much_fuller() {
        let whole = |held: Range<u32>, left_gib| {
            let hosts = [host("x", 16), host("y", left_gib)];
            let known = contents(&[0..80, held], &[0..160, 0..0]);
            by_content(&[vm("a", 1), vm("b", 1)], &hosts, &known)[0]
        };
        assert_eq!(whole(0..100, 8), ("y", true));
        assert_eq!(whole(0..99, 8), ("x", false), "less than an eighth more");
        assert_eq!(whole(0..160, 7), ("x", false), "less than half as much left");
    }

    #[test]
    fn vms_that_are_alike_are_spread_unless_one_host_has_room_for_all() {
        let alike = |vms: &[Vm<'_>]| {
            let known = contents(&[0..0, 0..0], &vec![0..8; vms.len()]);
            by_content(vms, &[host("x", 8), host("y", 8)], &known)
        };
        let vms = ["a", "b", "c", "d", "e", "f", "g", "h"].map(|name| vm(name, 1));
        let in_turn = ["x", "y"].map(|host| (host, false));
        assert_eq!(alike(&vms), in_turn.repeat(4));
        assert_eq!(alike(&vms[..3]), [("x", false), ("x", true), ("x", true)]);
    }

    #[test]
    fn within_a_group_vms_are_spread() {
        let hosts = [host("x", 16), host("y", 10), host("z", 9)];
        let vms = ["a", "b", "c"].map(|name| vm(name, 1));
        let rack = Contents {
            vms: vec![(0..8).collect(); 3],
            groups: vec![0, 1, 1],
            held: vec![HashSet::new(), (0..8).collect()],
        };
        let expected = [("y", true), ("z", true), ("y", true)];
        assert_eq!(by_content(&vms, &hosts, &rack), expected);
    }

    #[test]
    fn content_keeps_no_vm_from_getting_a_place() {
        let hosts = [host("x", 6), host("y", 5)];
        let only_y = Vm { unfit: vec![Some("old".to_owned())], ..vm("b", 3) };
        let vms = [vm("a", 4), only_y];
        // With a at y, b would fit nowhere.
        let known = contents(&[0..0, 0..8], &[0..8, 0..8]);
        assert_eq!(by_content(&vms, &hosts, &known), [("x", false), ("y", false)]);
    }

    proptest! {
        /// No host gets more than it has room for, none gets its own VM, and the result does not
        /// depend on the order of the VMs.
        #[test]
        fn hosts_get_what_fits_and_never_their_own_vms(
            free in prop::collection::vec(0u64..64, 1..6),
            kinds in prop::collection::vec((1u64..16, 0usize..6, 0u32..4), 0..24),
        ) {
            let hosts_named = ["h0", "h1", "h2", "h3", "h4", "h5"];
            let vm_names: Vec<String> = (0..kinds.len()).map(|n| format!("v{n:02}")).collect();
            let hosts: Vec<Host<'_>> = free.iter().enumerate().map(|(n, free)| Host {
                name: hosts_named[n], rack: None, free_bytes: *free,
            }).collect();
            let vms: Vec<Vm<'_>> = kinds.iter().zip(&vm_names).map(|((ram, at, _), name)| Vm {
                name, at: hosts_named[*at], rack: None, ram_bytes: *ram, vcpus: 1,
                unfit: Vec::new(),
            }).collect();
            let known = Contents {
                vms: kinds.iter().map(|(_, _, kind)| {
                    (0u32..8).map(|nth| kind * 8 + nth).collect()
                }).collect(),
                groups: (0..hosts.len()).map(|host| host / 2).collect(),
                held: (0u32..3).map(|group| {
                    (0u32..8).map(|nth| group * 8 + nth).collect()
                }).collect(),
            };
            let mut reversed = vms.clone();
            reversed.reverse();
            let mut known_reversed = known.clone();
            known_reversed.vms.reverse();
            let placed = place(&vms, &hosts, &known, false);
            match (placed, place(&reversed, &hosts, &known_reversed, false)) {
                (Ok(placed), Ok(mut again)) => {
                    again.reverse();
                    prop_assert_eq!(&placed, &again);
                    for (number, host) in hosts.iter().enumerate() {
                        let given = vms.iter().zip(&placed).filter(|(_, to)| to.host == number);
                        let sum: u64 = given.map(|(vm, _)| vm.ram_bytes).sum();
                        prop_assert!(sum <= host.free_bytes);
                    }
                    let stays = |(vm, to): (&Vm<'_>, &Placed)| vm.at == hosts[to.host].name;
                    prop_assert!(!vms.iter().zip(&placed).any(stays));
                }
                (Err(one), Err(other)) => {
                    prop_assert_eq!(one, other);
                    // Content is no reason.
                    prop_assert!(place(&vms, &hosts, &Contents::default(), false).is_err());
                }
                (one, other) => prop_assert!(false, "{one:?} and {other:?}"),
            }
        }
    }
}
