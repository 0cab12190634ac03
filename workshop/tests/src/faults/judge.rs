//! What has become of a VM once no fault lasts any more.

use std::fs;
use std::time::{Duration, Instant};

use api::{VmStatus, VmSummary};

use crate::world::{Side, World};

/// Enough after any fault: agents ask each other at least every minute.
const SETTLE_MAX: Duration = Duration::from_secs(100);

/// The phases that the two journals have of a migration that began at `from`, such as `stopped /
/// loaded`.
#[must_use]
pub fn phase(world: &World, from: Side) -> String {
    phases(world, from, from.other())
}

/// The same of a migration within one host, where both journals are.
#[must_use]
pub fn phase_within(world: &World, at: Side) -> String {
    phases(world, at, at)
}

/// The phases in the journals of these sides.
pub(super) fn phases(world: &World, from: Side, to: Side) -> String {
    let note = |side: Side, extension: &str| {
        let dir = world.host(side).inside("state/journals");
        let files = fs::read_dir(dir).into_iter().flatten().flatten();
        let texts = files.filter(|file| file.path().extension().is_some_and(|it| it == extension));
        let last = texts.filter_map(|file| fs::read(file.path()).ok()).last()?;
        let text = String::from_utf8_lossy(&last).into_owned();
        let phases = text.split("\"phase\":\"").skip(1);
        let named = phases.filter_map(|rest| rest.split('"').next()).last();
        Some(named.unwrap_or("opened").to_owned())
    };
    let none = || "-".to_owned();
    let source = note(from, "source").unwrap_or_else(none);
    let destination = note(to, "destination").unwrap_or_else(none);
    format!("{source} / {destination}")
}

/// Waits until nothing is unsettled any more. With `gone`, the VM's QEMU was killed, and an
/// operator knows that.
pub(super) fn settled(world: &World, gone: bool) -> Result<(), String> {
    let until = Instant::now() + SETTLE_MAX;
    loop {
        let mut unsettled = Vec::new();
        for side in [Side::A, Side::B] {
            for vm in world.vms(side) {
                if vm.status == VmStatus::InDoubt && gone && lost_there(&vm) {
                    world.says(side, &["resolve", &vm.name, "--there", "--yes"]);
                }
                let busy = matches!(vm.status, VmStatus::Arriving | VmStatus::InDoubt);
                if busy || vm.migration.is_some() {
                    unsettled.push(format!("{}: {vm:?}", side.name()));
                }
            }
            let journals = world.host(side).inside("state/journals");
            let left = fs::read_dir(journals).map_or(0, Iterator::count);
            if left > 0 {
                unsettled.push(format!("{} keeps {left} journals", side.name()));
            }
        }
        if unsettled.is_empty() {
            return Ok(());
        }
        if Instant::now() > until {
            return Err(format!("not settled after {SETTLE_MAX:?}: {}", unsettled.join("; ")));
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn lost_there(vm: &VmSummary) -> bool {
    // At another host, or in another QEMU of this one.
    let lost = ["and died there", "ended when it had been ordered to run it"];
    vm.problem.as_ref().is_some_and(|problem| lost.iter().any(|words| problem.contains(words)))
}

/// Where the VM runs, if it does; a dead one is removed where its end is reported. A QEMU that hung
/// during its start shows only when it goes on, and is killed then.
pub(super) fn where_is(world: &World, gone: bool) -> Result<Option<(Side, VmSummary)>, String> {
    let arrives = |side| world.vms(side).iter().any(|vm| vm.status == VmStatus::Arriving);
    if arrives(Side::A) || arrives(Side::B) {
        settled(world, gone)?;
    }
    let mut running = Vec::new();
    for side in [Side::A, Side::B] {
        for vm in world.vms(side) {
            match vm.status {
                VmStatus::Running => running.push((side, vm)),
                VmStatus::Dead => world.says(side, &["stop", &vm.name]),
                _ => return Err(format!("{}: {vm:?}", side.name())),
            }
        }
    }
    match running.len() {
        0 | 1 => Ok(running.pop()),
        _ => Err(format!("it runs twice: {running:?}")),
    }
}
