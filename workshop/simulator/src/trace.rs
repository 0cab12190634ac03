//! What VMs contain: made from parameters, or read from a file.
//!
//! A trace has one number for each grain of a VM's memory, in the order of its addresses: equal
//! numbers are equal content, 0 is no content. A grain is a page, or several where there are too
//! many pages to simulate each.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use lab::error::{LabError, Result};

const PAGE_BYTES: u64 = 4096;
/// Grains that are named and compressed together.
pub(super) const BATCH: usize = 128;
/// Most grains of all VMs together: more would take minutes and tell little more.
const GRAINS_MAX: u64 = 1 << 22;
/// Largest size of a file: that of 100 million numbers.
const FILE_BYTES_MAX: u64 = 1 << 30;

/// What VMs contain.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trace {
    /// Content that one number stands for.
    pub grain_bytes: u64,
    /// Compressed sizes of contents among their neighbours, from number 1 on. Other contents take
    /// all of their grain.
    #[serde(default)]
    pub encoded_bytes: Vec<u32>,
    /// Compressed sizes without neighbours.
    #[serde(default)]
    pub alone_bytes: Vec<u32>,
    /// The VMs.
    pub vms: Vec<TracedVm>,
}

/// One VM of a trace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TracedVm {
    /// Its content, by grain.
    pub contents: Vec<u64>,
    /// Rate of its writes.
    #[serde(default)]
    pub dirty_bytes_per_s: u64,
    /// Size of the memory that it writes again and again.
    #[serde(default)]
    pub working_set_bytes: u64,
}

/// Parameters of VMs that are made up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mix {
    /// Number of VMs.
    pub vms: usize,
    /// Number of systems; VMs with the same system have its content in common.
    pub systems: usize,
    /// Content of the system in memory.
    pub system_bytes: u64,
    /// Further content that all VMs have in common.
    pub common_bytes: u64,
    /// Content that is the same page again and again.
    pub repeated_bytes: u64,
    /// Content that each VM has alone.
    pub own_bytes: u64,
    /// Rate of each VM's writes.
    pub dirty_bytes_per_s: u64,
    /// Size of the memory that each VM writes.
    pub working_set_bytes: u64,
}

impl Mix {
    fn vm_bytes(&self) -> u64 {
        [self.system_bytes, self.common_bytes, self.repeated_bytes, self.own_bytes]
            .into_iter()
            .fold(0, u64::saturating_add)
    }

    /// The trace of such VMs.
    #[must_use]
    pub fn trace(&self) -> Trace {
        let all = self.vm_bytes().saturating_mul(self.vms as u64);
        let grain_pages = (all / PAGE_BYTES / GRAINS_MAX + 1).next_power_of_two();
        let grain_bytes = grain_pages * PAGE_BYTES;
        let vms = (0..self.vms as u64).map(|vm| self.vm(vm, grain_bytes)).collect();
        Trace { grain_bytes, encoded_bytes: Vec::new(), alone_bytes: Vec::new(), vms }
    }

    fn vm(&self, vm: u64, grain_bytes: u64) -> TracedVm {
        let system = vm % self.systems.max(1) as u64;
        // Kinds have no number in common, and none is 0.
        let kind = |kind: u64, of: u64| (kind << 56 | of << 32) + 1;
        let run = |first: u64, bytes: u64| (0..bytes / grain_bytes).map(move |nth| first + nth);
        let mut contents: Vec<u64> = run(kind(1, system), self.system_bytes).collect();
        contents.extend(run(kind(2, 0), self.common_bytes));
        contents.extend(run(0, self.repeated_bytes).map(|_| kind(3, 0)));
        contents.extend(run(kind(4, vm), self.own_bytes));
        TracedVm {
            contents,
            dirty_bytes_per_s: self.dirty_bytes_per_s,
            working_set_bytes: self.working_set_bytes,
        }
    }
}

impl Trace {
    /// Bytes of one content on a lane, in a batch of `among`.
    #[must_use]
    pub fn body_bytes(&self, content: u64, among: usize) -> f64 {
        let nth = content.checked_sub(1).and_then(|nth| usize::try_from(nth).ok());
        let of = |all: &[u32]| nth.and_then(|nth| all.get(nth)).copied().map(f64::from);
        let Some(together) = of(&self.encoded_bytes) else { return self.grain_bytes as f64 };
        let alone = of(&self.alone_bytes).unwrap_or(together);
        // Each doubling of a batch gains as much.
        let company = (among.clamp(1, BATCH) as f64).log2() / (BATCH as f64).log2();
        alone + (together - alone) * company
    }

    /// Reads a trace from a file.
    ///
    /// # Errors
    /// If the file is not a trace.
    pub fn read(path: &Path) -> Result<Self> {
        let wrong =
            |why: String| LabError::Unsupported(format!("{} is no trace: {why}", path.display()));
        let bytes = fs::metadata(path).map_err(|error| wrong(error.to_string()))?.len();
        if bytes > FILE_BYTES_MAX {
            return Err(wrong(format!("it has {} MiB", bytes >> 20)));
        }
        let text = fs::read(path).map_err(|error| wrong(error.to_string()))?;
        let trace: Self =
            serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
        if trace.grain_bytes == 0 || !trace.grain_bytes.is_multiple_of(PAGE_BYTES) {
            return Err(wrong(format!("{} bytes are no whole pages", trace.grain_bytes)));
        }
        if trace.vms.is_empty() {
            return Err(wrong("it has no VM".to_owned()));
        }
        Ok(trace)
    }

    /// The same for `vms` VMs: after the last one it begins again with the first.
    #[must_use]
    pub fn repeated(mut self, vms: usize) -> Self {
        let known = self.vms.len();
        self.vms.truncate(vms);
        for nth in known..vms {
            self.vms.push(self.vms[nth % known].clone());
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn mix(vms: usize) -> Mix {
        Mix {
            vms,
            systems: 2,
            system_bytes: 40 * MIB,
            common_bytes: 32 * MIB,
            repeated_bytes: 8 * MIB,
            own_bytes: 16 * MIB,
            dirty_bytes_per_s: 0,
            working_set_bytes: 0,
        }
    }

    #[test]
    fn vms_have_the_intended_content_in_common() {
        let trace = mix(4).trace();
        assert_eq!(trace.grain_bytes, PAGE_BYTES);
        let sets: Vec<HashSet<u64>> =
            trace.vms.iter().map(|vm| vm.contents.iter().copied().collect()).collect();
        let common = |one: usize, other: usize| {
            sets[one].intersection(&sets[other]).count() as u64 * PAGE_BYTES / MIB
        };
        assert_eq!((common(0, 2), common(1, 3)), (72, 72));
        assert_eq!((common(0, 1), common(2, 3)), (32, 32));
        let pages = |vm: usize| trace.vms[vm].contents.len() as u64 * PAGE_BYTES / MIB;
        assert_eq!((pages(0), sets[0].contains(&0)), (96, false));
        assert_eq!(sets[0].len() as u64, 88 * MIB / PAGE_BYTES + 1);
        // Many VMs have larger grains.
        let many = mix(2000).trace();
        assert!(many.grain_bytes > PAGE_BYTES && many.vms.len() == 2000);
        let grains: usize = many.vms.iter().map(|vm| vm.contents.len()).sum();
        assert!((GRAINS_MAX / 4..=GRAINS_MAX).contains(&(grains as u64)), "{grains}");
    }

    #[test]
    fn traces_are_read_and_other_files_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace.json");
        let (encoded_bytes, alone_bytes) = (vec![17], vec![24]);
        let trace = Trace { encoded_bytes, alone_bytes, ..mix(1).trace() };
        assert_eq!([1, 2].map(|content| trace.body_bytes(content, BATCH)), [17.0, 4096.0]);
        assert_eq!([1, 2].map(|among| trace.body_bytes(1, among)), [24.0, 23.0]);
        fs::write(&path, serde_json::to_vec(&trace).unwrap()).unwrap();
        assert_eq!(Trace::read(&path).unwrap(), trace);
        assert_eq!(trace.clone().repeated(3).vms, vec![trace.vms[0].clone(); 3]);
        for wrong in [
            "",
            r#"{"grain_bytes":100,"vms":[{"contents":[1]}]}"#,
            r#"{"grain_bytes":0,"vms":[{"contents":[1]}]}"#,
            r#"{"grain_bytes":4096,"vms":[]}"#,
            r#"{"grain_bytes":4096,"vms":[{"contents":[-1]}]}"#,
        ] {
            fs::write(&path, wrong).unwrap();
            assert!(Trace::read(&path).is_err(), "{wrong}");
        }
        assert!(Trace::read(&dir.path().join("none")).is_err());
    }
}
