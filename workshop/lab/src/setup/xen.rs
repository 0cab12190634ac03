//! Xen for emulated hosts: the hypervisor, and kernel and initramfs of their domain 0, from Debian
//! 12's packages, which are unpacked and not installed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::apt::{Apt, Scratch, Sources};
use super::{download, initramfs, say};
use crate::cpio::Archive;
use crate::error::{FileContext, LabError, Result};
use crate::program;

/// Xen 4.17.5. What Debian has in its security updates is built without shadow page tables, by
/// which Xen finds the pages that a PV domain writes while it migrates.
const SUITE: &str = "bookworm";
const NAME: &str = "xen-4.17";
const PACKAGES: [&str; 30] = [
    "xen-hypervisor-4.17-amd64",
    "xen-utils-4.17",
    "xen-utils-common",
    "xenstore-utils",
    "libxenmisc4.17",
    "libxencall1",
    "libxendevicemodel1",
    "libxenevtchn1",
    "libxenforeignmemory1",
    "libxengnttab1",
    "libxenhypfs1",
    "libxenstore4",
    "libxentoolcore1",
    "libxentoollog1",
    "libyajl2",
    "libuuid1",
    "liblzma5",
    "libzstd1",
    "zlib1g",
    "libc6",
    "libgcc-s1",
    "busybox-static",
    "iproute2",
    "libbpf1",
    "libelf1",
    "libmnl0",
    "libbsd0",
    "libmd0",
    "libcap2",
    "libxtables12",
];
const KERNEL_PACKAGE: &str = "linux-image-amd64";
/// Drivers of network cards, of what Xen's tools use, and of rates.
const MODULES: [&str; 14] = [
    "virtio",
    "virtio_ring",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "failover",
    "net_failover",
    "virtio_net",
    "xen_evtchn",
    "xen_gntdev",
    "xen_gntalloc",
    "xen_privcmd",
    "xenfs",
    "sch_tbf",
];
const SHADOW: &str = "CONFIG_SHADOW_PAGING=y";
/// Where Xen's programs are, at whose paths its libraries find them.
const TOOLS_DIR: &str = "usr/lib/xen-4.17/bin";
const TOOLS: [&str; 5] = ["xl", "libxl-save-helper", "xenstored", "xenconsoled", "xen-init-dom0"];
/// Other programs, by their paths.
const PROGRAMS: [&str; 4] = ["usr/bin/xenstore-read", "bin/ip", "sbin/tc", "bin/busybox"];
/// Programs of their own, and not busybox's.
const NOT_BUSYBOX: [&str; 3] = ["ip", "tc", "busybox"];
const LIBRARIES: [&str; 2] = ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"];
const DIRECTORIES: [&str; 32] = [
    "proc",
    "sys",
    "dev",
    "run",
    "tmp",
    "root",
    "boot",
    "modules",
    "bin",
    "sbin",
    "lib",
    "lib/x86_64-linux-gnu",
    "lib64",
    "etc",
    "etc/xen",
    "usr",
    "usr/bin",
    "usr/sbin",
    "usr/lib",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/xen-4.17",
    TOOLS_DIR,
    "var",
    "var/lib",
    "var/lib/xen",
    "var/lib/xenstored",
    "var/lib/droveway",
    "var/log",
    "var/log/xen",
    "var/log/xen/console",
    "etc/lab",
    "etc/droveway",
];
const INIT: &[u8] = include_bytes!("xen/domain-zero.sh");
/// LZ4 in blocks, each after its length, as kernels unpack it.
const LZ4_MAGIC: &[u8] = b"\x02\x21\x4c\x18";
const LZ4_BLOCK_BYTES: usize = 8 << 20;

/// Xen and what its emulated hosts boot.
#[derive(Clone, Debug)]
pub struct Xen {
    /// The hypervisor.
    pub hypervisor: PathBuf,
    /// The kernel of domain 0 and of other domains.
    pub kernel: PathBuf,
    /// The initramfs of domain 0, packed; what differs between hosts precedes it.
    pub domain_zero: PathBuf,
    /// The program `xen-kit`.
    pub kit: Vec<u8>,
}

/// Unpacks and makes what is missing.
pub(super) fn ensure(store: &Path) -> Result<Xen> {
    let kit = initramfs::linked_statically(store, "xen-kit")?;
    let home = store.join(NAME);
    if !home.is_dir() {
        make(store, &home)?;
    }
    let [hypervisor, kernel, domain_zero] =
        ["xen", "vmlinuz", "domain-zero"].map(|name| home.join(name));
    Ok(Xen { hypervisor, kernel, domain_zero, kit })
}

fn make(store: &Path, home: &Path) -> Result<()> {
    say("unpacking Xen 4.17 and a kernel for emulated hosts (they are not installed)");
    let apt = Apt::new(store, NAME, Sources::Suites(&[SUITE]))?;
    apt.update()?;
    let kernel = apt.kernel_behind(KERNEL_PACKAGE);
    let kernel = kernel.ok_or(LabError::Missing { what: KERNEL_PACKAGE.to_owned() })?;
    let scratch = Scratch::new(store, "xen")?;
    let root = &scratch.0;
    let packages: Vec<&str> = PACKAGES.into_iter().chain([kernel.as_str()]).collect();
    apt.unpack(&packages, root)?;
    let boot = root.join("boot");
    let config = boot.join("xen-4.17-amd64.config");
    let options = fs::read_to_string(&config).at("read", &config)?;
    if !options.lines().any(|line| line == SHADOW) {
        let text = "Debian's Xen 4.17 is built without shadow page tables: its PV domains can't \
                    be migrated while they run";
        return Err(LabError::Unsupported(text.to_owned()));
    }
    let new = Scratch::new(store, "xen-kept")?;
    let mut unpack = program::command("gzip");
    unpack.arg("-dc").arg(boot.join("xen-4.17-amd64.gz"));
    write(&new.0.join("xen"), &program::bytes(&mut unpack)?)?;
    let image = boot.join(kernel.replace("linux-image-", "vmlinuz-"));
    let image = fs::read(&image).at("read", &image)?;
    write(&new.0.join("vmlinuz"), &image)?;
    let modules = scratch.0.join("kept-modules");
    download::keep_modules(&MODULES, &root.join("lib/modules"), &modules)?;
    let initramfs = domain_zero(root, &modules, &image)?;
    write(&new.0.join("domain-zero"), &packed(&initramfs))?;
    fs::rename(&new.0, home).at("create", home)
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes).at("write", path)
}

/// The initramfs.
fn domain_zero(root: &Path, modules: &Path, kernel: &[u8]) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for directory in DIRECTORIES {
        archive.directory(directory);
    }
    archive.character_device("dev/console", 5, 1);
    archive.link("var/run", "/run");
    archive.link("var/lock", "/run/lock");
    archive.program("init", INIT);
    archive.program("boot/vmlinuz", kernel);
    archive.program("etc/xen/xl.conf", b"autoballoon=\"off\"\n");
    archive.program("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n");
    archive.program("etc/group", b"root:x:0:\n");
    archive.program("etc/hosts", b"127.0.0.1 localhost\n");
    let own = TOOLS.map(|tool| format!("{TOOLS_DIR}/{tool}"));
    for path in own.iter().map(String::as_str).chain(PROGRAMS) {
        let file = root.join(path);
        archive.program(path, &fs::read(&file).at("read", &file)?);
    }
    archive.link("usr/sbin/xl", &format!("/{TOOLS_DIR}/xl"));
    let listed = program::output(Command::new(root.join("bin/busybox")).arg("--list"))?;
    for name in listed.lines().filter(|name| !NOT_BUSYBOX.contains(name)) {
        archive.link(&format!("bin/{name}"), "busybox");
    }
    for directory in LIBRARIES {
        add_libraries(&mut archive, root, directory)?;
    }
    let linker = format!("lib64/{}", download::LINKER);
    archive.link(&linker, &format!("/{}/{}", LIBRARIES[0], download::LINKER));
    initramfs::add_files(&mut archive, "modules", modules)?;
    Ok(archive.finish())
}

/// Adds libraries and the links to them, which are in no directories below.
fn add_libraries(archive: &mut Archive, root: &Path, directory: &str) -> Result<()> {
    let from = root.join(directory);
    let mut names: Vec<String> = fs::read_dir(&from)
        .at("list", &from)?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.contains(".so"))
        .collect();
    names.sort();
    for name in names {
        let (file, path) = (from.join(&name), format!("{directory}/{name}"));
        if let Ok(target) = fs::read_link(&file) {
            archive.link(&path, &target.to_string_lossy());
        } else if file.is_file() {
            archive.program(&path, &fs::read(&file).at("read", &file)?);
        }
    }
    Ok(())
}

/// Packs an initramfs.
fn packed(initramfs: &[u8]) -> Vec<u8> {
    let mut packed = LZ4_MAGIC.to_vec();
    for block in initramfs.chunks(LZ4_BLOCK_BYTES) {
        let block = lz4_flex::block::compress(block);
        let length = u32::try_from(block.len()).expect("a block has some MiB");
        packed.extend_from_slice(&length.to_le_bytes());
        packed.extend_from_slice(&block);
    }
    packed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_initramfs_is_packed_in_blocks() {
        let initramfs = vec![7; LZ4_BLOCK_BYTES + 100];
        let packed = packed(&initramfs);
        let mut left = packed.strip_prefix(LZ4_MAGIC).unwrap();
        let mut unpacked = Vec::new();
        for bytes in [LZ4_BLOCK_BYTES, 100] {
            let (length, rest) = left.split_first_chunk::<4>().unwrap();
            let (block, rest) = rest.split_at(u32::from_le_bytes(*length) as usize);
            unpacked.extend(lz4_flex::block::decompress(block, bytes).unwrap());
            left = rest;
        }
        assert!(left.is_empty() && unpacked == initramfs);
    }

    #[test]
    fn libraries_keep_their_links() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("lib");
        fs::create_dir_all(dir.join("sub.so")).unwrap();
        fs::write(dir.join("a.so.1"), "library").unwrap();
        fs::write(dir.join("a.txt"), "text").unwrap();
        std::os::unix::fs::symlink("a.so.1", dir.join("a.so")).unwrap();
        let mut archive = Archive::default();
        add_libraries(&mut archive, root.path(), "lib").unwrap();
        let bytes = archive.finish();
        let text = String::from_utf8_lossy(&bytes);
        let at = |name: &str| text.find(name);
        assert!(at("lib/a.so\0").unwrap() < at("lib/a.so.1\0").unwrap());
        assert!(at("0000A1FF").is_some() && at("a.txt").is_none() && at("sub.so").is_none());
    }
}
