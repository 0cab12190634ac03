//! A systemd that sees this machine's files, and runs programs of the build.

use std::path::Path;
use std::process::{Command, Stdio};

use lab::hosts::Host;
use lab::program;
use lab::systemd::{self, Bind, Boot};

const SYSTEMD: &str = "/lib/systemd/systemd";
/// The least that can start a service.
const TARGET: &str = "[Unit]\nDefaultDependencies=no\n\
     Requires=systemd-journald.service dbus.socket dbus.service\n";
const BARE: &str = "[Unit]\nDefaultDependencies=no\n";

/// Dropped, it ends with all that it has started.
pub struct Systemd(systemd::Systemd);

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
        let mut shell = Command::new("unshare");
        shell.args(["--net", "sh"]);
        with(files, programs, |boot| Self(systemd::Systemd::boot(shell, boot).unwrap()))
    }

    /// Whether a command succeeds there, and its output.
    ///
    /// # Panics
    /// If it can't be started.
    #[must_use]
    pub fn tries(&self, words: &[&str]) -> (bool, String) {
        let mut command = self.0.command(Path::new("/"), words[0]);
        let output = command.args(&words[1..]).stdin(Stdio::null()).output().unwrap();
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

/// Has a host boot a system of its own, with this machine's files. An error says what this machine
/// lacks.
///
/// # Errors
/// If something that it needs is missing.
///
/// # Panics
/// If it doesn't start.
pub fn boot_host(host: &mut Host) -> Result<(), &'static str> {
    with(&[], &[], |boot| host.boot(boot).unwrap())
}

/// Boots the least that can start a service, with this machine's files and more.
fn with<T>(
    files: &[(&str, String)],
    programs: &[(&Path, &str)],
    start: impl FnOnce(&Boot<'_>) -> T,
) -> Result<T, &'static str> {
    if !Path::new(SYSTEMD).is_file() || program::find("busctl").is_none() {
        return Err("this system has no systemd");
    }
    if !Path::new("/lib/systemd/system/dbus.socket").is_file() {
        return Err("this system has no D-Bus");
    }
    if systemd::cgroups().is_none() {
        return Err("there is no cgroup2 here");
    }
    let file = |path: &str, text: &str| (path.to_owned(), text.to_owned());
    let bare = |unit: &str| file(&format!("etc/systemd/system/{unit}.d/lab.conf"), BARE);
    let own = [
        file("etc/systemd/system/lab.target", TARGET),
        file("etc/fstab", ""),
        bare("dbus.socket"),
        bare("dbus.service"),
    ];
    let given = files.iter().map(|(path, text)| file(path, text));
    let files: Vec<_> = own.into_iter().chain(given).collect();
    let bind = |(here, there): &(&Path, &str)| Bind { here: here.into(), there: there.into() };
    let binds: Vec<_> = programs.iter().map(bind).collect();
    let root = Path::new("/");
    Ok(start(&Boot { root, files: &files, binds: &binds, unit: "lab.target" }))
}
