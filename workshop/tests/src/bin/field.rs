//! `field [RELEASE] [PART OF A NAME]...`: moves a Debian as people have it, bookworm unless another
//! release is named, has its owner and itself do what they do, and prints a table of what came of
//! it. It keeps results, tries what is missing or has failed, and ends after 40 minutes; the next
//! run goes on, or starts anew if `droveway` is another build. With parts of names it tries only
//! rows that have one of them, but those in any case. The environment variable `TOGETHER` sets how
//! many VMs run at a time, and `WAY` how the names of the columns start that are tried:
//! `WAY=carried`, `WAY="own, classic"`. `HOSTS=packages` tries the columns of agents between hosts
//! that boot a system with the agent's package; they have a table of their own.

use std::any::Any;
use std::collections::VecDeque;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use end_to_end::field::{self, Moved, Mover, ROWS, Results, Row, WAYS, Way};
use lab::error::LabError;
use lab::field::{Machine, Snapshot};
use lab::setup::{Kit, Release};
use lab::{agent, program};

/// Nothing is started after that, so that all has ended after 40 minutes.
const START_MAX: Duration = Duration::from_secs(38 * 60);
const DEPTHS: [u32; 3] = [1, 2, 3];
/// Digits of a build's checksum in the table.
const SUM_SHOWN: usize = 12;
/// Rows before which the VM moves, and after which it is checked, once: a run that is killed loses
/// the results of so many, and where the check fails, so many are tried again. Those of a q35 with
/// virtio devices take two turns, those of other machines one.
const UNCHECKED_MAX: usize = 14;

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
    match run(release, &parts) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("field: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(release: Release, parts: &[String]) -> Result<ExitCode, LabError> {
    let started = Instant::now();
    let kit = lab::setup::ensure()?;
    let root = root(&kit)?;
    let root = root.as_deref();
    let chosen = |row: &&Row| {
        row.lacks(root).is_none()
            && (parts.is_empty() || parts.iter().any(|part| row.name.contains(part)))
    };
    let rows: Vec<&Row> = ROWS.iter().filter(chosen).collect();
    // QEMU alone needs no package.
    let columns = WAYS.into_iter().filter(|way| root.is_none() || way.mover != Mover::Qemu);
    let columns: Vec<Way> = columns.collect();
    let start = std::env::var("WAY").unwrap_or_default();
    let is_named = |way: &Way| way.name().starts_with(&start);
    let ways: Vec<Way> = columns.iter().copied().filter(is_named).collect();
    if rows.is_empty() || ways.is_empty() {
        eprintln!("field: no column, or no row that can be tried here, has such a name");
        return Ok(ExitCode::FAILURE);
    }
    let qemu = kit.own_qemu().version;
    let droveway = root.map_or_else(agent::binary, |root| root.join("usr/bin/droveway"));
    let build = build(&droveway)?;
    let (suffix, origin) = root.map_or(("", ""), |_| ("-packages", ", each from its package"));
    let number = release.number();
    // Results of a guest with less to lose don't count.
    let key = format!("Debian {number} with PostgreSQL in QEMU {qemu}, {build}{origin}");
    let home = target().join("field").join(format!("{release}{suffix}"));
    let results = Results::new(home.join("results"), key, columns, root.map(Path::to_owned));
    let mut work = VecDeque::new();
    let mut snapshots = Vec::new();
    for machine in Machine::ALL {
        if rows.iter().any(|row| row.machine == Some(machine)) {
            snapshots.push(Some(field::snapshot(release, machine)?));
        }
    }
    if rows.iter().any(|row| row.machine.is_none()) {
        // Before several threads need it.
        lab::setup::libvirt(&kit)?;
        snapshots.push(None);
    }
    // First one move and what takes seconds, everywhere; of that the machine with most rows, so
    // that no VM goes through all of them alone at the end, when a core idles.
    for moves in DEPTHS {
        for boots in [false, true] {
            for snapshot in &snapshots {
                for &way in &ways {
                    let due = |row: &&&Row| {
                        row.machine == snapshot.as_ref().map(|snapshot| snapshot.machine)
                            && row.boots == boots
                            && (results.is_due(way, moves, row)
                                || (!parts.is_empty() && row.is_tried(way)))
                    };
                    let rows: Vec<&Row> = rows.iter().filter(due).copied().collect();
                    if !rows.is_empty() {
                        let snapshot = snapshot.as_ref();
                        work.push_back(Column { snapshot, root, way, moves, rows });
                    }
                }
            }
        }
    }
    let lab = Lab {
        results: &results,
        started,
        table: home.join("table.md"),
        all_live: AtomicBool::new(true),
    };
    let work = Mutex::new(work);
    let take = || work.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    // One more than there are cores: VMs wait for their guests now and then.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let together = std::env::var("TOGETHER").ok().and_then(|text| text.parse().ok());
    let together: usize = together.unwrap_or(cores + 1);
    std::thread::scope(|scope| {
        for _ in 0..together {
            scope.spawn(|| {
                while let Some(column) = take() {
                    lab.go_through(&column);
                }
            });
        }
    });
    let due = results.due(&rows, &ways, &DEPTHS);
    if due > 0 && lab.is_late() {
        println!("field: the time is over; run it again for {due} missing or failed results");
    }
    println!("\n{}", lab.keep_table());
    // Rows that were named may have earlier results.
    let is_done = due == 0 && (parts.is_empty() || !lab.is_late());
    let all_live = lab.all_live.load(Ordering::Relaxed);
    Ok(if is_done && all_live { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Rows of one VM that moves in one way so many times.
struct Column<'r> {
    /// None of a libvirt domain.
    snapshot: Option<&'r Snapshot>,
    /// Of its hosts, if they have packages.
    root: Option<&'r Path>,
    way: Way,
    moves: u32,
    rows: Vec<&'r Row>,
}

struct Lab<'r> {
    results: &'r Results,
    started: Instant,
    /// The table as it is so far, for whoever ends a run.
    table: PathBuf,
    all_live: AtomicBool,
}

impl Lab<'_> {
    fn is_late(&self) -> bool {
        self.started.elapsed() > START_MAX
    }

    /// Rows after which the guest goes on are tried some together. For each of the others the VM
    /// moves anew.
    fn go_through(&self, column: &Column<'_>) {
        let boots = column.rows.iter().any(|row| row.boots);
        let size = if boots { 1 } else { UNCHECKED_MAX };
        let mut vm = None;
        for rows in column.rows.chunks(size) {
            self.try_together(column, &mut vm, rows);
        }
        end(&mut vm);
        self.keep_table();
    }

    /// The same with a new VM.
    fn try_anew(&self, column: &Column<'_>, rows: &[&Row]) {
        let mut vm = None;
        self.try_together(column, &mut vm, rows);
        end(&mut vm);
    }

    /// Moves the VM, or a new one, tries rows one after the other, and then checks it once. If a
    /// row fails, or the VM isn't well, what is not known to be its cause is tried once more. A row
    /// has failed for good if it was the first one that its VM went through.
    fn try_together(&self, column: &Column<'_>, vm: &mut Option<Moved>, rows: &[&Row]) {
        if self.is_late() || rows.is_empty() {
            return;
        }
        let is_new = vm.is_none();
        let mut began = Instant::now();
        let mut arrived = guarded(|| move_on(column, vm));
        let mut tried = Vec::new();
        for (nth, row) in rows.iter().enumerate() {
            if self.is_late() {
                break;
            }
            let act = |()| guarded(|| vm.as_mut().expect("it has moved").does(row));
            match std::mem::replace(&mut arrived, Ok(())).and_then(act) {
                Ok(detail) => tried.push((*row, detail, began.elapsed())),
                Err(why) => {
                    end(vm);
                    if nth == 0 && is_new {
                        self.keep(column, row, false, why, began.elapsed());
                    } else {
                        self.note(column, row.name, &why);
                        self.try_anew(column, &rows[..nth]);
                        self.try_anew(column, &rows[nth..=nth]);
                    }
                    return self.try_together(column, vm, &rows[nth + 1..]);
                }
            }
            began = Instant::now();
        }
        match guarded(|| vm.as_ref().map_or(Ok(()), Moved::lives)) {
            Ok(()) => {
                for (row, detail, took) in tried {
                    self.keep(column, row, true, detail, took);
                }
            }
            Err(why) => {
                end(vm);
                match tried[..] {
                    [(row, ..)] if is_new => {
                        self.keep(column, row, false, why, began.elapsed());
                    }
                    [(row, ..)] => {
                        self.note(column, row.name, &why);
                        self.try_anew(column, &[row]);
                    }
                    _ => {
                        let names: Vec<&str> = tried.iter().map(|(row, ..)| row.name).collect();
                        self.note(column, &names.join(", "), &why);
                        let (first, second) = rows.split_at(rows.len() / 2);
                        self.try_anew(column, first);
                        self.try_anew(column, second);
                    }
                }
            }
        }
    }

    /// Reports a failure of rows that are tried once more: the table shows it whatever comes of that.
    fn note(&self, column: &Column<'_>, rows: &str, why: &str) {
        let way = column.way.name();
        println!("{way}, {}: {rows}: failed, and is tried once more: {why}", column.moves);
        self.results.note(column.way, column.moves, rows, why);
        self.all_live.store(false, Ordering::Relaxed);
    }

    fn keep(&self, column: &Column<'_>, row: &Row, lives: bool, detail: String, took: Duration) {
        let shown = if lives { "lives" } else { "FAILS" };
        let (way, seconds) = (column.way.name(), took.as_secs());
        println!("{way}, {}: {}: {shown} ({seconds} s) {detail}", column.moves, row.name);
        self.results.keep(column.way, column.moves, row, lives, detail);
        self.all_live.fetch_and(lives, Ordering::Relaxed);
    }

    fn keep_table(&self) -> String {
        let table = self.results.table(&ROWS, &DEPTHS);
        // It is printed as well.
        let _ = fs::write(&self.table, &table);
        table
    }
}

/// Moves the VM of a column as often as it must, or a new one.
fn move_on(column: &Column<'_>, vm: &mut Option<Moved>) -> Result<(), String> {
    match vm {
        Some(vm) => vm.move_on(column.moves),
        None => *vm = Some(Moved::new(column.snapshot, column.root, column.way, column.moves)),
    }
    Ok(())
}

/// Ends a VM; what is broken may break its end, too.
fn end(vm: &mut Option<Moved>) {
    let _ = guarded(|| {
        drop(vm.take());
        Ok(())
    });
}

fn guarded<T>(run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| Err(message(&*panic)))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic").trim().to_owned()
}

/// The root of hosts that `HOSTS` names, with the package of `make packages`; none of namespaces.
fn root(kit: &Kit) -> Result<Option<PathBuf>, LabError> {
    match std::env::var("HOSTS").unwrap_or_default().as_str() {
        "" => Ok(None),
        "packages" => lab::setup::host_root(kit, &package()?).map(Some),
        other => Err(LabError::Unsupported(format!("HOSTS={other}: there are only packages"))),
    }
}

/// The agent's Debian package.
fn package() -> Result<PathBuf, LabError> {
    let packages = target().join("packages");
    let mut files = fs::read_dir(&packages).into_iter().flatten().flatten();
    let is_it = |name: &str| name.starts_with("droveway_") && name.ends_with(".deb");
    let found = files.find(|file| file.file_name().to_str().is_some_and(is_it));
    found.map(|file| file.path()).ok_or_else(|| {
        let place = packages.display();
        LabError::Unsupported(format!("there is no package in {place}: run `make packages`"))
    })
}

/// A `droveway`'s version and what tells it from others of that version: results of another build
/// don't count.
fn build(droveway: &Path) -> Result<String, LabError> {
    let version = program::output(Command::new(droveway).arg("--version"))?;
    let sum = program::output(Command::new("sha256sum").arg(droveway))?;
    let start: String = sum.chars().take(SUM_SHOWN).collect();
    Ok(format!("{} (build {start})", version.trim()))
}

/// Cargo's output directory, in which this program is.
fn target() -> PathBuf {
    let here = std::env::current_exe().unwrap_or_default();
    here.ancestors().nth(2).map(PathBuf::from).unwrap_or_default()
}
