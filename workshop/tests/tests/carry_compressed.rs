//! Migrations whose multifd channels QEMU compresses itself, as `virsh migrate --parallel
//! --compressed` has it: passed on as they are, each channel by itself.

use api::{Outcome, Progress, Report};
use end_to_end::commander::Commander;
use end_to_end::{Side, World, bare, until};
use lab::hosts::Link;
use lab::setup;

/// A size that QEMU 7.2 moves correctly under TCG: no multiple of 256 KiB.
const MEMORY: &str = "262296k";
const RATE: u64 = 2_000_000;

fn listed(commander: &Commander, from: Side) -> Vec<Progress> {
    let listed = commander.world.tells(from, &["list", "--migrations", "--json"]);
    serde_json::from_str(&listed).unwrap()
}

fn report(commander: &Commander, from: Side, id: &str) -> Report {
    let report = commander.world.tells(from, &["report", id, "--json"]);
    serde_json::from_str(&report).unwrap()
}

/// There and back, by port and by path.
fn arrives(program: &std::path::Path, compression: &'static str) {
    let world = World::new(Link::one(1000));
    let mut commander = Commander::new(world, bare(MEMORY, RATE), program);
    for (from, by_path) in [(Side::A, false), (Side::B, true)] {
        let mut way = commander.way(from, by_path, 4);
        way.compression = compression;
        drop(commander.migrate(from, &way));
        until("all of its connections are over", || {
            let listed = listed(&commander, from);
            assert_eq!(listed.len(), 5, "{listed:?}");
            listed.iter().all(|one| one.outcome == Some(Outcome::Done))
        });
        let listed = listed(&commander, from);
        let reports: Vec<_> = listed.iter().map(|one| report(&commander, from, &one.id)).collect();
        assert!(reports.iter().all(|one| one.tap == "relayed"), "{reports:#?}");
        let says_so = |note: &String| note.contains("QEMU compresses its multifd channels");
        let why = reports.iter().filter(|one| one.notes.iter().any(says_so));
        assert_eq!(why.count(), 1, "{reports:#?}");
    }
}

#[test]
fn with_the_oldest_qemu_and_zlib() {
    arrives(&setup::qemus(&setup::ensure().unwrap()).unwrap()[0].program, "zlib");
}

#[test]
fn with_the_usual_qemu_and_zstd() {
    arrives(&setup::ensure().unwrap().qemu, "zstd");
}

#[test]
fn with_the_newest_qemu_and_zstd() {
    let qemus = setup::qemus(&setup::ensure().unwrap()).unwrap();
    arrives(&qemus.last().unwrap().program, "zstd");
}
