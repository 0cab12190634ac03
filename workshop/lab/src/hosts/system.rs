//! Hosts that boot systems of their own, and what they see of this machine.

use std::path::{Path, PathBuf};

use super::{Hosts, RUN_DIR};
use crate::error::Result;
use crate::setup;
use crate::systemd::{Bind, Boot};

/// The directory that both hosts see.
const SHARED: &str = "/srv/vms";
/// What QEMU may need of this machine, where it is there.
const DEVICES: [&str; 4] = ["/dev/kvm", "/dev/net/tun", "/dev/vhost-net", "/dev/vhost-vsock"];
/// The unit of a system that is up.
const UP: &str = "multi-user.target";
/// Digits of a machine ID.
const MACHINE_ID_DIGITS: usize = 32;

impl Hosts {
    /// Boots a system on both hosts, each with this root, which stays as it is.
    ///
    /// # Errors
    /// If one doesn't come up.
    pub fn boot(&mut self, root: &Path) -> Result<()> {
        let shared = self.a.run_dir.clone();
        for (host, name, digit) in [(&mut self.a, "host-a", "a"), (&mut self.b, "host-b", "b")] {
            let files = [
                ("etc/hostname".to_owned(), format!("{name}\n")),
                // With none this would be its first boot, which enables all units.
                ("etc/machine-id".to_owned(), format!("{}\n", digit.repeat(MACHINE_ID_DIGITS))),
                // In place of systemd's, by which the boot would empty /tmp, where this machine may
                // have the store.
                ("etc/tmpfiles.d/tmp.conf".to_owned(), String::new()),
                // Empty, it is masked. Its unit mounts the root anew, which can fail in a root of
                // ours, and then is started again without a pause: the boot would not end.
                ("etc/systemd/system/systemd-logind.service".to_owned(), String::new()),
            ];
            let bind = |here: &Path, there: &Path| Bind { here: here.into(), there: there.into() };
            let store = setup::store();
            let mut binds = vec![
                bind(&host.run_dir, Path::new(RUN_DIR)),
                bind(&shared, Path::new(SHARED)),
                // Guests' kernels, and the images below their disks. Agents write files next to
                // these, by which they find out that both hosts see them.
                bind(&store, &store),
            ];
            let devices = DEVICES.map(Path::new).into_iter().filter(|path| path.exists());
            binds.extend(devices.map(|path| bind(path, path)));
            host.boot(&Boot { root, files: &files, binds: &binds, unit: UP })?;
        }
        Ok(())
    }

    /// The path by which hosts know a directory that both see: the `run_dir` of A.
    #[must_use]
    pub fn shared(&self) -> PathBuf {
        match self.a.systemd() {
            Some(_) => PathBuf::from(SHARED),
            None => self.a.run_dir.clone(),
        }
    }
}
