//! `field [RELEASE] [PART OF A NAME]...`: moves a Debian as people have it, bookworm unless another
//! release is named, has its owner and itself do what they do, and prints a table of what came of
//! it. It keeps results, tries what is missing or has failed, and ends after 40 minutes; the next
//! run goes on. With parts of names it tries only rows that have one of them, but those in any case.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use end_to_end::field::{self, DEVICE_ROWS, Field, ROWS, Results, Row, START_AGAIN, WAYS, Way};
use lab::field::{Machine, Snapshot};
use lab::setup::Release;
use lab::{agent, program};

const RUN_MAX: Duration = Duration::from_secs(40 * 60);
const DEPTHS: [u32; 3] = [1, 2, 3];

fn main() -> ExitCode {
    let mut parts: Vec<String> = std::env::args().skip(1).collect();
    let named = parts.first().and_then(|first| Release::named(first));
    let release = match named {
        Some(release) => {
            parts.remove(0);
            release
        }
        None => Release::Bookworm,
    };
    let started = Instant::now();
    let snapshots =
        [Machine::Virtio, Machine::Devices].map(|machine| field::snapshot(release, machine));
    let [virtio, devices] = match snapshots {
        [Ok(virtio), Ok(devices)] => [virtio, devices],
        [Err(error), _] | [_, Err(error)] => {
            eprintln!("field: {error}");
            return ExitCode::FAILURE;
        }
    };
    let version = program::output(std::process::Command::new(agent::binary()).arg("--version"));
    let version = version.unwrap_or_default();
    let key =
        format!("Debian {} in QEMU {}, {}", release.number(), virtio.qemu.version, version.trim());
    let results = Results::new(target().join("field/results"), key);
    let of_virtio: Vec<&Row> = ROWS.iter().chain([&START_AGAIN]).collect();
    let of_devices: Vec<&Row> = DEVICE_ROWS.iter().collect();
    let mut is_whole = true;
    let machines = [(&virtio, of_virtio.as_slice()), (&devices, of_devices.as_slice())];
    // First what takes seconds, everywhere.
    let columns = DEPTHS.into_iter().flat_map(|moves| WAYS.map(|way| (way, moves)));
    let columns: Vec<(Way, u32)> = columns.collect();
    for (boots, (way, moves)) in [false, true]
        .into_iter()
        .flat_map(|boots| columns.iter().map(move |column| (boots, *column)))
    {
        let chosen = |row: &&Row| {
            row.boots == boots
                && if parts.is_empty() {
                    !results.of(way, moves, row).is_some_and(|cell| cell.lives)
                } else {
                    parts.iter().any(|part| row.name.contains(part))
                }
        };
        for (snapshot, rows) in machines {
            let due: Vec<&Row> = rows.iter().copied().filter(chosen).collect();
            is_whole &= run(snapshot, way, moves, &due, &results, started);
        }
    }
    if started.elapsed() > RUN_MAX {
        println!("field: 40 minutes are over; run it again for what is missing");
    }
    let rows = [of_virtio, of_devices].concat();
    println!("{}", results.table(&rows, &DEPTHS));
    if is_whole { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Tries rows one after the other, with a new VM after one that has failed. Returns whether all
/// went well.
fn run(
    snapshot: &Snapshot,
    way: Way,
    moves: u32,
    rows: &[&Row],
    results: &Results,
    started: Instant,
) -> bool {
    let (mut vm, mut all_live) = (None, true);
    for row in rows {
        if started.elapsed() > RUN_MAX {
            return false;
        }
        let began = Instant::now();
        let tried = catch_unwind(AssertUnwindSafe(|| {
            let vm = vm.get_or_insert_with(|| Field::moved(snapshot, way, moves));
            vm.run(row)
        }));
        let done = tried.unwrap_or_else(|panic| Err(message(&*panic)));
        let lives = done.is_ok();
        let detail = done.unwrap_or_else(|why| why);
        let shown = if lives { "lives" } else { "FAILS" };
        let seconds = began.elapsed().as_secs();
        println!("{}, {moves}: {}: {shown} ({seconds} s) {detail}", way.name(), row.name);
        results.keep(way, moves, row, lives, detail);
        if !lives {
            all_live = false;
            // What is broken may break its end, too.
            let _ = catch_unwind(AssertUnwindSafe(|| drop(vm.take())));
        }
    }
    all_live
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic").trim().to_owned()
}

/// Cargo's output directory, in which this program is.
fn target() -> PathBuf {
    let here = std::env::current_exe().unwrap_or_default();
    here.ancestors().nth(2).map(PathBuf::from).unwrap_or_default()
}
