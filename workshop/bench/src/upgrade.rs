//! Another QEMU for VMs that stay on their host: by the agent, from RAM of either kind, or by QEMU's
//! own migration to another QEMU next to it.

mod many;
mod one;

use lab_guest::orders::Orders;
use serde_json::{Value, json};

use super::contest::{add, failed, path, save, save_at, told, whole};
use super::goals::Goal;
use super::result::{Outcome, Run};
use super::{stolen, table};
use crate::contender::Mode;
use lab::error::{LabError, Result};
use lab::guest::GuestSpec;
use lab::setup::{self, Accelerator, Kit};

/// Its name: `make bench-NAME`.
pub const NAME: &str = "upgrade";
/// What it measures, for people.
pub const ABOUT: &str = "another QEMU in place: VMs of 1, 4 and 8 GiB, idle and writing, with RAM \
                         in files, QEMU's own, and by QEMU alone; 20 VMs at once";
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// The parts of a VM's RAM that hold content: what is copied, and then exists twice.
const FILLED: u64 = 3;
const OF: u64 = 4;
const WORKING_SET_BYTES: u64 = 128 * MIB;
/// What a VM that writes writes per second.
const RATE: u64 = 50_000_000;
/// The most that goes from one QEMU to the other where RAM stays where it is: the state of devices,
/// and small blocks of memory.
const DEVICES_BYTES_MAX: u64 = 2 * MIB;
/// Goals of a VM whose RAM could stay where it is, and of all VMs.
const SILENCE_MS_MAX: f64 = 50.0;
const TOTAL_S_MAX: f64 = 0.5;
const ALL_S_MAX: f64 = 15.0;

/// How a VM gets another QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// By the agent. Its RAM is in files that another QEMU could map.
    InFiles,
    /// By the agent. Its RAM is QEMU's own.
    Private,
    /// QEMU copies its RAM, over a unix socket.
    Qemu(Mode),
}

const WAYS: [Way; 4] =
    [Way::InFiles, Way::Private, Way::Qemu(Mode::Precopy), Way::Qemu(Mode::Multifd)];

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::InFiles => "in-files",
            Self::Private => "private",
            Self::Qemu(mode) => mode.name(),
        }
    }

    /// Fails for RAM that was copied though it could stay where it is: its figures would be those of
    /// another way. `bytes` went from one QEMU to the other, of so many VMs.
    fn check(self, bytes: u64, vms: u64) -> Result<()> {
        if self != Self::InFiles || bytes <= vms * DEVICES_BYTES_MAX {
            return Ok(());
        }
        let reason = format!("its RAM was copied: {bytes} bytes went to the other QEMU");
        Err(LabError::Migration { contender: self.name().to_owned(), reason })
    }

    /// Options of `droveway run`.
    fn options(self) -> &'static [&'static str] {
        if self == Self::InFiles { &["--hand-over"] } else { &[] }
    }
}

/// A VM that gets another QEMU twice: while it is idle, and while it writes.
struct Vm {
    name: &'static str,
    spec: GuestSpec,
    ram_bytes: u64,
    /// What it then writes per second.
    rate: u64,
}

/// A turn of a round.
enum Turn {
    One(Box<Vm>, Way),
    Many(Way),
}

impl Turn {
    /// The names of its results.
    fn names(&self) -> Vec<String> {
        match self {
            Self::One(vm, way) => {
                ["idle", "writing"].map(|load| format!("{}-{}-{load}", way.name(), vm.name)).into()
            }
            Self::Many(way) => vec![format!("{}-vms-{}", many::VMS, way.name())],
        }
    }

    /// Its results, in the order of their names.
    fn run(&self, kit: &Kit) -> Result<Vec<Run>> {
        match self {
            Self::One(vm, way) => one::run(kit, vm, *way),
            Self::Many(way) => many::run(kit, *way).map(|run| vec![run]),
        }
    }
}

/// Runs all turns `runs` times, every second round in reverse order, prints the course, and writes
/// the results so far after each. `only` names results; if it is empty, all are measured.
///
/// # Errors
/// If the lab itself fails; a VM that does not get another QEMU is a result.
pub fn run(kit: &Kit, runs: u32, only: &[String]) -> Result<Outcome> {
    println!("{NAME}: {ABOUT}");
    let with_kvm = setup::kvm_runs_bare(kit)?;
    let mut outcome = Outcome {
        scenario: NAME.to_owned(),
        guest: guest_json(),
        links: Value::Null,
        qemu: kit.qemu_version.to_string(),
        accel: kit.accelerator.to_string(),
        ..Outcome::default()
    };
    let part = format!("{NAME}-part");
    for nth in 1..=runs {
        let mut turns = turns(with_kvm);
        if nth.is_multiple_of(2) {
            // So that the order favours none.
            turns.reverse();
        }
        for turn in turns {
            let names = turn.names();
            if !only.is_empty() && !names.iter().any(|name| only.contains(name)) {
                continue;
            }
            let results = turn.run(kit);
            let results = results.unwrap_or_else(|error| vec![failed(&error); names.len()]);
            for (name, run) in names.into_iter().zip(results) {
                println!("  {nth}/{runs} {name:26} {}", told(&run));
                add(&mut outcome, name, run);
            }
            outcome.goals = goals(&outcome);
            save(&part, &outcome)?;
        }
    }
    println!("\n{}", table::markdown(&outcome));
    stolen::warn(&outcome);
    for goal in &outcome.goals {
        println!("{goal}");
    }
    // A partial run must not replace the results of a whole one.
    let path = if only.is_empty() { whole(NAME)? } else { path(&part) };
    save_at(&path, &outcome)?;
    println!("\n{}", path.display());
    Ok(outcome)
}

fn turns(with_kvm: bool) -> Vec<Turn> {
    let vms = || {
        let sizes = [("1G", GIB), ("4G", 4 * GIB), ("8G", 8 * GIB)];
        let sizes = sizes.into_iter().map(|(name, ram_bytes)| of_size(name, ram_bytes));
        sizes.chain(with_kvm.then(under_kvm))
    };
    // The ways take turns for each size.
    let each = WAYS.map(|way| vms().map(|vm| (vm, way)).collect::<Vec<_>>());
    let mut turns: Vec<(Vm, Way)> = each.into_iter().flatten().collect();
    turns.sort_by_key(|(vm, _)| vm.ram_bytes);
    let turns = turns.into_iter().map(|(vm, way)| Turn::One(Box::new(vm), way));
    turns.chain([Way::InFiles, Way::Private].map(Turn::Many)).collect()
}

fn of_size(name: &'static str, ram_bytes: u64) -> Vm {
    let orders = Orders {
        random_bytes: ram_bytes * FILLED / OF - WORKING_SET_BYTES,
        working_set_bytes: WORKING_SET_BYTES,
        seed: 14,
        ..Orders::default()
    };
    Vm { name, spec: GuestSpec::new("bench", name, orders), ram_bytes, rate: RATE }
}

/// Where KVM is nested and only emulates, it runs small guests without an operating system.
fn under_kvm() -> Vm {
    let orders = Orders {
        random_bytes: 2 * MIB,
        working_set_bytes: MIB,
        repeated: true,
        seed: 14,
        ..Orders::default()
    };
    let mut spec = GuestSpec::bare("bench", "32M", orders);
    spec.accelerator = Some(Accelerator::Kvm);
    Vm { name: "kvm", spec, ram_bytes: 32 * MIB, rate: 100_000 }
}

fn guest_json() -> Value {
    json!({
        "ram": ["1G", "4G", "8G"],
        "filled": FILLED as f64 / OF as f64,
        "working_set_bytes": WORKING_SET_BYTES,
        "writing_bytes_per_s": RATE,
        "vms_at_once": many::VMS,
    })
}

fn goals(outcome: &Outcome) -> Vec<Goal> {
    let goal = |goal: String, names: fn(&str) -> bool, figure: fn(&Run) -> f64, most: f64| {
        let those = outcome.contenders.iter().filter(|(name, _)| names(name));
        let runs: Vec<&Run> = those.flat_map(|(_, contender)| &contender.runs).collect();
        let has_failed = runs.iter().any(|run| !run.ok);
        let worst = runs.iter().filter(|run| run.ok).map(|run| figure(run)).reduce(f64::max);
        Goal {
            goal,
            reached: worst.map(|worst| worst <= most && !has_failed),
            detail: worst.map_or_else(String::new, |worst| format!("at most {worst:.2}")),
        }
    };
    let is_in_files: fn(&str) -> bool = |name| name.starts_with(Way::InFiles.name());
    vec![
        goal(
            format!("RAM in files: at most {SILENCE_MS_MAX:.0} ms of silence in every run"),
            is_in_files,
            |run| run.guest_gap_ms,
            SILENCE_MS_MAX,
        ),
        goal(
            format!("RAM in files: at most {TOTAL_S_MAX} s in every run"),
            is_in_files,
            |run| run.total_s,
            TOTAL_S_MAX,
        ),
        goal(
            format!("{} VMs: at most {ALL_S_MAX:.0} s in every run", many::VMS),
            |name| name.contains("-vms-"),
            |run| run.total_s,
            ALL_S_MAX,
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_has_all_ways_one_after_the_other() {
        let names: Vec<String> = turns(true).iter().flat_map(Turn::names).collect();
        assert_eq!(names.len(), 4 * WAYS.len() * 2 + 2);
        assert_eq!(names[0], "in-files-kvm-idle");
        assert_eq!(names[8..10], ["in-files-1G-idle", "in-files-1G-writing"]);
        assert_eq!(names[10], "private-1G-idle");
        assert_eq!(names.last().map(String::as_str), Some("20-vms-private"));
        assert_eq!(turns(false).len(), 3 * WAYS.len() + 2);
    }

    #[test]
    fn ram_that_was_copied_is_no_result_of_ram_in_files() {
        for (way, bytes, vms, is_right) in [
            (Way::InFiles, 464_000, 1, true),
            (Way::InFiles, 3 * MIB, 1, false),
            (Way::InFiles, 3 * MIB, 2, true),
            (Way::Private, GIB, 1, true),
            (Way::Qemu(Mode::Precopy), GIB, 1, true),
        ] {
            assert_eq!(way.check(bytes, vms).is_ok(), is_right, "{way:?} {bytes} {vms}");
        }
    }

    #[test]
    fn the_worst_run_counts_and_a_failed_one_misses() {
        let mut outcome = Outcome::default();
        let run = |guest_gap_ms, total_s| Run { ok: true, guest_gap_ms, total_s, ..Run::default() };
        add(&mut outcome, "in-files-1G-idle".to_owned(), run(20.0, 0.2));
        add(&mut outcome, "in-files-8G-writing".to_owned(), run(51.0, 0.3));
        add(&mut outcome, "private-8G-writing".to_owned(), run(500.0, 30.0));
        let reached = |outcome: &Outcome| -> Vec<_> {
            goals(outcome).iter().map(|goal| goal.reached).collect()
        };
        assert_eq!(reached(&outcome), [Some(false), Some(true), None]);
        assert_eq!(goals(&outcome)[0].detail, "at most 51.00");
        add(&mut outcome, "in-files-4G-idle".to_owned(), Run::default());
        add(&mut outcome, "20-vms-private".to_owned(), run(30.0, 9.0));
        assert_eq!(reached(&outcome), [Some(false), Some(false), Some(true)]);
    }
}
