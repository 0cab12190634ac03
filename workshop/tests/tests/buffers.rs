//! All migrations of an agent share its buffers: small buffers are enough for several at a time,
//! also in opposite directions.

use std::path::PathBuf;

use api::Report;
use end_to_end::disk::{assert_still, make_still};
use end_to_end::{MIB, Side, World, bare};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::{Link, RUN_DIR};

/// The smallest pool that an agent accepts.
const POOL_MIB: u64 = 16;

fn small_pools() -> World {
    let mut world = World::new(Link::one(200));
    world.restart_agents_with(&["--pool-mib", &POOL_MIB.to_string()]);
    world
}

fn named(name: &str, random_mib: u64) -> GuestSpec {
    let mut spec = bare("192M", 1_000_000);
    spec.name = name.to_owned();
    spec.orders.random_bytes = random_mib * MIB;
    spec
}

fn assert_bounded(reports: &[Report]) {
    for report in reports {
        let [source, destination] = report.pool_high_water_bytes;
        assert!(0 < source && source <= POOL_MIB * MIB, "{source}");
        assert!(0 < destination && destination <= POOL_MIB * MIB, "{destination}");
    }
}

/// Moves guests at the same time, each to the other host.
fn move_all(world: &World, guests: &[(Guest, Side)], args: &[&str]) -> Vec<Report> {
    let moving: Vec<_> =
        guests.iter().map(|(guest, from)| world.begin(guest, *from, args)).collect();
    let ended: Vec<_> = moving.into_iter().map(end_to_end::Moving::wait).collect();
    for (ended, (guest, from)) in ended.iter().zip(guests) {
        assert!(ended.success, "{:?}\n{}", ended.report.outcome, ended.said);
        let vm = world.vm(from.other(), &guest.spec.name).expect("it should be there");
        assert_eq!(vm.migration, None);
        assert!(world.vm(*from, &guest.spec.name).is_none());
        world.assert_intact(guest);
    }
    let reports: Vec<Report> = ended.into_iter().map(|ended| ended.report).collect();
    assert_bounded(&reports);
    reports
}

fn boot_at_b(world: &World, spec: GuestSpec) -> Guest {
    world.run_at(Side::B, &spec);
    Guest::meet(spec, &world.hosts.b).unwrap()
}

#[test]
fn four_at_once() {
    let world = small_pools();
    let names = ["web1", "web2", "web3", "web4"];
    let guests = names.map(|name| (world.boot(&named(name, 32)), Side::A));
    drop(move_all(&world, &guests, &[]));
}

fn image(world: &World, side: Side, name: &str) -> PathBuf {
    world.host(side).run_dir.join(format!("{name}.img"))
}

/// Both guests have disks, so that pages and blocks of both need buffers at both ends.
#[test]
fn two_that_cross_with_their_disks() {
    let world = small_pools();
    let written = 24 * MIB;
    let with_its_disk = |side: Side, name: &str| {
        make_still(&image(&world, side, name), written);
        let mut spec = named(name, 32);
        let drive = format!("file={RUN_DIR}/{name}.img,format=raw,if=none,id=data");
        let device = "virtio-blk-pci,drive=data,id=vda".to_owned();
        spec.extra.extend(["-drive".to_owned(), drive, "-device".to_owned(), device]);
        spec
    };
    let one = world.boot(&with_its_disk(Side::A, "web1"));
    let other = boot_at_b(&world, with_its_disk(Side::B, "web2"));
    let guests = [(one, Side::A), (other, Side::B)];
    drop(move_all(&world, &guests, &["--disks", "all", "--create-disks"]));
    for (guest, from) in &guests {
        assert_still(&image(&world, from.other(), &guest.spec.name), written);
    }
}

/// One migration too many is refused at once, with advice; it succeeds later.
#[test]
fn one_too_many_is_refused() {
    let world = small_pools();
    let names = ["web1", "web2", "web3", "web4", "web5", "web6", "web7", "web8"];
    let guests = names.map(|name| {
        let mut spec = named(name, 8);
        spec.memory = "96M".to_owned();
        spec.orders.text_bytes = 0;
        world.boot(&spec)
    });
    let (last, first) = guests.split_last().unwrap();
    // So slow that none ends meanwhile.
    let mut moving: Vec<_> =
        first.iter().map(|guest| world.begin(guest, Side::A, &["--limit", "1M"])).collect();
    moving.iter_mut().for_each(|one| one.wait_for(api::Phase::FirstPass));
    let why = world.refuses(Side::A, &["migrate", &last.spec.name, "host-b"]);
    assert!(why.contains("at most 7 VMs can leave at a time with pool-mib 16"), "{why}");
    moving.iter().for_each(end_to_end::Moving::interrupt);
    for one in moving {
        assert!(!one.wait().success);
    }
    let moved = world.begin(last, Side::A, &[]).wait();
    assert!(moved.success, "{}", moved.said);
    guests.iter().for_each(|guest| world.assert_intact(guest));
}
