//! What a load by a VM's next QEMU may write over in RAM that both have mapped, kept in the VM's
//! directory: the first MiB, where the firmware, option ROMs and their tables are.
//!
//! It need not be on disk: a host that crashes has neither QEMU any more.

mod page_ranges;

use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

use engine::RamBack;
use page::PAGE_BYTES;
use qemu::machine::Machine;
use qemu::qmp::RunState;
use qemu::ram_blocks::{RamBlocks, Reached};
use serde::{Deserialize, Serialize};

use page_ranges::PageRanges;

/// Its name in the VM's directory.
const FILE: &str = "ram-before";
/// Its name while it is written.
const NEW: &str = "ram-before.new";
/// The name of the reason why the former QEMU must never go on.
const CHANGED: &str = "ram-changed";
/// How much of each block is kept.
const BYTES: u64 = 1 << 20;
/// The most blocks, each with at least 24 MiB.
const BLOCKS_MAX: usize = 128;
/// For QEMU to report the VM's state. It is queried again later.
const STATE_MAX: Duration = Duration::from_secs(2);
/// What has happened to a VM whose RAM is not put back.
const RAN: &str = "something else than the agent ordered the former QEMU to run the VM";

/// What the file starts with, in one line. The blocks' content follows.
#[derive(Serialize, Deserialize)]
struct Kept {
    blocks: Vec<Block>,
}

#[derive(Serialize, Deserialize)]
struct Block {
    name: String,
    bytes: usize,
}

/// Keeps that of a VM with this RAM, which is stopped.
pub(crate) fn keep(dir: &Path, ram: &RamBlocks) -> Result<(), String> {
    let (mut kept, mut content) = (Kept { blocks: Vec::new() }, Vec::new());
    let RamBlocks { reached, notes } = ram;
    if let Some(why) = notes.first().filter(|_| reached.is_empty()) {
        return Err(format!("its RAM can't be reached: {why}"));
    }
    for block in reached.iter().take(BLOCKS_MAX) {
        let bytes = usize::try_from(block.bytes.min(BYTES)).map_err(|error| error.to_string())?;
        let at = content.len();
        content.resize(at + bytes, 0);
        block.mapping.read(0, &mut content[at..]).map_err(|error| error.to_string())?;
        kept.blocks.push(Block { name: block.name.clone(), bytes });
    }
    let mut text = serde_json::to_vec(&kept).map_err(|error| error.to_string())?;
    text.push(b'\n');
    text.extend_from_slice(&content);
    // A kill in between, or a full disk, leaves no part of it: that could not be put back, and
    // nothing was loaded yet.
    let new = dir.join(NEW);
    let written = fs::write(&new, text).and_then(|()| fs::rename(&new, dir.join(FILE)));
    written.map_err(|error| {
        let _ = fs::remove_file(&new);
        format!("{}: {error}", new.display())
    })
}

/// Puts back what was kept, if anything was; no other QEMU of the VM lives. Nothing is written into
/// a VM that runs, or has run since: something else has ordered its QEMU to run it.
pub(crate) fn put_back(dir: &Path, machine: &Machine) -> Result<RamBack, String> {
    if let Some(why) = read(&dir.join(CHANGED))? {
        return Err(String::from_utf8_lossy(&why).into_owned());
    }
    let path = dir.join(FILE);
    let Some(text) = read(&path)? else { return Ok(RamBack::PutBack) };
    let kept = kept(&text).ok_or_else(|| format!("{} is damaged", path.display()))?;
    // Events come in order with the answers to queries.
    let resumed = machine.qmp.events_named(&["RESUME"]);
    let back = if is_released(machine)? {
        write_back(machine, &kept)?;
        match is_released(machine)? && resumed.is_empty() {
            true => RamBack::PutBack,
            false => RamBack::Ran(format!("{RAN} while its RAM was put back: restart the guest")),
        }
    } else {
        let differing = differing(machine, &kept);
        let differing = differing.unwrap_or_else(|why| format!("can't be compared: {why}"));
        RamBack::Ran(format!(
            "{RAN}: it goes on with its RAM as it is. Whether the guest has changed a page since, \
             or its next QEMU while that loaded the VM, is not known: restart the guest if one \
             differs. The first MiB of each block, where a load may write, {differing}"
        ))
    };
    // Once only: the VM may run from now on.
    fs::remove_file(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(back)
}

/// Whether QEMU has released the VM, and has not run it since: only then its RAM was kept.
fn is_released(machine: &Machine) -> Result<bool, String> {
    let state = machine.qmp.run_state_within(STATE_MAX).map_err(|error| error.to_string())?;
    Ok(state == RunState::PostMigrate)
}

/// A block's name, and what was kept of it.
type KeptBlock<'t> = (String, &'t [u8]);

/// The blocks in a file's text; none if it is damaged.
fn kept(text: &[u8]) -> Option<Vec<KeptBlock<'_>>> {
    let line = text.iter().position(|byte| *byte == b'\n')?;
    let (head, content) = text.split_at_checked(line)?;
    let Kept { blocks } = serde_json::from_slice(head).ok()?;
    let mut content = content.get(1..)?;
    let mut kept = Vec::new();
    for Block { name, bytes } in blocks {
        let (its, rest) = content.split_at_checked(bytes)?;
        kept.push((name, its));
        content = rest;
    }
    Some(kept)
}

fn write_back(machine: &Machine, kept: &[KeptBlock<'_>]) -> Result<(), String> {
    let reached = RamBlocks::of(machine).reached;
    for (name, content) in kept {
        let written = block(&reached, name)?.mapping.write(0, content);
        written.map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// How RAM differs from what was kept, for the operator.
fn differing(machine: &Machine, kept: &[KeptBlock<'_>]) -> Result<String, String> {
    let reached = RamBlocks::of(machine).reached;
    let mut differing = PageRanges::default();
    for (name, content) in kept {
        let mut now = vec![0; content.len()];
        let read = block(&reached, name)?.mapping.read(0, &mut now);
        read.map_err(|error| error.to_string())?;
        let pairs = content.chunks(PAGE_BYTES).zip(now.chunks(PAGE_BYTES)).enumerate();
        let changed = pairs.filter(|(_, (then, now))| then != now);
        changed.for_each(|(page, _)| differing.add(name, page));
    }
    Ok(differing.to_string())
}

fn block<'r>(reached: &'r [Reached], name: &str) -> Result<&'r Reached, String> {
    let block = reached.iter().find(|block| block.name == name);
    block.ok_or_else(|| format!("its RAM {name} can't be reached"))
}

/// Notes that RAM is not as it was.
pub(crate) fn changed(dir: &Path, why: &str) {
    if let Err(error) = fs::write(dir.join(CHANGED), why) {
        tracing::error!(why, %error, "cannot note that a VM's RAM was changed");
    }
}

/// Removes what was kept.
pub(crate) fn forget(dir: &Path) -> io::Result<()> {
    [FILE, NEW, CHANGED].iter().try_for_each(|file| match fs::remove_file(dir.join(file)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    })
}

fn read(path: &Path) -> Result<Option<Vec<u8>>, String> {
    match fs::read(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(format!("{}: {error}", path.display())),
    }
}
