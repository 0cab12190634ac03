//! What the kit's QEMU can do, as agents keep it in their state directories: agents of tests, whose
//! directories are empty at first, would all query it again.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use qemu::probe::Probes;
use qemu::programs::Programs;

use super::{Kit, store};

/// An agent's name for the file, too.
const FILE: &str = "probes.json";

/// Path of the file, if the kit's QEMU was queried.
#[must_use]
pub fn qemu_answers() -> PathBuf {
    store().join(FILE)
}

/// Queries it, unless that was done before. Without its answers, agents query it themselves.
pub(super) fn keep(kit: &Kit) {
    let program = kit.qemu.display().to_string();
    let Ok(programs) = Programs::new(&[program.as_str()], None) else { return };
    let probes = Probes::new(Arc::new(programs)).kept_in(qemu_answers());
    let _ = probes.of(&program, Path::new("/"), &kit.accelerator.to_string());
}
