//! Runs a contest of gangs: contenders in turn, each with new racks and new VMs.

pub mod conditions;
pub mod figures;
mod goals;
pub mod load;
mod one;
mod pair;
pub mod scenarios;

use super::contest::{add, path, save, save_at, told, whole};
use super::result::{Outcome, Run};
use super::{paired, table};
use conditions::Conditions;
use lab::error::{LabError, Result};
use lab::hosts::Racks;
use lab::setup::Kit;
use scenarios::GangScenario;

/// Runs a scenario under these conditions, prints what happens, and writes the results,
/// after each run those that there are. `only` names the contenders that take
/// part; none named means all.
///
/// # Errors
/// If the lab itself fails; a contender that fails is a result.
pub fn run(
    kit: &Kit,
    scenario: GangScenario,
    conditions: &Conditions,
    runs: u32,
    only: &[String],
) -> Result<Outcome> {
    conditions.check()?;
    let scenario = &scenario.under(conditions);
    let label = conditions.label(scenario.name);
    println!("{label}: {}; {conditions}", scenario.about);
    let part = format!("{label}-part");
    let mut outcome = empty(kit, scenario, conditions)?;
    for nth in 1..=runs {
        let mut contenders = scenario.contenders();
        if nth.is_multiple_of(2) {
            // What the first of a round finds the last finds in the next.
            contenders.reverse();
        }
        contenders.retain(|one| only.is_empty() || only.contains(&one.name()));
        for mut contender in contenders {
            let name = contender.name();
            let run = match one::run(kit, scenario, conditions, &label, &mut *contender) {
                Ok(run) => run,
                Err(error) => failed(&error),
            };
            println!("  {nth}/{runs} {name:18} {}{}", told(&run), counted(&run));
            add(&mut outcome, name, run);
            outcome.goals = goals::of(&outcome, conditions);
            save(&part, &outcome)?;
        }
    }
    println!("\n`{label}`, {conditions}:\n\n{}", table::markdown(&outcome));
    println!("{}", paired::markdown(&outcome));
    for goal in &outcome.goals {
        println!("{goal}");
    }
    // A partial run must not stand in for a whole one.
    let path = if only.is_empty() { whole(&label)? } else { path(&part) };
    save_at(&path, &outcome)?;
    println!("\n{}", path.display());
    Ok(outcome)
}

fn empty(kit: &Kit, scenario: &GangScenario, conditions: &Conditions) -> Result<Outcome> {
    let racks = Racks::new(scenario.layout)?;
    let control = racks.targets().first().map(|host| host.host.congestion_control.clone());
    Ok(Outcome {
        scenario: scenario.name.to_owned(),
        guest: scenario.guest_json(conditions),
        links: scenario.links_json(conditions, &control.unwrap_or_default()),
        qemu: kit.qemu_version.to_string(),
        accel: kit.accelerator.to_string(),
        ..Outcome::default()
    })
}

fn failed(error: &LabError) -> Run {
    let unfinished_s = match error {
        LabError::Late { waited, .. } => Some(waited.as_secs_f64()),
        _ => None,
    };
    Run { unfinished_s, error: Some(error.to_string()), ..Run::default() }
}

fn counted(run: &Run) -> String {
    let Some(gang) = &run.gang else { return String::new() };
    let core = gang.core_bytes as f64 / 1e6;
    let load = gang.load.as_ref().map_or_else(String::new, |load| {
        format!(", load lost {:.2} % (before {:.2} %)", load.lost * 100.0, load.lost_before * 100.0)
    });
    let pair = gang.pair.as_ref().map_or_else(String::new, |pair| {
        let (before, meanwhile) = (pair.before_per_s, pair.meanwhile_per_s);
        format!(", answers/s {before:.0}, {meanwhile:.0}, {} wrong", pair.wrong)
    });
    format!(", core {core:.1} MB{load}{pair}")
}
