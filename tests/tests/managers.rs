//! What managers give VMs, and set in their QEMUs, costs no migration its split.

use std::process::Command;

use end_to_end::{MIB, Side, World, guest, own_qmp_argument};
use lab::hosts::Link;
use lab::setup;
use qemu::qmp::Qmp;
use serde_json::{Value, json};

const RATE: u64 = 5_000_000;
/// What QEMU's TCG keeps track of beside another block of RAM: no multiple of 256 KiB.
const ODD: &str = "196612k";
const PLUGGED: u64 = 256 * MIB;

/// The guest's memory is more than the machine begins with: most of what it checks is
/// in what was plugged.
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
        spec.orders.random_bytes = 200 * MIB;
        spec.initrd = Some(setup::plugged_memory_initrd(&world.kit).unwrap());
        spec.kernel_words = "memhp_default_state=online";
        let backend = format!("memory-backend-ram,id=plugged,size={PLUGGED}");
        let device = format!("virtio-mem-pci,memdev=plugged,requested-size={PLUGGED}");
        spec.extra.extend(["-object", &backend, "-device", &device].map(str::to_owned));
        let guest = world.boot_with(&spec, &qemu.program);
        let set = format!("{0}={0}", qemu.program.display());
        for (side, tap) in [(Side::A, "multifd"), (Side::B, "classic")] {
            let report = world.migrate(&guest, side, &["--tap", tap, "--set", &set]);
            assert_eq!((report.tap.as_str(), report.placement.as_str()), (tap, "mapped"));
            assert!(report.body_bytes >= 200 * MIB, "{}", report.body_bytes);
        }
        world.says(Side::A, &["stop", &spec.name, "--force"]);
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

/// A backup program asks what has changed since its last run, wherever the VM is.
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
        assert_eq!(checked.wrong, 0, "{checked:?}");
        let known = bitmaps(&world.own_qmp(side.other(), "web1"));
        let [(name, true, count)] = &known[..] else { panic!("{known:?}") };
        assert_eq!(name, "since-monday");
        assert!(*count > 0 && *count >= changed, "{changed}, then {count}");
        changed = *count;
    }
}
