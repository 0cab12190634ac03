//! Hosts that are evacuated themselves: VMs go there only if an operator names them, and no second
//! gang evacuates them.

use std::collections::BTreeSet;

use api::ErrorCode;
use wire::gang::Census;

use super::Planner;
use crate::denied::Denied;

/// Why such a host is not chosen.
pub(super) const WHY: &str = "it is being evacuated itself";

/// The error for a host that a gang evacuates already.
pub(in crate::gangs) fn already(host: &str, coordinator: &str) -> Denied {
    let text = format!(
        "{host} is being evacuated already: `droveway gang` on {coordinator} shows it, and \
         `droveway cancel` there ends it"
    );
    Denied::Coded(ErrorCode::GangRunning, text)
}

impl Planner<'_> {
    /// Refuses a host that a gang of another agent evacuates, as far as these agents were queried;
    /// a dry run notes it. A gang of this agent is known before any agent is queried, and this one
    /// may be it.
    pub(super) fn check_evacuated_once(&mut self, host: &str) -> Result<(), Denied> {
        let evacuates = |census: &Census| census.evacuating.iter().any(|one| one == host);
        let here = self.cluster.here();
        let other = self.known.iter().find(|(name, answer)| {
            name.as_str() != here && matches!(answer, Ok(census) if evacuates(census))
        });
        let Some((coordinator, _)) = other else { return Ok(()) };
        let already = already(host, coordinator);
        if !self.request.dry_run {
            return Err(already);
        }
        self.notes.push(already.to_string());
        Ok(())
    }

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

    /// The hosts that are evacuated, as far as their coordinators were queried.
    fn evacuated(&self) -> BTreeSet<String> {
        let answers = self.known.values().filter_map(|answer| answer.as_ref().ok());
        answers.flat_map(|census| &census.evacuating).cloned().collect()
    }
}
