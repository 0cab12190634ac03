//! Goals of page cache from storage, and whether a contest reached them.

use super::scenarios::{LIMIT_MBIT, LIMITED, Links, MBIT, San};
use crate::goals::{Goal, shown};
use crate::result::{Outcome, Run};

const ADAPTIVE: &str = "droveway-adaptive";
const PRECOPY: &str = "qemu-precopy";
const DROPS: &str = "qemu-drop";
/// A total of the adaptive contender may be this many times that of the best share.
const NEAR: f64 = 1.05;
/// Longest time until a guest reads as before.
const BACK_S: f64 = 1.0;
/// What crosses the storage link may be this many times the limit of what is read: with headers,
/// requests, and what the guest itself reads.
const WITH_HEADERS: f64 = 1.15;

/// Goals for what was measured; the one against QEMU only where both links have the usual rate.
pub(super) fn of(outcome: &Outcome, links: Links) -> Vec<Goal> {
    let most = match outcome.scenario.as_str() {
        "cache-web" | "cache-postmark" => Some(0.55),
        "cache-db" => Some(0.75),
        _ => None,
    };
    let usual = links == Links { mbit: MBIT, san: San::Same };
    let mut goals = vec![intact(outcome), limited(outcome)];
    if let Some(most) = most {
        if usual {
            goals.push(against_qemu(outcome, most));
        }
        goals.push(against_shares(outcome));
    } else {
        goals.push(back(outcome));
        goals.extend([PRECOPY, DROPS].map(|name| lost(outcome, name)));
    }
    goals
}

fn intact(outcome: &Outcome) -> Goal {
    let runs = outcome.contenders.values().flat_map(|contender| &contender.runs);
    let runs: Vec<&Run> = runs.filter(|run| run.ok).collect();
    let wrong = runs.iter().filter(|run| !run.intact).count();
    Goal {
        goal: "every guest's memory and files are intact".to_owned(),
        reached: (!runs.is_empty()).then_some(wrong == 0),
        detail: format!("{} runs", runs.len()),
    }
}

/// The storage link of the contender with a limit carries no more than that allows.
fn limited(outcome: &Outcome) -> Goal {
    let figure = |name: &str| Some(*outcome.contenders.get(LIMITED)?.median.get(name)?);
    let both = figure("san_bytes").zip(figure("total_s"));
    let share = both.map(|(bytes, total_s)| bytes * 8.0 / total_s / (f64::from(LIMIT_MBIT) * 1e6));
    Goal {
        goal: format!("with a limit of {LIMIT_MBIT} Mbit/s storage is read no faster"),
        reached: share.map(|share| share <= WITH_HEADERS),
        detail: share.map_or_else(String::new, |share| format!("{share:.2} of it")),
    }
}

/// The lowest median total of the contenders whose names begin so, and its contender.
fn best<'o>(outcome: &'o Outcome, begins: &str) -> Option<(f64, &'o str)> {
    let named = outcome.contenders.iter().filter(|(name, _)| {
        // A guest without its page cache has less to move.
        name.starts_with(begins) && *name != DROPS
    });
    let totals = named.filter_map(|(name, one)| Some((*one.median.get("total_s")?, name.as_str())));
    totals.min_by(|one, other| one.0.total_cmp(&other.0))
}

/// Our total divided by the best of those.
fn ratio(outcome: &Outcome, begins: &str) -> Option<(f64, String)> {
    let ours = *outcome.contenders.get(ADAPTIVE)?.median.get("total_s")?;
    let (theirs, name) = best(outcome, begins)?;
    Some((ours / theirs, name.to_owned()))
}

fn against_qemu(outcome: &Outcome, most: f64) -> Goal {
    judge(format!("total at most {most} of QEMU's best"), ratio(outcome, "qemu-"), most)
}

fn against_shares(outcome: &Outcome) -> Goal {
    let goal = format!("total at most {NEAR} of the best share's");
    judge(goal, ratio(outcome, "droveway-r"), NEAR)
}

fn judge(goal: String, found: Option<(f64, String)>, most: f64) -> Goal {
    let reached = found.as_ref().map(|(ratio, _)| *ratio <= most);
    let detail = found.map_or_else(String::new, |(ratio, name)| format!("{ratio:.3} of {name}"));
    Goal { goal, reached, detail }
}

fn back(outcome: &Outcome) -> Goal {
    let runs = outcome.contenders.get(ADAPTIVE).map_or(&[][..], |one| &one.runs);
    let good = runs.iter().filter(|run| run.ok).filter_map(|run| run.cache.as_ref());
    // A guest that never reads as before misses the goal.
    let backs: Vec<f64> = good.map(|cache| cache.back_to_full_s.unwrap_or(f64::INFINITY)).collect();
    let worst = backs.into_iter().reduce(f64::max);
    Goal {
        goal: format!("reads as before within {BACK_S} s in every run"),
        reached: worst.map(|worst| worst <= BACK_S),
        detail: worst.map_or_else(String::new, |worst| format!("at most {worst:.2} s")),
    }
}

fn lost(outcome: &Outcome, theirs: &str) -> Goal {
    let of = |name: &str| Some(*outcome.contenders.get(name)?.median.get("pages_lost")?);
    let both = of(ADAPTIVE).zip(of(theirs));
    Goal {
        goal: format!("loses no more reads than {theirs}"),
        reached: both.map(|(ours, theirs)| ours <= theirs),
        detail: both.map_or_else(String::new, |(ours, theirs)| {
            format!("{} against {} pages", shown(ours.round()), shown(theirs.round()))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::figures::CacheFigures;

    const USUAL: Links = Links { mbit: MBIT, san: San::Same };

    fn outcome(scenario: &str, runs: &[(&str, f64, f64, Option<f64>)]) -> Outcome {
        let mut outcome = Outcome { scenario: scenario.to_owned(), ..Outcome::default() };
        for (name, total_s, pages_lost, back_to_full_s) in runs {
            let figures = CacheFigures {
                pages_lost: *pages_lost,
                back_to_full_s: *back_to_full_s,
                ..CacheFigures::default()
            };
            let cache = Some(figures);
            let run = Run { ok: true, intact: true, total_s: *total_s, cache, ..Run::default() };
            outcome.contenders.entry((*name).to_owned()).or_default().runs.push(run);
        }
        outcome.conclude(&[ADAPTIVE]);
        outcome
    }

    fn reached(goals: &[Goal]) -> Vec<Option<bool>> {
        goals.iter().map(|goal| goal.reached).collect()
    }

    #[test]
    fn totals_are_held_against_the_best_of_the_others() {
        let runs = [
            (PRECOPY, 8.0, 0.0, None),
            ("qemu-zstd", 7.0, 0.0, None),
            (DROPS, 1.0, 0.0, None),
            ("droveway-r40", 4.0, 0.0, None),
            ("droveway-r60", 3.8, 0.0, None),
            (ADAPTIVE, 3.9, 0.0, None),
        ];
        let goals = of(&outcome("cache-web", &runs), USUAL);
        assert_eq!(reached(&goals), [Some(true), None, Some(false), Some(true)]);
        assert!(goals[2].to_string().ends_with("NOT REACHED (0.557 of qemu-zstd)"), "{}", goals[2]);
        let quarter = Links { san: San::Quarter, ..USUAL };
        let goals = of(&outcome("cache-web", &runs), quarter);
        assert_eq!(reached(&goals), [Some(true), None, Some(true)]);
        assert_eq!(reached(&of(&outcome("cache-db", &runs), USUAL))[2], Some(true));
    }

    #[test]
    fn lost_reads_are_compared_with_both_qemu_contenders() {
        let runs = [
            (PRECOPY, 8.0, 500.0, Some(0.3)),
            (DROPS, 2.0, 9000.0, None),
            (ADAPTIVE, 4.0, 600.0, Some(0.4)),
        ];
        let goals = of(&outcome("cache-after", &runs), USUAL);
        assert_eq!(reached(&goals), [Some(true), None, Some(true), Some(false), Some(true)]);
        let never = [(ADAPTIVE, 4.0, 600.0, None)];
        let goals = of(&outcome("cache-after", &never), USUAL);
        assert_eq!(reached(&goals), [Some(true), None, Some(false), None, None]);
    }

    #[test]
    fn a_limit_is_judged_by_what_crossed_the_storage_link() {
        for (mb, expected) in [(55, Some(true)), (60, Some(false))] {
            let mut outcome = outcome("cache-web", &[(LIMITED, 4.0, 0.0, None)]);
            let runs = outcome.contenders.get_mut(LIMITED).map(|one| &mut one.runs);
            for run in runs.into_iter().flatten() {
                let san_bytes = mb * 1_000_000;
                run.cache = Some(CacheFigures { san_bytes, ..CacheFigures::default() });
            }
            outcome.conclude(&[LIMITED]);
            assert_eq!(limited(&outcome).reached, expected, "{mb} MB");
        }
    }
}
