//! What owners and guests do with a VM. Each leaves it as it was.

use std::cell::RefCell;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use lab::field::{KEPT_PCR, Machine, PCR};
use lab::hosts::RUN_DIR;
use qemu::guest_port;
use qemu::qmp::{Event, Qmp};
use serde_json::{Value, json};

use super::domain::{self, CarriedDomain};
use super::{Done, Field, Mover, NAME, SHOWS_MAX, Way};
use crate::MIB;

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
    booting("`system_reset`", |field| boots(field, |field| ask(field, "system_reset", json!({})))),
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

const MARK: &str = "field-mark";
/// The name of the card of the guests' network, in `$c`.
const CARD: &str = "c=$(ip -br link | awk '/52:54:00:77:00:01/ { print $1 }')";
/// The devices of a driver that a line unbinds, in `$d`.
const ALL: &str = "d=$(ls -d virtio*)";
const DATA: &str = "d=$(basename $(readlink -f /sys/block/vdb/device))";
/// The name of the second card, in `$c`.
const SECOND: &str = "c=$(for i in /sys/class/net/*; do \
     readlink $i/device/driver | grep -q e1000e && basename $i; done)";
const PLUGGED_MAC: &str = "52:54:00:77:00:09";
const PLUG: &str = "plug";
/// The bus of a q35 for devices that are plugged.
const SPARE: &str = "spare";
/// A UEFI variable, in `$v`.
const VARIABLE: &str = "v=/sys/firmware/efi/efivars/Field-77000000-0000-0000-0000-000000000001 && \
     { test -e $v && chattr -i $v; true; }";
/// Whether the firmware has it with what was written, behind four bytes of attributes.
const IS_WRITTEN: &str = "test \"$(cat $v | tail -c 1)\" = x";
/// Of QEMU 7.2: newer ones can hand over their state.
const VIRTIOFSD: &str = "/usr/lib/qemu/virtiofsd";
/// Runs it with a place of the host's own for its lock, which it names after its socket: the VMs of
/// other hosts have one with the same path.
const SERVE: &str = "mkdir -p /run/virtiofsd && mount -t tmpfs lab /run/virtiofsd && exec \"$@\"";
/// Of a console that QEMU keeps in memory: a power of two.
const CONSOLE_BYTES: u64 = 4096;
/// Longest time for an answer of the guest's helper, which is asked again.
const GREETING_MAX: Duration = Duration::from_secs(3);
const STANDSTILL: Duration = Duration::from_secs(5);

fn write_variable(field: &mut Field) -> Done {
    field.sh(&format!("{VARIABLE} && printf '\\7\\0\\0\\0x' >$v && {IS_WRITTEN}"))
}

fn execute(qmp: &Qmp, command: &str, arguments: Value) -> Result<Value, String> {
    qmp.execute(command, arguments).map_err(|error| format!("{command}: {error}"))
}

fn ask(field: &Field, command: &str, arguments: Value) -> Done {
    execute(&*field.qmp()?, command, arguments).map(|_| String::new())
}

/// Does something after which QEMU sends an event.
fn awaits(
    field: &Field,
    qmp: &Qmp,
    is_it: impl Fn(&Event) -> bool,
    act: impl FnOnce(&Field) -> Result<(), String>,
) -> Result<Event, String> {
    let events = qmp.events();
    act(field)?;
    let end = Instant::now() + SHOWS_MAX;
    loop {
        let event = events.recv_deadline(end).map_err(|_| "QEMU sends no event".to_owned())?;
        if is_it(&event) {
            return Ok(event);
        }
    }
}

fn serial_console(field: &mut Field) -> Done {
    field.sh(&format!("echo {MARK} >/dev/ttyS0"))?;
    field.shows("the console shows it", |field| {
        field.guest().spec.console(field.host()).contains(MARK)
    })?;
    Ok(String::new())
}

fn guest_agent(field: &mut Field) -> Done {
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

fn helper(field: &mut Field) -> Done {
    let path = field.host().run_dir.join(format!("{NAME}.helper"));
    field.shows("the helper answers", |_| {
        let stream = guest_port::connect(&path);
        stream.and_then(|stream| guest_port::greet(&stream, GREETING_MAX)).is_ok()
    })?;
    Ok(String::new())
}

fn owners_commands(field: &mut Field) -> Done {
    let qmp = field.qmp()?;
    for command in ["query-status", "query-block", "query-pci", "query-migrate", "query-cpus-fast"]
    {
        execute(&qmp, command, json!({}))?;
    }
    let registers = json!({ "command-line": "info registers" });
    execute(&qmp, "human-monitor-command", registers)?;
    let announced = json!({ "initial": 50, "max": 550, "rounds": 5, "step": 100 });
    execute(&qmp, "announce-self", announced)?;
    execute(&qmp, "stop", json!({}))?;
    execute(&qmp, "cont", json!({}))?;
    Ok(String::new())
}

fn link_down_and_up(field: &mut Field) -> Done {
    let qmp = field.qmp()?;
    execute(&qmp, "set_link", json!({ "name": "outside", "up": false }))?;
    let carrier = |field: &Field, what: &str| {
        field.sh(&format!("{CARD}; cat /sys/class/net/$c/carrier")).is_ok_and(|it| it == what)
    };
    field.shows("the guest's link is down", |field| carrier(field, "0"))?;
    execute(&qmp, "set_link", json!({ "name": "outside", "up": true }))?;
    field.shows("the guest's link is up", |field| carrier(field, "1"))?;
    Ok(String::new())
}

fn network_down_and_up(field: &mut Field) -> Done {
    field.sh(&format!("{CARD}; ip link set $c down && sleep 1 && ip link set $c up"))
}

fn lease_renewed(field: &mut Field) -> Done {
    let before = field.lan.leases();
    field.sh(&format!("{CARD}; networkctl renew $c"))?;
    field.shows("the DHCP server renews the lease", |field| field.lan.leases() > before)?;
    Ok(String::new())
}

fn rebind(field: &Field, driver: &str, devices: &str) -> Done {
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

fn rebind_pci(field: &Field, driver: &str) -> Done {
    field.sh(&format!(
        "cd /sys/bus/pci/drivers/{driver} && d=$(ls -d 0000:*) && \
         for i in $d; do echo $i >unbind || exit 1; done && sleep 1 && \
         for i in $d; do echo $i >bind || exit 1; done"
    ))
}

fn second_has_a_carrier(field: &Field) -> Done {
    field.shows("the second card has a carrier", |field| {
        let carrier =
            field.sh(&format!("{SECOND}; ip link set $c up; cat /sys/class/net/$c/carrier"));
        carrier.is_ok_and(|it| it == "1")
    })?;
    Ok(String::new())
}

fn sata(field: &mut Field) -> Done {
    let disk = "/dev/$(ls /sys/block | grep ^sd)";
    field.shows("the disk is there", |field| field.sh(&format!("test -b {disk}")).is_ok())?;
    field.sh(&format!(
        "head -c 4M /dev/urandom >/tmp/x && dd if=/tmp/x of={disk} bs=1M oflag=direct 2>&1 && \
         dd if={disk} bs=1M count=4 iflag=direct 2>/dev/null | cmp - /tmp/x && rm /tmp/x"
    ))?;
    Ok(String::new())
}

/// A program that opens the watchdog and then hangs.
fn watchdog(field: &mut Field) -> Done {
    let find = "w=/dev/$(basename $(dirname $(grep -l i6300 /sys/class/watchdog/*/identity)))";
    boots(field, |field| field.sh_later(&format!("{find}; exec 3>$w; sleep 1000")))
}

fn rng(field: &mut Field) -> Done {
    rebind(field, "virtio_rng", ALL)?;
    field.sh("dd if=/dev/hwrng of=/dev/null bs=64 count=4 2>&1")?;
    Ok(String::new())
}

fn virtio_serial(field: &mut Field) -> Done {
    // A port that comes while its unit still stops doesn't start it: systemd drops that job.
    let stopped = "while test \"$(systemctl is-active droveway-guest)\" = deactivating; do \
                   sleep 0.1; done";
    rebind_after(field, "virtio_console", ALL, &format!("sleep 1 && {stopped}"))?;
    field.sh("systemctl restart qemu-guest-agent")?;
    guest_agent(field)?;
    // Its port starts it again.
    helper(field)
}

fn balloon(field: &mut Field) -> Done {
    let qmp = field.qmp()?;
    let now = || {
        let known = execute(&qmp, "query-balloon", json!({}));
        known.ok().and_then(|it| it["actual"].as_u64()).unwrap_or_default()
    };
    let all = now();
    let less = all - 64 * MIB;
    execute(&qmp, "balloon", json!({ "value": less }))?;
    field.shows("the guest gives memory back", |_| now() <= less + MIB)?;
    execute(&qmp, "balloon", json!({ "value": all }))?;
    field.shows("the guest has all of its memory again", |_| now() == all)?;
    Ok(String::new())
}

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

fn hub_port() -> Value {
    json!({ "type": "hubport", "id": PLUG, "hubid": 7 })
}

fn nic(field: &mut Field, netdev: Value, bus: &str) -> Done {
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
fn medium_file(field: &Field, name: &str, mark: &str) -> Result<(PathBuf, String), String> {
    let (here, there) = field.shared(&format!("files-{name}"));
    let mut content = mark.as_bytes().to_vec();
    content.resize(usize::try_from(16 * MIB).expect("small"), 0);
    std::fs::write(&here, content).map_err(|error| error.to_string())?;
    Ok((here, there))
}

/// A console besides the serial one.
fn console(field: &mut Field) -> Done {
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

fn disk(field: &mut Field) -> Done {
    let device = json!({ "driver": "virtio-blk-pci", "bus": SPARE });
    plugged_disk(field, device, "/dev/vdc", |_| Ok(()))
}

fn nvme(field: &mut Field) -> Done {
    let device = json!({ "driver": "nvme", "serial": PLUG, "bus": SPARE });
    plugged_disk(field, device, "/dev/nvme0n1", |field| field.stays("/nvme"))
}

/// Plugs a disk, writes to it, does something, and unplugs it.
fn plugged_disk(
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

fn memory(field: &mut Field) -> Done {
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

fn virtio_mem(field: &mut Field) -> Done {
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

/// Its registers are as the firmware and guests have left them.
fn tpm(field: &mut Field) -> Done {
    // TPM2_PCR_Extend of register 16, with an empty password and 32 zeros.
    let extend = r"\200\2\0\0\0\101\0\0\1\202\0\0\0\20\0\0\0\11\100\0\0\11\0\0\0\0\0\0\0\0\1\0\13";
    let zeros = r"\0".repeat(32);
    field.sh(&format!(
        "{PCR}; test \"$(pcr '\\1\\0\\0')\" = \"$(cat {KEPT_PCR})\" && old=$(pcr '\\0\\0\\1') && \
         printf '{extend}{zeros}' >/dev/tpm0 && test \"$(pcr '\\0\\0\\1')\" != \"$old\""
    ))
}

/// A device of a kind that QEMU can't migrate while it is mounted.
fn shared_by_9p(field: &mut Field) -> Done {
    field.sh("modprobe -a 9pnet_virtio 9p && mkdir -p /mnt/files && \
         mount -t 9p -o trans=virtio files /mnt/files && echo here >/mnt/files/9p && \
         grep here /mnt/files/9p")?;
    field.stays("VirtFS")?;
    field.sh("umount /mnt/files")
}

fn virtiofs(field: &mut Field) -> Done {
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

fn vsock(field: &mut Field) -> Done {
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

/// As if nothing had been done with it.
fn move_on(field: &mut Field) -> Done {
    field.move_on(1);
    Ok(String::new())
}

/// A place for a vCPU that has none.
fn place_for_a_vcpu(qmp: &Qmp) -> Result<Value, String> {
    let all = execute(qmp, "query-hotpluggable-cpus", json!({}))?;
    let mut all = all.as_array().into_iter().flatten();
    all.find(|one| one["qom-path"].is_null()).cloned().ok_or_else(|| "no place for a vCPU".into())
}

fn vcpu(field: &mut Field) -> Done {
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

fn disk_resized(field: &mut Field) -> Done {
    let size = 48 * MIB;
    ask(field, "block_resize", json!({ "device": "data", "size": size }))?;
    field.shows("the guest sees the new size", |field| {
        field.sh("blockdev --getsize64 /dev/vdb").is_ok_and(|it| it == size.to_string())
    })?;
    Ok(String::new())
}

fn snapshot(field: &mut Field) -> Done {
    let qmp = field.qmp()?;
    // The image below this one is every test's.
    let [path, base] = ["files-snapshot", "files-root"].map(|name| field.shared(name).1);
    let taken = json!({ "device": "root", "snapshot-file": path, "format": "qcow2" });
    execute(&qmp, "blockdev-snapshot-sync", taken)?;
    field.sh("head -c 2M /dev/urandom >/var/tmp/more && sync && rm /var/tmp/more")?;
    let of_job = |name: &'static str| {
        move |event: &Event| event.name == name && event.data["device"] == PLUG
    };
    awaits(field, &qmp, of_job("BLOCK_JOB_READY"), |_| {
        let commit = json!({ "job-id": PLUG, "device": "root", "base": base });
        execute(&qmp, "block-commit", commit).map(drop)
    })?;
    let ended = awaits(field, &qmp, of_job("BLOCK_JOB_COMPLETED"), |_| {
        execute(&qmp, "block-job-complete", json!({ "device": PLUG })).map(drop)
    })?;
    if ended.data["error"].is_null() { Ok(String::new()) } else { Err(ended.data.to_string()) }
}

fn medium(field: &mut Field) -> Done {
    let qmp = field.qmp()?;
    for mark in ["first", "second"] {
        let (_, path) = medium_file(field, mark, mark)?;
        let medium = json!({ "id": "cd", "filename": path, "format": "raw", "force": true });
        execute(&qmp, "blockdev-change-medium", medium)?;
        field.shows("the guest reads the medium", |field| {
            let read =
                format!("dd if=/dev/sr0 bs=2048 count=1 2>/dev/null | head -c {}", mark.len());
            field.sh(&read).is_ok_and(|it| it == mark)
        })?;
    }
    execute(&qmp, "eject", json!({ "id": "cd", "force": true }))?;
    Ok(String::new())
}

/// The guest's clock lags afterwards, unless something in the guest sets it: that is documented.
fn standstill(field: &mut Field) -> Done {
    let clock = |field: &Field| -> Result<f64, String> {
        field.sh("date +%s.%N")?.parse().map_err(|_| "the guest's clock".to_owned())
    };
    let (before, started) = (clock(field)?, Instant::now());
    let qmp = field.qmp()?;
    execute(&qmp, "stop", json!({}))?;
    std::thread::sleep(STANDSTILL);
    execute(&qmp, "cont", json!({}))?;
    let lag = started.elapsed().as_secs_f64() - (clock(field)? - before);
    Ok(format!("the guest's clock is {lag:.0} s late"))
}

fn suspend(field: &mut Field) -> Done {
    let qmp = field.qmp()?;
    let is =
        |what: &str| execute(&qmp, "query-status", json!({})).is_ok_and(|it| it["status"] == what);
    field.sh_later("systemctl suspend")?;
    field.shows("the guest is suspended", |_| is("suspended"))?;
    execute(&qmp, "system_wakeup", json!({}))?;
    field.shows("QEMU has woken the guest", |_| is("running"))?;
    // Until the guest has set its serial port up again, a question is lost.
    field.guest().wait_beat(SHOWS_MAX).map_err(|error| error.to_string())?;
    Ok(String::new())
}

/// Does something after which the guest boots.
fn boots(field: &mut Field, act: impl FnOnce(&mut Field) -> Done) -> Done {
    let before = field.guest().pulse().boots;
    act(field)?;
    field.guest().wait_boots(before + 1).map_err(|error| error.to_string())?;
    Ok(String::new())
}

fn reboot(field: &mut Field) -> Done {
    boots(field, |field| field.sh_later("systemctl reboot"))
}

fn kexec(field: &mut Field) -> Done {
    field.sh(
        "k=$(uname -r); kexec --load /boot/vmlinuz-$k --initrd=/boot/initrd.img-$k --reuse-cmdline",
    )?;
    boots(field, |field| field.sh_later("systemctl kexec"))
}

fn start_again(field: &mut Field) -> Done {
    boots(field, |field| {
        field.sh_later("systemctl poweroff")?;
        field.start_again();
        Ok(String::new())
    })
}
