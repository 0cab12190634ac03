//! Known problems of QEMU versions.

use api::Severity;
use facts::program::Capabilities;
use qemu::lost_writes;

/// Major and minor.
type Version = (u32, u32);

/// One problem of the versions from `since` on and before `fixed`.
pub(crate) struct Problem {
    since: Version,
    fixed: Version,
    tcg_only: bool,
    pub(crate) severity: Severity,
    pub(crate) text: &'static str,
    pub(crate) advice: &'static str,
}

const ALWAYS: Version = (0, 0);
/// No version with a fix is known.
const NEVER: Version = (u32::MAX, 0);

/// The newest version that Droveway is tested with.
const NEWEST_TESTED: Version = (11, 1);

const PROBLEMS: [Problem; 7] = [
    Problem {
        since: ALWAYS,
        fixed: (7, 2),
        tcg_only: false,
        severity: Severity::Warning,
        text: "is older than the versions that Droveway is tested with",
        advice: "use QEMU 7.2 or newer",
    },
    Problem {
        since: ALWAYS,
        fixed: lost_writes::FIXED,
        tcg_only: true,
        severity: Severity::Warning,
        text: "loses track of pages that a guest writes while it is moved, under TCG: guests that \
               write may crash after a move",
        advice: "use QEMU 9.0 or newer, or KVM",
    },
    Problem {
        since: ALWAYS,
        fixed: (8, 1),
        tcg_only: false,
        severity: Severity::Note,
        text: "decides by itself when to stop a VM: only small buffers hold it, so busy VMs take \
               longer and their downtime is less exact",
        advice: "use QEMU 8.2 or newer where that matters",
    },
    Problem {
        since: (8, 1),
        fixed: (8, 2),
        tcg_only: false,
        severity: Severity::Note,
        text: "estimates by itself how fast its last pages are sent, so downtime meets its goal \
               less exactly",
        advice: "use QEMU 8.2 or newer where that matters",
    },
    Problem {
        since: ALWAYS,
        fixed: (9, 1),
        tcg_only: false,
        severity: Severity::Note,
        text: "ends when it can't load an arriving VM, so that the reason is only in its log; the \
               VM continues at its source",
        advice: "",
    },
    Problem {
        since: (10, 0),
        fixed: NEVER,
        tcg_only: false,
        severity: Severity::Note,
        text: "may hang when connections break at certain moments of a move, and crashes if a move \
               is cancelled while it is set up (Droveway waits with that)",
        advice: "if a VM hangs like that, its QEMU has to be killed",
    },
    Problem {
        since: (11, 1),
        fixed: NEVER,
        tcg_only: false,
        severity: Severity::Note,
        text: "has no machine types older than 5.2: VMs with one of them can't arrive",
        advice: "restart such VMs with a newer machine type",
    },
];

/// The note about a version that is newer than all that are tested; none for others.
pub(crate) fn unknown(known: &Capabilities) -> Option<String> {
    let (major, minor, _) = known.version;
    let (tested_major, tested_minor) = NEWEST_TESTED;
    ((major, minor) > NEWEST_TESTED).then(|| {
        let held = if known.legacy_ack { "has" } else { "has not" };
        format!(
            "QEMU {} is newer than those that Droveway is tested with (up to \
             {tested_major}.{tested_minor}), so its faults are not known. It reports {} machine \
             types and {} CPU models, and its migration {held} the property switchover-ack-legacy.",
            known.version_text(),
            known.machines.len(),
            known.cpus.len(),
        )
    })
}

/// The known problems of a version.
pub(crate) fn problems(
    (major, minor, _): (u32, u32, u32),
    tcg: bool,
) -> impl Iterator<Item = &'static Problem> {
    PROBLEMS.iter().filter(move |problem| {
        let version = (major, minor);
        (problem.since..problem.fixed).contains(&version) && (tcg || !problem.tcg_only)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_version_has_its_problems() {
        let count = |version, tcg| problems(version, tcg).count();
        assert_eq!(count((6, 2, 0), true), 4);
        assert_eq!(count((7, 2, 22), true), 3);
        assert_eq!(count((7, 2, 22), false), 2);
        assert_eq!(count((8, 1, 0), false), 2);
        assert_eq!(count((9, 0, 4), true), 1);
        assert_eq!(count((9, 1, 0), true), 0);
        assert_eq!(count((10, 0, 2), true), 1);
        assert_eq!(count((11, 0, 0), true), 1);
        assert_eq!(count((11, 1, 3), true), 2);
        let tcg = problems((7, 2, 22), true).find(|problem| problem.tcg_only).unwrap();
        assert_eq!(tcg.severity, Severity::Warning);
    }

    #[test]
    fn a_newer_version_is_said_to_be_unknown() {
        let of = |version| Capabilities { version, legacy_ack: true, ..Capabilities::default() };
        assert_eq!(unknown(&of((11, 1, 9))), None);
        for newer in [(11, 2, 0), (12, 0, 1)] {
            let text = unknown(&of(newer)).unwrap();
            assert!(text.contains("up to 11.1") && text.contains("has the property"), "{text}");
        }
    }
}
