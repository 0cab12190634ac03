//! KVM or TCG: found out by booting a guest, since a `/dev/kvm` that opens may
//! still be unable to run one (nested virtualization is often half there).

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;
use std::{fmt, fs, thread};

use crate::error::{FileContext, LabError, Result};
use crate::setup::say;

/// What runs the guests' instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

const BOOT_TIMEOUT: Duration = Duration::from_secs(10);

/// Tries KVM once on each machine and boot, and remembers the answer.
pub(super) fn find(store: &Path, qemu: &Path, kernel: &Path, initrd: &Path) -> Result<Accelerator> {
    let note = store.join("accelerator");
    let here = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let here = here.trim();
    if let Ok(text) = fs::read_to_string(&note) {
        if text == noted(Accelerator::Kvm, here) {
            return Ok(Accelerator::Kvm);
        }
        if text == noted(Accelerator::Tcg, here) {
            return Ok(Accelerator::Tcg);
        }
    }
    let usable = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok();
    let found = if usable && boots(qemu, kernel, initrd)? {
        Accelerator::Kvm
    } else {
        say("KVM can't boot a guest here: using TCG, which is slower");
        Accelerator::Tcg
    };
    fs::write(&note, noted(found, here)).at("write", &note)?;
    Ok(found)
}

fn noted(accelerator: Accelerator, boot_id: &str) -> String {
    format!("{accelerator} {boot_id}\n")
}

/// Whether a guest says hello under KVM.
fn boots(qemu: &Path, kernel: &Path, initrd: &Path) -> Result<bool> {
    say("trying whether KVM boots a guest");
    let mut command = Command::new(qemu);
    command.args(["-accel", "kvm", "-machine", "q35", "-m", "256", "-nodefaults"]);
    command.args(["-no-user-config", "-display", "none", "-no-reboot"]);
    command.args(["-serial", "null", "-serial", "stdio"]);
    command.arg("-kernel").arg(kernel).arg("-initrd").arg(initrd);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let failed = |error| LabError::Run { program: qemu.display().to_string(), error };
    let mut child = command.spawn().map_err(failed)?;
    let (said, hear) = mpsc::channel();
    let output = child.stdout.take();
    let reader = thread::spawn(move || {
        let lines = output.map(|output| BufReader::new(output).lines());
        let booted = lines.into_iter().flatten().map_while(std::io::Result::ok);
        // Nobody listens any more after the timeout.
        let _ = said.send(booted.take(1000).any(|line| line.starts_with("boot ")));
    });
    let booted = hear.recv_timeout(BOOT_TIMEOUT).unwrap_or(false);
    // It may have ended by itself.
    let _ = child.kill();
    child.wait().map_err(failed)?;
    // Its output ended with it.
    let _ = reader.join();
    Ok(booted)
}
