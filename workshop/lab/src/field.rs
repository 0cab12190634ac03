//! The field lab's guests: Debians with the devices that people give them, each booted once, and
//! kept as a stream of QEMU's from which a test's VM goes on within seconds. One of them runs
//! programs for benchmarks.

mod lan;
mod tpm;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lab_guest::orders::Orders;
use qemu::qmp::{Qmp, QmpError};
use serde_json::{Value, json};

pub use lan::Lan;
pub use tpm::Tpm;

use crate::error::{FileContext, LabError, Result, SystemContext};
use crate::guest::{Guest, GuestSpec};
use crate::hosts::{Host, Hosts, Link, Outside, RUN_DIR, Storage};
use crate::program;
use crate::setup::{self, Image, Kit, OVMF, Qemu};

/// No multiple of 256 KiB: with other sizes TCG loses writes, as it has more RAM than this
/// (docs/TESTING.md).
const MEMORY: &str = "524440k";
/// For programs and their data.
const APPS_MEMORY: &str = "768M";
/// A file of the guest that nothing writes to any more.
const KEPT: &str = "/var/tmp/kept";
/// A shell function: `pcr '\1\0\0'` reads register 0 of the guest's TPM, `pcr '\0\0\1'` register 16.
/// Debian 11 doesn't show them in `/sys`.
pub const PCR: &str = "pcr() { exec 3<>/dev/tpm0; \
     printf '\\200\\1\\0\\0\\0\\24\\0\\0\\1\\176\\0\\0\\0\\1\\0\\13\\3'$1 >&3; \
     dd bs=4096 count=1 <&3 2>/dev/null | tail -c 32 | od -An -tx1; exec 3>&-; }";
/// A file of the guest with register 0 of its TPM, which the firmware has extended.
pub const KEPT_PCR: &str = "/var/tmp/kept-pcr";
const DATA_BYTES: u64 = 32 << 20;
/// The data disk of [`Machine::Apps`], which has a file system.
const APPS_DATA_BYTES: u64 = 512 << 20;
/// QEMU's node name of that disk.
pub const APPS_NODE: &str = "disk";
/// Numbers of the exports with the system and the data of [`Snapshot::spec_from_storage`].
pub const EXPORTED: [u16; 2] = [1, 2];
/// Arguments of sysbench for its OLTP test on that machine's PostgreSQL.
pub const SYSBENCH: &str = "oltp_read_write --db-driver=pgsql --pgsql-host=/var/run/postgresql \
                            --pgsql-user=postgres --pgsql-db=sbtest --tables=1 --table-size=20000";
/// Rows of its table, always.
pub const SYSBENCH_ROWS: u32 = 20_000;
const MIB: u64 = 1 << 20;
/// The guest takes its root from a disk, without a boot loader.
const WORDS: &str = "root=/dev/vda rw";
/// Longest time until a guest that speaks has started its services.
const BOOT_MAX: Duration = Duration::from_secs(600);
const PAUSE: Duration = Duration::from_secs(1);
/// Longest time until QEMU answers at its socket, or has written a stream.
const QEMU_MAX: Duration = Duration::from_secs(120);

/// The devices of a machine besides its disk of data, its network card and its ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    /// A q35 with virtio devices and places for more, under the small kernel.
    Virtio,
    /// The same with devices that exist outside of QEMU too, under the large kernel.
    Devices,
    /// An i440fx with UEFI and its variable store, a TPM, and memory that grows, under the small
    /// kernel.
    Uefi,
    /// A q35 with virtio devices, for programs that benchmarks use, under the small kernel.
    Apps,
}

impl Machine {
    /// Those of the field lab.
    pub const ALL: [Self; 3] = [Self::Virtio, Self::Devices, Self::Uefi];

    fn name(self) -> &'static str {
        match self {
            Self::Virtio => "virtio",
            Self::Devices => "devices",
            Self::Uefi => "uefi",
            Self::Apps => "apps",
        }
    }

    fn devices(self) -> &'static [&'static str] {
        match self {
            Self::Virtio => &[SPARE],
            Self::Devices => &[
                SPARE,
                "ide-hd,bus=ide.1,drive=sata,id=sata",
                "VGA",
                "virtio-gpu-pci",
                "qemu-xhci",
                "usb-tablet",
                "i6300esb,id=dog",
                "e1000e,netdev=second,romfile=,id=second",
                "virtio-9p-pci,fsdev=files,mount_tag=files",
            ],
            Self::Uefi => &["tpm-crb,tpmdev=tpm", "virtio-mem-pci,memdev=more,id=more"],
            Self::Apps => &[],
        }
    }
}

/// Devices of every machine.
const DEVICES: [&str; 9] = [
    "virtio-blk-pci,drive=root,id=root",
    "virtio-blk-pci,drive=data,id=data",
    "virtio-scsi-pci,id=scsi",
    "scsi-cd,drive=cd,id=cd",
    "virtio-rng-pci,id=rng",
    "virtio-balloon-pci,id=balloon",
    "virtio-serial-pci,id=serial",
    "virtserialport,chardev=agent,name=org.qemu.guest_agent.0",
    // Without it, the unit of the helper's package does not start.
    "virtserialport,chardev=helper,name=org.droveway.guest.0",
];
/// A place for devices that are plugged. An i440fx has places on its bus.
const SPARE: &str = "pcie-root-port,id=spare,chassis=10";

/// The images of a VM's disks: paths that both hosts see.
#[derive(Clone, Debug)]
pub struct Disks {
    /// The guest's system.
    pub root: PathBuf,
    /// A disk without content; of [`Machine::Apps`] with a file system.
    pub data: PathBuf,
    /// What the SATA disk of [`Machine::Devices`] holds.
    pub sata: PathBuf,
    /// The variable store of [`Machine::Uefi`].
    pub variables: PathBuf,
    /// A directory that [`Machine::Devices`] sees, and others may.
    pub shared: PathBuf,
}

impl Disks {
    /// Their paths in a directory.
    #[must_use]
    pub fn within(dir: &Path) -> Self {
        let path = |name: &str| dir.join(format!("files-{name}"));
        Self {
            root: path("root"),
            data: path("data"),
            sata: path("sata"),
            variables: path("variables"),
            shared: path("shared"),
        }
    }

    fn make(&self, format: &str, behind: &Path, variables: &Path) -> Result<()> {
        let mut make = program::command("qemu-img");
        make.args(["create", "-q", "-f", "qcow2", "-F", format, "-b"]).arg(behind);
        program::output(make.arg(&self.root))?;
        for path in [&self.data, &self.sata] {
            let file = fs::File::create(path).at("create", path)?;
            file.set_len(DATA_BYTES).at("extend", path)?;
        }
        fs::create_dir(&self.shared).at("create", &self.shared)?;
        if variables.is_file() {
            fs::copy(variables, &self.variables).at("copy", variables)?;
        }
        Ok(())
    }
}

/// A VM that has booted, as a stream of QEMU's.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Its devices.
    pub machine: Machine,
    image: Image,
    /// The QEMU that wrote it.
    pub qemu: Qemu,
    home: PathBuf,
}

impl Snapshot {
    /// Finds or makes it.
    ///
    /// # Errors
    /// If the guest doesn't boot; with what it lacks.
    pub fn of(kit: &Kit, image: Image, machine: Machine, qemu: Qemu) -> Result<Self> {
        if machine == Machine::Uefi {
            setup::field_firmware()?;
        }
        let home = image.home.join(format!("{}-{}", machine.name(), qemu.version));
        let snapshot = Self { machine, image, qemu, home };
        let home = &snapshot.home;
        let spec = snapshot.spec("field", &Disks::within(home));
        let argv = spec.argv(kit, &snapshot.qemu.program).join("\n");
        let prepared =
            if machine == Machine::Apps { apps_prepared().join("\n") } else { String::new() };
        let recipe = format!("{argv}\n{}\n{prepared}", Outside::MAC);
        let made_by = home.join("recipe");
        if fs::read_to_string(&made_by).is_ok_and(|old| old == recipe) {
            return Ok(snapshot);
        }
        if home.is_dir() {
            fs::remove_dir_all(home).at("remove", home)?;
        }
        fs::create_dir_all(home).at("create", home)?;
        let version = snapshot.qemu.version;
        eprintln!("field: booting {} with QEMU {version} (a minute or two, once)", machine.name());
        snapshot.boot(kit, spec)?;
        // Last: without it, the next run makes all of it again.
        fs::write(&made_by, recipe).at("write", &made_by)?;
        Ok(snapshot)
    }

    fn boot(&self, kit: &Kit, spec: GuestSpec) -> Result<()> {
        let disks = Disks::within(&self.home);
        disks.make("raw", &self.image.disk, Path::new(OVMF[1]))?;
        if self.machine == Machine::Apps {
            let file = fs::File::create(&disks.data).at("create", &disks.data)?;
            file.set_len(APPS_DATA_BYTES).at("extend", &disks.data)?;
            let mut format = program::command("mke2fs");
            // Otherwise the kernel would do it while something is measured.
            format.args(["-q", "-t", "ext4", "-E", "lazy_itable_init=0,lazy_journal_init=0"]);
            program::output(format.arg(&disks.data))?;
        }
        let hosts = Hosts::new(Link::unshaped())?;
        let _lan = Lan::join(&hosts)?;
        let argv = spec.argv(kit, &self.qemu.program);
        let _tpm = self.tpm(&hosts.a, &spec.name)?;
        let mut qemu = start(&hosts.a, &argv)?;
        let guest = Guest::meet(spec, &hosts.a)?;
        wait_services(&guest)?;
        guest.ask(&format!(
            "sh head -c 4M /dev/urandom >{KEPT} && sha256sum {KEPT} >{KEPT}.sum && sync"
        ))?;
        if self.machine == Machine::Uefi {
            guest.ask(&format!("sh {PCR}; pcr '\\1\\0\\0' >{KEPT_PCR} && sync"))?;
        }
        if self.machine == Machine::Apps {
            for line in apps_prepared() {
                guest.ask(&format!("sh {line}"))?;
            }
        }
        let qmp = monitor(&hosts.a, &guest.spec.name)?;
        let ask = |command: &str, arguments: Value| {
            qmp.execute(command, arguments).map_err(|error| fault(&error))
        };
        ask("stop", json!({}))?;
        ask("migrate", json!({ "uri": format!("file:{}", self.state().display()) }))?;
        let until = Instant::now() + QEMU_MAX;
        loop {
            let status = ask("query-migrate", json!({}))?["status"].clone();
            match status.as_str() {
                Some("completed") => break,
                Some("failed") => return Err(silent("the guest's stream")),
                _ if Instant::now() > until => return Err(silent("the guest's stream")),
                _ => std::thread::sleep(Duration::from_millis(50)),
            }
        }
        let _ = qmp.execute("quit", json!({}));
        qemu.wait().doing("wait for QEMU").map(drop)
    }

    /// A TPM at a host, if the VM has one: for one start of its QEMU.
    ///
    /// # Errors
    /// If it can't be started.
    pub fn tpm(&self, host: &Host, name: &str) -> Result<Option<Tpm>> {
        (self.machine == Machine::Uefi).then(|| Tpm::start(host, name)).transpose()
    }

    fn state(&self) -> PathBuf {
        self.home.join("state")
    }

    /// QEMU's argument by which a VM starts from it, paused.
    #[must_use]
    pub fn incoming(&self) -> String {
        format!("file:{}", self.state().display())
    }

    /// Makes disks in a directory, as they were in that moment.
    ///
    /// # Errors
    /// If `qemu-img` fails.
    pub fn disks(&self, dir: &Path) -> Result<Disks> {
        let disks = Disks::within(dir);
        let kept = Disks::within(&self.home);
        disks.make("qcow2", &kept.root, &kept.variables)?;
        if self.machine == Machine::Apps {
            let mut copy = program::command("cp");
            program::output(copy.arg("--sparse=always").arg(&kept.data).arg(&disks.data))?;
        }
        Ok(disks)
    }

    /// The VM with these disks.
    #[must_use]
    pub fn spec(&self, name: &str, disks: &Disks) -> GuestSpec {
        let orders = Orders {
            seed: 5,
            random_bytes: 8 * MIB,
            text_bytes: 8 * MIB,
            tick_ms: 20,
            ..Orders::default()
        };
        let (memory, orders) = match self.machine {
            // The programs write.
            Machine::Apps => (APPS_MEMORY.to_owned(), orders),
            Machine::Virtio | Machine::Devices | Machine::Uefi => {
                let orders = Orders {
                    working_set_bytes: 16 * MIB,
                    rate: 500_000,
                    write_step_ms: 40,
                    // Each beat of a Linux guest takes two milliseconds of CPU time under TCG.
                    tick_ms: 100,
                    // On the disk, and in the page cache.
                    file_bytes: 8 * MIB,
                    file_rate: 100_000,
                    ..orders
                };
                (format!("{MEMORY},slots=4,maxmem=2G"), orders)
            }
        };
        let mut spec = GuestSpec::new(name, &memory, orders);
        let kernel = match self.machine {
            Machine::Virtio | Machine::Uefi | Machine::Apps => &self.image.small,
            Machine::Devices => &self.image.large,
        };
        spec.machine = match self.machine {
            Machine::Virtio | Machine::Devices | Machine::Apps => self.qemu.machine(),
            Machine::Uefi => format!("{},memory-backend=ram", self.qemu.i440fx()),
        };
        spec.kernel = Some(kernel.image.clone());
        spec.initrd = Some(kernel.initrd.clone());
        spec.kernel_words = WORDS;
        spec.no_reboot = false;
        spec.extra = self.arguments(name, disks);
        spec
    }

    /// A VM of [`Machine::Apps`] whose disks a storage host exports: [`EXPORTED`].
    #[must_use]
    pub fn spec_from_storage(&self, name: &str) -> GuestSpec {
        let [root, data] = EXPORTED;
        let root = format!("format=raw,{}", Storage::export_options(root, "file."));
        let data = Storage::export_options(data, "");
        let extra = apps_arguments(name, &root, &data);
        // What remains of the disks' paths is in the arguments alone.
        GuestSpec { extra, ..self.spec(name, &Disks::within(Path::new("/"))) }
    }

    fn arguments(&self, vm: &str, disks: &Disks) -> Vec<String> {
        let Disks { root, data, sata, variables, shared } = disks;
        if self.machine == Machine::Apps {
            let root = format!("format=qcow2,file={}", root.display());
            let data = format!("driver=file,filename={}", data.display());
            return apps_arguments(vm, &root, &data);
        }
        let port =
            |name: &str| format!("socket,id={name},path={RUN_DIR}/{vm}.{name},server=on,wait=off");
        let mut options = vec![
            ("-smp", "1,maxcpus=2".to_owned()),
            ("-drive", format!("file={},format=qcow2,if=none,id=root", root.display())),
            ("-drive", format!("file={},format=raw,if=none,id=data", data.display())),
            ("-drive", "if=none,id=cd,media=cdrom,readonly=on".to_owned()),
            ("-chardev", port("agent")),
            ("-chardev", port("helper")),
            ("-qmp", format!("unix:{RUN_DIR}/{vm}.monitor,server=on,wait=off")),
        ];
        if self.machine == Machine::Devices {
            let drive = format!("file={},format=raw,if=none,id=sata", sata.display());
            options.push(("-drive", drive));
            options.push(("-netdev", "hubport,id=second,hubid=0".to_owned()));
            let files = format!("local,id=files,security_model=none,path={}", shared.display());
            options.push(("-fsdev", files));
        }
        if self.machine == Machine::Uefi {
            let pflash = "if=pflash,format=raw";
            // Other processes may map it, as virtiofsd does.
            let ram = format!("memory-backend-memfd,id=ram,share=on,size={MEMORY}");
            options.extend([
                ("-drive", format!("{pflash},unit=0,readonly=on,file={}", OVMF[0])),
                ("-drive", format!("{pflash},unit=1,file={}", variables.display())),
                ("-object", ram),
                ("-object", "memory-backend-ram,id=more,size=256M".to_owned()),
                ("-chardev", format!("socket,id=tpm,path={}", Tpm::socket(vm))),
                ("-tpmdev", "emulator,id=tpm,chardev=tpm".to_owned()),
            ]);
        }
        let devices = DEVICES.iter().chain(self.machine.devices());
        options.extend(devices.map(|device| ("-device", (*device).to_owned())));
        let words = options.into_iter().flat_map(|(option, value)| [option.to_owned(), value]);
        words.chain(Outside::arguments()).collect()
    }
}

/// Makes what programs of [`Machine::Apps`] find: a directory, a file that nothing writes to, files
/// for a web server, and databases: a larger one in steps, none of which takes as long as an answer
/// may.
fn apps_prepared() -> [String; 7] {
    let as_postgres = |line: &str| format!("su postgres -c '{line}'");
    [
        "mkdir /srv/dbench && head -c 32M /dev/urandom >/srv/kept && \
         sha256sum /srv/kept >/srv/kept.sum"
            .to_owned(),
        as_postgres("createdb bench && pgbench --quiet --initialize --scale=5 bench"),
        as_postgres("createdb large && pgbench --quiet -i -I dtg --scale=15 large"),
        as_postgres("pgbench --quiet -i -I v large"),
        as_postgres("pgbench --quiet -i -I p large"),
        as_postgres(&format!("createdb sbtest && sysbench {SYSBENCH} prepare")),
        "cd /var/www/html && for n in $(seq 0 15); do head -c 256K /dev/urandom >$n; done; sync"
            .to_owned(),
    ]
}

/// With the system's image as options of a drive, and the data's as options of a node.
fn apps_arguments(vm: &str, root: &str, data: &str) -> Vec<String> {
    let port = format!("socket,id=helper,path={RUN_DIR}/{vm}.helper,server=on,wait=off");
    let options = [
        ("-qmp", format!("unix:{RUN_DIR}/{vm}.monitor,server=on,wait=off")),
        ("-chardev", port),
        ("-drive", format!("{root},if=none,id=root")),
        ("-blockdev", format!("{data},node-name={APPS_NODE}-file")),
        ("-blockdev", format!("driver=raw,node-name={APPS_NODE},file={APPS_NODE}-file")),
        ("-device", "virtio-blk-pci,drive=root,id=root".to_owned()),
        ("-device", format!("virtio-blk-pci,drive={APPS_NODE},id=data")),
        ("-device", "virtio-rng-pci,id=rng".to_owned()),
        ("-device", "virtio-serial-pci,id=serial".to_owned()),
        ("-device", "virtserialport,chardev=helper,name=org.droveway.guest.0".to_owned()),
    ];
    let words = options.into_iter().flat_map(|(option, value)| [option.to_owned(), value]);
    words.chain(Outside::arguments()).collect()
}

/// A command for the guest that answers which row its database has acknowledged last. It fails
/// after a boot until there is one.
pub const ACKNOWLEDGED: &str = "sh cat /run/lab-database/acknowledged";

/// A command for the guest that succeeds if its database has all rows up to this one and to the last
/// that it has acknowledged, as they were written. It answers which that is.
#[must_use]
pub fn check_rows(known: u64) -> String {
    format!("sh sh /usr/local/lib/lab/check-rows {known}")
}

/// A command for the guest that succeeds if a file that nothing has written to since the snapshot
/// is as it was.
#[must_use]
pub fn check_kept() -> String {
    format!("sh sha256sum --quiet --check {KEPT}.sum")
}

/// Waits until all services of a guest run. On a busy machine that takes longer than an answer may.
fn wait_services(guest: &Guest) -> Result<()> {
    let until = Instant::now() + BOOT_MAX;
    loop {
        let state = guest.ask("sh systemctl is-system-running; true")?;
        match state.as_str() {
            "running" => return Ok(()),
            "initializing" | "starting" if Instant::now() < until => std::thread::sleep(PAUSE),
            _ => {
                let failed = guest.ask("sh systemctl --failed --no-legend; systemctl list-jobs")?;
                let text = format!("{state}: {failed}");
                return Err(LabError::Text { what: "the state of the guest's services", text });
            }
        }
    }
}

fn start(host: &Host, argv: &[String]) -> Result<Child> {
    let mut command = host.command(&argv[0]);
    command.args(&argv[1..]).stdin(Stdio::null());
    command.spawn().doing("start QEMU")
}

/// A connection to the QMP socket of the VM's owner on its host, which takes one at a time.
///
/// # Errors
/// If QEMU doesn't answer.
pub fn monitor(host: &Host, name: &str) -> Result<Arc<Qmp>> {
    let path = host.run_dir.join(format!("{name}.monitor"));
    let until = Instant::now() + QEMU_MAX;
    loop {
        match Qmp::connect(&path, QEMU_MAX) {
            Ok(qmp) => return Ok(qmp),
            Err(error) if Instant::now() > until => return Err(fault(&error)),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

fn fault(error: &QmpError) -> LabError {
    LabError::Text { what: "QEMU's answer", text: error.to_string() }
}

fn silent(what: &str) -> LabError {
    LabError::Silent { what: what.to_owned(), waited: QEMU_MAX, detail: String::new() }
}
