//! Goals where guests write faster than the link, and whether a sweep reached them.

pub use super::goal::Goal;
use super::point::PointOutcome;
use super::relay::RELAY;
use super::result::{Contender, Outcome, Run};
use super::scenario::{NEIGHBOUR_NICS, NEIGHBOUR_VM};
use super::writers::REQUESTS;
use crate::contender::STAYS;

const OURS: &str = "droveway";
const THEIRS: &str = "qemu-autoconverge";
const PRECOPY: &str = "qemu-precopy";
const MULTIFD: &str = "qemu-multifd";
const RAW: &str = "droveway-raw";
/// What Droveway may take of the least that standing in the path takes.
const OF_RELAY_MAX: f64 = 1.15;
/// What requests may take of the time that they take while nothing moves.
const OF_STAYING_MAX: f64 = 1.05;
/// The downtime goal.
const BLACKOUT_MS: f64 = 300.0;
/// Up to this share of the link's rate a guest converges without being throttled.
const NEEDS_NOTHING: f64 = 0.5;
/// A share of at least this counts as all.
const ALL: f64 = 0.999;

/// All goals, judged by what was measured.
pub(super) fn of(points: &[PointOutcome]) -> Vec<Goal> {
    let fast = |point: &&PointOutcome| point.dirty_of_link > 1.0;
    let slow = |point: &&PointOutcome| point.dirty_of_link <= NEEDS_NOTHING;
    vec![
        judge("converges at every rate", points.iter(), |point| {
            let ours = point.outcome.contenders.get(OURS)?;
            let failed = ours.runs.iter().filter(|run| !run.ok).count();
            (!ours.runs.is_empty()).then_some((failed as f64, 0.0))
        }),
        judge("every guest's memory is intact", points.iter(), |point| {
            let runs = point.outcome.contenders.values().flat_map(|contender| &contender.runs);
            let runs: Vec<_> = runs.filter(|run| run.ok).collect();
            let wrong = runs.iter().filter(|run| !run.intact).count();
            (!runs.is_empty()).then_some((wrong as f64, 0.0))
        }),
        judge("blackout seen by the guest at most 300 ms in every run", points.iter(), |point| {
            Some((
                worst(point.outcome.contenders.get(OURS)?, |run| Some(run.guest_gap_ms))?,
                BLACKOUT_MS,
            ))
        }),
        judge("worst stall at most 0.5 of auto-converge's", points.iter().filter(fast), |point| {
            let [ours, theirs] = both(point)?;
            let stall = |run: &Run| run.stall_ms;
            Some((worst(ours, stall)? / worst(theirs, stall)?, 0.5))
        }),
        judge("total at most 0.5 of auto-converge's", points.iter().filter(fast), |point| {
            medians(point, "total_s", 0.5)
        }),
        judge("work lost at most 0.7 of auto-converge's", points.iter().filter(fast), |point| {
            medians(point, "lost_s", 0.7)
        }),
        judge("not slowed below the boundary", points.iter().filter(slow), |point| {
            let lowest = |run: &Run| run.share_lowest.map(|share| 1.0 - share);
            Some((worst(point.outcome.contenders.get(OURS)?, lowest)?, 1.0 - ALL))
        }),
    ]
}

/// The goal where a guest serves clients.
pub(super) fn served(outcome: &Outcome) -> Goal {
    let silence = |name| Some(*outcome.contenders.get(name)?.median.get("served_silence_ms")?);
    let ratio = silence(OURS).zip(silence(PRECOPY)).map(|(ours, theirs)| ours / theirs);
    Goal {
        goal: "longest silence at most 0.12 of precopy's".to_owned(),
        reached: ratio.map(|ratio| ratio <= 0.12),
        detail: ratio.map_or_else(String::new, shown),
    }
}

/// The goals of a contest, if it has any.
pub(super) fn of_contest(outcome: &Outcome) -> Vec<Goal> {
    let mut goals = Vec::new();
    if outcome.contenders.contains_key(RELAY) {
        goals.extend(beside_relay(outcome));
    }
    if outcome.scenario == NEIGHBOUR_NICS {
        goals.push(at_least(outcome, "neighbour_kept", 0.95, "of its rate kept by the server"));
        goals.push(at_least(outcome, "spare_used", 0.9, "of the spare bandwidth used"));
    }
    if outcome.scenario == NEIGHBOUR_VM {
        goals.push(beside_vm(outcome));
    }
    if outcome.scenario == REQUESTS {
        goals.push(all_answered(outcome));
    }
    goals
}

/// The goal where a server has to answer so many requests.
fn all_answered(outcome: &Outcome) -> Goal {
    let took = |name: &str| outcome.contenders.get(name)?.median.get("requests_s").copied();
    let ratio = took(OURS).zip(took(STAYS)).map(|(ours, alone)| ours / alone);
    Goal {
        goal: format!("all requests answered within {OF_STAYING_MAX} of the time without a move"),
        reached: ratio.map(|ratio| ratio <= OF_STAYING_MAX),
        detail: ratio.map_or_else(String::new, shown),
    }
}

/// The goal for a second VM.
fn beside_vm(outcome: &Outcome) -> Goal {
    let lost = |name: &str| outcome.contenders.get(name)?.median.get("neighbour_lost_s").copied();
    let lost = lost(OURS).zip(lost(MULTIFD));
    Goal {
        goal: "the second VM loses no more work than with multifd".to_owned(),
        reached: lost.map(|(ours, theirs)| ours <= theirs),
        detail: lost.map_or_else(String::new, |(ours, theirs)| {
            format!("{} s, and {} s", shown(ours), shown(theirs))
        }),
    }
}

/// A goal for Droveway's median.
fn at_least(outcome: &Outcome, figure: &str, least: f64, what: &str) -> Goal {
    let median = outcome.contenders.get(OURS).and_then(|ours| ours.median.get(figure)).copied();
    Goal {
        goal: format!("at least {least} {what}"),
        reached: median.map(|median| median >= least),
        detail: median.map_or_else(String::new, shown),
    }
}

/// The goals where a relay took part.
fn beside_relay(outcome: &Outcome) -> Vec<Goal> {
    let ratios = outcome.ratios.get(&format!("{RAW}/{RELAY}"));
    let goal = |(figure, what): (&str, &str)| {
        let ratio = ratios.and_then(|ratios| ratios.get(figure)).copied();
        Goal {
            goal: format!("{what} of {RAW} at most {OF_RELAY_MAX} of the relay's"),
            reached: ratio.map(|ratio| ratio <= OF_RELAY_MAX),
            detail: ratio.map_or_else(String::new, shown),
        }
    };
    [("total_s", "time"), ("cpu_s", "CPU time")].map(goal).into()
}

fn both(point: &PointOutcome) -> Option<[&Contender; 2]> {
    let of = |name| point.outcome.contenders.get(name);
    Some([of(OURS)?, of(THEIRS)?])
}

/// Ratio of our median to theirs, and its limit.
fn medians(point: &PointOutcome, figure: &str, most: f64) -> Option<(f64, f64)> {
    let [ours, theirs] = both(point)?;
    Some((ours.median.get(figure)? / theirs.median.get(figure)?, most))
}

/// The largest figure of a contender's good runs.
fn worst(contender: &Contender, figure: impl Fn(&Run) -> Option<f64>) -> Option<f64> {
    contender.runs.iter().filter(|run| run.ok).filter_map(figure).reduce(f64::max)
}

/// Judges a goal, which is reached if it is at every point with a figure; `figure` returns the
/// value and its limit.
fn judge<'p>(
    goal: &str,
    points: impl Iterator<Item = &'p PointOutcome>,
    figure: impl Fn(&PointOutcome) -> Option<(f64, f64)>,
) -> Goal {
    let at = |point: &PointOutcome| {
        format!("at {} times {} Mbit/s", point.dirty_of_link, point.link_mbit_per_s)
    };
    let found: Vec<(f64, f64, String)> = points
        .filter_map(|point| figure(point).map(|(value, most)| (value, most, at(point))))
        .collect();
    let missed = found.iter().filter(|(value, most, _)| value > most || value.is_nan());
    let missed: Vec<_> = missed.map(|(value, _, at)| format!("{} {at}", shown(*value))).collect();
    let most = found.iter().max_by(|one, other| one.0.total_cmp(&other.0));
    let detail = match (missed.is_empty(), most) {
        (false, _) => missed.join(", "),
        (true, Some((value, _, at))) if *value > 0.0 => format!("at most {} {at}", shown(*value)),
        (true, _) => String::new(),
    };
    let reached = (!found.is_empty()).then_some(missed.is_empty());
    Goal { goal: goal.to_owned(), reached, detail }
}

pub(super) fn shown(value: f64) -> String {
    if value >= 10.0 || value.fract() == 0.0 {
        format!("{value:.0}")
    } else {
        format!("{value:.2}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::served::Served;

    fn run(total_s: f64, stall_ms: f64, lost_s: f64, share: f64) -> Run {
        Run {
            ok: true,
            intact: true,
            total_s,
            guest_gap_ms: 250.0,
            stall_ms: Some(stall_ms),
            lost_s: Some(lost_s),
            share_lowest: Some(share),
            ..Run::default()
        }
    }

    fn point(dirty_of_link: f64, ours: &[Run], theirs: &[Run]) -> PointOutcome {
        let mut outcome = Outcome::default();
        for (name, runs) in [(OURS, ours), (THEIRS, theirs)] {
            outcome.contenders.entry(name.to_owned()).or_default().runs = runs.to_vec();
        }
        outcome.conclude(&[OURS]);
        PointOutcome { link_mbit_per_s: 200, dirty_of_link, outcome }
    }

    fn reached(points: &[PointOutcome]) -> Vec<Option<bool>> {
        of(points).iter().map(|goal| goal.reached).collect()
    }

    #[test]
    fn good_figures_reach_every_goal() {
        let points = [
            point(0.25, &[run(3.0, 10.0, 0.0, 1.0)], &[run(3.0, 9.0, 0.0, 1.0)]),
            point(4.0, &[run(8.0, 40.0, 3.0, 0.2)], &[run(40.0, 900.0, 20.0, 1.0)]),
        ];
        assert_eq!(reached(&points), [Some(true); 7]);
    }

    #[test]
    fn a_goal_that_was_missed_says_where() {
        let lost = Run { error: Some("cancelled".to_owned()), ..Run::default() };
        let slow = Run { guest_gap_ms: 400.0, ..run(30.0, 600.0, 19.0, 0.2) };
        let points = [
            point(0.5, &[run(3.0, 10.0, 0.0, 0.7)], &[]),
            point(2.0, &[slow, lost], &[run(40.0, 900.0, 20.0, 1.0)]),
        ];
        let [converges, intact, rest @ ..] = &of(&points)[..] else { panic!("goals") };
        assert_eq!((converges.reached, intact.reached), (Some(false), Some(true)));
        assert!(converges.to_string().ends_with("NOT REACHED (1 at 2 times 200 Mbit/s)"));
        assert!(rest.iter().all(|goal| goal.reached == Some(false)), "{rest:?}");
    }

    #[test]
    fn a_relay_is_what_droveway_is_compared_with() {
        let mut outcome = Outcome::default();
        for (name, total_s, cpu_s) in [(RAW, 1.1, 2.0), (RELAY, 1.0, 1.0)] {
            let run = Run { ok: true, total_s, cpu_s, ..Run::default() };
            outcome.contenders.entry(name.to_owned()).or_default().runs.push(run);
        }
        let reached = |outcome: &Outcome| {
            of_contest(outcome).iter().map(|goal| goal.reached).collect::<Vec<_>>()
        };
        assert_eq!(reached(&outcome), [None, None]);
        outcome.conclude(&[RELAY]);
        assert_eq!(reached(&outcome), [Some(true), Some(false)]);
        let told = of_contest(&outcome)[1].to_string();
        assert_eq!(told, "CPU time of droveway-raw at most 1.15 of the relay's: NOT REACHED (2)");
    }

    #[test]
    fn a_neighbour_on_one_of_two_nics_keeps_its_rate() {
        let mut outcome = Outcome { scenario: NEIGHBOUR_NICS.to_owned(), ..Outcome::default() };
        let (neighbour_kept, spare_used) = (Some(0.97), Some(0.8));
        let run = Run { ok: true, neighbour_kept, spare_used, ..Run::default() };
        outcome.contenders.entry(OURS.to_owned()).or_default().runs.push(run);
        outcome.conclude(&[OURS]);
        let reached: Vec<_> = of_contest(&outcome).iter().map(|goal| goal.reached).collect();
        assert_eq!(reached, [Some(true), Some(false)]);
    }

    #[test]
    fn a_second_vm_may_lose_what_it_loses_with_multifd() {
        let mut outcome = Outcome { scenario: NEIGHBOUR_VM.to_owned(), ..Outcome::default() };
        for (name, lost_s) in [(OURS, 1.5), (MULTIFD, 1.25)] {
            let run = Run { ok: true, neighbour_lost_s: Some(lost_s), ..Run::default() };
            outcome.contenders.entry(name.to_owned()).or_default().runs.push(run);
        }
        outcome.conclude(&[OURS]);
        let [goal] = &of_contest(&outcome)[..] else { panic!("one goal") };
        assert_eq!((goal.reached, goal.detail.as_str()), (Some(false), "1.50 s, and 1.25 s"));
    }

    #[test]
    fn requests_may_take_a_little_longer_than_without_a_move() {
        let mut outcome = Outcome { scenario: REQUESTS.to_owned(), ..Outcome::default() };
        for (name, requests_s) in [(OURS, 63.0), (STAYS, 60.0)] {
            let served = Some(Served { requests_s: Some(requests_s), ..Served::default() });
            let run = Run { ok: true, served, ..Run::default() };
            outcome.contenders.entry(name.to_owned()).or_default().runs.push(run);
        }
        outcome.conclude(&[OURS]);
        let [goal] = &of_contest(&outcome)[..] else { panic!("one goal") };
        assert_eq!((goal.reached, goal.detail.as_str()), (Some(true), "1.05"));
    }

    #[test]
    fn goals_without_figures_are_not_measured() {
        let goals = of(&[point(2.0, &[run(1.0, 1.0, 1.0, 1.0)], &[])]);
        assert_eq!(goals[4].reached, None);
        assert!(goals[4].to_string().ends_with("not measured"));
    }
}
