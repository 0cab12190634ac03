//! One run: one contender moves one gang.

use std::time::{Duration, Instant};

use super::conditions::Conditions;
use super::figures::{GangFigures, VmFigures};
use super::load::Load;
use super::pair::Asking;
use super::scenarios::GangScenario;
use crate::contender::Moved;
use crate::contender::gang::{GangContender, GangGround, GangMoved, Member};
use crate::contest::save;
use crate::cpu::CpuMeter;
use crate::result::Run;
use crate::warm::{self, Reserve};
use lab::error::{LabError, Result};
use lab::guest::Guest;
use lab::hosts::{Crossed, Host, Racks};
use lab::setup::Kit;

/// Memory to warm for the first arriving guests and for buffers of the transfer.
const WARM_BYTES: u64 = 3 << 29;
/// Warm memory for later arrivals. It is freed over time, too: this much lasts for 50 s.
const RESERVE_BYTES: u64 = 8 << 30;
/// Time for booted guests to settle before they move.
const SETTLE: Duration = Duration::from_secs(2);
/// Longest time until a moved guest reports again.
const HEARD_MAX: Duration = Duration::from_secs(20);
/// Work that the migration leaves until after the VM runs is its effect, too.
const AFTER: Duration = Duration::from_millis(300);
/// Not often, because there are two dozen processes to read.
const READ_CPU_EVERY: Duration = Duration::from_millis(50);

/// New racks, new VMs, one move of all of them.
pub(super) fn run(
    kit: &Kit,
    scenario: &GangScenario,
    conditions: &Conditions,
    label: &str,
    contender: &mut dyn GangContender,
) -> Result<Run> {
    let racks = Racks::new(scenario.layout)?;
    let mut members = scenario.members(&racks, conditions);
    scenario.join_pair(kit, &racks, &mut members)?;
    let (downtime_goal, timeout) = (scenario.goal, scenario.timeout);
    let ground = GangGround { kit, racks: &racks, downtime_goal, timeout };
    let guests = boot(&ground, &members, contender)?;
    if conditions.rests {
        contender.rest(&members)?;
    }
    let asking = Asking::watch(&guests)?;
    let reserve = Reserve::keep(RESERVE_BYTES);
    warm::memory(WARM_BYTES);
    let load = scenario.load_bytes_per_s.map(|rate| Load::start(&racks, rate)).transpose()?;
    let hosts: Vec<&Host> = racks.hosts().iter().map(|host| &host.host).collect();
    let but = load.as_ref().map_or_else(Vec::new, Load::pids);
    let cpu = CpuMeter::start(&hosts, but, READ_CPU_EVERY)?;
    for guest in &guests {
        guest.forget_gap();
    }
    let (core, edges, beside) = (racks.crossed()?, racks.edges()?, load_sent(&racks)?);
    let moved = contender.migrate(&ground, &members);
    let core = racks.crossed()? - core;
    let edges = racks.edges()? - edges;
    let beside = load_sent(&racks)? - beside;
    drop(reserve);
    save_reports(label, contender)?;
    let moved = moved?;
    let core = Crossed { from_sources: core.from_sources.saturating_sub(beside), ..core };
    let spent = cpu.since(moved.began);
    let to = moved.ran() + AFTER;
    std::thread::sleep((to + AFTER).saturating_duration_since(Instant::now()));
    let reports = contender.reports();
    let named = reports.iter().map(|report| report.named_bytes).sum();
    let sum = |of: fn(&api::Report) -> u64| reports.iter().map(of).sum::<u64>() as f64;
    let (again, bodies) = (sum(|report| report.again_bytes), sum(|report| report.body_bytes));
    let figures = GangFigures {
        named_bytes: (!reports.is_empty()).then_some(named),
        again_share: (bodies > 0.0).then(|| again / bodies),
        load: load.map(|load| load.judge(moved.began, to)),
        pair: asking.map(|asking| asking.judge(moved.began, to)).transpose()?,
        ..GangFigures::counted(core, edges)
    };
    let run = Run {
        ok: true,
        total_s: (moved.ran() - moved.began).as_secs_f64(),
        prepare_s: moved.prepare.as_secs_f64(),
        wire_bytes: edges.sent(),
        cpu_s: spent.processes_s,
        stolen_s: spent.stolen_s,
        ..Run::default()
    };
    let run = judge(run, figures, &members, &guests, &moved)?;
    let run = with_chosen(run, contender.reports());
    contender.stop();
    Ok(run)
}

/// Starts the guests, and waits until all have booted.
fn boot(
    ground: &GangGround<'_>,
    members: &[Member<'_>],
    contender: &mut dyn GangContender,
) -> Result<Vec<Guest>> {
    let listen = |member: &Member<'_>| Guest::listen(member.spec.clone(), &member.from.host);
    let guests: Vec<Guest> = members.iter().map(listen).collect::<Result<_>>()?;
    contender.start(ground, members)?;
    for (guest, member) in guests.iter().zip(members) {
        guest.wait_boot(&member.from.host)?;
    }
    std::thread::sleep(SETTLE);
    for (guest, member) in guests.iter().zip(members) {
        let Some(to) = member.to else { continue };
        let hosts = if contender.chooses_hosts() { ground.racks.targets() } else { vec![to] };
        hosts.iter().try_for_each(|to| guest.expect_on(&to.host))?;
    }
    Ok(guests)
}

/// Bytes that the load has sent, if there are hosts for one.
fn load_sent(racks: &Racks) -> Result<u64> {
    racks.bystanders().map_or(Ok(0), |[here, _]| Ok(here.sent()?.bytes))
}

fn save_reports(label: &str, contender: &dyn GangContender) -> Result<()> {
    for report in contender.reports() {
        save(&format!("{label}-{}-{}-report", contender.name(), report.vm), report)?;
    }
    Ok(())
}

/// Adds the effects that the guests noticed, and the results of their checks.
fn judge(
    run: Run,
    mut figures: GangFigures,
    members: &[Member<'_>],
    guests: &[Guest],
    moved: &GangMoved,
) -> Result<Run> {
    let mut kept = Vec::new();
    let mut intact = figures.pair.as_ref().is_none_or(|pair| pair.wrong == 0);
    let mut moves = moved.vms.iter();
    for (guest, member) in guests.iter().zip(members) {
        guest.wait_beat(HEARD_MAX)?;
        if let Some(to) = member.to {
            let moves = moves.next().ok_or_else(|| LabError::Missing {
                what: format!("what became of {}", member.spec.name),
            })?;
            kept.extend(work(guest, moves, moved));
            figures.vms.push(felt(guest, member, &to.name, moves, moved));
        }
    }
    let mut vms = figures.vms.iter_mut();
    for (guest, member) in guests.iter().zip(members) {
        let checked = guest.check()?;
        intact &= checked.wrong == 0 && checked.pages > 0 && guest.pulse().twice == 0;
        if member.to.is_some()
            && let Some(vm) = vms.next()
        {
            (vm.pages, vm.wrong) = (checked.pages, checked.wrong);
        }
    }
    let worst = |of: fn(&VmFigures) -> f64| figures.vms.iter().map(of).fold(0.0, f64::max);
    let kept_by_all = kept.iter().sum::<f64>() / kept.len().max(1) as f64;
    Ok(Run {
        intact,
        downtime_ms: worst(|vm| vm.downtime_ms),
        guest_gap_ms: worst(|vm| vm.guest_gap_ms),
        guest_work: if kept.is_empty() { 1.0 } else { kept_by_all },
        gang: Some(figures),
        ..run
    })
}

/// Names the hosts that VMs have gone to, which the mover may have chosen.
fn with_chosen(mut run: Run, reports: &[api::Report]) -> Run {
    for vm in run.gang.iter_mut().flat_map(|gang| &mut gang.vms) {
        if let Some(report) = reports.iter().find(|report| report.vm == vm.name) {
            vm.to.clone_from(&report.to);
        }
    }
    run
}

fn felt(
    guest: &Guest,
    member: &Member<'_>,
    to: &str,
    moves: &Moved,
    moved: &GangMoved,
) -> VmFigures {
    VmFigures {
        name: member.spec.name.clone(),
        from: member.from.name.clone(),
        to: to.to_owned(),
        total_s: (moves.ran - moved.began).as_secs_f64(),
        downtime_ms: moves.downtime.as_secs_f64() * 1e3,
        guest_gap_ms: guest.felt(moved.began, moves.ran).gap.as_secs_f64() * 1e3,
        passes: moves.passes,
        ..VmFigures::default()
    }
}

/// The share of its full rate that a guest kept; none if it doesn't write.
fn work(guest: &Guest, moves: &Moved, moved: &GangMoved) -> Option<f64> {
    let orders = &guest.spec.orders;
    let rate = orders.rate + orders.file_rate;
    if rate == 0 {
        return None;
    }
    let felt = guest.felt(moved.began, moves.ran);
    let pages_per_s = felt.pages_per_s + felt.disk_pages_per_s;
    Some(pages_per_s * lab_guest::PAGE_BYTES as f64 / rate as f64)
}
