//! A summary of a migration, in a few sentences.

use api::{Outcome, Progress, Report};

use crate::{amount, date, full_stop};

/// The outcome, for a person, and the command that shows more.
#[must_use]
pub fn sentences(report: &Report) -> String {
    match report.outcome {
        Outcome::Cancelled => outcome(report),
        _ => format!("{}\nMore: droveway report {}", outcome(report), report.id),
    }
}

/// The outcome, for a person.
pub(crate) fn outcome(report: &Report) -> String {
    let mut out = match &report.outcome {
        Outcome::Done => done(report),
        Outcome::Failed(reason) => {
            failed(&report.vm, [&report.from, &report.to], report.in_doubt, reason)
        }
        Outcome::Cancelled => cancelled(&report.vm, [&report.from, &report.to]),
    };
    for note in &report.notes {
        out.push_str("\nNote: ");
        out.push_str(&full_stop(note));
    }
    out
}

/// The outcome of a migration without its report.
#[must_use]
pub fn without_report(last: &Progress) -> String {
    match &last.outcome {
        Some(Outcome::Done) => format!("{} runs on {}.", last.vm, last.to),
        Some(Outcome::Failed(reason)) => {
            failed(&last.vm, [&last.from, &last.to], last.in_doubt, reason)
        }
        Some(Outcome::Cancelled) | None => cancelled(&last.vm, [&last.from, &last.to]),
    }
}

/// Whether the VM was to get another QEMU on its host.
fn is_within_host([from, to]: [&String; 2]) -> bool {
    from == to
}

fn cancelled(vm: &str, hosts: [&String; 2]) -> String {
    match is_within_host(hosts) {
        true => format!("Cancelled. {vm} continues in its former QEMU."),
        false => format!("Cancelled. {vm} continues at {}.", hosts[0]),
    }
}

/// A VM in doubt may be at the destination.
fn failed(vm: &str, hosts: [&String; 2], in_doubt: bool, reason: &str) -> String {
    let reason = full_stop(reason);
    if in_doubt {
        format!("{vm} is in doubt: {reason}")
    } else if is_within_host(hosts) {
        format!("{vm} did not get another QEMU: {reason}")
    } else {
        format!("{vm} was not moved to {}: {reason}", hosts[1])
    }
}

/// Where a VM is that was in doubt when its migration ended; none if it was not.
pub(crate) fn settled(report: &Report) -> Option<String> {
    let at = date::utc_to_the_second(report.settled_unix_s?);
    Some(format!(
        "{} is on {}. That was settled at {at}, after the migration had ended, so the downtime is \
         not known.",
        report.vm, report.to
    ))
}

fn done(report: &Report) -> String {
    if let Some(settled) = settled(report) {
        return settled;
    }
    let within = is_within_host([&report.from, &report.to]);
    let place = match within {
        true => format!("{}, in QEMU {}", report.to, report.qemu[1]),
        false => report.to.clone(),
    };
    let gone = match report.downtime_ms {
        Some(ms) => format!(
            "{} runs on {place}. Downtime {} (goal {}).",
            report.vm,
            amount::milliseconds(ms),
            goal(report)
        ),
        None => format!("{} is on {place}, paused as it was.", report.vm),
    };
    if within {
        let (size, total) = (amount::size(report.ram_bytes), amount::seconds(report.total_s));
        let passes = passes(report);
        return format!("{gone} {size} of RAM copied {passes}in {total}.{}", slowed(report));
    }
    let moved = format!(
        "{} of RAM moved in {} as {} on the wire, {}over {}.",
        amount::size(report.ram_bytes),
        amount::seconds(report.total_s),
        amount::size(report.wire_bytes),
        passes(report),
        amount::counted(report.lanes.len() as u64, "lane"),
    );
    let disks = match report.disks.len() {
        0 => String::new(),
        count => format!(
            " {} moved too, {} of data.",
            amount::counted(count as u64, "disk"),
            amount::size(report.disks.iter().map(|disk| disk.data_bytes).sum())
        ),
    };
    format!("{gone} {moved}{disks}{}", slowed(report))
}

/// What throttling cost the guest.
fn slowed(report: &Report) -> String {
    report.slowed.as_ref().map_or_else(String::new, |slowed| {
        format!(
            " It wrote faster than its memory could be sent: for {} it was throttled to as little \
             as {:.0} % of its CPU time.",
            amount::seconds(slowed.to_s - slowed.from_s),
            slowed.lowest_share * 100.0
        )
    })
}

/// `in 3 passes `, or nothing if they could not be counted.
fn passes(report: &Report) -> String {
    match report.passes {
        0 => String::new(),
        count => format!("in {} ", amount::counted(u64::from(count), "pass")),
    }
}

/// The downtime goal.
pub(crate) fn goal(report: &Report) -> String {
    #[allow(clippy::cast_precision_loss, reason = "three digits are shown")]
    amount::milliseconds(report.downtime_goal_ms as f64)
}

#[cfg(test)]
mod tests {
    use super::super::example::example;
    use super::*;

    #[test]
    fn a_person_understands_the_summary() {
        let text = sentences(&example());
        assert!(text.starts_with(
            "web1 runs on host-b. Downtime 38 ms (goal 300 ms). 1.00 GiB of RAM moved in"
        ));
        assert!(text.contains("as 106 MiB on the wire"), "{text}");
        assert!(text.ends_with("More: droveway report 3f2a91c0"), "{text}");
    }

    #[test]
    fn a_failure_says_where_the_vm_is_not() {
        let report = Report { outcome: Outcome::Failed("no room".to_owned()), ..example() };
        assert!(sentences(&report).starts_with("web1 was not moved to host-b: no room."));
    }

    #[test]
    fn a_vm_that_got_another_qemu_is_not_said_to_have_moved() {
        let qemu = ["10.0.2", "11.1.3"].map(str::to_owned);
        let report = Report { to: example().from, qemu, ..example() };
        let text = sentences(&report);
        assert!(text.starts_with("web1 runs on host-a, in QEMU 11.1.3. Downtime 38 ms"), "{text}");
        assert!(text.contains("1.00 GiB of RAM copied in") && !text.contains("wire"), "{text}");
        let failed = Outcome::Failed("no room".to_owned());
        for (outcome, told) in [
            (failed, "web1 did not get another QEMU: no room."),
            (Outcome::Cancelled, "Cancelled. web1 continues in its former QEMU."),
        ] {
            let text = sentences(&Report { outcome, ..report.clone() });
            assert!(text.starts_with(told), "{text}");
        }
    }

    #[test]
    fn a_vm_in_doubt_is_not_said_to_have_stayed() {
        let outcome = Outcome::Failed("host-b has not answered since".to_owned());
        let told = "web1 is in doubt: host-b has not answered since.";
        let report = Report { outcome: outcome.clone(), in_doubt: true, ..example() };
        assert!(sentences(&report).starts_with(told), "{}", sentences(&report));
        let last = Progress::new(("1", "web1"), ("host-a", "host-b"), 1);
        let last = Progress { outcome: Some(outcome), in_doubt: true, ..last };
        assert_eq!(without_report(&last), told);
    }

    #[test]
    fn a_vm_whose_move_was_settled_later_is_not_said_to_be_paused() {
        let settled_unix_s = Some(1_709_210_096);
        let text = sentences(&Report { downtime_ms: None, settled_unix_s, ..example() });
        let expected = "web1 is on host-b. That was settled at 2024-02-29 12:34:56 UTC, after";
        assert!(text.starts_with(expected) && !text.contains("paused"), "{text}");
    }

    #[test]
    fn a_paused_vm_has_no_downtime() {
        let report = Report { downtime_ms: None, ..example() };
        assert!(sentences(&report).starts_with("web1 is on host-b, paused as it was."));
    }
}
