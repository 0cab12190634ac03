//! Content that a host of the rack has, or is about to have, crosses to the rack once, even if
//! hosts die or lie; and only within a domain.

use std::process::Stdio;
use std::sync::atomic::Ordering::Relaxed;

use api::{GangPlan, Phase, Report};
use end_to_end::liar::Liar;
use end_to_end::{MIB, RackWorld};
use lab::guest::{Guest, GuestSpec};
use marks::runs;

/// Bytes of the same content in each VM, written with the same seed.
const COMMON: u64 = 32 * MIB;
const SHARE: [&str; 4] = ["--share", "rack", "--compress", "off"];

fn twin(name: &str, rate: u64) -> GuestSpec {
    end_to_end::twin(name, "128M", COMMON, rate)
}

/// Boots two guests with the same content, on one host each.
fn twins(world: &RackWorld, rate: u64) -> [Guest; 2] {
    twins_with(world, |name| twin(name, rate))
}

fn twins_with(world: &RackWorld, spec: impl Fn(&str) -> GuestSpec) -> [Guest; 2] {
    [0, 1].map(|nth| world.boot(world.source(nth), spec(&format!("web{nth}"))))
}

/// Moves a guest from its source to a target.
fn moved(world: &RackWorld, guest: &Guest, nth: usize, args: &[&str]) -> Report {
    let moving = world.begin(guest, world.source(nth), world.target(nth), args);
    world.arrive(guest, moving)
}

fn assert_came_from_the_rack(report: &Report, first: &Report) {
    let Report { named_bytes, peer_bytes, wire_bytes, .. } = report;
    println!("{named_bytes} by name, {peer_bytes} from mates, {wire_bytes} sent");
    assert!(*peer_bytes >= COMMON * 9 / 10, "{peer_bytes}");
    assert!(*wire_bytes < first.wire_bytes / 2, "{wire_bytes} and {}", first.wire_bytes);
}

#[runs(fills, promised)]
#[test]
fn what_another_host_has_comes_from_there() {
    let world = RackWorld::new(2);
    let guests = twins(&world, 0);
    let first = moved(&world, &guests[0], 0, &SHARE);
    assert_eq!(first.peer_bytes, 0);
    let second = moved(&world, &guests[1], 1, &SHARE);
    assert_came_from_the_rack(&second, &first);
    // A domain of its own, for which no host has anything.
    let third = world.boot(world.source(0), twin("web2", 0));
    let apart = [&SHARE[..], &["--share-domain", "tenant-7"]].concat();
    let moving = world.begin(&third, world.source(0), world.target(1), &apart);
    let third_report = world.arrive(&third, moving);
    assert_eq!(third_report.peer_bytes, 0);
    assert!(third_report.wire_bytes > COMMON, "{}", third_report.wire_bytes);
    // It was copied from.
    end_to_end::assert_intact(&guests[0]);
}

/// It was never moved: its host's agent has scanned it, and reported it to the directory.
#[runs(fills)]
#[test]
fn what_runs_on_another_host_comes_from_there() {
    let told = ["--scan-cpu", "50%"].map(str::to_owned);
    let world = RackWorld::with(2, |_| (String::new(), told.to_vec()));
    let resident = world.boot(world.target(0), twin("web0", 0));
    let guest = world.boot(world.source(1), twin("web1", 0));
    world.wait_looked_at(world.target(0), "web0");
    let report = moved(&world, &guest, 1, &SHARE);
    let Report { peer_bytes, wire_bytes, .. } = report;
    println!("{peer_bytes} from the mate, {wire_bytes} sent");
    assert!(peer_bytes >= COMMON * 9 / 10, "{peer_bytes}");
    // It was copied from.
    end_to_end::assert_intact(&resident);
}

/// The other host has as much memory.
#[runs(fills)]
#[test]
fn a_vm_of_an_evacuated_host_goes_where_its_content_is() {
    let told = ["--scan-cpu", "50%"].map(str::to_owned);
    let world = RackWorld::with(3, |_| (String::new(), told.to_vec()));
    let [from, other, there] = [0, 1, 2].map(|nth| world.target(nth));
    let resident = world.boot(there, twin("web0", 0));
    let guest = world.boot(from, twin("web1", 0));
    world.wait_looked_at(there, "web0");
    world.wait_looked_at(from, "web1");
    let to = format!("{},{}", other.name, there.name);
    let dry = ["evacuate", &from.name, "--to", &to, "--share", "host", "--dry-run", "--json"];
    let plan: GangPlan = serde_json::from_str(&world.tells(from, &dry)).unwrap();
    assert_eq!(plan.moves[0].to, there.name, "{plan:?}");
    let held_bytes = plan.moves[0].shared.unwrap().held_bytes;
    assert!(held_bytes >= COMMON * 9 / 10, "{held_bytes}");
    [&resident, &guest].into_iter().for_each(end_to_end::assert_intact);
}

#[runs(fills)]
#[test]
fn what_is_on_its_way_to_another_host_is_waited_for() {
    let world = RackWorld::new(2);
    let guests = twins(&world, 200_000);
    let moving =
        [0, 1].map(|nth| world.begin(&guests[nth], world.source(nth), world.target(nth), &SHARE));
    let mut reports = Vec::new();
    for (guest, moving) in guests.iter().zip(moving) {
        reports.push(world.arrive(guest, moving));
    }
    let from_mates: u64 = reports.iter().map(|report| report.peer_bytes).sum();
    let sent: u64 = reports.iter().map(|report| report.wire_bytes).sum();
    println!("{from_mates} from mates, {sent} from sources");
    assert!(from_mates >= COMMON * 9 / 10, "{from_mates}");
}

/// Both hosts are destinations, and keep what the other one needs.
#[runs(fills)]
#[test]
fn vms_that_cross_within_the_rack() {
    let world = RackWorld::new(2);
    let guests = twins(&world, 100_000);
    for (nth, guest) in guests.iter().enumerate() {
        let _ = moved(&world, guest, nth, &SHARE);
    }
    let moving = [0, 1]
        .map(|nth| world.begin(&guests[nth], world.target(nth), world.target(1 - nth), &SHARE));
    for (guest, moving) in guests.iter().zip(moving) {
        let report = world.arrive(guest, moving);
        // The other VM is still there, or was copied from.
        assert!(report.named_bytes >= COMMON * 9 / 10, "{}", report.named_bytes);
    }
}

#[runs(fills)]
#[test]
fn a_vm_that_changes_its_pages_is_no_source_of_them() {
    let world = RackWorld::new(2);
    let spec = |name: &str| {
        let mut spec = twin(name, 0);
        (spec.orders.random_bytes, spec.orders.working_set_bytes) = (0, 32 * MIB);
        spec
    };
    let guests = twins_with(&world, spec);
    let _ = moved(&world, &guests[0], 0, &SHARE);
    guests[0].ask("rate 30000000").unwrap();
    let second = moved(&world, &guests[1], 1, &SHARE);
    println!("{} from its mate", second.peer_bytes);
    // It was copied from.
    end_to_end::assert_intact(&guests[0]);
}

/// It keeps the directory, too.
#[runs(fills)]
#[test]
fn a_mate_that_lies_costs_time_and_nothing_else() {
    let world = RackWorld::with(2, |racks| {
        let target = racks.targets()[0];
        let told = ["--directory", "host:liar"].map(str::to_owned);
        (Liar::entry(&target.host, &target.rack), told.to_vec())
    });
    let names = [0, 1].map(|nth| world.target(nth).name.as_str());
    let liar = Liar::start(&world.target(0).host, &[names[0], names[1], "nobody"]);
    let guests = twins(&world, 100_000);
    for (nth, guest) in guests.iter().enumerate() {
        let _ = moved(&world, guest, nth, &SHARE);
    }
    let (claims, contents) = (&liar.asked().claims, &liar.asked().contents);
    assert!(claims.load(Relaxed) > 0 && contents.load(Relaxed) > 0, "{:?}", liar.asked());
    // It was copied from.
    end_to_end::assert_intact(&guests[0]);
    liar.end(&world.target(0).host);
}

#[runs(fills)]
#[test]
fn with_the_directory_in_redis() {
    let mut redis = None;
    let world = RackWorld::with(2, |racks| {
        let host = &racks.targets()[0].host;
        let address = host.addresses[0].to_string();
        let mut command = host.command("redis-server");
        command.args([
            "--bind",
            &address,
            "--port",
            "6399",
            "--save",
            "",
            "--protected-mode",
            "no",
        ]);
        command.stdout(Stdio::null());
        redis = Some(command.spawn().expect("`make setup` installs redis-server"));
        let told = ["--directory".to_owned(), format!("redis://{address}:6399")];
        (String::new(), told.to_vec())
    });
    let guests = twins(&world, 0);
    let first = moved(&world, &guests[0], 0, &SHARE);
    assert_came_from_the_rack(&moved(&world, &guests[1], 1, &SHARE), &first);
    // Without it, VMs arrive as before.
    let mut redis = redis.unwrap();
    redis.kill().unwrap();
    redis.wait().unwrap();
    let third = world.boot(world.source(0), twin("web2", 0));
    let moving = world.begin(&third, world.source(0), world.target(1), &SHARE);
    let report = world.arrive(&third, moving);
    let says = |note: &String| note.contains("content of other hosts of the rack is not used");
    assert!(report.notes.iter().any(says), "{:?}", report.notes);
    // What the destination's own host has is still not sent.
    assert!(report.named_bytes >= COMMON, "{}", report.named_bytes);
    assert_eq!(report.peer_bytes, 0);
}

/// What was to be fetched from it is sent by the source.
#[runs(fills)]
#[test]
fn a_mate_dies_while_others_fetch_from_it() {
    killed_while_it_is_wanted(1);
}

/// The first host of the rack keeps the directory.
#[runs(fills)]
#[test]
fn the_directory_dies_while_it_is_asked() {
    killed_while_it_is_wanted(0);
}

/// The second VM moves to another host than the first one, whose agent is killed meanwhile.
fn killed_while_it_is_wanted(dies: usize) {
    let mut world = RackWorld::new(2);
    let guests = twins(&world, 100_000);
    let name = world.target(dies).name.clone();
    let moving = world.begin(&guests[0], world.source(0), world.target(dies), &SHARE);
    let _ = world.arrive(&guests[0], moving);
    let slow = [&SHARE[..], &["--limit", "60M"]].concat();
    let mut moving = world.begin(&guests[1], world.source(1), world.target(1 - dies), &slow);
    moving.wait_for(Phase::FirstPass);
    world.kill_agent(&name);
    let _ = world.arrive(&guests[1], moving);
    // It was copied from.
    end_to_end::assert_intact(&guests[0]);
}
