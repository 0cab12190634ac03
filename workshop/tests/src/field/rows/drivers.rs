//! Drivers that a guest unbinds from its devices and binds again, and what proves that they work.

use super::inside::{guest_agent, helper};
use crate::field::{Done, Field};

/// The devices of a driver that a line unbinds, in `$d`.
pub(super) const ALL: &str = "d=$(ls -d virtio*)";
pub(super) const DATA: &str = "d=$(basename $(readlink -f /sys/block/vdb/device))";
/// The name of the second card, in `$c`.
pub(super) const SECOND: &str = "c=$(for i in /sys/class/net/*; do \
     readlink $i/device/driver | grep -q e1000e && basename $i; done)";

pub(super) fn rebind(field: &Field, driver: &str, devices: &str) -> Done {
    rebind_after(field, driver, devices, "sleep 1")
}

/// Unbinds these devices, and binds them after that command.
fn rebind_after(field: &Field, driver: &str, devices: &str, wait: &str) -> Done {
    field.sh(&format!(
        "cd /sys/bus/virtio/drivers/{driver} && {devices} && \
         for i in $d; do echo $i >unbind || exit 1; done && {wait} && \
         for i in $d; do echo $i >bind || exit 1; done && echo $d"
    ))?;
    Ok(String::new())
}

pub(super) fn rebind_pci(field: &Field, driver: &str) -> Done {
    field.sh(&format!(
        "cd /sys/bus/pci/drivers/{driver} && d=$(ls -d 0000:*) && \
         for i in $d; do echo $i >unbind || exit 1; done && sleep 1 && \
         for i in $d; do echo $i >bind || exit 1; done"
    ))
}

pub(super) fn second_has_a_carrier(field: &Field) -> Done {
    field.shows("the second card has a carrier", |field| {
        let carrier =
            field.sh(&format!("{SECOND}; ip link set $c up; cat /sys/class/net/$c/carrier"));
        carrier.is_ok_and(|it| it == "1")
    })?;
    Ok(String::new())
}

pub(super) fn sata(field: &mut Field) -> Done {
    let disk = "/dev/$(ls /sys/block | grep ^sd)";
    field.shows("the disk is there", |field| field.sh(&format!("test -b {disk}")).is_ok())?;
    field.sh(&format!(
        "head -c 4M /dev/urandom >/tmp/x && dd if=/tmp/x of={disk} bs=1M oflag=direct 2>&1 && \
         dd if={disk} bs=1M count=4 iflag=direct 2>/dev/null | cmp - /tmp/x && rm /tmp/x"
    ))?;
    Ok(String::new())
}

pub(super) fn rng(field: &mut Field) -> Done {
    rebind(field, "virtio_rng", ALL)?;
    field.sh("dd if=/dev/hwrng of=/dev/null bs=64 count=4 2>&1")?;
    Ok(String::new())
}

pub(super) fn virtio_serial(field: &mut Field) -> Done {
    // A port that comes while its unit still stops doesn't start it: systemd drops that job.
    let stopped = "while test \"$(systemctl is-active droveway-guest)\" = deactivating; do \
                   sleep 0.1; done";
    rebind_after(field, "virtio_console", ALL, &format!("sleep 1 && {stopped}"))?;
    field.sh("systemctl restart qemu-guest-agent")?;
    guest_agent(field)?;
    // Its port starts it again.
    helper(field)
}
