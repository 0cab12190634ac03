//! Throttles the guest's writes to a disk, and lifts the throttle again.
//!
//! The previous limits are kept in the name of the throttle group that the
//! disk is put in. So QEMU itself stores them, and an agent that finds the VM
//! later can restore them.

use serde_json::{Map, Value, json};

use super::{ASK, PREFIX};
use crate::qmp::{Qmp, QmpError};

/// Limits that must be given, each 0 where there is none.
const LIMITS: [&str; 6] = ["bps", "bps_rd", "bps_wr", "iops", "iops_rd", "iops_wr"];
/// Optional settings, by the names that QEMU reports and accepts.
const OPTIONAL: [&str; 14] = [
    "bps_max",
    "bps_rd_max",
    "bps_wr_max",
    "iops_max",
    "iops_rd_max",
    "iops_wr_max",
    "bps_max_length",
    "bps_rd_max_length",
    "bps_wr_max_length",
    "iops_max_length",
    "iops_rd_max_length",
    "iops_wr_max_length",
    "iops_size",
    "group",
];

/// Throttles the writes of the guest's device `guest`.
pub(super) fn slow(qmp: &Qmp, guest: &str, bytes_per_s: u64) -> Result<(), QmpError> {
    let answer = qmp.execute_within("query-block", json!({}), ASK)?;
    let drives = answer.as_array().map(Vec::as_slice).unwrap_or_default();
    let drive = drives.iter().find(|drive| crate::disks::guest_id(drive) == guest);
    let inserted = drive.map_or(&Value::Null, |drive| &drive["inserted"]);
    let before = remembered(inserted).unwrap_or_else(|| limits(inserted));
    set(qmp, guest, slowed(&before, guest, bytes_per_s))
}

/// Lifts every throttle made here. Returns whether there was one.
pub(super) fn lift(qmp: &Qmp) -> Result<bool, QmpError> {
    let mut lifted = false;
    let answer = qmp.execute_within("query-block", json!({}), ASK)?;
    for drive in answer.as_array().map(Vec::as_slice).unwrap_or_default() {
        if let Some(before) = remembered(&drive["inserted"]) {
            set(qmp, &crate::disks::guest_id(drive), before)?;
            lifted = true;
        }
    }
    Ok(lifted)
}

fn set(qmp: &Qmp, guest: &str, mut limits: Map<String, Value>) -> Result<(), QmpError> {
    limits.insert("id".to_owned(), guest.into());
    qmp.execute_within("block_set_io_throttle", Value::Object(limits), ASK).map(drop)
}

/// The limits of a disk that is not throttled here.
fn limits(inserted: &Value) -> Map<String, Value> {
    let given = |name: &str| inserted.get(name).cloned();
    let limits = LIMITS.iter().map(|name| (*name, given(name).unwrap_or_else(|| 0.into())));
    let optional = OPTIONAL.iter().filter_map(|name| Some((*name, given(name)?)));
    limits.chain(optional).map(|(name, value)| (name.to_owned(), value)).collect()
}

/// The previous limits, if the disk is throttled here.
fn remembered(inserted: &Value) -> Option<Map<String, Value>> {
    let text = inserted["group"].as_str()?.strip_prefix(PREFIX)?;
    // If the group is not the agent's after all, no limits.
    let before = serde_json::from_str(text).ok().filter(Value::is_object);
    Some(limits(&before.unwrap_or(Value::Null)))
}

fn slowed(before: &Map<String, Value>, guest: &str, bytes_per_s: u64) -> Map<String, Value> {
    // With a limit for reads and writes together, QEMU refuses one for writes.
    let together = before.get("bps").and_then(Value::as_u64).unwrap_or(0) > 0;
    let name = if together { "bps" } else { "bps_wr" };
    let lower = match before.get(name).and_then(Value::as_u64).unwrap_or(0) {
        0 => bytes_per_s,
        limit => limit.min(bytes_per_s),
    };
    let mut limits = before.clone();
    limits.insert(name.to_owned(), lower.max(1).into());
    // The members of a group share its limits, so each disk has a group of its own.
    let mut kept = before.clone();
    kept.insert("disk".to_owned(), guest.into());
    let group = format!("{PREFIX}{}", Value::Object(kept));
    limits.insert("group".to_owned(), group.into());
    limits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_s_name_holds_the_previous_limits() {
        let table = [
            (json!({}), "bps_wr", 1000),
            (json!({"bps_wr": 500, "bps_wr_max": 600, "group": "g"}), "bps_wr", 500),
            (json!({"bps_wr": 5000, "iops": 7}), "bps_wr", 1000),
            (json!({"bps": 5000, "group": "shared with others"}), "bps", 1000),
        ];
        for (inserted, name, expected) in table {
            let before = limits(&inserted);
            let slowed = Value::Object(slowed(&before, "disk0", 1000));
            assert_eq!(slowed[name], expected, "{inserted}");
            assert_eq!(slowed["iops"], inserted.get("iops").cloned().unwrap_or(json!(0)));
            assert_eq!(remembered(&slowed), Some(before), "{slowed}");
        }
        // As an older agent left it.
        let older = json!({"group": format!("{PREFIX}{}", json!({"bps_wr": 500}))});
        assert_eq!(remembered(&older), Some(limits(&json!({"bps_wr": 500}))));
        assert_eq!(remembered(&json!({"group": "theirs"})), None);
        let odd = remembered(&json!({"group": "droveway-mirror-nonsense"})).unwrap();
        assert_eq!(odd["bps"], 0);
    }

    #[test]
    fn disks_with_the_same_limits_are_not_in_one_group() {
        let before = limits(&json!({}));
        let group = |guest: &str| slowed(&before, guest, 1000)["group"].clone();
        let disk = "/machine/peripheral/disk0/virtio-backend";
        assert_ne!(group(disk), group("disk1"));
        assert_eq!(group(disk), group(disk));
    }
}
