//! Whether migrations give way to VMs that are in cgroups of their own.

use facts::host::Facts;

use crate::Findings;

/// Names the weights between the agent's group and those of VMs. A cgroup's weight counts only
/// among the groups of its parent, so nothing that an agent does inside its own group makes it
/// give way. That is how systemd sets hosts up, and so no reason for a note.
pub(super) fn cpu_weights(facts: &Facts, findings: &mut Findings) {
    for vm in &facts.vms {
        let Some([(own, own_weight), (its, its_weight)]) = &vm.cpu_weights else { continue };
        findings.ok(
            "cgroups",
            format!(
                "CPU time is divided between {own} with the agent and {its} with VMs by weight \
                 ({own_weight} to {its_weight}), whatever a migration's priority (\"The agent's \
                 weight\" in docs/operations/limits.md)."
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use facts::host::VmFacts;

    use super::*;

    #[test]
    fn weights_are_named_once() {
        let weights = [("system.slice".to_owned(), 20), ("machine.slice".to_owned(), 100)];
        let vm = VmFacts { cpu_weights: Some(weights), ..VmFacts::default() };
        let in_its_group = VmFacts::default();
        let facts = Facts { vms: vec![vm.clone(), in_its_group, vm], ..Facts::default() };
        let mut findings = Findings::of("host-a");
        cpu_weights(&facts, &mut findings);
        let [found] = findings.list.as_slice() else { panic!("{:?}", findings.list) };
        assert!(found.text.contains("(20 to 100)"), "{}", found.text);
    }
}
