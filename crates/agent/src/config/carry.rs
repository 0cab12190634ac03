//! `[carry]`: migrations that others command, such as libvirt.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;

use api::{Audit, BitRate, Compress, FromStorage, ReadDisks, Share, Sharing, Slowing};
use engine::CarryRequest;
use serde::Deserialize;

use super::error::ConfigError;
use super::peers::PeerEntry;

/// The default address at which QEMUs wait for VMs.
///
/// A waiting QEMU loads what the first connection sends, and only this host's agent connects. On all
/// hosts it is the same, so that one firewall rule fits all. libvirt refuses 127.0.0.1.
pub const ADDRESS_DEFAULT: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 6, 0, 1));
/// The default directory of migration sockets, except for Proxmox VE.
const DIRECTORY_DEFAULT: &str = "/run/droveway/migrate";
/// The first port at which QEMUs wait: libvirt's default.
const PORTS_FROM: u16 = 49152;
/// Ports of each host by default, as with libvirt.
const PORTS_EACH: u16 = 64;
/// Each port costs the agent an open file, and those are limited.
const PORTS_MAX: u16 = 1024;
const SOCKETS_DEFAULT: u8 = 4;

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(crate) struct Section {
    address: Option<IpAddr>,
    directory: Option<PathBuf>,
    sockets: Option<u8>,
    qemu_user: Option<Users>,
    lanes: Option<u16>,
    downtime_ms: Option<u64>,
    compress: Compress,
    audit: Audit,
    throttle: Option<String>,
    throttle_floor: Option<f64>,
    share: Share,
    share_domain: Option<String>,
    storage: ReadDisks,
    storage_limit: Option<String>,
    manager: Manager,
}

/// The users that QEMUs run as.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "a user, or a list of users, in quotes")]
enum Users {
    One(String),
    Several(Vec<String>),
}

impl Users {
    fn into_list(self) -> Vec<String> {
        match self {
            Self::One(user) => vec![user],
            Self::Several(users) => users,
        }
    }
}

/// How migrations that others command are carried.
#[derive(Clone, Debug)]
pub struct Carry {
    /// The address at which this host's QEMUs wait for VMs.
    pub address: IpAddr,
    /// The address that stands for this host on all others.
    pub stands_for: Option<Ipv4Addr>,
    /// The ports at which this host's QEMUs wait for VMs; may be empty unless libvirt moves them.
    pub ports: std::ops::RangeInclusive<u16>,
    /// The directory of the sockets at which QEMUs wait too.
    pub directory: PathBuf,
    /// The number of sockets for each other host.
    pub sockets: u8,
    /// The users that QEMUs run as; only these and root may connect. Sockets and their directory
    /// belong to the first.
    pub qemu_users: Vec<String>,
    /// The settings of each migration.
    pub request: CarryRequest,
    /// The program that moves VMs on this host.
    pub manager: Manager,
}

/// The program that moves VMs, which determines how they leave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Manager {
    /// libvirt, or any other program that is configured to connect to the agent's listeners.
    #[default]
    Libvirt,
    /// KubeVirt: the listeners take the place of sockets in its VMs' pods.
    Kubevirt,
    /// Proxmox VE: the listeners take the place of its ssh tunnels' sockets.
    Proxmox,
}

impl Manager {
    /// The default directory of migration sockets.
    fn directory(self) -> &'static str {
        match self {
            Self::Libvirt | Self::Kubevirt => DIRECTORY_DEFAULT,
            Self::Proxmox => managers::proxmox::DIRECTORY,
        }
    }
}

impl std::fmt::Display for Manager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Libvirt => "libvirt",
            Self::Kubevirt => "KubeVirt",
            Self::Proxmox => "Proxmox VE",
        })
    }
}

impl Section {
    /// Resolves the section for a host that has the entry `own` in the peers file.
    pub(super) fn understood(
        self,
        own: Option<&PeerEntry>,
        qemu_user: Option<&String>,
    ) -> Result<Carry, ConfigError> {
        let wrong = |message: String| Err(ConfigError::Carry(message));
        let ports = own.and_then(|own| own.carry_ports);
        let stands_for = own.and_then(|own| own.carry_address);
        let is_listed = own.is_some();
        let address = self.address.unwrap_or(ADDRESS_DEFAULT);
        check_address(address).map_err(ConfigError::Carry)?;
        let [first, last] = match ports {
            Some(ports) => ports,
            // An empty range: of the managers only libvirt uses ports.
            None if self.manager != Manager::Libvirt && is_listed => [1, 0],
            None => {
                return wrong(
                    "this host has no ports at which its QEMUs wait for VMs: add it to the peers \
                     file, or give it `carry-ports` there"
                        .to_owned(),
                );
            }
        };
        let directory = self.directory.unwrap_or_else(|| self.manager.directory().into());
        if !directory.is_absolute() {
            return wrong(format!("directory: {} is not an absolute path", directory.display()));
        }
        if self.downtime_ms == Some(0) {
            return wrong("downtime-ms: 0 can't be kept; allow 1 at least".to_owned());
        }
        let sharing = Sharing { share: self.share, domain: self.share_domain, together: false };
        if let Err(error) = sharing.check() {
            return wrong(format!("share-domain: {error}"));
        }
        let limit = self.storage_limit.as_deref().map(str::parse::<BitRate>).transpose();
        let limit = limit.map_err(|error| ConfigError::Carry(format!("storage-limit: {error}")))?;
        let defaults = CarryRequest::default();
        let request = CarryRequest {
            lanes: self.lanes,
            downtime_ms: self.downtime_ms.unwrap_or(defaults.downtime_ms),
            compress: self.compress,
            audit: self.audit,
            slowing: slowing(self.throttle.as_deref(), self.throttle_floor)?,
            sharing,
            storage: FromStorage { read: self.storage, limit, ..FromStorage::default() },
            ..defaults
        };
        Ok(Carry {
            address,
            stands_for,
            ports: first..=last,
            directory,
            sockets: self.sockets.unwrap_or(SOCKETS_DEFAULT),
            qemu_users: self
                .qemu_user
                .map_or_else(|| qemu_user.cloned().into_iter().collect(), Users::into_list),
            request,
            manager: self.manager,
        })
    }
}

/// The settings as on the command line, with the floor in percent.
fn slowing(throttle: Option<&str>, floor: Option<f64>) -> Result<Slowing, ConfigError> {
    let wrong = |error: String| ConfigError::Carry(error);
    let mut slowing = Slowing::default();
    if let Some(throttle) = throttle {
        slowing.throttle = throttle.parse().map_err(|error| wrong(format!("throttle: {error}")))?;
    }
    if let Some(percent) = floor {
        slowing.floor = percent / 100.0;
    }
    slowing.check().map_err(|error| wrong(format!("throttle-floor: {error}")))?;
    Ok(slowing)
}

/// The address that stands, on every other host, for the host at this place in the peers
/// file, from 0.
pub(super) fn stands_for(place: usize) -> Option<Ipv4Addr> {
    let place = u16::try_from(place).ok()?.checked_add(1)?;
    let [high, low] = place.to_be_bytes();
    Some(Ipv4Addr::new(127, 7, high, low))
}

/// The ports at which the QEMUs of the host at this place, from 0, wait.
///
/// Each host has its own ports: libvirt takes only ports at which nothing listens on its own host,
/// at any address, and there the agent listens at the ports of all other hosts.
pub(super) fn ports_of(place: usize) -> Option<[u16; 2]> {
    let first = u16::try_from(place).ok()?.checked_mul(PORTS_EACH)?.checked_add(PORTS_FROM)?;
    Some([first, first.checked_add(PORTS_EACH - 1)?])
}

/// Checks that QEMUs can wait at this address.
///
/// # Errors
/// If libvirt refuses it: its driver for QEMU then doesn't start.
pub fn check_address(address: IpAddr) -> Result<(), String> {
    let localhost = [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()];
    if address.is_unspecified() || localhost.contains(&address) {
        return Err(format!(
            "address: {address} can't be migration_address in qemu.conf; leave it out, and QEMUs \
             wait at {ADDRESS_DEFAULT}"
        ));
    }
    Ok(())
}

/// Checks that these can be a host's ports; an error has ports that can be.
pub(super) fn check_ports([first, last]: [u16; 2]) -> Result<(), String> {
    if first == 0 || first > last || last - first >= PORTS_MAX {
        return Err(format!(
            "carry-ports [{first}, {last}] is no range of at most {PORTS_MAX} ports, such as \
             [{PORTS_FROM}, {}]",
            PORTS_FROM + PORTS_EACH - 1
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section(text: &str) -> Result<Carry, String> {
        section_at(1, text)
    }

    /// The same for the host at this place in the peers file.
    fn section_at(place: usize, text: &str) -> Result<Carry, String> {
        let section: Section = toml::from_str(text).map_err(|error| error.to_string())?;
        let own = PeerEntry {
            name: "a".to_owned(),
            rack: None,
            address: "10.77.0.1:7450".parse().unwrap(),
            nics: Vec::new(),
            carry_address: None,
            carry_ports: ports_of(place),
            uplink: None,
        };
        let understood = section.understood(Some(&own), Some(&"qemu".to_owned()));
        understood.map_err(|error| error.to_string())
    }

    #[test]
    fn settings_that_are_left_out_have_libvirts_defaults() {
        let carry = section("").unwrap();
        // Only this host reaches it.
        assert_eq!(carry.address, IpAddr::from([127, 6, 0, 1]));
        assert!(carry.address.is_loopback());
        assert_eq!((carry.ports, carry.sockets), (49216..=49279, 4));
        assert_eq!(carry.directory, PathBuf::from(DIRECTORY_DEFAULT));
        assert_eq!(carry.qemu_users, ["qemu"]);
        let carry = section("qemu-user = [\"libvirt-qemu\", \"1001\"]").unwrap();
        assert_eq!(carry.qemu_users, ["libvirt-qemu", "1001"]);
        let carry = section("address = \"10.77.0.1\"").unwrap();
        assert_eq!(carry.address, IpAddr::from([10, 77, 0, 1]));
        let carry = section("qemu-user = \"libvirt-qemu\"\naudit = \"deep\"").unwrap();
        assert_eq!(carry.request.audit, Audit::Deep);
        assert_eq!(carry.qemu_users, ["libvirt-qemu"]);
        assert_eq!(carry.request.slowing, Slowing::default());
        let carry = section("throttle = \"0.6\"\nthrottle-floor = 5").unwrap();
        assert_eq!(carry.request.slowing.throttle, api::Throttle::Ratio(0.6));
        assert!((carry.request.slowing.floor - 0.05).abs() < 1e-9);
        assert_eq!(carry.request.sharing, Sharing::default());
        assert_eq!(carry.manager, Manager::Libvirt);
        let carry = section("manager = \"proxmox\"").unwrap();
        assert_eq!((carry.manager, carry.directory), (Manager::Proxmox, "/run/qemu-server".into()));
        let carry = section("share = \"host\"\nshare-domain = \"red\"").unwrap();
        assert_eq!(
            (carry.request.sharing.share, carry.request.sharing.domain),
            (Share::Host, Some("red".into()))
        );
        assert_eq!(carry.request.storage, FromStorage::default());
        let carry = section("storage-limit = \"2G\"").unwrap();
        assert_eq!(carry.request.storage.limit, BitRate::from_bits(2_000_000_000));
        let carry = section("share = \"rack\"\nstorage = \"on\"").unwrap();
        assert_eq!(
            (carry.request.sharing.share, carry.request.storage.read),
            (Share::Rack, ReadDisks::On)
        );
    }

    #[test]
    fn invalid_settings_are_refused() {
        let wrong = [
            ("ports = [5000, 5001]", "ports"),
            ("directory = \"run\"", "absolute"),
            ("downtime-ms = 0", "downtime-ms"),
            ("throttle = \"on\"", "throttle: `on` is not auto, off"),
            ("throttle-floor = 0", "throttle-floor"),
            ("throttle-floor = 101", "throttle-floor"),
            ("storage = \"yes\"", "unknown variant"),
            ("storage-limit = \"fast\"", "storage-limit: `fast` is not a rate"),
            ("storage-limit = \"0\"", "storage-limit: `0` is not a rate"),
            ("qemu-user = 1001", "a user, or a list of users, in quotes"),
            ("share = \"all\"", "unknown variant"),
            ("manager = \"xen\"", "unknown variant `xen`"),
            ("share-domain = \"a b\"", "share-domain: a sharing domain has"),
            ("address = \"0.0.0.0\"", "migration_address"),
            ("address = \"127.0.0.1\"", "migration_address"),
            ("address = \"::1\"", "migration_address"),
            ("adress = \"10.0.0.1\"", "adress"),
        ];
        for (text, part) in wrong {
            let error = section(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn only_libvirts_hosts_need_ports() {
        let error = section_at(256, "").unwrap_err();
        assert!(error.contains("carry-ports"), "{error}");
        for manager in ["kubevirt", "proxmox"] {
            let carry = section_at(256, &format!("manager = \"{manager}\"")).unwrap();
            assert!(carry.ports.is_empty(), "{manager}: {:?}", carry.ports);
        }
        assert_eq!(section("manager = \"kubevirt\"").unwrap().ports, 49216..=49279);
    }

    #[test]
    fn each_host_has_an_address_on_all_others() {
        let of = |place| stands_for(place).map(|address| address.to_string());
        assert_eq!(of(0).as_deref(), Some("127.7.0.1"));
        assert_eq!(of(255).as_deref(), Some("127.7.1.0"));
        assert_eq!(of(65_535), None);
    }

    #[test]
    fn no_two_hosts_have_a_port_in_common() {
        assert_eq!(ports_of(0), Some([49152, 49215]));
        assert_eq!(ports_of(1), Some([49216, 49279]));
        assert_eq!(ports_of(255), Some([65472, 65535]));
        assert_eq!(ports_of(256), None);
        for wrong in [[9, 8], [0, 9], [1, 65535]] {
            assert!(check_ports(wrong).is_err(), "{wrong:?}");
        }
        assert_eq!(check_ports([5000, 5000]), Ok(()));
    }
}
