//! A systemd in namespaces of its own: it sees this machine's files, and its writes vanish with it.
//! It kills only its own processes, and changes no setting of the kernel.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use lab::program;
use tempfile::TempDir;

use crate::world::until;

const SYSTEMD: &str = "/lib/systemd/systemd";
/// Where this machine has cgroup v2: alone, or next to v1.
const CGROUPS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];

/// Boots systemd in a cgroup and in namespaces of its own. The arguments are a directory that is
/// empty but for files in `files`; and for each program, its path here and its path in there.
const BOOT: &str = r#"set -e
fs=$1/fs root=$1/fs/root
mount --make-rprivate /
mount -t tmpfs tmpfs "$fs"
mkdir "$fs/up" "$fs/work" "$root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$fs/up,workdir=$fs/work" "$root"
cp -r "$1/files/." "$root/"
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
shift
while [ $# -gt 0 ]; do
    touch "$root$2"
    mount --bind "$1" "$root$2"
    shift 2
done
ip link set lo up
exec env -i container=lab PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot "$root" \
    /lib/systemd/systemd --system --unit=lab.target --log-target=null --show-status=no
"#;

/// The least that can start a service.
const TARGET: &str = "[Unit]\nDefaultDependencies=no\n\
     Requires=systemd-journald.service dbus.socket dbus.service\n";
const BARE: &str = "[Unit]\nDefaultDependencies=no\n";

/// Dropped, it ends with all that it has started.
pub struct Systemd {
    child: Child,
    pid: u32,
    cgroup: PathBuf,
    _dir: TempDir,
}

impl Systemd {
    /// Starts it with these files of its own, and with programs, each at the path that follows it.
    /// An error says what this machine lacks.
    ///
    /// # Errors
    /// If something that it needs is missing.
    ///
    /// # Panics
    /// If it doesn't start; all functions of this file panic on failure.
    pub fn start(
        files: &[(&str, String)],
        programs: &[(&Path, &str)],
    ) -> Result<Self, &'static str> {
        if !Path::new(SYSTEMD).is_file() || program::find("busctl").is_none() {
            return Err("this system has no systemd");
        }
        if !Path::new("/lib/systemd/system/dbus.socket").is_file() {
            return Err("this system has no D-Bus");
        }
        let is_second = |dir: &&&str| Path::new(dir).join("cgroup.controllers").is_file();
        let groups = CGROUPS.iter().find(is_second).ok_or("there is no cgroup2 here")?;
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("fs")).unwrap();
        let bare = |unit: &str| (format!("etc/systemd/system/{unit}.d/lab.conf"), BARE.to_owned());
        let own = [
            ("etc/systemd/system/lab.target".to_owned(), TARGET.to_owned()),
            ("etc/fstab".to_owned(), String::new()),
            bare("dbus.socket"),
            bare("dbus.service"),
        ];
        let given = files.iter().map(|(path, text)| ((*path).to_owned(), text.clone()));
        for (path, text) in own.into_iter().chain(given) {
            let path = dir.path().join("files").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        // The directory's name is no other test's.
        let own = dir.path().file_name().unwrap().to_string_lossy().into_owned();
        let cgroup = Path::new(groups).join(format!("lab-systemd-{}{own}", std::process::id()));
        fs::create_dir(&cgroup).unwrap();
        let script = format!(
            "echo $$ >{}/cgroup.procs && exec unshare --fork --pid --mount --uts --ipc --net \
             --cgroup --kill-child sh -c \"$0\" sh \"$@\"",
            cgroup.display()
        );
        let mut command = Command::new("sh");
        command.arg("-c").arg(script).arg(BOOT).arg(dir.path());
        for (program, place) in programs {
            command.arg(program).arg(place);
        }
        let child = command.stdin(Stdio::null()).spawn().unwrap();
        let mut this = Self { child, pid: 0, cgroup, _dir: dir };
        until("systemd has started", || this.find());
        until("systemd answers", || this.tries(&["systemctl", "is-active", "lab.target"]).0);
        Ok(this)
    }

    /// Finds the process that `unshare` has forked, once it is systemd.
    fn find(&mut self) -> bool {
        assert!(self.child.try_wait().unwrap().is_none(), "it did not come up");
        let unshare = self.child.id();
        let children = format!("/proc/{unshare}/task/{unshare}/children");
        let Ok(text) = fs::read_to_string(children) else { return false };
        let Some(pid) = text.split_whitespace().next().and_then(|pid| pid.parse().ok()) else {
            return false;
        };
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        self.pid = pid;
        name.trim() == "systemd"
    }

    /// Whether a command succeeds there, and its output.
    ///
    /// # Panics
    /// If it can't be started.
    #[must_use]
    pub fn tries(&self, words: &[&str]) -> (bool, String) {
        let mut command = Command::new("nsenter");
        command.arg(format!("--target={}", self.pid));
        command.args(["--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup"]);
        command.args(["--root", "--wd", "--"]).args(words).stdin(Stdio::null());
        let output = command.output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&said).into_owned())
    }

    /// The output of a command there, which must succeed.
    ///
    /// # Panics
    /// If it fails.
    pub fn says(&self, words: &[&str]) -> String {
        let (success, said) = self.tries(words);
        assert!(success, "{words:?}: {said}");
        said
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        // Its first process ends with `unshare`, and then all others.
        let _ = self.child.kill();
        let _ = self.child.wait();
        // A moment later they are gone; until then the cgroups are in use.
        let mut find = Command::new("find");
        find.arg(&self.cgroup).args(["-depth", "-type", "d", "-delete"]);
        for _ in 0..100 {
            let gone = find.stderr(Stdio::null()).status().is_ok_and(|status| status.success());
            if gone {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}
