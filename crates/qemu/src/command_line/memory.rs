//! Which RAM the VM has, and how the agent comes to share it.
//!
//! RAM that only QEMU knows becomes a file that the agent made, under the same
//! id, so that a QEMU elsewhere has a RAM block of the same name. What the user
//! put into a file of their own, or into the hands of hardware, is left alone:
//! its pages are placed through QEMU's stream.

use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::object::Object;
use super::{CommandLine, CommandLineError, Item, KeyValues, option, size};

const DEFAULT_RAM_BYTES: u64 = 128 << 20;
const HUGETLBFS: u64 = 0x9584_58f6;
/// QEMU rounds `-m` up to this.
const RAM_UNIT: u64 = 8192;

/// RAM that the agent makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backend {
    /// Its id, which is the RAM block's name.
    pub id: String,
    /// Its size.
    pub bytes: u64,
    /// The size of its huge pages, if it is made of such.
    pub huge: Option<u64>,
}

/// RAM that the agent doesn't make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftAlone {
    /// Its id, or what it is known as.
    pub id: String,
    /// Why not.
    pub reason: String,
}

/// A VM's RAM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryPlan {
    /// What the agent makes and shares.
    pub shared: Vec<Backend>,
    /// What it leaves to QEMU.
    pub left: Vec<LeftAlone>,
}

impl MemoryPlan {
    fn leave(&mut self, id: &str, reason: impl Into<String>) {
        self.left.push(LeftAlone { id: id.to_owned(), reason: reason.into() });
    }
}

pub(super) fn plan(line: &CommandLine) -> Result<MemoryPlan, CommandLineError> {
    let mut plan = MemoryPlan::default();
    let guarded = ["confidential-guest-support", "memory-encryption"];
    if guarded.iter().any(|key| line.machine(key).is_some()) {
        plan.leave("RAM", "the VM's memory is encrypted for itself");
        return Ok(plan);
    }
    if line.has("readconfig") {
        plan.leave("RAM", "-readconfig may hold more about it than the command line shows");
        return Ok(plan);
    }
    for text in line.arguments("object") {
        let object = Object::parse(text)?;
        if is_backend(&object) {
            let id = object.value("id").unwrap_or_default();
            match sharable(&object) {
                Ok(huge) => plan.shared.push(Backend { bytes: object_bytes(&object)?, id, huge }),
                Err(reason) => plan.leave(&id, reason),
            }
        }
    }
    if needs_default(line) {
        default_ram(line, &mut plan)?;
    }
    Ok(plan)
}

/// Whether QEMU makes the machine's RAM by itself.
fn needs_default(line: &CommandLine) -> bool {
    let on_node = |text: &str| KeyValues::parse(text, Some("type")).value("memdev").is_some();
    line.machine("memory-backend").is_none() && !line.arguments("numa").any(on_node)
}

fn default_ram(line: &CommandLine, plan: &mut MemoryPlan) -> Result<(), CommandLineError> {
    let Some(id) = default_ram_id(line) else {
        let kind = line.machine("type").unwrap_or_default();
        plan.leave("RAM", format!("Droveway doesn't know the RAM of machine type {kind}"));
        return Ok(());
    };
    if line.arguments("machine").any(|text| text.contains("memory.")) {
        plan.leave(id, "its size stands in -machine; write it with -m");
        return Ok(());
    }
    let huge = match line.arguments("mem-path").last() {
        None => None,
        Some(path) => match huge_page_bytes(Path::new(path)) {
            Some(bytes) => Some(bytes),
            None => {
                plan.leave(id, format!("-mem-path {path} is not on a hugetlbfs"));
                return Ok(());
            }
        },
    };
    let bytes = ram_bytes(line)?;
    if bytes > 0 {
        plan.shared.push(Backend { id: id.to_owned(), bytes, huge });
    }
    Ok(())
}

/// What QEMU calls the RAM that it makes by itself.
fn default_ram_id(line: &CommandLine) -> Option<&'static str> {
    let program = Path::new(&line.program).file_name()?.to_str()?;
    let other = program.starts_with("qemu-system-")
        && !["x86_64", "i386"].iter().any(|arch| program.contains(arch));
    if other {
        return None;
    }
    match line.machine("type").as_deref() {
        None => Some("pc.ram"),
        Some("microvm") => Some("microvm.ram"),
        Some(kind) if ["pc", "q35", "isapc"].contains(&kind) => Some("pc.ram"),
        Some(kind) if kind.starts_with("pc-") || kind.starts_with("rhel-") => Some("pc.ram"),
        Some(_) => None,
    }
}

fn ram_bytes(line: &CommandLine) -> Result<u64, CommandLineError> {
    let text = line
        .arguments("m")
        .filter_map(|text| KeyValues::parse(text, Some("size")).value("size").map(str::to_owned))
        .last();
    let Some(text) = text else { return Ok(DEFAULT_RAM_BYTES) };
    size::bytes(&text, 1 << 20)
        .and_then(|bytes| bytes.checked_next_multiple_of(RAM_UNIT))
        .ok_or(CommandLineError::BadSize { option: "-m".to_owned(), text })
}

fn is_backend(object: &Object) -> bool {
    object.kind().starts_with("memory-backend-")
}

fn object_bytes(object: &Object) -> Result<u64, CommandLineError> {
    let text = object.value("size").unwrap_or_default();
    size::bytes(&text, 1).ok_or_else(|| CommandLineError::BadSize {
        option: format!("-object {}: size", object.kind()),
        text,
    })
}

/// The huge pages to make a backend of, if any; or why to leave it alone.
fn sharable(object: &Object) -> Result<Option<u64>, String> {
    match object.kind().as_str() {
        "memory-backend-ram" | "memory-backend-shm" => Ok(None),
        "memory-backend-memfd" if !object.is_on("hugetlb") => Ok(None),
        "memory-backend-memfd" => match object.value("hugetlbsize") {
            Some(text) => size::bytes(&text, 1)
                .filter(|bytes| *bytes > 0)
                .map(Some)
                .ok_or_else(|| format!("hugetlbsize `{text}` is not a size")),
            None => default_huge_bytes().map(Some).ok_or("this host has no huge pages".to_owned()),
        },
        "memory-backend-file" => sharable_file(object),
        kind => Err(format!("memory of a {kind} belongs to hardware of this host")),
    }
}

fn sharable_file(object: &Object) -> Result<Option<u64>, String> {
    let path = object.value("mem-path").unwrap_or_default();
    for key in ["pmem", "readonly", "rom"] {
        if object.is_on(key) {
            return Err(format!("{path} is used with {key}=on, for what it holds"));
        }
    }
    if object.value("offset").is_some() {
        return Err(format!("only a part of {path} is used"));
    }
    huge_page_bytes(Path::new(&path))
        .map(Some)
        .ok_or_else(|| format!("{path} is a file that may be meant to last or to be shared"))
}

/// The page size of the hugetlbfs that a path is on, or would be.
fn huge_page_bytes(path: &Path) -> Option<u64> {
    let mut there: PathBuf = path.to_owned();
    if !there.exists() {
        there.pop();
    }
    let filesystem = rustix::fs::statfs(&there).ok()?;
    let is_huge = u64::try_from(filesystem.f_type).is_ok_and(|kind| kind == HUGETLBFS);
    is_huge.then(|| u64::try_from(filesystem.f_bsize).ok())?
}

fn default_huge_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Hugepagesize:"))?;
    size::bytes(&line.replace([' ', 'B'], ""), 1)
}

pub(super) fn rewrite(line: &CommandLine, fds: &[(&str, RawFd)]) -> CommandLine {
    let fd_of = |id: &str| fds.iter().find(|(name, _)| *name == id).map(|(_, fd)| *fd);
    let mut rewritten = line.clone();
    let mut rest: Vec<&(&str, RawFd)> = fds.iter().collect();
    for item in &mut rewritten.items {
        let Item::Option { name, argument: Some(text), .. } = item else { continue };
        if name != "object" {
            continue;
        }
        let Ok(object) = Object::parse(text) else { continue };
        let id = object.value("id").unwrap_or_default();
        if let (true, Some(fd)) = (is_backend(&object), fd_of(&id)) {
            *text = shared(object, fd).text();
            rest.retain(|(name, _)| *name != id);
        }
    }
    // What is not an object of the user's is the RAM that QEMU would make.
    for (id, fd) in rest {
        let bytes = ram_bytes(line).unwrap_or(0);
        rewritten
            .items
            .retain(|item| !matches!(item, Item::Option { name, .. } if name == "mem-path"));
        let object = format!(
            "memory-backend-file,id={id},size={bytes},share=on,mem-path=/proc/self/fd/{fd},\
             x-use-canonical-path-for-ramblock-id=off"
        );
        let machine = format!("memory-backend={id}");
        rewritten.items.push(option("-object", Some(&object)));
        rewritten.items.push(option("-machine", Some(&machine)));
    }
    rewritten
}

/// The same memory, in the agent's file.
fn shared(object: Object, fd: RawFd) -> Object {
    let was_ram = object.kind() == "memory-backend-ram";
    let mut object = object.with_kind("memory-backend-file");
    for key in ["hugetlb", "hugetlbsize", "seal", "discard-data"] {
        object.remove(key);
    }
    object.set_switch("share", true);
    object.set_text("mem-path", &format!("/proc/self/fd/{fd}"));
    // Machine types before 4.0 call the RAM blocks of files (not of -ram) by
    // their path; the block must keep the name it had.
    let naming = "x-use-canonical-path-for-ramblock-id";
    if was_ram && object.value(naming).is_none() {
        object.set_switch(naming, false);
    }
    object
}
