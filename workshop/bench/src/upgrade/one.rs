//! One VM.

use std::thread;
use std::time::Duration;

use super::{Vm, Way};
use crate::contender::{ByAgent, ByQemu, Changed};
use crate::contest::work;
use crate::cpu::{self, CpuMeter};
use crate::result::Run;
use crate::warm;
use lab::error::Result;
use lab::guest::Guest;
use lab::hosts::{Hosts, Link};
use lab::setup::Kit;

/// Time for a guest to settle, and to write at its rate.
const SETTLE: Duration = Duration::from_secs(1);
/// Longest time until a guest in another QEMU reports again.
const HEARD_MAX: Duration = Duration::from_secs(20);

/// What gives it another QEMU.
enum By {
    Agent(ByAgent),
    Qemu(Box<ByQemu>),
}

/// Boots a VM and gives it another QEMU twice: idle, then writing.
pub(super) fn run(kit: &Kit, vm: &Vm, way: Way) -> Result<Vec<Run>> {
    let hosts = Hosts::new(Link::unshaped())?;
    let (mut by, guest) = if let Way::Qemu(mode) = way {
        let (by, guest) = ByQemu::start(kit, &hosts, &vm.spec, mode)?;
        (By::Qemu(Box::new(by)), guest)
    } else {
        let by = ByAgent::start(kit, &hosts)?;
        let guest = by.boot(kit, &hosts, &vm.spec, way.options())?;
        (By::Agent(by), guest)
    };
    let mut runs = Vec::new();
    for rate in [0, vm.rate] {
        if rate > 0 {
            guest.ask(&format!("rate {rate}"))?;
        }
        let run = measure(&hosts, &mut by, &guest, vm, rate)?;
        way.check(run.wire_bytes, 1)?;
        runs.push(run);
    }
    Ok(runs)
}

/// One change of QEMU, of a VM that writes at `rate`.
fn measure(hosts: &Hosts, by: &mut By, guest: &Guest, vm: &Vm, rate: u64) -> Result<Run> {
    thread::sleep(SETTLE);
    // For its RAM once more.
    warm::memory(vm.ram_bytes);
    let cpu = CpuMeter::start(&[&hosts.a], Vec::new(), cpu::OFTEN)?;
    guest.forget_gap();
    let Changed { started, ran, prepare, downtime, bytes } = match by {
        By::Agent(by) => by.change_one(hosts, guest)?,
        By::Qemu(by) => by.change(hosts, guest)?,
    };
    guest.wait_beat(HEARD_MAX)?;
    let felt = guest.felt(started, ran);
    let spent = cpu.since(started);
    let checked = guest.check()?;
    Ok(Run {
        ok: true,
        intact: checked.wrong == 0 && checked.pages > 0,
        total_s: (ran - started).as_secs_f64(),
        prepare_s: prepare.as_secs_f64(),
        downtime_ms: downtime.as_secs_f64() * 1e3,
        guest_gap_ms: felt.gap.as_secs_f64() * 1e3,
        wire_bytes: bytes,
        cpu_s: spent.processes_s,
        stolen_s: spent.stolen_s,
        guest_work: work(rate, felt.pages_per_s),
        ..Run::default()
    })
}
