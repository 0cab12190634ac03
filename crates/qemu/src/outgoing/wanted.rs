//! QEMU's settings for a migration by the agent.

use serde_json::Value;

use super::{Hold, Ram, Settings, StreamKind};
use crate::machine::Machine;
use crate::qmp::QmpError;

/// The agent's policy decides when QEMU may finish, so QEMU's own budget stays as
/// small as it can be. Never 0: QEMU 7.2 then stops the VM after one pass, with
/// all dirty memory left for the downtime.
pub(super) const DOWNTIME_HELD_MS: u64 = 1;
/// QEMU's own cap of `downtime-limit`.
pub(super) const DOWNTIME_MAX_MS: u64 = 2_000_000;
/// Bytes per second from which QEMU, if it accepts a rate, computes its budget
/// until the policy sets more: 1 KiB in 1 ms, less than a page.
const SWITCHOVER_HELD: u64 = 1 << 20;
/// No limit of QEMU's own: faster than any memory, and within what 7.2 accepts.
pub(super) const BANDWIDTH_MAX: u64 = 1 << 50;
/// Next to nothing: a packet of pages every 100 ms.
pub(super) const BANDWIDTH_HELD_BACK: u64 = 64 << 10;
/// Capabilities that the tap supports. All others that this QEMU has are switched off.
const CAPABILITIES_ON: [&str; 2] = ["events", "multifd"];

/// With these QEMU does not stop a running VM before it is permitted to on its main
/// channel, see [`Hold`]. Without the first the second is refused.
pub(super) const CAPABILITIES_HELD: [&str; 2] = ["return-path", "switchover-ack"];

pub(super) fn set_up(
    machine: &Machine,
    settings: &mut Settings,
    kind: StreamKind,
    (pauses, ram): (bool, Ram),
    hold: Hold,
) -> Result<(), QmpError> {
    let (multifd, channels) = match kind {
        StreamKind::Classic | StreamKind::Whole => (false, None),
        StreamKind::Multifd(channels) => (true, Some(channels.max(1))),
    };
    let wanted = |name: &str| match name {
        "multifd" => multifd,
        "pause-before-switchover" => pauses,
        name if CAPABILITIES_HELD.contains(&name) => hold == Hold::Awaited,
        name => CAPABILITIES_ON.contains(&name) || ram.switches_on(name),
    };
    let mut parameters: Vec<(&str, Value)> = vec![
        ("max-bandwidth", BANDWIDTH_MAX.into()),
        ("downtime-limit", DOWNTIME_HELD_MS.into()),
        ("avail-switchover-bandwidth", SWITCHOVER_HELD.into()),
        ("tls-creds", "".into()),
        ("tls-hostname", "".into()),
        ("tls-authz", "".into()),
        ("mode", "normal".into()),
        ("direct-io", false.into()),
    ];
    if let Some(channels) = channels {
        parameters.push(("multifd-channels", channels.into()));
        parameters.push(("multifd-compression", "none".into()));
        // So its channel threads look for zeros, not its one migration thread.
        parameters.push(("zero-page-detection", "multifd".into()));
    }
    settings.change(machine, wanted, &parameters)
}
