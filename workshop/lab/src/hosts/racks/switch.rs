//! Switches, which join the hosts of a rack, and racks.

use std::collections::HashMap;

use crate::error::{LabError, Result};
use crate::hosts::link::shape;
use crate::hosts::namespace::{ip, remove};
use crate::hosts::{counters, stale};
use crate::program;

const BRIDGE: &str = "switch";

/// A bridge in a namespace of its own.
#[derive(Debug)]
pub(super) struct Switch {
    namespace: String,
}

impl Switch {
    pub(super) fn new(namespace: String) -> Result<Self> {
        program::output(program::command("ip").args(["netns", "add", &namespace]))?;
        let switch = Self { namespace };
        // Without STP, which would wait for half a minute: there are no loops.
        switch.ip(&["link", "add", BRIDGE, "type", "bridge", "stp_state", "0"])?;
        quiet(&switch.namespace, BRIDGE)?;
        switch.ip(&["link", "set", BRIDGE, "up"])?;
        Ok(switch)
    }

    fn ip(&self, args: &[&str]) -> Result<String> {
        ip(&self.namespace, args)
    }

    /// Joins it to another switch by a link between two ports.
    pub(super) fn join(
        &self,
        other: &Self,
        port: &str,
        others_port: &str,
        mbit: u32,
    ) -> Result<()> {
        pair(&self.namespace, port, &other.namespace, others_port)?;
        self.attach(port, mbit)?;
        other.attach(others_port, mbit)
    }

    /// Makes a device a port, and shapes its output.
    pub(super) fn attach(&self, port: &str, mbit: u32) -> Result<()> {
        self.ip(&["link", "set", port, "master", BRIDGE, "up"])?;
        shape(&self.namespace, port, mbit)
    }

    pub(super) fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Bytes sent by each port.
    pub(super) fn all_sent(&self) -> Result<HashMap<String, u64>> {
        counters::shaped(&self.namespace)
    }

    /// Bytes sent by a port.
    pub(super) fn sent(&self, port: &str) -> Result<u64> {
        let sent = self.all_sent()?;
        sent.get(port).copied().ok_or_else(|| LabError::Text {
            what: "a switch's counters",
            text: format!("{port} is not among {sent:?}"),
        })
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        stale::wait_if_abandoned();
        if let Err(error) = remove(&self.namespace) {
            eprintln!("lab: {} is left behind: {error}", self.namespace);
        }
    }
}

/// Makes a link between two namespaces, with both ends down.
pub(super) fn pair(one: &str, device: &str, other: &str, others_device: &str) -> Result<()> {
    program::output(program::command("ip").args([
        "link",
        "add",
        device,
        "netns",
        one,
        "type",
        "veth",
        "peer",
        "name",
        others_device,
        "netns",
        other,
    ]))?;
    quiet(one, device)?;
    quiet(other, others_device)
}

/// Keeps the device from getting an IPv6 address: it would announce it by itself, which would cross
/// the core and be counted.
pub(super) fn quiet(namespace: &str, device: &str) -> Result<()> {
    ip(namespace, &["link", "set", device, "addrgenmode", "none"]).map(drop)
}
