//! A report as text: a few sentences after a migration, all of it on request.

use std::process::ExitCode;

use api::{Audited, Outcome, Progress, Report};

use crate::args::ReportArgs;
use crate::client::{Client, segment};
use crate::output::{aligned, amount, described, full_stop, phase_name, print_json};
use crate::problem::Problem;
use crate::{gang, html};

pub(crate) async fn report(client: &Client, args: &ReportArgs) -> Result<ExitCode, Problem> {
    if gang::is_id(&args.id) {
        return gang::report(client, args).await;
    }
    // Ids have neither; a saved report can be shown where no agent runs.
    let report = if args.id.contains('/') || args.id.ends_with(".json") {
        saved(&args.id)?
    } else {
        client.get(&format!("/v1/migrations/{}/report", segment(&args.id))).await?
    };
    if let Some(file) = &args.html {
        std::fs::write(file, html::page(&report)).map_err(|source| Problem::Local {
            what: format!("writing {}", file.display()),
            source,
        })?;
        println!("Wrote {}.", file.display());
    } else if args.json {
        print_json(&report)?;
    } else {
        print!("{}", text(&report));
    }
    Ok(ExitCode::SUCCESS)
}

fn saved(file: &str) -> Result<Report, Problem> {
    let text = std::fs::read_to_string(file)
        .map_err(|source| Problem::Local { what: format!("reading {file}"), source })?;
    serde_json::from_str(&text)
        .map_err(|error| Problem::Typed(format!("{file} is not a report: {error}")))
}

/// What happened, for a person.
pub(crate) fn sentences(report: &Report) -> String {
    let mut out = match &report.outcome {
        Outcome::Done => done(report),
        Outcome::Failed(reason) => {
            format!("{} was not moved to {}: {}", report.vm, report.to, full_stop(reason))
        }
        Outcome::Cancelled => {
            format!("Cancelled. {} goes on at {}.", report.vm, report.from)
        }
    };
    for note in &report.notes {
        out.push_str("\nNote: ");
        out.push_str(&full_stop(note));
    }
    if !matches!(report.outcome, Outcome::Cancelled) {
        out.push_str(&format!("\nMore: droveway report {}", report.id));
    }
    out
}

/// What is known of a migration's end without its report.
pub(crate) fn without_report(last: &Progress) -> String {
    match &last.outcome {
        Some(Outcome::Done) => format!("{} runs on {}.", last.vm, last.to),
        Some(Outcome::Failed(reason)) => {
            format!("{} was not moved to {}: {}", last.vm, last.to, full_stop(reason))
        }
        Some(Outcome::Cancelled) | None => {
            format!("Cancelled. {} goes on at {}.", last.vm, last.from)
        }
    }
}

fn done(report: &Report) -> String {
    let gone = match report.downtime_ms {
        Some(ms) => format!(
            "{} runs on {}. Downtime {} (goal {}).",
            report.vm,
            report.to,
            amount::milliseconds(ms),
            goal(report)
        ),
        None => format!("{} is on {}, paused as it was.", report.vm, report.to),
    };
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

/// What coming within the goal has cost the guest.
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

/// `in 3 passes `, if they could be counted.
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

fn text(report: &Report) -> String {
    let mut out = sentences_without_more(report);
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

fn sentences_without_more(report: &Report) -> String {
    let all = sentences(report);
    let lines: Vec<&str> = all.lines().filter(|line| !line.starts_with("More: ")).collect();
    lines.join("\n")
}

/// All figures that the sentences don't have, as name and value.
pub(crate) fn facts(report: &Report) -> Vec<[String; 2]> {
    let mut facts = vec![
        fact("Migration", report.id.clone()),
        fact("From", format!("{} (QEMU {})", report.from, report.qemu[0])),
        fact("To", format!("{} (QEMU {})", report.to, report.qemu[1])),
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
            "Slowed",
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
    facts.extend([
        fact("Page bodies", amount::size(report.body_bytes)),
        fact("Zero and fill pages", amount::size(report.fill_bytes)),
        fact("Stale, not sent", amount::size(report.dropped_bytes)),
        fact("Not sent, already there", amount::size(report.named_bytes)),
        fact("Of that, from hosts of its rack", amount::size(report.peer_bytes)),
        fact("Of that, from its disks", from_disks(report)),
        fact("Sent although it was expected elsewhere", amount::size(report.again_bytes)),
        fact("Arrived while the VM was stopped", amount::size(report.stopped_bytes)),
        fact("Residue", amount::size(report.residue_bytes)),
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

/// Whether what arrived is what QEMU handed over.
fn audit(report: &Report) -> String {
    match &report.audit {
        Audited::Nothing { why } => format!("none: {why}"),
        Audited::Same { pages, reread_pages: 0 } => {
            format!("all {pages} pages as QEMU handed them over")
        }
        Audited::Same { pages, reread_pages } => {
            format!("all {pages} pages as QEMU handed them over; {reread_pages} read back from RAM")
        }
        Audited::Differences { pages, examples } => {
            let found = amount::counted(*pages, "page");
            format!("{found} not as QEMU handed them over: {}", examples.join("; "))
        }
    }
}

/// What it could use, and what of that was changed.
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

/// With what was read for it.
fn from_disks(report: &Report) -> String {
    let placed = amount::size(report.stored_bytes);
    match report.storage_read_bytes {
        0 => placed,
        read => format!("{placed}, {} read", amount::size(read)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::html::example;

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
    fn a_paused_vm_was_never_gone() {
        let report = Report { downtime_ms: None, ..example() };
        assert!(sentences(&report).starts_with("web1 is on host-b, paused as it was."));
    }

    #[test]
    fn the_text_has_phases_and_lanes() {
        let text = text(&example());
        assert!(text.contains("first pass") && text.contains("10.0.0.2"), "{text}");
    }
}
