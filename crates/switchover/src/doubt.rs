//! What a side can't know or do by itself, and advice for the operator.

use crate::reason::Reason;

/// Why a VM is kept as it is until something else happens. All but the conflicts end by themselves
/// when their cause does; an operator may decide before, with [`crate::Resolution`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Doubt {
    /// Source: the VM was given up, and the destination has not answered since.
    Unanswered,
    /// Source: the VM was given up, and the destination's agent does not know the migration.
    UnknownThere,
    /// Source: the VM ran at the destination, or may have, and died there. The copy here is older
    /// than what disks and clients have seen since.
    LostThere {
        /// How it died.
        reason: Reason,
    },
    /// Source: the VM was given up, but its QEMU here runs it: something sent it `cont`.
    RunsHere,
    /// Source: an operator took the VM back, and the destination says that it runs it: two copies
    /// may be running. If the one here does not run yet, it is not tried any more.
    RunsThereToo,
    /// Source: the VM was given up, but its QEMU here runs it, and the destination says that it
    /// runs it too.
    RunsAtBoth,
    /// Source: the VM stays here, and its QEMU did not end the migration, or does not let it run.
    /// In the first case it may run: QEMU 10.0 under TCG hangs in the migration of a VM that had a
    /// vCPU unplugged, which runs on.
    CannotGoOn {
        /// QEMU's error.
        reason: Reason,
    },
    /// Either side: a record that must be on disk first can't be written.
    CannotNote {
        /// The system's error.
        reason: Reason,
    },
    /// Destination: the VM is loaded, and the source doesn't report whose it is.
    NoVerdict,
    /// Destination: the VM was given to this side and does not run, though it may have run.
    CannotRun {
        /// QEMU's error.
        reason: Reason,
    },
    /// Destination: this side has the VM, and the source says that an operator took it back: two
    /// copies may be running.
    TakenBack {
        /// The source's reason.
        reason: Reason,
    },
    /// Destination: the VM was given to this side and may not run yet, and the source says that an
    /// operator took it back: two copies may be running. The one here is not tried any more.
    TakenBackMeanwhile {
        /// The source's reason.
        reason: Reason,
    },
}

impl Doubt {
    /// Describes the doubt and what to do about it, for an operator.
    #[must_use]
    pub fn advice(&self, vm: &str, peer: &str) -> String {
        let here = format!(
            "make sure that it can no longer run on {peer} (power that host off), then `droveway \
             resolve {vm} --here`"
        );
        let there = format!("`droveway resolve {vm} --there`");
        match self {
            Self::Unanswered => format!(
                "{vm} was given to {peer}, which has not answered since. It is kept here, stopped, \
                 and the agent keeps querying {peer}. If {peer} never comes back: {here}. If {vm} \
                 runs there: {there}"
            ),
            Self::UnknownThere => format!(
                "{vm} was given to {peer}, whose agent knows nothing of it: was its state \
                 directory lost or changed? It is kept here, stopped. If it does not run \
                 there: {here}. If it does: {there}"
            ),
            Self::LostThere { reason } => format!(
                "{vm} was given to {peer} and died there ({reason}). The copy here is older: its \
                 disks may have changed since, and running it would damage them. If they can't \
                 have changed: {here}. Otherwise restart it on {peer}, and here {there}"
            ),
            Self::RunsHere => format!(
                "{vm} was given to {peer}, and yet it runs here: something sent `cont` to its \
                 QEMU. The agent is querying {peer}. If it runs there too: {there}. If not: {here}"
            ),
            Self::RunsThereToo => format!(
                "{vm} was taken back, and {peer} reports that it runs it: end one of the two now, \
                 with `droveway stop {vm} --force` on the host that is to lose it, or here, if \
                 `droveway list` shows it in doubt, with {there}, and check its disks. If {peer} \
                 lost it, then here `droveway resolve {vm} --here`, and once more if {peer} still \
                 reports that it runs it"
            ),
            // The VM is held here, so `droveway stop` is refused. A VM that is stopped at the
            // destination still counts as that side's.
            Self::RunsAtBoth => format!(
                "{vm} runs here and on {peer}: end the copy here now with {there}, and check its \
                 disks. To keep this one instead: `droveway stop {vm} --force` on {peer}, then \
                 here `droveway resolve {vm} --here`, and once more if {peer} still reports that \
                 it runs it"
            ),
            Self::CannotGoOn { reason } => format!(
                "QEMU did not end the migration of {vm}, or does not let it run ({reason}). It \
                 stays on this host, and the agent retries. If its guest answers, it runs: if this \
                 lasts, shut the guest down and start {vm} again. If not, fix what keeps QEMU from \
                 it, such as storage that hangs"
            ),
            Self::CannotNote { reason } => format!(
                "the journal of {vm}'s migration can't be written ({reason}), and it stays as it \
                 is until that works: make room or fix the disk of the agent's state directory"
            ),
            Self::NoVerdict => format!(
                "{vm} is loaded here, and {peer} does not report whether it released it; the agent \
                 keeps querying. If {peer} never comes back: {here}. If {vm} runs there: {there}"
            ),
            Self::CannotRun { reason } => format!(
                "{vm} was given to this host and does not run ({reason}); the agent retries. To \
                 have it continue at {peer} instead, if it is still there: {there}"
            ),
            Self::TakenBack { reason } => format!(
                "{vm} is this host's, and {peer} reports that it was taken back ({reason}): two \
                 may be running. End one of them now, with `droveway stop {vm} --force` on the \
                 host that is to lose it, and check its disks"
            ),
            Self::TakenBackMeanwhile { reason } => format!(
                "{vm} was given to this host, which has not seen it run, and {peer} reports that \
                 it was taken back ({reason}): two may be running. End the copy here now with \
                 {there}, and check its disks. To keep this one instead: `droveway stop {vm} \
                 --force` on {peer}, then here `droveway resolve {vm} --here`, and once more if \
                 {peer} still reports it. The agent waits for that"
            ),
        }
    }

    /// As [`Doubt::advice`], of a domain of Xen. An agent ends no domain that has its own name, and
    /// nothing but its `xl migrate` can resume one that is suspended.
    #[must_use]
    pub fn advice_on_domain(&self, domain: &str, peer: &str) -> String {
        let decide = |side: &str| format!("`droveway resolve {domain} --{side}`");
        let (here, there) = (decide("here"), decide("there"));
        let destroy = format!(
            "end one of the two now, with `xl destroy {domain}` on the host that is to lose it, \
             and check its disks"
        );
        match self {
            Self::Unanswered
            | Self::UnknownThere
            | Self::LostThere { .. }
            | Self::CannotNote { .. }
            | Self::NoVerdict
            | Self::CannotRun { .. } => self.advice(domain, peer),
            Self::RunsHere => format!(
                "{domain} was given to {peer}, and yet it runs here: something has resumed it. The \
                 agent is querying {peer}. If `xl list` there shows that it runs there too: \
                 {destroy}. Then, if it is left there: {there}; if here: {here}"
            ),
            Self::RunsThereToo => format!(
                "{domain} was taken back, and {peer} reports that it runs it: {destroy}. Then, if \
                 it is left on {peer}, here {there}, or if that is not possible {here}. If it is \
                 left on this host: {here}, and once more if {peer} still reports that it runs it"
            ),
            Self::RunsAtBoth => format!(
                "{domain} runs here and on {peer}: {destroy}. Then, if it is left there: {there}; \
                 if here: {here}, and once more if {peer} still reports that it runs it"
            ),
            Self::CannotGoOn { reason } => format!(
                "xl does not resume {domain} ({reason}). It stays on this host, and the agent \
                 retries. If `xl list` hangs, fix that. If the domain is suspended (`s` there) and \
                 its `xl migrate` has ended, nothing can resume it: `xl destroy` it by its number, \
                 and `xl create` it again"
            ),
            Self::TakenBack { reason } => format!(
                "{domain} is this host's, and {peer} reports that it was taken back ({reason}): \
                 two may be running, which `xl list` on both hosts shows: {destroy}. Then on \
                 {peer} {here}"
            ),
            Self::TakenBackMeanwhile { reason } => format!(
                "{domain} was given to this host, which has not seen it run, and {peer} reports \
                 that it was taken back ({reason}): two may be running. End the copy here now with \
                 {there}, or if it runs with `xl destroy {domain}` first, and check its disks. To \
                 keep this one instead: `xl destroy {domain}` on {peer}, then here {here}, and \
                 once more if {peer} still reports it. The agent waits for that"
            ),
        }
    }

    /// As [`Doubt::advice`], of a migration within one host: no other host has the VM.
    #[must_use]
    pub fn advice_within_host(&self, vm: &str) -> String {
        let former = format!("`droveway resolve {vm} --here` has it continue in its former QEMU");
        let next = format!("`droveway resolve {vm} --there` gives it to the next one");
        match self {
            Self::CannotGoOn { .. } | Self::CannotNote { .. } => self.advice(vm, "this host"),
            Self::LostThere { reason } => format!(
                "the next QEMU of {vm} ended when it had been ordered to run it ({reason}). The \
                 former one still has {vm} as it was before: its disks may have changed since, and \
                 running it would damage them. If they can't have changed: {former}. Otherwise end \
                 that one too (`droveway resolve {vm} --there`), and start {vm} again"
            ),
            Self::CannotRun { reason } => format!(
                "{vm} was given to its next QEMU, which does not run it ({reason}); the agent \
                 retries. To do without, as long as its former one lives: {former}"
            ),
            Self::RunsHere => format!(
                "{vm} was given to its next QEMU, and yet its former one runs it: something sent \
                 `cont` to that one. The agent ends neither. {former}, and ends the next one: the \
                 only way out if RAM or taps were handed over. Otherwise, if the next one runs it \
                 too, {next}, and ends the former one. Check its disks then"
            ),
            Self::RunsThereToo | Self::RunsAtBoth => format!(
                "{vm} was given to its next QEMU, and yet its former one runs it: something sent \
                 `cont` to that one. The agent ends neither: {next} and ends the former one; end \
                 the process of the next one, and {former}. Check its disks"
            ),
            Self::TakenBack { reason } | Self::TakenBackMeanwhile { reason } => format!(
                "{vm} was given to its next QEMU, and was taken back by its former one ({reason}): \
                 {former}, {next}. Check its disks"
            ),
            Self::Unanswered | Self::UnknownThere | Self::NoVerdict => format!(
                "it is not settled which of its two QEMUs has {vm}, and neither runs it: the \
                 journal of one of them can't be read. {former}, {next}"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason() -> Reason {
        "a lock".into()
    }

    /// There is no QEMU, and `droveway stop` knows no domains.
    #[test]
    fn the_advice_on_a_domain_names_xl() {
        let of_both_kinds = [
            Doubt::Unanswered,
            Doubt::UnknownThere,
            Doubt::LostThere { reason: reason() },
            Doubt::CannotNote { reason: reason() },
            Doubt::NoVerdict,
            Doubt::CannotRun { reason: reason() },
        ];
        let of_domains = [
            Doubt::RunsHere,
            Doubt::RunsThereToo,
            Doubt::RunsAtBoth,
            Doubt::CannotGoOn { reason: reason() },
            Doubt::TakenBack { reason: reason() },
            Doubt::TakenBackMeanwhile { reason: reason() },
        ];
        for doubt in of_both_kinds.iter().chain(&of_domains) {
            let advice = doubt.advice_on_domain("web1", "host-b");
            for wrong in ["QEMU", "`cont`", "droveway stop"] {
                assert!(!advice.contains(wrong), "{advice}");
            }
        }
        for doubt in of_domains {
            let advice = doubt.advice_on_domain("web1", "host-b");
            assert!(advice.contains("`xl destroy"), "{advice}");
        }
    }
}
