//! A migration's whole report as text.

use api::{Audited, Report};

use super::summary::{goal, outcome};
use crate::{aligned, amount, described, phase_name};

/// The summary, all figures, phases, disks and lanes.
#[must_use]
pub fn text(report: &Report) -> String {
    let mut out = outcome(report);
    out.push_str("\n\n");
    out.push_str(&aligned(&facts(report)));
    if !report.phases.is_empty() {
        out.push_str("\nPhases\n");
        out.push_str(&aligned(&phases(report)));
    }
    if !report.disks.is_empty() {
        out.push_str("\nDisks\n");
        out.push_str(&aligned(&disks(report)));
    }
    if !report.lanes.is_empty() {
        out.push_str("\nLanes\n");
        out.push_str(&aligned(&lanes(report)));
    }
    out
}

/// All figures as name and value.
pub(crate) fn facts(report: &Report) -> Vec<[String; 2]> {
    let mut facts = vec![
        fact("Migration", report.id.clone()),
        fact("From", host(&report.from, &report.qemu[0])),
        fact("To", host(&report.to, &report.qemu[1])),
        fact("Tap", report.tap.clone()),
        fact("Placement", report.placement.clone()),
        fact("Total", amount::seconds(report.total_s)),
        fact("Preparation", amount::seconds(report.prepare_s)),
    ];
    if let Some(ms) = report.downtime_ms {
        let predicted = match report.predicted_downtime_ms {
            Some(ms) => format!(", predicted {}", amount::milliseconds(ms)),
            None => String::new(),
        };
        facts.push(fact(
            "Downtime",
            format!("{} (goal {}{predicted})", amount::milliseconds(ms), goal(report)),
        ));
    }
    if let Some(slowed) = &report.slowed {
        facts.push(fact(
            "Throttled",
            format!(
                "from {} to {}, down to {:.0} %, by {}; {} of its work lost",
                amount::seconds(slowed.from_s),
                amount::seconds(slowed.to_s),
                slowed.lowest_share * 100.0,
                slowed.by,
                amount::seconds(slowed.lost_s)
            ),
        ));
    }
    if let Some(taken) = &report.from_others {
        facts.push(fact(
            "Taken from other traffic",
            format!(
                "{} more than it left, from {} to {}",
                amount::size(taken.bytes),
                amount::seconds(taken.from_s),
                amount::seconds(taken.to_s)
            ),
        ));
    }
    facts.extend([
        fact("Page bodies", amount::size(report.body_bytes)),
        fact("Zero and fill pages", amount::size(report.fill_bytes)),
        fact("Free in the guest, not sent", amount::size(report.free_bytes)),
        fact("Stale, not sent", amount::size(report.dropped_bytes)),
        fact("Sent as changes only", amount::size(report.delta_bytes)),
        fact("Not sent, already there", amount::size(report.named_bytes)),
        fact("Of that, from hosts of its rack", amount::size(report.peer_bytes)),
        fact("Of that, from its disks", from_disks(report)),
        fact("Named before the migration", amount::size(report.named_before_bytes)),
        fact("Sent although expected from elsewhere", amount::size(report.again_bytes)),
        fact("Arrived while the VM was stopped", amount::size(report.stopped_bytes)),
        fact("Non-RAM stream", amount::size(report.residue_bytes)),
        fact("On the wire", amount::size(report.wire_bytes)),
        fact("CPU, source agent", amount::seconds(report.cpu_source_s)),
        fact("CPU, destination agent", amount::seconds(report.cpu_destination_s)),
        fact("Audit", audit(report)),
        fact("Bounds", bounds(report)),
        fact(
            "Buffers at most",
            format!(
                "{} source, {} destination",
                amount::size(report.pool_high_water_bytes[0]),
                amount::size(report.pool_high_water_bytes[1])
            ),
        ),
    ]);
    facts
}

/// A host, and its QEMU's version if that is known.
fn host(name: &str, qemu: &str) -> String {
    if qemu.is_empty() { name.to_owned() } else { format!("{name} (QEMU {qemu})") }
}

/// The result of the audit.
fn audit(report: &Report) -> String {
    match &report.audit {
        Audited::Nothing { why } => format!("none: {why}"),
        Audited::Same { pages, reread_pages, unproved_pages } => {
            let mut text = match unproved_pages {
                0 => format!("all {pages} pages as the source handed them over"),
                _ => format!(
                    "{} of {pages} pages as the source handed them over; {unproved_pages} arrived, \
                     and can't be proved",
                    pages.saturating_sub(*unproved_pages)
                ),
            };
            if *reread_pages > 0 {
                text.push_str(&format!("; {reread_pages} read back from RAM"));
            }
            text
        }
        Audited::Differences { pages, examples } => {
            let found = amount::counted(*pages, "page");
            format!("{found} not as the source handed them over: {}", examples.join("; "))
        }
    }
}

/// The bounds, and whether they were changed.
fn bounds(report: &Report) -> String {
    let mut text = described(&report.bounds);
    if let Some(last) = report.bounds_changes.last() {
        let times = amount::counted(report.bounds_changes.len() as u64, "time");
        text.push_str(&format!(" (changed {times}, last at {})", amount::seconds(last.at_s)));
    }
    text
}

fn fact(name: &str, value: String) -> [String; 2] {
    [name.to_owned(), value]
}

fn phases(report: &Report) -> Vec<[String; 3]> {
    let ends = report.phases.iter().skip(1).map(|next| next.start_s).chain([report.total_s]);
    report
        .phases
        .iter()
        .zip(ends)
        .map(|(phase, end)| {
            [
                format!("  {}", phase_name(phase.phase)),
                format!("from {}", amount::seconds(phase.start_s)),
                format!("for {}", amount::seconds(end - phase.start_s)),
            ]
        })
        .collect()
}

fn disks(report: &Report) -> Vec<[String; 4]> {
    let row = |disk: &api::DiskReport| {
        let helped = |at_s| format!("writes waited from {}", amount::seconds(at_s));
        [
            format!("  {}", disk.name),
            amount::size(disk.bytes),
            format!("{} moved", amount::size(disk.data_bytes)),
            disk.changed_s.map(helped).unwrap_or_default(),
        ]
    };
    report.disks.iter().map(row).collect()
}

fn lanes(report: &Report) -> Vec<[String; 4]> {
    report
        .lanes
        .iter()
        .map(|lane| {
            [
                format!("  {}", lane.name),
                amount::size(lane.wire_bytes),
                amount::counted(lane.batches, "batch"),
                if lane.deaths == 0 {
                    String::new()
                } else {
                    format!("died {}", amount::counted(u64::from(lane.deaths), "time"))
                },
            ]
        })
        .collect()
}

/// The bytes placed from disks, and the bytes read for that.
fn from_disks(report: &Report) -> String {
    let placed = amount::size(report.stored_bytes);
    match report.storage_read_bytes {
        0 => placed,
        read => format!("{placed}, {} read", amount::size(read)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::example::example;
    use super::*;

    #[test]
    fn the_text_has_phases_and_lanes() {
        let text = text(&example());
        assert!(text.contains("first pass") && text.contains("10.0.0.2"), "{text}");
        assert!(!text.contains("other traffic"), "{text}");
    }

    #[test]
    fn the_text_has_what_was_taken_from_others() {
        let from_others = Some(api::FromOthers { from_s: 12.0, to_s: 20.5, bytes: 300 << 20 });
        let text = text(&Report { from_others, ..example() });
        assert!(text.contains("300 MiB more than it left, from 12.0 s to 20.5 s"), "{text}");
    }

    #[test]
    fn pages_that_can_not_be_proved_are_not_shown_as_the_same() {
        let found = Audited::Same { pages: 9, reread_pages: 0, unproved_pages: 2 };
        let text = audit(&Report { audit: found, ..example() });
        let expected =
            "7 of 9 pages as the source handed them over; 2 arrived, and can't be proved";
        assert_eq!(text, expected);
    }
}
