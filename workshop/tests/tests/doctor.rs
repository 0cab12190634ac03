//! `droveway doctor`, and the same checks before a migration: what would keep a VM from running at
//! the destination is found while the VM runs untouched.

use std::fs;

use api::{Examination, Finding, Phase, Prediction, Severity};
use end_to_end::{Side, World, bare};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::Link;
use lab::setup::Accelerator;
use marks::runs;

const RATE: u64 = 2_000_000;
/// A size that QEMU 7.2 moves correctly under TCG: no multiple of 256 KiB.
const ODD: &str = "262296k";

fn examination(text: &str) -> Examination {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// The severity of the finding whose text contains this.
fn severity(findings: &[Finding], text: &str) -> Severity {
    let found = findings.iter().find(|one| one.text.contains(text));
    found.unwrap_or_else(|| panic!("{text:?} is not in {findings:#?}")).severity
}

struct Refusing {
    world: World,
    guest: Guest,
    pid: u32,
}

impl Refusing {
    fn new(world: World, spec: &GuestSpec) -> Self {
        let guest = world.boot(spec);
        let pid = world.vm(Side::A, "web1").unwrap().pid;
        Self { world, guest, pid }
    }

    /// Refused with each of these reasons, the second time like the first.
    fn refuses(&self, args: &[&str], reasons: &[&str]) {
        let mut migrate = vec!["migrate", "web1", "host-b"];
        migrate.extend(args);
        for _ in 0..2 {
            let why = self.world.refuses(Side::A, &migrate);
            for reason in reasons {
                assert!(why.contains(reason), "{reason:?} is not in: {why}");
            }
            // A QEMU that ends during its start leaves its owner's sockets behind.
            let _ = fs::remove_file(self.world.host(Side::B).run_dir.join("web1.talk"));
        }
    }

    /// Asserts that it runs on as if nothing had been asked.
    fn stayed(&self) {
        self.world.assert_stayed(&self.guest, Side::A, self.pid);
    }

    fn moves(&self) {
        drop(self.world.migrate(&self.guest, Side::A, &[]));
    }
}

#[runs(promised)]
#[test]
fn a_pair_that_is_well() {
    let world = World::new(Link::one(1000));
    let guest = world.boot(&bare("256M", RATE));

    let alone = examination(&world.tells(Side::A, &["doctor", "--json"]));
    assert_eq!(alone.of, "host-a");
    assert!(!alone.has_errors());
    assert_eq!(severity(&alone.findings, "host-b answers in"), Severity::Ok);
    assert_eq!(severity(&alone.findings, "--insecure-plaintext"), Severity::Warning);
    // Virtual cards don't report their speed.
    assert_eq!(severity(&alone.findings, "doesn't report its speed, MTU"), Severity::Note);
    let version = world.kit.qemu_version.to_string();
    assert_eq!(severity(&alone.findings, &format!("QEMU {version}: ")), Severity::Ok);
    assert_eq!(severity(&alone.findings, "written to QEMU's memory directly"), Severity::Ok);
    assert_eq!(severity(&alone.findings, "The QEMU of web1 runs as root"), Severity::Warning);

    let pair = examination(&world.tells(Side::A, &["doctor", "host-b", "--json"]));
    assert_eq!(pair.of, "host-a -> host-b");
    assert!(!pair.has_errors());
    assert_eq!(severity(&pair.findings, "web1 can go to host-b"), Severity::Ok);
    assert_eq!(severity(&pair.findings, "full packets go both ways"), Severity::Ok);

    let text = world.tells(Side::A, &["doctor", "host-b"]);
    assert!(text.contains("host-a -> host-b\n") && text.contains("no errors, "), "{text}");
    assert!(!text.contains('\x1b'), "no colours but on a terminal: {text}");
    drop(world.migrate(&guest, Side::A, &[]));
}

#[test]
fn a_peer_that_is_not_there() {
    let mut world = World::new(Link::one(1000));
    let unknown = world.refuses(Side::A, &["doctor", "host-c"]);
    assert!(unknown.contains("no host `host-c` in the peers file"), "{unknown}");
    world.kill_agent(Side::B);
    let pair = world.refuses(Side::A, &["doctor", "host-b"]);
    assert!(pair.contains("host-b can't be queried") && pair.contains("1 error"), "{pair}");
    // This host is well all the same.
    let alone = examination(&world.tells(Side::A, &["doctor", "--json"]));
    assert_eq!(severity(&alone.findings, "host-b can't be queried"), Severity::Warning);
}

#[test]
fn a_cpu_that_the_destination_does_not_know_or_cannot_give() {
    let mut spec = bare("256M", RATE);
    let world = World::new(Link::one(1000));
    let model = if world.kit.accelerator == Accelerator::Kvm { "host" } else { "qemu64" };
    // A feature without which both kinds of vCPU can do.
    spec.extra.extend(["-cpu", &format!("{model},+aes")].map(str::to_owned));
    let refusing = Refusing::new(world, &spec);
    let named = format!("{model},=NoSuchModel,");
    refusing.refuses(&["--set", &named], &["doesn't know the CPU model NoSuchModel", "--set"]);
    refusing.stayed();
    refusing.refuses(&["--set", "+aes=-aes"], &["CPU has aes", "restart the VM"]);
    refusing.stayed();
    refusing.moves();
}

/// The older QEMU doesn't know the newer one's machine type.
#[test]
fn a_machine_type_that_the_destination_does_not_know() {
    let kit = lab::setup::ensure().unwrap();
    if kit.qemu_system_version.major == kit.qemu_version.major {
        println!("QEMU {} only: there is no other to move to", kit.qemu_version);
        return;
    }
    let refusing = Refusing::new(World::new(Link::one(1000)), &bare(ODD, RATE));
    let (newer, older) = (kit.qemu.display(), kit.qemu_system.display());
    let set = format!("{newer}={older}");
    let version = format!("QEMU {} there", kit.qemu_system_version);
    refusing.refuses(&["--set", &set], &["doesn't know the machine type pc-q35-", &version]);
    refusing.stayed();
    refusing.moves();
}

/// The memory of this machine with its swap, in MiB.
fn all_mib() -> u64 {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
    let kib = |name| -> u64 {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    };
    (kib("MemTotal:") + kib("SwapTotal:")) >> 10
}

/// Memory that was never touched takes nothing on the VM's host, and may take all of its size at
/// the destination.
#[test]
fn more_memory_than_the_destination_has() {
    let world = World::new(Link::one(1000));
    // This device's memory must be a power of two.
    let size = format!("{}M", (all_mib() + 1).next_power_of_two());
    let mut spec = bare("256M", RATE);
    spec.extra.extend([
        "-object".to_owned(),
        format!("memory-backend-ram,id=spare,size={size},reserve=off"),
        "-device".to_owned(),
        "ivshmem-plain,memdev=spare,master=on".to_owned(),
    ]);
    let refusing = Refusing::new(world, &spec);
    refusing.refuses(&[], &["no room for the VM", "--overcommit-memory"]);
    refusing.stayed();
    let told = refusing.world.refuses(Side::A, &["doctor", "host-b"]);
    assert!(told.contains("more than host-b has free"), "{told}");

    // An operator who knows better can override it.
    let mut moving = refusing.world.begin(&refusing.guest, Side::A, &["--overcommit-memory"]);
    moving.wait_for(Phase::FirstPass);
    moving.interrupt();
    drop(moving.wait_any());
    refusing.stayed();
}

/// A virtio-mem device may get more memory than the destination has. What it has not plugged takes
/// nothing there.
#[test]
fn memory_that_is_unplugged() {
    let world = World::new(Link::one(1000));
    let most_mib = (all_mib() + 1).next_multiple_of(1024);
    let mut spec = bare(&format!("{ODD},maxmem={}M", most_mib + 1024), RATE);
    spec.extra.extend([
        "-object".to_owned(),
        format!("memory-backend-memfd,id=spare,size={most_mib}M,share=on"),
        "-device".to_owned(),
        "virtio-mem-pci,memdev=spare".to_owned(),
    ]);
    let guest = world.boot(&spec);
    let pair = examination(&world.tells(Side::A, &["doctor", "host-b", "--json"]));
    assert_eq!(severity(&pair.findings, "web1 can go to host-b"), Severity::Ok);
    let alone = world.tells(Side::A, &["doctor"]);
    assert!(!alone.contains("of its shared memory"), "{alone}");
    let planned = world.tells(Side::A, &["evacuate", "host-a", "--dry-run"]);
    assert!(planned.contains("web1  host-a  host-b"), "{planned}");
    let told = world.tells(Side::A, &["predict", "web1", "host-b", "--rate", "1G", "--json"]);
    let predicted: Prediction = serde_json::from_str(&told).unwrap();
    assert_eq!(predicted.free_memory.unused_shared_bytes, 0, "{predicted:?}");
    drop(world.migrate(&guest, Side::A, &[]));
}
