//! Pods as KubeVirt has them for VMs: a network of their own, process numbers of their
//! own, a virt-launcher, and virt-handler's note of it on the host.
//!
//! What is killed takes the whole pod with it, and the test that has started one too.

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

/// Where virt-handler notes VMs.
const NOTES: &str = "/run/kubevirt-private/ghost-records";
/// Where virt-launcher listens, in what the host has of its pod.
const SOCKET: &str = "volumes/kubernetes.io~empty-dir/sockets/launcher-sock";
/// In a pod: all that concerns its VM.
const OWN: &str = "/run/kubevirt";

/// The pod of a VM on a host.
#[derive(Clone, Debug)]
pub struct Pod {
    /// The VM's UID for KubeVirt.
    pub uid: String,
    socket: String,
}

impl Pod {
    /// Makes what a host has of it, before anything runs in it.
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

    /// How something runs as all that there is in it; the rest is its program and
    /// arguments.
    pub(super) fn command(&self, host: &Host) -> Command {
        let mut command = host.command("setpriv");
        command.args(["--pdeathsig", "KILL", "unshare", "--uts", "--net", "--pid", "--fork"]);
        command.args(["--kill-child", "--mount-proc"]).arg(lab()).arg("launcher");
        command.arg(&self.socket).arg("--");
        command
    }

    /// Notes it, as virt-handler does once it has a pod's virt-launcher.
    ///
    /// # Errors
    /// If the note can't be written.
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

    /// A process in it, as seen from outside.
    ///
    /// # Errors
    /// If it has ended.
    pub fn pid(&self, host: &Host) -> Result<u32> {
        // By its number: as a path it is too long for a socket.
        let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::CLOEXEC;
        let opened = rustix::fs::open(host.path(&self.socket), flags, rustix::fs::Mode::empty());
        let opened = opened.map_err(std::io::Error::from).doing("open a launcher's socket")?;
        let connected = UnixStream::connect(format!("/proc/self/fd/{}", opened.as_raw_fd()));
        let connected = connected.doing("connect to a launcher")?;
        let peer = socket_peercred(&connected).map_err(std::io::Error::from);
        let pid = peer.doing("ask who a launcher is")?.pid.as_raw_nonzero().get();
        Ok(u32::try_from(pid).unwrap_or_default())
    }

    /// Where its migrations' sockets are, as seen from outside.
    ///
    /// # Errors
    /// If it has ended.
    pub fn directory(&self, host: &Host) -> Result<PathBuf> {
        Ok(format!("/proc/{}/root{OWN}", self.pid(host)?).into())
    }

    /// The path of a socket of its migrations, as it has it itself.
    #[must_use]
    pub fn socket(&self, port: Option<u16>) -> String {
        let port = port.map(|port| format!("-{port}")).unwrap_or_default();
        format!("{OWN}/migrationproxy/{}{port}-source.sock", self.uid)
    }

    /// What runs in it, as seen from outside.
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

/// A program made of KubeVirt's own packages, which `make kubevirt-test` builds: it notes
/// pods as virt-handler does, and has its proxies.
#[must_use]
pub fn kubevirts_own() -> Option<PathBuf> {
    std::env::var_os("KUBEVIRT_PROXIES").map(PathBuf::from)
}

/// The lab's command, which stands beside the running program or one directory above.
fn lab() -> PathBuf {
    let here = std::env::current_exe().unwrap_or_default();
    let beside = here.ancestors().skip(1).take(2).map(|dir| dir.join("lab"));
    beside.into_iter().find(|path| path.is_file()).unwrap_or_else(|| "lab".into())
}

/// What runs first in a pod: listens where virt-launcher does, starts a program, and
/// waits for all that ends.
///
/// # Errors
/// If it can't listen, or start it.
pub fn launch(socket: &Path, argv: &[OsString]) -> std::io::Result<()> {
    let _ = fs::remove_file(socket);
    let listener = UnixListener::bind(socket)?;
    let (program, args) = argv.split_first().ok_or(std::io::ErrorKind::InvalidInput)?;
    Command::new(program).args(args).stdin(Stdio::null()).spawn()?;
    // Whoever connects wants to know who listens, and no more.
    std::thread::spawn(move || listener.incoming().for_each(drop));
    // All that is nobody's child any more is ours, as the first program's in a pod.
    while rustix::process::wait(rustix::process::WaitOptions::empty()).is_ok() {}
    Ok(())
}
