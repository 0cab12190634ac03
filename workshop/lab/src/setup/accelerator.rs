//! KVM or TCG: decided by booting guests, since a `/dev/kvm` that opens may still be unable to run
//! one, or run only an undemanding one (nested virtualization is often incomplete).

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;
use std::{fmt, fs, thread};

use serde::{Deserialize, Serialize};

use crate::error::{LabError, Result};
use crate::guest::BARE_CPU;
use crate::setup::{say, store};

/// What executes the guests' instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Accelerator {
    /// The processor.
    Kvm,
    /// QEMU's translator.
    Tcg,
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        })
    }
}

/// Time for Linux to boot: where it boots at all it takes two seconds.
const LINUX_MAX: Duration = Duration::from_secs(10);
/// Time for a bare guest: where everything is emulated, the firmware alone takes four seconds.
const BARE_MAX: Duration = Duration::from_secs(30);

/// KVM if it boots Linux, else TCG.
pub(super) fn find(store: &Path, qemu: &Path, kernel: &Path, initrd: &Path) -> Result<Accelerator> {
    let found = remembered(&store.join("kvm-runs-linux"), || {
        say("trying whether KVM boots a guest");
        let runs = boots(qemu, &["-initrd".as_ref(), initrd.as_ref()], kernel, LINUX_MAX)?;
        if !runs {
            say("KVM can't boot a guest here: using TCG, which is slower");
        }
        Ok(runs)
    });
    Ok(if found? { Accelerator::Kvm } else { Accelerator::Tcg })
}

/// Whether KVM runs a guest without an operating system.
pub(super) fn runs_bare(store: &Path, qemu: &Path, kernel: &Path) -> Result<bool> {
    remembered(&store.join("kvm-runs-bare"), || {
        say("trying whether KVM runs a guest without an operating system");
        boots(qemu, &["-cpu".as_ref(), BARE_CPU.as_ref()], kernel, BARE_MAX)
    })
}

/// Tries something with KVM once on each machine and boot, and stores the result.
fn remembered(note: &Path, try_it: impl FnOnce() -> Result<bool>) -> Result<bool> {
    let here = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let here = here.trim();
    let noted = |answer: bool| format!("{answer} {here}\n");
    if let Ok(text) = fs::read_to_string(note)
        && let Some(answer) = [true, false].into_iter().find(|answer| text == noted(*answer))
    {
        return Ok(answer);
    }
    let usable = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok();
    let answer = usable && try_it()?;
    store::replace(note, noted(answer).as_bytes())?;
    Ok(answer)
}

/// Whether a guest reports in time under KVM that it has booted.
fn boots(qemu: &Path, more: &[&OsStr], kernel: &Path, within: Duration) -> Result<bool> {
    let mut command = Command::new(qemu);
    command.args(["-accel", "kvm", "-machine", "q35", "-m", "256", "-nodefaults"]);
    command.args(["-no-user-config", "-display", "none", "-no-reboot"]);
    command.args(["-serial", "null", "-serial", "stdio"]);
    command.arg("-kernel").arg(kernel).args(more);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let failed = |error| LabError::Run { program: qemu.display().to_string(), error };
    let mut child = command.spawn().map_err(failed)?;
    let (said, hear) = mpsc::channel();
    let output = child.stdout.take();
    let reader = thread::spawn(move || {
        let lines = output.map(|output| BufReader::new(output).lines());
        let booted = lines.into_iter().flatten().map_while(std::io::Result::ok);
        // After the timeout, nothing receives any more.
        let _ = said.send(booted.take(1000).any(|line| line.starts_with("boot ")));
    });
    let booted = hear.recv_timeout(within).unwrap_or(false);
    // It may have ended by itself.
    let _ = child.kill();
    child.wait().map_err(failed)?;
    // Its output has ended with it.
    let _ = reader.join();
    Ok(booted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_tried_in_this_boot_is_not_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let note = dir.path().join("note");
        let here = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        for answer in [true, false] {
            fs::write(&note, format!("{answer} {here}")).unwrap();
            assert_eq!(remembered(&note, || unreachable!()).unwrap(), answer);
        }
        fs::write(&note, "true another-boot\n").unwrap();
        assert!(!remembered(&note, || Ok(false)).unwrap());
        assert_eq!(fs::read_to_string(&note).unwrap(), format!("false {here}"));
    }
}
