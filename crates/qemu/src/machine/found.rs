//! A QEMU that runs already: the agent's own after its restart, or one that
//! somebody else started.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::Mutex;

use super::{Machine, Record, StartError};
use crate::command_line::CommandLine;
use crate::process::{
    Process, ProcessError, SEEING_TAKES, command_line_of, directory_of, proc_path,
};
use crate::qmp::Qmp;

const CONNECT: Duration = Duration::from_secs(10);

/// Finds a VM that an earlier run of the agent started or attached, and that
/// has `dir` for what must survive the agent.
///
/// # Errors
/// If its QEMU is gone, or isn't reachable as it was.
pub fn reopen(record: &Record, dir: &Path) -> Result<Machine, StartError> {
    let process = Process::find(&record.process)?;
    let qmp = Qmp::connect(&record.socket, CONNECT)?;
    Ok(Machine {
        process,
        version: qmp.version_text(),
        qmp,
        argv: record.argv.clone(),
        cwd: record.cwd.clone(),
        notes: record.notes.clone(),
        guest_port: record.guest_port,
        port_turn: Mutex::default(),
        dir: dir.to_owned(),
        socket: record.socket.clone(),
        log: record.log.clone(),
    })
}

/// Meets a VM that somebody else started. What must survive the agent goes to
/// `dir`, which has to be there when the VM moves.
///
/// # Errors
/// If its QMP can't be reached or its process can't be found.
pub fn attach(socket: &Path, dir: &Path) -> Result<Machine, StartError> {
    let qmp = Qmp::connect(socket, CONNECT)?;
    let pid = qemu_process(&qmp).ok_or_else(|| StartError::Hidden { path: socket.to_owned() })?;
    let process = Process::now(pid)?;
    let socket = socket.canonicalize().unwrap_or_else(|_| socket.to_owned());
    let (cwd, notes) = match directory_of(pid) {
        Err(ProcessError::Denied { .. }) => (PathBuf::from("/"), vec![relative_from_root(pid)]),
        cwd => (cwd?, Vec::new()),
    };
    Ok(Machine {
        argv: CommandLine::of_running(&command_line_of(pid)?),
        cwd,
        notes,
        // If it has one, its command line shows it.
        guest_port: false,
        port_turn: Mutex::default(),
        dir: dir.to_owned(),
        process,
        version: qmp.version_text(),
        qmp,
        socket,
        log: None,
    })
}

fn relative_from_root(pid: u32) -> String {
    format!(
        "relative paths on the VM's command line are taken from /, since the agent may not see \
         the directory of QEMU's process {pid}: {SEEING_TAKES}"
    )
}

/// Under another program's management the socket was made by that; a QEMU in
/// a container counts threads in its own way. One of the two is QEMU.
fn qemu_process(qmp: &Qmp) -> Option<u32> {
    let is_qemu = |pid: &u32| {
        // Its program, or, of a process that we may not look into, what it was
        // started as.
        let program = fs::read_link(proc_path(*pid, "exe")).ok();
        let started = || Some(command_line_of(*pid).ok()?.into_iter().next()?.into());
        let program: PathBuf = program.or_else(started).unwrap_or_default();
        let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.contains("qemu") || name.contains("kvm")
    };
    let candidates = [qmp.process_of_vcpu(), qmp.peer_pid()];
    candidates.into_iter().flatten().find(is_qemu)
}
