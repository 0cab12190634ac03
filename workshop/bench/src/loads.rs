//! What a QEMU writes into RAM that it shares with the VM's former QEMU, while the VM runs in
//! neither: when it starts, loads the VM, fails to load it, and ends.
//!
//! The former QEMU is stopped, and its device state saved without RAM. Each load gets that state,
//! whole or cut off, and the RAM as it was.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use lab::error::{FileContext, LabError, Result, SystemContext};
use lab::setup::{self, Qemu};
use qemu::machine::{self, By, GuestPort, Machine, Start, UP_MAX};
use qemu::qmp::{Qmp, QmpError, RunState};
use serde_json::{Value, json};

const PAGE: usize = page::PAGE_BYTES;
/// Enough for the firmware.
const RAM: &str = "64M";
/// Devices, by names for people. The firmware and option ROMs use them before the VM is stopped.
const DEVICES: [(&str, &[&str]); 12] = [
    ("none", &[]),
    ("no-vapic", &["-global apic-common.vapic=off"]),
    ("vga", &[VGA]),
    ("virtio-gpu", &[GPU]),
    ("virtio-net", &[NET]),
    ("virtio-net-no-rom", &["-netdev user,id=n -device virtio-net-pci,netdev=n,romfile="]),
    ("e1000e", &[E1000E]),
    ("virtio-blk", &[BLK]),
    ("virtio-scsi", &[SCSI]),
    ("ahci", &[AHCI]),
    ("balloon", &[BALLOON]),
    ("all", &[VGA, GPU, NET, E1000E, BLK, SCSI, AHCI, BALLOON]),
];
const VGA: &str = "-device VGA";
const GPU: &str = "-device virtio-gpu-pci";
const NET: &str = "-netdev user,id=n -device virtio-net-pci,netdev=n";
const E1000E: &str = "-netdev user,id=e -device e1000e,netdev=e";
const BLK: &str = "-blockdev driver=null-co,node-name=b,size=1073741824,read-zeroes=on \
                   -device virtio-blk-pci,drive=b";
const SCSI: &str = "-blockdev driver=null-co,node-name=s,size=1073741824,read-zeroes=on \
                    -device virtio-scsi-pci -device scsi-hd,drive=s";
const AHCI: &str = "-blockdev driver=null-co,node-name=a,size=1073741824,read-zeroes=on \
                    -device ahci,id=ahci -device ide-hd,drive=a,bus=ahci.0";
const BALLOON: &str = "-device virtio-balloon-pci";

/// The name of the file to which the firmware writes.
const FIRMWARE: &str = "firmware";
/// What it writes when it has set up all devices.
const READY: [&str; 2] = ["Booting from", "No bootable device"];
const READY_MAX: Duration = Duration::from_secs(120);
/// How long a network card's option ROM then uses the card.
const RUNS_ON: Duration = Duration::from_secs(3);
const CHECK_EACH: Duration = Duration::from_millis(20);
const MIGRATES_MAX: Duration = Duration::from_secs(60);
/// What is missing at the end of a stream that can't be loaded, in bytes.
const CUTS: [usize; 5] = [64, 1 << 10, 4 << 10, 16 << 10, 64 << 10];
/// From this version on, a QEMU that can't load the VM stays.
const STAYS_SINCE: (u32, u32, u32) = (9, 1, 0);
/// QEMU's name for a connection.
const CONNECTION: &str = "loads";
const SHOWN_MAX: usize = 4;
/// A record of a stream: a description of what was before.
const DESCRIPTION: u8 = 6;
/// That byte and its length.
const HEAD: usize = 5;

/// Pages, by number.
type Pages = BTreeSet<u64>;

/// A QEMU that ends when this is dropped.
struct Vm(Machine);

impl Drop for Vm {
    fn drop(&mut self) {
        if let Err(error) = self.0.quit() {
            eprintln!("lab: a QEMU stays behind: {error}");
        }
    }
}

/// A VM whose QEMU is stopped, and what another one needs.
struct Stopped<'s> {
    /// It keeps its files. First, so that it ends before they are removed.
    _vm: Vm,
    machine: &'s str,
    devices: &'s [&'s str],
    dir: tempfile::TempDir,
    /// Its device state.
    stream: Vec<u8>,
    ram: Vec<u8>,
}

/// What one QEMU has written.
#[derive(Debug, Default)]
struct Written {
    start: Pages,
    load: Pages,
    failed_loads: Pages,
    end: Pages,
}

/// Measures each pair of QEMUs, and prints a table; `only` names devices, or is empty.
///
/// # Errors
/// If the lab can't be set up. A VM that can't be started or loaded is a row of the table.
pub fn run(only: &[String]) -> Result<()> {
    let qemus = setup::qemus(&setup::ensure()?)?;
    let Some(oldest) = qemus.first() else { return Ok(()) };
    let version = format!("{}.{}", oldest.version.major, oldest.version.minor);
    println!("| machine | devices | from | to | start | load | failed loads | end |");
    println!("|{}", " --- |".repeat(8));
    let wanted = |name: &str| only.is_empty() || only.iter().any(|one| one == name);
    for machine in ["pc-i440fx", "pc-q35"].map(|chipset| format!("{chipset}-{version}")) {
        for (name, devices) in DEVICES.iter().filter(|(name, _)| wanted(name)) {
            for from in &qemus {
                let row = format!("| {machine} | {name} | {} |", from.version);
                let stopped = match Stopped::new(from, &machine, devices) {
                    Ok(stopped) => stopped,
                    Err(error) => {
                        println!("{row} | {} | | | |", cell(&error));
                        continue;
                    }
                };
                for to in &qemus {
                    match stopped.measure(to) {
                        Ok(written) => println!("{row} {} | {written} |", to.version),
                        Err(error) => {
                            println!("{row} {} | {} | | | |", to.version, cell(&error));
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

impl<'s> Stopped<'s> {
    fn new(qemu: &Qemu, machine: &'s str, devices: &'s [&'s str]) -> Result<Self> {
        // Memory, as it is for VMs.
        let dir = tempfile::tempdir_in("/dev/shm").at("create a directory in", "/dev/shm")?;
        let vm = start(qemu, dir.path(), Side::Source, machine, devices)?;
        wait_ready(&dir.path().join(Side::Source.name()).join(FIRMWARE))?;
        thread::sleep(RUNS_ON);
        let qmp = &vm.0.qmp;
        command(qmp, "stop", json!({}))?;
        let mut stream = save(qmp)?;
        stream.truncate(devices_end(&stream));
        let ram = read(dir.path())?;
        Ok(Self { _vm: vm, machine, devices, dir, stream, ram })
    }

    /// Starts another QEMU and loads the VM, as often as there are cuts and once more.
    fn measure(&self, qemu: &Qemu) -> Result<Written> {
        let mut written = Written::default();
        let dir = self.dir.path();
        let (loaded, started) = self.load(qemu, &self.stream, &mut written.start)?;
        let Some(vm) = loaded else {
            return Err(LabError::Unsupported("it can't load the VM".to_owned()));
        };
        let after = read(dir)?;
        written.load = changed(&started, &after);
        drop(vm);
        written.end = changed(&after, &read(dir)?);
        for cut in CUTS {
            let Some(length) = self.stream.len().checked_sub(cut) else { continue };
            let (loaded, started) = self.load(qemu, &self.stream[..length], &mut Pages::new())?;
            if loaded.is_some() {
                return Err(LabError::Unsupported(format!("it loads a VM without {cut} bytes")));
            }
            written.failed_loads.extend(changed(&started, &read(dir)?));
        }
        Ok(written)
    }

    /// Has a new QEMU load a stream. Returns it, unless the load has failed and it has ended, and
    /// what RAM was when it had started.
    fn load(
        &self,
        qemu: &Qemu,
        stream: &[u8],
        at_start: &mut Pages,
    ) -> Result<(Option<Vm>, Vec<u8>)> {
        let dir = self.dir.path();
        let path = dir.join("ram");
        let file = File::options().write(true).open(&path).at("open", &path)?;
        file.write_all_at(&self.ram, 0).at("write", &path)?;
        let vm = start(qemu, dir, Side::Destination, self.machine, self.devices)?;
        let started = read(dir)?;
        *at_start = changed(&self.ram, &started);
        let is_loaded = load(&vm.0.qmp, stream)?;
        // Dropped here, it ends before its RAM is read.
        Ok((is_loaded.then_some(vm), started))
    }
}

impl std::fmt::Display for Written {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let all = [&self.start, &self.load, &self.failed_loads, &self.end];
        f.write_str(&all.map(shown).join(" | "))
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Source,
    Destination,
}

impl Side {
    /// The name of its QEMU's directory.
    fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Destination => "destination",
        }
    }
}

/// Starts a QEMU whose RAM is the file `ram` in `dir`.
fn start(qemu: &Qemu, dir: &Path, side: Side, machine: &str, devices: &[&str]) -> Result<Vm> {
    let line = format!(
        "-accel tcg -machine {machine},memory-backend=ram -m {RAM} -nodefaults -no-user-config \
         -display none -object memory-backend-file,id=ram,size={RAM},share=on,mem-path={}/ram \
         -chardev file,id=firmware,path={FIRMWARE} \
         -device isa-debugcon,iobase=0x402,chardev=firmware {}",
        dir.display(),
        devices.join(" ")
    );
    let mut argv = vec![qemu.program.display().to_string()];
    argv.extend(line.split_whitespace().map(str::to_owned));
    let own = dir.join(side.name());
    let start = Start {
        name: side.name(),
        argv: &argv,
        cwd: &own,
        dir: &own,
        incoming: side == Side::Destination,
        machine: None,
        by: By::Operator,
        user: None,
        guest_port: GuestPort::None,
        knows_legacy_ack: false,
        up_max: UP_MAX,
        idle_max: UP_MAX,
    };
    let vm = machine::start(&start).map_err(|error| LabError::Unsupported(error.to_string()))?;
    let vm = Vm(vm);
    let leave_out = json!([{ "capability": "x-ignore-shared", "state": true }]);
    command(&vm.0.qmp, "migrate-set-capabilities", json!({ "capabilities": leave_out }))?;
    Ok(vm)
}

/// Waits until the firmware has set up all devices.
fn wait_ready(output: &Path) -> Result<()> {
    let until = Instant::now() + READY_MAX;
    loop {
        let text = fs::read(output).at("read", output)?;
        let text = String::from_utf8_lossy(&text);
        if READY.iter().any(|words| text.contains(words)) {
            return Ok(());
        }
        if Instant::now() >= until {
            let what = "the firmware".to_owned();
            let detail = format!(", last: {}", text.lines().last().unwrap_or_default());
            return Err(LabError::Silent { what, waited: READY_MAX, detail });
        }
        thread::sleep(CHECK_EACH);
    }
}

/// Has QEMU write the stream of its migration, and reads it.
fn save(qmp: &Qmp) -> Result<Vec<u8>> {
    let mut ours = connect(qmp)?;
    command(qmp, "migrate", json!({ "uri": format!("fd:{CONNECTION}") }))?;
    let mut stream = Vec::new();
    ours.read_to_end(&mut stream).doing("read QEMU's stream")?;
    if is_completed(qmp)? {
        return Ok(stream);
    }
    Err(LabError::Unsupported("it can't save the VM".to_owned()))
}

/// Has QEMU load a stream, which may end early; returns whether it could.
fn load(qmp: &Qmp, stream: &[u8]) -> Result<bool> {
    let mut ours = connect(qmp)?;
    let mut arguments = json!({ "uri": format!("fd:{CONNECTION}") });
    if qmp.version() >= STAYS_SINCE {
        arguments["exit-on-error"] = false.into();
    }
    command(qmp, "migrate-incoming", arguments)?;
    // A QEMU that stops reading reports why itself.
    let _ = ours.write_all(stream).and_then(|()| ours.shutdown(Shutdown::Write));
    is_completed(qmp)
}

/// A connection of which QEMU has the other end.
fn connect(qmp: &Qmp) -> Result<UnixStream> {
    let (ours, theirs) = UnixStream::pair().doing("create a socket pair")?;
    ours.set_read_timeout(Some(MIGRATES_MAX)).doing("bound a socket's reads")?;
    ours.set_write_timeout(Some(MIGRATES_MAX)).doing("bound a socket's writes")?;
    let named = json!({ "fdname": CONNECTION });
    let passed = qmp.execute_with(theirs.as_fd(), "getfd", named);
    passed.map(|_| ours).map_err(|error| refused("getfd", &error))
}

/// Waits for the end of a migration. A QEMU before 9.1 that can't load ends.
fn is_completed(qmp: &Qmp) -> Result<bool> {
    let until = Instant::now() + MIGRATES_MAX;
    loop {
        let status = match qmp.execute("query-migrate", json!({})) {
            Ok(answer) => answer["status"].as_str().unwrap_or_default().to_owned(),
            Err(QmpError::Closed) => return Ok(false),
            Err(error) => return Err(refused("query-migrate", &error)),
        };
        let waits = || qmp.run_state().is_ok_and(|state| state == RunState::InMigrate);
        match status.as_str() {
            "completed" if !waits() => return Ok(true),
            "failed" => return Ok(false),
            _ => {}
        }
        if Instant::now() >= until {
            let contender = "loads".to_owned();
            return Err(LabError::Late { contender, waited: MIGRATES_MAX });
        }
        thread::sleep(CHECK_EACH);
    }
}

fn command(qmp: &Qmp, name: &str, arguments: Value) -> Result<()> {
    qmp.execute(name, arguments).map(drop).map_err(|error| refused(name, &error))
}

fn refused(name: &str, error: &QmpError) -> LabError {
    LabError::Qmp { command: name.to_owned(), answer: error.to_string() }
}

fn read(dir: &Path) -> Result<Vec<u8>> {
    let path = dir.join("ram");
    fs::read(&path).at("read", &path)
}

/// The pages that differ.
fn changed(before: &[u8], now: &[u8]) -> Pages {
    let pages = before.chunks(PAGE).zip(now.chunks(PAGE));
    (0..).zip(pages).filter(|(_, (before, now))| before != now).map(|(nth, _)| nth).collect()
}

/// Where the devices' states end in a stream: a description of them follows, which no QEMU needs.
fn devices_end(stream: &[u8]) -> usize {
    let is_description = |at: &usize| {
        let [DESCRIPTION, a, b, c, d] = stream[*at..*at + HEAD] else { return false };
        u64::from(u32::from_be_bytes([a, b, c, d])) == (stream.len() - *at - HEAD) as u64
    };
    let starts = (stream.len() + 1).saturating_sub(HEAD);
    (0..starts).rev().find(is_description).unwrap_or(stream.len())
}

/// An error in a cell of the table.
fn cell(error: &LabError) -> String {
    error.to_string().replace(['\n', '|'], " ")
}

/// How many pages, and the first ones' addresses.
fn shown(pages: &Pages) -> String {
    let address = |page: &u64| format!("{:#x}", page * PAGE as u64);
    let mut addresses: Vec<String> = pages.iter().take(SHOWN_MAX).map(address).collect();
    if pages.len() > SHOWN_MAX {
        addresses.push("…".to_owned());
    }
    match pages.len() {
        0 => "none".to_owned(),
        count => format!("{count}: {}", addresses.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_differ_are_counted_and_shown() {
        let before = vec![0; 8 * PAGE];
        let mut now = before.clone();
        assert_eq!(shown(&changed(&before, &now)), "none");
        (now[PAGE], now[PAGE + 1], now[3 * PAGE - 1]) = (1, 1, 1);
        assert_eq!(shown(&changed(&before, &now)), "2: 0x1000, 0x2000");
        now.fill(1);
        assert_eq!(shown(&changed(&before, &now)), "8: 0x0, 0x1000, 0x2000, 0x3000, …");
    }

    #[test]
    fn devices_end_before_their_description() {
        let description = [&[DESCRIPTION, 0, 0, 0, 2][..], b"{}"].concat();
        let stream = [&[4, 6, 0, 0, 9, 0][..], &description].concat();
        assert_eq!(devices_end(&stream), 6);
        for without in [&stream[..6], &[]] {
            assert_eq!(devices_end(without), without.len());
        }
    }
}
