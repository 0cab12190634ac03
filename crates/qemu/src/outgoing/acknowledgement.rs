//! Whether QEMU waits for SWITCHOVER_ACK before it stops a running VM.
//!
//! With the capability `switchover-ack` a QEMU from 8.1 to 11.0 waits for one. From
//! 11.1 on it waits for as many as the VM's devices request, which is usually none, and
//! fails the migration when one more arrives, unless `migration.switchover-ack-legacy`
//! is on. Machine types up to 11.0 turn that on, and a command line can. QEMU doesn't
//! report the property's value, so it counts as on only where one of these turns it on.
//!
//! With the capability a VFIO device tells the destination when it has sent its first
//! state, for the destination to acknowledge, and a destination without the capability
//! refuses that word. So VMs with such a device are moved without it at both ends. QEMU
//! may then stop the VM before that state is loaded, which can make downtime longer.

use serde_json::json;

use super::wanted::CAPABILITIES_HELD;
use super::{Settings, StreamKind};
use crate::command_line::{LEGACY_ACK, MIGRATION, legacy_ack};
use crate::machine::Machine;
use crate::probe::answers::has_property;
use crate::process;
use crate::qmp::{Qmp, QmpError};
use crate::shape;

/// The last machine types that turn the property on by themselves.
const LAST_LEGACY_MACHINE: (u32, u32) = (11, 0);

/// Whether this QEMU is held by a missing acknowledgement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// It waits for exactly one acknowledgement.
    Awaited,
    /// It has no such capability, or a VFIO device uses it.
    Unknown,
    /// It may wait only for those that devices request: none must be sent.
    DevicesOnly,
}

pub(super) fn of(
    machine: &Machine,
    settings: &Settings,
    kind: StreamKind,
) -> Result<Hold, QmpError> {
    let is_known = CAPABILITIES_HELD.iter().all(|name| settings.has_capability(name));
    if !is_known || kind == StreamKind::Whole {
        return Ok(Hold::Unknown);
    }
    if !knows_legacy_ack(&machine.qmp)? {
        return Ok(Hold::Awaited);
    }
    // As it was started, with what the agent has added.
    let argv = process::command_line_of(machine.process.pid()).unwrap_or_default();
    let is_on = match legacy_ack(&argv) {
        Some(said) => said,
        // A file with options may set anything.
        None if argv.is_empty() || argv.iter().any(|word| word.ends_with("-readconfig")) => false,
        None => is_legacy_machine(&shape::machine_of(&machine.qmp)?),
    };
    Ok(if is_on { Hold::Awaited } else { Hold::DevicesOnly })
}

fn knows_legacy_ack(qmp: &Qmp) -> Result<bool, QmpError> {
    match qmp.execute("qom-list-properties", json!({ "typename": MIGRATION })) {
        Ok(listed) => Ok(has_property(&listed, LEGACY_ACK)),
        Err(QmpError::Refused { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether a machine type turns the property on, by its name, such as `pc-q35-11.0`. One
/// without a version, or with that of a distribution, may be as new as its QEMU.
fn is_legacy_machine(name: &str) -> bool {
    let version = name.rsplit_once('-').and_then(|(_, version)| {
        let (major, minor) = version.split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    });
    version.is_some_and(|version: (u32, u32)| version <= LAST_LEGACY_MACHINE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_machine_types_wait_as_qemu_did() {
        for old in ["pc-q35-11.0", "pc-i440fx-2.12", "virt-9.2"] {
            assert!(is_legacy_machine(old), "{old}");
        }
        for other in ["pc-q35-11.1", "pc-q35-12.0", "microvm", "pc-q35-rhel9.6.0", "q35", ""] {
            assert!(!is_legacy_machine(other), "{other}");
        }
    }
}
