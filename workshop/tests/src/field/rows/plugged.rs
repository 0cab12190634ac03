//! What is plugged into a VM and unplugged again, and memory that grows and shrinks.

use std::cell::RefCell;
use std::path::PathBuf;
use std::process::Stdio;

use lab::hosts::RUN_DIR;
use qemu::qmp::{Event, Qmp};
use serde_json::{Value, json};

use super::commands::{MARK, awaits, execute};
use crate::MIB;
use crate::field::{Done, Field, NAME};

const PLUGGED_MAC: &str = "52:54:00:77:00:09";
pub(super) const PLUG: &str = "plug";
/// The bus of a q35 for devices that are plugged.
pub(super) const SPARE: &str = "spare";
/// Of QEMU 7.2: newer ones can hand over their state.
pub(super) const VIRTIOFSD: &str = "/usr/lib/qemu/virtiofsd";
/// Runs it with a directory of the host's own for its lock, whose name is its socket's path: VMs of
/// other hosts have the same path.
const SERVE: &str = "mkdir -p /run/virtiofsd && mount -t tmpfs lab /run/virtiofsd && exec \"$@\"";
/// Of a console that QEMU keeps in memory: a power of two.
const CONSOLE_BYTES: u64 = 4096;

/// Has the guest release a device.
fn unplug(field: &Field, qmp: &Qmp) -> Result<(), String> {
    let ended = |event: &Event| {
        let refused = ["MEM_UNPLUG_ERROR", "DEVICE_UNPLUG_GUEST_ERROR", "DEVICE_DELETED"];
        refused.contains(&event.name.as_str()) && event.data["device"] == PLUG
    };
    let event =
        awaits(field, qmp, ended, |_| execute(qmp, "device_del", json!({ "id": PLUG })).map(drop))?;
    match event.name.as_str() {
        "DEVICE_DELETED" => Ok(()),
        name => Err(format!("{name}: {}", event.data)),
    }
}

pub(super) fn hub_port() -> Value {
    json!({ "type": "hubport", "id": PLUG, "hubid": 7 })
}

pub(super) fn nic(field: &mut Field, netdev: Value, bus: &str) -> Done {
    let qmp = field.qmp()?;
    execute(&qmp, "netdev_add", netdev)?;
    let device = json!({ "driver": "virtio-net-pci", "id": PLUG, "netdev": PLUG, "bus": bus,
        "mac": PLUGGED_MAC, "romfile": "" });
    execute(&qmp, "device_add", device)?;
    let seen = |field: &Field| field.sh(&format!("ip -br link | grep {PLUGGED_MAC}")).is_ok();
    field.shows("the guest has the card", seen)?;
    unplug(field, &qmp)?;
    field.shows("the guest has lost the card", |field| !seen(field))?;
    execute(&qmp, "netdev_del", json!({ "id": PLUG }))?;
    Ok(String::new())
}

/// A file for a disk, with the mark in it, that both hosts see: its path here, and theirs.
pub(super) fn medium_file(
    field: &Field,
    name: &str,
    mark: &str,
) -> Result<(PathBuf, String), String> {
    let (here, there) = field.shared(&format!("files-{name}"));
    let mut content = mark.as_bytes().to_vec();
    content.resize(usize::try_from(16 * MIB).expect("small"), 0);
    std::fs::write(&here, content).map_err(|error| error.to_string())?;
    Ok((here, there))
}

/// A console besides the serial one.
pub(super) fn console(field: &mut Field) -> Done {
    let qmp = field.qmp()?;
    let backend = json!({ "type": "ringbuf", "data": { "size": CONSOLE_BYTES } });
    execute(&qmp, "chardev-add", json!({ "id": PLUG, "backend": backend }))?;
    let device = json!({ "driver": "virtconsole", "id": PLUG, "chardev": PLUG, "bus": "serial.0" });
    execute(&qmp, "device_add", device)?;
    let shown = RefCell::new(String::new());
    field.shows("the console shows it", |field| {
        // Those without a device refuse it.
        let _ = field.sh(&format!(
            "for c in /dev/hvc*; do test -c $c && echo {MARK} >$c; done 2>/dev/null; true"
        ));
        // What was read is no longer in the buffer.
        let read = json!({ "device": PLUG, "size": CONSOLE_BYTES });
        let read = execute(&qmp, "ringbuf-read", read).unwrap_or_default();
        shown.borrow_mut().push_str(read.as_str().unwrap_or_default());
        shown.borrow().contains(MARK)
    })?;
    unplug(field, &qmp)?;
    field.shows("the guest has lost the console", |field| {
        field.sh("ls /sys/class/virtio-ports | grep p0$").is_err()
    })?;
    execute(&qmp, "chardev-remove", json!({ "id": PLUG }))?;
    Ok(String::new())
}

pub(super) fn disk(field: &mut Field) -> Done {
    let device = json!({ "driver": "virtio-blk-pci", "bus": SPARE });
    plugged_disk(field, device, "/dev/vdc", |_| Ok(()))
}

pub(super) fn nvme(field: &mut Field) -> Done {
    let device = json!({ "driver": "nvme", "serial": PLUG, "bus": SPARE });
    plugged_disk(field, device, "/dev/nvme0n1", |field| field.stays("/nvme"))
}

/// Plugs a disk, writes to it, does something, and unplugs it.
pub(super) fn plugged_disk(
    field: &mut Field,
    mut device: Value,
    at: &str,
    act: impl FnOnce(&mut Field) -> Result<(), String>,
) -> Done {
    let qmp = field.qmp()?;
    let (here, there) = medium_file(field, "plugged", "")?;
    let file = json!({ "driver": "file", "filename": there });
    execute(&qmp, "blockdev-add", json!({ "driver": "raw", "node-name": PLUG, "file": file }))?;
    for name in ["id", "drive"] {
        device[name] = PLUG.into();
    }
    execute(&qmp, "device_add", device)?;
    let is_there = format!("test -b {at}");
    field.shows("the guest has the disk", |field| field.sh(&is_there).is_ok())?;
    field.sh(&format!("echo {MARK} | dd of={at} bs=512 conv=sync,fsync 2>&1"))?;
    act(field)?;
    unplug(field, &qmp)?;
    field.shows("the guest has lost the disk", |field| field.sh(&is_there).is_err())?;
    execute(&qmp, "blockdev-del", json!({ "node-name": PLUG }))?;
    let written = std::fs::read(&here).map_err(|error| error.to_string())?;
    if written.starts_with(MARK.as_bytes()) { Ok(String::new()) } else { Err("not written".into()) }
}

/// KiB of memory that the guest has.
fn memory_kib(field: &Field) -> u64 {
    let said = field.sh("awk '/^MemTotal/ { print $2 }' /proc/meminfo");
    said.ok().and_then(|it| it.parse().ok()).unwrap_or_default()
}

/// Waits until the guest has 128 MiB more than before, and its kernel uses most of that.
fn uses_more_memory(field: &Field, before_kib: u64) -> Result<(), String> {
    field.shows("the guest uses the memory", |field| {
        let _ = field.sh("for b in /sys/devices/system/memory/memory*/state; do \
             grep -q offline $b && echo online_movable >$b; done; true");
        memory_kib(field) >= before_kib + 100 * 1024
    })
}

pub(super) fn memory(field: &mut Field) -> Done {
    let qmp = field.qmp()?;
    let before = memory_kib(field);
    let backend = json!({ "qom-type": "memory-backend-ram", "id": PLUG, "size": 128 * MIB });
    execute(&qmp, "object-add", backend)?;
    execute(&qmp, "device_add", json!({ "driver": "pc-dimm", "id": PLUG, "memdev": PLUG }))?;
    uses_more_memory(field, before)?;
    unplug(field, &qmp)?;
    execute(&qmp, "object-del", json!({ "id": PLUG }))?;
    field.shows("the guest has lost the memory", |field| memory_kib(field) <= before)?;
    Ok(String::new())
}

pub(super) fn virtio_mem(field: &mut Field) -> Done {
    let qmp = field.qmp()?;
    let before = memory_kib(field);
    let device = "/machine/peripheral/more";
    let request = |size: u64| {
        let size = json!({ "path": device, "property": "requested-size", "value": size });
        execute(&qmp, "qom-set", size)
    };
    request(128 * MIB)?;
    uses_more_memory(field, before)?;
    request(0)?;
    field.shows("the guest gives the memory back", |_| {
        let size = json!({ "path": device, "property": "size" });
        execute(&qmp, "qom-get", size).is_ok_and(|it| it == 0)
    })?;
    Ok(String::new())
}

pub(super) fn virtiofs(field: &mut Field) -> Done {
    let qmp = field.qmp()?;
    let socket = format!("{RUN_DIR}/{NAME}.files");
    let (_, shared) = field.shared("files-shared");
    let mut serve = field.host().command("sh");
    serve.args(["-c", SERVE, "sh", VIRTIOFSD, &format!("--socket-path={socket}")]);
    serve.arg("-o").arg(format!("source={shared}"));
    serve.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut server = serve.spawn().map_err(|error| format!("virtiofsd: {error}"))?;
    let there = field.host().run_dir.join(format!("{NAME}.files"));
    let done = field
        .shows("virtiofsd listens", |_| there.exists())
        .and_then(|()| mounted_virtiofs(field, &qmp, &socket));
    let _ = server.kill();
    let _ = server.wait();
    // It leaves its socket, for which the next move would fail: nothing may be left at its source.
    let _ = std::fs::remove_file(there);
    done
}

fn mounted_virtiofs(field: &mut Field, qmp: &Qmp, socket: &str) -> Done {
    let addr = json!({ "type": "unix", "data": { "path": socket } });
    let backend = json!({ "type": "socket", "data": { "addr": addr, "server": false } });
    execute(qmp, "chardev-add", json!({ "id": PLUG, "backend": backend }))?;
    let device = json!({ "driver": "vhost-user-fs-pci", "id": PLUG, "chardev": PLUG, "tag": PLUG });
    execute(qmp, "device_add", device)?;
    field.shows("the guest mounts it", |field| {
        field.sh("mkdir -p /mnt/plug && mount -t virtiofs plug /mnt/plug").is_ok()
    })?;
    field.sh("echo here >/mnt/plug/fs && grep here /mnt/plug/fs")?;
    field.stays("vhost-user-fs")?;
    field.sh("umount /mnt/plug")?;
    unplug(field, qmp)?;
    execute(qmp, "chardev-remove", json!({ "id": PLUG }))?;
    Ok(String::new())
}

pub(super) fn vsock(field: &mut Field) -> Done {
    let qmp = field.qmp()?;
    // One of a kernel; those up to 2 have a meaning.
    let device = json!({ "driver": "vhost-vsock-pci", "id": PLUG, "bus": SPARE,
        "guest-cid": u64::from(std::process::id()) + 3 });
    execute(&qmp, "device_add", device)?;
    let driver = "/sys/bus/virtio/drivers/vmw_vsock_virtio_transport";
    field.shows("the guest has the device", |field| {
        field.sh(&format!("ls {driver} | grep virtio")).is_ok()
    })?;
    unplug(field, &qmp)?;
    Ok(String::new())
}

/// A place for a vCPU that has none.
fn place_for_a_vcpu(qmp: &Qmp) -> Result<Value, String> {
    let all = execute(qmp, "query-hotpluggable-cpus", json!({}))?;
    let mut all = all.as_array().into_iter().flatten();
    all.find(|one| one["qom-path"].is_null()).cloned().ok_or_else(|| "no place for a vCPU".into())
}

pub(super) fn vcpu(field: &mut Field) -> Done {
    let qmp = field.qmp()?;
    let place = place_for_a_vcpu(&qmp)?;
    let mut device = place["props"].clone();
    device["driver"] = place["type"].clone();
    device["id"] = PLUG.into();
    execute(&qmp, "device_add", device)?;
    field.shows("the guest uses the vCPU", |field| {
        let _ = field.sh("echo 1 >/sys/devices/system/cpu/cpu1/online");
        field.sh("nproc").is_ok_and(|it| it == "2")
    })?;
    // QEMU reports the end of the vCPU's interrupt controller, but not its own.
    execute(&qmp, "device_del", json!({ "id": PLUG }))?;
    field.shows("the vCPU is gone", |field| {
        field.sh("nproc").is_ok_and(|it| it == "1") && place_for_a_vcpu(&qmp).is_ok()
    })?;
    Ok(String::new())
}
