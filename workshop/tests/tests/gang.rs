//! Several VMs as one operation: each arrives intact or stays intact, whatever becomes of the
//! others and of the coordinating agent.

use std::fs;

use api::{GangOutcome, GangReport, MoveState, VmStatus};
use end_to_end::{MIB, Moving, Side, World, bare, until};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::Link;
use marks::runs;

fn spec(name: &str, seed: u64) -> GuestSpec {
    let mut spec = bare("128M", 100_000);
    spec.name = name.to_owned();
    spec.orders.seed = seed;
    spec
}

/// Boots guests on A.
fn herd<const N: usize>(world: &World, names: [&str; N]) -> [Guest; N] {
    let mut seed = 40;
    names.map(|name| {
        seed += 1;
        world.boot(&spec(name, seed))
    })
}

fn report(moving: Moving) -> (bool, GangReport, String) {
    let (success, output, said) = moving.wait_any();
    let report = serde_json::from_str(&output)
        .unwrap_or_else(|error| panic!("no report: {error}\n{output}\n{said}"));
    (success, report, said)
}

fn states(report: &GangReport) -> Vec<(&str, MoveState)> {
    let mut states: Vec<_> = report.moves.iter().map(|one| (one.vm.as_str(), one.state)).collect();
    states.sort_unstable_by_key(|(vm, _)| vm.to_owned());
    states
}

/// Asserts that all of them run on a host, and nothing else does.
fn assert_at(world: &World, side: Side, guests: &[&Guest]) {
    let vms = world.vms(side);
    let pids: Vec<u32> = vms.iter().map(|vm| vm.pid).collect();
    for guest in guests {
        let vm = vms.iter().find(|vm| vm.name == guest.spec.name).expect("it should be there");
        world.assert_runs(side, vm);
        world.assert_intact(guest);
    }
    assert_eq!(vms.len(), guests.len());
    world.assert_only(side, &pids);
}

/// The guest that had started to move: the lab has to listen to its next QEMU at B, too.
fn heard_anew<'g>(begun: Option<&str>, guests: [&'g Guest; 2]) -> Vec<&'g Guest> {
    let begun = begun.expect("one had begun");
    guests.into_iter().filter(|guest| guest.spec.name == begun).collect()
}

/// The destination's agent coordinates, and everything is encrypted.
#[runs(promised)]
#[test]
fn by_name_and_coordinated_from_elsewhere() {
    let (world, _certificates) = World::secured(Link::one(1000));
    let [one, two, three] = &herd(&world, ["web1", "web2", "web3"]);
    let all = [one, two, three];
    let args = ["gang", "web1=host-b", "web2=host-b", "web3=host-b", "--json"];
    let (success, report, said) = report(world.begin_all(&all, Side::B, Side::A, &args));
    assert!(success, "{said}");
    assert_eq!(report.outcome, Some(GangOutcome::Done), "{said}");
    for one in &report.moves {
        let figures = one.figures.as_ref().expect("its source says what it took");
        assert!(figures.wire_bytes > 16 * MIB && figures.downtime_ms.is_some(), "{figures:?}");
        let id = one.migration.as_deref().unwrap();
        assert!(world.tells(Side::A, &["report", id]).contains("runs on host-b"));
    }
    world.assert_nothing_left(Side::A);
    assert_at(&world, Side::B, &all);
    assert!(world.tells(Side::B, &["report", &report.id]).contains("3 VMs moved."));
}

#[runs(promised)]
#[test]
fn a_host_is_evacuated_after_a_dry_run_that_moves_nothing() {
    let world = World::new(Link::one(1000));
    let [one, two] = &herd(&world, ["web1", "web2"]);
    let before: Vec<u32> = world.vms(Side::A).iter().map(|vm| vm.pid).collect();
    let said = world.tells(Side::A, &["evacuate", "host-a", "--dry-run"]);
    for piece in ["web1  host-a  host-b", "web2  host-a  host-b", "128 MiB", "Nothing was moved."] {
        assert!(said.contains(piece), "{piece:?} is not in: {said}");
    }
    let after: Vec<u32> = world.vms(Side::A).iter().map(|vm| vm.pid).collect();
    assert_eq!(before, after);
    world.assert_nothing_left(Side::B);
    assert!(world.tells(Side::A, &["gang"]).contains("No gangs"));

    let args = ["evacuate", "host-a", "--to", "host-b", "--parallel", "1", "--json"];
    let (success, report, said) = report(world.begin_all(&[one, two], Side::A, Side::A, &args));
    assert!(success, "{said}");
    assert_eq!(states(&report), [("web1", MoveState::Done), ("web2", MoveState::Done)]);
    world.assert_nothing_left(Side::A);
    assert_at(&world, Side::B, &[one, two]);
    assert!(world.tells(Side::A, &["evacuate", "host-a"]).contains("no VM to move"));
}

/// B already has a VM with web2's name.
fn with_taken_name() -> (World, [Guest; 2], u32) {
    let world = World::new(Link::one(1000));
    let guests = herd(&world, ["web1", "web2"]);
    let qemu = world.kit.qemu.display().to_string();
    let other = ["run", "web2", "--", &qemu, "-S", "-m", "64", "-nodefaults", "-display", "none"];
    world.says(Side::B, &other);
    let taker = world.vm(Side::B, "web2").unwrap().pid;
    (world, guests, taker)
}

#[test]
fn one_that_is_refused_does_not_stop_the_other() {
    let (world, [one, two], taker) = with_taken_name();
    let args = ["gang", "web1=host-b", "host-a/web2=host-b", "--json"];
    let (success, report, said) = report(world.begin_all(&[&one], Side::A, Side::A, &args));
    assert!(!success);
    assert_eq!(states(&report), [("web1", MoveState::Done), ("web2", MoveState::Failed)]);
    assert!(said.contains("there is already a VM `web2` there"), "{said}");
    assert!(said.contains("Moved, and stay there: web1 (host-b)"), "{said}");
    assert_at(&world, Side::A, &[&two]);
    world.assert_intact(&one);

    // With the cause gone, the rest moves.
    world.says(Side::B, &["stop", "web2", "--force"]);
    assert!(world.vm(Side::B, "web2").is_none_or(|vm| vm.pid != taker));
    let again = ["gang", "--resume", &report.id, "--json"];
    let (success, report, said) = self::report(world.begin_all(&[&two], Side::A, Side::A, &again));
    assert!(success, "{said}");
    assert_eq!(states(&report), [("web1", MoveState::Done), ("web2", MoveState::Done)]);
    assert_at(&world, Side::B, &[&one, &two]);
}

#[test]
fn with_atomic_those_under_way_are_taken_back() {
    let (world, [one, two], taker) = with_taken_name();
    // So that web1 takes long.
    let args =
        ["gang", "web1=host-b", "host-a/web2=host-b", "--atomic", "--limit", "10M", "--json"];
    let (success, report, said) = report(world.begin_all(&[], Side::A, Side::A, &args));
    assert!(!success);
    assert_eq!(states(&report), [("web1", MoveState::Cancelled), ("web2", MoveState::Failed)]);
    assert!(said.contains("web1 stays at host-a: web2 failed"), "{said}");
    assert_at(&world, Side::A, &[&one, &two]);
    until("web1 is not at B", || world.vm(Side::B, "web1").is_none());
    assert_eq!(world.vm(Side::B, "web2").unwrap().pid, taker);
    world.says(Side::B, &["stop", "web2", "--force"]);
}

#[runs(promised)]
#[test]
fn a_gang_that_is_cancelled_can_be_taken_up_again() {
    let world = World::new(Link::one(200));
    let [one, two] = &herd(&world, ["web1", "web2"]);
    let args = ["evacuate", "host-a", "--parallel", "1", "--limit", "50M", "--json"];
    let mut moving = world.begin_all(&[one, two], Side::B, Side::A, &args);
    moving.wait_line("first pass");
    moving.interrupt();
    let (success, report, said) = report(moving);
    assert!(!success);
    assert_eq!(report.outcome, Some(GangOutcome::Cancelled), "{said}");
    assert_eq!(states(&report), [("web1", MoveState::Cancelled), ("web2", MoveState::Cancelled)]);
    assert_at(&world, Side::A, &[one, two]);
    world.assert_nothing_left(Side::B);
    let again = ["gang", "--resume", &report.id, "--json"];
    let mut begun = report.moves.iter().filter(|one| one.migration.is_some());
    let begun = heard_anew(begun.next().map(|one| one.vm.as_str()), [one, two]);
    let (success, _, said) = self::report(world.begin_all(&begun, Side::B, Side::A, &again));
    assert!(success, "{said}");
    assert_at(&world, Side::B, &[one, two]);
}

/// The coordinator is the source's agent, so a migration ends with it.
#[test]
fn the_coordinator_dies_and_the_gang_is_taken_up_again() {
    let mut world = World::new(Link::one(200));
    let [one, two] = &herd(&world, ["web1", "web2"]);
    let args = ["evacuate", "host-a", "--parallel", "1", "--limit", "50M", "--json"];
    let mut moving = world.begin_all(&[one, two], Side::A, Side::A, &args);
    moving.wait_line("first pass");
    world.kill_agent(Side::A);
    let (success, output, said) = moving.wait_any();
    assert!(!success && output.is_empty() && said.contains("agent"), "{said}");
    world.start_agent(Side::A);
    until("all are settled", || world.vms(Side::A).iter().all(|vm| vm.status == VmStatus::Running));
    world.assert_nothing_left(Side::B);
    let listed = world.tells(Side::A, &["gang"]);
    assert!(listed.contains("interrupted") && listed.contains("0 of 2"), "{listed}");
    let gangs: Vec<api::GangProgress> =
        serde_json::from_str(&world.tells(Side::A, &["gang", "--json"])).unwrap();
    let again = ["gang", "--resume", &gangs[0].id, "--json"];
    let mut begun = gangs[0].moves.iter().filter(|one| one.migration.is_some());
    let begun = heard_anew(begun.next().map(|one| one.vm.as_str()), [one, two]);
    let (success, report, said) = report(world.begin_all(&begun, Side::A, Side::A, &again));
    assert!(success, "{said}");
    assert_eq!(states(&report), [("web1", MoveState::Done), ("web2", MoveState::Done)]);
    assert_at(&world, Side::B, &[one, two]);
}

/// None is without a limit, whatever the others do.
#[test]
fn all_together_have_a_limit() {
    let world = World::new(Link::one(1000));
    let [one, two] = &herd(&world, ["web1", "web2"]);
    let total: api::BitRate = "200M".parse().unwrap();
    let args = ["evacuate", "host-a", "--limit-total", "200M", "--dry-run"];
    let said = world.tells(Side::A, &args);
    for piece in ["web1 100Mbit/s", "web2 100Mbit/s"] {
        assert!(said.contains(piece), "{piece:?} is not in: {said}");
    }
    let args = ["evacuate", "host-a", "--limit-total", "200M", "--json"];
    let (success, report, said) = report(world.begin_all(&[one, two], Side::A, Side::A, &args));
    assert!(success, "{said}");
    assert_at(&world, Side::B, &[one, two]);
    for one in &report.moves {
        assert_eq!(one.limit_bits_per_s, None, "it has ended");
        let id = one.migration.as_deref().unwrap();
        let json = world.tells(Side::A, &["report", id, "--json"]);
        let migration: api::Report = serde_json::from_str(&json).unwrap();
        let changed = migration.bounds_changes.iter().map(|change| &change.bounds);
        for bounds in changed.chain([&migration.bounds]) {
            assert!(bounds.limit_bits_per_s.is_some_and(|limit| limit <= total), "{bounds:?}");
        }
    }
}

#[test]
fn a_plan_file_says_who_goes_where_and_how() {
    let world = World::new(Link::one(1000));
    let [one, two] = &herd(&world, ["web1", "web2"]);
    let plan = world.host(Side::A).run_dir.join("plan.toml");
    let moves = "[[move]]\nvm = \"web1\"\nto = \"host-b\"\n";
    fs::write(&plan, format!("[options]\ndowntime-ms = 500\ncompress = \"lz4\"\n{moves}")).unwrap();
    let inside = format!("{}/plan.toml", lab::hosts::RUN_DIR);
    let args = ["gang", "--file", &inside, "--downtime-ms", "400", "--json"];
    let (success, report, said) = report(world.begin_all(&[one], Side::A, Side::A, &args));
    assert!(success, "{said}");
    assert_eq!(report.options.downtime_ms, 400, "what is typed wins");
    assert_eq!(report.options.compress, api::Compress::Lz4);
    assert_at(&world, Side::A, &[two]);
    assert_at(&world, Side::B, &[one]);
}
