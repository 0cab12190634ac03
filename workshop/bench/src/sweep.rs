//! Runs a sweep: the contenders take turns at each of its points.

use std::time::Instant;

use serde::Serialize;

use super::contest::{add, empty, path, save_at, told, turn, whole};
use super::goals::{self, Goal};
pub use super::point::PointOutcome;
use super::result::Outcome;
use super::table;
use super::writers::{Point, Sweep};
use lab::error::Result;
use lab::setup::Kit;

/// Outcome of a sweep.
#[derive(Clone, Debug, Serialize)]
pub struct SweepOutcome {
    /// Name of the sweep.
    pub scenario: String,
    /// Goals, and whether they were reached.
    pub goals: Vec<Goal>,
    /// Outcomes by point.
    pub points: Vec<PointOutcome>,
}

/// Runs a sweep, prints the course, and writes the results so far after each run. `only` names the
/// contenders that take part, and `at` the points; if empty, all do.
///
/// Each round visits all points. A contender that ran out of time at a point does not run there
/// again. After [`Sweep::enough`] no new round begins, and one that has started ends after the
/// current point.
///
/// # Errors
/// If the lab itself fails; a failed contender is a result.
pub fn run(
    kit: &Kit,
    sweep: &Sweep,
    runs: u32,
    only: &[String],
    at: &[String],
) -> Result<SweepOutcome> {
    println!("{}: {}", sweep.name, sweep.about);
    let began = Instant::now();
    let wanted =
        |name: &str, among: &[String]| among.is_empty() || among.iter().any(|it| it == name);
    let points: Vec<&Point> =
        sweep.points.iter().filter(|point| wanted(&point.name(), at)).collect();
    let mut outcome = SweepOutcome {
        scenario: sweep.name.to_owned(),
        goals: Vec::new(),
        points: points.iter().map(|point| unvisited(kit, point)).collect::<Result<_>>()?,
    };
    let part = path(&format!("{}-part", sweep.name));
    for nth in 1..=runs {
        for (index, point) in points.iter().enumerate() {
            if nth > 1 && began.elapsed() > sweep.enough {
                println!("  no more rounds: that was {:.0} min", sweep.enough.as_secs_f64() / 60.0);
                return end(sweep, outcome, only.is_empty() && at.is_empty());
            }
            for mut contender in point.scenario.contenders() {
                let (name, place) = (contender.name(), &mut outcome.points[index].outcome);
                if !wanted(&name, only) || ran_out(place, &name) {
                    continue;
                }
                let label = format!("{}-{}", sweep.name, point.name());
                let run = turn(kit, &point.scenario, &label, &mut *contender);
                println!("  {nth}/{runs} {:8} {name:18} {}", point.name(), told(&run));
                add(place, name, run);
                outcome.goals = goals::of(&outcome.points);
                save_at(&part, &outcome)?;
            }
        }
    }
    end(sweep, outcome, only.is_empty() && at.is_empty())
}

fn unvisited(kit: &Kit, point: &Point) -> Result<PointOutcome> {
    Ok(PointOutcome {
        link_mbit_per_s: point.link_mbit_per_s,
        dirty_of_link: point.dirty_of_link,
        outcome: empty(kit, &point.scenario)?,
    })
}

fn ran_out(place: &Outcome, name: &str) -> bool {
    let runs = place.contenders.get(name).map(|contender| contender.runs.as_slice());
    runs.unwrap_or_default().iter().any(|run| run.unfinished_s.is_some())
}

fn end(sweep: &Sweep, outcome: SweepOutcome, is_whole: bool) -> Result<SweepOutcome> {
    println!("\n{}", table::sweep(&outcome.points));
    for goal in &outcome.goals {
        println!("{goal}");
    }
    let part = format!("{}-part", sweep.name);
    let path = if is_whole { whole(sweep.name)? } else { path(&part) };
    save_at(&path, &outcome)?;
    println!("\n{}", path.display());
    Ok(outcome)
}
