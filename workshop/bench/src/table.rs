//! A benchmark's outcome as Markdown, for the terminal, docs/BENCHMARKS.md and
//! docs/benchmarks/.

use std::fmt::Write;

use super::point::PointOutcome;
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

/// Columns that a table has where any run has the figure: figure, title, factor and digits.
const SOMETIMES: [(&str, &str, f64, usize); 40] = [
    ("disk_work", "disk's work", 1.0, 2),
    ("neighbour_kept", "neighbour kept", 1.0, 2),
    ("neighbour_lost_s", "neighbour lost s", 1.0, 2),
    ("spare_used", "spare used", 1.0, 2),
    ("stall_ms", "worst stall ms", 1.0, 0),
    ("lost_s", "work lost s", 1.0, 2),
    ("share_lowest", "lowest share", 1.0, 2),
    ("slowed_s", "slowed s", 1.0, 1),
    ("passes", "passes", 1.0, 0),
    ("served_before_per_s", "requests/s before", 1.0, 0),
    ("served_during_per_s", "during", 1.0, 0),
    ("served_after_per_s", "after", 1.0, 0),
    ("served_silence_before_ms", "silence ms before", 1.0, 0),
    ("served_silence_ms", "during", 1.0, 0),
    ("served_silence_after_ms", "after", 1.0, 0),
    ("served_lost", "requests lost", 1.0, 0),
    ("requests_s", "all answered s", 1.0, 1),
    ("app_before_per_s", "program/s before", 1.0, 0),
    ("app_per_s", "meanwhile", 1.0, 0),
    ("app_lost_s", "program lost s", 1.0, 2),
    ("core_bytes", "core MB", 1e-6, 1),
    ("edge_bytes", "edges MB", 1e-6, 1),
    ("target_edge_bytes", "to target hosts MB", 1e-6, 1),
    ("named_bytes", "named MB", 1e-6, 1),
    ("again_share", "sent again %", 100.0, 2),
    ("load_lost_before", "load lost before %", 100.0, 2),
    ("load_lost", "meanwhile %", 100.0, 2),
    ("answers_before_per_s", "answers/s before", 1.0, 0),
    ("answers_per_s", "meanwhile", 1.0, 0),
    ("answers_lost_s", "answers lost s", 1.0, 2),
    ("san_bytes", "SAN MB", 1e-6, 1),
    ("restorable_bytes", "restorable MB", 1e-6, 1),
    ("restored_bytes", "restored MB", 1e-6, 1),
    ("cores_busy", "cores busy", 1.0, 2),
    ("touched_before_per_s", "pages/s before", 1.0, 0),
    ("touched_per_s", "meanwhile", 1.0, 0),
    ("pages_lost", "pages lost", 1.0, 0),
    ("back_to_full_s", "back to full s", 1.0, 2),
    ("source_agent_bytes", "source's agent MiB", 1.0 / (1 << 20) as f64, 0),
    ("destination_agent_bytes", "destination's agent MiB", 1.0 / (1 << 20) as f64, 0),
];

/// Columns that a table has besides those that all have.
struct More {
    figures: Vec<(&'static str, &'static str, f64, usize)>,
    disks: bool,
}

impl More {
    fn of(outcomes: &[&Outcome]) -> Self {
        let contenders = || outcomes.iter().flat_map(|outcome| outcome.contenders.values());
        let has = |figure: &str| contenders().any(|one| one.median.contains_key(figure));
        let figures = SOMETIMES.into_iter().filter(|(figure, ..)| has(figure)).collect();
        let mut runs = contenders().flat_map(|contender| &contender.runs);
        Self { figures, disks: runs.any(|run| run.disk_intact.is_some()) }
    }

    /// The table's head, with the columns `first` before all others.
    fn head(&self, first: &[&str]) -> String {
        let names = self.figures.iter().map(|(_, name, ..)| *name);
        let names = names.chain(self.disks.then_some("disk intact"));
        let names: Vec<&str> = first.iter().copied().chain(ALWAYS).chain(names).collect();
        format!("| {} |\n|{}\n", names.join(" | "), " --- |".repeat(names.len()))
    }
}

/// All points of a sweep in one table.
#[must_use]
pub fn sweep(points: &[PointOutcome]) -> String {
    let more = More::of(&points.iter().map(|point| &point.outcome).collect::<Vec<_>>());
    let mut text = more.head(&["link Mbit/s", "dirty/link"]);
    for point in points {
        let first = format!("| {} | {} ", point.link_mbit_per_s, point.dirty_of_link);
        for (name, contender) in &point.outcome.contenders {
            text.push_str(&first);
            text.push_str(&row(name, contender, &more));
        }
    }
    text
}

/// Medians of all contenders, and the ratios between them.
#[must_use]
pub fn markdown(outcome: &Outcome) -> String {
    let more = More::of(&[outcome]);
    let mut text = more.head(&[]);
    for (name, contender) in &outcome.contenders {
        text.push_str(&row(name, contender, &more));
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

fn row(name: &str, contender: &Contender, more: &More) -> String {
    let all = contender.runs.len();
    let count = |is_so: fn(&Run) -> bool| contender.runs.iter().filter(|run| is_so(run)).count();
    let figure = |figure: &str, scale: f64, digits: usize| {
        contender
            .median
            .get(figure)
            .map_or_else(|| "-".to_owned(), |value| format!("{:.digits$}", value * scale))
    };
    let given = contender.runs.iter().filter_map(|run| run.unfinished_s).reduce(f64::max);
    let total = match given {
        Some(given) if contender.median.is_empty() => format!("> {given:.0}"),
        _ => figure("total_s", 1.0, 2),
    };
    let mut row = format!(
        "| {name} | {}/{all} | {total} | {} | {} | {} | {} | {} | {}/{all} |",
        count(|run| run.ok),
        figure("downtime_ms", 1.0, 0),
        figure("guest_gap_ms", 1.0, 0),
        figure("wire_bytes", 1e-6, 1),
        figure("cpu_s", 1.0, 2),
        figure("guest_work", 1.0, 2),
        count(|run| run.intact),
    );
    for (name, _, scale, digits) in &more.figures {
        let _ = write!(row, " {} |", figure(name, *scale, *digits));
    }
    if more.disks {
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
        let none = More { figures: Vec::new(), disks: false };
        assert_eq!(row("x", &failed, &none), "| x | 0/1 | - | - | - | - | - | - | 0/1 |\n");
        let more = More { figures: vec![("disk_work", "disk's work", 1.0, 2)], disks: true };
        let with_disk = "| x | 0/1 | - | - | - | - | - | - | 0/1 | - | 0/1 |\n";
        assert_eq!(row("x", &failed, &more), with_disk);
        let late = Run { unfinished_s: Some(60.0), ..Run::default() };
        let late = Contender { runs: vec![late], median: BTreeMap::new() };
        assert_eq!(row("x", &late, &none), "| x | 0/1 | > 60 | - | - | - | - | - | 0/1 |\n");
    }

    #[test]
    fn rows_of_a_sweep_begin_with_their_point() {
        let run = Run { ok: true, stall_ms: Some(12.0), ..Run::default() };
        let mut outcome = Outcome::default();
        outcome.contenders.entry("x".to_owned()).or_default().runs.push(run);
        outcome.conclude(&[]);
        let point = PointOutcome { link_mbit_per_s: 200, dirty_of_link: 0.5, outcome };
        let text = sweep(&[point]);
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[0].starts_with("| link Mbit/s | dirty/link | contender |"), "{text}");
        assert!(lines[0].ends_with("| worst stall ms |"), "{text}");
        assert!(lines[2].starts_with("| 200 | 0.5 | x | 1/1 |"), "{text}");
        assert_eq!(lines[2].matches('|').count(), lines[1].matches('|').count(), "{text}");
    }
}
