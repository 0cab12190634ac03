//! Starting a VM's QEMU with RAM and a QMP socket of the agent's.

use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ram::{Mapping, RamFile};

use super::{Machine, SharedRam, StartError};
use crate::command_line::{Backend, CommandLine};
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
    let plan = line.memory_plan()?;
    let directory = |source| StartError::Directory { path: start.dir.to_owned(), source };
    fs::create_dir_all(start.dir).map_err(directory)?;
    if start.incoming {
        find_room(&plan.shared)?;
    }
    let ram = plan.shared.iter().map(|backend| make_ram(start.name, backend));
    let ram = ram.collect::<Result<Vec<SharedRam>, StartError>>()?;

    let socket = start.dir.join("qmp");
    let listener = listen(&socket)?;
    let fds: Vec<(&str, RawFd)> = ram.iter().map(|ram| (ram.id.as_str(), ram.fd)).collect();
    let mut line = line.with_shared_ram(&fds).with_qmp(listener.as_raw_fd());
    if start.incoming {
        line = line.waiting(start.machine);
    }
    let mut inherit: Vec<BorrowedFd<'_>> =
        ram.iter().map(|ram| ram.mapping.file().as_fd()).collect();
    inherit.push(listener.as_fd());
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
    Ok(Machine {
        process,
        version: qmp.version_text(),
        qmp,
        ram,
        left: plan.left,
        argv: start.argv.to_vec(),
        cwd: start.cwd.to_owned(),
        socket,
        log: Some(log),
    })
}

fn make_ram(vm: &str, backend: &Backend) -> Result<SharedRam, StartError> {
    let refused = |source| StartError::Ram { id: backend.id.clone(), source };
    // The kernel shows the name in /proc, and keeps some 249 bytes of it.
    let name: String = format!("droveway-{vm}-{}", backend.id).chars().take(60).collect();
    let file = RamFile::create(&name, backend.bytes, backend.huge).map_err(refused)?;
    shared_ram(backend.id.clone(), &file).map_err(refused)
}

/// RAM mapped here, and what finds it again in QEMU.
pub(super) fn shared_ram(id: String, file: &RamFile) -> Result<SharedRam, ram::RamError> {
    let mapping = Arc::new(Mapping::new(file)?);
    let fd = mapping.file().as_fd().as_raw_fd();
    let inode = inode(mapping.file());
    Ok(SharedRam { id, bytes: mapping.bytes(), mapping, fd, inode })
}

pub(super) fn inode(file: &RamFile) -> u64 {
    // fstat of an open file doesn't fail; 0 is no inode and finds nothing.
    rustix::fs::fstat(file).map_or(0, |stat| stat.st_ino)
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
/// would cost others theirs. Huge pages are taken from a pool of their own,
/// and are reserved when they are mapped.
fn find_room(backends: &[Backend]) -> Result<(), StartError> {
    let small = backends.iter().filter(|backend| backend.huge.is_none());
    let needed = small.fold(0_u64, |sum, backend| sum.saturating_add(backend.bytes));
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().trim_end_matches(" kB").parse::<u64>().ok()
    };
    let Some(free) = kib("MemAvailable:") else { return Ok(()) };
    let available = free.saturating_add(kib("SwapFree:").unwrap_or(0)).saturating_mul(1024);
    if needed > available { Err(StartError::NoRoom { needed, available }) } else { Ok(()) }
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
        let backend = |bytes, huge| Backend { id: "r".to_owned(), bytes, huge };
        assert!(find_room(&[backend(1 << 20, None)]).is_ok());
        assert!(find_room(&[backend(1 << 50, Some(2 << 20))]).is_ok());
        let refused = find_room(&[backend(1 << 50, None)]).unwrap_err();
        assert!(refused.to_string().starts_with("no room for the VM: it has 1073741824 MiB"));
    }
}
