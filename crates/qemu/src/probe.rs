//! What a QEMU program can do on this host, queried from the program itself.
//!
//! It is started without a machine, and gets all QMP queries and `quit` at once, so
//! that it ends by itself whatever happens to the agent.

pub(crate) mod answers;
mod cache;
mod verdict;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use host::child::Run;

use crate::launch::{User, prepare_child};
use crate::programs::NotAllowed;

pub use cache::Probes;
pub use facts::program::{Capabilities, CpuModel, MachineType};
pub use verdict::{Unfit, Verdict};

/// How long it may be silent. A tenth of a second is usual, on a busy host
/// with a cold cache some seconds.
const SILENCE_MAX: Duration = Duration::from_secs(20);
/// Most bytes of its answers, which have some 100 KiB.
const ANSWERS_MAX: u64 = 8 << 20;
/// Longest list of accelerators: all that QEMU knows make a shorter one.
const ACCELERATOR_MAX: usize = 80;

const QUESTIONS: &str = concat!(
    r#"{"execute":"qmp_capabilities"}"#,
    "\n",
    r#"{"execute":"query-machines","id":"machines"}"#,
    "\n",
    r#"{"execute":"query-cpu-definitions","id":"cpus"}"#,
    "\n",
    r#"{"execute":"qom-list-properties","arguments":{"typename":"migration"},"id":"migration"}"#,
    "\n",
    r#"{"execute":"quit"}"#,
    "\n",
);

/// Why a program could not be queried.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProbeError {
    /// It may not be started.
    #[error(transparent)]
    NotAllowed(#[from] NotAllowed),
    /// The accelerator's name is not valid.
    #[error("`{accelerator}` is not an accelerator")]
    Accelerator {
        /// As it was called.
        accelerator: String,
    },
    /// It can't be executed.
    #[error("{} can't be started: {why}", program.display())]
    Launch {
        /// The program.
        program: PathBuf,
        /// Why.
        why: String,
    },
    /// It ended without an answer.
    #[error("{} with {accelerator} printed: {output}", program.display())]
    Ended {
        /// The program.
        program: PathBuf,
        /// The accelerator that it was to use.
        accelerator: String,
        /// What it wrote.
        output: String,
    },
    /// It does not answer.
    #[error("{} does not answer questions: is it QEMU?", program.display())]
    Silent {
        /// The program.
        program: PathBuf,
    },
}

/// Queries what the program can do with this accelerator, run as that user.
fn ask(program: &Path, accelerator: &str, user: Option<&User>) -> Result<Capabilities, ProbeError> {
    check_accelerator(accelerator)?;
    let launch = |error: std::io::Error| ProbeError::Launch {
        program: program.to_owned(),
        why: error.to_string(),
    };
    let silent = || ProbeError::Silent { program: program.to_owned() };
    let mut command = Command::new(program);
    command
        .args(["-machine", &format!("none,accel={accelerator}")])
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-qmp", "stdio"])
        .stdin(Stdio::piped());
    prepare_child(&mut command, &[], user, None);
    let mut run = Run::start(command, SILENCE_MAX).map_err(launch)?;
    let asking = run.child.stdin.take();
    // If the program has ended already, its output says why below. The pipe stays
    // open until the answers have arrived: at its end QEMU may end, too.
    let _ = asking.as_ref().map(|mut pipe| pipe.write_all(QUESTIONS.as_bytes()));
    let (said, output) = run.read(ANSWERS_MAX).map_err(|_| silent())?;
    if let Some(capabilities) = answers::understood(&String::from_utf8_lossy(&said)) {
        return Ok(capabilities);
    }
    let output = String::from_utf8_lossy(&output);
    let output: Vec<&str> = output.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    if output.is_empty() {
        return Err(silent());
    }
    Err(ProbeError::Ended {
        program: program.to_owned(),
        accelerator: accelerator.to_owned(),
        output: output.join("; ").chars().take(500).collect(),
    })
}

/// Checks an accelerator, which other hosts choose and which becomes part of an option:
/// only names, separated by colons, are allowed.
fn check_accelerator(accelerator: &str) -> Result<(), ProbeError> {
    let is_name = |name: &str| {
        let known = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_';
        !name.is_empty() && name.chars().all(known)
    };
    if accelerator.len() <= ACCELERATOR_MAX && accelerator.split(':').all(is_name) {
        return Ok(());
    }
    let shown = accelerator.chars().map(|c| if c.is_control() { '?' } else { c });
    Err(ProbeError::Accelerator { accelerator: shown.take(ACCELERATOR_MAX).collect() })
}
