//! QEMUs that another program starts, and the agent adopts.

use std::path::Path;
use std::process::{Child, Stdio};

use lab::guest::GuestSpec;
use lab::hosts::RUN_DIR;

use crate::world::{Side, World, own_qmp_argument};

impl World {
    /// Starts a guest's QEMU as its owner would, without an agent.
    ///
    /// # Panics
    /// If it can't be started.
    #[must_use]
    pub fn start_unmanaged(
        &self,
        side: Side,
        spec: &GuestSpec,
        qemu: &Path,
        more: &[&str],
    ) -> Child {
        let argv = spec.argv(&self.kit, qemu);
        let mut command = self.host(side).service(&spec.name, &argv[0]);
        command.args(&argv[1..]).args(own_qmp_argument(&spec.name)).args(more);
        command.stdin(Stdio::null()).spawn().unwrap()
    }

    /// Has the agent on A adopt a VM that was started in this way.
    pub fn attach(&self, name: &str) {
        // A connection shows that QEMU has made its socket.
        drop(self.own_qmp(Side::A, name));
        self.says(Side::A, &["attach", name, "--qmp", &format!("{RUN_DIR}/{name}.own")]);
    }
}
