//! What it costs a host that its agent scans the memory of VMs while nothing moves: the agent's CPU
//! time, and the work of guests that use all CPUs.

use std::thread;
use std::time::{Duration, Instant};

use lab_guest::orders::Orders;
use serde::Serialize;

use super::contest::{path, save_at};
use super::cpu::{self, CpuMeter};
use super::goals::Goal;
use super::result::median;
use crate::count;
use lab::agent::Agent;
use lab::error::{LabError, Result, SystemContext};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::{Hosts, Link};
use lab::program;
use lab::setup::Kit;

/// Its name: `make bench-NAME`.
pub const NAME: &str = "tracking";
/// What it measures, for people.
pub const ABOUT: &str = "four VMs of 256 MiB that rest and one that writes for each CPU, with the \
                         agent's scan and without";
/// The agent's `--scan-cpu`: none, and its default.
const SHARES: [&str; 2] = ["0", DEFAULT];
const DEFAULT: &str = "default";
const RESTING: u64 = 4;
const MIB: u64 = 1 << 20;
const MEMORY: &str = "256M";
/// What a guest writes per second with a whole CPU; the rest of its time it computes.
const RATE: u64 = 50_000_000;
/// Frequent beats would take CPU time, too.
const TICK_MS: u64 = 20;
/// Time for an agent that has just started to find its VMs.
const SETTLE: Duration = Duration::from_secs(3);
const WATCH: Duration = Duration::from_secs(20);
/// Pages that a guest wrote are reported within this time.
const COUNTED: Duration = Duration::from_millis(500);
/// What the scan may take, of all CPUs and of the guests' work.
const COST_MAX: f64 = 0.01;

/// One measurement.
#[derive(Clone, Debug, Serialize)]
struct Measured {
    /// The agent's `--scan-cpu`.
    scan_cpu: &'static str,
    /// CPU time of the agent, as a share of all CPUs.
    agent_share: f64,
    /// Bytes that the guests wrote per second.
    written_per_s: f64,
}

/// All figures.
#[derive(Debug, Serialize)]
struct Figures {
    measured: Vec<Measured>,
    goals: Vec<Goal>,
}

/// Measures with the scan and without in turn, `runs` times, prints the figures and writes them.
///
/// # Errors
/// If the lab fails, or a guest's memory is wrong.
pub fn run(kit: &Kit, runs: u32) -> Result<()> {
    println!("{NAME}: {ABOUT}");
    let cpus = thread::available_parallelism().doing("count CPUs")?.get();
    let hosts = Hosts::new(Link::unshaped())?;
    let without = Agent::start_with(&hosts, &hosts.a, &[], &["--scan-cpu", SHARES[0]])?;
    let resting = (0..RESTING).map(|nth| start(kit, &hosts, &without, &rests(nth)));
    let resting: Vec<Guest> = resting.collect::<Result<_>>()?;
    let writing = (0..cpus as u64).map(|nth| start(kit, &hosts, &without, &writes(nth)));
    let writing: Vec<Guest> = writing.collect::<Result<_>>()?;
    // It leaves its VMs running.
    drop(without);
    let mut measured = Vec::new();
    for nth in 1..=runs {
        let mut shares = SHARES;
        if nth.is_multiple_of(2) {
            // So that the order favours none.
            shares.reverse();
        }
        for share in shares {
            let one = measure(&hosts, &writing, share, cpus)?;
            println!(
                "  {nth}/{runs} --scan-cpu {share:4} agent {:5.2} % of all CPUs, \
                 guests {:6.1} MB/s",
                one.agent_share * 100.0,
                one.written_per_s / 1e6
            );
            measured.push(one);
        }
    }
    resting.iter().chain(&writing).try_for_each(check)?;
    let goals = judge(&measured);
    println!("\n{}", markdown(&measured));
    for goal in &goals {
        println!("{goal}");
    }
    let path = path(NAME);
    save_at(&path, &Figures { measured, goals })?;
    println!("\n{}", path.display());
    Ok(())
}

fn rests(nth: u64) -> GuestSpec {
    let orders =
        Orders { random_bytes: 96 * MIB, tick_ms: TICK_MS, seed: nth + 1, ..Orders::default() };
    GuestSpec::new(&format!("rests{nth}"), MEMORY, orders)
}

fn writes(nth: u64) -> GuestSpec {
    let orders = Orders {
        working_set_bytes: 96 * MIB,
        rate: RATE,
        burn: true,
        tick_ms: TICK_MS,
        seed: nth + 101,
        ..Orders::default()
    };
    GuestSpec::new(&format!("writes{nth}"), MEMORY, orders)
}

fn start(kit: &Kit, hosts: &Hosts, agent: &Agent, spec: &GuestSpec) -> Result<Guest> {
    let mut run = agent.command(&hosts.a, &["run", &spec.name, "--"]);
    program::output(run.args(spec.argv(kit, &kit.qemu)))?;
    Guest::meet(spec.clone(), &hosts.a)
}

fn measure(
    hosts: &Hosts,
    writing: &[Guest],
    scan_cpu: &'static str,
    cpus: usize,
) -> Result<Measured> {
    let chosen = ["--scan-cpu", scan_cpu];
    let options = if scan_cpu == DEFAULT { &[] } else { &chosen[..] };
    let agent = Agent::start_with(hosts, &hosts.a, &[], options)?;
    thread::sleep(SETTLE);
    let others = hosts.a.processes()?.into_iter().filter(|pid| *pid != agent.pid()).collect();
    for guest in writing {
        guest.forget_gap();
    }
    thread::sleep(COUNTED);
    let meter = CpuMeter::start(&[&hosts.a], others, cpu::OFTEN)?;
    let from = Instant::now();
    thread::sleep(WATCH);
    let to = Instant::now();
    let agent_s = meter.since(from).processes_s;
    thread::sleep(COUNTED);
    let pages = |guest: &Guest| count::between(&guest.pages(from, to + COUNTED), from, to);
    let pages: f64 = writing.iter().map(pages).sum();
    let seconds = (to - from).as_secs_f64();
    Ok(Measured {
        scan_cpu,
        agent_share: agent_s / (seconds * cpus as f64),
        written_per_s: pages * lab_guest::PAGE_BYTES as f64 / seconds,
    })
}

fn check(guest: &Guest) -> Result<()> {
    let checked = guest.check()?;
    if checked.wrong == 0 && checked.pages > 0 {
        return Ok(());
    }
    let reason = format!("{}: {checked:?}", guest.spec.name);
    Err(LabError::Migration { contender: NAME.to_owned(), reason })
}

/// The figures of one of [`SHARES`].
fn of(measured: &[Measured], share: &str, figure: impl Fn(&Measured) -> f64) -> Vec<f64> {
    measured.iter().filter(|one| one.scan_cpu == share).map(figure).collect()
}

fn judge(measured: &[Measured]) -> Vec<Goal> {
    let medians =
        |figure: fn(&Measured) -> f64| SHARES.map(|share| median(of(measured, share, figure)));
    let [agent_without, agent_with] = medians(|one| one.agent_share);
    let [written_without, written_with] = medians(|one| one.written_per_s);
    let goal = |what: &str, cost: f64| Goal {
        goal: format!("the scan takes at most {:.0} % of {what}", COST_MAX * 100.0),
        reached: cost.is_finite().then_some(cost <= COST_MAX),
        detail: if cost.is_finite() { format!("{:.2} %", cost * 100.0) } else { String::new() },
    };
    vec![
        goal("all CPUs", agent_with - agent_without),
        goal("the guests' work", 1.0 - written_with / written_without),
    ]
}

/// Medians, with the lowest and the highest figure.
fn markdown(measured: &[Measured]) -> String {
    let mut text = "| `--scan-cpu` | agent, % of all CPUs | guests write MB/s |\n\
                    | --- | --- | --- |\n"
        .to_owned();
    for share in SHARES {
        let cell = |figure: fn(&Measured) -> f64, scale: f64, digits: usize| {
            let all = of(measured, share, figure);
            let least = all.iter().copied().fold(f64::INFINITY, f64::min) * scale;
            let most = all.iter().copied().fold(0.0, f64::max) * scale;
            format!("{:.digits$} ({least:.digits$} to {most:.digits$})", median(all) * scale)
        };
        let agent = cell(|one| one.agent_share, 100.0, 2);
        let written = cell(|one| one.written_per_s, 1e-6, 1);
        text += &format!("| {share} | {agent} | {written} |\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scan_is_judged_by_what_it_adds() {
        let one = |scan_cpu, agent_share, written_per_s| Measured {
            scan_cpu,
            agent_share,
            written_per_s,
        };
        let measured = [
            one(SHARES[0], 0.001, 100e6),
            one(SHARES[1], 0.021, 99.5e6),
            one(SHARES[1], 0.031, 99.5e6),
            one(SHARES[0], 0.001, 100e6),
        ];
        let goals = judge(&measured);
        let reached: Vec<_> = goals.iter().map(|goal| goal.reached).collect();
        assert_eq!(reached, [Some(false), Some(true)]);
        assert_eq!(goals[0].detail, "2.50 %");
        let text = markdown(&measured);
        assert!(
            text.ends_with("| default | 2.60 (2.10 to 3.10) | 99.5 (99.5 to 99.5) |\n"),
            "{text}"
        );
        assert_eq!(judge(&[])[1].reached, None);
    }
}
