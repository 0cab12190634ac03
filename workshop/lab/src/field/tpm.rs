//! TPMs of the field lab's guests.

use std::fs;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use super::{QEMU_MAX, silent};
use crate::error::{FileContext, Result, SystemContext};
use crate::hosts::{Host, RUN_DIR};
use crate::program;

/// A TPM at one host, by swtpm, for one start of a VM's QEMU. A stream of QEMU's brings its state.
/// Dropping it ends it.
#[derive(Debug)]
pub struct Tpm(Child);

impl Tpm {
    /// Starts it.
    ///
    /// # Errors
    /// If there is no swtpm, or it doesn't listen.
    pub fn start(host: &Host, name: &str) -> Result<Self> {
        // A name that tests expect at a host without VMs.
        let state = host.run_dir.join("files-tpm");
        fs::create_dir_all(&state).at("create", &state)?;
        let socket = state.join(name);
        let _ = fs::remove_file(&socket);
        // Not in the host's network, where tests expect agents and QEMUs only.
        let mut command = program::command("swtpm");
        command.args(["socket", "--tpm2", "--terminate", "--tpmstate"]);
        command.arg(format!("dir={}", state.display()));
        command.arg("--ctrl").arg(format!("type=unixio,path={}", socket.display()));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let tpm = Self(command.spawn().doing("start swtpm")?);
        let until = Instant::now() + QEMU_MAX;
        while !socket.exists() {
            if Instant::now() > until {
                return Err(silent("swtpm"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(tpm)
    }

    /// Path, on its host, of the socket for QEMU.
    pub(super) fn socket(name: &str) -> String {
        format!("{RUN_DIR}/files-tpm/{name}")
    }
}

impl Drop for Tpm {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
