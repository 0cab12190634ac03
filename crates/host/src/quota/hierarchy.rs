//! Finds the cgroups that limit CPU time or memory, and a process's group among them.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The two versions of cgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Version {
    V1,
    V2,
}

/// A mounted hierarchy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    pub(crate) version: Version,
    controller: Controller,
    /// The group that is mounted.
    root: String,
    pub(crate) at: PathBuf,
}

/// The controller of a hierarchy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Controller {
    Cpu,
    Memory,
}

impl Controller {
    fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Memory => "memory",
        }
    }
}

/// Finds the mount in `/proc/self/mountinfo`. A mount can be hidden by another, so it must be
/// visible. Version 1 comes first: where its controller is mounted, version 2 doesn't have the
/// controller.
pub(crate) fn mount(
    mountinfo: &str,
    controller: Controller,
    is_seen: impl Fn(&Path) -> bool,
) -> Option<Mount> {
    let seen = |mount: &Mount| is_seen(&mount.at);
    let of = |version| {
        let mounts = mountinfo.lines().filter_map(|line| mounted(line, version, controller));
        mounts.into_iter().find(|mount| seen(mount))
    };
    of(Version::V1).or_else(|| of(Version::V2))
}

/// A line is `ID PARENT DEVICE ROOT AT OPTIONS [MORE...] - KIND SOURCE OPTIONS`.
fn mounted(line: &str, version: Version, controller: Controller) -> Option<Mount> {
    let (mount, kind) = line.split_once(" - ")?;
    let mut kind = kind.split(' ');
    let (name, _, options) = (kind.next()?, kind.next()?, kind.next()?);
    let fits = match version {
        Version::V1 => name == "cgroup" && options.split(',').any(|one| one == controller.name()),
        Version::V2 => name == "cgroup2",
    };
    let mut mount = mount.split(' ').skip(3);
    let (root, at) = (mount.next()?, mount.next()?);
    fits.then(|| Mount { version, controller, root: root.to_owned(), at: PathBuf::from(at) })
}

impl Mount {
    /// The group of a process or thread, from its `/proc/.../cgroup`.
    pub(crate) fn group(&self, cgroup: &str) -> Option<PathBuf> {
        let path = cgroup.lines().find_map(|line| {
            // `NUMBER:CONTROLLERS:PATH`
            let mut parts = line.splitn(3, ':').skip(1);
            let (controllers, path) = (parts.next()?, parts.next()?);
            let fits = match self.version {
                Version::V1 => controllers.split(',').any(|one| one == self.controller.name()),
                Version::V2 => controllers.is_empty(),
            };
            fits.then_some(path)
        })?;
        // Groups above the mounted one can't be seen here.
        let below = Path::new(path).strip_prefix(&self.root).ok()?;
        let is_plain =
            below.components().all(|part| matches!(part, std::path::Component::Normal(_)));
        is_plain.then(|| self.at.join(below))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V1: &str = "\
30 20 0:26 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
31 20 0:27 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset
32 20 0:28 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
";
    const V2: &str = "\
25 20 8:1 / / rw - ext4 /dev/sda1 rw
30 20 0:26 /box /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate
";

    #[test]
    fn version_1_is_found_by_its_controller() {
        let mount = mount(V1, Controller::Cpu, |_| true).unwrap();
        assert_eq!(mount.version, Version::V1);
        let group = mount.group("4:cpuset:/\n3:cpu,cpuacct:/machine/vm1\n0::/other\n").unwrap();
        assert_eq!(group, Path::new("/sys/fs/cgroup/cpu,cpuacct/machine/vm1"));
        assert_eq!(mount.group("4:cpuset:/\n0::/other\n"), None);
        // It is not the memory controller's.
        let memory = super::mount(V1, Controller::Memory, |_| true).unwrap();
        assert_eq!(memory.version, Version::V2);
    }

    #[test]
    fn version_2_is_seen_from_what_is_mounted_of_it() {
        let mount = mount(V2, Controller::Cpu, |_| true).unwrap();
        assert_eq!(mount.version, Version::V2);
        let group = |line| mount.group(line);
        assert_eq!(group("0::/box/vm.scope\n").unwrap(), Path::new("/sys/fs/cgroup/vm.scope"));
        assert_eq!(group("0::/box\n").unwrap(), Path::new("/sys/fs/cgroup"));
        for hidden in ["0::/elsewhere", "0::/box/../up", "1:name=systemd:/box", "", "::"] {
            assert_eq!(group(hidden), None, "{hidden}");
        }
    }

    #[test]
    fn where_there_are_none_none_are_found() {
        for none in [
            "25 20 8:1 / / rw - ext4 /dev/sda1 rw\nnonsense\n",
            "31 20 0:27 / /c rw - cgroup cgroup rw,cpuset,cpuacct",
        ] {
            assert_eq!(mount(none, Controller::Cpu, |_| true), None, "{none}");
        }
        let two =
            "31 1 0:27 / /hidden rw - cgroup c rw,cpu\n32 1 0:27 / /seen rw - cgroup c rw,cpu";
        let seen = mount(two, Controller::Cpu, |at| at == Path::new("/seen")).unwrap();
        assert_eq!(seen.at, Path::new("/seen"));
    }
}
