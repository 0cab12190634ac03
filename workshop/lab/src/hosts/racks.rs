//! Racks of hosts, each joined by a switch, and a core that joins the switches.
//!
//! A switch is a bridge in a namespace of its own. A host's edge to its switch, and a switch's link
//! to the core, are veth pairs shaped by tbf at both ends, so each direction has its own rate and
//! its own count. All hosts are in one network, 10.79.0.0/16, with addresses 10.79.RACK.HOST.

mod switch;

use std::net::{IpAddr, Ipv4Addr};

use super::begin;
use super::host::Host;
use super::link::shape;
use super::namespace::nic_name;
use crate::error::{LabError, Result};
use switch::{Switch, pair, quiet};

/// The bridge between a host's VMs and its edge.
const VMS_BRIDGE: &str = "vms";
/// A switch's port to the core.
const UPLINK: &str = "core";
const RACKS_MAX: usize = 9;
const HOSTS_MAX: usize = 9;

/// Numbers of racks and hosts, and the rates of their links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Racks that VMs leave.
    pub source_racks: usize,
    /// Hosts in each of them.
    pub source_hosts: usize,
    /// Hosts in the rack that VMs go to.
    pub target_hosts: usize,
    /// Rate of a host's edge, each way.
    pub edge_mbit_per_s: u32,
    /// Rate of a rack's link to the core, each way.
    pub core_mbit_per_s: u32,
    /// Whether the first rack and the target rack have one more host each, with an edge as fast as
    /// the core, for other traffic across it.
    pub bystanders: bool,
}

impl Default for Layout {
    fn default() -> Self {
        Self {
            source_racks: 2,
            source_hosts: 2,
            target_hosts: 2,
            edge_mbit_per_s: 250,
            core_mbit_per_s: 1000,
            bystanders: false,
        }
    }
}

impl Layout {
    fn check(&self) -> Result<()> {
        let racks = 1..RACKS_MAX;
        let hosts = 1..HOSTS_MAX;
        let fits = racks.contains(&self.source_racks)
            && hosts.contains(&self.source_hosts)
            && hosts.contains(&self.target_hosts);
        if fits {
            return Ok(());
        }
        let text = format!("racks of 1 to {} hosts, 1 to {} of them", HOSTS_MAX - 1, RACKS_MAX - 1);
        Err(LabError::Unsupported(format!("the lab makes {text}, not {self:?}")))
    }
}

/// A host in a rack.
#[derive(Debug)]
pub struct RackHost {
    /// Its name in the peers file, such as `r1-h2`.
    pub name: String,
    /// Its rack's name, such as `r1`.
    pub rack: String,
    /// The host.
    pub host: Host,
}

/// A rack.
#[derive(Debug)]
struct Rack {
    name: String,
    hosts: Vec<RackHost>,
    bystander: Option<RackHost>,
    switch: Switch,
}

/// Source racks and a target rack. Dropping it removes all, and ends every
/// process on their hosts.
#[derive(Debug)]
pub struct Racks {
    /// The last one is the target.
    racks: Vec<Rack>,
    /// Their numbers and rates.
    pub layout: Layout,
    _core: Switch,
}

/// Bytes that crossed the core since it was made, headers included, each counted
/// once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Crossed {
    /// Sent by source racks.
    pub from_sources: u64,
    /// Sent by the target rack.
    pub from_target: u64,
}

impl Crossed {
    /// Both ways.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.from_sources + self.from_target
    }
}

impl std::ops::Sub for Crossed {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            from_sources: self.from_sources.saturating_sub(earlier.from_sources),
            from_target: self.from_target.saturating_sub(earlier.from_target),
        }
    }
}

/// Bytes that crossed hosts' edges since they were made, headers included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Edges {
    /// Sent by hosts in source racks.
    pub from_sources: u64,
    /// Delivered to hosts in source racks.
    pub to_sources: u64,
    /// Sent by hosts in the target rack.
    pub from_target: u64,
    /// Delivered to hosts in the target rack.
    pub to_target: u64,
}

impl Edges {
    /// Bytes that hosts sent: each counted once, though it crosses two edges.
    #[must_use]
    pub fn sent(self) -> u64 {
        self.from_sources + self.from_target
    }
}

impl std::ops::Sub for Edges {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            from_sources: self.from_sources.saturating_sub(earlier.from_sources),
            to_sources: self.to_sources.saturating_sub(earlier.to_sources),
            from_target: self.from_target.saturating_sub(earlier.from_target),
            to_target: self.to_target.saturating_sub(earlier.to_target),
        }
    }
}

impl Racks {
    /// Makes the racks.
    ///
    /// # Errors
    /// If this isn't root, `ip` and `tc` fail, or there are too many.
    pub fn new(layout: Layout) -> Result<Self> {
        layout.check()?;
        let (_turn, prefix) = begin()?;
        let core = Switch::new(format!("{prefix}core"))?;
        let mut racks = Vec::new();
        for number in 1..=layout.source_racks + 1 {
            let is_target = number > layout.source_racks;
            let hosts = if is_target { layout.target_hosts } else { layout.source_hosts };
            let rack = Rack::new(&prefix, number, hosts, layout.edge_mbit_per_s)?;
            rack.switch.join(&core, UPLINK, &rack.name, layout.core_mbit_per_s)?;
            racks.push(rack);
        }
        let mut racks = Self { racks, layout, _core: core };
        if layout.bystanders {
            racks.add_bystander(&prefix, 1)?;
            racks.add_bystander(&prefix, layout.source_racks + 1)?;
        }
        Ok(racks)
    }

    fn add_bystander(&mut self, prefix: &str, number: usize) -> Result<()> {
        let mbit = self.layout.core_mbit_per_s;
        if let Some(rack) = self.racks.get_mut(number - 1) {
            rack.bystander = Some(rack.host(prefix, number, HOSTS_MAX, mbit)?);
        }
        Ok(())
    }

    fn source_racks(&self) -> &[Rack] {
        &self.racks[..self.layout.source_racks]
    }

    fn target_racks(&self) -> &[Rack] {
        &self.racks[self.layout.source_racks..]
    }

    /// The hosts that VMs leave: the first of each rack, then the second of each.
    #[must_use]
    pub fn sources(&self) -> Vec<&RackHost> {
        let nth = |nth| self.source_racks().iter().filter_map(move |rack| rack.hosts.get(nth));
        (0..self.layout.source_hosts).flat_map(nth).collect()
    }

    /// The hosts that VMs go to.
    #[must_use]
    pub fn targets(&self) -> Vec<&RackHost> {
        self.target_racks().iter().flat_map(|rack| &rack.hosts).collect()
    }

    /// All hosts, without bystanders.
    #[must_use]
    pub fn hosts(&self) -> Vec<&RackHost> {
        self.racks.iter().flat_map(|rack| &rack.hosts).collect()
    }

    /// The bystanders of the first rack and of the target rack.
    #[must_use]
    pub fn bystanders(&self) -> Option<[&Host; 2]> {
        let source = self.source_racks().first()?.bystander.as_ref()?;
        let target = self.target_racks().first()?.bystander.as_ref()?;
        Some([&source.host, &target.host])
    }

    /// Lets VMs reach each other over the hosts' own edges: on every host, a bridge takes the
    /// edge's place, with a tap device for each of these VMs, so that a VM finds its own on any
    /// host.
    ///
    /// # Errors
    /// If `ip` fails.
    pub fn join_vms(&self, vms: &[&str]) -> Result<()> {
        self.hosts().iter().try_for_each(|host| host.join_vms(vms))
    }

    /// Bytes that have crossed the core.
    ///
    /// # Errors
    /// If the counters can't be read.
    pub fn crossed(&self) -> Result<Crossed> {
        let sent = |racks: &[Rack]| {
            racks.iter().try_fold(0, |sum, rack| Ok::<_, LabError>(sum + rack.switch.sent(UPLINK)?))
        };
        Ok(Crossed {
            from_sources: sent(self.source_racks())?,
            from_target: sent(self.target_racks())?,
        })
    }

    /// Bytes that have crossed the edges, without bystanders'.
    ///
    /// # Errors
    /// If the counters can't be read.
    pub fn edges(&self) -> Result<Edges> {
        let of = |racks: &[Rack]| {
            let mut sum = (0, 0);
            for rack in racks {
                let (sent, delivered) = rack.edges()?;
                sum = (sum.0 + sent, sum.1 + delivered);
            }
            Ok::<_, LabError>(sum)
        };
        let (from_sources, to_sources) = of(self.source_racks())?;
        let (from_target, to_target) = of(self.target_racks())?;
        Ok(Edges { from_sources, to_sources, from_target, to_target })
    }
}

impl RackHost {
    /// QEMU's arguments for a VM's NIC, the same on all hosts; see [`Racks::join_vms`].
    #[must_use]
    pub fn nic_arguments(vm: &str, number: u8) -> Vec<String> {
        let netdev = format!("tap,id=vms,ifname={},script=no,downscript=no", tap(vm));
        let device = format!("virtio-net-pci,netdev=vms,mac=52:54:00:79:00:{number:02x},romfile=");
        ["-netdev", &netdev, "-device", &device].map(str::to_owned).to_vec()
    }

    fn join_vms(&self, vms: &[&str]) -> Result<()> {
        let (host, nic) = (&self.host, nic_name(0));
        host.ip(&["link", "add", VMS_BRIDGE, "type", "bridge", "stp_state", "0"])?;
        quiet(&host.name, VMS_BRIDGE)?;
        for vm in vms {
            host.ip(&["tuntap", "add", "dev", &tap(vm), "mode", "tap"])?;
            host.ip(&["link", "set", &tap(vm), "master", VMS_BRIDGE, "up"])?;
        }
        for address in &host.addresses {
            let address = format!("{address}/16");
            host.ip(&["addr", "del", &address, "dev", &nic])?;
            host.ip(&["addr", "add", &address, "dev", VMS_BRIDGE])?;
        }
        host.ip(&["link", "set", &nic, "master", VMS_BRIDGE])?;
        host.ip(&["link", "set", VMS_BRIDGE, "up"]).map(drop)
    }
}

fn tap(vm: &str) -> String {
    format!("tap-{vm}")
}

impl Rack {
    fn new(prefix: &str, number: usize, hosts: usize, edge_mbit: u32) -> Result<Self> {
        let name = format!("r{number}");
        let switch = Switch::new(format!("{prefix}{name}"))?;
        let mut rack = Self { name, hosts: Vec::new(), bystander: None, switch };
        for host in 1..=hosts {
            let host = rack.host(prefix, number, host, edge_mbit)?;
            rack.hosts.push(host);
        }
        Ok(rack)
    }

    /// Makes a host that is joined to the switch.
    fn host(&self, prefix: &str, rack: usize, number: usize, edge_mbit: u32) -> Result<RackHost> {
        let port = port(number);
        let octet = |number: usize| u8::try_from(number).unwrap_or(u8::MAX);
        let address: IpAddr = Ipv4Addr::new(10, 79, octet(rack), octet(number)).into();
        let namespace = format!("{prefix}{}{port}", self.name);
        let host = Host::new(&namespace, vec![address], true)?;
        let nic = nic_name(0);
        pair(&namespace, &nic, self.switch.namespace(), &port)?;
        host.ip(&["addr", "add", &format!("{address}/16"), "dev", &nic])?;
        host.ip(&["link", "set", &nic, "up"])?;
        shape(&namespace, &nic, edge_mbit)?;
        self.switch.attach(&port, edge_mbit)?;
        Ok(RackHost { name: format!("{}-{port}", self.name), rack: self.name.clone(), host })
    }

    /// Bytes sent by its hosts, and bytes delivered to them.
    fn edges(&self) -> Result<(u64, u64)> {
        let delivered = self.switch.all_sent()?;
        let mut sum = (0, 0);
        for (number, host) in (1..).zip(&self.hosts) {
            sum.0 += host.host.sent()?.bytes;
            sum.1 += delivered.get(&port(number)).copied().unwrap_or(0);
        }
        Ok(sum)
    }
}

fn port(number: usize) -> String {
    format!("h{number}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_crossed_since_is_a_difference() {
        let before = Crossed { from_sources: 10, from_target: 1 };
        let after = Crossed { from_sources: 110, from_target: 4 };
        assert_eq!((after - before).bytes(), 103);
        let edges = Edges { from_sources: 5, to_sources: 1, from_target: 2, to_target: 6 };
        assert_eq!((edges - Edges::default()).sent(), 7);
    }

    #[test]
    fn racks_without_hosts_are_refused() {
        for layout in [
            Layout { source_racks: 0, ..Layout::default() },
            Layout { source_hosts: HOSTS_MAX, ..Layout::default() },
            Layout { target_hosts: 0, ..Layout::default() },
        ] {
            assert!(layout.check().is_err(), "{layout:?}");
        }
        assert!(Layout::default().check().is_ok());
    }
}
