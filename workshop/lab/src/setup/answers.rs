//! What the kit's QEMU can do, as agents keep it in their state directories: agents of tests, whose
//! directories are empty at first, would all query it again.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use qemu::probe::Probes;
use qemu::programs::Programs;

use super::{Kit, own_qemus, store};

/// An agent's name for the file, too.
const FILE: &str = "probes.json";

/// Path of the file, if the kit's QEMU was queried.
#[must_use]
pub fn qemu_answers() -> PathBuf {
    store().join(FILE)
}

/// Queries it, unless that was done before, and the program that it starts if it is one of the lab's
/// wrappers: agents that carry a migration find that one. What isn't answered, agents query
/// themselves.
pub(super) fn keep(kit: &Kit) {
    let home = kit.qemu.parent().and_then(Path::parent);
    let is_its = |path: &PathBuf| home.is_some_and(|home| path.starts_with(home) && path.is_file());
    let mut all: Vec<PathBuf> = own_qemus().into_iter().filter(is_its).collect();
    if all.is_empty() {
        all.push(kit.qemu.clone());
    }
    let all: Vec<String> = all.iter().map(|path| path.display().to_string()).collect();
    let Ok(programs) = Programs::new(&all, None) else { return };
    let probes = Probes::new(Arc::new(programs)).kept_in(qemu_answers());
    for program in &all {
        let _ = probes.of(program, Path::new("/"), &kit.accelerator.to_string());
    }
}
