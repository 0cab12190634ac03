//! Page cache of a VM that others command, from disks that both hosts see: the destination reads it
//! there, if the guest has the helper.

use std::time::Duration;

use api::{Audited, Report};
use end_to_end::commander::Commander;
use end_to_end::files::{assert_cached_files, cached_pages, with_files, with_files_on_scsi};
use end_to_end::{Side, World, own_qmp_argument, until};
use lab::guest::GuestSpec;
use lab::hosts::{Link, RUN_DIR};
use lab::setup;
use marks::runs;
use qemu::guest_port;

const NAME: &str = "web1";
const PAGE_BYTES: u64 = 4096;

/// A guest with files, and with a port for its helper as its owner made it.
fn commander(carry: &str) -> Commander {
    let world = World::new(Link::one(150));
    let spec = with_files(&world);
    commander_of(world, spec, carry)
}

fn commander_of(world: World, mut spec: GuestSpec, carry: &str) -> Commander {
    // A commander adds its own.
    let own = own_qmp_argument(NAME);
    spec.extra.retain(|word| !own.contains(word));
    let socket = format!("socket,id=helper,path={RUN_DIR}/{NAME}.helper,server=on,wait=off");
    let port = "virtserialport,id=port,chardev=helper,name=org.droveway.guest.0";
    for (option, value) in
        [("-chardev", socket.as_str()), ("-device", "virtio-serial-pci"), ("-device", port)]
    {
        spec.extra.extend([option, value].map(str::to_owned));
    }
    // Without an ID, a device may have another name on the other host.
    spec.extra.iter_mut().for_each(|word| {
        if let Some(serial) = word.split_once(",serial=").map(|(_, serial)| serial.to_owned()) {
            *word += &format!(",id={serial}-disk");
        }
    });
    Commander::with(world, spec, &setup::ensure().unwrap().qemu, ["", carry])
}

/// The helper starts when the guest has time for it.
fn wait_helper(world: &World, side: Side) {
    let socket = world.host(side).run_dir.join(format!("{NAME}.helper"));
    until("the guest's helper answers", || {
        let stream = guest_port::connect(&socket);
        stream.and_then(|stream| guest_port::greet(&stream, Duration::from_secs(3))).is_ok()
    });
}

fn assert_read(report: &Report, cached: u64) {
    let Report { stored_bytes, named_bytes, notes, .. } = report;
    println!("{stored_bytes} from disks, {named_bytes} by name of {cached}: {notes:?}");
    // How much is read, and not whether, depends on speed: the network carries what the helper has
    // not named in time.
    assert!(*stored_bytes > 0, "{report:#?}");
    assert!(matches!(report.audit, Audited::Same { .. }), "{:?}", report.audit);
}

/// Asserts that disks were read, and not faster than they may be: that holds however slow the
/// machine is.
fn assert_within(report: &Report, bits_per_s: u32) {
    let Report { storage_read_bytes, total_s, notes, .. } = report;
    println!("{storage_read_bytes} read in {total_s} s: {notes:?}");
    assert!(*storage_read_bytes > 0, "{report:#?}");
    let most = f64::from(bits_per_s) / 8.0 * (total_s + 1.0);
    assert!(*storage_read_bytes as f64 <= most, "{report:#?}");
}

/// There and back, with both kinds of stream, and there once more with a limit. Nothing is shared,
/// so that only what disks have goes by name. Agents that may not read disks don't ask the guest.
#[runs(fills)]
#[test]
fn what_its_disks_have_is_read_there() {
    let mut commander = commander("share = \"off\"\nstorage = \"on\"");
    let cached = cached_pages(&commander.guest) * PAGE_BYTES;
    for (from, channels) in [(Side::A, 4), (Side::B, 0)] {
        wait_helper(&commander.world, from);
        let way = commander.way(from, false, channels);
        let report = commander.migrate(from, &way);
        assert_read(&report, cached);
    }
    commander.restart_agents_with("share = \"off\"\nstorage = \"on\"\nstorage-limit = \"2M\"");
    wait_helper(&commander.world, Side::A);
    let way = commander.way(Side::A, false, 4);
    let report = commander.migrate(Side::A, &way);
    assert_within(&report, 2_000_000);
    commander.restart_agents_with("storage = \"off\"");
    let way = commander.way(Side::B, false, 4);
    let report = commander.migrate(Side::B, &way);
    assert_eq!(report.stored_bytes, 0, "{report:#?}");
    // A wrong page would have stayed wrong.
    assert_cached_files(&commander.guest);
}

/// Disks at a controller as libvirt attaches them: without serial numbers, known by their place.
#[runs(fills)]
#[test]
fn what_its_disks_on_scsi_have_is_read_there() {
    let world = World::new(Link::one(150));
    let mut spec = with_files_on_scsi(&world);
    for word in &mut spec.extra {
        if word.starts_with("virtio-scsi-pci") {
            *word += ",bus=pcie.0,addr=0x10";
        }
        let placed = word.split_once(",serial=");
        let placed = placed.map(|(disk, serial)| format!("{disk},lun=0,id={serial}-disk"));
        if let Some(placed) = placed {
            *word = placed;
        }
    }
    let mut commander = commander_of(world, spec, "share = \"off\"\nstorage = \"on\"");
    let cached = cached_pages(&commander.guest) * PAGE_BYTES;
    wait_helper(&commander.world, Side::A);
    let way = commander.way(Side::A, false, 4);
    let report = commander.migrate(Side::A, &way);
    assert_read(&report, cached);
    // A wrong page would have stayed wrong.
    assert_cached_files(&commander.guest);
}
