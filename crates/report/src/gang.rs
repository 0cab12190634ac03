//! A gang's report as text.

use api::{GangOutcome, GangProgress, GangReport, MoveReport, MoveState};

use crate::{Stayed, aligned, amount, full_stop};

/// The outcome, the notes, and the command that shows more.
///
/// The notes were shown when the gang started, hours ago perhaps. They name the VMs that were left
/// out, which is easily missed.
#[must_use]
pub fn summary(report: &GangReport) -> String {
    let mut out = sentences(report);
    for note in &report.notes {
        out += &format!("\nNote: {}", full_stop(note));
    }
    if !report.moves.is_empty() {
        out += &format!("\nMore: droveway report {}", report.id);
    }
    out
}

/// The outcome, in sentences.
fn sentences(report: &GangReport) -> String {
    let of = |state| report.moves.iter().filter(move |one| one.state == state);
    let (all, done) = (report.moves.len(), of(MoveState::Done).count());
    let mut out = match report.outcome {
        Some(GangOutcome::Done) if all == 0 => return "There was no VM to move.".to_owned(),
        Some(GangOutcome::Done) => {
            format!("{} moved.", amount::counted(all as u64, "VM"))
        }
        Some(GangOutcome::Cancelled) => format!("Cancelled. {done} of {all} VMs moved."),
        Some(GangOutcome::Interrupted) => {
            format!("Its coordinator ended before it did. {done} of {all} VMs had moved.")
        }
        Some(GangOutcome::Failed) => format!("{done} of {all} VMs moved."),
        None => format!("It still runs. {done} of {all} VMs moved so far."),
    };
    out += &format!(
        " {} on the wire in {}.",
        amount::size(report.wire_bytes()),
        amount::seconds(report.total_s)
    );
    if report.named_bytes() > 0 {
        let named = amount::size(report.named_bytes());
        out += &format!(" {named} were not sent: the destinations had them.");
    }
    if let Some((vm, ms)) = report.longest_downtime() {
        #[allow(clippy::cast_precision_loss, reason = "three digits are shown")]
        let goal = amount::milliseconds(report.options.downtime_ms as f64);
        let gone = amount::milliseconds(ms);
        out += &format!(" Longest downtime: {gone}, of {vm} (goal {goal}).");
    }
    for one in of(MoveState::Failed).chain(of(MoveState::Cancelled)) {
        out += &format!("\n{}", stayed(one));
    }
    let done_and_stay = done > 0 && report.outcome != Some(GangOutcome::Done);
    if done_and_stay {
        let moved: Vec<String> =
            of(MoveState::Done).map(|one| format!("{} ({})", one.vm, one.to)).collect();
        out += &format!("\nMoved, and stay there: {}.", moved.join(", "));
    }
    let left = matches!(
        report.outcome,
        Some(GangOutcome::Failed | GangOutcome::Cancelled | GangOutcome::Interrupted)
    );
    if left {
        out += &format!("\nTo move the others: droveway gang --resume {}", report.id);
    }
    out
}

/// What is known of a gang's end without its report.
#[must_use]
pub fn without_report(last: &GangProgress) -> String {
    format!("{} of {} VMs moved.", last.totals.done, last.moves.len())
}

fn stayed(one: &MoveReport) -> Stayed<'_> {
    Stayed {
        vm: &one.vm,
        from: &one.from,
        to: &one.to,
        tried: one.state == MoveState::Failed,
        reason: one.reason.as_deref(),
        in_doubt: one.in_doubt,
    }
}

/// The whole report, for `droveway report`.
#[must_use]
pub fn text(report: &GangReport) -> String {
    let mut out = sentences(report) + "\n";
    let mut rows = vec![
        ["VM", "FROM", "TO", "RAM", "MIGRATION", "STATE", "WIRE", "TOOK", "DOWNTIME"]
            .map(str::to_owned),
    ];
    let none = || "-".to_owned();
    for one in &report.moves {
        let figures = one.figures.as_ref();
        let gone = figures.and_then(|figures| figures.downtime_ms);
        rows.push([
            one.vm.clone(),
            one.from.clone(),
            one.to.clone(),
            amount::size(one.ram_bytes),
            one.migration.clone().unwrap_or_else(none),
            state(one).to_owned(),
            figures.map_or_else(none, |figures| amount::size(figures.wire_bytes)),
            figures.map_or_else(none, |figures| amount::seconds(figures.total_s)),
            gone.map_or_else(none, amount::milliseconds),
        ]);
    }
    out += &format!("\n{}", aligned(&rows));
    for one in &report.moves {
        for note in one.figures.iter().flat_map(|figures| &figures.notes) {
            out += &format!("Note: {}: {}\n", one.vm, full_stop(note));
        }
    }
    for note in &report.notes {
        out += &format!("Note: {}\n", full_stop(note));
    }
    out
}

fn state(one: &MoveReport) -> &'static str {
    match one.state {
        MoveState::Waiting => "waiting",
        MoveState::Moving => "moving",
        MoveState::Done => "moved",
        MoveState::Failed if one.in_doubt => "in doubt",
        MoveState::Failed => "failed",
        MoveState::Cancelled => "not moved",
    }
}

#[cfg(test)]
mod tests {
    use api::{Figures, GangOptions};

    use super::*;

    fn moved(vm: &str, state: MoveState, gone: Option<f64>, reason: Option<&str>) -> MoveReport {
        let figures = gone.map(|downtime_ms| Figures {
            total_s: 3.0,
            downtime_ms: Some(downtime_ms),
            wire_bytes: 64 << 20,
            ..Figures::default()
        });
        MoveReport {
            vm: vm.to_owned(),
            from: "host-a".to_owned(),
            to: "host-b".to_owned(),
            ram_bytes: 1 << 30,
            used_bytes: 1 << 29,
            state,
            migration: Some("0a0b0c0d".to_owned()),
            reason: reason.map(str::to_owned),
            in_doubt: false,
            limit_bits_per_s: None,
            figures,
        }
    }

    fn report(outcome: GangOutcome, moves: Vec<MoveReport>) -> GangReport {
        GangReport {
            id: "gdeadbeef".to_owned(),
            started_unix_s: 0,
            total_s: 9.0,
            parallel: 2,
            atomic: false,
            evacuates: None,
            options: GangOptions::default(),
            outcome: Some(outcome),
            moves,
            notes: Vec::new(),
        }
    }

    #[test]
    fn a_gang_that_is_done_is_told_in_a_sentence() {
        let moves = vec![
            moved("web1", MoveState::Done, Some(90.0), None),
            moved("web2", MoveState::Done, Some(120.0), None),
        ];
        assert_eq!(
            summary(&report(GangOutcome::Done, moves)),
            "2 VMs moved. 128 MiB on the wire in 9.00 s. Longest downtime: 120 ms, of web2 (goal \
             300 ms).\nMore: droveway report gdeadbeef"
        );
    }

    #[test]
    fn vms_that_stay_and_vms_that_moved_are_named() {
        let moves = vec![
            moved("web1", MoveState::Done, Some(90.0), None),
            moved("web2", MoveState::Failed, None, Some("no room")),
            moved("web3", MoveState::Cancelled, None, Some("web2 failed")),
        ];
        let failed = report(GangOutcome::Failed, moves);
        let said = summary(&failed);
        for piece in [
            "1 of 3 VMs moved.",
            "\nweb2 was not moved from host-a to host-b: no room.\nweb3 stays at host-a: web2 \
             failed.",
            "\nMoved, and stay there: web1 (host-b).",
            "droveway gang --resume gdeadbeef",
        ] {
            assert!(said.contains(piece), "{piece:?} is not in: {said}");
        }
        let text = text(&failed);
        assert!(text.contains("0a0b0c0d") && text.contains("not moved"), "{text}");
    }

    #[test]
    fn vms_that_were_left_out_are_named_at_the_end_too() {
        let left_out = |moves| GangReport {
            notes: vec!["web9 on host-a is in doubt: it is left out".to_owned()],
            ..report(GangOutcome::Done, moves)
        };
        let note = "\nNote: web9 on host-a is in doubt: it is left out.";
        let one = left_out(vec![moved("web1", MoveState::Done, Some(90.0), None)]);
        let said = summary(&one);
        assert!(said.ends_with(&format!("{note}\nMore: droveway report gdeadbeef")), "{said}");
        assert_eq!(summary(&left_out(Vec::new())), format!("There was no VM to move.{note}"));
        assert_eq!(text(&one).matches("web9").count(), 1);
    }

    #[test]
    fn a_vm_in_doubt_is_not_said_to_have_stayed() {
        let mut one = moved("web1", MoveState::Failed, None, Some("host-b is silent"));
        one.in_doubt = true;
        let said = text(&report(GangOutcome::Failed, vec![one]));
        assert!(said.contains("\nweb1 is in doubt: host-b is silent.\n"), "{said}");
        assert!(!said.contains("was not moved") && !said.contains("  failed"), "{said}");
    }
}
