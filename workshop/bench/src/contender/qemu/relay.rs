//! Programs on both hosts that relay QEMU's migration.

use std::process::Child;

use serde_json::json;

use super::End;
use crate::part;
use crate::relay::Ram;
use lab::error::{LabError, Result};
use lab::hosts::Hosts;

const PORT: u16 = 7815;

/// Both programs. Dropping it ends them.
pub(super) struct Relays([Child; 2]);

impl Relays {
    /// Starts them. The destination's QEMU listens at its socket already.
    pub(super) fn start(hosts: &Hosts, there: &End) -> Result<Self> {
        let Ram { block, pid, address, bytes } = ram(there)?;
        let numbers = [u64::from(pid), address, bytes].map(|number| number.to_string());
        let [pid, address, bytes] = &numbers;
        let port = PORT.to_string();
        let arguments = ["relay-destination", &port, &block, pid, address, bytes];
        let destination = part::start(&hosts.b, &arguments)?;
        let to = format!("{}:{PORT}", hosts.b.addresses[0]);
        Ok(Self([part::start(&hosts.a, &["relay-source", &to])?, destination]))
    }
}

impl Drop for Relays {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The guest's RAM, which is in one piece as long as it fits below the PCI hole.
fn ram(there: &End) -> Result<Ram> {
    let command = json!({ "command-line": "gpa2hva 0" });
    let answer = there.tell("human-monitor-command", command)?;
    let text = answer.as_str().unwrap_or_default();
    let size = there.tell("query-memory-size-summary", json!({}))?;
    place(text)
        .zip(size["base-memory"].as_u64())
        .map(|((block, address), bytes)| Ram { block, pid: there.child.id(), address, bytes })
        .ok_or_else(|| LabError::Text { what: "where the RAM is", text: text.to_owned() })
}

/// Parses `Host virtual address for 0x0 (BLOCK) is ADDRESS`.
fn place(text: &str) -> Option<(String, u64)> {
    let (_, rest) = text.split_once('(')?;
    let (block, rest) = rest.split_once(')')?;
    let address = rest.trim().strip_prefix("is 0x")?;
    Some((block.to_owned(), u64::from_str_radix(address, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rams_address_is_read() {
        let text = "Host virtual address for 0x0 (pc.ram) is 0x7fa427e00000\r\n";
        assert_eq!(place(text), Some(("pc.ram".to_owned(), 0x7fa4_27e0_0000)));
        assert_eq!(place("No memory is mapped at address 0x0"), None);
    }
}
