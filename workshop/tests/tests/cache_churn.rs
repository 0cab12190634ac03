//! Files that change in every way that files do, while their VM moves and the destination reads
//! what it can of them from disks.

use std::collections::BTreeMap;

use end_to_end::files::{assert_files, with_files};
use end_to_end::{MIB, Side, World, until};
use lab::guest::Guest;
use lab::hosts::Link;
use marks::runs;

const CHURN_BYTES: u64 = 8 * MIB;
/// The guest's names for what it does to files.
const DEEDS: [&str; 8] =
    ["written", "direct", "truncated", "punched", "copied", "evicted", "synced", "read"];

/// How often each was done so far; `order` switches the changes on or off.
fn deeds(guest: &Guest, order: &str) -> BTreeMap<String, u64> {
    let answer = guest.ask(&format!("churn {order}")).unwrap();
    let each = answer.split(' ').map(|word| {
        let (name, times) = word.split_once('=').unwrap();
        (name.to_owned(), times.parse().unwrap())
    });
    each.collect()
}

#[runs(fills)]
#[test]
fn nothing_of_the_files_is_lost() {
    let world = World::new(Link::one(150));
    let mut spec = with_files(&world);
    spec.orders.churn_bytes = CHURN_BYTES;
    spec.orders.rate = 1_000_000;
    let guest = world.boot(&spec);
    let before = deeds(&guest, "on");
    let grew = |now: &BTreeMap<String, u64>| DEEDS.iter().all(|deed| now[*deed] > before[*deed]);
    until("each thing was done, and XFS shares blocks", || {
        let now = deeds(&guest, "on");
        grew(&now) && now["cloned"] > 0
    });
    let before = deeds(&guest, "on");
    // On a busy machine the guest, and its helper, get little CPU time.
    let arguments = ["--shared-disks", "--helper-budget", "time=60s"];
    let moving = world.begin(&guest, Side::A, &arguments);
    let report = world.arrive(&guest, Side::A, moving);
    let after = deeds(&guest, "off");
    let total = |deeds: &BTreeMap<String, u64>| deeds.values().sum::<u64>();
    println!("{} deeds; {} bytes by storage", total(&after) - total(&before), report.stored_bytes);
    println!("{:?}", report.notes);
    for deed in DEEDS {
        assert!(after[deed] > before[deed], "{deed}: {before:?}, and later {after:?}");
    }
    assert!(report.stored_bytes > 0, "{:?}", report.notes);
    assert_files(&guest);
    world.assert_intact(&guest);
}
