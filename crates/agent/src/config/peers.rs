//! The peers file: every host of the cluster, the same file on all of them.

use std::collections::{BTreeMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;

use api::BitRate;
use serde::{Deserialize, Deserializer};

use super::carry::{check_ports, ports_of, stands_for};
use super::error::ConfigError;
use super::file;

/// One host.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PeerEntry {
    /// Its name.
    pub name: String,
    /// The rack it stands in.
    #[serde(default)]
    pub rack: Option<String>,
    /// The address at which its agent listens.
    pub address: SocketAddr,
    /// Its data NICs, each reached at the port of `address`.
    #[serde(default)]
    pub nics: Vec<IpAddr>,
    /// The loopback address that stands for it on all other hosts, for carried migrations.
    ///
    /// The default follows from its place in the file.
    #[serde(default)]
    pub carry_address: Option<Ipv4Addr>,
    /// The first and the last port at which its QEMUs wait for carried migrations.
    ///
    /// No other host may have any of these ports. The default follows from its place in the file.
    #[serde(default)]
    pub carry_ports: Option<[u16; 2]>,
    /// What a gang may use of its rack's uplink, in each direction.
    #[serde(skip)]
    pub uplink: Option<BitRate>,
}

impl PeerEntry {
    /// The addresses that it connects from.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        std::iter::once(self.address.ip()).chain(self.nics.iter().copied())
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    host: Vec<PeerEntry>,
    #[serde(default)]
    rack: Vec<RackEntry>,
}

/// One rack whose uplink gangs share.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RackEntry {
    name: String,
    #[serde(deserialize_with = "rate")]
    uplink: BitRate,
}

/// Deserializes a rate from the text that would be typed.
fn rate<'de, D: Deserializer<'de>>(from: D) -> Result<BitRate, D::Error> {
    String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
}

/// Reads the entry of the host with this name, if it has one, and all others.
pub(crate) fn read(
    path: &Path,
    name: &str,
) -> Result<(Option<PeerEntry>, Vec<PeerEntry>), ConfigError> {
    let all = parse(path, &file::read(path)?)?.into_iter();
    let (own, others): (Vec<_>, Vec<_>) = all.partition(|peer| peer.name == name);
    Ok((own.into_iter().next(), others))
}

/// Parses all entries of `text`, the contents of the peers file at `path`.
///
/// # Errors
/// If an agent would not start with it.
pub fn parse(path: &Path, text: &str) -> Result<Vec<PeerEntry>, ConfigError> {
    let mut file: File = file::parse(path, text)?;
    let mut names = HashSet::new();
    for entry in &file.host {
        if let Err(message) = check(entry, &mut names) {
            return Err(ConfigError::Peer {
                file: path.to_owned(),
                host: entry.name.clone(),
                message,
            });
        }
    }
    let uplinks = uplinks(&file).map_err(|(rack, message)| {
        let (file, message) = (path.to_owned(), message.to_owned());
        ConfigError::Rack { file, rack, message }
    })?;
    for (place, entry) in file.host.iter_mut().enumerate() {
        entry.uplink = entry.rack.as_ref().and_then(|rack| uplinks.get(rack).copied());
        entry.carry_address = entry.carry_address.or_else(|| stands_for(place));
        entry.carry_ports = entry.carry_ports.or_else(|| ports_of(place));
    }
    if let Some((host, message)) = shared_ports(&file.host) {
        return Err(ConfigError::Peer { file: path.to_owned(), host, message });
    }
    Ok(file.host)
}

/// The uplinks by rack, or the rack that is wrong, and why.
fn uplinks(file: &File) -> Result<BTreeMap<String, BitRate>, (String, &'static str)> {
    let mut uplinks = BTreeMap::new();
    for RackEntry { name, uplink } in &file.rack {
        if !file.host.iter().any(|host| host.rack.as_ref() == Some(name)) {
            return Err((name.clone(), "no host stands in it: write `rack` for its hosts"));
        }
        if uplinks.insert(name.clone(), *uplink).is_some() {
            return Err((name.clone(), "is listed twice: give each rack one entry"));
        }
    }
    Ok(uplinks)
}

/// The first host that shares a port with another, and what to do about it.
fn shared_ports(hosts: &[PeerEntry]) -> Option<(String, String)> {
    let with_ports = || hosts.iter().filter_map(|host| Some((host, host.carry_ports?)));
    with_ports().enumerate().find_map(|(nth, (host, [first, last]))| {
        let overlaps = |(_, [from, to]): &(&PeerEntry, [u16; 2])| *from <= last && first <= *to;
        let (other, [from, to]) = with_ports().take(nth).find(overlaps)?;
        let message = format!(
            "has the carry-ports [{first}, {last}], and {} [{from}, {to}]: libvirt finds no free \
             port where the agent listens at the same ports for another host; give each host its \
             own ports",
            other.name
        );
        Some((host.name.clone(), message))
    })
}

fn check<'f>(entry: &'f PeerEntry, names: &mut HashSet<&'f str>) -> Result<(), String> {
    identity::check_name(&entry.name).map_err(|error| error.to_string())?;
    if !names.insert(&entry.name) {
        return Err("is listed twice: give each host one entry".to_owned());
    }
    if entry.address.port() == 0 || entry.address.ip().is_unspecified() {
        return Err(format!(
            "address {} can't be connected to: write the IP address and port where its agent \
             listens",
            entry.address
        ));
    }
    if entry.carry_address.is_some_and(|address| !address.is_loopback()) {
        return Err(
            "carry-address is not in 127.0.0.0/8: other hosts' agents listen at it for this \
             host"
                .to_owned(),
        );
    }
    if let Some(ports) = entry.carry_ports {
        check_ports(ports)?;
    }
    if entry.nics.iter().any(IpAddr::is_unspecified) {
        return Err("a nic is 0.0.0.0 or ::, write the card's own address".to_owned());
    }
    Ok(())
}
