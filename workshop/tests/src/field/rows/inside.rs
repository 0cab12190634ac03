//! What a guest does by itself, with its services, its network and its firmware.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use lab::field::{KEPT_PCR, PCR};
use qemu::guest_port;

use super::commands::MARK;
use crate::field::{Done, Field, NAME, SHOWS_MAX};

/// The name of the card of the guests' network, in `$c`.
pub(super) const CARD: &str = "c=$(ip -br link | awk '/52:54:00:77:00:01/ { print $1 }')";
/// A UEFI variable, in `$v`.
pub(super) const VARIABLE: &str = "v=/sys/firmware/efi/efivars/Field-77000000-0000-0000-0000-000000000001 && \
     { test -e $v && chattr -i $v; true; }";
/// Whether the firmware has it with what was written, behind four bytes of attributes.
pub(super) const IS_WRITTEN: &str = "test \"$(cat $v | tail -c 1)\" = x";
/// Longest time for an answer of the guest's helper, which is asked again.
const GREETING_MAX: Duration = Duration::from_secs(3);

pub(super) fn serial_console(field: &mut Field) -> Done {
    field.sh(&format!("echo {MARK} >/dev/ttyS0"))?;
    field.shows("the console shows it", |field| {
        field.guest().spec.console(field.host()).contains(MARK)
    })?;
    Ok(String::new())
}

pub(super) fn guest_agent(field: &mut Field) -> Done {
    let said = |error: std::io::Error| format!("the guest agent's port: {error}");
    field.shows("the guest agent runs", |field| {
        field.sh("systemctl is-active qemu-guest-agent").is_ok()
    })?;
    let path = field.host().run_dir.join(format!("{NAME}.agent"));
    let mut stream = UnixStream::connect(path).map_err(said)?;
    stream.set_read_timeout(Some(SHOWS_MAX)).map_err(said)?;
    stream.write_all(b"{\"execute\":\"guest-ping\"}\n").map_err(said)?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).map_err(said)?;
    if answer.contains("return") { Ok(String::new()) } else { Err(answer) }
}

pub(super) fn helper(field: &mut Field) -> Done {
    let path = field.host().run_dir.join(format!("{NAME}.helper"));
    field.shows("the helper answers", |_| {
        let stream = guest_port::connect(&path);
        stream.and_then(|stream| guest_port::greet(&stream, GREETING_MAX)).is_ok()
    })?;
    Ok(String::new())
}

pub(super) fn network_down_and_up(field: &mut Field) -> Done {
    field.sh(&format!("{CARD}; ip link set $c down && sleep 1 && ip link set $c up"))
}

pub(super) fn lease_renewed(field: &mut Field) -> Done {
    let before = field.lan.leases();
    field.sh(&format!("{CARD}; networkctl renew $c"))?;
    field.shows("the DHCP server renews the lease", |field| field.lan.leases() > before)?;
    Ok(String::new())
}

/// Its registers are as the firmware and guests have left them.
pub(super) fn tpm(field: &mut Field) -> Done {
    // TPM2_PCR_Extend of register 16, with an empty password and 32 zeros.
    let extend = r"\200\2\0\0\0\101\0\0\1\202\0\0\0\20\0\0\0\11\100\0\0\11\0\0\0\0\0\0\0\0\1\0\13";
    let zeros = r"\0".repeat(32);
    field.sh(&format!(
        "{PCR}; test \"$(pcr '\\1\\0\\0')\" = \"$(cat {KEPT_PCR})\" && old=$(pcr '\\0\\0\\1') && \
         printf '{extend}{zeros}' >/dev/tpm0 && test \"$(pcr '\\0\\0\\1')\" != \"$old\""
    ))
}

pub(super) fn write_variable(field: &mut Field) -> Done {
    field.sh(&format!("{VARIABLE} && printf '\\7\\0\\0\\0x' >$v && {IS_WRITTEN}"))
}

/// A device of a kind that QEMU can't migrate while it is mounted.
pub(super) fn shared_by_9p(field: &mut Field) -> Done {
    field.sh("modprobe -a 9pnet_virtio 9p && mkdir -p /mnt/files && \
         mount -t 9p -o trans=virtio files /mnt/files && echo here >/mnt/files/9p && \
         grep here /mnt/files/9p")?;
    field.stays("VirtFS")?;
    field.sh("umount /mnt/files")
}
