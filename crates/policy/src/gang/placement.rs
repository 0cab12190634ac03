//! Decides which VM goes to which host: spread, so that all hosts keep about the same free memory,
//! or packed, if they fit only that way.
//!
//! The largest VM goes first, to the host with the most memory left (worst fit, decreasing). The
//! result is deterministic and independent of the order of the lists, so that a dry run shows what
//! the run will do.

use std::cmp::Reverse;

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

/// The index of each VM's host. With `overcommit`, memory decides where VMs go, but refuses none.
///
/// # Errors
/// With the first VM that has no place.
pub fn place(vms: &[Vm<'_>], hosts: &[Host<'_>], overcommit: bool) -> Result<Vec<usize>, NoPlace> {
    // Spreading may leave a small hole on every host and none large enough for the last VM; packed,
    // it may fit.
    assign(vms, hosts, overcommit, Way::Spread)
        .or_else(|refused| assign(vms, hosts, overcommit, Way::Packed).map_err(|_| refused))
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
    overcommit: bool,
    way: Way,
) -> Result<Vec<usize>, NoPlace> {
    let mut left: Vec<Left> =
        hosts.iter().map(|host| Left { bytes: host.free_bytes.into(), vcpus: 0 }).collect();
    let mut order: Vec<usize> = (0..vms.len()).collect();
    order.sort_by_key(|&vm| (Reverse(vms[vm].ram_bytes), vms[vm].name, vms[vm].at));
    let mut placed = vec![0; vms.len()];
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
        let fitting = able().filter(|&host| left[host].bytes >= needed).min_by_key(rank);
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
        left[chosen].bytes -= needed;
        left[chosen].vcpus += u64::from(vm.vcpus);
        placed[index] = chosen;
    }
    Ok(placed)
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
        let placed = place(vms, hosts, overcommit)?;
        Ok(placed.into_iter().map(|host| hosts[host].name).collect())
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
        let error = place(&[vm("a", 3), vm("big", 6)], &hosts, false).unwrap_err();
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
        let text = place(&[homeless], &hosts, true).unwrap_err().to_string();
        let expected = "no host can have a: x: QEMU 7.2 doesn't know pc-q35-10.0; y: is already \
                        there";
        assert_eq!(text, expected);
        assert!(place(&[vm("a", 3)], &[], false).unwrap_err().to_string().contains("none"));
    }

    proptest! {
        /// No host gets more than it has room for, none gets its own VM, and the result does not
        /// depend on the order of the VMs.
        #[test]
        fn hosts_get_what_fits_and_never_their_own_vms(
            free in prop::collection::vec(0u64..64, 1..6),
            rams in prop::collection::vec((1u64..16, 0usize..6), 0..24),
        ) {
            let hosts_named = ["h0", "h1", "h2", "h3", "h4", "h5"];
            let vm_names: Vec<String> = (0..rams.len()).map(|n| format!("v{n:02}")).collect();
            let hosts: Vec<Host<'_>> = free.iter().enumerate().map(|(n, free)| Host {
                name: hosts_named[n], rack: None, free_bytes: *free,
            }).collect();
            let vms: Vec<Vm<'_>> = rams.iter().zip(&vm_names).map(|((ram, at), name)| Vm {
                name, at: hosts_named[*at], rack: None, ram_bytes: *ram, vcpus: 1,
                unfit: Vec::new(),
            }).collect();
            let mut reversed = vms.clone();
            reversed.reverse();
            match (place(&vms, &hosts, false), place(&reversed, &hosts, false)) {
                (Ok(placed), Ok(mut again)) => {
                    again.reverse();
                    prop_assert_eq!(&placed, &again);
                    for (number, host) in hosts.iter().enumerate() {
                        let given = vms.iter().zip(&placed).filter(|(_, to)| **to == number);
                        let sum: u64 = given.map(|(vm, _)| vm.ram_bytes).sum();
                        prop_assert!(sum <= host.free_bytes);
                    }
                    let stays = |(vm, to): (&Vm<'_>, &usize)| vm.at == hosts[*to].name;
                    prop_assert!(!vms.iter().zip(&placed).any(stays));
                }
                (Err(one), Err(other)) => prop_assert_eq!(one, other),
                (one, other) => prop_assert!(false, "{one:?} and {other:?}"),
            }
        }
    }
}
