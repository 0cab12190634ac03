//! This host's place in the cluster, from the agent's file and the peers file.

use std::net::{IpAddr, Ipv4Addr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use agent::config::carry::{ADDRESS_DEFAULT, check_address};
use agent::config::{PeerEntry, file, parse_peers};
use client::Problem;
use serde::Deserialize;

/// A host's place in the cluster.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ClusterHost {
    /// Its name.
    pub(crate) name: String,
    /// The loopback address that stands for it, on every other host.
    pub(crate) loopback: Ipv4Addr,
    /// The address at which its QEMUs wait for VMs.
    pub(crate) address: IpAddr,
    /// Its address for other hosts.
    pub(crate) network: IpAddr,
    /// The ports at which they wait, which no other host has.
    pub(crate) ports: RangeInclusive<u16>,
    /// The ports at which its agent stands for the other hosts.
    pub(crate) peer_ports: Vec<RangeInclusive<u16>>,
    /// Whether its agent carries migrations that others command.
    pub(crate) carries: bool,
}

/// The relevant part of the agent's file.
#[derive(Deserialize)]
struct AgentFile {
    name: Option<String>,
    peers: Option<PathBuf>,
    carry: Option<Carry>,
}

#[derive(Deserialize)]
struct Carry {
    address: Option<IpAddr>,
}

impl ClusterHost {
    /// Reads the agent's file, and the peers file that it names.
    pub(crate) fn read(agent_file: &Path) -> Result<Self, Problem> {
        let agent: AgentFile = file::parse(agent_file, &file::read(agent_file)?)?;
        let (Some(name), Some(peers)) = (agent.name, agent.peers) else {
            return Err(Problem::Typed(format!(
                "{} has no `name` or no `peers`: the address at which libvirt on other hosts \
                 reaches this host follows from its position in the peers file",
                agent_file.display()
            )));
        };
        let peers = agent_file.parent().unwrap_or(Path::new("")).join(peers);
        let hosts = parse_peers(&peers, &file::read(&peers)?)?;
        let own = hosts.iter().find(|host| host.name == name);
        let (own, loopback, ports) = own.and_then(waits_at).ok_or_else(|| {
            Problem::Typed(format!(
                "{} has no host `{name}`, which is this host's name in {}: add it, at the same \
                 position on all hosts",
                peers.display(),
                agent_file.display()
            ))
        })?;
        let carries = agent.carry.is_some();
        let address = agent.carry.and_then(|carry| carry.address).unwrap_or(ADDRESS_DEFAULT);
        check_address(address)
            .map_err(|why| Problem::Typed(format!("{}: [carry]: {why}", agent_file.display())))?;
        let others = hosts.iter().filter(|host| host.name != name);
        let peer_ports = others.filter_map(waits_at).map(|(.., ports)| ports).collect();
        let network = own.address.ip();
        Ok(Self { name, loopback, address, network, ports, peer_ports, carries })
    }
}

/// The address that stands for a host on others, and its ports.
fn waits_at(host: &PeerEntry) -> Option<(&PeerEntry, Ipv4Addr, RangeInclusive<u16>)> {
    let [first, last] = host.carry_ports?;
    Some((host, host.carry_address?, first..=last))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const PEERS: &str = "[[host]]\nname = 'host-a'\naddress = '10.0.0.1:7800'\n\
                         [[host]]\nname = 'host-b'\naddress = '10.0.0.2:7800'\nrack = 'r1'\n\
                         [[host]]\nname = 'host-c'\naddress = '10.0.0.3:7800'\n\
                         carry-address = '127.9.0.1'\ncarry-ports = [5000, 5009]\n";

    /// The hosts' addresses there.
    const PEERS_AT: [[u8; 4]; 3] = [[10, 0, 0, 1], [10, 0, 0, 2], [10, 0, 0, 3]];

    fn read(agent: &str, peers: &str) -> Result<ClusterHost, String> {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("agent.toml"), agent).unwrap();
        fs::write(dir.path().join("peers.toml"), peers).unwrap();
        let place = ClusterHost::read(&dir.path().join("agent.toml"));
        place.map_err(|error| error.to_string().replace(&dir.path().display().to_string(), ""))
    }

    #[test]
    fn a_hosts_addresses_follow_from_its_place_or_its_settings() {
        let ranges = [49152..=49215, 49216..=49279, 5000..=5009];
        let place = |nth: usize, loopback: [u8; 4], address: [u8; 4], carries| {
            let network = PEERS_AT[nth].into();
            let mut peer_ports = ranges.to_vec();
            let ports = peer_ports.remove(nth);
            let name = ["host-a", "host-b", "host-c"][nth].to_owned();
            let (loopback, address) = (loopback.into(), address.into());
            ClusterHost { name, loopback, address, network, ports, peer_ports, carries }
        };
        let agent = |name, more| format!("name = '{name}'\npeers = 'peers.toml'\n{more}");
        let plain = place(1, [127, 7, 0, 2], [127, 6, 0, 1], false);
        assert_eq!(read(&agent("host-b", "pool-mib = 64"), PEERS), Ok(plain));
        let named = place(2, [127, 9, 0, 1], [127, 6, 0, 1], true);
        assert_eq!(read(&agent("host-c", "[carry]\nsockets = 9"), PEERS), Ok(named));
        let more = "[carry]\naddress = '10.1.0.1'";
        let told = place(0, [127, 7, 0, 1], [10, 1, 0, 1], true);
        assert_eq!(read(&agent("host-a", more), PEERS), Ok(told));
    }

    #[test]
    fn missing_and_wrong_settings_are_reported() {
        for (agent, peers, says) in [
            ("name = 'host-a'", PEERS, "/agent.toml has no `name` or no `peers`"),
            ("name = 'host-d'\npeers = 'peers.toml'", PEERS, "/peers.toml has no host `host-d`"),
            ("name = 'host-a'\npeers = 'none.toml'", PEERS, "reading /none.toml: "),
            ("name = 'host-a'\npeers = 'peers.toml'", "[[host]]\n\nname = 1", "/peers.toml:3: "),
            ("name = ", PEERS, "/agent.toml:1: "),
            (
                "name = 'host-a'\npeers = 'peers.toml'\n[carry]\naddress = '127.0.0.1'",
                PEERS,
                "/agent.toml: [carry]: address: 127.0.0.1 can't be migration_address",
            ),
            (
                "name = 'host-c'\npeers = 'peers.toml'",
                &PEERS.replace("[5000, 5009]", "[9, 8]"),
                "/peers.toml: host `host-c`: carry-ports [9, 8] is no range",
            ),
        ] {
            let error = read(agent, peers).unwrap_err();
            assert!(error.starts_with(says), "{agent}: {error}");
        }
    }
}
