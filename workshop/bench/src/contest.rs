//! Runs a scenario: contenders take turns, so that other load on the machine affects all of them
//! alike.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::beside::Beside;
use super::cpu::{self, CpuMeter};
use super::relay::RELAY;
use super::result::{Outcome, Run};
use super::scenario::{FOOTPRINT, Scenario};
use super::served::{Served, Serving};
use super::slowed::{Slowed, Undisturbed};
use super::{goals, plain_tcp, stolen, table, warm};
use crate::contender::{Contender, Ground};
use crate::image::Image;
use lab::error::{FileContext, LabError, Result};
use lab::guest::Guest;
use lab::hosts::{Hosts, Outside};
use lab::setup::{self, Accelerator, Kit, repository};

/// Memory to warm for the arriving guest of the largest scenario and for buffers of the transfer.
const WARM_BYTES: u64 = 2 << 30;
/// Time for a booted guest to settle before it moves.
const SETTLE: Duration = Duration::from_secs(1);
/// Longest time until a moved guest reports again.
const HEARD_MAX: Duration = Duration::from_secs(20);
/// Runs a scenario, prints the course, and writes the results so far after each run. `only` names
/// the contenders that take part; if it is empty, all do.
///
/// # Errors
/// If the lab itself fails; a failed contender is a result.
pub fn run(kit: &Kit, scenario: &Scenario, runs: u32, only: &[String]) -> Result<Outcome> {
    println!("{}: {}", scenario.name, scenario.about);
    if scenario.guest.accelerator == Some(Accelerator::Kvm) && !setup::kvm_runs_bare(kit)? {
        let error = std::io::Error::other("there is none that runs one on this machine");
        return Err(LabError::System { action: "run a guest with KVM", error });
    }
    let mut outcome = empty(kit, scenario)?;
    let part = format!("{}-part", scenario.name);
    let mut body_bytes = scenario.guest.orders.random_bytes;
    for nth in 1..=runs {
        for mut contender in scenario.contenders() {
            let name = contender.name();
            if !only.is_empty() && !only.contains(&name) {
                continue;
            }
            let run = turn(kit, scenario, scenario.name, &mut *contender);
            println!("  {nth}/{runs} {name:18} {}", told(&run));
            add(&mut outcome, name, run);
            save(&part, &outcome)?;
            body_bytes = contender.report().map_or(body_bytes, |report| report.body_bytes);
        }
        if scenario.plain_tcp {
            let run = plain_tcp::run(scenario, body_bytes)?;
            println!("  {nth}/{runs} {:18} {}", "tcp", told(&run));
            add(&mut outcome, "tcp".to_owned(), run);
        }
    }
    println!("\n{}", table::markdown(&outcome));
    stolen::warn(&outcome);
    if scenario.served {
        println!("{}\n", goals::served(&outcome));
    }
    outcome.goals = goals::of_contest(&outcome);
    for goal in &outcome.goals {
        println!("{goal}");
    }
    // A partial run must not replace the results of a whole one.
    let path = if only.is_empty() { whole(scenario.name)? } else { path(&part) };
    save_at(&path, &outcome)?;
    println!("{}", path.display());
    Ok(outcome)
}

/// An outcome without runs.
pub(super) fn empty(kit: &Kit, scenario: &Scenario) -> Result<Outcome> {
    Ok(Outcome {
        scenario: scenario.name.to_owned(),
        guest: scenario.guest_json(),
        links: scenario.links_json(&Hosts::new(scenario.link)?.a.congestion_control),
        qemu: kit.qemu_version.to_string(),
        accel: kit.accelerator.to_string(),
        ..Outcome::default()
    })
}

/// Adds a run, and summarizes all runs so far.
pub(super) fn add(outcome: &mut Outcome, name: String, run: Run) {
    outcome.contenders.entry(name).or_default().runs.push(run);
    let names: Vec<String> = outcome.contenders.keys().cloned().collect();
    let is_compared = |name: &&str| name.starts_with("droveway") || *name == RELAY;
    let against = names.iter().map(String::as_str).filter(is_compared);
    outcome.conclude(&against.collect::<Vec<_>>());
}

/// One contender's run; an error becomes a failed run. Reports are saved under `label`.
pub(super) fn turn(
    kit: &Kit,
    scenario: &Scenario,
    label: &str,
    contender: &mut dyn Contender,
) -> Run {
    one(kit, scenario, label, contender).unwrap_or_else(|error| failed(&error))
}

/// The run of a contender that failed.
pub(super) fn failed(error: &LabError) -> Run {
    let unfinished_s = match error {
        LabError::Late { waited, .. } => Some(waited.as_secs_f64()),
        _ => None,
    };
    Run { unfinished_s, error: Some(error.to_string()), ..Run::default() }
}

pub(super) fn told(run: &Run) -> String {
    match &run.error {
        Some(error) => format!("failed: {error}"),
        None => format!(
            "{:6.2} s, blackout {:4.0} ms (seen {:4.0}), {:7.1} MB, CPU {:5.2} s, work {:.2}{}{}{}, {}",
            run.total_s,
            run.downtime_ms,
            run.guest_gap_ms,
            run.wire_bytes as f64 / 1e6,
            run.cpu_s,
            run.guest_work,
            run.disk_work.map_or_else(String::new, |work| format!(" (disk {work:.2})")),
            slowed_told(run),
            stolen::told(run),
            match (run.intact, run.disk_intact) {
                (true, None | Some(true)) => "intact",
                (true, Some(false)) => "DISK WRONG",
                (false, _) => "MEMORY WRONG",
            },
        ),
    }
}

fn slowed_told(run: &Run) -> String {
    if let Some(served) = &run.served {
        return format!(
            ", requests/s {:.0}, {:.0}, {:.0}, silence {:.0} ms, {:.0} ms, {:.0} ms, lost {:.0}",
            served.before_per_s,
            served.during_per_s,
            served.after_per_s,
            served.silence_before_ms,
            served.silence_ms,
            served.silence_after_ms,
            served.lost,
        );
    }
    let (Some(stall_ms), Some(lost_s)) = (run.stall_ms, run.lost_s) else { return String::new() };
    let share = run.share_lowest.map_or_else(String::new, |share| format!(", share {share:.2}"));
    let writes = run.undisturbed_bytes_per_s.unwrap_or(0.0) / 1e6;
    format!(" of {writes:.1} MB/s, stall {stall_ms:.0} ms, lost {lost_s:.2} s{share}")
}

/// Path of results.
pub(super) fn path(name: &str) -> PathBuf {
    repository().join("target/bench").join(format!("{name}.json"))
}

/// Path of complete results; removes the partial ones.
pub(super) fn whole(name: &str) -> Result<PathBuf> {
    let part = path(&format!("{name}-part"));
    match fs::remove_file(&part) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).at("remove", &part)
        }
        _ => Ok(path(name)),
    }
}

pub(super) fn save(name: &str, what: &impl serde::Serialize) -> Result<()> {
    save_at(&path(name), what)
}

pub(super) fn save_at(path: &Path, what: &impl serde::Serialize) -> Result<()> {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).at("make", dir)?;
    }
    let json = serde_json::to_string_pretty(what)
        .map_err(|error| LabError::Text { what: "the results", text: error.to_string() })?;
    // In two steps, so that an interrupted lab keeps the previous results.
    let new = path.with_extension("json.new");
    fs::write(&new, json + "\n").at("write", &new)?;
    fs::rename(&new, path).at("write", path)
}

/// One contender, one new guest, one move.
fn one(kit: &Kit, scenario: &Scenario, label: &str, contender: &mut dyn Contender) -> Result<Run> {
    let hosts = Hosts::new(scenario.link)?;
    let timeout = scenario.timeout_of(&contender.name());
    let (disk, downtime_goal) = (scenario.disk, scenario.goal);
    let ground = Ground { kit, hosts: &hosts, disk, downtime_goal, timeout, from: None };
    let mut spec = scenario.guest.clone();
    if let Some(image) = &scenario.disk {
        image.make(&hosts.a)?;
        spec.extra.extend(Image::arguments(&hosts.a));
    }
    let outside = scenario.served.then(|| Outside::join(&hosts)).transpose()?;
    if outside.is_some() {
        spec.initrd = Some(setup::server_initrd(kit)?);
        spec.extra.extend(Outside::arguments());
    }
    let guest = contender.start(&ground, &spec)?;
    std::thread::sleep(SETTLE);
    guest.expect_on(&hosts.b)?;
    // The work of a server is measured by its clients.
    let slowing = scenario.slowing.filter(|_| !scenario.served);
    let undisturbed = slowing.map(|_| Undisturbed::watch(&guest)).transpose()?;
    warm::memory(WARM_BYTES);
    let beside = scenario.neighbour.map(|neighbour| Beside::start(neighbour, kit, &hosts));
    let beside = beside.transpose()?;
    let serving = outside.as_ref().map(Serving::start).transpose()?;
    let but = beside.as_ref().map_or_else(Vec::new, Beside::pids);
    let cpu = CpuMeter::start(&[&hosts.a, &hosts.b], but, cpu::OFTEN)?;
    let traffic = hosts.traffic()?;
    let slowed = undisturbed.map(|undisturbed| Slowed::begin(undisturbed, &guest)).transpose()?;
    guest.forget_gap();
    let moved = contender.migrate(&ground);
    if let Some(report) = contender.report() {
        save(&format!("{label}-{}-report", contender.name()), report)?;
    }
    let moved = moved?;
    guest.wait_beat(HEARD_MAX)?;
    let felt = guest.felt(moved.began, moved.ran);
    let orders = &scenario.guest.orders;
    let disk_work = work(orders.disk_rate, felt.disk_pages_per_s);
    let spent = cpu.since(moved.began);
    let run = Run {
        ok: true,
        intact: false,
        total_s: (moved.ran - moved.began).as_secs_f64(),
        prepare_s: moved.prepare.as_secs_f64(),
        downtime_ms: moved.downtime.as_secs_f64() * 1e3,
        guest_gap_ms: felt.gap.as_secs_f64() * 1e3,
        wire_bytes: (hosts.traffic()? - traffic).bytes,
        cpu_s: spent.processes_s,
        stolen_s: spent.stolen_s,
        guest_work: work(orders.rate, felt.pages_per_s),
        disk_work: scenario.disk.map(|_| disk_work),
        agents_peak_bytes: contender.agents_peak_bytes().filter(|_| scenario.name == FOOTPRINT),
        ..Run::default()
    };
    let run = match beside {
        Some(beside) => beside.judge(run, &hosts, &moved)?,
        None => run,
    };
    let run = match slowed {
        Some(slowed) => slowed.judge(run, &guest, &moved, contender),
        None => run,
    };
    let served = serving.map(|serving| {
        let requests_s = scenario.requests().and_then(|requests| serving.task_s(requests));
        Served { requests_s, ..serving.judge(&moved) }
    });
    let checked = guest.check()?;
    if checked.wrong > 0
        && let Some(report) = contender.report()
    {
        eprintln!("lab: the audit of its migration: {:?}", report.audit);
    }
    let right = served.as_ref().is_none_or(|served| served.wrong == 0);
    let intact = checked.wrong == 0 && checked.pages > 0 && right;
    let run = Run { passes: moved.passes.filter(|_| scenario.slowing.is_some()), served, ..run };
    let run = match &scenario.disk {
        Some(image) => check_disk(run, image, &guest, &hosts)?,
        None => run,
    };
    contender.stop();
    Ok(Run { intact, ..run })
}

/// The guest checks its part of the disk, and the lab the rest.
fn check_disk(run: Run, image: &Image, guest: &Guest, hosts: &Hosts) -> Result<Run> {
    let checked = guest.check_disk()?;
    let guests =
        checked.wrong == 0 && checked.pages * lab_guest::PAGE_BYTES as u64 == image.guest_bytes;
    Ok(Run {
        disk_intact: Some(guests && image.is_intact(&hosts.b)?),
        disk_allocated_bytes: Some(Image::allocated_bytes(&hosts.b)?),
        ..run
    })
}

/// The share of its full rate that the guest kept while it moved.
pub(super) fn work(rate: u64, pages_per_s: f64) -> f64 {
    if rate == 0 { 1.0 } else { pages_per_s * lab_guest::PAGE_BYTES as f64 / rate as f64 }
}
