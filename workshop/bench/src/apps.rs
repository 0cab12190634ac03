//! Contests of a guest that runs programs as people have them: over four NICs, after PMigrate's
//! main tables, and with disks on a storage host, after the page cache paper. All runs go on from
//! one snapshot of a Debian; a contest uses one of its programs.

mod app;
mod check;
mod figures;
mod load;
mod one;
pub mod progress;
pub mod web;

use std::time::Duration;

use serde_json::json;

use app::STORAGE_MBIT;
pub use app::{App, AppScenario, all};
pub use figures::AppFigures;

use super::goals::{Goal, shown};
use super::result::{Contender as Runs, Outcome, Run};
use super::rounds::{Contest, Rounds};
use super::table;
use crate::contender::Contender;
use lab::error::Result;
use lab::field::{Machine, Snapshot};
use lab::hosts::Hosts;
use lab::setup::{self, Kit};

const OURS: &str = "droveway";
/// The contender that is judged where disks are on a storage host.
const ADAPTIVE: &str = "droveway-adaptive";
/// Time that Droveway may take of what QEMU's best takes, over four NICs and from storage.
const OF_BEST_MAX: [f64; 2] = [0.3, 0.5];
const GOAL: Duration = Duration::from_millis(300);
/// When a contender gives up.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs a scenario, prints the course, and writes the results so far after each run. `only` names
/// the contenders that take part; if it is empty, all do.
///
/// # Errors
/// If the lab itself fails; a failed contender is a result.
pub fn run(kit: &Kit, scenario: AppScenario, runs: u32, only: &[String]) -> Result<Outcome> {
    println!("{}: {}", scenario.name, scenario.about);
    let snapshot = make(kit)?;
    let mut outcome = empty(kit, scenario)?;
    let contest = AppContest { kit, scenario, snapshot: &snapshot };
    let rounds = Rounds { label: scenario.name, runs, only };
    rounds.run(&contest, &mut outcome)?;
    println!("\n{}", table::markdown(&outcome));
    rounds.conclude(&outcome)?;
    Ok(outcome)
}

/// Finds or makes the guest, which takes minutes.
///
/// # Errors
/// If it can't be made; that needs root.
pub fn make(kit: &Kit) -> Result<Snapshot> {
    Snapshot::of(kit, setup::apps_image()?, Machine::Apps, kit.own_qemu())
}

fn empty(kit: &Kit, scenario: AppScenario) -> Result<Outcome> {
    let link = scenario.link();
    let control = Hosts::new(link)?.a.congestion_control.clone();
    Ok(Outcome {
        scenario: scenario.name.to_owned(),
        guest: json!({ "about": scenario.about }),
        links: json!({
            "nics": link.nics,
            "mbit_per_s_each": link.mbit_per_s,
            "storage_mbit_per_s": scenario.from_storage.then_some(STORAGE_MBIT),
            "congestion_control": control,
            "downtime_goal_ms": u64::try_from(GOAL.as_millis()).unwrap_or(u64::MAX),
        }),
        qemu: kit.qemu_version.to_string(),
        accel: kit.accelerator.to_string(),
        ..Outcome::default()
    })
}

struct AppContest<'a> {
    kit: &'a Kit,
    scenario: AppScenario,
    snapshot: &'a Snapshot,
}

impl Contest for AppContest<'_> {
    type Contender = Box<dyn Contender>;

    fn contenders(&self) -> Vec<Self::Contender> {
        self.scenario.contenders()
    }

    fn name(&self, contender: &Self::Contender) -> String {
        contender.name()
    }

    fn run(&self, contender: &mut Self::Contender) -> Result<Run> {
        one::run(self, &mut **contender)
    }

    fn told(&self, run: &Run) -> String {
        let Some(app) = &run.app else { return String::new() };
        format!(
            ", {:.0} a second before, {:.0} meanwhile, lost {:.2} s of work",
            app.before_per_s, app.meanwhile_per_s, app.lost_s
        )
    }

    fn goals(&self, outcome: &Outcome) -> Vec<Goal> {
        goals(outcome, self.scenario.from_storage)
    }
}

/// Judges Droveway by the one of QEMU's migrations that took the least time.
fn goals(outcome: &Outcome, from_storage: bool) -> Vec<Goal> {
    let judged = if from_storage { ADAPTIVE } else { OURS };
    let of_best_max = OF_BEST_MAX[usize::from(from_storage)];
    let total = |runs: &Runs| runs.median.get("total_s").copied();
    let theirs = outcome.contenders.iter().filter(|(name, _)| name.starts_with("qemu-"));
    let finished = theirs.filter_map(|(_, runs)| Some((total(runs)?, runs)));
    let best = finished.min_by(|one, other| one.0.total_cmp(&other.0)).map(|(_, runs)| runs);
    let figures = |figure: &str| {
        let of = |runs: &Runs| runs.median.get(figure).copied();
        outcome.contenders.get(judged).and_then(of).zip(best.and_then(of))
    };
    let time = figures("total_s").map(|(ours, best)| ours / best);
    let lost = figures("app_lost_s");
    vec![
        Goal {
            goal: format!("total at most {of_best_max} of QEMU's best"),
            reached: time.map(|ratio| ratio <= of_best_max),
            detail: time.map_or_else(String::new, shown),
        },
        Goal {
            goal: "the program loses no more work than with QEMU's best".to_owned(),
            reached: lost.map(|(ours, best)| ours <= best),
            detail: lost.map_or_else(String::new, |(ours, best)| {
                format!("{} s, and {} s", shown(ours), shown(best))
            }),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_of_qemus_migrations_is_what_droveway_is_judged_by() {
        let mut outcome = Outcome::default();
        let mut add = |name: &str, ok, total_s, lost_s| {
            let app = Some(AppFigures { lost_s, ..AppFigures::default() });
            let run = Run { ok, total_s, app, ..Run::default() };
            outcome.contenders.entry(name.to_owned()).or_default().runs.push(run);
        };
        add("qemu-precopy", false, 1.0, 0.0);
        add("qemu-multifd", true, 20.0, 5.0);
        add("qemu-zstd", true, 10.0, 2.0);
        add(OURS, true, 2.5, 2.5);
        add(ADAPTIVE, true, 6.0, 1.0);
        outcome.conclude(&[OURS]);
        let network = goals(&outcome, false);
        assert_eq!(network[0].reached, Some(true));
        let lost = (network[1].reached, network[1].detail.as_str());
        assert_eq!(lost, (Some(false), "2.50 s, and 2 s"));
        let storage: Vec<_> = goals(&outcome, true).iter().map(|goal| goal.reached).collect();
        assert_eq!(storage, [Some(false), Some(true)]);
    }

    #[test]
    fn the_disk_is_the_one_that_qemu_copies() {
        assert_eq!(crate::image::NODE, lab::field::APPS_NODE);
    }

    #[test]
    fn each_contender_has_a_name_of_its_own() {
        for scenario in all() {
            let mut names: Vec<_> = scenario.contenders().iter().map(|one| one.name()).collect();
            let judged = if scenario.from_storage { ADAPTIVE } else { OURS };
            assert!(names.contains(&judged.to_owned()), "{names:?}");
            names.sort();
            names.dedup();
            assert_eq!(names.len(), 5, "{names:?}");
        }
    }
}
