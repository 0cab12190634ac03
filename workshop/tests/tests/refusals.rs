//! What can't be done is refused with advice; the VM goes on at its source, and nothing is left at
//! the destination.

use std::fs;
use std::process::Stdio;

use end_to_end::{Side, World, bare};
use lab::guest::Guest;
use lab::hosts::{Link, RUN_DIR};
use marks::runs;

const RATE: u64 = 2_000_000;

struct Refusing {
    world: World,
    guest: Guest,
    pid: u32,
}

impl Refusing {
    fn new(extra: &[&str]) -> Self {
        let world = World::new(Link::one(1000));
        let mut spec = bare("256M", RATE);
        spec.extra.extend(extra.iter().copied().map(str::to_owned));
        Self::of(world, &spec)
    }

    fn of(world: World, spec: &lab::guest::GuestSpec) -> Self {
        let guest = world.boot(spec);
        let pid = world.vm(Side::A, "web1").unwrap().pid;
        Self { world, guest, pid }
    }

    /// Refused, with each of these in the reason.
    fn refuses(&self, args: &[&str], reasons: &[&str]) {
        let mut migrate = vec!["migrate", "web1"];
        migrate.extend(args);
        let why = self.world.refuses(Side::A, &migrate);
        for reason in reasons {
            assert!(why.contains(reason), "{reason:?} is not in: {why}");
        }
    }

    fn stayed(&self) {
        self.world.assert_stayed(&self.guest, Side::A, self.pid);
    }
}

#[test]
fn hosts_that_are_not_there() {
    let mut refusing = Refusing::new(&[]);
    refusing.refuses(&["host-c"], &["no host `host-c` in the peers file", "there is: host-b"]);
    refusing.refuses(&["host-a"], &["host-a is this host"]);
    refusing.world.kill_agent(Side::B);
    refusing.refuses(&["host-b"], &["host-b", "no agent listens there: start it"]);
    refusing.world.start_agent(Side::B);
    refusing.stayed();
    drop(refusing.world.migrate(&refusing.guest, Side::A, &[]));
}

#[test]
fn a_device_that_qemu_cannot_migrate() {
    let mut refusing = Refusing::new(&["-device", "nvme,serial=one"]);
    let device = "0000:00:01.0/nvme";
    let alone = refusing.world.tells(Side::A, &["doctor"]);
    assert!(alone.contains(device), "{alone}");
    let pair = refusing.world.refuses(Side::A, &["doctor", "host-b"]);
    assert!(pair.contains(device), "{pair}");
    // Before the destination is asked.
    refusing.world.kill_agent(Side::B);
    refusing.refuses(&["host-b"], &["can't be moved: non-migratable device", device]);
    refusing.world.start_agent(Side::B);
    refusing.stayed();
}

#[test]
fn a_name_that_is_taken() {
    let refusing = Refusing::new(&[]);
    let world = &refusing.world;
    let qemu = world.kit.qemu.display().to_string();
    let other = ["run", "web1", "--", &qemu, "-S", "-m", "64", "-nodefaults", "-display", "none"];
    world.says(Side::B, &other);
    let taker = world.vm(Side::B, "web1").unwrap().pid;
    refusing.refuses(&["host-b"], &["there is already a VM `web1` there", "stop it"]);
    assert_eq!(world.vm(Side::B, "web1").unwrap().pid, taker);
    world.assert_only(Side::B, &[taker]);
    world.says(Side::B, &["stop", "web1", "--force"]);
    refusing.stayed();
}

#[runs(promised)]
#[test]
fn a_qemu_that_does_not_start_or_is_another_machine() {
    let refusing = Refusing::new(&["-device", "virtio-rng-pci,id=here"]);
    let qemu = refusing.world.kit.qemu.display().to_string();
    let missing = format!("{qemu}=/nowhere/qemu");
    refusing.refuses(&["host-b", "--set", &missing], &["/nowhere/qemu", "is not in qemu-programs"]);
    refusing.refuses(&["host-b", "--set", "virtio-rng-pci=no-such-device"], &["no-such-device"]);
    // A QEMU that ends during its start leaves its owner's sockets behind.
    fs::remove_file(refusing.world.host(Side::B).run_dir.join("web1.talk")).unwrap();
    refusing.refuses(&["host-b", "--set", "/nothing=/x"], &["`/nothing` occurs nowhere"]);
    refusing.stayed();
    // QEMU starts, but would not be the same VM.
    refusing.refuses(&["host-b", "--set", "256M=128M"], &["RAM"]);
    refusing.refuses(&["host-b", "--set", "virtio-rng-pci=virtio-balloon-pci"], &["here"]);
    refusing.stayed();
    drop(refusing.world.migrate(&refusing.guest, Side::A, &[]));
}

/// Like one whose storage hangs: it waits for a client that does not come.
#[test]
fn a_qemu_that_hangs_at_its_start() {
    let late = format!("socket,id=late,wait=off,path={RUN_DIR}/late.own,server=on");
    let mut refusing = Refusing::new(&["-chardev", &late]);
    let file = refusing.world.host(Side::B).run_dir.join("short.toml");
    fs::write(&file, "[waits]\nprepare = 20\n").unwrap();
    refusing.world.restart_agent_with(Side::B, &["--config", file.to_str().unwrap()]);
    // Without `wait=off`, which this option takes the place of.
    let hangs = ["--set", "late,wait=late,logappend"];
    let mut moving = refusing.world.begin(&refusing.guest, Side::A, &hangs);
    moving.wait_line("waiting for host-b to check the VM and start its QEMU");
    let ended = moving.wait();
    assert!(!ended.success, "{}", ended.said);
    for reason in ["used no CPU time for 5 s", "waiting for connection on"] {
        assert!(ended.said.contains(reason), "{reason:?} is not in: {}", ended.said);
    }
    refusing.world.assert_only(Side::B, &[]);
    for name in ["web1", "late"] {
        refusing.world.remove_own_sockets(Side::B, name);
    }
    refusing.stayed();
    drop(refusing.world.migrate(&refusing.guest, Side::A, &[]));
}

/// A device was plugged in since, which the command line lacks.
#[test]
fn a_vm_that_is_not_what_its_command_line_says() {
    let world = World::new(Link::one(1000));
    let mut spec = bare("256M", RATE);
    spec.extra.extend(end_to_end::own_qmp_argument("web1"));
    spec.extra.extend(["-device", "pcie-root-port,id=later-port"].map(str::to_owned));
    let refusing = Refusing::of(world, &spec);
    let qmp = refusing.world.own_qmp(Side::A, "web1");
    let device =
        serde_json::json!({ "driver": "virtio-rng-pci", "id": "later", "bus": "later-port" });
    qmp.execute("device_add", device).unwrap();
    refusing.refuses(&["host-b"], &["later"]);
    refusing.stayed();
}

/// Each host has a file of that name, with other content.
#[test]
fn a_disk_that_is_stale_at_the_destination() {
    let world = World::new(Link::one(1000));
    for (side, byte) in [(Side::A, 1), (Side::B, 0)] {
        fs::write(world.host(side).run_dir.join("disk.img"), vec![byte; 1 << 20]).unwrap();
    }
    let drive = format!("file={RUN_DIR}/disk.img,format=raw,if=virtio,cache=none");
    let mut spec = bare("256M", RATE);
    spec.extra.extend(["-drive".to_owned(), drive]);
    let refusing = Refusing::of(world, &spec);
    refusing.refuses(&["host-b"], &["disk.img", "--shared-disks"]);
    refusing.stayed();
    let stale = refusing.world.host(Side::B).run_dir.join("disk.img");
    assert_eq!(fs::read(stale).unwrap(), vec![0; 1 << 20]);
}

/// Any host that finds the port may send nonsense to it.
#[test]
fn nonsense_at_the_agents_port() {
    let refusing = Refusing::new(&[]);
    let world = &refusing.world;
    let talk = |script: &str| {
        let script = format!("exec 3<>/dev/tcp/{}/7800; {script}", world.hosts.b.addresses[0]);
        let mut bash = world.hosts.a.command("bash");
        // The agent may hang up, as it should.
        bash.args(["-c", &script]).stderr(Stdio::null()).status().unwrap();
    };
    talk("printf 'GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n' >&3; cat <&3 >/dev/null");
    talk("head -c 1000000 /dev/urandom >&3");
    talk("head -c 1000000 /dev/zero >&3");
    talk("printf x >&3");
    refusing.stayed();
    drop(world.migrate(&refusing.guest, Side::A, &[]));
}
