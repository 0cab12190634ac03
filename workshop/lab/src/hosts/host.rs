//! One host.

use std::env;
use std::io::{BufRead, BufReader};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::counters::{self, Traffic};
use super::namespace::{ip, nic_name, processes, remove, tc};
use super::stale::wait_if_abandoned;
use crate::error::{FileContext, LabError, Result, SystemContext};
use crate::program;
use crate::systemd::{Boot, Systemd};

/// A directory that is private to each host.
pub const RUN_DIR: &str = "/run/droveway-lab";

/// Environment variable with the congestion control for hosts.
const CONGESTION_VARIABLE: &str = "LAB_CONGESTION";

/// `systemd-run`'s option by which programs of VMs' owners are not among those of the system.
const OWNERS_SLICE: &str = "--slice=owners";

/// A network namespace and a private [`RUN_DIR`]; with a system of its own, once that has booted.
#[derive(Debug)]
pub struct Host {
    /// The namespace's name.
    pub name: String,
    /// Its address on each NIC.
    pub addresses: Vec<IpAddr>,
    /// [`RUN_DIR`] of this host, as seen from outside.
    pub run_dir: PathBuf,
    /// Congestion control of its TCP connections: `LAB_CONGESTION`, or `cubic`, or the machine's
    /// default where the lab may not choose.
    pub congestion_control: String,
    pub(super) shaped: bool,
    /// Holds the mount namespace; ends when the lab does.
    keeper: Child,
    /// What commands see, if it was booted.
    systemd: Option<Systemd>,
    _dir: tempfile::TempDir,
}

impl Host {
    pub(super) fn new(name: &str, addresses: Vec<IpAddr>, shaped: bool) -> Result<Self> {
        let dir = tempfile::Builder::new()
            .prefix(&format!("{name}-"))
            .tempdir()
            .doing("make a directory for a host")?;
        std::fs::create_dir_all(RUN_DIR).at("make", RUN_DIR)?;
        program::output(program::command("ip").args(["netns", "add", name]))?;
        let (keeper, congestion_control) = keep(name, dir.path()).inspect_err(|_| {
            drop(program::run(program::command("ip").args(["netns", "del", name])));
        })?;
        let host = Self {
            name: name.to_owned(),
            addresses,
            run_dir: dir.path().to_owned(),
            congestion_control,
            shaped,
            keeper,
            systemd: None,
            _dir: dir,
        };
        host.ip(&["link", "set", "lo", "up"])?;
        Ok(host)
    }

    /// Boots systemd on it, in its network. From then on, commands run there.
    ///
    /// # Errors
    /// If it doesn't come up.
    pub fn boot(&mut self, boot: &Boot<'_>) -> Result<()> {
        let booted = Systemd::boot(self.command("sh"), boot)?;
        self.systemd = Some(booted);
        Ok(())
    }

    /// Its systemd's process, as this machine numbers it; none if it has none.
    #[must_use]
    pub fn systemd(&self) -> Option<u32> {
        self.systemd.as_ref().map(Systemd::pid)
    }

    /// A command that runs on this host, in the directory `/`.
    #[must_use]
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        self.command_in(Path::new("/"), program)
    }

    /// A command that runs on this host, in a directory.
    #[must_use]
    pub fn command_in(&self, dir: &Path, program: impl AsRef<std::ffi::OsStr>) -> Command {
        if let Some(systemd) = &self.systemd {
            return systemd.command(dir, program);
        }
        let mut command = program::command("nsenter");
        command
            .arg(format!("--target={}", self.keeper.id()))
            .args(["--mount", "--net"])
            .arg(format!("--wdns={}", dir.display()))
            .arg("--")
            .arg(program);
        command
    }

    /// A command that runs on this host until its program ends. If the host has a systemd, that
    /// starts the program, in a unit of this name, and whoever ends the command does not end it.
    #[must_use]
    pub fn service(&self, unit: &str, program: impl AsRef<std::ffi::OsStr>) -> Command {
        if self.systemd.is_none() {
            return self.command(program);
        }
        let mut command = self.command("systemd-run");
        command.args(["--wait", "--collect", "--quiet", OWNERS_SLICE, "--unit", unit, "--"]);
        command.arg(program);
        command
    }

    /// A path in this host's [`RUN_DIR`], including what is mounted there, as seen from outside.
    #[must_use]
    pub fn inside(&self, path: &str) -> PathBuf {
        self.path(RUN_DIR).join(path)
    }

    /// A path of this host, including what is mounted there, as seen from outside.
    #[must_use]
    pub fn path(&self, path: &str) -> PathBuf {
        let within = self.systemd().unwrap_or(self.keeper.id());
        PathBuf::from(format!("/proc/{within}/root")).join(path.trim_start_matches('/'))
    }

    /// Calls `run` on a thread in this host's network, where its sockets and threads stay.
    ///
    /// # Panics
    /// If the network can't be entered, or `run` panics.
    pub fn within<T: Send>(&self, run: impl FnOnce() -> T + Send) -> T {
        let network = std::fs::File::open(format!("/proc/{}/ns/net", self.keeper.id()));
        let network = network.expect("the keeper is there");
        let enter = || {
            move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network))
                .expect("root may enter networks");
            run()
        };
        std::thread::scope(|scope| scope.spawn(enter).join())
            .unwrap_or_else(|fault| std::panic::resume_unwind(fault))
    }

    /// Runs `ip` on this host's network.
    pub(super) fn ip(&self, args: &[&str]) -> Result<String> {
        ip(&self.name, args)
    }

    /// Runs `tc` on this host's network.
    pub(super) fn tc(&self, args: &[&str]) -> Result<String> {
        tc(&self.name, args)
    }

    /// Traffic sent by its NICs.
    ///
    /// # Errors
    /// If the counters can't be read.
    pub fn sent(&self) -> Result<Traffic> {
        counters::sent(self)
    }

    /// Traffic sent by one of its NICs.
    ///
    /// # Errors
    /// As [`Host::sent`].
    pub fn sent_by(&self, nic: usize) -> Result<Traffic> {
        counters::sent_by(self, nic)
    }

    /// The processes that run on this host, but not those of its system; as they are numbered
    /// there.
    ///
    /// # Errors
    /// If `ip` fails.
    pub fn processes(&self) -> Result<Vec<u32>> {
        if let Some(systemd) = &self.systemd {
            return Ok(systemd.processes());
        }
        let keeper = self.keeper.id();
        Ok(processes(&self.name)?.into_iter().filter(|pid| *pid != keeper).collect())
    }

    /// Sets a NIC up or down. While it is down, nothing passes in either direction.
    ///
    /// # Errors
    /// If `ip` fails.
    pub fn set_nic(&self, nic: usize, up: bool) -> Result<()> {
        let state = if up { "up" } else { "down" };
        self.ip(&["link", "set", &nic_name(nic), state]).map(drop)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        wait_if_abandoned();
        if let Err(error) = remove(&self.name) {
            eprintln!("lab: {} is left behind: {error}", self.name);
        }
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}

/// Starts the process that holds a host's mount namespace: `cat`, until its input, a pipe from the
/// lab, closes. Also returns the host's congestion control.
///
/// `ip netns exec` mounts a `/sys` of the namespace, which has no cgroups. So they are bound to the
/// place of the host's own directory meanwhile, and then back.
fn keep(name: &str, dir: &Path) -> Result<(Child, String)> {
    let outside = "mount --make-rprivate / && mount --rbind /sys/fs/cgroup \"$4\"; exec ip netns exec \"$1\" sh -c \"$2\" \
        keeper \"$3\" \"$4\"";
    let script = "mount --make-rprivate / && { mount --rbind \"$2\" /sys/fs/cgroup && umount -R \"$2\" || true; } \
        && mount --bind \"$1\" \"$2\" \
        && { echo \"${LAB_CONGESTION:-cubic}\" > /proc/sys/net/ipv4/tcp_congestion_control || true; } 2>/dev/null \
        && cat /proc/sys/net/ipv4/tcp_congestion_control && exec cat > /dev/null";
    let mut keeper = program::command("unshare")
        .args(["--mount", "sh", "-c", outside, "keeper", name, script])
        .arg(dir)
        .arg(RUN_DIR)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .doing("start a host's keeper")?;
    let mut said = String::new();
    if let Some(output) = keeper.stdout.take() {
        BufReader::new(output).read_line(&mut said).doing("hear a host's keeper")?;
    }
    let control = said.trim().to_owned();
    let what = if control.is_empty() {
        "mount namespaces can't be made here; the lab needs them".to_owned()
    } else if let Some(wanted) = env::var(CONGESTION_VARIABLE).ok().filter(|name| *name != control)
    {
        format!(
            "the lab's hosts can't have the congestion control {wanted}: only what \
             /proc/sys/net/ipv4/tcp_allowed_congestion_control names"
        )
    } else {
        return Ok((keeper, control));
    };
    let _ = keeper.kill();
    let _ = keeper.wait();
    Err(LabError::Unsupported(what))
}
