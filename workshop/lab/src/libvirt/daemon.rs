//! One libvirtd.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::Pod;
use crate::agent::peer_name;
use crate::error::{FileContext, LabError, Result, SystemContext};
use crate::hosts::{Host, Hosts, RUN_DIR};
use crate::program;
use crate::setup::{self, QEMU_MODULES};

const FURNISH: &str = include_str!("furnish.sh");
/// It usually answers within half a second.
const UP_MAX: Duration = Duration::from_secs(60);
/// Number of user IDs in which a distribution's users lie.
const SYSTEM_IDS: u64 = 1 << 16;

/// The user that runs QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QemuUser {
    /// The distributions' default.
    LibvirtQemu,
    /// Where no other user can reach the files of the lab's guests, or no other user exists.
    Root,
}

impl QemuUser {
    /// The user to run QEMU as here.
    #[must_use]
    pub fn usual() -> Self {
        if has_system_ids() && all_may_enter(&setup::store()) {
            Self::LibvirtQemu
        } else {
            Self::Root
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::LibvirtQemu => "libvirt-qemu",
            Self::Root => "root",
        }
    }
}

/// Whether other users' IDs exist, which a user namespace may lack.
fn has_system_ids() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let ids = map.lines().filter_map(|line| line.split_whitespace().nth(2)?.parse().ok());
    ids.max().is_some_and(|ids: u64| ids >= SYSTEM_IDS)
}

fn all_may_enter(dir: &Path) -> bool {
    let open = |dir: &Path| fs::metadata(dir).is_ok_and(|it| it.permissions().mode() & 1 == 1);
    dir.ancestors().filter(|dir| !dir.as_os_str().is_empty()).all(open)
}

/// libvirtd on a host. Dropping it kills it, and leaves its domains running.
#[derive(Debug)]
pub struct Libvirtd {
    child: Child,
    host_name: &'static str,
    log: PathBuf,
    pod: Option<Pod>,
}

impl Libvirtd {
    /// Starts libvirtd on `host` with these additional lines in its `qemu.conf`, and waits until it
    /// answers.
    ///
    /// # Errors
    /// If the host can't be furnished, or libvirtd doesn't come up; with the end of its log.
    pub fn start(
        hosts: &Hosts,
        host: &Host,
        made_of: &setup::Libvirt,
        qemu_conf: &str,
    ) -> Result<Self> {
        let user = QemuUser::usual();
        if !host.path("/run/layers").is_dir() {
            furnish(host, made_of, user)?;
        }
        configure(hosts, host, user, qemu_conf)?;
        Self::start_again(hosts, host)
    }

    /// Starts libvirtd in a pod of `host`, as KubeVirt does for each VM.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_in_pod(
        hosts: &Hosts,
        host: &Host,
        made_of: &setup::Libvirt,
        uid: &str,
    ) -> Result<Self> {
        let user = QemuUser::usual();
        if !host.path("/run/layers").is_dir() {
            furnish(host, made_of, user)?;
        }
        configure(hosts, host, user, "")?;
        let pod = Pod::new(host, uid)?;
        let mut command = pod.command(host);
        command.args(["sh", "-c", &script(""), "libvirtd"]);
        let daemon = Self::run(hosts, host, command, Some(pod.clone()))?;
        pod.note(host)?;
        Ok(daemon)
    }

    /// Starts libvirtd again, with the existing configuration.
    ///
    /// # Errors
    /// If it doesn't come up; with the end of its log.
    pub fn start_again(hosts: &Hosts, host: &Host) -> Result<Self> {
        let mut command = host.command("unshare");
        command.args(["--uts", "sh", "-c", &script("--listen"), "libvirtd"]);
        Self::run(hosts, host, command, None)
    }

    fn run(hosts: &Hosts, host: &Host, mut command: Command, pod: Option<Pod>) -> Result<Self> {
        let host_name = peer_name(hosts, host);
        let log = host.run_dir.join("libvirtd.log");
        let said = fs::File::create(host.run_dir.join("libvirtd.said"));
        let said = said.at("create", host.run_dir.join("libvirtd.said"))?;
        let child = command
            .arg(host_name)
            .stdin(Stdio::null())
            .stdout(said.try_clone().doing("copy a descriptor")?)
            .stderr(said)
            .spawn()
            .doing("start libvirtd")?;
        let mut daemon = Self { child, host_name, log, pod };
        daemon.wait_up(host)?;
        Ok(daemon)
    }

    fn wait_up(&mut self, host: &Host) -> Result<()> {
        let until = Instant::now() + UP_MAX;
        loop {
            if self.virsh(host, &["list"]).output().doing("run virsh")?.status.success() {
                return Ok(());
            }
            // A libvirtd that can't start exits with success.
            let ended = self.child.try_wait().doing("wait for libvirtd")?;
            if ended.is_some() || Instant::now() > until {
                return Err(LabError::Silent {
                    what: format!("libvirtd of {}", self.host_name),
                    waited: UP_MAX,
                    detail: format!("; its log: {}", self.log_end()),
                });
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// A `virsh` command on its host that talks to it.
    #[must_use]
    pub fn virsh(&self, host: &Host, args: &[&str]) -> Command {
        let mut command = host.command("virsh");
        command.args(["--quiet", "--connect", "qemu:///system"]).args(args).stdin(Stdio::null());
        command
    }

    /// The output of `virsh`, which must succeed.
    ///
    /// # Errors
    /// If it fails.
    pub fn tells(&self, host: &Host, args: &[&str]) -> Result<String> {
        program::output(&mut self.virsh(host, args))
    }

    /// The URI by which other hosts reach it.
    #[must_use]
    pub fn uri(&self) -> String {
        match &self.pod {
            // Through virt-handlers, one of which has made that socket.
            Some(pod) => format!("qemu+unix:///system?socket={}", pod.socket(None)),
            None => format!("qemu+tcp://{}/system", self.host_name),
        }
    }

    /// The pod that it is in.
    #[must_use]
    pub fn pod(&self) -> Option<&Pod> {
        self.pod.as_ref()
    }

    /// Its process ID.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills it, as a crash would.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Its whole log: each command to a QEMU, each answer and event.
    #[must_use]
    pub fn log_text(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    fn log_end(&self) -> String {
        let text = fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&text[text.len().saturating_sub(4000)..]).into_owned()
    }
}

impl Drop for Libvirtd {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The host name goes into the addresses that libvirtd gives out, so it can't be the machine's.
fn script(options: &str) -> String {
    format!(
        "hostname \"$1\" && PATH=$PATH:/usr/sbin:/sbin && \
         export LIBVIRT_DRIVER_DIR=/run/drivers && exec libvirtd {options}"
    )
}

fn furnish(host: &Host, made_of: &setup::Libvirt, user: QemuUser) -> Result<()> {
    let mut command = host.command("sh");
    command.args(["-c", FURNISH, "furnish", RUN_DIR, user.name(), QEMU_MODULES]);
    command.arg(&made_of.capabilities).args(&made_of.tree);
    program::output(&mut command).map(drop)
}

fn configure(hosts: &Hosts, host: &Host, user: QemuUser, more: &str) -> Result<()> {
    let address = host.addresses[0];
    let number = match address {
        IpAddr::V4(address) => address.octets()[3],
        IpAddr::V6(address) => address.octets()[15],
    };
    let write = |path: &str, text: &str| {
        let path = host.path(path);
        fs::write(&path, text).at("write", &path)
    };
    let names: String = [&hosts.a, &hosts.b]
        .map(|host| format!("{} {}\n", host.addresses[0], peer_name(hosts, host)))
        .concat();
    write("/etc/hosts", &format!("127.0.0.1 localhost\n{names}"))?;
    let libvirtd = format!(
        "listen_tls = 0\n\
         listen_tcp = 1\n\
         listen_addr = \"{address}\"\n\
         auth_tcp = \"none\"\n\
         auth_unix_rw = \"none\"\n\
         # By what the firmware says, both are one host.\n\
         host_uuid = \"6c616200-0000-4000-8000-0000000000{number:02x}\"\n\
         log_filters = \"1:qemu.qemu_monitor 1:qemu.qemu_migration 1:util.hook\"\n\
         log_outputs = \"1:file:{RUN_DIR}/libvirtd.log\"\n"
    );
    write("/etc/libvirt/libvirtd.conf", &libvirtd)?;
    let user = user.name();
    let qemu = format!(
        "security_driver = \"none\"\n\
         user = \"{user}\"\n\
         group = \"{user}\"\n\
         stdio_handler = \"file\"\n\
         cgroup_controllers = []\n\
         namespaces = []\n\
         hugetlbfs_mount = []\n\
         {more}"
    );
    write("/etc/libvirt/qemu.conf", &qemu)
}
