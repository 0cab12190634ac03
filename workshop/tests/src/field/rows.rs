//! What owners and guests do with a VM. Each leaves it as it was.

mod boot;
mod commands;
mod drivers;
mod inside;
mod owner;
mod plugged;

use std::path::{Path, PathBuf};

use lab::field::Machine;
use serde_json::json;

use boot::{boots, kexec, reboot, start_again, watchdog};
use commands::command;
use drivers::{
    ALL, DATA, SECOND, rebind, rebind_pci, rng, sata, second_has_a_carrier, virtio_serial,
};
use inside::{
    IS_WRITTEN, VARIABLE, guest_agent, helper, lease_renewed, network_down_and_up, serial_console,
    shared_by_9p, tpm, write_variable,
};
use owner::{
    balloon, disk_resized, link_down_and_up, medium, owners_commands, snapshot, standstill, suspend,
};
use plugged::{
    PLUG, SPARE, VIRTIOFSD, console, disk, hub_port, memory, nic, nvme, plugged_disk, vcpu,
    virtio_mem, virtiofs, vsock,
};

use super::domain::{self, CarriedDomain};
use super::{Done, Field, Mover, Way};

/// Does something with a VM.
#[derive(Clone, Copy)]
pub enum Act {
    /// In a Debian, or as its owner does it by QMP.
    OfDebian(fn(&mut Field) -> Done),
    /// As the owner of a libvirt domain does it.
    OfDomain(fn(&mut CarriedDomain) -> Done),
}

/// Something that is done after a move.
pub struct Row {
    /// What, in the table.
    pub name: &'static str,
    /// Does it.
    pub act: Act,
    /// Whether the guest boots, which takes half a minute of a core and more.
    pub boots: bool,
    /// The Debian with which it is done; none: a libvirt domain.
    pub machine: Option<Machine>,
    /// A file of the hosts without which it can't be done.
    pub needs: Option<&'static str>,
}

impl Row {
    const fn on(self, machine: Machine) -> Self {
        Self { machine: Some(machine), ..self }
    }

    const fn with(self, file: &'static str) -> Self {
        Self { needs: Some(file), ..self }
    }

    /// Whether it is tried with VMs that move in this way: agents carry what libvirt moves.
    #[must_use]
    pub fn is_tried(&self, way: Way) -> bool {
        self.machine.is_some() || way.mover == Mover::Carried
    }

    /// What hosts with this root lack for it, or, without one, this machine. Devices are this
    /// machine's.
    #[must_use]
    pub fn lacks(&self, root: Option<&Path>) -> Option<String> {
        if self.machine.is_none() && root.is_some() {
            return Some("no libvirt there".to_owned());
        }
        let file = self.needs?;
        let (path, place) = match root {
            Some(root) if !file.starts_with("/dev/") => {
                (root.join(file.trim_start_matches('/')), "there")
            }
            _ => (PathBuf::from(file), "here"),
        };
        (!path.exists()).then(|| format!("no `{file}` {place}"))
    }
}

const fn row(name: &'static str, act: fn(&mut Field) -> Done) -> Row {
    let (act, machine) = (Act::OfDebian(act), Some(Machine::Virtio));
    Row { name, act, boots: false, machine, needs: None }
}

const fn booting(name: &'static str, act: fn(&mut Field) -> Done) -> Row {
    Row { boots: true, ..row(name, act) }
}

const fn virsh(name: &'static str, act: fn(&mut CarriedDomain) -> Done) -> Row {
    Row { name, act: Act::OfDomain(act), boots: false, machine: None, needs: None }
}

/// All of them, in the order in which a VM goes through them: what ends its QEMU is last.
pub static ROWS: [Row; 59] = [
    row("serial console", serial_console),
    row("guest agent (virtio-serial)", guest_agent),
    row("droveway's helper, from its package", helper),
    row("QMP commands of its owner", owners_commands),
    row("link down and up (QMP)", link_down_and_up),
    row("network down and up", network_down_and_up),
    row("DHCP lease renewed", lease_renewed),
    row("virtio-net unbound and bound", |field| rebind(field, "virtio_net", ALL)),
    row("virtio-blk unbound and bound", |field| rebind(field, "virtio_blk", DATA)),
    row("virtio-scsi unbound and bound", |field| rebind(field, "virtio_scsi", ALL)),
    row("virtio-rng unbound and bound", rng),
    row("virtio-balloon unbound and bound", |field| rebind(field, "virtio_balloon", ALL)),
    row("virtio-serial unbound and bound", virtio_serial),
    row("balloon down and up", balloon),
    row("NIC plugged and unplugged", |field| nic(field, hub_port(), SPARE)),
    row("virtio-console plugged and unplugged", console),
    row("disk plugged and unplugged", disk),
    row("SCSI disk plugged and unplugged", |field| {
        let device = json!({ "driver": "scsi-hd", "bus": "scsi.0" });
        plugged_disk(field, device, "/dev/sda", |_| Ok(()))
    }),
    row("NVMe disk plugged: no move; unplugged", nvme),
    row("NIC with vhost plugged and unplugged", |field| {
        let tap = json!({ "type": "tap", "id": PLUG, "script": "no", "downscript": "no",
            "vhost": true });
        nic(field, tap, SPARE)
    })
    .with("/dev/vhost-net"),
    row("vsock by vhost plugged and unplugged", vsock).with("/dev/vhost-vsock"),
    row("memory plugged and unplugged", memory),
    row("disk resized", disk_resized),
    row("snapshot taken and committed", snapshot),
    row("medium changed", medium),
    row("standstill of five seconds", standstill),
    row("S3 suspend and wake-up", suspend),
    row("moved once more after all of that", move_on),
    booting("kexec", kexec),
    booting("reboot from inside", reboot),
    booting("`system_reset`", |field| {
        boots(field, |field| command(field, "system_reset", json!({})))
    }),
    booting("shutdown, and started again", start_again),
    // The last one, although it does not boot: under TCG, QEMU's next migration waits for ever for the
    // vCPU that is gone (`tcg_log_global_after_sync`).
    booting("vCPU plugged and unplugged", vcpu),
    row("e1000e down and up", |field| {
        field.sh(&format!("{SECOND}; ip link set $c down && sleep 1 && ip link set $c up"))?;
        second_has_a_carrier(field)
    })
    .on(Machine::Devices),
    row("e1000e unbound and bound", |field| {
        rebind_pci(field, "e1000e")?;
        second_has_a_carrier(field)
    })
    .on(Machine::Devices),
    row("SATA disk written and read", sata).on(Machine::Devices),
    row("AHCI unbound and bound", |field| {
        rebind_pci(field, "ahci")?;
        sata(field)
    })
    .on(Machine::Devices),
    row("xHCI unbound and bound, with its tablet", |field| {
        rebind_pci(field, "xhci_hcd")?;
        field.shows("the tablet is there", |field| {
            field.sh("grep Tablet /proc/bus/input/devices").is_ok()
        })?;
        Ok(String::new())
    })
    .on(Machine::Devices),
    row("virtio-gpu unbound and bound", |field| rebind(field, "virtio_gpu", ALL))
        .on(Machine::Devices),
    row("VGA unbound and bound", |field| rebind_pci(field, "bochs-drm")).on(Machine::Devices),
    row("virtio-9p unbound and bound", |field| {
        field.sh("modprobe 9pnet_virtio")?;
        rebind(field, "9pnet_virtio", ALL)
    })
    .on(Machine::Devices),
    row("virtio-9p mounted: no move; unmounted", shared_by_9p).on(Machine::Devices),
    row("moved once more after that", move_on).on(Machine::Devices),
    booting("watchdog, and reboot with these devices", watchdog).on(Machine::Devices),
    row("i440fx: virtio-net unbound and bound", |field| rebind(field, "virtio_net", ALL))
        .on(Machine::Uefi),
    row("i440fx: NIC plugged and unplugged", |field| nic(field, hub_port(), "pci.0"))
        .on(Machine::Uefi),
    row("TPM read and extended", tpm).on(Machine::Uefi),
    row("UEFI variable written and read", write_variable).on(Machine::Uefi),
    row("virtio-mem grown and shrunk", virtio_mem).on(Machine::Uefi),
    row("virtio-mem unbound and bound", |field| {
        rebind(field, "virtio_mem", ALL)?;
        virtio_mem(field)
    })
    .on(Machine::Uefi),
    row("virtiofs plugged and mounted: no move; unplugged", virtiofs)
        .on(Machine::Uefi)
        .with(VIRTIOFSD),
    row("UEFI, TPM: moved once more", move_on).on(Machine::Uefi),
    booting("UEFI, TPM: reboot", |field| {
        write_variable(field)?;
        reboot(field)?;
        field.sh(&format!("{VARIABLE} && {IS_WRITTEN}"))?;
        tpm(field)
    })
    .on(Machine::Uefi),
    virsh("`virsh suspend`, `resume`, `domstats`", domain::suspend_and_resume),
    virsh("`virsh blockresize`", domain::resize_disk),
    virsh("`virsh snapshot-create-as`, `blockcommit`", domain::snapshot_and_commit),
    virsh("`virsh save`, `restore`", domain::save_and_restore),
    virsh("`virsh reset`", domain::reset),
    virsh("`virsh migrate` once more after that", domain::move_on),
];

/// The row of this name.
///
/// # Panics
/// If there is none.
#[must_use]
pub fn named(name: &str) -> &'static Row {
    ROWS.iter().find(|row| row.name == name).unwrap_or_else(|| panic!("no row {name:?}"))
}

/// As if nothing had been done with it.
fn move_on(field: &mut Field) -> Done {
    field.move_on(1);
    Ok(String::new())
}
