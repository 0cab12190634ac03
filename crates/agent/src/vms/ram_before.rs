//! What a load by a VM's next QEMU may write over in RAM that both have mapped, kept in the VM's
//! directory: the first MiB, where the firmware, option ROMs and their tables are.
//!
//! It need not be on disk: a host that crashes has neither QEMU any more.

use std::fs;
use std::io;
use std::path::Path;

use qemu::machine::Machine;
use qemu::ram_blocks::RamBlocks;
use serde::{Deserialize, Serialize};

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

/// Puts back what was kept, if anything was; no other QEMU of the VM lives.
pub(crate) fn put_back(dir: &Path, machine: &Machine) -> Result<(), String> {
    if let Some(why) = read(&dir.join(CHANGED))? {
        return Err(String::from_utf8_lossy(&why).into_owned());
    }
    let Some(text) = read(&dir.join(FILE))? else { return Ok(()) };
    let damaged = || format!("{} is damaged", dir.join(FILE).display());
    let line = text.iter().position(|byte| *byte == b'\n').ok_or_else(damaged)?;
    let (head, content) = text.split_at(line);
    let kept: Kept = serde_json::from_slice(head).map_err(|_| damaged())?;
    let mut content = content.get(1..).ok_or_else(damaged)?;
    let reached = RamBlocks::of(machine).reached;
    for Block { name, bytes } in kept.blocks {
        let (its, rest) = content.split_at_checked(bytes).ok_or_else(damaged)?;
        let block = reached.iter().find(|block| block.name == name);
        let block = block.ok_or_else(|| format!("its RAM {name} can't be reached"))?;
        block.mapping.write(0, its).map_err(|error| error.to_string())?;
        content = rest;
    }
    // Once only: the VM may run from now on.
    let path = dir.join(FILE);
    fs::remove_file(&path).map_err(|error| format!("{}: {error}", path.display()))
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
