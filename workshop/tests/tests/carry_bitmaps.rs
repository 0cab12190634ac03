//! VMs whose disks have dirty bitmaps, by which a backup program knows what has changed. With the
//! disk libvirt has QEMU migrate them, too, and QEMU says then that something may come late.

use api::Audited;
use end_to_end::commander::Commander;
use end_to_end::disk::{assert_still, image, qemu_io, with_still_disk};
use end_to_end::{MIB, Side, World};
use lab::hosts::Link;
use lab::setup;
use serde_json::{Value, json};

const NAME: &str = "since-monday";
/// As much as one bit stands for.
const CHANGED: u64 = 64 << 10;

/// Bytes of the disk that a host's QEMU has noted as changed.
fn changed_bytes(commander: &Commander, side: Side) -> u64 {
    let qmp = &commander.at(side).qmp;
    let nodes = qmp.execute("query-named-block-nodes", json!({ "flat": true })).unwrap();
    let of = |node: &Value| node["dirty-bitmaps"].as_array().cloned().unwrap_or_default();
    let mut bitmaps = nodes.as_array().unwrap().iter().flat_map(of);
    let bitmap = bitmaps.find(|one| one["name"] == NAME);
    let bitmap = bitmap.unwrap_or_else(|| panic!("{side:?} has no bitmap: {nodes}"));
    bitmap["count"].as_u64().unwrap()
}

/// A host that a VM leaves, with so many channels, and the kind of stream.
type Move = (Side, u8, &'static str);

/// With each kind of stream; both are split.
const THERE: Move = (Side::A, 4, "multifd");
const BACK: Move = (Side::B, 0, "classic");

fn arrive_with_their_disk(program: &std::path::Path, moves: &[Move]) {
    let world = World::new(Link::one(1000));
    let written = 8 * MIB;
    let spec = with_still_disk(&world, written);
    let mut commander = Commander::new(world, spec, program);
    let add = json!({ "node": "data", "name": NAME });
    let source = &commander.at(Side::A).qmp;
    source.execute("block-dirty-bitmap-add", add).unwrap();
    qemu_io(source, &format!("write {written} {CHANGED}"));
    assert_eq!(changed_bytes(&commander, Side::A), CHANGED);
    for &(from, channels, tap) in moves {
        let mut way = commander.way(from, false, channels);
        way.disk = true;
        way.more = vec!["dirty-bitmaps"];
        let report = commander.migrate(from, &way);
        assert_eq!(report.tap, tap, "{:?}", report.notes);
        assert!(matches!(report.audit, Audited::Same { .. }), "{:?}", report.audit);
        assert_still(&image(&commander.world, from.other()), written);
        assert!(changed_bytes(&commander, from.other()) >= CHANGED);
    }
}

#[test]
fn with_the_usual_qemu() {
    arrive_with_their_disk(&setup::ensure().unwrap().qemu, &[THERE, BACK]);
}

#[test]
fn with_the_newest_qemu() {
    let qemus = setup::qemus(&setup::ensure().unwrap()).unwrap();
    arrive_with_their_disk(&qemus.last().unwrap().program, &[THERE]);
}
