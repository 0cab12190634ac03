//! The cost of the guest helper: time and CPU to find which of the guest's memory is a copy of its
//! disk, for one big file and for many small ones.

use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use cachemap::{Budget, CacheMap};
use lab_guest::cache::{Layout, Use};
use lab_guest::orders::Orders;
use qemu::guest_port::{self, Patience};
use serde::{Deserialize, Serialize};

use super::files::Files;
use crate::contest::{path, save_at};
use crate::result::median;
use lab::error::{LabError, Result, SystemContext};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::{Hosts, Link, RUN_DIR, Storage};
use lab::setup::{self, Kit};

/// Its name: `make bench-NAME`.
pub const NAME: &str = "cache-helper";
/// What it measures, for people.
pub const ABOUT: &str = "what the guest's helper takes per GiB of page cache: one file of 400 MB, \
                         100,000 of 4 KiB";
const RAM_BYTES: u64 = 768 << 20;
/// 100,000 pages: with the kernel's structures for as many files, all the memory of this guest.
const CACHED_BYTES: u64 = 100_000 * 4096;
const SEED: u64 = 12;
/// Frequent beats would take CPU, too.
const TICK_MS: u64 = 20;
const SOCKET: &str = "helper.port";
/// Time for a booted guest to settle.
const SETTLE: Duration = Duration::from_secs(2);
const LONG: Duration = Duration::from_secs(120);
const GIB: f64 = (1_u64 << 30) as f64;

/// One answer of the helper.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// Which files: `one-file` or `small-files`.
    pub files: String,
    /// The helper's CPU limit, in percent of a CPU.
    pub cpu_percent: u16,
    /// Pages in the answer.
    pub pages: u64,
    /// Runs of pages that follow each other.
    pub runs: u64,
    /// From the question to the end of the answer, measured outside the guest.
    pub time_s: f64,
    /// CPU time in the guest, as the helper reports it.
    pub cpu_s: f64,
    /// How it ended.
    pub summary: String,
}

impl Answer {
    /// Seconds and CPU seconds per GiB of the answer.
    fn per_gib(&self) -> (f64, f64) {
        let gib = (self.pages as f64 * lab_guest::PAGE_BYTES as f64 / GIB).max(1e-9);
        (self.time_s / gib, self.cpu_s / gib)
    }
}

/// Asks the helpers of two guests `runs` times, prints the figures and writes them.
///
/// # Errors
/// If the lab fails, or a helper doesn't answer.
pub fn run(kit: &Kit, runs: u32) -> Result<()> {
    println!("{NAME}: {ABOUT}");
    let mut answers = Vec::new();
    for (name, kind) in [("one-file", Use::Big), ("small-files", Use::Small)] {
        let layout = Layout { kind, cached_bytes: CACHED_BYTES, seed: SEED };
        let asked = Asked::boot(kit, &layout)?;
        for nth in 1..=runs {
            // With all of a CPU, and with the limit that a migration sets.
            for cpu_percent in [100, Budget::default().cpu_percent] {
                let answer = asked.ask(name, cpu_percent)?;
                println!("  {nth}/{runs} {name}, at most {cpu_percent} %: {}", answer.summary);
                answers.push(answer);
            }
        }
    }
    println!("\n{}", markdown(&answers));
    let path = path(NAME);
    save_at(&path, &answers)?;
    println!("{}", path.display());
    Ok(())
}

/// A guest whose helper has a port of its own. Dropping it ends it.
struct Asked {
    guest: Guest,
    qemu: Child,
    hosts: Hosts,
    _storage: Storage,
}

impl Asked {
    fn boot(kit: &Kit, layout: &Layout) -> Result<Self> {
        let files = Files::make(layout)?;
        let hosts = Hosts::new(Link::unshaped())?;
        let storage = Storage::join(&hosts)?;
        storage.serve(&files.image(), None)?;
        let orders = Orders {
            seed: layout.seed,
            cache: layout.kind,
            cache_bytes: layout.cached_bytes,
            tick_ms: TICK_MS,
            ..Orders::default()
        };
        let mut spec = GuestSpec::new("bench", &format!("{}M", RAM_BYTES >> 20), orders);
        spec.initrd = Some(setup::helper_initrd(kit)?);
        spec.extra.extend(Storage::arguments());
        spec.extra.extend(port());
        let argv = spec.argv(kit, &kit.qemu);
        let mut command = hosts.a.command(&argv[0]);
        let qemu = command.args(&argv[1..]).stdin(Stdio::null()).spawn().doing("start QEMU")?;
        let guest = Guest::listen(spec, &hosts.a)?;
        let asked = Self { guest, qemu, hosts, _storage: storage };
        asked.guest.wait_boot(&asked.hosts.a)?;
        thread::sleep(SETTLE);
        Ok(asked)
    }

    fn ask(&self, files: &str, cpu_percent: u16) -> Result<Answer> {
        let map = |stream: &UnixStream| {
            let budget = Budget { cpu_percent, time_ms: 60_000, ..Budget::default() };
            let patience = Patience { greeting: LONG, all: LONG };
            guest_port::query(stream, guest_port::limits(RAM_BYTES), budget, patience)
        };
        let socket = self.hosts.a.run_dir.join(SOCKET);
        let began = Instant::now();
        let map = guest_port::connect(&socket).and_then(|stream| map(&stream));
        let map = map.map_err(|error| LabError::Guest {
            command: "which memory is a copy".to_owned(),
            answer: error.to_string(),
        })?;
        Ok(answer(files, cpu_percent, &map, began.elapsed()))
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

/// The helper's port, as `droveway run` adds it.
fn port() -> Vec<String> {
    let socket = format!("socket,id=helper,path={RUN_DIR}/{SOCKET},server=on,wait=off");
    let port = format!("virtserialport,chardev=helper,name={}", guest_port::PORT_NAME);
    ["-device", "virtio-serial-pci", "-chardev", &socket, "-device", &port]
        .map(str::to_owned)
        .to_vec()
}

fn answer(files: &str, cpu_percent: u16, map: &CacheMap, time: Duration) -> Answer {
    let summary = map.summary();
    Answer {
        files: files.to_owned(),
        cpu_percent,
        pages: map.pages(),
        runs: map.runs().len() as u64,
        time_s: time.as_secs_f64(),
        cpu_s: summary.cpu_ms as f64 / 1e3,
        summary: summary.to_string(),
    }
}

/// Medians, by files and CPU limit.
fn markdown(answers: &[Answer]) -> String {
    let mut text =
        "| files | CPU at most % | asked | cached MiB | runs | s per GiB | CPU s per GiB |\n\
                    | --- | --- | --- | --- | --- | --- | --- |\n"
            .to_owned();
    let mut rows: Vec<(&str, u16)> =
        answers.iter().map(|answer| (answer.files.as_str(), answer.cpu_percent)).collect();
    rows.sort_unstable();
    rows.dedup();
    for (files, cpu_percent) in rows {
        let is_it = |answer: &&Answer| answer.files == files && answer.cpu_percent == cpu_percent;
        let these: Vec<&Answer> = answers.iter().filter(is_it).collect();
        let of = |figure: fn(&Answer) -> f64| median(these.iter().map(|one| figure(one)).collect());
        text += &format!(
            "| {files} | {cpu_percent} | {} | {:.0} | {:.0} | {:.2} | {:.2} |\n",
            these.len(),
            of(|one| one.pages as f64 / 256.0),
            of(|one| one.runs as f64),
            of(|one| one.per_gib().0),
            of(|one| one.per_gib().1),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_medians_for_each_gib() {
        let answer = |time_s, cpu_percent| Answer {
            files: "one-file".to_owned(),
            cpu_percent,
            pages: 65_536,
            runs: 3,
            time_s,
            cpu_s: time_s / 2.0,
            ..Answer::default()
        };
        let text = markdown(&[answer(1.0, 50), answer(2.0, 50), answer(3.0, 50), answer(9.0, 100)]);
        assert!(text.contains("| one-file | 50 | 3 | 256 | 3 | 8.00 | 4.00 |"), "{text}");
        assert!(text.contains("| one-file | 100 | 1 | 256 | 3 | 36.00 | 18.00 |"), "{text}");
    }
}
