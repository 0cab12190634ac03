//! The interface below a VLAN or a bridge.
//!
//! On a host of VMs the address is often on a bridge. The bridge's counters show only what the host
//! itself sends. The VMs' traffic passes only through the port below, and a migration must leave
//! room for it.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::nic::counters::Table;

/// Enough for a VLAN on a bridge on a VLAN on a bond, and one more.
const LAYERS_MAX: usize = 5;

/// The interface whose counters include all traffic that shares a wire with `name`. That is `name`
/// itself if there is no interface below it, or if it is unknown.
pub(crate) fn carrier(name: &str) -> String {
    let sys = Path::new("/sys/class/net");
    let Ok(table) = Table::read() else { return name.to_owned() };
    // `/sys` may show another namespace's interfaces.
    let ours: BTreeSet<&str> = table.names().collect();
    let shown = names_in(sys, "");
    let is_same = shown.iter().map(String::as_str).filter(|one| !is_bonding_switch(one));
    if is_same.collect::<BTreeSet<_>>() == ours { below(sys, name) } else { name.to_owned() }
}

/// A file that the bonding driver puts next to the interfaces.
fn is_bonding_switch(name: &str) -> bool {
    name == "bonding_masters"
}

fn below(sys: &Path, name: &str) -> String {
    let mut name = name.to_owned();
    for _ in 0..LAYERS_MAX {
        let interface = sys.join(&name);
        // A bond counts the traffic of all its links, and knows their speed.
        if interface.join("bonding").exists() {
            break;
        }
        let mut lower = names_in(&interface, "lower_");
        if lower.len() > 1 {
            // VMs' ports have no hardware and no interface below.
            lower.retain(|port| {
                let port = sys.join(port);
                port.join("device").exists() || !names_in(&port, "lower_").is_empty()
            });
        }
        let [only] = &lower[..] else { break };
        if !sys.join(only).exists() {
            break;
        }
        name.clone_from(only);
    }
    name
}

/// The names in `dir` that start with `prefix`, without the prefix.
fn names_in(dir: &Path, prefix: &str) -> Vec<String> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.filter_map(|name| Some(name.strip_prefix(prefix)?.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descending_ends_at_a_physical_nic_or_a_bond() {
        let sys = tempfile::tempdir().unwrap();
        for dir in [
            "eth0/device",
            "eth1/device",
            "eth2/device",
            "bond0/bonding",
            "bond0/lower_eth0",
            "bond0/lower_eth1",
            "bond0.7/lower_bond0",
            "vnet0/tun_flags",
            "vnet1/tun_flags",
            "br0/lower_bond0.7",
            "br0/lower_vnet0",
            "br0/lower_vnet1",
            "br1/lower_eth2",
            "br2/lower_eth0",
            "br2/lower_eth1",
            "br3/lower_vnet0",
            "br3/lower_vnet1",
            "macvlan0/lower_elsewhere",
            "loop0/lower_loop1",
            "loop1/lower_loop0",
        ] {
            fs::create_dir_all(sys.path().join(dir)).unwrap();
        }
        for (name, expected) in [
            ("eth0", "eth0"),
            ("bond0", "bond0"),
            ("br0", "bond0"),
            ("br1", "eth2"),
            ("br2", "br2"),
            ("br3", "br3"),
            ("macvlan0", "macvlan0"),
            ("gone", "gone"),
        ] {
            assert_eq!(below(sys.path(), name), expected, "below {name}");
        }
        assert!(below(sys.path(), "loop0").starts_with("loop"));
    }

    #[test]
    fn loopback_has_no_interface_below() {
        assert_eq!(carrier("lo"), "lo");
    }
}
