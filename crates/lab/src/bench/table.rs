//! A benchmark's outcome as Markdown, for docs/BENCHMARKS.md and the terminal.

use std::fmt::Write;

use super::result::{Contender, Outcome, Run};

/// Columns that every table has.
const ALWAYS: [&str; 9] = [
    "contender",
    "runs",
    "total s",
    "blackout ms",
    "seen by the guest ms",
    "wire MB",
    "CPU s",
    "guest's work",
    "intact",
];

/// Columns that a table has where any run has the figure.
const SOMETIMES: [(&str, &str); 4] = [
    ("disk_work", "disk's work"),
    ("neighbour_kept", "neighbour kept"),
    ("neighbour_lost_s", "neighbour lost s"),
    ("spare_used", "spare used"),
];

/// Medians of every contender, and what the first named has over the others.
#[must_use]
pub fn markdown(outcome: &Outcome) -> String {
    let has = |figure: &str| outcome.contenders.values().any(|one| one.median.contains_key(figure));
    let more: Vec<_> = SOMETIMES.into_iter().filter(|(figure, _)| has(figure)).collect();
    let runs = || outcome.contenders.values().flat_map(|contender| &contender.runs);
    let disks = runs().any(|run| run.disk_intact.is_some());
    let names = more.iter().map(|(_, name)| *name).chain(disks.then_some("disk intact"));
    let names: Vec<&str> = ALWAYS.into_iter().chain(names).collect();
    let mut text = format!("| {} |\n|{}\n", names.join(" | "), " --- |".repeat(names.len()));
    for (name, contender) in &outcome.contenders {
        text.push_str(&row(name, contender, &more, disks));
    }
    if !outcome.ratios.is_empty() {
        text.push_str(
            "\n| ratio | total | blackout | wire | CPU |\n| --- | --- | --- | --- | --- |\n",
        );
        for (name, ratios) in &outcome.ratios {
            let ratio = |figure: &str| {
                ratios.get(figure).map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"))
            };
            let _ = writeln!(
                text,
                "| {name} | {} | {} | {} | {} |",
                ratio("total_s"),
                ratio("downtime_ms"),
                ratio("wire_bytes"),
                ratio("cpu_s"),
            );
        }
    }
    text
}

fn row(name: &str, contender: &Contender, more: &[(&str, &str)], disks: bool) -> String {
    let all = contender.runs.len();
    let count = |is_so: fn(&Run) -> bool| contender.runs.iter().filter(|run| is_so(run)).count();
    let figure = |figure: &str, scale: f64, digits: usize| {
        contender
            .median
            .get(figure)
            .map_or_else(|| "-".to_owned(), |value| format!("{:.digits$}", value * scale))
    };
    let mut row = format!(
        "| {name} | {}/{all} | {} | {} | {} | {} | {} | {} | {}/{all} |",
        count(|run| run.ok),
        figure("total_s", 1.0, 2),
        figure("downtime_ms", 1.0, 0),
        figure("guest_gap_ms", 1.0, 0),
        figure("wire_bytes", 1e-6, 1),
        figure("cpu_s", 1.0, 2),
        figure("guest_work", 1.0, 2),
        count(|run| run.intact),
    );
    for (name, _) in more {
        let _ = write!(row, " {} |", figure(name, 1.0, 2));
    }
    if disks {
        let intact = count(|run| run.disk_intact == Some(true));
        let _ = write!(row, " {intact}/{all} |");
    }
    row + "\n"
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_contender_that_never_made_it_has_no_figures() {
        let failed = Contender { runs: vec![Run::default()], median: BTreeMap::new() };
        assert_eq!(row("x", &failed, &[], false), "| x | 0/1 | - | - | - | - | - | - | 0/1 |\n");
        let more = [("disk_work", "disk's work")];
        let with_disk = "| x | 0/1 | - | - | - | - | - | - | 0/1 | - | 0/1 |\n";
        assert_eq!(row("x", &failed, &more, true), with_disk);
    }
}
