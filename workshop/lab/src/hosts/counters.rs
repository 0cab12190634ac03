//! Traffic of a host's NICs.

use std::collections::HashMap;

use serde_json::Value;

use super::host::Host;
use super::namespace::{nic_name, tc};
use crate::error::{LabError, Result};

/// Bytes as they are on the wire, headers included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Of all NICs.
    pub bytes: u64,
}

impl std::ops::Add for Traffic {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { bytes: self.bytes + other.bytes }
    }
}

impl std::ops::Sub for Traffic {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self { bytes: self.bytes.saturating_sub(earlier.bytes) }
    }
}

pub(super) fn sent(host: &Host) -> Result<Traffic> {
    (0..host.addresses.len()).try_fold(Traffic::default(), |sum, nic| Ok(sum + sent_by(host, nic)?))
}

/// A shaped NIC is counted by its qdisc, which sees each packet. The interface counts what it gets
/// from TCP: pieces of 64 KiB with one header each.
pub(super) fn sent_by(host: &Host, nic: usize) -> Result<Traffic> {
    let nic = nic_name(nic);
    let bytes = if host.shaped {
        qdisc_bytes(&host.tc(&["-j", "-s", "qdisc", "show", "dev", &nic])?)?
    } else {
        interface_bytes(&host.ip(&["-j", "-s", "link", "show", "dev", &nic])?)?
    };
    Ok(Traffic { bytes })
}

/// Bytes sent by the shaped NICs of a namespace, by name.
pub(super) fn shaped(namespace: &str) -> Result<HashMap<String, u64>> {
    by_nic(&tc(namespace, &["-j", "-s", "qdisc", "show"])?)
}

fn by_nic(json: &str) -> Result<HashMap<String, u64>> {
    let entries: Vec<Value> = serde_json::from_str(json)
        .map_err(|_| LabError::Text { what: "a switch's counters", text: json.to_owned() })?;
    let shaped = entries.iter().filter(|entry| entry["kind"] == "tbf");
    let bytes = |entry: &Value| Some((entry["dev"].as_str()?.to_owned(), entry["bytes"].as_u64()?));
    Ok(shaped.filter_map(bytes).collect())
}

fn qdisc_bytes(json: &str) -> Result<u64> {
    find(json, |entry| if entry["kind"] == "tbf" { entry["bytes"].as_u64() } else { None })
}

fn interface_bytes(json: &str) -> Result<u64> {
    find(json, |entry| entry["stats64"]["tx"]["bytes"].as_u64())
}

fn find(json: &str, bytes: impl Fn(&Value) -> Option<u64>) -> Result<u64> {
    let entries: Option<Vec<Value>> = serde_json::from_str(json).ok();
    entries
        .and_then(|entries| entries.iter().find_map(bytes))
        .ok_or_else(|| LabError::Text { what: "a NIC's counters", text: json.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found_in_what_tc_and_ip_print() {
        let tc = r#"[{"kind":"tbf","handle":"8001:","root":true,"options":{},"bytes":1234,"packets":9}]"#;
        assert_eq!(qdisc_bytes(tc).unwrap(), 1234);
        let ip = r#"[{"ifname":"nic0","stats64":{"rx":{"bytes":1},"tx":{"bytes":77}}}]"#;
        assert_eq!(interface_bytes(ip).unwrap(), 77);
        let tc = r#"[{"kind":"noqueue","dev":"lo"},{"kind":"tbf","dev":"h1","bytes":5},
            {"kind":"tbf","dev":"core","bytes":7}]"#;
        let found = by_nic(tc).unwrap();
        assert_eq!((found.len(), found["h1"], found["core"]), (2, 5, 7));
        assert!(by_nic("{}").is_err());
        assert!(qdisc_bytes("[]").is_err());
        assert!(interface_bytes("what").is_err());
    }
}
