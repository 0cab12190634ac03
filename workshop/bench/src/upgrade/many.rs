//! All VMs of a host, by one command.

use std::thread;
use std::time::Duration;

use lab_guest::orders::Orders;

use super::{MIB, Way};
use crate::contender::{ByAgent, Commanded};
use crate::cpu::{self, CpuMeter};
use crate::result::Run;
use crate::warm;
use lab::error::Result;
use lab::guest::{Guest, GuestSpec};
use lab::hosts::{Hosts, Link};
use lab::setup::Kit;

/// How many.
pub(super) const VMS: u64 = 20;
const RAM_BYTES: u64 = 64 * MIB;
/// Frequent beats of so many would take CPU time.
const TICK_MS: u64 = 20;
const SETTLE: Duration = Duration::from_secs(2);
/// Longest time until a guest in another QEMU reports again.
const HEARD_MAX: Duration = Duration::from_secs(20);

/// Boots them, and gives all of them another QEMU.
pub(super) fn run(kit: &Kit, way: Way) -> Result<Run> {
    let hosts = Hosts::new(Link::unshaped())?;
    let by = ByAgent::start(kit, &hosts)?;
    let boot = |nth| by.boot(kit, &hosts, &spec(nth), way.options());
    let guests: Vec<Guest> = (1..=VMS).map(boot).collect::<Result<_>>()?;
    thread::sleep(SETTLE);
    warm::memory(VMS * RAM_BYTES);
    let cpu = CpuMeter::start(&[&hosts.a], Vec::new(), cpu::OFTEN)?;
    for guest in &guests {
        guest.forget_gap();
        guest.expect_on(&hosts.a)?;
    }
    let Commanded { reports, started, ended } = by.change(&hosts, &["--all"])?;
    let mut run = Run {
        ok: reports.len() == guests.len(),
        intact: true,
        total_s: (ended - started).as_secs_f64(),
        guest_work: 1.0,
        wire_bytes: reports.iter().map(|report| report.wire_bytes).sum(),
        ..Run::default()
    };
    way.check(run.wire_bytes, VMS)?;
    for guest in &guests {
        guest.wait_beat(HEARD_MAX)?;
        let gap_ms = guest.felt(started, ended).gap.as_secs_f64() * 1e3;
        run.guest_gap_ms = run.guest_gap_ms.max(gap_ms);
    }
    let downtimes = reports.iter().filter_map(|report| report.downtime_ms);
    run.downtime_ms = downtimes.fold(0.0, f64::max);
    let spent = cpu.since(started);
    (run.cpu_s, run.stolen_s) = (spent.processes_s, spent.stolen_s);
    for guest in &guests {
        let checked = guest.check()?;
        run.intact &= checked.wrong == 0 && checked.pages > 0;
    }
    Ok(run)
}

fn spec(nth: u64) -> GuestSpec {
    let orders = Orders {
        random_bytes: 16 * MIB,
        working_set_bytes: 4 * MIB,
        rate: 200_000,
        tick_ms: TICK_MS,
        seed: nth,
        ..Orders::default()
    };
    GuestSpec::bare(&format!("bench{nth}"), "64M", orders)
}
