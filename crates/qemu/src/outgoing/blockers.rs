//! What keeps QEMU from migrating a VM, as far as it is known before QEMU tries.

use serde_json::{Value, json};

use super::progress::{PROGRESS_WAIT, Progress};
use crate::qmp::{Qmp, QmpError};
use crate::shape;

/// The first QEMU that migrates virtiofs devices. Those before list each of them as a blocker.
const FILE_SYSTEMS_SINCE: (u32, u32) = (8, 2);
const FILE_SYSTEM: &str = "vhost-user-fs";
/// The kind that is the virtio device itself; the others have it as their part.
const BARE_FILE_SYSTEM: &str = "vhost-user-fs-device";
/// The vhost-user protocol's feature by which a device's process hands over its state, and its bit.
const DEVICE_STATE: &str = "VHOST_USER_PROTOCOL_F_DEVICE_STATE";
const DEVICE_STATE_BIT: u64 = 1 << 19;

/// The reasons why QEMU can't migrate this VM, each with the device; empty: none is known.
///
/// # Errors
/// If QEMU doesn't answer.
pub fn blockers(qmp: &Qmp) -> Result<Vec<String>, QmpError> {
    let mut reasons = Progress::query(qmp, PROGRESS_WAIT)?.blocked;
    let (major, minor, _) = qmp.version();
    if (major, minor) >= FILE_SYSTEMS_SINCE {
        for (path, kind) in shape::plugged(qmp, FILE_SYSTEM)? {
            if keeps_state(qmp, &path, &kind)? {
                reasons.push(format!(
                    "{kind} {path}: its virtiofsd can't hand over its state (no {DEVICE_STATE}); \
                     QEMU would refuse when the VM has stopped. Use virtiofsd 1.11 or newer"
                ));
            }
        }
    }
    Ok(reasons)
}

/// Fails if something keeps QEMU from migrating this VM.
///
/// # Errors
/// With all reasons, or if QEMU doesn't answer.
pub fn check_blockers(qmp: &Qmp) -> Result<(), QmpError> {
    match blockers(qmp)?.as_slice() {
        [] => Ok(()),
        reasons => {
            let reasons = reasons.join("; ");
            Err(QmpError::Migration(format!("this VM can't be moved: {reasons}")))
        }
    }
}

/// Whether the process of a virtiofs device is known not to hand over its state. QEMU says what it
/// can do only while the guest's driver uses the device, and does not list it as a blocker.
fn keeps_state(qmp: &Qmp, path: &str, kind: &str) -> Result<bool, QmpError> {
    let part = if kind == BARE_FILE_SYSTEM { "" } else { "/virtio-backend" };
    let device = json!({ "path": format!("{path}{part}") });
    match qmp.execute("x-query-virtio-status", device) {
        Ok(status) => Ok(lacks_state(&status["vhost-dev"]["protocol-features"])),
        // The command may change or vanish. QEMU then refuses by itself, though late.
        Err(QmpError::Refused { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

fn lacks_state(features: &Value) -> bool {
    let Some(known) = features["protocols"].as_array() else { return false };
    let is_it = |one: &Value| one.as_str().is_some_and(|name| name.starts_with(DEVICE_STATE));
    let unnamed = features["unknown-protocols"].as_u64().unwrap_or(0);
    !known.iter().any(is_it) && unnamed & DEVICE_STATE_BIT == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qmp::played::{GREETING, played_as};

    /// What is found in a QEMU of this version with a virtiofs device in use.
    fn found(version: (u32, u32), blocked: Value, features: Value) -> Vec<String> {
        let (major, minor) = version;
        let mut greeting: Value = serde_json::from_str(GREETING).unwrap();
        greeting["QMP"]["version"]["qemu"]["major"] = major.into();
        greeting["QMP"]["version"]["qemu"]["minor"] = minor.into();
        let (_dir, qmp, player) = played_as(greeting.to_string(), move |command| {
            let path = command["arguments"]["path"].as_str().unwrap_or_default();
            let answer = match command["execute"].as_str().unwrap() {
                "query-migrate" => json!({ "blocked-reasons": blocked }),
                "qom-list" if path == "/machine/peripheral" => json!([
                    { "name": "type", "type": "string" },
                    { "name": "card", "type": "child<virtio-net-pci>" },
                    { "name": "fs0", "type": "child<vhost-user-fs-pci>" },
                ]),
                "qom-list" => json!([]),
                "x-query-virtio-status" => {
                    assert_eq!(path, "/machine/peripheral/fs0/virtio-backend");
                    features.clone()
                }
                other => panic!("{other}"),
            };
            Some(format!("{}\n", json!({ "return": answer, "id": command["id"] })))
        });
        let found = blockers(&qmp.unwrap()).unwrap();
        player.join().unwrap();
        found
    }

    fn in_use(protocols: &Value, unknown: u64) -> Value {
        let features = json!({ "protocols": protocols, "unknown-protocols": unknown });
        json!({ "vhost-started": true, "vhost-dev": { "protocol-features": features } })
    }

    #[test]
    fn a_virtiofsd_that_keeps_its_state_is_found_before_qemu_refuses() {
        let old = json!(["VHOST_USER_PROTOCOL_F_MQ: Multiqueue protocol supported"]);
        let new = json!(["VHOST_USER_PROTOCOL_F_DEVICE_STATE: Backend device state transfer"]);
        let none = || json!([]);
        let [reason] = &found((10, 0), none(), in_use(&old, 0))[..] else { panic!() };
        assert!(reason.starts_with("vhost-user-fs-pci /machine/peripheral/fs0: "), "{reason}");
        assert!(found((10, 0), none(), in_use(&new, 0)).is_empty());
        assert!(found((8, 2), none(), in_use(&old, 1 << 19)).is_empty());
        // Its driver does not run, so QEMU does not say.
        assert!(found((10, 0), none(), json!({ "vhost-started": false })).is_empty());
    }

    #[test]
    fn an_older_qemu_lists_it_itself() {
        let listed = json!(["non-migratable device: 0000:00:01.0/vhost-user-fs"]);
        assert_eq!(found((7, 2), listed.clone(), json!("is not asked")), [listed[0].clone()]);
    }
}
