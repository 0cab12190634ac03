//! What a gang is going to do, and what became of it, as text.

use api::{
    GangOutcome, GangPlan, GangProgress, GangReport, MoveReport, MoveState, PlannedMove,
    SharedParts,
};

use crate::output::aligned;
use crate::output::amount;
use crate::output::full_stop;

/// A dry run.
pub(super) fn plan(plan: &GangPlan) -> String {
    let mut out = String::new();
    if !plan.moves.is_empty() {
        out += &moves(plan);
        let used: u64 = plan.moves.iter().map(|one| one.used_bytes).sum();
        let shared: u64 = plan.moves.iter().filter_map(|one| one.shared_bytes).sum();
        out += &format!(
            "\n{}, about {} to cross the network, before compression.\n",
            amount::counted(plan.moves.len() as u64, "VM"),
            amount::size(used.saturating_sub(shared))
        );
    }
    if !plan.rooms.is_empty() {
        let mut rows = vec![["HOST", "FREE", "LEFT AFTER"].map(str::to_owned)];
        rows.extend(plan.rooms.iter().map(|room| {
            [room.host.clone(), amount::size(room.free_bytes), amount::size(room.left_bytes)]
        }));
        out += &format!("\n{}", aligned(&rows));
    }
    for note in &plan.notes {
        out += &format!("Note: {}\n", full_stop(note));
    }
    out + "Nothing was moved.\n"
}

/// Its VMs; with what they share, if that is known of one.
fn moves(plan: &GangPlan) -> String {
    let size = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), amount::size);
    let first = |one: &PlannedMove| {
        let sizes = [one.ram_bytes, one.used_bytes].map(amount::size);
        let [vm, from, to] = [&one.vm, &one.from, &one.to].map(String::clone);
        let [ram, used] = sizes;
        [vm, from, to, ram, used]
    };
    let heads = ["VM", "FROM", "TO", "RAM", "IN USE"];
    if plan.moves.iter().all(|one| one.shared.is_none()) {
        let [vm, from, to, ram, used] = heads;
        let mut rows = vec![[vm, from, to, ram, used, "SHARED"].map(str::to_owned)];
        rows.extend(plan.moves.iter().map(|one| {
            let [vm, from, to, ram, used] = first(one);
            [vm, from, to, ram, used, size(one.shared_bytes)]
        }));
        return aligned(&rows);
    }
    let [vm, from, to, ram, used] = heads;
    let rest = ["SHARED", "HELD", "WITHIN", "COMMON"];
    let [all, held, within, common] = rest;
    let mut rows = vec![[vm, from, to, ram, used, all, held, within, common].map(str::to_owned)];
    rows.extend(plan.moves.iter().map(|one| {
        let [vm, from, to, ram, used] = first(one);
        let part = |part: fn(SharedParts) -> u64| size(one.shared.map(part));
        let (held, within) = (part(|one| one.held_bytes), part(|one| one.within_bytes));
        let common = part(|one| one.common_bytes);
        [vm, from, to, ram, used, size(one.shared_bytes), held, within, common]
    }));
    aligned(&rows)
        + "Shared is not sent: held at the destination, more than once within the VM, or common to \
           VMs of this gang.\n"
}

/// What is said of a gang that begins.
pub(super) fn beginning(id: &str, plan: &GangPlan) -> Vec<String> {
    let used: u64 = plan.moves.iter().map(|one| one.used_bytes).sum();
    let count = amount::counted(plan.moves.len() as u64, "VM");
    let mut lines = vec![format!("Gang {id}: {count} to move, {} in use.", amount::size(used))];
    lines.extend(plan.notes.iter().map(|note| format!("Note: {}", full_stop(note))));
    lines
}

/// What happened.
pub(super) fn sentences(report: &GangReport) -> String {
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
    out + &format!("\nMore: droveway report {}", report.id)
}

fn stayed(one: &MoveReport) -> String {
    let why = one.reason.as_deref().map_or_else(|| "no reason is known.".to_owned(), full_stop);
    match one.state {
        MoveState::Failed => {
            format!("{} was not moved from {} to {}: {why}", one.vm, one.from, one.to)
        }
        _ => format!("{} stays at {}: {why}", one.vm, one.from),
    }
}

/// All of it: `droveway report`.
pub(super) fn text(report: &GangReport) -> String {
    let sentences = sentences(report);
    let said: Vec<&str> = sentences.lines().filter(|line| !line.starts_with("More: ")).collect();
    let mut out = said.join("\n") + "\n";
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
            state(one.state).to_owned(),
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

/// `droveway gang` alone.
pub(super) fn table(gangs: &[GangProgress]) -> String {
    if gangs.is_empty() {
        return "No gangs. Move several VMs with `droveway gang VM=HOST ...` or `droveway evacuate \
                HOST`.\n"
            .to_owned();
    }
    let mut rows = vec![["GANG", "STATE", "MOVED", "FAILED", "TIME"].map(str::to_owned)];
    rows.extend(gangs.iter().map(|gang| {
        let state = match gang.outcome {
            None => "runs",
            Some(GangOutcome::Done) => "done",
            Some(GangOutcome::Failed) => "failed",
            Some(GangOutcome::Cancelled) => "cancelled",
            Some(GangOutcome::Interrupted) => "interrupted",
        };
        [
            gang.id.clone(),
            state.to_owned(),
            format!("{} of {}", gang.totals.done, gang.moves.len()),
            gang.totals.failed.to_string(),
            amount::seconds(gang.elapsed_s),
        ]
    }));
    aligned(&rows)
}

fn state(state: MoveState) -> &'static str {
    match state {
        MoveState::Waiting => "waiting",
        MoveState::Moving => "moving",
        MoveState::Done => "moved",
        MoveState::Failed => "failed",
        MoveState::Cancelled => "not moved",
    }
}

#[cfg(test)]
mod tests {
    use api::{Figures, GangOptions, HostRoom};

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
            sentences(&report(GangOutcome::Done, moves)),
            "2 VMs moved. 128 MiB on the wire in 9.00 s. Longest downtime: 120 ms, of web2 (goal \
             300 ms).\nMore: droveway report gdeadbeef"
        );
    }

    #[test]
    fn who_stays_and_who_has_moved_is_named() {
        let moves = vec![
            moved("web1", MoveState::Done, Some(90.0), None),
            moved("web2", MoveState::Failed, None, Some("no room")),
            moved("web3", MoveState::Cancelled, None, Some("web2 failed")),
        ];
        let failed = report(GangOutcome::Failed, moves);
        let said = sentences(&failed);
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
    fn a_plan_is_a_table() {
        let plan_of_one = GangPlan {
            moves: vec![PlannedMove {
                vm: "web1".to_owned(),
                from: "host-a".to_owned(),
                to: "host-b".to_owned(),
                ram_bytes: 1 << 30,
                used_bytes: 512 << 20,
                shared_bytes: None,
                shared: None,
            }],
            rooms: vec![HostRoom {
                host: "host-b".to_owned(),
                free_bytes: 8 << 30,
                left_bytes: 7 << 30,
            }],
            notes: vec!["web9 on host-a is dead: it is left out".to_owned()],
        };
        let text = plan(&plan_of_one);
        assert_eq!(
            text,
            "VM    FROM    TO      RAM       IN USE   SHARED\nweb1  host-a  host-b  1.00 GiB  512 \
             MiB  -\n\n1 VM, about 512 MiB to cross the network, before compression.\n\nHOST    \
             FREE      LEFT AFTER\nhost-b  8.00 GiB  7.00 GiB\nNote: web9 on host-a is dead: it is \
             left out.\nNothing was moved.\n"
        );
    }

    #[test]
    fn what_is_shared_is_told_by_its_reason() {
        let one = |vm: &str, shared: Option<SharedParts>| PlannedMove {
            vm: vm.to_owned(),
            from: "host-a".to_owned(),
            to: "host-b".to_owned(),
            ram_bytes: 1 << 30,
            used_bytes: 512 << 20,
            shared_bytes: shared.map(|parts| parts.bytes()),
            shared,
        };
        let parts =
            SharedParts { held_bytes: 128 << 20, within_bytes: 8 << 20, common_bytes: 64 << 20 };
        let moves = vec![one("web1", Some(parts)), one("web2", None)];
        let text = plan(&GangPlan { moves, rooms: Vec::new(), notes: Vec::new() });
        assert_eq!(
            text,
            "VM    FROM    TO      RAM       IN USE   SHARED   HELD     WITHIN    COMMON\nweb1  \
             host-a  host-b  1.00 GiB  512 MiB  200 MiB  128 MiB  8.00 MiB  64.0 MiB\nweb2  \
             host-a  host-b  1.00 GiB  512 MiB  -        -        -         -\nShared is not sent: \
             held at the destination, more than once within the VM, or common to VMs of this \
             gang.\n\n2 VMs, about 824 MiB to cross the network, before compression.\nNothing was \
             moved.\n"
        );
    }
}
