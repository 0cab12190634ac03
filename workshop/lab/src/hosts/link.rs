//! Links between two hosts: veth pairs, each shaped by tbf at both ends.

use super::Hosts;
use super::host::Host;
use super::namespace::{nic_name, tc};
use crate::error::Result;
use crate::program;

/// The links between two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// NICs of each host, each with a link of its own.
    pub nics: u8,
    /// Rate of each link; none for the machine's maximum.
    pub mbit_per_s: Option<u32>,
}

impl Link {
    /// One link.
    #[must_use]
    pub fn one(mbit_per_s: u32) -> Self {
        Self { nics: 1, mbit_per_s: Some(mbit_per_s) }
    }

    /// One link without a limit.
    #[must_use]
    pub fn unshaped() -> Self {
        Self { nics: 1, mbit_per_s: None }
    }

    pub(super) fn join(self, a: &Host, b: &Host) -> Result<()> {
        for nic in 0..usize::from(self.nics) {
            let name = nic_name(nic);
            program::output(program::command("ip").args([
                "link", "add", &name, "netns", &a.name, "type", "veth", "peer", "name", &name,
                "netns", &b.name,
            ]))?;
            for host in [a, b] {
                let address = format!("{}/24", host.addresses[nic]);
                host.ip(&["addr", "add", &address, "dev", &name])?;
                host.ip(&["link", "set", &name, "up"])?;
                if let Some(mbit) = self.mbit_per_s {
                    shape(&host.name, &name, mbit)?;
                }
            }
        }
        Ok(())
    }
}

impl Hosts {
    /// Loses all packets that a host sends, without an error. Packets of the other host still
    /// arrive.
    ///
    /// # Errors
    /// If `ip` fails.
    pub fn lose_packets_of(&self, host: &Host) -> Result<()> {
        self.each_nic(host, |nic, other| {
            let nobody = ["lladdr", "02:00:00:00:00:99", "nud", "permanent"];
            let neighbour = ["neigh", "replace", other, "dev", nic];
            host.ip(&[&neighbour[..], &nobody[..]].concat()).map(drop)
        })
    }

    /// Ends [`Hosts::lose_packets_of`].
    ///
    /// # Errors
    /// If `ip` fails.
    pub fn find_packets_of(&self, host: &Host) -> Result<()> {
        self.each_nic(host, |nic, other| host.ip(&["neigh", "del", other, "dev", nic]).map(drop))
    }

    /// Puts a slow link with a long queue behind a host.
    ///
    /// # Errors
    /// If `tc` fails.
    pub fn slow(&self, host: &Host, mbit: u32) -> Result<()> {
        self.each_nic(host, |nic, _| {
            let rate = format!("{mbit}mbit");
            let slow = ["rate", &rate, "burst", "16kb", "latency", "3s"];
            let args = ["qdisc", "replace", "dev", nic, "root", "tbf"];
            host.tc(&[&args[..], &slow[..]].concat()).map(drop)
        })
    }

    /// Ends [`Hosts::slow`].
    ///
    /// # Errors
    /// If `tc` fails.
    pub fn unslow(&self, host: &Host) -> Result<()> {
        self.each_nic(host, |nic, _| match self.link.mbit_per_s {
            Some(mbit) => shape(&host.name, nic, mbit),
            None => host.tc(&["qdisc", "del", "dev", nic, "root"]).map(drop),
        })
    }

    /// Calls `act` for each NIC of a host, with its name and the address of the NIC at the other
    /// end.
    fn each_nic(&self, host: &Host, act: impl Fn(&str, &str) -> Result<()>) -> Result<()> {
        let other = if host.name == self.a.name { &self.b } else { &self.a };
        let mut nics = other.addresses.iter().enumerate();
        nics.try_for_each(|(nic, address)| act(&nic_name(nic), &address.to_string()))
    }
}

/// Adds a token bucket whose burst lets TCP reach 95.6 % of the rate (the rest is headers), with a
/// queue of 20 ms, as in a switch.
pub(super) fn shape(namespace: &str, nic: &str, mbit: u32) -> Result<()> {
    let rate = format!("{mbit}mbit");
    // More than the largest packet: a packet that was queued while the rate was higher, and is
    // larger than the whole bucket, would stay at the queue's head for ever.
    let burst = if mbit >= 500 { "256kb" } else { "80kb" };
    let args = ["qdisc", "replace", "dev", nic, "root", "tbf", "rate", &rate];
    tc(namespace, &[&args[..], &["burst", burst, "latency", "20ms"]].concat()).map(drop)
}
