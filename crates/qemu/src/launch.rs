//! Starting a QEMU that outlives the agent.
//!
//! It gets a session of its own, so that no terminal or signal meant for the
//! agent reaches it, and inherits exactly the files that are listed.

mod log;

use std::ffi::CString;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use host::rights::Change;
use rustix::io::FdFlags;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::process::{Process, ProcessError};

/// `O_CLOEXEC` as `/proc/PID/fdinfo` shows it.
const CLOEXEC_SHOWN: u32 = 0o2_000_000;

pub use host::rights::User;
pub use log::{LOG_BYTES_MAX, bound_log, log_tail};

/// This process's limit of open files before it was raised.
static FILES_BEFORE: OnceLock<Rlimit> = OnceLock::new();

/// Raises this process's limit of open files to the maximum: each VM takes some. A
/// QEMU that it starts gets the earlier limit, since programs that QEMU starts
/// (a tap's script) close every descriptor below the limit, one by one.
///
/// # Errors
/// If the kernel refuses.
pub fn raise_open_files() -> io::Result<()> {
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: before.maximum, ..before })?;
    // If it is raised twice, the first value is the original one.
    let _ = FILES_BEFORE.set(before);
    Ok(())
}

/// What to start.
#[derive(Debug)]
pub struct Launch<'a> {
    /// The program and its arguments.
    pub argv: &'a [String],
    /// The file to execute, whatever the program is called; `None`: the program,
    /// looked for in PATH.
    pub program: Option<&'a Path>,
    /// The directory at which relative paths in them start.
    pub cwd: &'a Path,
    /// A directory that only the agent can enter, if another host chose `cwd`: it is
    /// the directory if the user can't enter `cwd`, and relative paths lead nowhere.
    pub instead: Option<&'a Path>,
    /// The file for what it writes to stdout and stderr.
    pub log: &'a Path,
    /// The files that it inherits, under the same descriptors as here.
    pub inherit: &'a [BorrowedFd<'a>],
    /// The user that it runs as; `None` is the agent's own.
    pub user: Option<&'a User>,
}

/// Why QEMU could not be started.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The command line is empty.
    #[error("the command line is empty")]
    Empty,
    /// The directory can't be used.
    #[error("the directory {} can't be used: {source}", path.display())]
    Directory {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The log can't be written.
    #[error("QEMU's log {} can't be written: {source}", path.display())]
    Log {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The program doesn't exist or can't be executed.
    #[error("{program} can't be started: {source}; is QEMU installed, and is its path right?")]
    Program {
        /// Which.
        program: String,
        /// Why.
        source: io::Error,
    },
    /// It was started, and can't be watched.
    #[error(transparent)]
    Process(#[from] ProcessError),
}

/// Starts it. Whether it comes up shows only over QMP.
///
/// # Errors
/// If it can't be executed.
pub fn launch(launch: &Launch<'_>) -> Result<Process, LaunchError> {
    let (program, arguments) = launch.argv.split_first().ok_or(LaunchError::Empty)?;
    let directory = |source| LaunchError::Directory { path: launch.cwd.to_owned(), source };
    let enter = match (launch.instead, launch.user) {
        (Some(_), Some(_)) => Some(CString::new(launch.cwd.as_os_str().as_bytes())),
        _ => None,
    };
    let enter = enter.transpose().map_err(|error| directory(error.into()))?;
    if !fs::metadata(launch.cwd).map_err(directory)?.is_dir() {
        return Err(directory(io::ErrorKind::NotADirectory.into()));
    }
    let log = |source| LaunchError::Log { path: launch.log.to_owned(), source };
    // Private: with -nographic or -serial stdio it holds the guest's console. Each write goes to
    // its end, also after `bound_log` has emptied it.
    let mut private = OpenOptions::new();
    private.create(true).append(true).mode(0o600);
    let out = private.open(launch.log).map_err(log)?;
    let err = out.try_clone().map_err(log)?;

    let mut command = match launch.program {
        Some(file) => Command::new(file),
        None => Command::new(program),
    };
    let entered = launch.instead.filter(|_| enter.is_some()).unwrap_or(launch.cwd);
    command.arg0(program).args(arguments).current_dir(entered);
    command.stdin(Stdio::null()).stdout(out).stderr(err);
    prepare_child(&mut command, launch.inherit, launch.user, enter);
    let mut child = command
        .spawn()
        .map_err(|source| LaunchError::Program { program: program.clone(), source })?;
    // `Process` reaps it; dropping `child` only closes its pipes, of which it has none.
    Ok(Process::now(child.id()).inspect_err(|_| {
        // It would continue running unnoticed.
        let _ = child.kill();
        let _ = child.wait();
    })?)
}

/// Gives a child a session of its own, these files and no others, that user and none
/// of the agent's rights; then it enters that directory, if it may.
#[expect(unsafe_code, reason = "a session and inherited files can only be arranged in the child")]
pub(crate) fn prepare_child(
    command: &mut Command,
    inherit: &[BorrowedFd<'_>],
    user: Option<&User>,
    enter: Option<CString>,
) {
    let inherit: Vec<RawFd> = inherit.iter().map(AsRawFd::as_raw_fd).collect();
    let strays = strays(&inherit);
    let change = user.map(Change::to);
    let files = FILES_BEFORE.get().copied();
    let in_child = move || {
        rustix::process::setsid()?;
        for (fds, flags) in [(&strays, FdFlags::CLOEXEC), (&inherit, FdFlags::empty())] {
            for &fd in fds {
                // SAFETY: the descriptor is only passed to fcntl. Those to be
                // inherited are borrowed by the caller until the child has
                // executed; a stray that was closed meanwhile gives EBADF.
                let fd = unsafe { BorrowedFd::borrow_raw(fd) };
                match rustix::io::fcntl_setfd(fd, flags) {
                    Ok(()) | Err(rustix::io::Errno::BADF) => {}
                    Err(errno) => return Err(errno.into()),
                }
            }
        }
        if let Some(files) = &files {
            setrlimit(Resource::Nofile, *files)?;
        }
        // Late, since it gives up rights. A directory that an operator chose was
        // entered before, and may be closed to that user.
        change.as_ref().map_or(Ok(()), Change::make)?;
        if let Some(enter) = &enter {
            let _ = rustix::process::chdir(enter.as_c_str());
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes system calls only: it
    // allocates nothing and takes no lock.
    unsafe { command.pre_exec(in_child) };
}

/// Files that would be inherited without being listed: those that the agent itself
/// inherited, since all that it opens are close-on-exec.
fn strays(inherit: &[RawFd]) -> Vec<RawFd> {
    let Ok(entries) = fs::read_dir("/proc/self/fdinfo") else { return Vec::new() };
    let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    numbers
        .filter(|fd: &RawFd| *fd > 2 && !inherit.contains(fd))
        .filter(|fd| {
            let info = fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).unwrap_or_default();
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
            let flags = flags.and_then(|text| u32::from_str_radix(text.trim(), 8).ok());
            flags.is_some_and(|flags| flags & CLOEXEC_SHOWN == 0)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::PermissionsExt;
    use std::time::Duration;

    use super::*;

    fn usual<'a>(argv: &'a [String], cwd: &'a Path, log: &'a Path) -> Launch<'a> {
        Launch { argv, program: None, cwd, instead: None, log, inherit: &[], user: None }
    }

    fn run(script: &str, inherit: &[BorrowedFd<'_>]) -> (Process, tempfile::TempDir) {
        let dir = tempfile::tempdir().unwrap();
        let argv = ["sh", "-c", script].map(str::to_owned);
        let log = dir.path().join("log");
        let process = launch(&Launch { inherit, ..usual(&argv, dir.path(), &log) }).unwrap();
        (process, dir)
    }

    fn finished(script: &str, inherit: &[BorrowedFd<'_>]) -> Option<String> {
        let (process, dir) = run(script, inherit);
        process.wait_exited(Duration::from_secs(20)).unwrap();
        log_tail(&dir.path().join("log"), 0)
    }

    #[test]
    fn it_has_its_own_session_its_directory_and_no_input() {
        let (process, dir) = run("pwd; cat; cut -d' ' -f6 /proc/self/stat >&2", &[]);
        process.wait_exited(Duration::from_secs(20)).unwrap();
        let expected = format!("{}\n{}", dir.path().display(), process.pid());
        assert_eq!(log_tail(&dir.path().join("log"), 0), Some(expected));
    }

    #[test]
    fn it_inherits_what_was_listed_and_nothing_else() {
        let (listed, kept) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let stray = tempfile::tempfile().unwrap();
        rustix::io::fcntl_setfd(&stray, FdFlags::empty()).unwrap();
        let test =
            |fd: &File| format!("test -e /proc/self/fd/{} && echo yes || echo no", fd.as_raw_fd());
        let script = [test(&listed), test(&kept), test(&stray)].join(";");
        assert_eq!(finished(&script, &[listed.as_fd()]).as_deref(), Some("yes\nno\nno"));
        let flags = rustix::io::fcntl_getfd(&listed).unwrap();
        assert!(flags.contains(FdFlags::CLOEXEC), "nothing changes in the agent");
    }

    #[test]
    fn it_runs_as_the_user_that_is_named() {
        if !rustix::process::geteuid().is_root() {
            // Only root may set a user, even its own.
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let argv = ["sh", "-c", "id -u; id -g; id -G; cat"].map(str::to_owned);
        let log = dir.path().join("log");
        let user = User { uid: 65534, gid: 65533, groups: vec![65533, 65532] };
        let launch = Launch { user: Some(&user), ..usual(&argv, dir.path(), &log) };
        super::launch(&launch).unwrap().wait_exited(Duration::from_secs(20)).unwrap();
        assert_eq!(log_tail(&log, 0).as_deref(), Some("65534\n65533\n65533 65532"));
    }

    #[test]
    fn a_directory_of_a_peers_choice_is_entered_with_the_users_rights() {
        if !rustix::process::geteuid().is_root() {
            // Only root may become another user.
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let [closed, inside, own] =
            ["closed", "closed/inside", "own"].map(|at| dir.path().join(at));
        for path in [&closed, &inside, &own] {
            fs::create_dir(path).unwrap();
        }
        let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode));
        mode(&closed, 0o700).and(mode(&own, 0o700)).and(mode(dir.path(), 0o755)).unwrap();
        for path in [&inside, &own] {
            fs::write(path.join("file"), "read\n").unwrap();
        }
        let argv = ["sh", "-c", "pwd; cat file"].map(str::to_owned);
        let log = dir.path().join("log");
        let user = User { uid: 65534, gid: 65534, groups: vec![65534] };
        let said = |cwd: &Path, instead: Option<&Path>| {
            let from = fs::metadata(&log).map_or(0, |log| log.len());
            let launch = Launch { user: Some(&user), instead, ..usual(&argv, cwd, &log) };
            super::launch(&launch).unwrap().wait_exited(Duration::from_secs(20)).unwrap();
            log_tail(&log, from).unwrap()
        };
        assert!(said(&inside, None).ends_with("read"), "an operator's is entered as it is");
        let said = said(&inside, Some(&own));
        assert!(!said.contains("read") && said.contains("Permission denied"), "{said}");
    }

    #[test]
    fn the_executed_file_may_have_another_name() {
        let dir = tempfile::tempdir().unwrap();
        let argv = ["/nonexistent/kvm", "-c", "echo $0"].map(str::to_owned);
        let log = dir.path().join("log");
        let program = Some(Path::new("/bin/sh"));
        let launched = launch(&Launch { program, ..usual(&argv, dir.path(), &log) });
        launched.unwrap().wait_exited(Duration::from_secs(20)).unwrap();
        assert_eq!(log_tail(&log, 0).as_deref(), Some("/nonexistent/kvm"));
    }

    #[test]
    fn errors_name_the_missing_file() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let start = |program: &str, cwd: &Path, log: &Path| {
            let argv = [program.to_owned()];
            launch(&usual(&argv, cwd, log)).unwrap_err().to_string()
        };
        assert!(
            start("/nonexistent/qemu", dir.path(), &log).starts_with("/nonexistent/qemu can't")
        );
        assert!(
            start("sh", Path::new("/nonexistent"), &log).starts_with("the directory /nonexistent")
        );
        assert!(start("sh", dir.path(), Path::new("/nonexistent/log")).starts_with("QEMU's log"));
        assert!(matches!(launch(&usual(&[], dir.path(), &log)), Err(LaunchError::Empty)));
    }
}
