//! The VNC server of a VM's next QEMU on the same host, which gets the former one's sockets once it
//! has the VM.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::json;

use super::Machine;
use super::open_files::Open;
use crate::command_line::{CommandLine, vnc_sockets};

/// In QEMU's own directory, which only the agent can enter.
const DIR: &str = "vnc";

/// Makes the directory in which the server listens until then. QEMU gets it as an open file, and
/// may have another user.
pub(super) fn make_dir(home: &Path) -> io::Result<OwnedFd> {
    let dir = home.join(DIR);
    remove_dir(&dir)?;
    fs::create_dir(&dir)?;
    fs::set_permissions(&dir, Permissions::from_mode(0o777))?;
    Ok(File::open(&dir)?.into())
}

/// Gives the server its sockets, if it still waits for them.
pub(super) fn take_over(machine: &Machine, running: &CommandLine) -> Result<(), String> {
    let Some((name, numbers)) = vnc_sockets(running) else { return Ok(()) };
    let dir = machine.dir.join(DIR);
    // QEMU removes it when it gets others.
    if fs::symlink_metadata(dir.join(name)).is_ok() {
        let mut addresses = Vec::new();
        for number in numbers {
            let open = Open::take(&machine.process, number)
                .ok_or_else(|| format!("QEMU has no listening socket of the number {number}"))?;
            let fd = format!("droveway-vnc-{number}");
            let passed =
                machine.qmp.execute_with(open.socket.as_fd(), "getfd", json!({ "fdname": fd }));
            passed.map_err(|error| error.to_string())?;
            addresses.push(json!({ "type": "fd", "str": fd }));
        }
        let update = json!({ "type": "vnc", "addresses": addresses });
        let updated = machine.qmp.execute("display-update", update);
        updated.map_err(|error| error.to_string())?;
    }
    remove_dir(&dir).map_err(|error| format!("{}: {error}", dir.display()))
}

fn remove_dir(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
