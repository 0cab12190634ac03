//! Starts a VM's QEMU with a QMP socket for the agent.

use std::fs;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};
use parking_lot::Mutex;

use super::inherited::{Inherited, MadeSockets};
use super::ram_files::RamFiles;
use super::{Machine, StartError, guest_socket, qmp_socket};
use crate::command_line::{CommandLine, GUEST_ID};
use crate::launch::{Launch, User, launch, log_tail};
use crate::process::Process;
use crate::qmp::{Qmp, QmpError};

/// How long a QEMU may take until it answers, for an operator who waits. It answers when
/// the machine is built; with `prealloc=on` it touches all RAM before, at some GB/s.
pub const UP_MAX: Duration = Duration::from_secs(300);
/// How the note starts for a VM that should have a port for the helper in its guest, and
/// can't have one.
pub const NO_GUEST_PORT: &str = "the VM has no port for a helper in the guest";
const GONE_WAIT: Duration = Duration::from_secs(10);
/// How often a QEMU that has not answered yet is checked for work that it does.
const CHECK_EACH: Duration = Duration::from_secs(1);

/// What to start.
#[derive(Debug)]
pub struct Start<'a> {
    /// The VM's name.
    pub name: &'a str,
    /// QEMU and its arguments, as the user typed them.
    pub argv: &'a [String],
    /// The directory at which relative paths in them start.
    pub cwd: &'a Path,
    /// A directory for the VM's socket and log; created if it doesn't exist.
    pub dir: &'a Path,
    /// Whether to wait, stopped, for a migration.
    pub incoming: bool,
    /// The machine type of the incoming VM, with its version.
    pub machine: Option<&'a str>,
    /// Who requests the start.
    pub by: By<'a>,
    /// The user that QEMU runs as; `None` is the agent's own.
    pub user: Option<&'a User>,
    /// Whether it gets a port for the helper in the guest.
    pub guest_port: GuestPort,
    /// Whether this QEMU knows `migration.switchover-ack-legacy` (11.1 and newer), and
    /// so must be ordered to wait for the agent's acknowledgement.
    pub knows_legacy_ack: bool,
    /// How long it may take until it answers.
    pub up_max: Duration,
    /// How long it may use no CPU time until it answers: it hangs then, or waits for storage or
    /// for a client of one of its sockets.
    pub idle_max: Duration,
}

/// Who requests the start of a QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By<'a> {
    /// An operator of this host, who could start it without the agent. A command
    /// line that makes QEMU change its user by itself is respected.
    Operator,
    /// Another host. This file is executed, whatever the command line calls it,
    /// and the command line doesn't decide which user QEMU runs as.
    Peer {
        /// As [`crate::programs::Programs`] found it.
        program: &'a Path,
    },
}

/// Whether a VM gets a port for the helper in the guest, besides what its command
/// line says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestPort {
    /// It does not.
    None,
    /// It does if its machine can have one, and its command line has none.
    IfPossible,
    /// It does: the incoming VM has one.
    Needed,
}

/// Starts a VM's QEMU and waits until it answers.
///
/// # Errors
/// With QEMU's own message if it doesn't come up. Nothing is left behind.
pub fn start(start: &Start<'_>) -> Result<Machine, StartError> {
    start_reporting(start, &|_| {})
}

/// As [`start`]. `launched` is called with the process id of each QEMU as soon as it was launched,
/// before most of what it does until it answers; it must not block.
///
/// # Errors
/// As [`start`].
pub fn start_reporting(start: &Start<'_>, launched: &dyn Fn(u32)) -> Result<Machine, StartError> {
    start_with(start, None, launched)
}

/// As [`start_reporting`], for the next QEMU of a VM whose former one lives: it gets the same
/// listening sockets, RAM that is handed over, and open files for taps, and continues files with
/// the guest's output. The rest it gets when it is the VM's only one: [`Machine::take_over`].
///
/// # Errors
/// As [`start`].
pub fn start_next(
    start: &Start<'_>,
    inherited: &Inherited,
    launched: &dyn Fn(u32),
) -> Result<Machine, StartError> {
    start_with(start, Some(inherited), launched)
}

fn start_with(
    start: &Start<'_>,
    inherited: Option<&Inherited>,
    launched: &dyn Fn(u32),
) -> Result<Machine, StartError> {
    let mut line = as_said_by(start, CommandLine::parse(start.argv)?);
    let directory = |source| StartError::Directory { path: start.dir.to_owned(), source };
    fs::create_dir_all(start.dir).map_err(directory)?;
    // QEMU needs no access to it, whatever its user.
    fs::set_permissions(start.dir, fs::Permissions::from_mode(0o700)).map_err(directory)?;
    let made = inherited.map(|inherited| inherited.sockets.make(start.dir)).transpose()?;
    if let (Some(inherited), Some(made)) = (inherited, &made) {
        line = inherited.put_in(&line, made);
    }
    let started = start_lines(start, &line, (inherited, made.as_ref()), launched);
    if started.is_err() {
        made.iter().for_each(MadeSockets::remove);
    }
    started
}

/// Starts it with the port for the helper in the guest, or without.
fn start_lines(
    start: &Start<'_>,
    line: &CommandLine,
    inherited: (Option<&Inherited>, Option<&MadeSockets<'_>>),
    launched: &dyn Fn(u32),
) -> Result<Machine, StartError> {
    let wanted = match start.guest_port {
        GuestPort::None => false,
        GuestPort::IfPossible => !line.has_guest_port(),
        GuestPort::Needed => true,
    };
    let begin = |guest_port| start_line(start, line, inherited, guest_port, launched);
    match begin(wanted) {
        // QEMU names the option that it can't serve: its machine has no PCI bus, or
        // no free slot on it.
        Err(StartError::Ended { output })
            if start.guest_port == GuestPort::IfPossible && output.contains(GUEST_ID) =>
        {
            let mut machine = begin(false)?;
            machine.notes.push(format!("{NO_GUEST_PORT}: {output}"));
            Ok(machine)
        }
        started => started,
    }
}

/// A command line without the options that the requester may not use.
fn as_said_by(start: &Start<'_>, line: CommandLine) -> CommandLine {
    if start.by == By::Operator || start.user.is_none() {
        return line;
    }
    let (line, left_out) = line.without_user();
    for option in left_out {
        tracing::warn!(vm = start.name, option, "left out: qemu-user sets QEMU's user");
    }
    line
}

fn start_line(
    start: &Start<'_>,
    line: &CommandLine,
    (inherited, made): (Option<&Inherited>, Option<&MadeSockets<'_>>),
    guest_port: bool,
    launched: &dyn Fn(u32),
) -> Result<Machine, StartError> {
    let ram = RamFiles::make(line)?;
    let sockets = Sockets::new(start.dir, guest_port)?;
    let mut line = line.with_qmp(sockets.qmp.as_raw_fd()).with_ram_files(&ram.numbers());
    if let Some(port) = &sockets.guest {
        line = line.with_guest_port(port.as_raw_fd());
    }
    if start.knows_legacy_ack {
        line = line.with_switchover_ack();
    }
    if start.incoming {
        line = line.waiting(start.machine);
    }
    let (user, program, instead) = match start.by {
        By::Operator => (start.user.filter(|_| !line.names_user()), None, None),
        By::Peer { program } => (start.user, Some(program), Some(start.dir)),
    };
    let inherit: Vec<_> = [Some(&sockets.qmp), sockets.guest.as_ref()]
        .into_iter()
        .flatten()
        .map(AsFd::as_fd)
        .chain(ram.borrowed())
        .chain(inherited.into_iter().flat_map(Inherited::borrowed))
        .chain(made.into_iter().flat_map(MadeSockets::borrowed))
        .collect();
    let log = start.dir.join("qemu.log");
    let logged = fs::metadata(&log).map_or(0, |file| file.len());
    let argv = line.argv();
    let (argv, cwd, log_file, inherit) = (&argv[..], start.cwd, &log, &inherit[..]);
    let process = launch(&Launch { argv, program, cwd, instead, log: log_file, inherit, user });
    // Only QEMU has the sockets now: if it ends, connections to them end, too.
    drop(sockets);
    let socket = qmp_socket(start.dir);
    let remove_both = || {
        remove(&socket);
        remove(&guest_socket(start.dir));
    };
    let process = process.inspect_err(|_| remove_both())?;
    launched(process.pid());
    let qmp = connect(&process, &socket, start, &log, logged).inspect_err(|_| {
        give_up(&process);
        remove_both();
    })?;
    ram.seal();
    Ok(Machine {
        guest_port,
        keeps_announce_timers: true,
        port_turn: Mutex::default(),
        one_of_two: AtomicBool::new(inherited.is_some()),
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

/// The listening sockets for QMP, and for the helper in the guest.
struct Sockets {
    qmp: UnixListener,
    guest: Option<UnixListener>,
}

impl Sockets {
    fn new(dir: &Path, guest_port: bool) -> Result<Self, StartError> {
        let qmp = listen(&qmp_socket(dir))?;
        let guest = guest_port.then(|| listen(&guest_socket(dir))).transpose();
        let guest = guest.inspect_err(|_| remove(&qmp_socket(dir)))?;
        Ok(Self { qmp, guest })
    }
}

fn listen(socket: &Path) -> Result<UnixListener, StartError> {
    let refused = |source| StartError::Socket { path: socket.to_owned(), source };
    remove(socket);
    let listener = UnixListener::bind(socket).map_err(refused)?;
    // QMP has full control over the VM, and over what its QEMU may open.
    fs::set_permissions(socket, fs::Permissions::from_mode(0o600)).map_err(refused)?;
    Ok(listener)
}

fn connect(
    process: &Process,
    socket: &Path,
    start: &Start<'_>,
    log: &Path,
    logged: u64,
) -> Result<Arc<Qmp>, StartError> {
    let Start { up_max, idle_max, .. } = *start;
    let (connected, is_idle) = connect_unless_idle(process, socket, up_max, idle_max);
    let error = match connected {
        Ok(qmp) if !is_idle => return Ok(qmp),
        // It answered just when its connection was shut down.
        Ok(_) => QmpError::Closed,
        Err(error) => error,
    };
    let ended = !is_idle
        && matches!(error, QmpError::Closed | QmpError::Connect { .. })
        && process.wait_exited(GONE_WAIT).is_ok();
    let output = log_tail(log, logged);
    if ended {
        let output = output.unwrap_or_else(|| "it gives no reason".to_owned());
        return Err(StartError::Ended { output });
    }
    let why = match error {
        _ if is_idle => format!(
            "no greeting, and it has used no CPU time for {} s: it hangs, or waits for storage or \
             for a client of one of its sockets",
            idle_max.as_secs()
        ),
        // No other program has this socket.
        QmpError::NoGreeting { .. } => format!("no greeting within {} s", up_max.as_secs()),
        error => error.to_string(),
    };
    Err(StartError::Silent { why, output: output.unwrap_or_else(|| "nothing".to_owned()) })
}

/// Connects to a QEMU that has just been started. The flag says whether the wait was ended because
/// it did nothing.
fn connect_unless_idle(
    process: &Process,
    socket: &Path,
    up_max: Duration,
    idle_max: Duration,
) -> (Result<Arc<Qmp>, QmpError>, bool) {
    let refused = |source| QmpError::Connect { path: socket.to_owned(), source };
    let reached = Qmp::reach(socket, up_max);
    let both = reached.and_then(|stream| Ok((stream.try_clone().map_err(refused)?, stream)));
    let (watched, stream) = match both {
        Ok(both) => both,
        Err(error) => return (Err(error), false),
    };
    let (answered, answers) = bounded::<()>(0);
    thread::scope(|scope| {
        let watch = move || {
            let is_idle = becomes_idle(process, idle_max, &answers);
            if is_idle {
                // A QEMU that waits for storage can't even be killed: this ends the wait for it.
                let _ = watched.shutdown(Shutdown::Both);
            }
            is_idle
        };
        let watcher =
            match thread::Builder::new().name("start-idle".into()).spawn_scoped(scope, watch) {
                Ok(watcher) => watcher,
                Err(error) => return (Err(refused(error)), false),
            };
        let connected = Qmp::greeted(socket, stream, up_max);
        drop(answered);
        let is_idle = watcher.join().unwrap_or(false);
        (connected, is_idle)
    })
}

/// Waits until a QEMU has answered, or has used no CPU time for so long; returns whether it is the
/// latter. One that touches its memory works, however long that takes.
fn becomes_idle(process: &Process, idle_max: Duration, answers: &Receiver<()>) -> bool {
    let (mut used, mut worked) = (None, Instant::now());
    while answers.recv_timeout(CHECK_EACH) == Err(RecvTimeoutError::Timeout) {
        let now = process.cpu_ticks();
        // Where that can't be read, only `up_max` bounds the wait.
        if now != used || now.is_none() {
            (used, worked) = (now, Instant::now());
        } else if worked.elapsed() >= idle_max {
            return true;
        }
    }
    false
}

fn give_up(process: &Process) {
    let ended = process.kill().and_then(|()| process.wait_exited(GONE_WAIT));
    if let Err(error) = ended {
        tracing::error!(%error, "a QEMU that doesn't answer can't be ended");
    }
}

fn remove(socket: &Path) {
    // There is none if QEMU has removed it.
    let _ = fs::remove_file(socket);
}
