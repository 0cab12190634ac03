//! How much memory a process's cgroups leave it.

use std::fs;
use std::path::Path;

use crate::quota::hierarchy::{Controller, Version, mount};

/// How much more memory the process may use, according to its group and those above it. Page cache
/// counts as used. None if nothing limits it, or if the limit can't be read.
#[must_use]
pub fn memory_left(pid: u32) -> Option<u64> {
    let mountinfo = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mount = mount(&mountinfo, Controller::Memory, |at| at.join("cgroup.procs").exists())?;
    let group = mount.group(&fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?)?;
    left(&group, &mount.at, mount.version)
}

/// Checks the groups from `group` up to the mounted one.
fn left(group: &Path, top: &Path, version: Version) -> Option<u64> {
    let [bound, used] = match version {
        Version::V1 => ["memory.limit_in_bytes", "memory.usage_in_bytes"],
        Version::V2 => ["memory.max", "memory.current"],
    };
    // Without a limit, version 2 has `max` there.
    let number = |group: &Path, file| -> Option<u64> {
        fs::read_to_string(group.join(file)).ok()?.trim().parse().ok()
    };
    let of = |one| Some(number(one, bound)?.saturating_sub(number(one, used)?));
    group.ancestors().take_while(|one| one.starts_with(top)).filter_map(of).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_narrowest_group_counts() {
        let dir = tempfile::tempdir().unwrap();
        let [top, above] = [dir.path().join("mounted"), dir.path().join("mounted/slice")];
        let group = above.join("vm.scope");
        fs::create_dir_all(&group).unwrap();
        let of = |version| left(&group, &top, version);
        assert_eq!(of(Version::V2), None);
        let say = |dir: &Path, file, text| fs::write(dir.join(file), text).unwrap();
        say(&group, "memory.max", "max\n");
        say(&group, "memory.current", "1000\n");
        assert_eq!(of(Version::V2), None);
        say(&above, "memory.max", "9000\n");
        say(&above, "memory.current", "2000\n");
        assert_eq!(of(Version::V2), Some(7000));
        say(&group, "memory.max", "3000\n");
        assert_eq!(of(Version::V2), Some(2000));
        say(&group, "memory.current", "3500\n");
        assert_eq!(of(Version::V2), Some(0));
        // Groups above the mounted one are ignored.
        say(dir.path(), "memory.limit_in_bytes", "1\n");
        say(dir.path(), "memory.usage_in_bytes", "1\n");
        assert_eq!(of(Version::V1), None);
        say(&top, "memory.limit_in_bytes", "9223372036854771712\n");
        say(&top, "memory.usage_in_bytes", "12\n");
        assert_eq!(of(Version::V1), Some(9_223_372_036_854_771_700));
    }
}
