//! Obstacles to sending a host's migrations through the agents.
//!
//! They are found when its configuration is written, not only when a VM is to move.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::ops::RangeInclusive;

use super::qemu_conf::{Lines, value};

/// The state of a listening socket in the kernel's tables.
const LISTENS: &str = "0A";

/// All obstacles, in one sentence each.
///
/// `peer_ports` are the ports at which the agent stands for other hosts.
pub(crate) fn find(
    qemu_conf: &str,
    lines: &Lines,
    peer_ports: &[RangeInclusive<u16>],
    carries: bool,
) -> Vec<String> {
    let idle = (!carries).then(|| {
        "the agent's file has no [carry]: its agent carries nothing, and until it does libvirt's \
         migrations to this host and from it fail at connect. Add a line `[carry]`, and restart \
         the agent"
            .to_owned()
    });
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(std::fs::read_to_string);
    let listening = tables.iter().flatten().flat_map(|table| table.lines()).filter_map(listening);
    let is_ours = UdpSocket::bind((lines.address, 0)).is_ok();
    let foreign = (!is_ours).then(|| {
        format!(
            "{} is not an address of this host: QEMU could not listen there. Correct `address` \
             under [carry] in the agent's file, or remove it",
            lines.address
        )
    });
    let encrypted = encrypted(qemu_conf);
    let taken = taken(listening, peer_ports);
    idle.into_iter().chain(foreign).chain(encrypted).chain(taken).collect()
}

fn encrypted(qemu_conf: &str) -> Option<String> {
    (value(qemu_conf, "migrate_tls_force") == Some("1")).then(|| {
        "qemu.conf has migrate_tls_force = 1: a migration must then be encrypted by QEMU itself. \
         Agents can only relay it unchanged, and it fails unless `virsh migrate` names the \
         destination's certificate (--tls-destination). Remove the line: the agents encrypt \
         between hosts"
            .to_owned()
    })
}

/// Finds programs that listen at all addresses on ports at which the agent stands for other
/// hosts. The agent can't listen there, and such a program would be sent what VMs send.
fn taken(
    listening: impl Iterator<Item = (IpAddr, u16)>,
    peer_ports: &[RangeInclusive<u16>],
) -> Option<String> {
    let everywhere = listening.filter(|(address, _)| address.is_unspecified());
    let is_peer_port = |port: &u16| peer_ports.iter().any(|ports| ports.contains(port));
    let mut taken: Vec<u16> = everywhere.map(|(_, port)| port).filter(is_peer_port).collect();
    taken.sort_unstable();
    taken.dedup();
    let list: Vec<String> = taken.iter().map(u16::to_string).collect();
    (!taken.is_empty()).then(|| {
        format!(
            "another program listens at all addresses on port {}, where the agent has to listen \
             for another host: VMs that move to that host would be sent to the program. End it (a \
             QEMU that waits for a migration ends with it), or give that host other `carry-ports` \
             in the peers file, on all hosts, and repeat this command there",
            list.join(", ")
        )
    })
}

/// The address and port of a listening socket in a line of `/proc/net/tcp` or `tcp6`, if the
/// address is of IPv4 or unspecified.
fn listening(line: &str) -> Option<(IpAddr, u16)> {
    let mut words = line.split_whitespace();
    let local = words.nth(1)?;
    if words.nth(1)? != LISTENS {
        return None;
    }
    let (address, port) = local.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let address: IpAddr = match address.len() {
        8 => Ipv4Addr::from(u32::from_str_radix(address, 16).ok()?.swap_bytes()).into(),
        _ if address.bytes().all(|digit| digit == b'0') => Ipv4Addr::UNSPECIFIED.into(),
        _ => return None,
    };
    Some((address, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: Lines = Lines {
        host: Ipv4Addr::new(127, 7, 0, 1),
        address: IpAddr::V4(Ipv4Addr::LOCALHOST),
        ports: 49152..=49215,
    };

    #[test]
    fn a_host_that_encrypts_by_qemu_is_told() {
        assert_eq!(encrypted("#migrate_tls_force = 1\n"), None);
        assert_eq!(encrypted("migrate_tls_force = 0\n"), None);
        let found = find("migrate_tls_force = 1\n", &LINES, &[], true);
        assert!(found.iter().any(|one| one.contains("migrate_tls_force")), "{found:?}");
    }

    #[test]
    fn an_agent_that_carries_nothing_is_found() {
        assert!(find("", &LINES, &[], false).iter().any(|one| one.contains("has no [carry]")));
        assert!(!find("", &LINES, &[], true).iter().any(|one| one.contains("[carry]:")));
    }

    #[test]
    fn an_address_of_another_host_is_found() {
        let foreign = Lines { address: Ipv4Addr::new(192, 0, 2, 7).into(), ..LINES };
        let found = find("", &foreign, &[], true);
        assert!(
            found.iter().any(|one| one.starts_with("192.0.2.7 is not an address")),
            "{found:?}"
        );
    }

    #[test]
    fn the_kernels_tables_are_read() {
        let head = "  sl  local_address rem_address   st tx_queue";
        assert_eq!(listening(head), None);
        let everywhere = "   0: 00000000:C000 00000000:0000 0A 00000000:00000000 00:0";
        let one = "   1: 0200077F:C001 00000000:0000 0A 00000000:00000000 00:0";
        let connected = "   2: 0100007F:C002 0100007F:1F90 01 00000000:00000000 00:0";
        let six = format!("   3: {}:C003 {}:0000 0A 0:0", "0".repeat(32), "0".repeat(32));
        let own = format!("   4: {}01000000:C004 {}:0000 0A 0:0", "0".repeat(24), "0".repeat(32));
        let all = [everywhere, one, connected, &six, &own].map(listening);
        let v4 = |a, b, c, d| IpAddr::from([a, b, c, d]);
        assert_eq!(all[0], Some((v4(0, 0, 0, 0), 0xc000)));
        assert_eq!(all[1], Some((v4(127, 7, 0, 2), 0xc001)));
        assert_eq!(all[2], None);
        assert_eq!(all[3], Some((v4(0, 0, 0, 0), 0xc003)));
        assert_eq!(all[4], None);
        let peer_ports = [49152..=49154, 49155..=49215];
        let said = taken(all.into_iter().flatten(), &peer_ports).unwrap();
        assert!(said.contains("on port 49152, 49155, where"), "{said}");
        let others = [49216..=49279, 49280..=49343];
        assert_eq!(taken(all.into_iter().flatten(), &others), None);
        assert_eq!(taken(std::iter::empty(), &peer_ports), None);
    }
}
