//! Goals of gangs, and whether a contest reached them.

use super::conditions::{Conditions, VMS};
use crate::goals::Goal;
use crate::paired;
use crate::result::{Outcome, Run};

const OFF: &str = "droveway-off";
const RACK: &str = "droveway-rack";
const PRECOPY: &str = "qemu-precopy";

/// Goal, figure, our contender, the other contender, and the largest ratio of their figures.
type Bound = (&'static str, &'static str, &'static str, &'static str, f64);

/// Goals for what was measured; the bounds hold only for a whole gang.
pub(super) fn of(outcome: &Outcome, conditions: &Conditions) -> Vec<Goal> {
    let bounds: &[Bound] = match outcome.scenario.as_str() {
        "gang-idle" => &[
            ("core bytes at most 0.2 of precopy's", "core_bytes", RACK, PRECOPY, 0.2),
            ("total at most 0.4 of precopy's", "total_s", RACK, PRECOPY, 0.4),
            ("total at most 1.05 of that without sharing", "total_s", RACK, OFF, 1.05),
        ],
        "gang-busy" => &[("core bytes at most 0.4 of precopy's", "core_bytes", RACK, PRECOPY, 0.4)],
        "gang-apps" | "gang-compute" => &[
            ("core bytes at most 0.2 of precopy's", "core_bytes", RACK, PRECOPY, 0.2),
            ("downtime no longer than without sharing", "guest_gap_ms", RACK, OFF, 1.0),
        ],
        "gang-worst" => {
            &[("total at most 1.03 of that without sharing", "total_s", RACK, OFF, 1.03)]
        }
        _ => &[],
    };
    let whole = bounds.iter().filter(|_| conditions.vms == VMS);
    std::iter::once(intact(outcome)).chain(whole.map(|bound| judge(outcome, *bound))).collect()
}

fn intact(outcome: &Outcome) -> Goal {
    let runs = outcome.contenders.values().flat_map(|contender| &contender.runs);
    let runs: Vec<&Run> = runs.filter(|run| run.ok).collect();
    let wrong = runs.iter().filter(|run| !run.intact).count();
    Goal {
        goal: "every guest's memory is intact".to_owned(),
        reached: (!runs.is_empty()).then_some(wrong == 0),
        detail: format!("{} runs", runs.len()),
    }
}

fn judge(outcome: &Outcome, (goal, figure, ours, theirs, most): Bound) -> Goal {
    let runs = |name| Some(outcome.contenders.get(name)?.runs.as_slice());
    let ratio = runs(ours).zip(runs(theirs));
    let ratio = ratio.and_then(|(ours, theirs)| paired::one(ours, theirs, figure));
    Goal {
        goal: goal.to_owned(),
        reached: ratio.map(|ratio| ratio.ratio <= most),
        detail: ratio.map_or_else(String::new, |ratio| ratio.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gang::figures::GangFigures;

    fn outcome(scenario: &str, runs: &[(&str, f64, u64)]) -> Outcome {
        let mut outcome = Outcome { scenario: scenario.to_owned(), ..Outcome::default() };
        for (name, total_s, core_bytes) in runs {
            let gang = Some(GangFigures { core_bytes: *core_bytes, ..GangFigures::default() });
            let run = Run { ok: true, intact: true, total_s: *total_s, gang, ..Run::default() };
            outcome.contenders.entry((*name).to_owned()).or_default().runs.push(run);
        }
        outcome
    }

    fn reached(goals: &[Goal]) -> Vec<Option<bool>> {
        goals.iter().map(|goal| goal.reached).collect()
    }

    #[test]
    fn each_bound_is_judged_by_pairs() {
        let runs = [(PRECOPY, 10.0, 1000), (OFF, 5.0, 700), (RACK, 3.9, 250)];
        let goals = of(&outcome("gang-idle", &runs), &Conditions::default());
        assert_eq!(reached(&goals), [Some(true), Some(false), Some(true), Some(true)]);
        assert!(goals[1].to_string().ends_with("NOT REACHED (0.250)"), "{}", goals[1]);
    }

    #[test]
    fn programs_may_not_cost_more_bytes() {
        for (core_bytes, expected) in [(190, true), (210, false)] {
            let runs = [(PRECOPY, 10.0, 1000), (RACK, 3.9, core_bytes)];
            let goals = of(&outcome("gang-apps", &runs), &Conditions::default());
            assert_eq!(goals[1].reached, Some(expected), "{core_bytes}");
            assert_eq!(goals[2].reached, None, "nothing ran without sharing");
        }
    }

    #[test]
    fn without_a_contender_or_with_fewer_vms_nothing_is_judged() {
        let (runs, usual) = ([(PRECOPY, 10.0, 1000)], Conditions::default());
        assert_eq!(reached(&of(&outcome("gang-busy", &runs), &usual)), [Some(true), None]);
        assert_eq!(of(&outcome("gang-idle", &runs), &Conditions { vms: 4, ..usual }).len(), 1);
        assert_eq!(reached(&of(&outcome("gang-worst", &[]), &usual)), [None, None]);
    }
}
