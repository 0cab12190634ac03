//! Whether migrations give way to VMs that are in cgroups of their own.

use facts::host::Facts;

use crate::Findings;

/// A cgroup's weight counts only among the groups of its parent, so nothing that an agent does
/// inside its own group makes it give way.
const ADVICE: &str = "where migrations should give way to these VMs, give the agent's unit \
                      Slice=-.slice and a small CPUWeight=: see \"The agent's weight\" in \
                      docs/operations/limits.md";

/// Judges the weights between the agent's group and those of VMs.
pub(super) fn cpu_weights(facts: &Facts, findings: &mut Findings) {
    for vm in &facts.vms {
        let Some([(own, own_weight), (its, its_weight)]) = &vm.cpu_weights else { continue };
        let text = format!(
            "CPU time is divided between {own} with the agent and {its} with VMs by weight \
             ({own_weight} to {its_weight}), whatever a migration's priority."
        );
        if own_weight < its_weight {
            findings.ok("cgroups", text);
        } else {
            findings.note("cgroups", text, ADVICE);
        }
    }
}

#[cfg(test)]
mod tests {
    use api::Severity;
    use facts::host::VmFacts;

    use super::*;

    #[test]
    fn a_weight_that_does_not_give_way_is_noted_once() {
        for (own, severity) in [(100, Severity::Note), (300, Severity::Note), (20, Severity::Ok)] {
            let weights = [("system.slice".to_owned(), own), ("machine.slice".to_owned(), 100)];
            let vm = VmFacts { cpu_weights: Some(weights), ..VmFacts::default() };
            let in_its_group = VmFacts::default();
            let facts = Facts { vms: vec![vm.clone(), in_its_group, vm], ..Facts::default() };
            let mut findings = Findings::of("host-a");
            cpu_weights(&facts, &mut findings);
            let [found] = findings.list.as_slice() else { panic!("{:?}", findings.list) };
            assert_eq!(found.severity, severity, "{own}");
            assert_eq!(found.advice.is_some(), severity == Severity::Note, "{own}");
            assert!(found.text.contains(&format!("({own} to 100)")), "{}", found.text);
        }
    }
}
