//! Links between two hosts: veth pairs, each shaped by tbf at both ends.

use super::host::Host;
use crate::error::Result;
use crate::program;

/// What joins two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// NICs of each host, each with a link of its own.
    pub nics: u8,
    /// Each link's rate; none for as fast as the machine goes.
    pub mbit_per_s: Option<u32>,
}

pub(super) fn nic_name(nic: usize) -> String {
    format!("nic{nic}")
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
                    shape(host, &name, mbit)?;
                }
            }
        }
        Ok(())
    }
}

/// A token bucket whose burst lets TCP reach 95.6 % of the rate (the rest is
/// headers), with a queue of 20 ms as a switch would have.
fn shape(host: &Host, nic: &str, mbit: u32) -> Result<()> {
    let rate = format!("{mbit}mbit");
    let burst = if mbit >= 500 { "256kb" } else { "64kb" };
    let args = ["qdisc", "add", "dev", nic, "root", "tbf", "rate", &rate];
    host.tc(&[&args[..], &["burst", burst, "latency", "20ms"]].concat()).map(drop)
}
