//! Hosts that are evacuated themselves: VMs go there only if an operator names them.

use std::collections::BTreeSet;

use super::Planner;

/// Why such a host is not chosen.
pub(super) const WHY: &str = "it is being evacuated itself";

impl Planner<'_> {
    /// Those of the targets that are not chosen, which is noted; none if they were `named`.
    pub(super) fn left_out_as_evacuated(
        &mut self,
        targets: &[String],
        named: bool,
    ) -> BTreeSet<String> {
        let mut evacuated = self.evacuated();
        evacuated.retain(|host| !named && targets.contains(host));
        self.notes.extend(evacuated.iter().map(|host| format!("{host} is left out, {WHY}")));
        evacuated
    }

    /// Notes which of the hosts that an operator named are evacuated.
    pub(super) fn note_evacuated<'n>(&mut self, named: impl Iterator<Item = &'n String>) {
        let evacuated = self.evacuated();
        let named: BTreeSet<&String> = named.filter(|host| evacuated.contains(*host)).collect();
        self.notes.extend(named.into_iter().map(|host| {
            format!("{host} is being evacuated itself: VMs that arrive there later stay there")
        }));
    }

    /// The hosts that are evacuated, as far as their coordinators were asked.
    fn evacuated(&self) -> BTreeSet<String> {
        let answers = self.known.values().filter_map(|answer| answer.as_ref().ok());
        answers.flat_map(|census| &census.evacuating).cloned().collect()
    }
}
