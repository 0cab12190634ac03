//! What only one QEMU of a VM at a time can have, and what its next one gets only when it is the
//! VM's only one.

use host::rights::User;

use super::{Machine, monitor_names, pid_file, vnc};
use crate::command_line::CommandLine;
use crate::process::command_line_of;

impl Machine {
    /// Gives this QEMU, which has to be the VM's only one by now, what its former one had: the
    /// names of monitors' sockets, the sockets of the VNC server, and the PID file. What was made
    /// for another one is removed.
    ///
    /// It may be repeated, and nothing of a QEMU changes that had it from its start. If a part of
    /// it fails, the log has the reason.
    pub fn take_over(&self) {
        let pid = self.process.pid();
        // With a command line that can't be used no QEMU was started next to it.
        let Ok(line) = CommandLine::parse(&self.argv) else { return };
        let running = command_line_of(pid).unwrap_or_default();
        let Ok(running) = CommandLine::parse(&CommandLine::of_running(&running)) else { return };
        for (what, taken) in [
            ("the names of its monitors' sockets", monitor_names::take_names(self, &line)),
            ("the addresses of its VNC server", vnc::take_over(self, &running)),
            ("its PID file", pid_file::take_over(self, &line, &running)),
        ] {
            if let Err(error) = taken {
                tracing::warn!(pid, error, "a VM's new QEMU can't get {what}");
            }
        }
    }

    /// Removes the hidden names of this QEMU's monitor sockets, if it has exited before they got
    /// those of its former one's.
    pub fn clear_after_exit(&self) {
        if let Ok(line) = CommandLine::parse(&self.argv) {
            monitor_names::remove_hidden_names(self, &line);
        }
    }

    /// Removes what this QEMU leaves, which has ended, if it got that from a former one: its PID
    /// file, and the names of its monitors' sockets, which it does not know. `user` was its user.
    pub(super) fn remove_left(&self, user: Option<&User>) {
        let Ok(line) = CommandLine::parse(&self.argv) else { return };
        if let Some(user) = user {
            monitor_names::remove_names(self, &line, user);
        }
        monitor_names::remove_hidden_names(self, &line);
        let Some(path) = line.pid_file() else { return };
        let path = self.cwd.join(path);
        if let Err(error) = pid_file::remove(&path, self.process.pid()) {
            tracing::warn!(path = %path.display(), %error, "cannot remove a PID file");
        }
    }
}
