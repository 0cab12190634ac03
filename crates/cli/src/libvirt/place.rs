//! Which host this is, by the agent's file and the peers file.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::problem::Problem;

/// Loopback addresses that stand for hosts begin so.
const LOOPBACK: [u8; 2] = [127, 7];
/// What libvirt takes if nobody says otherwise, and so does an agent.
const PORTS: [u16; 2] = [49152, 49215];

/// A host's place among the others.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Its name.
    pub(crate) name: String,
    /// The loopback address that stands for it, on every other host.
    pub(crate) loopback: Ipv4Addr,
    /// Where its QEMUs wait for VMs.
    pub(crate) address: IpAddr,
    /// At which ports, and at which agents stand for other hosts.
    pub(crate) ports: RangeInclusive<u16>,
    /// Whether its agent carries what others command.
    pub(crate) carries: bool,
}

/// What matters here of the agent's file.
#[derive(Deserialize)]
struct AgentFile {
    name: Option<String>,
    peers: Option<PathBuf>,
    carry: Option<Carry>,
}

#[derive(Deserialize)]
struct Carry {
    address: Option<IpAddr>,
    ports: Option<[u16; 2]>,
}

/// What matters here of the peers file.
#[derive(Deserialize)]
struct PeersFile {
    #[serde(default)]
    host: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Entry {
    name: String,
    address: SocketAddr,
    carry_address: Option<Ipv4Addr>,
}

impl Place {
    /// As the agent's file says, and the peers file that it names.
    pub(crate) fn read(agent_file: &Path) -> Result<Self, Problem> {
        let agent: AgentFile = parse(agent_file)?;
        let (Some(name), Some(peers)) = (agent.name, agent.peers) else {
            return Err(Problem::Typed(format!(
                "{} has no `name` or no `peers`: libvirt is led to other hosts by this host's \
                 place in the peers file",
                agent_file.display()
            )));
        };
        let peers = agent_file.parent().unwrap_or(Path::new("")).join(peers);
        let file: PeersFile = parse(&peers)?;
        let (loopback, own) = among(&file.host, &name).ok_or_else(|| {
            Problem::Typed(format!(
                "{} has no host `{name}`, which this host is by {}: add it, in the same place on \
                 all hosts",
                peers.display(),
                agent_file.display()
            ))
        })?;
        let carries = agent.carry.is_some();
        let carry = agent.carry.unwrap_or(Carry { address: None, ports: None });
        let [first, last] = carry.ports.unwrap_or(PORTS);
        if first == 0 || first > last {
            return Err(Problem::Typed(format!(
                "{}: ports of [carry]: [{first}, {last}] is no range such as [{}, {}]",
                agent_file.display(),
                PORTS[0],
                PORTS[1]
            )));
        }
        let address = carry.address.unwrap_or(own);
        Ok(Self { name, loopback, address, ports: first..=last, carries })
    }
}

/// What stands for a host on others, and its own address.
fn among(hosts: &[Entry], name: &str) -> Option<(Ipv4Addr, IpAddr)> {
    let nth = hosts.iter().position(|host| host.name == name)?;
    let own = hosts.get(nth)?;
    Some((own.carry_address.or_else(|| loopback(nth))?, own.address.ip()))
}

/// What stands for the host in this place, from 0 on.
fn loopback(nth: usize) -> Option<Ipv4Addr> {
    let [high, low] = u16::try_from(nth).ok()?.checked_add(1)?.to_be_bytes();
    Some(Ipv4Addr::new(LOOPBACK[0], LOOPBACK[1], high, low))
}

fn parse<T: DeserializeOwned>(path: &Path) -> Result<T, Problem> {
    let reading = |source| Problem::Local { what: format!("reading {}", path.display()), source };
    let text = fs::read_to_string(path).map_err(reading)?;
    toml::from_str(&text).map_err(|error| {
        let line = error.span().map_or(0, |span| text.get(..span.start).map_or(0, newlines)) + 1;
        Problem::Typed(format!("{}:{line}: {}", path.display(), error.message()))
    })
}

fn newlines(text: &str) -> usize {
    text.matches('\n').count()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEERS: &str = "[[host]]\nname = 'host-a'\naddress = '10.0.0.1:7800'\n\
                         [[host]]\nname = 'host-b'\naddress = '10.0.0.2:7800'\nrack = 'r1'\n\
                         [[host]]\nname = 'host-c'\naddress = '10.0.0.3:7800'\n\
                         carry-address = '127.9.0.1'\n";

    fn read(agent: &str, peers: &str) -> Result<Place, String> {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("agent.toml"), agent).unwrap();
        fs::write(dir.path().join("peers.toml"), peers).unwrap();
        let place = Place::read(&dir.path().join("agent.toml"));
        place.map_err(|error| error.to_string().replace(&dir.path().display().to_string(), ""))
    }

    #[test]
    fn a_host_is_known_by_its_place_or_by_what_is_said_of_it() {
        let place = |name: &str, loopback: [u8; 4], address: [u8; 4], carries| Place {
            name: name.to_owned(),
            loopback: loopback.into(),
            address: address.into(),
            ports: 49152..=49215,
            carries,
        };
        let agent = |name, more| format!("name = '{name}'\npeers = 'peers.toml'\n{more}");
        let plain = place("host-b", [127, 7, 0, 2], [10, 0, 0, 2], false);
        assert_eq!(read(&agent("host-b", "pool-mib = 64"), PEERS), Ok(plain));
        let named = place("host-c", [127, 9, 0, 1], [10, 0, 0, 3], true);
        assert_eq!(read(&agent("host-c", "[carry]\nsockets = 9"), PEERS), Ok(named));
        let more = "[carry]\naddress = '10.1.0.1'\nports = [5000, 5009]";
        let told = place("host-a", [127, 7, 0, 1], [10, 1, 0, 1], true);
        let told = Place { ports: 5000..=5009, ..told };
        assert_eq!(read(&agent("host-a", more), PEERS), Ok(told));
        assert_eq!(loopback(255), Some(Ipv4Addr::new(127, 7, 1, 0)));
        assert_eq!(loopback(usize::MAX), None);
        assert_eq!(loopback(65_535), None);
    }

    #[test]
    fn what_is_missing_is_said() {
        for (agent, peers, says) in [
            ("name = 'host-a'", PEERS, "/agent.toml has no `name` or no `peers`"),
            ("name = 'host-d'\npeers = 'peers.toml'", PEERS, "/peers.toml has no host `host-d`"),
            ("name = 'host-a'\npeers = 'none.toml'", PEERS, "reading /none.toml: "),
            ("name = 'host-a'\npeers = 'peers.toml'", "[[host]]\n\nname = 1", "/peers.toml:3: "),
            ("name = ", PEERS, "/agent.toml:1: "),
            (
                "name = 'host-a'\npeers = 'peers.toml'\n[carry]\nports = [9, 8]",
                PEERS,
                "/agent.toml: ports of [carry]: [9, 8] is no range",
            ),
        ] {
            let error = read(agent, peers).unwrap_err();
            assert!(error.starts_with(says), "{agent}: {error}");
        }
    }
}
