//! Finds and runs other programs.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::error::{LabError, Result};

/// Where Debian puts programs that a user's PATH may lack.
const SYSTEM_PATHS: [&str; 3] = ["/usr/sbin", "/sbin", "/usr/local/sbin"];

/// Path of a program, if it is installed.
#[must_use]
pub fn find(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let system = SYSTEM_PATHS.iter().map(PathBuf::from);
    env::split_paths(&path).chain(system).map(|dir| dir.join(name)).find(|path| path.is_file())
}

/// A command for a program that may be in a system path.
#[must_use]
pub fn command(name: &str) -> Command {
    Command::new(find(name).unwrap_or_else(|| name.into()))
}

/// The command as one would type it.
pub(crate) fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let name = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy();
    let args = command.get_args().map(|arg| arg.to_string_lossy());
    std::iter::once(name).chain(args).collect::<Vec<_>>().join(" ")
}

/// Runs it to its end, whatever its exit status.
///
/// # Errors
/// If it can't be started.
pub fn run(command: &mut Command) -> Result<Output> {
    command.output().map_err(|error| LabError::Run { program: shown(command), error })
}

/// Runs it to its end, and returns its output if it succeeds.
///
/// # Errors
/// If it can't be started, or fails.
pub fn output(command: &mut Command) -> Result<String> {
    Ok(String::from_utf8_lossy(&bytes(command)?).into_owned())
}

/// The same for output that is not text.
pub(crate) fn bytes(command: &mut Command) -> Result<Vec<u8>> {
    let output = run(command)?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let text = if output.stderr.is_empty() { &output.stdout } else { &output.stderr };
    Err(LabError::Failed {
        command: shown(command),
        status: output.status.to_string(),
        stderr: String::from_utf8_lossy(text).trim().to_owned(),
    })
}

/// Whether this process runs as root.
#[must_use]
pub fn root() -> bool {
    rustix::process::geteuid().is_root()
}
