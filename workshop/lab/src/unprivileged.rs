//! The lab without root: in a user namespace of its own, where it is root over networks and mounts
//! that it made itself, and over nothing else.

use std::ffi::OsString;
use std::process::{Command, ExitCode};

use crate::error::{LabError, Result};
use crate::program;
use crate::setup::{self, STORE_VARIABLE};

/// `ip netns` needs `/run/netns`, and the lab `/run/droveway-lab`.
const PREPARE: &str = "mount -t tmpfs tmpfs /run && exec \"$@\"";

/// Runs a program to its end, as root or as near to it as this user can get. With `kit`, neither
/// the program nor its children search again for what the lab needs.
///
/// # Errors
/// If this user may not make namespaces, or the kit isn't available.
pub fn run(argv: &[OsString], kit: bool) -> Result<ExitCode> {
    let Some((name, arguments)) = argv.split_first() else { return Ok(ExitCode::SUCCESS) };
    let mut command = if program::root() {
        Command::new(name)
    } else {
        program::output(inside().arg("true")).map_err(|error| {
            LabError::Unsupported(format!(
                "hosts are network namespaces, and this user may not make them ({error}): run it \
                 as root or with sudo"
            ))
        })?;
        let mut command = inside();
        command.arg(name);
        // Inside, files appear to have other owners, so the store would be looked for elsewhere.
        command.env(STORE_VARIABLE, setup::store());
        command
    };
    if kit {
        let (name, kit) = setup::for_others()?;
        command.env(name, kit);
    }
    let status = command.args(arguments).status();
    let failed = |error| LabError::Run { program: program::shown(&command), error };
    let code = status.map_err(failed)?.code().and_then(|code| u8::try_from(code).ok());
    // Ended by a signal, whose sender knows the reason.
    Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
}

fn inside() -> Command {
    let mut command = program::command("unshare");
    command.args(["--user", "--map-root-user", "--mount", "--net", "sh", "-c", PREPARE, "sh"]);
    command
}
