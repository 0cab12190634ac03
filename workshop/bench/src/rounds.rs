//! Contests in rounds: each contender runs once a round, and every second round is in reverse
//! order.

use super::contest::{add, failed, path, save, save_at, told, whole};
use super::goals::Goal;
use super::result::{Outcome, Run};
use super::{paired, stolen};
use lab::error::Result;

/// Number of rounds, contenders, and the name under which results are kept.
pub(super) struct Rounds<'a> {
    pub(super) label: &'a str,
    pub(super) runs: u32,
    /// The contenders that take part; if it is empty, all do.
    pub(super) only: &'a [String],
}

/// What is measured, and the goals that it is judged by.
pub(super) trait Contest {
    type Contender;

    fn contenders(&self) -> Vec<Self::Contender>;
    fn name(&self, contender: &Self::Contender) -> String;
    fn run(&self, contender: &mut Self::Contender) -> Result<Run>;
    /// Text on a run besides what all contests print.
    fn told(&self, run: &Run) -> String;
    fn goals(&self, outcome: &Outcome) -> Vec<Goal>;
}

impl Rounds<'_> {
    fn part(&self) -> String {
        format!("{}-part", self.label)
    }

    /// Runs all contenders, prints the course, and writes the results so far after each run. A
    /// failed contender is a result.
    pub(super) fn run(&self, contest: &impl Contest, outcome: &mut Outcome) -> Result<()> {
        let Self { runs, only, .. } = self;
        for nth in 1..=*runs {
            let mut contenders = contest.contenders();
            if nth.is_multiple_of(2) {
                // The first of a round is the last of the next, so that the order favours none.
                contenders.reverse();
            }
            for mut contender in contenders {
                let name = contest.name(&contender);
                if !only.is_empty() && !only.contains(&name) {
                    continue;
                }
                let run = contest.run(&mut contender).unwrap_or_else(|error| failed(&error));
                println!("  {nth}/{runs} {name:18} {}{}", told(&run), contest.told(&run));
                add(outcome, name, run);
                outcome.goals = contest.goals(outcome);
                save(&self.part(), outcome)?;
            }
        }
        Ok(())
    }

    /// Prints the comparison and the goals, and writes the results.
    pub(super) fn conclude(&self, outcome: &Outcome) -> Result<()> {
        println!("{}", paired::markdown(outcome));
        stolen::warn(outcome);
        for goal in &outcome.goals {
            println!("{goal}");
        }
        // A partial run must not replace the results of a whole one.
        let path = if self.only.is_empty() { whole(self.label)? } else { path(&self.part()) };
        save_at(&path, outcome)?;
        println!("\n{}", path.display());
        Ok(())
    }
}
