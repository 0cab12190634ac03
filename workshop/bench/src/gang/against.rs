//! Expected figures next to measured ones: the lab's own runs of `gang-idle`, for one contender
//! after the other. TCP's retransmissions are not expected: the bytes that are compared are those
//! that the target rack received from the core and sent into it.

use std::fmt::Write;
use std::path::Path;

use serde_json::Value;
use simulator::{Ground, Pace, Share, Trace, VMS_MAX, run};

use super::figures::GangFigures;
use crate::result::{Contender, Outcome, median};
use lab::error::{FileContext, LabError, Result};

/// How far off an expectation may be.
const OFF_MAX: f64 = 0.15;
/// The benchmark whose guests the traces describe.
const SCENARIO: &str = "gang-idle";

/// A figure, as measured and as expected.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Figure {
    measured: f64,
    expected: f64,
}

impl Figure {
    fn off(self) -> f64 {
        self.expected / self.measured - 1.0
    }
}

/// Figures of one contender.
struct Row {
    contender: String,
    total_s: Figure,
    arrived_bytes: Figure,
    /// Includes TCP's retransmissions.
    core_bytes: f64,
    cpu_s: Figure,
}

/// Compares a file of results with what is expected; returns the differences as Markdown.
///
/// # Errors
/// If the file can't be read, or is of another benchmark.
pub fn compare(path: &Path, pace: &Pace, trace: &Trace) -> Result<String> {
    let text = std::fs::read(path).at("read", path)?;
    let wrong = |why: &str| LabError::Unsupported(format!("{}: {why}", path.display()));
    let outcome: Outcome =
        serde_json::from_slice(&text).map_err(|error| wrong(&error.to_string()))?;
    if outcome.scenario != SCENARIO {
        return Err(wrong("only gang-idle can be expected"));
    }
    let ground = ground(&outcome.links).ok_or_else(|| wrong("it doesn't say which links"))?;
    let vms = outcome.guest["vms"].as_u64().and_then(|vms| usize::try_from(vms).ok());
    let vms = vms.filter(|vms| (1..=VMS_MAX).contains(vms));
    let trace = trace.clone().repeated(vms.ok_or_else(|| wrong("it doesn't say how many VMs"))?);
    let mut rows = Vec::new();
    for (contender, runs) in &outcome.contenders {
        let figure = |name: &str| runs.median.get(name).copied().filter(|figure| *figure > 0.0);
        let figures = [figure("total_s"), figure("core_bytes"), figure("cpu_s")];
        let [Some(total_s), Some(core_bytes), Some(cpu_s)] = figures else { continue };
        let Some(expected) = expect(contender, &ground, pace, &trace)? else { continue };
        rows.push(Row {
            contender: contender.clone(),
            total_s: Figure { measured: total_s, expected: expected.total_s },
            arrived_bytes: Figure {
                measured: arrived_bytes(runs),
                expected: expected.arrived_bytes,
            },
            core_bytes,
            cpu_s: Figure { measured: cpu_s, expected: expected.cpu_s },
        });
    }
    if rows.is_empty() {
        return Err(wrong("no contender that can be expected has finished"));
    }
    Ok(table(&rows))
}

/// Bytes that crossed the core and were not lost behind it: those that target hosts received,
/// without those that they sent each other; and those that they sent back.
fn arrived_bytes(runs: &Contender) -> f64 {
    let arrived = |gang: &GangFigures| {
        let among = gang.target_edge_sent_bytes.saturating_sub(gang.core_from_target_bytes);
        gang.target_edge_bytes.saturating_sub(among) + gang.core_from_target_bytes
    };
    let runs = runs.runs.iter().filter(|run| run.ok);
    median(runs.filter_map(|run| run.gang.as_ref()).map(|gang| arrived(gang) as f64).collect())
}

fn ground(links: &Value) -> Option<Ground> {
    let number =
        |name: &str| links[name].as_u64().filter(|number| (1..=1_000_000).contains(number));
    let count = |name: &str| usize::try_from(number(name)?).ok().filter(|count| *count < 100);
    Some(Ground {
        source_racks: count("source_racks")?,
        source_hosts: count("hosts_in_each")?,
        target_racks: 1,
        target_hosts: count("target_hosts")?,
        edge_bits_per_s: number("edge_mbit_per_s")? as f64 * 1e6,
        core_bits_per_s: number("core_mbit_per_s")? as f64 * 1e6,
    })
}

struct Expected {
    total_s: f64,
    arrived_bytes: f64,
    cpu_s: f64,
}

/// None if the contender can't be simulated.
fn expect(
    contender: &str,
    ground: &Ground,
    pace: &Pace,
    trace: &Trace,
) -> Result<Option<Expected>> {
    let is_precopy = contender == "qemu-precopy";
    let share = match contender {
        "qemu-precopy" | "droveway-off" => Share::Off,
        "droveway-host" => Share::Host,
        "droveway-rack" => Share::Rack,
        _ => return Ok(None),
    };
    let outcome = if is_precopy {
        // Its QEMUs run beforehand, and it sends pages uncompressed.
        let pace = Pace { prepare_s: 0.0, costs: pace.costs.of_precopy(), ..*pace };
        let trace = Trace { encoded_bytes: Vec::new(), ..trace.clone() };
        run(share, ground, &pace, &trace, 0)?
    } else {
        run(share, ground, pace, trace, 0)?
    };
    // As the lab measures it: from when the first VM's destination QEMU is ready; CPU time without
    // that of vCPUs.
    let total_s = outcome.total_s.unwrap_or(f64::INFINITY) - outcome.prepared_s;
    let (arrived_bytes, cpu_s) = (outcome.core_bytes, outcome.cpu_s - outcome.guests_cpu_s);
    Ok(Some(Expected { total_s, arrived_bytes, cpu_s }))
}

fn table(rows: &[Row]) -> String {
    let heads = "contender | total s | expected | off by | core MB | of it arrived | expected | \
                 off by | CPU s | expected";
    let mut text = format!("| {heads} |\n|{}\n", " --- |".repeat(heads.split('|').count()));
    let percent = |figure: Figure| format!("{:+.0} %", figure.off() * 100.0);
    let mut far = Vec::new();
    for Row { contender, total_s, arrived_bytes, core_bytes, cpu_s } in rows {
        let _ = writeln!(
            text,
            "| {contender} | {:.2} | {:.2} | {} | {:.0} | {:.0} | {:.0} | {} | {:.1} | \
             {:.1} |",
            total_s.measured,
            total_s.expected,
            percent(*total_s),
            core_bytes / 1e6,
            arrived_bytes.measured / 1e6,
            arrived_bytes.expected / 1e6,
            percent(*arrived_bytes),
            cpu_s.measured,
            cpu_s.expected,
        );
        for (name, figure) in [("total", total_s), ("bytes", arrived_bytes)] {
            if figure.off().abs() > OFF_MAX {
                far.push(format!("{contender}'s {name}"));
            }
        }
    }
    let verdict = if far.is_empty() {
        "All totals and bytes are expected within 15 %.".to_owned()
    } else {
        format!("Further off than 15 %: {}.", far.join(", "))
    };
    text + "\n" + &verdict + "\n"
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use simulator::{Costs, Machines, Mix, Placement};

    use super::*;
    use crate::result::Run;

    fn outcome(scenario: &str, total_s: f64) -> Outcome {
        let links = json!({
            "source_racks": 2, "hosts_in_each": 2, "target_hosts": 2,
            "edge_mbit_per_s": 100, "core_mbit_per_s": 400,
        });
        let (scenario, guest) = (scenario.to_owned(), json!({ "vms": 8 }));
        let mut outcome = Outcome { scenario, guest, links, ..Outcome::default() };
        // Some of it was lost, and some was sent between targets.
        let gang = GangFigures {
            core_bytes: 730_000_000,
            core_from_target_bytes: 2_000_000,
            target_edge_bytes: 750_000_000,
            target_edge_sent_bytes: 52_000_000,
            ..GangFigures::default()
        };
        let gang = Some(gang);
        for name in ["qemu-precopy", "qemu-zstd"] {
            let run = Run { ok: true, total_s, cpu_s: 9.0, gang: gang.clone(), ..Run::default() };
            outcome.contenders.entry(name.to_owned()).or_default().runs.push(run);
        }
        outcome.conclude(&[]);
        outcome
    }

    fn compared(outcome: &Outcome) -> Result<String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gang.json");
        std::fs::write(&path, serde_json::to_vec(outcome).unwrap()).unwrap();
        let mib = 1 << 20;
        let mix = Mix {
            vms: 2,
            systems: 1,
            system_bytes: 32 * mib,
            common_bytes: 32 * mib,
            repeated_bytes: 0,
            own_bytes: 16 * mib,
            dirty_bytes_per_s: 0,
            working_set_bytes: 0,
        };
        let pace = Pace {
            parallel: 16,
            placement: Placement::Turn,
            prepare_s: 0.5,
            switchover_s: 0.1,
            goal_s: 0.3,
            pool_bytes: 8e6,
            naming_bytes_per_s: 1e9,
            vm_bytes_per_s: 600e6,
            step_s: 0.01,
            machines: Machines::One(2.0),
            costs: Costs::default(),
        };
        compare(&path, &pace, &mix.trace())
    }

    #[test]
    fn measured_and_expected_figures_are_compared() {
        // 640 MiB over two edges of 100 Mbit/s.
        let text = compared(&outcome("gang-idle", 28.4)).unwrap();
        assert!(text.contains("| qemu-precopy | 28.40 |") && !text.contains("zstd"), "{text}");
        assert!(text.contains("| 730 | 702 |"), "{text}");
        assert!(text.contains("within 15 %"), "{text}");
        let text = compared(&outcome("gang-idle", 14.0)).unwrap();
        assert!(text.contains("Further off than 15 %: qemu-precopy's total."), "{text}");
    }

    #[test]
    fn what_cannot_be_expected_is_refused() {
        assert!(compared(&outcome("gang-busy", 28.0)).is_err());
        let nowhere = Outcome { links: Value::Null, ..outcome("gang-idle", 28.0) };
        assert!(compared(&nowhere).is_err());
        let nobody = Outcome { guest: Value::Null, ..outcome("gang-idle", 28.0) };
        assert!(compared(&nobody).is_err());
        let mut unfinished = outcome("gang-idle", 28.0);
        unfinished.contenders.clear();
        assert!(compared(&unfinished).is_err());
    }
}
