//! Runs from which the hypervisor took CPU time. Where this machine is itself a VM, a neighbour on
//! the physical host can slow a run down, and silence a guest for as long as a bad switchover would:
//! such a figure says nothing about a contender.

use super::result::{Outcome, Run};

/// Of one core, from which on it is mentioned.
const SHARE: f64 = 0.05;

fn considerable(run: &Run) -> bool {
    run.error.is_none() && run.stolen_s > run.total_s * SHARE
}

/// What is added to a run's line.
pub(super) fn told(run: &Run) -> String {
    if considerable(run) { format!(", {:.2} s STOLEN", run.stolen_s) } else { String::new() }
}

/// Says below a table whether it concerns any run.
pub(super) fn warn(outcome: &Outcome) {
    if let Some(warning) = warning(outcome) {
        println!("{warning}\n");
    }
}

fn warning(outcome: &Outcome) -> Option<String> {
    let runs = || outcome.contenders.values().flat_map(|contender| &contender.runs);
    let stolen = runs().filter(|run| considerable(run)).count();
    (stolen > 0).then(|| {
        format!(
            "In {stolen} of {} runs the hypervisor took more than {:.0} % of a core from this \
             machine (STOLEN). What the CPU limits was slower in these, and guests may have been \
             silent for longer. Repeat it when the physical host is less busy.",
            runs().count(),
            SHARE * 100.0,
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::Contender;

    fn run(stolen_s: f64) -> Run {
        Run { ok: true, total_s: 4.0, stolen_s, ..Run::default() }
    }

    #[test]
    fn only_runs_from_which_much_was_taken_are_mentioned() {
        assert_eq!(told(&run(0.19)), "");
        assert_eq!(told(&run(0.38)), ", 0.38 s STOLEN");
        let failed = Run { error: Some("no".to_owned()), ..run(0.38) };
        assert_eq!(told(&failed), "");
        let outcome = |runs| {
            let contender = Contender { runs, ..Contender::default() };
            let contenders = [("droveway".to_owned(), contender)].into();
            Outcome { contenders, ..Outcome::default() }
        };
        assert_eq!(warning(&outcome(vec![run(0.0), failed])), None);
        let said = warning(&outcome(vec![run(0.0), run(0.38), run(0.4)])).unwrap();
        assert!(said.starts_with("In 2 of 3 runs the hypervisor took more than 5 % of a core"));
    }
}
