//! Pods like KubeVirt's for VMs: a network and process IDs of their own, a virt-launcher, and
//! virt-handler's record of it on the host.
//!
//! Killing the process that runs a pod ends the whole pod, and so does the end of the test that
//! started it.

use std::ffi::OsString;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::net::sockopt::socket_peercred;

use crate::error::{FileContext, Result, SystemContext};
use crate::hosts::Host;
use crate::program;

/// Directory of virt-handler's records of VMs.
const NOTES: &str = "/run/kubevirt-private/ghost-records";
/// Socket of virt-launcher, in the pod's directory on the host.
const SOCKET: &str = "volumes/kubernetes.io~empty-dir/sockets/launcher-sock";
/// Directory in a pod with everything that concerns its VM.
const OWN: &str = "/run/kubevirt";

/// The pod of a VM on a host.
#[derive(Clone, Debug)]
pub struct Pod {
    /// The VM's UID in KubeVirt.
    pub uid: String,
    socket: String,
}

impl Pod {
    /// Makes its directories on a host, before anything runs in it.
    ///
    /// # Errors
    /// If the files can't be made.
    pub fn new(host: &Host, uid: &str) -> Result<Self> {
        let socket = format!("/run/pods/{uid}/{SOCKET}");
        for path in [&*socket, &format!("{NOTES}/{uid}"), &format!("{OWN}/migrationproxy/x")] {
            let path = host.path(path);
            let directory = path.parent().unwrap_or(&path);
            fs::create_dir_all(directory).at("make", directory)?;
        }
        let pod = Self { uid: uid.to_owned(), socket };
        let own = host.path(&format!("{OWN}/migrationproxy"));
        // QEMU's user makes its sockets there.
        let all = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        fs::set_permissions(&own, all).at("open", &own)?;
        Ok(pod)
    }

    /// A command that runs a program as the only one in the pod; the caller adds the program and
    /// its arguments.
    pub(super) fn command(&self, host: &Host) -> Command {
        let mut command = host.command("setpriv");
        command.args(["--pdeathsig", "KILL", "unshare", "--uts", "--net", "--pid", "--fork"]);
        command.args(["--kill-child", "--mount-proc"]).arg(lab()).arg("launcher");
        command.arg(&self.socket).arg("--");
        command
    }

    /// Records it, as virt-handler does once it has a pod's virt-launcher.
    ///
    /// # Errors
    /// If the record can't be written.
    pub fn note(&self, host: &Host) -> Result<()> {
        let Self { uid, socket } = self;
        if let Some(program) = kubevirts_own() {
            let mut note = host.command(program);
            return program::output(note.args(["note", NOTES, uid, socket])).map(drop);
        }
        let note = format!(
            "{{\"name\":\"vm\",\"namespace\":\"default\",\"socketFile\":\"{socket}\",\"uid\":\"{uid}\"}}"
        );
        let path = host.path(&format!("{NOTES}/{uid}"));
        fs::write(&path, note).at("write", path)
    }

    /// The process ID of its launcher, as seen from outside.
    ///
    /// # Errors
    /// If it has ended.
    pub fn pid(&self, host: &Host) -> Result<u32> {
        // By its descriptor: the path is too long for a socket.
        let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC;
        let opened = rustix::fs::open(host.path(&self.socket), flags, rustix::fs::Mode::empty());
        let opened = opened.map_err(std::io::Error::from).doing("open a launcher's socket")?;
        let connected = UnixStream::connect(format!("/proc/self/fd/{}", opened.as_raw_fd()));
        let connected = connected.doing("connect to a launcher")?;
        let peer = socket_peercred(&connected).map_err(std::io::Error::from);
        let pid = peer.doing("ask who a launcher is")?.pid.as_raw_nonzero().get();
        Ok(u32::try_from(pid).unwrap_or_default())
    }

    /// The directory of its migrations' sockets, as seen from outside.
    ///
    /// # Errors
    /// If it has ended.
    pub fn directory(&self, host: &Host) -> Result<PathBuf> {
        Ok(format!("/proc/{}/root{OWN}", self.pid(host)?).into())
    }

    /// Path of a socket of its migrations, as seen from inside.
    #[must_use]
    pub fn socket(&self, port: Option<u16>) -> String {
        let port = port.map(|port| format!("-{port}")).unwrap_or_default();
        format!("{OWN}/migrationproxy/{}{port}-source.sock", self.uid)
    }

    /// Its processes, as seen from outside.
    ///
    /// # Errors
    /// If it has ended.
    pub fn processes(&self, host: &Host) -> Result<Vec<u32>> {
        let namespace = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
        let own = namespace(self.pid(host)?);
        let all = fs::read_dir("/proc").at("read", "/proc")?;
        let pids = all.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        Ok(pids.filter(|pid| namespace(*pid) == own).collect())
    }
}

/// A program made of KubeVirt's own packages, which `make kubevirt-test` builds. It records pods as
/// virt-handler does, and has its proxies.
#[must_use]
pub fn kubevirts_own() -> Option<PathBuf> {
    std::env::var_os("KUBEVIRT_PROXIES").map(PathBuf::from)
}

/// The lab's command: next to the running program, or one directory above.
fn lab() -> PathBuf {
    let here = std::env::current_exe().unwrap_or_default();
    let beside = here.ancestors().skip(1).take(2).map(|dir| dir.join("lab"));
    beside.into_iter().find(|path| path.is_file()).unwrap_or_else(|| "lab".into())
}

/// The first process in a pod: it listens where virt-launcher does, starts a program, and reaps all
/// processes that end.
///
/// # Errors
/// If it can't listen, or start it.
pub fn launch(socket: &Path, argv: &[OsString]) -> std::io::Result<()> {
    let _ = fs::remove_file(socket);
    let listener = UnixListener::bind(socket)?;
    let (program, args) = argv.split_first().ok_or(std::io::ErrorKind::InvalidInput)?;
    Command::new(program).args(args).stdin(Stdio::null()).spawn()?;
    // Clients connect only to learn who listens.
    std::thread::spawn(move || listener.incoming().for_each(drop));
    // The first process in a pod becomes the parent of all orphans.
    while rustix::process::wait(rustix::process::WaitOptions::empty()).is_ok() {}
    Ok(())
}
