//! A systemd in namespaces of its own: its writes to a root vanish with it. It kills only its own
//! processes, and changes no setting of the kernel.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::error::{FileContext, LabError, Result, SystemContext};
use crate::hosts::scratch;
use crate::program;

/// Where this machine has cgroup v2: alone, or next to v1.
const CGROUPS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
/// Longest time until its unit is active, also where others have the CPUs.
const UP_MAX: Duration = Duration::from_secs(120);
/// Longest time until its cgroups are no longer in use.
const GONE_MAX: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(50);
/// What systemd runs for itself.
const OF_SYSTEMD: [&str; 3] = ["init.scope", "system.slice", "user.slice"];

/// Boots systemd in a cgroup and in namespaces of its own. The arguments are a directory that is
/// empty but for files in `files`, the root, the unit; and for each thing that it sees of this
/// machine, its path here and its path in there.
const BOOT: &str = r#"set -e
dir=$1 fs=$1/fs root=$1/fs/root lower=$2 unit=$3
shift 3
mount --make-rprivate /
mount -t tmpfs tmpfs "$fs"
mkdir "$fs/up" "$fs/work" "$root"
mount -t overlay overlay -o "lowerdir=$lower,upperdir=$fs/up,workdir=$fs/work" "$root"
cp -r "$dir/files/." "$root/"
mount -t tmpfs tmpfs "$root/tmp"
mount -t tmpfs tmpfs "$root/run"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t tmpfs tmpfs "$root/dev"
for node in null zero full random urandom; do
    touch "$root/dev/$node"
    mount --bind "/dev/$node" "$root/dev/$node"
done
mkdir "$root/dev/shm" "$root/dev/pts"
ln -s /proc/self/fd "$root/dev/fd"
mount -t tmpfs tmpfs "$root/dev/shm"
while [ $# -gt 0 ]; do
    mkdir -p "$(dirname "$root$2")"
    if [ -d "$1" ]; then mkdir -p "$root$2"; else touch "$root$2"; fi
    mount --bind "$1" "$root$2"
    shift 2
done
ip link set lo up
exec env -i container=lab PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot "$root" \
    /lib/systemd/systemd --system --unit="$unit" --log-target=null --show-status=no
"#;

/// A file or directory of this machine that systemd sees, too.
#[derive(Debug)]
pub struct Bind {
    /// Its path here.
    pub here: PathBuf,
    /// Its path in there.
    pub there: PathBuf,
}

/// What systemd boots.
#[derive(Debug)]
pub struct Boot<'b> {
    /// Its root, which stays as it is.
    pub root: &'b Path,
    /// Files of its own, by their paths from the root.
    pub files: &'b [(String, String)],
    /// What it sees of this machine.
    pub binds: &'b [Bind],
    /// The unit that it starts.
    pub unit: &'b str,
}

/// Dropped, it ends with all that it has started.
#[derive(Debug)]
pub struct Systemd {
    child: Child,
    pid: u32,
    cgroup: PathBuf,
    _dir: TempDir,
}

impl Systemd {
    /// Boots it, and waits until its unit is active. `shell` runs `sh` in the network that it is to
    /// have, and is replaced by what that executes.
    ///
    /// # Errors
    /// If there is no cgroup v2, or it doesn't come up.
    pub fn boot(mut shell: Command, boot: &Boot<'_>) -> Result<Self> {
        let groups = cgroups().ok_or_else(|| {
            LabError::Unsupported("systemd needs cgroup v2, which is not mounted here".to_owned())
        })?;
        // Its name is no other systemd's, and tells who made it.
        let dir = scratch("systemd")?;
        for name in ["fs", "files"] {
            let path = dir.path().join(name);
            fs::create_dir(&path).at("create", &path)?;
        }
        for (path, text) in boot.files {
            let path = dir.path().join("files").join(path);
            let parent = path.parent().unwrap_or(dir.path());
            fs::create_dir_all(parent).at("create", parent)?;
            fs::write(&path, text).at("write", &path)?;
        }
        let cgroup = groups.join(dir.path().file_name().unwrap_or_default());
        fs::create_dir(&cgroup).at("create", &cgroup)?;
        let script = format!(
            "echo $$ >{}/cgroup.procs && exec unshare --fork --pid --mount --uts --ipc --cgroup \
             --kill-child sh -c \"$0\" sh \"$@\"",
            cgroup.display()
        );
        shell.arg("-c").arg(script).arg(BOOT).arg(dir.path()).arg(boot.root).arg(boot.unit);
        for Bind { here, there } in boot.binds {
            shell.arg(here).arg(there);
        }
        let child = shell.stdin(Stdio::null()).spawn().doing("start systemd")?;
        let mut this = Self { child, pid: 0, cgroup, _dir: dir };
        this.wait_up(boot.unit)?;
        Ok(this)
    }

    fn wait_up(&mut self, unit: &str) -> Result<()> {
        let until = Instant::now() + UP_MAX;
        while !self.is_up(unit)? {
            if Instant::now() > until {
                let detail = String::new();
                return Err(LabError::Silent { what: unit.to_owned(), waited: UP_MAX, detail });
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    fn is_up(&mut self, unit: &str) -> Result<bool> {
        if let Some(status) = self.child.try_wait().doing("wait for systemd")? {
            return Err(LabError::Unsupported(format!("systemd did not come up: {status}")));
        }
        if self.pid == 0 {
            self.pid = self.find().unwrap_or_default();
        }
        if self.pid == 0 {
            return Ok(false);
        }
        let mut ask = self.command(Path::new("/"), "systemctl");
        ask.args(["is-active", "--quiet", unit]);
        Ok(program::run(&mut ask)?.status.success())
    }

    /// The process that `unshare` has forked, once it is systemd.
    fn find(&self) -> Option<u32> {
        let unshare = self.child.id();
        let children = fs::read_to_string(format!("/proc/{unshare}/task/{unshare}/children"));
        let pid: u32 = children.ok()?.split_whitespace().next()?.parse().ok()?;
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        (name.trim() == "systemd").then_some(pid)
    }

    /// Its process, as this machine numbers it.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// A command that runs there, in a directory.
    #[must_use]
    pub fn command(&self, dir: &Path, program: impl AsRef<OsStr>) -> Command {
        command(self.pid, dir, program)
    }

    /// The processes that the agent's unit has, and those that are not systemd's own; as they are
    /// numbered there.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        let mut pids = Vec::new();
        for entry in fs::read_dir(&self.cgroup).into_iter().flatten().flatten() {
            if !OF_SYSTEMD.iter().any(|name| entry.file_name() == *name) {
                add_processes(&entry.path(), &mut pids);
            }
        }
        add_processes(&self.cgroup.join("system.slice/droveway.service"), &mut pids);
        // What ends meanwhile has no number.
        pids.into_iter().filter_map(number_there).collect()
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        // Its first process ends with `unshare`, and then all others.
        let _ = self.child.kill();
        let _ = self.child.wait();
        // A moment later they are gone; until then the cgroups are in use.
        let until = Instant::now() + GONE_MAX;
        while !remove_cgroup(&self.cgroup) && Instant::now() < until {
            std::thread::sleep(PAUSE);
        }
    }
}

/// A command that runs where this process of systemd's does, in a directory there.
pub(crate) fn command(systemd: u32, dir: &Path, program: impl AsRef<OsStr>) -> Command {
    let mut command = program::command("nsenter");
    command.arg(format!("--target={systemd}"));
    command.args(["--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--root"]);
    command.arg(format!("--wdns={}", dir.display())).arg("--").arg(program);
    command
}

/// Whether `systemctl` succeeds with these words, for the system of this process of systemd's.
#[must_use]
pub fn systemctl(systemd: u32, words: &[&str]) -> bool {
    let mut command = command(systemd, Path::new("/"), "systemctl");
    program::run(command.args(words)).is_ok_and(|output| output.status.success())
}

/// Where this machine's cgroup v2 is, without which there is no systemd.
#[must_use]
pub fn cgroups() -> Option<&'static Path> {
    CGROUPS.into_iter().map(Path::new).find(|dir| dir.join("cgroup.controllers").is_file())
}

/// Removes cgroups of these names, which killed labs have left.
pub(crate) fn remove_stale(is_stale: impl Fn(&str) -> bool) {
    let Some(groups) = cgroups() else { return };
    for entry in fs::read_dir(groups).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(&is_stale) {
            let _ = remove_cgroup(&entry.path());
        }
    }
}

/// Whether a cgroup could be removed, with all below it.
fn remove_cgroup(group: &Path) -> bool {
    let mut find = program::command("find");
    find.arg(group).args(["-depth", "-type", "d", "-delete"]);
    find.stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// Adds the processes of a cgroup and of all below it, as this machine numbers them.
fn add_processes(group: &Path, pids: &mut Vec<u32>) {
    let text = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    pids.extend(text.lines().filter_map(|line| line.parse::<u32>().ok()));
    for entry in fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            add_processes(&entry.path(), pids);
        }
    }
}

/// A process's number in its innermost namespace.
fn number_there(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    innermost(&status)
}

fn innermost(status: &str) -> Option<u32> {
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    numbers.split_whitespace().last()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_the_number_of_its_innermost_namespace() {
        assert_eq!(innermost("Name:\tcat\nNSpid:\t4711\t12\nThreads:\t1\n"), Some(12));
        assert_eq!(innermost("Name:\tcat\nNSpid:\t4711\n"), Some(4711));
        assert_eq!(innermost("Name:\tcat\n"), None);
    }
}
