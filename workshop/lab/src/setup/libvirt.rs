//! libvirt from the distribution, unpacked into the lab's store. Hosts lay it over their own
//! `/usr`, so its programs and libraries are at the paths for which they were built. Also
//! AppArmor's parser, which checks Droveway's files for such hosts.

mod current;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::error::{FileContext, LabError, Result};
use crate::program;
use crate::setup::apt::{Apt, Scratch, Sources};
use crate::setup::{Accelerator, Kit, Version, say};

const NAME: &str = "libvirt";
/// Without the packages that have units, users and a network of libvirt's.
const PACKAGES: [&str; 3] = ["libvirt-daemon", "libvirt-daemon-driver-qemu", "libvirt-clients"];

/// For managers written in Python.
const PYTHON: &str = "python3-libvirt";

const APPARMOR: &str = "apparmor";
/// AppArmor's parser and the files that profiles include, and libvirt's rules for VMs.
const APPARMOR_PACKAGES: [&str; 2] = ["apparmor", "libvirt-daemon-system"];

/// libvirtds' cache of QEMU capabilities; probing takes them seconds for each QEMU.
const CAPABILITIES: &str = "libvirt-capabilities";
const WRAPPER: &str = "libvirt-qemu/qemu-system-x86_64";
const ODD_SIZE: &str = include_str!("odd-size.sh");
/// The first QEMU that loses no pages under TCG, whatever the size of RAM.
const ANY_SIZE: Version = Version { major: 9, minor: 0, patch: 0 };

/// What hosts with libvirt need.
#[derive(Clone, Debug)]
pub struct Libvirt {
    /// Its version.
    pub version: Version,
    /// The tree to lay over their `/usr`; none where the system has libvirt.
    pub tree: Option<PathBuf>,
    /// The directory in which all libvirtds cache QEMU capabilities.
    pub capabilities: PathBuf,
    /// The script that stands for the distribution's QEMU.
    pub system_qemu: PathBuf,
}

/// Where the distribution's QEMU finds its modules on such a host: libvirt has a QEMU load all
/// modules that it finds, and a QEMU that finds another's exits.
pub(crate) const MODULES: &str = "/run/qemu-modules";

/// Unpacks and makes what is missing.
pub(super) fn ensure(store: &Path, kit: &Kit) -> Result<Libvirt> {
    let tree = tree(store)?;
    let capabilities = store.join(CAPABILITIES);
    fs::create_dir_all(&capabilities).at("create", &capabilities)?;
    let system_qemu = store.join(WRAPPER);
    write_wrapper(&system_qemu, &wrapper_script(kit))?;
    let version = match &tree {
        Some(tree) => version_in(&tree.join("lib/x86_64-linux-gnu"))?,
        None => installed()?,
    };
    Ok(Libvirt { version, tree, capabilities, system_qemu })
}

/// All available libvirts, from the oldest to the newest: the distribution's, and the current one
/// where Debian's packages are available.
pub(super) fn all(store: &Path, kit: &Kit) -> Result<Vec<Libvirt>> {
    let usual = ensure(store, kit)?;
    let current = current::ensure(store, &usual)?;
    let current = current.filter(|current| current.version > usual.version);
    Ok(std::iter::once(usual).chain(current).collect())
}

/// The libvirt of a release, such as `11.3`, or the `newest`.
pub(super) fn of_release(all: &[Libvirt], wanted: &str) -> Result<Libvirt> {
    let release = |one: &Libvirt| format!("{}.{}", one.version.major, one.version.minor);
    let found = match wanted {
        "newest" => all.last(),
        wanted => all.iter().find(|one| release(one) == wanted),
    };
    found.cloned().ok_or_else(|| {
        let known: Vec<String> = all.iter().map(release).collect();
        let text = format!("there is no libvirt {wanted} here, but {}", known.join(", "));
        LabError::Unsupported(text)
    })
}

/// The version of the library in a directory: `libvirt.so.0.11003.0` means 11.3.0.
fn version_in(libraries: &Path) -> Result<Version> {
    let entries = fs::read_dir(libraries).at("list", libraries)?;
    let mut names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let found = names.find_map(|name| parse_library(&name));
    found.ok_or_else(|| LabError::Missing { what: "a library of libvirt's".to_owned() })
}

fn parse_library(name: &str) -> Option<Version> {
    let (number, patch) = name.strip_prefix("libvirt.so.0.")?.split_once('.')?;
    let number: u32 = number.parse().ok()?;
    Some(Version { major: number / 1000, minor: number % 1000, patch: patch.parse().ok()? })
}

fn installed() -> Result<Version> {
    let text = program::output(program::command("libvirtd").arg("--version"))?;
    let number = text.split_whitespace().last().unwrap_or_default();
    Version::parse(number).ok_or(LabError::Text { what: "libvirt's version", text })
}

/// Leaves an unchanged file alone, since libvirtds would probe a new one again.
fn write_wrapper(path: &Path, script: &str) -> Result<()> {
    if fs::read_to_string(path).is_ok_and(|old| old == script) {
        return Ok(());
    }
    let dir = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(dir).at("create", dir)?;
    let partial = path.with_extension(std::process::id().to_string());
    fs::write(&partial, script).at("write", &partial)?;
    let executable = fs::Permissions::from_mode(0o755);
    fs::set_permissions(&partial, executable).at("make executable", &partial)?;
    fs::rename(&partial, path).at("create", path)
}

fn wrapper_script(kit: &Kit) -> String {
    let is_odd = kit.accelerator == Accelerator::Tcg && kit.qemu_system_version < ANY_SIZE;
    let odd_size = if is_odd { ODD_SIZE } else { "" };
    let qemu = kit.qemu_system.display();
    format!("#!/bin/sh\nexport QEMU_MODULE_DIR={MODULES}\n{odd_size}exec '{qemu}' \"$@\"\n")
}

/// The directory to lay over `/usr`; none where the system has libvirt.
fn tree(store: &Path) -> Result<Option<PathBuf>> {
    if ["libvirtd", "virsh"].iter().all(|name| program::find(name).is_some()) {
        return Ok(None);
    }
    let home = store.join(NAME);
    if home.is_dir() {
        return Ok(Some(home));
    }
    say("unpacking libvirt for hosts that run a libvirtd each (it is not installed)");
    let scratch = Scratch::new(store, NAME)?;
    unpacked(store, |apt| apt.unpack_missing(&PACKAGES, &scratch.0))?;
    merge_usr(&scratch.0)?;
    fs::rename(scratch.0.join("usr"), &home).at("create", &home)?;
    Ok(Some(home))
}

/// A root with AppArmor's parser, and the profiles of libvirt.
pub(super) fn apparmor(store: &Path) -> Result<PathBuf> {
    let home = store.join(APPARMOR);
    if home.is_dir() {
        return Ok(home);
    }
    say("unpacking AppArmor's parser and libvirt's profiles (they are not installed)");
    let scratch = Scratch::new(store, APPARMOR)?;
    unpacked(store, |apt| apt.unpack(&APPARMOR_PACKAGES, &scratch.0))?;
    fs::rename(&scratch.0, &home).at("create", &home)?;
    Ok(home)
}

/// The directory of libvirt's module for Python.
pub(super) fn python(store: &Path) -> Result<PathBuf> {
    let home = store.join(PYTHON);
    if !home.is_dir() {
        say("unpacking libvirt's module for Python (it is not installed)");
        let scratch = Scratch::new(store, PYTHON)?;
        unpacked(store, |apt| apt.unpack(&[PYTHON], &scratch.0))?;
        fs::rename(&scratch.0, &home).at("create", &home)?;
    }
    Ok(home.join("usr/lib/python3/dist-packages"))
}

pub(super) fn unpacked(store: &Path, unpack: impl Fn(&Apt) -> Result<()>) -> Result<()> {
    let apt = Apt::new(store, "system", Sources::System)?;
    unpack(&apt).or_else(|_| {
        // Outdated lists name packages that are gone.
        apt.update()?;
        unpack(&apt)
    })
}

/// Some packages still have libraries in `/lib`, which is `/usr/lib` once they are
/// installed.
fn merge_usr(root: &Path) -> Result<()> {
    let (from, to) = (root.join("lib"), root.join("usr/lib"));
    if !from.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(&to).at("create", &to)?;
    let contents = format!("{}/.", from.display());
    program::output(program::command("cp").args(["-a", &contents]).arg(&to)).map(|_| ())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn ram_gets_an_odd_size_and_nothing_else_changes() {
        let script = format!("{ODD_SIZE}printf '%s\\n' \"$@\"");
        let memfd = |bytes: u64| {
            format!("{{\"qom-type\":\"memory-backend-memfd\",\"id\":\"pc.ram\",\"size\":{bytes}}}")
        };
        let rom = "{\"id\":\"rom\",\"size\":4096}";
        for (told, said) in [
            (vec!["-m", "256"], vec!["-m", "size=262152k"]),
            (vec!["-m", "size=262144k"], vec!["-m", "size=262152k"]),
            (vec!["-m", "size=1G,slots=2", "a  b", ""], vec!["-m", "size=1G,slots=2", "a  b", ""]),
            (vec!["-object", &memfd(268_435_456)], vec!["-object", &memfd(268_443_648)]),
            (vec!["-object", rom, "-x"], vec!["-object", rom, "-x"]),
        ] {
            let output = Command::new("sh").args(["-c", &script, "sh"]).args(&told).output();
            let output = String::from_utf8(output.unwrap().stdout).unwrap();
            assert_eq!(output.lines().collect::<Vec<_>>(), said, "{told:?}");
        }
    }

    #[test]
    fn a_library_says_its_version() {
        let newer = Version { major: 11, minor: 3, patch: 0 };
        assert_eq!(parse_library("libvirt.so.0.11003.0"), Some(newer));
        let older = Version { major: 9, minor: 0, patch: 0 };
        assert_eq!(parse_library("libvirt.so.0.9000.0"), Some(older));
        for other in ["libvirt.so.0", "libvirt-qemu.so.0.9000.0", "libvirt.so.0.x.0", ""] {
            assert_eq!(parse_library(other), None, "{other}");
        }
    }

    #[test]
    fn a_wrapper_that_is_there_stays() {
        use std::os::unix::fs::MetadataExt;

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bin/qemu");
        write_wrapper(&path, "one").unwrap();
        let first = fs::metadata(&path).unwrap();
        write_wrapper(&path, "one").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().ino(), first.ino());
        assert_eq!(first.mode() & 0o777, 0o755);
        write_wrapper(&path, "two").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "two");
    }

    #[test]
    fn libraries_of_both_places_come_together() {
        let root = tempfile::tempdir().unwrap();
        for (dir, file) in [("lib/x86_64-linux-gnu", "a.so"), ("usr/lib/x86_64-linux-gnu", "b.so")]
        {
            fs::create_dir_all(root.path().join(dir)).unwrap();
            fs::write(root.path().join(dir).join(file), file).unwrap();
        }
        merge_usr(root.path()).unwrap();
        for file in ["a.so", "b.so"] {
            let path = root.path().join("usr/lib/x86_64-linux-gnu").join(file);
            assert_eq!(fs::read_to_string(path).unwrap(), file);
        }
    }
}
