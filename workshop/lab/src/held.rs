//! What an agent holds of its host while nothing moves.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::agent::Agent;
use crate::error::{FileContext, LabError, Result};
use crate::hosts::Host;

const MIB: u64 = 1 << 20;

/// What it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Held {
    /// Open files and sockets.
    pub descriptors: usize,
    /// Threads.
    pub threads: usize,
    /// Files in its state directory, without reports, of which it keeps some hundred.
    pub files: usize,
    /// Anonymous memory.
    pub memory_bytes: u64,
}

impl Held {
    /// What a host's agent holds now.
    ///
    /// # Errors
    /// If the agent has ended.
    pub fn of(agent: &Agent, host: &Host) -> Result<Self> {
        let process = PathBuf::from(format!("/proc/{}", agent.pid()));
        let entries = |what: &str| -> Result<usize> {
            let dir = process.join(what);
            Ok(fs::read_dir(&dir).at("list", &dir)?.count())
        };
        Ok(Self {
            descriptors: entries("fd")?,
            threads: entries("task")?,
            files: files(&host.inside("state")),
            memory_bytes: anonymous_bytes(&process)?,
        })
    }

    /// The lesser of two, in each respect.
    #[must_use]
    pub fn least(self, other: Self) -> Self {
        Self {
            descriptors: self.descriptors.min(other.descriptors),
            threads: self.threads.min(other.threads),
            files: self.files.min(other.files),
            memory_bytes: self.memory_bytes.min(other.memory_bytes),
        }
    }

    /// Whether it is more than before, with so much more memory permitted.
    #[must_use]
    pub fn has_grown(&self, before: &Self, more_bytes_max: u64) -> bool {
        self.descriptors > before.descriptors
            || self.threads > before.threads
            || self.files > before.files
            || self.memory_bytes > before.memory_bytes + more_bytes_max
    }
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { descriptors, threads, files, memory_bytes } = self;
        let mib = *memory_bytes as f64 / MIB as f64;
        write!(f, "{descriptors} descriptors, {threads} threads, {files} files, {mib:.1} MiB")
    }
}

/// Files below a directory that are no reports. One may vanish meanwhile.
fn files(dir: &Path) -> usize {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let count = entries.map(|entry| match entry.file_type() {
        Ok(kind) if kind.is_dir() && entry.file_name() == "reports" => 0,
        Ok(kind) if kind.is_dir() => files(&entry.path()),
        _ => 1,
    });
    count.sum()
}

fn anonymous_bytes(process: &Path) -> Result<u64> {
    let path = process.join("status");
    let status = fs::read_to_string(&path).at("read", &path)?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    // A process that has ended has none.
    kib.map(|kib| kib << 10).ok_or(LabError::Text { what: "an agent's status", text: status })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_more_of_anything_but_some_memory_is_growth() {
        type Change = fn(&mut Held);
        let before = Held { descriptors: 20, threads: 8, files: 5, memory_bytes: 30 * MIB };
        assert!(!before.has_grown(&before, MIB));
        let table: [(Change, bool); 5] = [
            (|held| held.descriptors += 1, true),
            (|held| held.threads += 1, true),
            (|held| held.files += 1, true),
            (|held| held.memory_bytes += MIB, false),
            (|held| held.memory_bytes += MIB + 1, true),
        ];
        for (change, grown) in table {
            let mut after = before;
            change(&mut after);
            assert_eq!(after.has_grown(&before, MIB), grown, "{after}");
            assert_eq!(after.least(before), before);
        }
    }

    #[test]
    fn reports_do_not_count_as_files() {
        let dir = tempfile::tempdir().unwrap();
        for path in ["reports/a.json", "vms/web1/record.json", "lock"] {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        assert_eq!(files(dir.path()), 2);
    }

    #[test]
    fn this_process_has_memory_of_its_own() {
        assert!(anonymous_bytes(Path::new("/proc/self")).unwrap() > 0);
    }
}
