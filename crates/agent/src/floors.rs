//! The floors of this crate: a module uses those on the floors below its own, and no other.

use std::fs;
use std::path::Path;

/// From the top.
const FLOORS: [&[&str]; 11] = [
    &["daemon"],
    &["api"],
    &["carry", "gangs", "xen"],
    &["moves"],
    &["examiner"],
    &["vms"],
    &["peers"],
    &["config"],
    &["events"],
    &["denied"],
    &["id", "metrics", "parallel", "shares", "state", "user", "watched"],
];

fn floor(module: &str) -> usize {
    let floor = FLOORS.iter().position(|floor| floor.contains(&module));
    floor.unwrap_or_else(|| panic!("FLOORS has no {module}"))
}

#[test]
fn no_module_uses_one_above_it_or_next_to_it() {
    for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).unwrap() {
        let path = entry.unwrap().path();
        let module = path.file_stem().unwrap().to_str().unwrap();
        if !matches!(module, "lib" | "floors") {
            check(&path, module);
        }
    }
}

/// Checks all files of a module, its tests too.
fn check(path: &Path, module: &str) {
    if path.is_dir() {
        return fs::read_dir(path).unwrap().for_each(|file| check(&file.unwrap().path(), module));
    }
    let code = fs::read_to_string(path).unwrap();
    // `pub(in crate::…)` uses nothing.
    for used in code.replace("in crate::", "").split("crate::").skip(1) {
        let used = used.split(|c: char| c != '_' && !c.is_alphanumeric()).next().unwrap();
        let is_allowed = used == module || floor(used) > floor(module);
        assert!(is_allowed, "{} uses {used}, which is not below {module}", path.display());
    }
}
