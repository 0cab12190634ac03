//! Starting a VM's QEMU with a QMP socket of the agent's.

use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::{Machine, StartError};
use crate::command_line::CommandLine;
use crate::launch::{Launch, launch, log_tail};
use crate::process::Process;
use crate::qmp::{Qmp, QmpError};

/// QEMU answers when the machine is built; with `prealloc=on` it touches all
/// RAM before, at some GB/s.
const UP_MAX: Duration = Duration::from_secs(300);
const GONE_WAIT: Duration = Duration::from_secs(10);

/// What to start.
#[derive(Debug)]
pub struct Start<'a> {
    /// The VM's name.
    pub name: &'a str,
    /// QEMU and its arguments, as the user typed them.
    pub argv: &'a [String],
    /// The directory that relative paths in them are meant from.
    pub cwd: &'a Path,
    /// A directory for the VM's socket and log; made if it isn't there.
    pub dir: &'a Path,
    /// Whether to wait, stopped, for a migration.
    pub incoming: bool,
    /// The machine type of the VM that is to come, with its version.
    pub machine: Option<&'a str>,
}

/// Starts a VM's QEMU and waits until it answers.
///
/// # Errors
/// With QEMU's own words if it doesn't come up. Nothing is left behind.
pub fn start(start: &Start<'_>) -> Result<Machine, StartError> {
    let line = CommandLine::parse(start.argv)?;
    let directory = |source| StartError::Directory { path: start.dir.to_owned(), source };
    fs::create_dir_all(start.dir).map_err(directory)?;
    let socket = start.dir.join("qmp");
    let listener = listen(&socket)?;
    let mut line = line.with_qmp(listener.as_raw_fd());
    if start.incoming {
        line = line.waiting(start.machine);
    }
    let inherit = [listener.as_fd()];
    let log = start.dir.join("qemu.log");
    let logged = fs::metadata(&log).map_or(0, |file| file.len());
    let launched =
        launch(&Launch { argv: &line.argv(), cwd: start.cwd, log: &log, inherit: &inherit });
    // Only QEMU has the socket now: if it ends, whoever connected hears so.
    drop(listener);
    let process = launched.inspect_err(|_| remove(&socket))?;
    let qmp = connect(&process, &socket, &log, logged).inspect_err(|_| {
        give_up(&process);
        remove(&socket);
    })?;
    if start.incoming {
        find_room(&qmp, process.pid()).inspect_err(|_| give_up(&process))?;
    }
    Ok(Machine {
        process,
        version: qmp.version_text(),
        qmp,
        argv: start.argv.to_vec(),
        cwd: start.cwd.to_owned(),
        dir: start.dir.to_owned(),
        notes: Vec::new(),
        socket,
        log: Some(log),
    })
}

fn listen(socket: &Path) -> Result<UnixListener, StartError> {
    let refused = |source| StartError::Socket { path: socket.to_owned(), source };
    remove(socket);
    let listener = UnixListener::bind(socket).map_err(refused)?;
    // QMP is all power over the VM, and over what its QEMU may open.
    fs::set_permissions(socket, fs::Permissions::from_mode(0o600)).map_err(refused)?;
    Ok(listener)
}

fn connect(
    process: &Process,
    socket: &Path,
    log: &Path,
    logged: u64,
) -> Result<Arc<Qmp>, StartError> {
    let error = match Qmp::connect(socket, UP_MAX) {
        Ok(qmp) => return Ok(qmp),
        Err(error) => error,
    };
    let ended = matches!(error, QmpError::Closed | QmpError::Connect { .. })
        && process.wait_gone(GONE_WAIT).is_ok();
    if !ended {
        return Err(error.into());
    }
    let words = log_tail(log, logged).unwrap_or_else(|| "it doesn't say why".to_owned());
    Err(StartError::Ended { words })
}

/// Refuses a VM that the host has no memory for: to find out while it arrives
/// would cost others theirs. What QEMU has allocated already (`prealloc=on`,
/// huge pages) needs no more room.
fn find_room(qmp: &Qmp, pid: u32) -> Result<(), StartError> {
    let ram = qmp.ram_bytes()?;
    let has = in_status(&fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default());
    room_for(ram.saturating_sub(has), &fs::read_to_string("/proc/meminfo").unwrap_or_default())
}

fn in_status(status: &str) -> u64 {
    let parts = ["RssAnon:", "RssShmem:", "HugetlbPages:"];
    parts.iter().filter_map(|part| kib(status, part)).sum::<u64>().saturating_mul(1024)
}

fn room_for(needed: u64, meminfo: &str) -> Result<(), StartError> {
    let Some(free) = kib(meminfo, "MemAvailable:") else { return Ok(()) };
    let swap = kib(meminfo, "SwapFree:").unwrap_or(0);
    let available = free.saturating_add(swap).saturating_mul(1024);
    if needed > available { Err(StartError::NoRoom { needed, available }) } else { Ok(()) }
}

fn kib(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().trim_end_matches(" kB").parse().ok()
}

fn give_up(process: &Process) {
    let ended = process.kill().and_then(|()| process.wait_gone(GONE_WAIT));
    if let Err(error) = ended {
        tracing::error!(%error, "a QEMU that doesn't answer can't be ended");
    }
}

fn remove(socket: &Path) {
    // It is there only if a QEMU was ended by force.
    let _ = fs::remove_file(socket);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_larger_than_the_host_finds_no_room() {
        let meminfo = "MemTotal: 9 kB\nMemAvailable:    4096 kB\nSwapFree:  1024 kB\n";
        assert!(room_for(5 << 20, meminfo).is_ok());
        let refused = room_for(9 << 20, meminfo).unwrap_err();
        assert!(refused.to_string().starts_with("no room for the VM: it has 9 MiB"), "{refused}");
        let status = "VmRSS:  99 kB\nRssAnon:\t 10 kB\nRssShmem: 5 kB\nHugetlbPages:  1 kB\n";
        assert_eq!(in_status(status), 16 << 10);
    }
}
