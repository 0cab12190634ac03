//! The cgroups by whose weights the kernel divides CPU time between two processes.

use std::path::Path;

use crate::quota::hierarchy::{Controller, Version};
use crate::quota::memory::{group_of, number};

/// The groups that compete when two processes do, each with its weight: those just below the
/// lowest group that has both. Weights further down count only within these two. None if one of
/// the processes is in that lowest group itself, or if no weights divide CPU time there.
#[must_use]
pub fn cpu_weights(one: u32, other: u32) -> Option<[(String, u64); 2]> {
    let (one, mount) = group_of(one, Controller::Cpu)?;
    let (other, _) = group_of(other, Controller::Cpu)?;
    between(&one, &other, &mount.at, mount.version)
}

fn between(one: &Path, other: &Path, top: &Path, version: Version) -> Option<[(String, u64); 2]> {
    // With version 2, only groups whose parent has the controller enabled have such a file.
    let file = match version {
        Version::V1 => "cpu.shares",
        Version::V2 => "cpu.weight",
    };
    let common = one.ancestors().find(|group| other.starts_with(group))?;
    let of = |group: &Path| {
        let competes = common.join(group.strip_prefix(common).ok()?.components().next()?);
        let name = competes.strip_prefix(top).ok()?.display().to_string();
        Some((name, number(&competes, file)?))
    };
    Some([of(one)?, of(other)?])
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn groups_below_the_lowest_common_one_compete() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path();
        let group = |path: &str| {
            let group = top.join(path);
            fs::create_dir_all(&group).unwrap();
            group
        };
        let agent = group("system.slice/droveway.service");
        let [first, second] = ["droveway.slice/a.scope", "droveway.slice/b.scope"].map(group);
        let of = |one: &Path, other: &Path| between(one, other, top, Version::V2);
        let weights = |groups: [(&str, u64); 2]| {
            Some(groups.map(|(group, weight)| (group.to_owned(), weight)))
        };
        assert_eq!(of(&agent, &first), None, "no controller is enabled");
        for (path, weight) in [("system.slice", 100), ("droveway.slice", 300)] {
            fs::write(top.join(path).join("cpu.weight"), format!("{weight}\n")).unwrap();
        }
        let slices = weights([("system.slice", 100), ("droveway.slice", 300)]);
        assert_eq!(of(&agent, &first), slices);
        assert_eq!(of(&first, &second), None, "the controller is not enabled below the slice");
        fs::write(first.join("cpu.weight"), "7\n").unwrap();
        fs::write(second.join("cpu.weight"), "8\n").unwrap();
        let scopes = weights([("droveway.slice/a.scope", 7), ("droveway.slice/b.scope", 8)]);
        assert_eq!(of(&first, &second), scopes);
        assert_eq!(of(&agent, &first), slices, "weights further down don't count");
        assert_eq!(of(&first, &first), None, "they are in one group");
        assert_eq!(of(top, &first), None, "threads compete with a group");
        assert_eq!(between(&agent, &first, top, Version::V1), None);
    }
}
