//! Content of a host's VMs: scanned without giving them memory, available to VMs that arrive, and
//! only to those of their domain.

use std::fs;

use api::{GangPlan, GangReport, Outcome, Report, SharedParts};
use end_to_end::{MIB, Side, World};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::Link;
use marks::runs;

/// Bytes of the same content in each VM, written with the same seed.
const COMMON: u64 = 48 * MIB;
const SHARE: [&str; 2] = ["--share", "host"];
const OFF: [&str; 2] = ["--share", "off"];

fn twin(name: &str) -> GuestSpec {
    busy_twin(name, 0)
}

fn busy_twin(name: &str, rate: u64) -> GuestSpec {
    end_to_end::twin(name, "160M", COMMON, rate)
}

/// Agents that scan often enough for a test.
fn world() -> World {
    let mut world = World::new(Link::one(500));
    world.tell_agents(["--scan-cpu", "50%"].map(str::to_owned).to_vec());
    world
}

fn moved(world: &World, guest: &Guest, arguments: &[&str]) -> Report {
    let ended = world.begin(guest, Side::A, arguments).wait();
    assert_eq!(ended.report.outcome, Outcome::Done, "{}", ended.said);
    ended.report
}

/// A value of `/proc/PID/status`, in bytes.
fn bytes(pid: u32, line: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let found = status.lines().find_map(|one| one.strip_prefix(line)).unwrap();
    let kib: u64 = found.trim().strip_suffix(" kB").unwrap().trim().parse().unwrap();
    kib << 10
}

/// VMs that arrived without names, or were there when the agent started.
#[runs(fills)]
#[test]
fn what_runs_at_the_destination_is_not_sent() {
    let mut world = world();
    let guests = ["web1", "web2"].map(|name| world.boot(&twin(name)));
    // It is scanned where it is, also by an agent that has just started.
    world.wait_looked_at(Side::A, "web1");
    // By default, nothing is looked up where there is nothing to find.
    let first = moved(&world, &guests[0], &[]);
    assert_eq!(first.named_bytes, 0);
    world.kill_agent(Side::B);
    world.start_agent(Side::B);
    world.wait_looked_at(Side::B, "web1");
    let second = moved(&world, &guests[1], &[]);
    println!("{} by name", second.named_bytes);
    assert!(second.named_bytes >= COMMON, "{second:?}");
    guests.iter().for_each(|guest| world.assert_intact(guest));
    // A VM that has ended is forgotten.
    let known = |name: &str| world.tells(Side::B, &["show", name]).contains("Content");
    assert!(known("web2"));
    world.says(Side::B, &["stop", "web1", "--force"]);
    assert_eq!(world.vms(Side::B).len(), 1);
}

/// Both VMs write, at rest and while they move: a page that kept the name of what it held before
/// would be wrong, or be that of the other VM.
#[runs(fills)]
#[test]
fn what_was_named_at_rest_is_not_hashed_when_the_vm_moves() {
    let world = world();
    let guests = ["web1", "web2"].map(|name| world.boot(&busy_twin(name, 200_000)));
    for name in ["web1", "web2"] {
        world.wait_looked_at(Side::A, name);
    }
    let [first, second] = guests.each_ref().map(|guest| moved(&world, guest, &SHARE));
    for report in [&first, &second] {
        println!("{} named before, {} by name", report.named_before_bytes, report.named_bytes);
        assert!(report.named_before_bytes >= COMMON, "{report:?}");
    }
    assert!(second.named_bytes >= COMMON, "{second:?}");
    guests.iter().for_each(|guest| world.assert_intact(guest));
    // Without sharing nothing is named.
    world.wait_looked_at(Side::B, "web1");
    let back = world.begin(&guests[0], Side::B, &OFF).wait();
    assert_eq!(back.report.outcome, Outcome::Done, "{}", back.said);
    assert_eq!(back.report.named_before_bytes, 0);
    world.assert_intact(&guests[0]);
}

#[runs(fills)]
#[test]
fn a_vm_that_is_looked_at_gets_no_memory_for_it() {
    let mut world = world();
    let backend = "memory-backend-memfd,id=ram0,size=160M,share=on";
    let shared = ["-object", backend, "-machine", "memory-backend=ram0"].map(str::to_owned);
    let mut specs = [twin("web1"), twin("web2")];
    specs.iter_mut().for_each(|spec| spec.orders.text_bytes = 0);
    specs[1].extra.extend(shared);
    world.restart_agent_with(Side::A, &["--scan-cpu", "0"]);
    let guests = specs.map(|spec| world.boot(&spec));
    let pids = || ["web1", "web2"].map(|name| world.vm(Side::A, name).unwrap().pid);
    assert!(!world.tells(Side::A, &["show", "web1"]).contains("Content"));
    let before = pids().map(|pid| bytes(pid, "VmRSS:"));
    world.kill_agent(Side::A);
    world.start_agent(Side::A);
    for name in ["web1", "web2"] {
        world.wait_looked_at(Side::A, name);
        assert!(world.tells(Side::A, &["show", name]).contains("known by name, all scanned"));
    }
    let pids = ["web1", "web2"].map(|name| world.vm(Side::A, name).unwrap().pid);
    let after = pids.map(|pid| bytes(pid, "VmRSS:"));
    let of_memfd = bytes(pids[1], "RssShmem:");
    println!("{before:?} {after:?}, of it the memfd {of_memfd}");
    for (before, after) in before.into_iter().zip(after) {
        assert!(after < before + 4 * MIB, "{after} after {before}");
    }
    assert!((COMMON..150 * MIB).contains(&of_memfd), "{of_memfd}: it had holes");
    guests.iter().for_each(|guest| world.assert_intact(guest));
}

#[runs(fills)]
#[test]
fn a_vm_takes_its_domain_along() {
    let mut world = world();
    let boot = |world: &World, name, domain| {
        world.boot_by(&twin(name), &world.kit.qemu, &["--share-domain", domain])
    };
    let guests = [
        boot(&world, "web1", "red"),
        boot(&world, "web2", "red"),
        world.boot(&twin("web3")),
        boot(&world, "web4", "red"),
    ];
    let arguments: [&[&str]; 4] =
        [&OFF, &SHARE, &SHARE, &["--share", "host", "--share-domain", "blue"]];
    let mut named = Vec::new();
    for (guest, arguments) in guests.iter().zip(arguments) {
        named.push(moved(&world, guest, arguments).named_bytes);
        if named.len() == 1 {
            // The others go by name.
            world.wait_looked_at(Side::B, "web1");
        }
    }
    println!("{named:?}");
    assert!(named[1] >= COMMON && named[2] < COMMON && named[3] < COMMON, "{named:?}");
    // They keep their domain when the agent restarts.
    world.kill_agent(Side::B);
    world.start_agent(Side::B);
    let domains: Vec<String> = world.vms(Side::B).into_iter().map(|vm| vm.share_domain).collect();
    assert_eq!(domains, ["red", "red", "", "blue"]);
    assert!(world.tells(Side::B, &["show", "web4"]).contains("Sharing domain  blue"));
    guests.iter().for_each(|guest| world.assert_intact(guest));
}

/// What a dry run expects, compared with what then goes by name.
#[runs(fills)]
#[test]
fn a_dry_run_tells_what_need_not_be_sent() {
    let mut world = world();
    let guests = ["web1", "web2", "web3"].map(|name| world.boot(&twin(name)));
    // One is there already, with the content that all have.
    moved(&world, &guests[0], &OFF);
    let evacuate = ["evacuate", "host-a", "--share", "host", "--json"];
    let dry = |world: &World| -> GangPlan {
        let said = world.tells(Side::B, &[&evacuate[..], &["--dry-run"]].concat());
        serde_json::from_str(&said).unwrap()
    };
    world.wait_looked_at(Side::A, "web2");
    world.wait_looked_at(Side::A, "web3");
    world.wait_looked_at(Side::B, "web1");
    let plan = dry(&world);
    println!("{plan:?}");
    assert_eq!((plan.moves.len(), &plan.notes[..]), (2, &[][..]));
    let parts: Vec<SharedParts> = plan.moves.iter().map(|one| one.shared.unwrap()).collect();
    assert!(parts.iter().all(|parts| parts.held_bytes >= COMMON), "{parts:?}");
    let text = world.tells(Side::A, &["evacuate", "host-a", "--share", "host", "--dry-run"]);
    assert!(text.contains("HELD") && text.contains("Nothing was moved."), "{text}");

    let leaving = [&guests[1], &guests[2]];
    let (success, output, said) = world.begin_all(&leaving, Side::A, Side::A, &evacuate).wait_any();
    assert!(success, "{said}");
    let report: GangReport = serde_json::from_str(&output).unwrap();
    for planned in &plan.moves {
        let one = report.moves.iter().find(|one| one.vm == planned.vm).unwrap();
        let named = one.figures.as_ref().unwrap().named_bytes;
        let expected = planned.shared_bytes.unwrap();
        println!("{}: {expected} expected, {named} by name", one.vm);
        assert!(named.abs_diff(expected) * 100 <= expected * 15, "{named}, not {expected}");
    }
    guests.iter().for_each(|guest| world.assert_intact(guest));

    // Without a scan the content is unknown, and the plan says so.
    world.restart_agent_with(Side::B, &["--scan-cpu", "0"]);
    let said = world.tells(Side::A, &["evacuate", "host-b", "--share", "host", "--dry-run"]);
    assert!(said.contains("what web1 on host-b contains isn't known: its agent scans no VM"));
}
