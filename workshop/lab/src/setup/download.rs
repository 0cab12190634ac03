//! Parts of packages that guests need, unpacked into the lab's own store and not installed: their
//! kernel, and a server.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{FileContext, LabError, Result};
use crate::program;
use crate::setup::apt::{Apt, Scratch, Sources};
use crate::setup::{say, vmlinux};

/// Small kernels with virtio and serial ports built in; the first one that the distribution has is
/// taken.
const KERNEL_PACKAGES: [&str; 3] =
    ["linux-image-cloud-amd64", "linux-image-virtual", "linux-image-amd64"];

/// What guests boot: the kernel unpacked, or the package's image where that can't be done.
const KERNEL: &str = "vmlinux";

/// Drivers that kernel packages have as modules. A driver without a module is built in.
const MODULES: [&str; 7] = [
    "virtio",
    "virtio_ring",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_blk",
    "virtio_balloon",
];

/// The same for a NIC, which few guests have.
const NIC_MODULES: [&str; 3] = ["failover", "net_failover", "virtio_net"];

/// For the helper's port, and for a file system that kernels don't have built in.
const HELPER_MODULES: [&str; 3] = ["libcrc32c", "xfs", "virtio_console"];

/// For disks at a SCSI controller, and volumes on them.
const SCSI_MODULES: [&str; 5] = ["scsi_common", "scsi_mod", "sd_mod", "virtio_scsi", "dm_mod"];

/// For btrfs.
const BTRFS_MODULES: [&str; 4] = ["xor", "raid6_pq", "zstd_compress", "btrfs"];

/// For memory that is plugged while the guest runs.
const PLUGGED_MEMORY_MODULES: [&str; 1] = ["virtio_mem"];

/// The end of a signed module.
const SIGNED: &[u8] = b"~Module signature appended~\n";
/// The kernel's `struct module_signature`.
const DESCRIPTION_BYTES: usize = 12;
/// The name of a module's section of types, among other names.
const TYPES: &[u8] = b"\0.BTF\0";

/// The server that a guest may have, and its package.
const SERVER_PACKAGE: &str = "memcached";
/// Where packages have libraries, with and without a merged `/usr`.
const LIBRARY_PLACES: [&str; 2] = ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"];
const NIC_MODULES_DIR: &str = "nic-modules";
const HELPER_MODULES_DIR: &str = "helper-modules";
const SCSI_MODULES_DIR: &str = "scsi-modules";
const BTRFS_MODULES_DIR: &str = "btrfs-modules";
const PLUGGED_MEMORY_MODULES_DIR: &str = "plugged-memory-modules";
/// All sets of modules besides the usual one, each with its directory.
const MORE_MODULES: [(&str, &[&str]); 5] = [
    (NIC_MODULES_DIR, &NIC_MODULES),
    (HELPER_MODULES_DIR, &HELPER_MODULES),
    (SCSI_MODULES_DIR, &SCSI_MODULES),
    (BTRFS_MODULES_DIR, &BTRFS_MODULES),
    (PLUGGED_MEMORY_MODULES_DIR, &PLUGGED_MEMORY_MODULES),
];
/// The dynamic linker.
pub(super) const LINKER: &str = "ld-linux-x86-64.so.2";

/// The guests' kernel, and the directory of its modules.
pub(super) fn kernel(store: &Path) -> Result<(PathBuf, PathBuf)> {
    let home = store.join("kernel");
    let kernel = (home.join(KERNEL), home.join("modules"));
    let is_whole = MORE_MODULES.iter().all(|(dir, _)| home.join(dir).is_dir());
    if kernel.0.is_file() && is_whole {
        return Ok(kernel);
    }
    let apt = Apt::new(store, "system", Sources::System)?;
    let mut package = KERNEL_PACKAGES.iter().find_map(|name| apt.kernel_behind(name));
    if package.is_none() {
        apt.update()?;
        package = KERNEL_PACKAGES.iter().find_map(|name| apt.kernel_behind(name));
    }
    let missing = || LabError::Missing { what: format!("a package like {}", KERNEL_PACKAGES[0]) };
    let package = package.ok_or_else(missing)?;
    say(&format!("unpacking {package} for the guests (it is not installed)"));
    let scratch = Scratch::new(store, "kernel")?;
    apt.unpack(&[&package], &scratch.0)?;
    let boot = scratch.0.join("boot");
    let image = files(&boot)?
        .into_iter()
        .find(|path| {
            path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"vmlinuz"))
        })
        .ok_or(LabError::Missing { what: format!("the kernel in {package}") })?;
    let new = Scratch::new(store, "kernel-kept")?;
    let packed = fs::read(&image).at("read", &image)?;
    let kept = new.0.join(KERNEL);
    fs::write(&kept, vmlinux::unpacked(&packed).unwrap_or(packed)).at("write", &kept)?;
    keep_modules(&MODULES, &scratch.0.join("lib"), &new.0.join("modules"))?;
    for (dir, names) in MORE_MODULES {
        keep_modules(names, &scratch.0.join("lib"), &new.0.join(dir))?;
    }
    // A store made earlier has fewer modules, or another kernel.
    if home.is_dir() {
        fs::remove_dir_all(&home).at("remove", &home)?;
    }
    fs::rename(&new.0, &home).at("create", &home)?;
    Ok(kernel)
}

/// The directory of the modules for a NIC.
pub(super) fn nic_modules(store: &Path) -> Result<PathBuf> {
    kernel(store)?;
    Ok(store.join("kernel").join(NIC_MODULES_DIR))
}

/// The directory of the modules for a helper.
pub(super) fn helper_modules(store: &Path) -> Result<PathBuf> {
    kernel(store)?;
    Ok(store.join("kernel").join(HELPER_MODULES_DIR))
}

/// The directory of the modules for disks at a SCSI controller.
pub(super) fn scsi_modules(store: &Path) -> Result<PathBuf> {
    kernel(store)?;
    Ok(store.join("kernel").join(SCSI_MODULES_DIR))
}

/// The directory of the modules for btrfs.
pub(super) fn btrfs_modules(store: &Path) -> Result<PathBuf> {
    kernel(store)?;
    Ok(store.join("kernel").join(BTRFS_MODULES_DIR))
}

/// The directory of the modules for memory that is plugged while the guest runs.
pub(super) fn plugged_memory_modules(store: &Path) -> Result<PathBuf> {
    kernel(store)?;
    Ok(store.join("kernel").join(PLUGGED_MEMORY_MODULES_DIR))
}

/// The directory of the server that a guest may have, with its libraries.
pub(super) fn server(store: &Path) -> Result<PathBuf> {
    let home = store.join(SERVER_PACKAGE);
    if home.is_dir() {
        return Ok(home);
    }
    let apt = Apt::new(store, "system", Sources::System)?;
    let mut packages = apt.libraries_of(SERVER_PACKAGE);
    if packages.is_empty() {
        apt.update()?;
        packages = apt.libraries_of(SERVER_PACKAGE);
    }
    packages.push(SERVER_PACKAGE.to_owned());
    say(&format!("unpacking {SERVER_PACKAGE} for guests (it is not installed)"));
    let scratch = Scratch::new(store, "server")?;
    let names: Vec<&str> = packages.iter().map(String::as_str).collect();
    if apt.unpack(&names, &scratch.0).is_err() {
        // Outdated lists name packages that are gone.
        apt.update()?;
        apt.unpack(&names, &scratch.0)?;
    }
    let program = scratch.0.join("usr/bin").join(SERVER_PACKAGE);
    let places: Vec<PathBuf> = LIBRARY_PLACES.map(|place| scratch.0.join(place)).to_vec();
    let linker = places.iter().map(|place| place.join(LINKER)).find(|path| path.is_file());
    let missing = || LabError::Missing { what: format!("{LINKER} in {}", packages.join(", ")) };
    let linker = linker.ok_or_else(missing)?;
    // The linker lists the libraries that it loads, the same ones as in a guest.
    let mut list = Command::new(&linker);
    let places: Vec<_> = places.iter().map(|place| place.display().to_string()).collect();
    list.arg("--library-path").arg(places.join(":")).arg("--list").arg(&program);
    let libraries = linked(&program::output(&mut list)?);
    let new = Scratch::new(store, "server-kept")?;
    for path in libraries.iter().chain([&linker, &program]) {
        let kept = new.0.join(path.file_name().unwrap_or_default());
        fs::copy(path, &kept).at("copy", path)?;
    }
    fs::rename(&new.0, &home).at("create", &home)?;
    Ok(home)
}

/// The paths in the dynamic linker's list: `NAME => PATH (ADDRESS)`.
fn linked(text: &str) -> Vec<PathBuf> {
    let path = |line: &str| Some(line.split_once("=> ")?.1.rsplit_once(" (")?.0.into());
    text.lines().filter_map(path).collect()
}

/// A module without its signature, and with a section of types that the kernel doesn't find. A guest
/// can do without both, and an emulated one takes a while to check them: with the first types, all
/// of the kernel's own.
fn lean(mut module: Vec<u8>) -> Vec<u8> {
    if let Some(signed) = module.strip_suffix(SIGNED) {
        let Some(bytes) = unsigned_bytes(signed) else { return module };
        module.truncate(bytes);
    }
    if let Some(at) = module.windows(TYPES.len()).position(|it| it == TYPES) {
        module[at..at + TYPES.len()].make_ascii_lowercase();
    }
    module
}

/// The length of what a signature follows, and then the signature's description, which ends with
/// its length.
fn unsigned_bytes(signed: &[u8]) -> Option<usize> {
    let (rest, length) = signed.split_last_chunk()?;
    let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
    rest.len().checked_sub(DESCRIPTION_BYTES - 4)?.checked_sub(length)
}

/// Copies modules out of a package, uncompressed, as the kernel takes them.
pub(super) fn keep_modules(names: &[&str], from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).at("create", to)?;
    let files = if from.is_dir() { files(from)? } else { Vec::new() };
    for name in names {
        let is_it = |path: &&PathBuf| {
            let file = path.file_name().unwrap_or_default().to_string_lossy().replace('-', "_");
            file.strip_prefix(name).is_some_and(|rest| rest.starts_with(".ko"))
        };
        let Some(path) = files.iter().find(is_it) else { continue };
        let unpack = match path.extension().and_then(|end| end.to_str()) {
            Some("xz") => Some("xz"),
            Some("zst") => Some("zstd"),
            _ => None,
        };
        let module = match unpack {
            Some(program) => program::bytes(program::command(program).arg("-dc").arg(path))?,
            None => fs::read(path).at("read", path)?,
        };
        let kept = to.join(format!("{name}.ko"));
        fs::write(&kept, lean(module)).at("write", &kept)?;
    }
    Ok(())
}

/// All files below a directory.
fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).at("list", dir)? {
        let entry = entry.at("list", dir)?;
        if entry.file_type().at("look at", entry.path())?.is_dir() {
            found.extend(files(&entry.path())?);
        } else {
            found.push(entry.path());
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::{SIGNED, lean, linked};

    #[test]
    fn modules_lose_signatures_and_types() {
        let plain = b"\x7fELF code\0.text\0.BTF\0.BTF_ids\0".to_vec();
        let expected = b"\x7fELF code\0.text\0.btf\0.BTF_ids\0".to_vec();
        assert_eq!(lean(plain.clone()), expected);
        let description = b"\0\0\x02\0\0\0\0\0\0\0\0\x05";
        let signed = [&plain[..], &b"proof"[..], &description[..], SIGNED].concat();
        assert_eq!(lean(signed), expected);
        // A length that can't be.
        let odd = [&b"short"[..], &[0xff; 12][..], SIGNED].concat();
        assert_eq!(lean(odd.clone()), odd);
    }

    #[test]
    fn finds_what_is_linked() {
        let list = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibc.so.6 => /x/lib/libc.so.6 (0x00007f)\n\
                    \t/x/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        assert_eq!(linked(list), [std::path::Path::new("/x/lib/libc.so.6")]);
    }
}
