//! Throttles the guest's writes to a disk, and lifts the throttle again.
//!
//! The previous limits are kept in the name of the throttle group that the
//! disk is put in. So QEMU itself stores them, and an agent that finds the VM
//! later can restore them.
//!
//! The members of a group share its limits. Disks that their owner has put in one
//! group go to one group here, too, or they would get its limits several times.

use serde_json::{Map, Value, json};

use super::job::{ASK, PREFIX};
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
    let is_it = |drive: &&Value| crate::disks::guest_id(drive) == guest;
    let (this, others): (Vec<&Value>, Vec<&Value>) = drives.iter().partition(is_it);
    let inserted = this.first().map_or(&Value::Null, |drive| &drive["inserted"]);
    let others: Vec<&Value> = others.into_iter().map(|drive| &drive["inserted"]).collect();
    let before = remembered(inserted).unwrap_or_else(|| limits(inserted));
    set(qmp, guest, slowed(&before, guest, &others, bytes_per_s))
}

/// Lifts every throttle made here. Returns whether there was one.
pub(super) fn lift(qmp: &Qmp) -> Result<bool, QmpError> {
    let mut lifted = false;
    let answer = qmp.execute_within("query-block", json!({}), ASK)?;
    let drives = answer.as_array().map(Vec::as_slice).unwrap_or_default();
    for drive in drives {
        if let Some(before) = remembered(&drive["inserted"]) {
            set(qmp, &crate::disks::guest_id(drive), as_they_are(before, drives))?;
            lifted = true;
        }
    }
    Ok(lifted)
}

/// The limits that a disk gets back. Those of its group may have been changed meanwhile, at a disk
/// that is still in it: the old ones would apply to that disk as well.
fn as_they_are(before: Map<String, Value>, drives: &[Value]) -> Map<String, Value> {
    let Some(group) = before.get("group") else { return before };
    let mut inserted = drives.iter().map(|drive| &drive["inserted"]);
    let member = inserted.find(|inserted| inserted.get("group") == Some(group));
    member.map_or_else(|| before.clone(), limits)
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

/// The group that a disk's owner has put it in.
fn owners_group(inserted: &Value) -> Option<Value> {
    let group = |limits: Map<String, Value>| limits.get("group").cloned();
    group(remembered(inserted).unwrap_or_else(|| limits(inserted)))
}

/// The limits of a throttled disk; `others` are the VM's other disks.
fn slowed(
    before: &Map<String, Value>,
    guest: &str,
    others: &[&Value],
    bytes_per_s: u64,
) -> Map<String, Value> {
    // With a limit for reads and writes together, QEMU refuses one for writes.
    let together = before.get("bps").and_then(Value::as_u64).unwrap_or(0) > 0;
    let name = if together { "bps" } else { "bps_wr" };
    let group = before.get("group");
    let is_shared =
        group.is_some() && others.iter().any(|other| owners_group(other).as_ref() == group);
    let mut kept = before.clone();
    if !is_shared {
        kept.insert("disk".to_owned(), guest.into());
    }
    let group: Value = format!("{PREFIX}{}", Value::Object(kept)).into();
    // What others in that group are throttled to holds for all of it.
    let members = others.iter().filter(|other| other["group"] == group);
    let limits_now = members.filter_map(|other| other[name].as_u64());
    let limits_now = limits_now.chain(before.get(name).and_then(Value::as_u64));
    let lower = limits_now.filter(|limit| *limit > 0).fold(bytes_per_s, u64::min);
    let mut limits = before.clone();
    limits.insert(name.to_owned(), lower.max(1).into());
    limits.insert("group".to_owned(), group);
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
            let slowed = Value::Object(slowed(&before, "disk0", &[], 1000));
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
        let group = |guest: &str| slowed(&before, guest, &[], 1000)["group"].clone();
        let disk = "/machine/peripheral/disk0/virtio-backend";
        assert_ne!(group(disk), group("disk1"));
        assert_eq!(group(disk), group(disk));
    }

    /// Together they may do what their owner allows them together.
    #[test]
    fn disks_of_one_group_of_their_owner_stay_in_one() {
        let theirs = json!({"iops": 100, "bps_wr": 9000, "group": "theirs"});
        let before = limits(&theirs);
        let alone = slowed(&before, "disk0", &[&json!({"group": "another's"})], 3000);
        let first = Value::Object(slowed(&before, "disk0", &[&theirs], 2000));
        assert_ne!(first["group"], alone["group"]);
        let second = Value::Object(slowed(&before, "disk1", &[&first], 3000));
        assert_eq!(second["group"], first["group"]);
        assert_eq!(second["bps_wr"], 2000, "the first disk's mirror has to keep up, too");
        assert_eq!(second["iops"], 100);
        assert_eq!(remembered(&second), Some(before.clone()));

        // Their owner changes the limits of a third, which was not throttled.
        let third = json!({"iops": 50, "group": "theirs"});
        let drives = [json!({ "inserted": second }), json!({ "inserted": third })];
        assert_eq!(as_they_are(before.clone(), &drives), limits(&third));
        assert_eq!(as_they_are(before.clone(), &drives[..1]), before);
    }
}
