//! Traces of the lab's own guests: booted one after the other, and looked at.

use std::collections::HashMap;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use content::{Domain, Key, Name};
use qemu::machine::{self, Machine};
use qemu::ram_blocks::{RamBlocks, Reached};
use ram::DataRanges;

use super::trace::{Trace, TracedVm};
use crate::bench::gang::scenarios;
use crate::error::{FileContext, LabError, Result, SystemContext};
use crate::guest::{Guest, GuestSpec};
use crate::hosts::{Hosts, Link, RUN_DIR};
use crate::setup::{self, Kit};

const PAGE_BYTES: u64 = 4096;
/// Pages that are read together, and compressed: a batch of a lane.
const TOGETHER: u64 = 128;
/// As lanes compress.
const ZSTD_LEVEL: i32 = 1;
/// What QEMU takes to make its socket.
const MEET_MAX: Duration = Duration::from_secs(20);

/// Boots so many guests of the benchmark `gang-idle`, and writes what they contain.
///
/// # Errors
/// If a guest doesn't come up, or its memory can't be read.
pub fn record(path: &Path, vms: usize) -> Result<()> {
    let kit = setup::ensure()?;
    let hosts = Hosts::new(Link::unshaped())?;
    let mut looker = Looker::new();
    let mut traced = Vec::new();
    for nth in 0..vms {
        let vm = looker.boot_and_look(&kit, &hosts, nth)?;
        let pages = vm.contents.iter().filter(|content| **content != 0).count() as u64;
        println!("vm{}: {} MiB in use", nth + 1, (pages * PAGE_BYTES) >> 20);
        traced.push(vm);
    }
    let trace = Trace { grain_bytes: PAGE_BYTES, encoded_bytes: looker.encoded_bytes, vms: traced };
    let text = serde_json::to_vec(&trace).map_err(|error| LabError::Unsupported(error.to_string()));
    std::fs::write(path, text?).at("write", path)
}

struct Looker {
    key: Key,
    /// By the order in which they were seen; 0 is nothing.
    numbers: HashMap<Name, u64>,
    /// By number, from 1 on.
    encoded_bytes: Vec<u32>,
}

impl Looker {
    fn new() -> Self {
        let key = Key::new(b"", &Domain::default());
        Self { key, numbers: HashMap::new(), encoded_bytes: Vec::new() }
    }

    fn boot_and_look(&mut self, kit: &Kit, hosts: &Hosts, nth: usize) -> Result<TracedVm> {
        let all = scenarios::all();
        let idle = all.first().ok_or_else(|| LabError::Missing { what: "VMs".to_owned() })?;
        let name = format!("vm{}", nth + 1);
        let spec = GuestSpec::new(&name, scenarios::MEMORY, (idle.orders)(nth as u64));
        let (argv, socket) = (spec.argv(kit, &kit.qemu), format!("{name}.own"));
        let guest = Guest::listen(spec, &hosts.a)?;
        let mut command = hosts.a.command(&argv[0]);
        command.args(&argv[1..]);
        command.args(["-qmp", &format!("unix:{RUN_DIR}/{socket},server=on,wait=off")]);
        let silent = command.stdin(Stdio::null()).stdout(Stdio::null());
        let mut child = silent.spawn().doing("start QEMU")?;
        let looked = guest.wait_boot(&hosts.a).and_then(|()| {
            let machine = meet(&hosts.a.run_dir, &socket)?;
            let looked = self.look(&machine);
            machine.quit().map_err(|error| LabError::Unsupported(error.to_string()))?;
            looked
        });
        if looked.is_err() {
            // It may have ended by itself.
            let _ = child.kill();
        }
        // Who told it to quit has waited for it, perhaps.
        let _ = child.wait();
        looked
    }

    fn look(&mut self, machine: &Machine) -> Result<TracedVm> {
        let ram = RamBlocks::of(machine);
        if ram.reached.is_empty() {
            return Err(LabError::Unsupported(ram.notes.join("; ")));
        }
        let mut contents = Vec::new();
        for block in &ram.reached {
            self.look_at(block, &mut contents)?;
        }
        Ok(TracedVm { contents, dirty_bytes_per_s: 0, working_set_bytes: 0 })
    }

    fn look_at(&mut self, block: &Reached, contents: &mut Vec<u64>) -> Result<()> {
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
                let encoded_bytes = encoded_bytes(into)?;
                let pages = into.chunks_exact(lab_guest::PAGE_BYTES);
                for (number, page) in contents[page..].iter_mut().zip(pages) {
                    *number = self.number(page, encoded_bytes);
                }
                at += count;
            }
        }
        Ok(())
    }

    fn number(&mut self, page: &[u8], encoded_bytes: u32) -> u64 {
        if is_zero(page) {
            return 0;
        }
        let next = self.numbers.len() as u64 + 1;
        *self.numbers.entry(self.key.name(page)).or_insert_with(|| {
            self.encoded_bytes.push(encoded_bytes);
            next
        })
    }
}

fn is_zero(page: &[u8]) -> bool {
    page.iter().all(|byte| *byte == 0)
}

/// What each of these pages takes when they are compressed together.
fn encoded_bytes(pages: &[u8]) -> Result<u32> {
    let pages = pages.chunks_exact(lab_guest::PAGE_BYTES).filter(|page| !is_zero(page));
    let bodies: Vec<u8> = pages.flatten().copied().collect();
    let count = bodies.len() / lab_guest::PAGE_BYTES;
    let encoded = zstd::bulk::compress(&bodies, ZSTD_LEVEL).doing("compress")?;
    let each = encoded.len().div_ceil(count.max(1)).min(lab_guest::PAGE_BYTES);
    Ok(u32::try_from(each).unwrap_or(u32::MAX))
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
    fn equal_pages_have_one_number_and_what_is_not_there_has_none() {
        let mapping = Arc::new(Mapping::own(600 * PAGE_BYTES));
        let put = |page: u64, byte| mapping.fill(page * PAGE_BYTES, PAGE_BYTES, byte).unwrap();
        for (page, byte) in [(1, 7), (2, 0), (300, 9), (599, 7)] {
            put(page, byte);
        }
        let block =
            Reached { name: "ram".to_owned(), bytes: 600 * PAGE_BYTES, mapping: mapping.clone() };
        let mut looker = Looker::new();
        let mut contents = vec![5];
        looker.look_at(&block, &mut contents).unwrap();
        let named: Vec<(usize, u64)> =
            contents.into_iter().enumerate().filter(|(_, number)| *number != 0).collect();
        assert_eq!(named, [(0, 5), (2, 1), (301, 2), (600, 1)]);
        // Of one byte, they shrink to next to nothing.
        assert_eq!(looker.encoded_bytes.len(), 2);
        assert!(looker.encoded_bytes.iter().all(|bytes| (1..100).contains(bytes)));
    }
}
