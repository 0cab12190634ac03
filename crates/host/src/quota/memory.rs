//! How much memory a process's cgroups leave it.

use std::fs;
use std::path::{Path, PathBuf};

use crate::quota::hierarchy::{Controller, Mount, Version, mount};

/// Page cache, and the kernel's caches of files, which it frees for other memory. Shared memory is
/// not among them.
const CACHE: [&str; 3] = ["active_file", "inactive_file", "slab_reclaimable"];

/// How much more memory the process may use, according to its group and those above it. Page cache
/// counts as used. None if nothing limits it, or if the limit can't be read.
#[must_use]
pub fn memory_left(pid: u32) -> Option<u64> {
    let (group, mount) = group_of(pid, Controller::Memory)?;
    left(&group, &mount.at, mount.version)
}

/// How much memory another process in the group of this one can get at most: page cache is freed
/// for it, and `swap_free_bytes` of swap are there. None if nothing limits it, if that can't be
/// read, and with version 1.
#[must_use]
pub fn memory_room(pid: u32, swap_free_bytes: u64) -> Option<u64> {
    let found = group_of(pid, Controller::Memory);
    let (group, mount) = found.filter(|(_, mount)| mount.version == Version::V2)?;
    room(&group, &mount.at, swap_free_bytes)
}

/// The group of a process in this controller's hierarchy.
pub(crate) fn group_of(pid: u32, controller: Controller) -> Option<(PathBuf, Mount)> {
    let mountinfo = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mount = mount(&mountinfo, controller, |at| at.join("cgroup.procs").exists())?;
    let group = mount.group(&fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?)?;
    Some((group, mount))
}

/// The number in a group's file. Without a limit, version 2 has `max` there.
pub(crate) fn number(group: &Path, file: &str) -> Option<u64> {
    fs::read_to_string(group.join(file)).ok()?.trim().parse().ok()
}

/// Checks the groups from `group` up to the mounted one.
fn left(group: &Path, top: &Path, version: Version) -> Option<u64> {
    let [bound, used] = match version {
        Version::V1 => ["memory.limit_in_bytes", "memory.usage_in_bytes"],
        Version::V2 => ["memory.max", "memory.current"],
    };
    let of = |one| Some(number(one, bound)?.saturating_sub(number(one, used)?));
    group.ancestors().take_while(|one| one.starts_with(top)).filter_map(of).min()
}

/// The same with page cache and swap, with version 2.
fn room(group: &Path, top: &Path, swap_free_bytes: u64) -> Option<u64> {
    let of = |one: &Path| {
        let used = number(one, "memory.current")?.saturating_sub(cache(one));
        let swap = number(one, "memory.swap.max").zip(number(one, "memory.swap.current"));
        let swap = swap.map_or(u64::MAX, |(bound, used)| bound.saturating_sub(used));
        let left = number(one, "memory.max")?.saturating_sub(used);
        Some(left.saturating_add(swap.min(swap_free_bytes)))
    };
    group.ancestors().take_while(|one| one.starts_with(top)).filter_map(of).min()
}

fn cache(group: &Path) -> u64 {
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let bytes = |line: &str| {
        let (name, bytes) = line.split_once(' ')?;
        CACHE.contains(&name).then(|| bytes.parse::<u64>().ok())?
    };
    stat.lines().filter_map(bytes).fold(0, u64::saturating_add)
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

    #[test]
    fn page_cache_and_swap_are_room() {
        let dir = tempfile::tempdir().unwrap();
        let (top, group) = (dir.path(), dir.path().join("vm.scope"));
        fs::create_dir(&group).unwrap();
        let say = |file, text| fs::write(group.join(file), text).unwrap();
        let of = |swap_free_bytes| room(&group, top, swap_free_bytes);
        say("memory.current", "5000\n");
        assert_eq!(of(1), None);
        say("memory.max", "max\n");
        assert_eq!(of(1), None);
        say("memory.max", "6000\n");
        assert_eq!((of(0), of(300)), (Some(1000), Some(1300)));
        let stat = "shmem 600\nactive_file 200\ninactive_file 60\nslab_reclaimable 40\nslab 70\n";
        say("memory.stat", stat);
        assert_eq!(of(300), Some(1600));
        say("memory.swap.current", "50\n");
        say("memory.swap.max", "max\n");
        assert_eq!(of(300), Some(1600));
        say("memory.swap.max", "70\n");
        assert_eq!((of(300), of(7)), (Some(1320), Some(1307)));
        fs::write(top.join("memory.max"), "100").unwrap();
        fs::write(top.join("memory.current"), "90").unwrap();
        assert_eq!(of(0), Some(10), "the narrowest group counts");
    }
}
