//! Contests in rounds: each contender once a round, in the opposite order every
//! second time.

use super::contest::{add, failed, path, save, save_at, told, whole};
use super::goals::Goal;
use super::paired;
use super::result::{Outcome, Run};
use lab::error::Result;

/// How often, who, and by what name the results are kept.
pub(super) struct Rounds<'a> {
    pub(super) label: &'a str,
    pub(super) runs: u32,
    /// The contenders that take part; none named means all.
    pub(super) only: &'a [String],
}

/// What is measured, and by what goals it is judged.
pub(super) trait Contest {
    type Contender;

    fn contenders(&self) -> Vec<Self::Contender>;
    fn name(&self, contender: &Self::Contender) -> String;
    fn run(&self, contender: &mut Self::Contender) -> Result<Run>;
    /// What is printed of a run besides what all have.
    fn told(&self, run: &Run) -> String;
    fn goals(&self, outcome: &Outcome) -> Vec<Goal>;
}

impl Rounds<'_> {
    fn part(&self) -> String {
        format!("{}-part", self.label)
    }

    /// Runs all, prints what happens, and writes after each run the results that
    /// there are. A contender that fails is a result.
    pub(super) fn run(&self, contest: &impl Contest, outcome: &mut Outcome) -> Result<()> {
        let Self { runs, only, .. } = self;
        for nth in 1..=*runs {
            let mut contenders = contest.contenders();
            if nth.is_multiple_of(2) {
                // What the first of a round finds the last finds in the next.
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

    /// Prints what it comes to, and writes the results.
    pub(super) fn conclude(&self, outcome: &Outcome) -> Result<()> {
        println!("{}", paired::markdown(outcome));
        for goal in &outcome.goals {
            println!("{goal}");
        }
        // A partial run must not stand in for a whole one.
        let path = if self.only.is_empty() { whole(self.label)? } else { path(&self.part()) };
        save_at(&path, outcome)?;
        println!("\n{}", path.display());
        Ok(())
    }
}
