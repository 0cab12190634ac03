//! A QEMU that runs already: the agent's own after the agent's restart, or one that
//! another program started.

use std::fs;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use parking_lot::Mutex;

use super::open_files::{address_of, display_of};
use super::taps::tap_of;
use super::{Machine, Record, StartError, qmp_socket};
use crate::command_line::{
    CommandLine, with_addresses, with_tap_names, with_vnc_address, without_numbers,
};
use crate::process::{
    Process, ProcessError, SEEING_TAKES, command_line_of, directory_of, proc_path,
};
use crate::qmp::{Qmp, QmpError};

const CONNECT: Duration = Duration::from_secs(10);
/// A QEMU that ends closes its socket before its process has exited: some seconds
/// before, with much memory to free.
const ENDING: Duration = Duration::from_secs(3);

/// Finds a VM that an earlier run of the agent started or attached, and that
/// has `dir` for what must survive the agent, unless its record names another one.
///
/// # Errors
/// [`ProcessError::Exited`] if its QEMU has exited. With any other error it may still run,
/// but can't be reached as before.
pub fn reopen(record: &Record, dir: &Path) -> Result<Machine, StartError> {
    let process = Process::find(&record.process)?;
    let qmp = Qmp::connect(&record.socket, CONNECT).map_err(|error| {
        let ends = matches!(error, QmpError::Closed | QmpError::Connect { .. });
        match process.wait_exited(if ends { ENDING } else { Duration::ZERO }) {
            Ok(()) => ProcessError::Exited { pid: process.pid() }.into(),
            Err(_) => StartError::from(error),
        }
    })?;
    Ok(Machine {
        process,
        version: qmp.version_text(),
        qmp,
        argv: record.argv.clone(),
        cwd: record.cwd.clone(),
        notes: record.notes.clone(),
        guest_port: record.guest_port,
        keeps_announce_timers: record.keeps_announce_timers,
        port_turn: Mutex::default(),
        one_of_two: AtomicBool::new(false),
        dir: record.dir.clone().unwrap_or_else(|| dir.to_owned()),
        socket: record.socket.clone(),
        log: record.log.clone(),
    })
}

/// Attaches to a VM that another program started, or to one of the agent's whose record is
/// lost. What must survive the agent goes to `dir`, which has to exist when the VM moves.
///
/// # Errors
/// If its QMP can't be reached or its process can't be found.
pub fn attach(socket: &Path, dir: &Path) -> Result<Machine, StartError> {
    let qmp = Qmp::connect(socket, CONNECT)?;
    let pid = qemu_process(&qmp).ok_or_else(|| StartError::Hidden { path: socket.to_owned() })?;
    let process = Process::now(pid)?;
    let socket = socket.canonicalize().unwrap_or_else(|_| socket.to_owned());
    let is_ours = dir.canonicalize().is_ok_and(|dir| socket == qmp_socket(&dir));
    let running = command_line_of(pid)?;
    let (cwd, notes) = match directory_of(pid) {
        Err(ProcessError::Denied { .. }) => (PathBuf::from("/"), vec![relative_from_root(pid)]),
        cwd => (cwd?, Vec::new()),
    };
    // It still answers, so the process id was its own all along, and what was read of
    // the process is this QEMU's.
    qmp.run_state()?;
    let link = |file: RawFd| {
        let path = fs::read_link(proc_path(pid, &format!("fd/{file}"))).ok()?;
        path.into_os_string().into_string().ok()
    };
    let mut argv = without_numbers(CommandLine::of_running(&running), link);
    if is_ours {
        argv = with_addresses(argv, |socket| address_of(&process, socket));
        argv = with_vnc_address(argv, |socket| display_of(&process, socket));
        argv = with_tap_names(argv, |file| tap_of(&process, file));
    }
    Ok(Machine {
        argv,
        cwd,
        notes,
        // A port that the owner added is on the command line.
        guest_port: CommandLine::has_our_guest_port(&running),
        keeps_announce_timers: true,
        port_turn: Mutex::default(),
        one_of_two: AtomicBool::new(false),
        dir: dir.to_owned(),
        process,
        version: qmp.version_text(),
        qmp,
        socket,
        log: is_ours.then(|| dir.join("qemu.log")),
    })
}

fn relative_from_root(pid: u32) -> String {
    format!(
        "relative paths on the VM's command line are taken from /, since the agent may not read \
         the directory of QEMU's process {pid}: {SEEING_TAKES}"
    )
}

/// Finds QEMU's process. A management program may have made the socket, and then is
/// its peer; a QEMU in a container reports threads by the container's ids. One of the
/// two candidates is QEMU.
fn qemu_process(qmp: &Qmp) -> Option<u32> {
    let is_qemu = |pid: &u32| {
        // Its program, or the one on its command line if the agent may not inspect
        // the process.
        let program = fs::read_link(proc_path(*pid, "exe")).ok();
        let started = || Some(command_line_of(*pid).ok()?.into_iter().next()?.into());
        let program: PathBuf = program.or_else(started).unwrap_or_default();
        let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.contains("qemu") || name.contains("kvm")
    };
    let candidates = [qmp.process_of_vcpu(), qmp.peer_pid()];
    candidates.into_iter().flatten().find(is_qemu)
}
