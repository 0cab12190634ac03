//! A third host for a VM's clients, joined to the others by a bridge, so that a VM keeps its
//! address wherever it runs. Nothing here is shaped, and no migration uses it.

use std::net::{IpAddr, Ipv4Addr};

use super::Hosts;
use super::host::Host;
use crate::error::Result;
use crate::program;

const CLIENTS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 78, 0, 1));
const BRIDGE: &str = "vmbr";
const TAP: &str = "vmtap";
const UPLINK: &str = "uplink";

/// The host of the clients. Dropping it removes it.
#[derive(Debug)]
pub struct Outside {
    /// Clients run here.
    pub host: Host,
}

impl Outside {
    /// Its address on the link, always the same: a guest that goes on from a snapshot knows it.
    pub const MAC: &str = "52:54:00:77:00:fe";

    /// Makes the host, and on each other host a bridge with a tap device for a VM.
    ///
    /// # Errors
    /// If `ip` fails.
    pub fn join(hosts: &Hosts) -> Result<Self> {
        let name = format!("{}c", hosts.a.name.trim_end_matches('a'));
        let outside = Host::new(&name, vec![CLIENTS], false)?;
        outside.ip(&["link", "add", BRIDGE, "address", Self::MAC, "type", "bridge"])?;
        outside.ip(&["addr", "add", &format!("{CLIENTS}/24"), "dev", BRIDGE])?;
        outside.ip(&["link", "set", BRIDGE, "up"])?;
        for (host, port) in [(&hosts.a, "to-a"), (&hosts.b, "to-b")] {
            program::output(program::command("ip").args([
                "link", "add", UPLINK, "netns", &host.name, "type", "veth", "peer", "name", port,
                "netns", &name,
            ]))?;
            outside.ip(&["link", "set", port, "master", BRIDGE, "up"])?;
            host.ip(&["link", "add", BRIDGE, "type", "bridge"])?;
            host.ip(&["tuntap", "add", "dev", TAP, "mode", "tap"])?;
            for device in [UPLINK, TAP] {
                host.ip(&["link", "set", device, "master", BRIDGE, "up"])?;
            }
            host.ip(&["link", "set", BRIDGE, "up"])?;
        }
        // Packets to a stopped VM are lost. The duration of that should show, not TCP's patience.
        let net = format!("{}/24", Ipv4Addr::new(10, 78, 0, 0));
        outside.ip(&["route", "change", &net, "dev", BRIDGE, "rto_min", "20ms"])?;
        Ok(Self { host: outside })
    }

    /// QEMU's arguments for the VM's NIC, the same on both hosts.
    #[must_use]
    pub fn arguments() -> Vec<String> {
        let netdev = format!("tap,id=outside,ifname={TAP},script=no,downscript=no");
        let device = "virtio-net-pci,netdev=outside,mac=52:54:00:77:00:01,romfile=";
        ["-netdev", &netdev, "-device", device].map(str::to_owned).to_vec()
    }
}
