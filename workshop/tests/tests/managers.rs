//! What managers add to VMs, or set in their QEMUs, keeps no migration from being split.

use std::process::Command;

use api::{Outcome, Phase};
use end_to_end::{MIB, Side, World, assert_no_page_is_wrong, bare, guest, own_qmp_argument};
use lab::hosts::Link;
use lab::setup::{self, Qemu};
use marks::runs;
use qemu::qmp::Qmp;
use serde_json::{Value, json};

const RATE: u64 = 5_000_000;
/// A size that QEMU's TCG tracks correctly next to another RAM block: no multiple of 256 KiB.
const ODD: &str = "131076k";
const PLUGGED: u64 = 256 * MIB;
/// More than the machine's initial memory.
const FILLED: u64 = 136 * MIB;

/// The guest's memory exceeds the machine's initial memory: most of what it checks is in plugged
/// memory. Each QEMU sends it by another kind of stream.
#[test]
fn memory_of_a_virtio_mem_device() {
    let world = World::new(Link::one(1000));
    for (nth, qemu) in setup::qemus(&world.kit).unwrap().iter().enumerate() {
        // QEMU 7.2 under TCG loses pages of RAM with such sizes.
        if qemu.version.major < 9 {
            continue;
        }
        let mut spec = guest(&format!("{ODD},maxmem=2G,slots=2"), RATE);
        spec.name = format!("web{nth}");
        spec.machine = qemu.machine();
        spec.orders.random_bytes = FILLED;
        spec.initrd = Some(setup::plugged_memory_initrd(&world.kit).unwrap());
        spec.kernel_words = "memhp_default_state=online";
        let backend = format!("memory-backend-ram,id=plugged,size={PLUGGED}");
        let device = format!("virtio-mem-pci,memdev=plugged,requested-size={PLUGGED}");
        spec.extra.extend(["-object", &backend, "-device", &device].map(str::to_owned));
        let guest = world.boot_with(&spec, &qemu.program);
        let set = format!("{0}={0}", qemu.program.display());
        let tap = if nth % 2 == 0 { "multifd" } else { "classic" };
        let report = world.migrate(&guest, Side::A, &["--tap", tap, "--set", &set]);
        assert_eq!((report.tap.as_str(), report.placement.as_str()), (tap, "mapped"));
        assert!(report.body_bytes >= FILLED, "{}", report.body_bytes);
        world.says(Side::B, &["stop", &spec.name, "--force"]);
    }
}

fn bitmaps(qmp: &Qmp) -> Vec<(String, bool, u64)> {
    let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true })).unwrap();
    let of = |node: &Value| node["dirty-bitmaps"].as_array().cloned().unwrap_or_default();
    let bitmaps = nodes.as_array().unwrap().iter().flat_map(of);
    let known = |one: Value| {
        let (name, count) = (one["name"].as_str().unwrap().to_owned(), one["count"].as_u64());
        (name, one["recording"] == true, count.unwrap())
    };
    bitmaps.map(known).collect()
}

/// A backup program asks what has changed since its last run, on whatever host the VM runs.
#[runs(fills)]
#[test]
fn a_persistent_dirty_bitmap() {
    let world = World::new(Link::one(1000));
    let image = world.hosts.a.run_dir.join("disk.img");
    let create = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2"])
        .arg(&image)
        .arg("16M")
        .status()
        .unwrap();
    assert!(create.success());
    let mut spec = guest("256M", RATE);
    spec.orders.disk_bytes = 16 * MIB;
    spec.orders.disk_rate = MIB;
    let file =
        format!("driver=qcow2,node-name=disk,file.driver=file,file.filename={}", image.display());
    spec.extra
        .extend(["-blockdev", &file, "-device", "virtio-blk-pci,drive=disk"].map(str::to_owned));
    spec.extra.extend(own_qmp_argument(&spec.name));
    let guest = world.boot(&spec);
    let add = json!({ "node": "disk", "name": "since-monday", "persistent": true });
    world.own_qmp(Side::A, "web1").execute("block-dirty-bitmap-add", add).unwrap();
    let mut changed = 0;
    for side in [Side::A, Side::B] {
        drop(world.migrate(&guest, side, &[]));
        let checked = guest.check_disk().unwrap();
        assert_no_page_is_wrong(&checked);
        let known = bitmaps(&world.own_qmp(side.other(), "web1"));
        let [(name, true, count)] = &known[..] else { panic!("{known:?}") };
        assert_eq!(name, "since-monday");
        assert!(*count > 0 && *count >= changed, "{changed}, then {count}");
        changed = *count;
    }
}

/// In the order in which QEMU accepts them. Those of one group may be on together.
const LEFT_ON: [&[&str]; 4] = [
    &["xbzrle", "postcopy-ram", "auto-converge", "dirty-bitmaps"],
    &["multifd", "zero-copy-send"],
    &["mapped-ram"],
    &["rdma-pin-all"],
];

/// QEMU's capabilities, each with whether it is on, and how its stream is encrypted.
type Settings = (Vec<(String, bool)>, Value);

fn settings(qmp: &Qmp) -> Settings {
    let all = qmp.execute("query-migrate-capabilities", json!({})).unwrap();
    let of = |one: &Value| (one["capability"].as_str().unwrap().to_owned(), one["state"] == true);
    let mut capabilities: Vec<_> = all.as_array().unwrap().iter().map(of).collect();
    capabilities.sort();
    let parameters = qmp.execute("query-migrate-parameters", json!({})).unwrap();
    (capabilities, parameters["tls-creds"].clone())
}

/// Sets those of `names` that this QEMU has, one after the other: it compares each with those that
/// are on already.
fn set<'n>(qmp: &Qmp, names: impl Iterator<Item = &'n &'n str>, state: bool) {
    let (known, _) = settings(qmp);
    for name in names.filter(|name| known.iter().any(|(known, _)| known == **name)) {
        let one = json!({ "capability": name, "state": state });
        qmp.execute("migrate-set-capabilities", json!({ "capabilities": [one] })).unwrap();
    }
}

fn left_on(qemu: &Qemu) {
    let world = World::new(Link::one(100));
    // QEMU 7.2 under TCG loses pages of RAM with other sizes.
    let mut spec = bare("262296k", 1_000_000);
    spec.machine = qemu.machine();
    spec.extra.extend(own_qmp_argument(&spec.name));
    let guest = world.boot_with(&spec, &qemu.program);
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    let owners = world.own_qmp(Side::A, "web1");
    let encrypt = |by: &str| {
        owners.execute("migrate-set-parameters", json!({ "tls-creds": by })).unwrap();
    };
    for (nth, names) in LEFT_ON.into_iter().enumerate() {
        set(&owners, names.iter(), true);
        // There are no such credentials: a stream that used them would not begin. And not every
        // capability may be on next to them.
        if nth == 0 {
            encrypt("nobodys");
        }
        let before = settings(&owners);
        let is_on = |(name, on): &(String, bool)| *on && names.contains(&name.as_str());
        let has_any = before.0.iter().any(|(name, _)| names.contains(&name.as_str()));
        assert_eq!(before.0.iter().any(is_on), has_any, "{names:?}");
        assert!(has_any || names == ["mapped-ram"] && qemu.version.major < 9, "{names:?}");
        let mut moving = world.begin(&guest, Side::A, &[]);
        moving.wait_for(Phase::FirstPass);
        moving.interrupt();
        let ended = moving.wait();
        assert_eq!(ended.report.outcome, Outcome::Cancelled, "{}", ended.said);
        assert_eq!(ended.report.tap, "multifd", "{names:?}");
        world.remove_own_sockets(Side::B, "web1");
        world.assert_stayed(&guest, Side::A, pid);
        assert_eq!(settings(&owners), before);
        encrypt("");
        set(&owners, names.iter().rev(), false);
    }
    set(&owners, LEFT_ON[0].iter(), true);
    encrypt("nobodys");
    let program = format!("{0}={0}", qemu.program.display());
    let report = world.migrate(&guest, Side::A, &["--set", &program]);
    assert_eq!((report.tap.as_str(), report.placement.as_str()), ("multifd", "mapped"));
}

/// Off for the move, and as before after a move that did not take place.
#[runs(fills)]
#[test]
fn what_is_left_on_in_the_oldest_qemu() {
    left_on(&setup::qemus(&setup::ensure().unwrap()).unwrap()[0]);
}

#[runs(fills)]
#[test]
fn what_is_left_on_in_the_usual_qemu() {
    let kit = setup::ensure().unwrap();
    left_on(&Qemu { program: kit.qemu, version: kit.qemu_version });
}

#[runs(fills)]
#[test]
fn what_is_left_on_in_the_newest_qemu() {
    left_on(setup::qemus(&setup::ensure().unwrap()).unwrap().last().unwrap());
}
