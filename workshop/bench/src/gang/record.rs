//! Traces of the lab's own guests, which are booted one after the other and scanned.

use std::collections::HashMap;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use content::{Domain, Key, Name};
use qemu::machine::{self, Machine};
use qemu::ram_blocks::{RamBlocks, Reached};
use ram::DataRanges;
use simulator::{Trace, TracedVm};

use super::conditions::Conditions;
use super::scenarios;
use lab::error::{FileContext, LabError, Result, SystemContext};
use lab::guest::Guest;
use lab::hosts::{Hosts, Link, RUN_DIR};
use lab::setup::{self, Kit};

const PAGE_BYTES: u64 = 4096;
/// Pages that are read and compressed together: a batch of a lane.
const TOGETHER: u64 = 128;
/// The level that lanes use.
const ZSTD_LEVEL: i32 = 1;
/// Pages that differ in fewer bytes are nearly equal.
const NEAR_BYTES: usize = 512;
const MIB: f64 = 1048576.0;
/// When a VM is scanned again for what it has written, and when once more.
const SOON: Duration = Duration::from_secs(2);
const LATER: Duration = Duration::from_secs(20);
/// Longest time until QEMU has made its socket.
const MEET_MAX: Duration = Duration::from_secs(20);

/// Boots as many guests of the benchmark `gang-idle` as `conditions` say, and writes what they
/// contain.
///
/// # Errors
/// If a guest doesn't boot, or its memory can't be read.
pub fn record(path: &Path, conditions: &Conditions) -> Result<()> {
    let kit = setup::ensure()?;
    let hosts = Hosts::new(Link::unshaped())?;
    let mut looker = Looker::new(*conditions)?;
    let mut traced = Vec::new();
    for nth in 0..conditions.vms {
        let vm = looker.boot_and_look(&kit, &hosts, nth.into())?;
        println!("vm{}: {}", nth + 1, looker.seen);
        traced.push(vm);
    }
    let trace = Trace {
        grain_bytes: PAGE_BYTES,
        encoded_bytes: looker.encoded_bytes,
        alone_bytes: looker.alone_bytes,
        vms: traced,
    };
    let text = serde_json::to_vec(&trace).map_err(|error| LabError::Unsupported(error.to_string()));
    std::fs::write(path, text?).at("write", path)
}

/// The compressed size of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Size {
    together: u32,
    alone: u32,
}

struct Looker {
    conditions: Conditions,
    key: Key,
    /// Numbers of contents, in the order of discovery; 0 is no content.
    numbers: HashMap<Name, u64>,
    /// Compressed sizes by number, from 1 on: here with neighbours, below without.
    encoded_bytes: Vec<u32>,
    alone_bytes: Vec<u32>,
    compressor: zstd::bulk::Compressor<'static>,
    /// Pages of the first VM, by index, that others are compared with.
    first: HashMap<usize, Box<[u8]>>,
    /// Pages of the last VM.
    seen: Seen,
    /// Writes of the first VM; the others are taken to write the same.
    written: Written,
}

/// Writes of an idle VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Written {
    bytes_per_s: u64,
    working_set_bytes: u64,
}

impl Written {
    fn watch(machine: &Machine, conditions: Conditions) -> Result<Self> {
        let mut looker = Looker::new(conditions)?;
        let before = looker.look(machine)?;
        let mut changed_after = |wait: Duration| {
            std::thread::sleep(wait);
            let now = looker.look(machine)?;
            let pages = before.contents.iter().zip(&now.contents);
            let pages = pages.filter(|(before, now)| before != now).count();
            Ok::<u64, LabError>(pages as u64 * PAGE_BYTES)
        };
        let soon_bytes = changed_after(SOON)?;
        let bytes_per_s = soon_bytes / SOON.as_secs();
        Ok(Self { bytes_per_s, working_set_bytes: changed_after(LATER)?.max(soon_bytes) })
    }
}

/// Pages of one VM, counted by whether others have them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    in_use: u64,
    /// An earlier VM has the same page, anywhere.
    known: u64,
    /// No earlier VM has it, but the first one has nearly the same in the same place.
    near: u64,
}

impl std::fmt::Display for Seen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [in_use, known, near] =
            [self.in_use, self.known, self.near].map(|pages| (pages * PAGE_BYTES) as f64 / MIB);
        write!(f, "{in_use:.1} MiB in use, {known:.1} of them as in another VM before")?;
        write!(f, ", {near:.1} nearly as in the first one")
    }
}

impl Looker {
    fn new(conditions: Conditions) -> Result<Self> {
        let key = Key::new(b"", &Domain::default());
        Ok(Self {
            conditions,
            key,
            numbers: HashMap::new(),
            encoded_bytes: Vec::new(),
            alone_bytes: Vec::new(),
            compressor: zstd::bulk::Compressor::new(ZSTD_LEVEL).doing("compress")?,
            first: HashMap::new(),
            seen: Seen::default(),
            written: Written::default(),
        })
    }

    fn boot_and_look(&mut self, kit: &Kit, hosts: &Hosts, nth: u64) -> Result<TracedVm> {
        let all = scenarios::all();
        let idle = all.first().ok_or_else(|| LabError::Missing { what: "VMs".to_owned() })?;
        let spec = idle.guest(&self.conditions, nth);
        let (argv, socket) = (spec.argv(kit, &kit.qemu), format!("{}.own", spec.name));
        let guest = Guest::listen(spec, &hosts.a)?;
        let mut command = hosts.a.command(&argv[0]);
        command.args(&argv[1..]);
        command.args(["-qmp", &format!("unix:{RUN_DIR}/{socket},server=on,wait=off")]);
        let silent = command.stdin(Stdio::null()).stdout(Stdio::null());
        let mut child = silent.spawn().doing("start QEMU")?;
        let looked = guest.wait_boot(&hosts.a).and_then(|()| {
            let machine = meet(&hosts.a.run_dir, &socket)?;
            let looked = self.look(&machine).and_then(|vm| {
                if nth == 0 {
                    self.written = Written::watch(&machine, self.conditions)?;
                }
                let Written { bytes_per_s, working_set_bytes } = self.written;
                Ok(TracedVm { dirty_bytes_per_s: bytes_per_s, working_set_bytes, ..vm })
            });
            machine.quit().map_err(|error| LabError::Unsupported(error.to_string()))?;
            looked
        });
        if looked.is_err() {
            // QEMU may have ended already.
            let _ = child.kill();
        }
        // `quit` may have waited for it already.
        let _ = child.wait();
        looked
    }

    fn look(&mut self, machine: &Machine) -> Result<TracedVm> {
        let ram = RamBlocks::of(machine);
        if ram.reached.is_empty() {
            return Err(LabError::Unsupported(ram.notes.join("; ")));
        }
        let (known, mut contents) = (self.numbers.len() as u64, Vec::new());
        self.seen = Seen::default();
        for block in &ram.reached {
            self.look_at(block, known, &mut contents)?;
        }
        Ok(TracedVm { contents, dirty_bytes_per_s: 0, working_set_bytes: 0 })
    }

    /// Scans a block; numbers up to `known` are content of earlier VMs.
    fn look_at(&mut self, block: &Reached, known: u64, contents: &mut Vec<u64>) -> Result<()> {
        let wrong = |error: ram::RamError| LabError::Unsupported(error.to_string());
        let first = contents.len();
        let pages = usize::try_from(block.bytes / PAGE_BYTES).unwrap_or(usize::MAX);
        contents.resize(first + pages, 0);
        let ranges = match block.mapping.data_ranges().map_err(wrong)? {
            DataRanges::Known(ranges) => ranges,
            DataRanges::Unknown => std::iter::once(0..block.bytes).collect(),
        };
        let mut bytes = vec![0; usize::try_from(TOGETHER * PAGE_BYTES).unwrap_or_default()];
        for range in ranges {
            let mut at = range.start;
            while at + PAGE_BYTES <= range.end {
                let count = ((range.end - at) / PAGE_BYTES).min(TOGETHER) * PAGE_BYTES;
                let into = &mut bytes[..usize::try_from(count).unwrap_or_default()];
                block.mapping.read(at, into).map_err(wrong)?;
                let page = first + usize::try_from(at / PAGE_BYTES).unwrap_or(usize::MAX);
                let sizes = self.encoded_bytes_of(into)?;
                let pages = into.chunks_exact(lab_guest::PAGE_BYTES).zip(sizes);
                for ((at, number), (page, size)) in (page..).zip(&mut contents[page..]).zip(pages) {
                    *number = self.number(page, size);
                    self.see(*number, known, at, page);
                }
                at += count;
            }
        }
        Ok(())
    }

    /// Compressed sizes of these pages: they are compressed together, and the result is divided in
    /// proportion to what each takes alone.
    fn encoded_bytes_of(&mut self, pages: &[u8]) -> Result<Vec<Size>> {
        let mut encoded_bytes = |bytes: &[u8]| -> Result<usize> {
            if bytes.is_empty() || is_zero(bytes) {
                return Ok(0);
            }
            let encoded = self.compressor.compress(bytes).doing("compress")?;
            Ok(encoded.len().min(bytes.len()))
        };
        let each = pages.chunks_exact(lab_guest::PAGE_BYTES);
        let alone: Vec<usize> = each.clone().map(&mut encoded_bytes).collect::<Result<_>>()?;
        let bodies: Vec<u8> = each.filter(|page| !is_zero(page)).flatten().copied().collect();
        let part = encoded_bytes(&bodies)? as f64 / alone.iter().sum::<usize>().max(1) as f64;
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "at most a page's bytes, or a little more"
        )]
        let size = |alone: usize| Size {
            together: (alone as f64 * part).round() as u32,
            alone: u32::try_from(alone).unwrap_or(u32::MAX),
        };
        Ok(alone.into_iter().map(size).collect())
    }

    fn see(&mut self, number: u64, known: u64, at: usize, page: &[u8]) {
        self.seen.in_use += u64::from(number != 0);
        if (1..=known).contains(&number) {
            self.seen.known += 1;
        } else if let Some(first) = self.first.get(&at).filter(|_| number != 0) {
            let other = page.iter().zip(first).filter(|(one, other)| one != other).count();
            self.seen.near += u64::from(other < NEAR_BYTES);
        }
        if known == 0 && number != 0 {
            self.first.insert(at, page.into());
        }
    }

    fn number(&mut self, page: &[u8], size: Size) -> u64 {
        if is_zero(page) {
            return 0;
        }
        let next = self.numbers.len() as u64 + 1;
        *self.numbers.entry(self.key.name(page)).or_insert_with(|| {
            self.encoded_bytes.push(size.together);
            self.alone_bytes.push(size.alone);
            next
        })
    }
}

fn is_zero(page: &[u8]) -> bool {
    page.iter().all(|byte| *byte == 0)
}

fn meet(run_dir: &Path, socket: &str) -> Result<Machine> {
    let until = Instant::now() + MEET_MAX;
    loop {
        match machine::attach(&run_dir.join(socket), run_dir) {
            Ok(machine) => return Ok(machine),
            Err(error) if Instant::now() > until => {
                return Err(LabError::Qmp { command: "hello".into(), answer: error.to_string() });
            }
            // QEMU has not made its socket yet.
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ram::Mapping;

    use super::*;

    #[test]
    fn equal_pages_have_one_number_and_empty_ones_have_none() {
        let mapping = Arc::new(Mapping::own(600 * PAGE_BYTES));
        let put = |page: u64, byte| mapping.fill(page * PAGE_BYTES, PAGE_BYTES, byte).unwrap();
        for (page, byte) in [(1, 7), (2, 0), (300, 9), (599, 7)] {
            put(page, byte);
        }
        let block = Reached {
            name: "ram".to_owned(),
            bytes: 600 * PAGE_BYTES,
            mapping: mapping.clone(),
            may_be_unplugged: false,
        };
        let mut looker = Looker::new(Conditions::default()).unwrap();
        let mut contents = vec![5];
        looker.look_at(&block, 0, &mut contents).unwrap();
        let named: Vec<(usize, u64)> =
            contents.into_iter().enumerate().filter(|(_, number)| *number != 0).collect();
        assert_eq!(named, [(0, 5), (2, 1), (301, 2), (600, 1)]);
        // Pages of one repeated byte compress to next to nothing.
        assert_eq!(looker.encoded_bytes.len(), 2);
        assert!(looker.encoded_bytes.iter().all(|bytes| (1..100).contains(bytes)));
        assert_eq!(looker.seen, Seen { in_use: 3, known: 0, near: 0 });
        // The next VM has a page as before, one elsewhere, one that is nearly the same, and one
        // that is not.
        let change = |page: u64, bytes| mapping.fill(page * PAGE_BYTES, bytes, 1).unwrap();
        put(5, 9);
        change(300, NEAR_BYTES as u64 - 1);
        change(599, NEAR_BYTES as u64);
        (looker.seen, contents) = (Seen::default(), vec![5]);
        looker.look_at(&block, 2, &mut contents).unwrap();
        assert_eq!(looker.seen, Seen { in_use: 4, known: 2, near: 1 });
    }
}
