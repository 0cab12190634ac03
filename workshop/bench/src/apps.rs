//! Contests of a guest that runs programs as people have them, over four NICs, after PMigrate's
//! main tables. All runs go on from one snapshot of a Debian; a contest uses one of its programs.

mod check;
mod figures;
mod load;
mod one;
pub mod progress;

use std::time::Duration;

use serde_json::json;

pub use figures::AppFigures;

use super::goals::{Goal, shown};
use super::result::{Contender as Runs, Outcome, Run};
use super::rounds::{Contest, Rounds};
use super::table;
use crate::contender::{Contender, Droveway, Mode, Options, Qemu};
use lab::error::Result;
use lab::field::{Machine, Snapshot};
use lab::hosts::{Hosts, Link};
use lab::setup::{self, Kit};

const OURS: &str = "droveway";
/// Time that Droveway may take of what QEMU's best takes.
const OF_BEST_MAX: f64 = 0.3;
const GOAL: Duration = Duration::from_millis(300);
/// When a contender gives up.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A program, and who uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum App {
    /// Four clients on a third host change and read values.
    Memcached,
    /// pgbench in the guest, with eight connections.
    Postgres,
    /// Two clients of DBench in the guest, on a disk that moves with it.
    Dbench,
}

/// A contest.
#[derive(Clone, Copy, Debug)]
pub struct AppScenario {
    /// Its name: `make bench-NAME`.
    pub name: &'static str,
    /// What it measures, for people.
    pub about: &'static str,
    app: App,
}

/// All contests.
#[must_use]
pub fn all() -> [AppScenario; 3] {
    [
        AppScenario {
            name: "apps-memcached",
            about: "a Debian of 768 MiB whose memcached clients change 96 MiB; four NICs of 250 \
                    Mbit/s",
            app: App::Memcached,
        },
        AppScenario {
            name: "apps-postgres",
            about: "the same with PostgreSQL under pgbench",
            app: App::Postgres,
        },
        AppScenario {
            name: "apps-dbench",
            about: "the same with DBench on a disk of 512 MiB that moves with it",
            app: App::Dbench,
        },
    ]
}

impl App {
    fn moves_disk(self) -> bool {
        self == Self::Dbench
    }

    fn modes(self) -> [Mode; 4] {
        if self.moves_disk() {
            [Mode::MirrorPrecopy, Mode::Mirror, Mode::MirrorZstd, Mode::MirrorAutoConverge]
        } else {
            [Mode::Precopy, Mode::Multifd, Mode::Zstd, Mode::AutoConverge]
        }
    }

    fn ours(self) -> Options {
        let arguments: &[&str] =
            if self.moves_disk() { &["--disks", "data", "--create-disks"] } else { &[] };
        let arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        Options { arguments, ..Options::default() }
    }
}

/// Runs a scenario, prints the course, and writes the results so far after each run. `only` names
/// the contenders that take part; if it is empty, all do.
///
/// # Errors
/// If the lab itself fails; a failed contender is a result.
pub fn run(kit: &Kit, scenario: AppScenario, runs: u32, only: &[String]) -> Result<Outcome> {
    println!("{}: {}", scenario.name, scenario.about);
    let snapshot = Snapshot::of(kit, setup::apps_image()?, Machine::Apps, kit.own_qemu())?;
    let mut outcome = empty(kit, scenario)?;
    let contest = AppContest { kit, scenario, snapshot: &snapshot };
    let rounds = Rounds { label: scenario.name, runs, only };
    rounds.run(&contest, &mut outcome)?;
    println!("\n{}", table::markdown(&outcome));
    rounds.conclude(&outcome)?;
    Ok(outcome)
}

fn link() -> Link {
    Link { nics: 4, mbit_per_s: Some(250) }
}

fn empty(kit: &Kit, scenario: AppScenario) -> Result<Outcome> {
    let link = link();
    let control = Hosts::new(link)?.a.congestion_control.clone();
    Ok(Outcome {
        scenario: scenario.name.to_owned(),
        guest: json!({ "about": scenario.about }),
        links: json!({
            "nics": link.nics,
            "mbit_per_s_each": link.mbit_per_s,
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
        let app = self.scenario.app;
        let qemu = app.modes().map(|mode| Box::new(Qemu::new(mode)) as Box<dyn Contender>);
        let ours = Box::new(Droveway::new(app.ours())) as Box<dyn Contender>;
        qemu.into_iter().chain([ours]).collect()
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
        goals(outcome)
    }
}

/// Judges Droveway by the one of QEMU's migrations that took the least time.
fn goals(outcome: &Outcome) -> Vec<Goal> {
    let total = |runs: &Runs| runs.median.get("total_s").copied();
    let theirs = outcome.contenders.iter().filter(|(name, _)| name.starts_with("qemu-"));
    let finished = theirs.filter_map(|(_, runs)| Some((total(runs)?, runs)));
    let best = finished.min_by(|one, other| one.0.total_cmp(&other.0)).map(|(_, runs)| runs);
    let figures = |figure: &str| {
        let of = |runs: &Runs| runs.median.get(figure).copied();
        outcome.contenders.get(OURS).and_then(of).zip(best.and_then(of))
    };
    let time = figures("total_s").map(|(ours, best)| ours / best);
    let lost = figures("app_lost_s");
    vec![
        Goal {
            goal: format!("total at most {OF_BEST_MAX} of QEMU's best"),
            reached: time.map(|ratio| ratio <= OF_BEST_MAX),
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
        outcome.conclude(&[OURS]);
        let goals = goals(&outcome);
        assert_eq!(goals[0].reached, Some(true));
        assert_eq!((goals[1].reached, goals[1].detail.as_str()), (Some(false), "2.50 s, and 2 s"));
    }

    #[test]
    fn the_disk_is_the_one_that_qemu_copies() {
        assert_eq!(crate::image::NODE, lab::field::APPS_NODE);
    }

    #[test]
    fn each_contender_has_a_name_of_its_own() {
        for scenario in all() {
            let app = scenario.app;
            let mut names: Vec<_> = app.modes().map(|mode| Qemu::new(mode).name()).into();
            names.push(Droveway::new(app.ours()).name());
            names.sort();
            names.dedup();
            assert_eq!(names.len(), 5, "{names:?}");
        }
    }
}
