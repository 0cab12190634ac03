//! What VMs contain: made from parameters, or read from a file.
//!
//! A trace has one number for each grain of a VM's memory, in the order of its
//! addresses: the same number is the same content, 0 is nothing. A grain is a page,
//! or several where there are too many pages to walk through.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use lab::error::{LabError, Result};

const PAGE_BYTES: u64 = 4096;
/// Grains that are named, and compressed, together.
pub(super) const BATCH: usize = 128;
/// Grains of all VMs together: more take more minutes than they tell.
const GRAINS_MAX: u64 = 1 << 22;
/// A file is not larger: 100 million numbers.
const FILE_BYTES_MAX: u64 = 1 << 30;

/// What VMs contain.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trace {
    /// What one number stands for.
    pub grain_bytes: u64,
    /// What contents take when they are compressed with their neighbours: that of 1
    /// first. Others take all of their grain.
    #[serde(default)]
    pub encoded_bytes: Vec<u32>,
    /// What they take without neighbours.
    #[serde(default)]
    pub alone_bytes: Vec<u32>,
    /// Each VM.
    pub vms: Vec<TracedVm>,
}

/// One of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TracedVm {
    /// Its content, by grain.
    pub contents: Vec<u64>,
    /// What it writes.
    #[serde(default)]
    pub dirty_bytes_per_s: u64,
    /// Where: so much of it, again and again.
    #[serde(default)]
    pub working_set_bytes: u64,
}

/// What VMs are like that are made up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mix {
    /// How many.
    pub vms: usize,
    /// How many systems there are: VMs of one have the same.
    pub systems: usize,
    /// What the system has in memory.
    pub system_bytes: u64,
    /// What all VMs have in common besides.
    pub common_bytes: u64,
    /// What is one and the same page again and again.
    pub repeated_bytes: u64,
    /// What each has alone.
    pub own_bytes: u64,
    /// What each writes.
    pub dirty_bytes_per_s: u64,
    /// Where.
    pub working_set_bytes: u64,
}

impl Mix {
    fn vm_bytes(&self) -> u64 {
        [self.system_bytes, self.common_bytes, self.repeated_bytes, self.own_bytes]
            .into_iter()
            .fold(0, u64::saturating_add)
    }

    /// VMs that are like that.
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
        // No two kinds have a number in common, and none is 0.
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
    /// What one content takes on a lane, in a batch of so many.
    #[must_use]
    pub fn body_bytes(&self, content: u64, among: usize) -> f64 {
        let nth = content.checked_sub(1).and_then(|nth| usize::try_from(nth).ok());
        let of = |all: &[u32]| nth.and_then(|nth| all.get(nth)).copied().map(f64::from);
        let Some(together) = of(&self.encoded_bytes) else { return self.grain_bytes as f64 };
        let alone = of(&self.alone_bytes).unwrap_or(together);
        // Each time that a batch is twice as long it gains as much.
        let company = (among.clamp(1, BATCH) as f64).log2() / (BATCH as f64).log2();
        alone + (together - alone) * company
    }

    /// Reads a file.
    ///
    /// # Errors
    /// If it is none of a trace.
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

    /// The same for so many VMs: again from the first one after the last.
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
    fn vms_have_in_common_what_they_shall() {
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
        // Many are walked through in larger steps.
        let many = mix(2000).trace();
        assert!(many.grain_bytes > PAGE_BYTES && many.vms.len() == 2000);
        let grains: usize = many.vms.iter().map(|vm| vm.contents.len()).sum();
        assert!((GRAINS_MAX / 4..=GRAINS_MAX).contains(&(grains as u64)), "{grains}");
    }

    #[test]
    fn a_file_is_read_and_one_that_cannot_be_is_refused() {
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
