//! Runs a contest of gangs: contenders take turns, each with new racks and new VMs.

mod against;
pub mod conditions;
pub mod figures;
mod goals;
pub mod load;
mod one;
mod pair;
mod record;
pub mod scenarios;

use super::goals::Goal;
use super::result::{Outcome, Run};
use super::rounds::{Contest, Rounds};
use super::table;
use crate::contender::gang::GangContender;
pub use against::compare;
use conditions::Conditions;
use lab::error::Result;
use lab::hosts::Racks;
use lab::setup::Kit;
pub use record::record;
use scenarios::GangScenario;

/// Runs a scenario under these conditions, prints the course, and writes the results so far after
/// each run. `only` names the contenders that take part; if it is empty, all do.
///
/// # Errors
/// If the lab itself fails; a failed contender is a result.
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
    let mut outcome = empty(kit, scenario, conditions)?;
    let contest = GangContest { kit, scenario, conditions, label: &label };
    let rounds = Rounds { label: &label, runs, only };
    rounds.run(&contest, &mut outcome)?;
    println!("\n`{label}`, {conditions}:\n\n{}", table::markdown(&outcome));
    rounds.conclude(&outcome)?;
    Ok(outcome)
}

struct GangContest<'a> {
    kit: &'a Kit,
    scenario: &'a GangScenario,
    conditions: &'a Conditions,
    label: &'a str,
}

impl Contest for GangContest<'_> {
    type Contender = Box<dyn GangContender>;

    fn contenders(&self) -> Vec<Self::Contender> {
        self.scenario.contenders()
    }

    fn name(&self, contender: &Self::Contender) -> String {
        contender.name()
    }

    fn run(&self, contender: &mut Self::Contender) -> Result<Run> {
        one::run(self.kit, self.scenario, self.conditions, self.label, &mut **contender)
    }

    fn told(&self, run: &Run) -> String {
        counted(run)
    }

    fn goals(&self, outcome: &Outcome) -> Vec<Goal> {
        goals::of(outcome, self.conditions)
    }
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
