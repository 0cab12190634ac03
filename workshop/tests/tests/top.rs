//! `droveway top` in a terminal, while a VM moves.

use api::Outcome;
use end_to_end::{MIB, Side, Terminal, World, bare};
use lab::hosts::Link;
use marks::runs;

#[runs(promised)]
#[test]
fn a_move_is_watched_and_cancelled_and_the_next_one_is_in_the_history() {
    let world = World::new(Link::one(100));
    let mut spec = bare("256M", 30_000_000);
    // More than the link carries, so the move has no end.
    spec.orders.working_set_bytes = 32 * MIB;
    let guest = world.boot(&spec);
    let pid = world.vm(Side::A, "web1").unwrap().pid;
    let start = || Terminal::start(world.host(Side::A), world.agent(Side::A), &["top"]);
    let mut top = start();
    top.wait("No migration runs.");
    top.wait("2 hosts · 1 VM · 0 moving");

    let moving = world.begin(&guest, Side::A, &[]);
    top.wait("web1  host-a → host-b");
    top.wait("dirtied");
    top.press("c");
    top.wait("Cancel the move of web1? It stays at host-a. y/n");
    top.press("y");
    let ended = moving.wait();
    assert_eq!(ended.report.outcome, Outcome::Cancelled, "{}", ended.said);
    top.wait("cancelled");
    top.press("q");
    assert!(top.ends_well());
    world.assert_stayed(&guest, Side::A, pid);

    guest.ask("rate 1000000").unwrap();
    let report = world.migrate(&guest, Side::A, &[]);
    let mut top = start();
    top.press("4");
    top.wait("moved");
    top.press("3");
    top.wait("web1  host-b  running");
    let once = world.tells(Side::A, &["top", "--once"]);
    let row = once.lines().find(|line| line.contains("moved")).expect("it is in the history");
    assert!(row.starts_with("web1  host-a → host-b"), "{once}");
    assert!(report.downtime_ms.is_some());
    top.press("q");
    assert!(top.ends_well());
}

#[test]
fn read_only_offers_no_action() {
    let world = World::new(Link::one(100));
    let guest = world.boot(&bare("64M", 0));
    let args = ["top", "--read-only"];
    let mut top = Terminal::start(world.host(Side::A), world.agent(Side::A), &args);
    top.wait("2 hosts · 1 VM · 0 moving");
    assert!(!top.text().contains("cancel"), "{}", top.text());
    // Ctrl-C.
    top.press("\u{3}");
    assert!(top.ends_well());
    world.assert_intact(&guest);
}
