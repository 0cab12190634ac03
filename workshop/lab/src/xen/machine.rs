//! The QEMU of an emulated host, and what it boots.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::{LINKS, NAMES};
use crate::cpio::Archive;
use crate::error::{FileContext, Result, SystemContext};
use crate::hosts::{Host, RUN_DIR};
use crate::program;
use crate::setup::{Kit, Xen};

/// The machine's dynamic linker, which loads `droveway` with this machine's libraries.
const LINKER: &str = "/lib64/ld-linux-x86-64.so.2";
/// Directory of `droveway` and its libraries.
const HOME: &str = "opt/droveway";
/// Those of files that differ between hosts.
const DIRECTORIES: [&str; 9] =
    ["usr", "usr/bin", "boot", "opt", HOME, "etc", "etc/lab", "etc/droveway", "etc/droveway/tls"];
/// The lab's port in domain 0, and on the loopback of the QEMU's host.
pub(super) const PORT: u16 = 5000;
/// The agents' port.
const AGENT_PORT: u16 = 7800;
pub(super) const CONSOLE: &str = "console";

/// Without SMAP, since QEMU's TCG makes a PV domain 0 die at it; without RDTSCP, whose exits Xen
/// doesn't understand under TCG.
const CPU: &str = "max,-smap,-rdtscp";
/// Registers of the FPU are restored at once: restored when they are used, processes of domain 0
/// lose some under TCG.
const HYPERVISOR_WORDS: &str = "console=com1 com1=115200,8n1 dom0_mem=560M,max:560M \
    loglvl=warning guest_loglvl=warning noreboot=1 spec-ctrl=no,eager-fpu=1 xpti=0 pcid=0 \
    ucode=no watchdog=0";
/// A comma separates modules, so there is none.
const KERNEL_WORDS: &str = "console=hvc0 nomodeset mitigations=off quiet";
const MEMORY_MIB: &str = "1536";
/// Of a packed initramfs that follows others.
const ALIGNMENT: usize = 4096;

/// The address of a host on a link, both counted from 0.
pub(super) fn address(number: usize, link: usize) -> String {
    format!("10.9.{}.{}", link + 1, number + 1)
}

/// The peers file of hosts that use this many links.
fn peers(links: usize) -> String {
    let entry = |number: usize| {
        let nics = (0..links).map(|link| format!("\"{}\"", address(number, link)));
        let nics: Vec<String> = nics.collect();
        let (name, first) = (NAMES[number], address(number, 0));
        format!(
            "[[host]]\nname = \"{name}\"\naddress = \"{first}:{AGENT_PORT}\"\nnics = [{}]\n",
            nics.join(", ")
        )
    };
    (0..NAMES.len()).map(entry).collect()
}

/// The command that runs an agent with so many links.
pub(super) fn agent_command(number: usize, links: usize) -> String {
    let nics: Vec<String> =
        (0..links).map(|link| format!("--nic {}", address(number, link))).collect();
    format!(
        "droveway agent --name {} --listen 0.0.0.0:{AGENT_PORT} \
         --peers /etc/droveway/peers-{links}.toml --state /var/lib/droveway/state \
         --api /run/droveway/api.sock --tls /etc/droveway/tls --config /etc/droveway/agent.toml {}",
        NAMES[number],
        nics.join(" ")
    )
}

/// What a host has besides the initramfs of all: a file for the kernel to unpack before that.
pub(super) fn overlay(
    number: usize,
    xen: &Xen,
    droveway: &Path,
    certificates: &Path,
) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for directory in DIRECTORIES {
        archive.directory(directory);
    }
    archive.program("usr/bin/xen-kit", &xen.kit);
    archive.program("boot/guest", &guest(xen));
    archive.program("etc/lab/number", format!("{}\n", number + 1).as_bytes());
    let config = format!("[xen]\naccept-from = [\"{}\"]\n", NAMES[1 - number]);
    archive.program("etc/droveway/agent.toml", config.as_bytes());
    for links in [1, LINKS] {
        let path = format!("etc/droveway/peers-{links}.toml");
        archive.program(&path, peers(links).as_bytes());
    }
    for entry in fs::read_dir(certificates).at("list", certificates)? {
        let path = entry.at("list", certificates)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let content = fs::read(&path).at("read", &path)?;
        archive.secret(&format!("etc/droveway/tls/{name}"), &content);
    }
    add_droveway(&mut archive, droveway)?;
    let mut bytes = archive.finish();
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
    Ok(bytes)
}

/// The initramfs of other domains: `xen-kit` is all that they have.
fn guest(xen: &Xen) -> Vec<u8> {
    let mut archive = Archive::default();
    archive.directory("dev");
    archive.character_device("dev/console", 5, 1);
    archive.program("init", &xen.kit);
    archive.finish()
}

/// Adds `droveway` without its debug information, with the libraries that it needs, and a script
/// that starts it.
fn add_droveway(archive: &mut Archive, droveway: &Path) -> Result<()> {
    let mut list = Command::new(LINKER);
    let listed = program::output(list.arg("--list").arg(droveway))?;
    for path in libraries(&listed) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        archive.program(&format!("{HOME}/{name}"), &fs::read(&path).at("read", &path)?);
    }
    archive.program(&format!("{HOME}/linker"), &fs::read(LINKER).at("read", LINKER)?);
    let bare = tempfile::NamedTempFile::new().doing("make a file")?;
    let mut strip = program::command("objcopy");
    strip.arg("--strip-debug").arg(droveway).arg(bare.path());
    // It is a part of the tools without which Rust links nothing, but not of each machine's.
    let from = if program::output(&mut strip).is_ok() { bare.path() } else { droveway };
    archive.program(&format!("{HOME}/droveway"), &fs::read(from).at("read", from)?);
    let script =
        format!("#!/bin/sh\nexec /{HOME}/linker --library-path /{HOME} /{HOME}/droveway \"$@\"\n");
    archive.program("usr/bin/droveway", script.as_bytes());
    Ok(())
}

/// The paths in the dynamic linker's list: `NAME => PATH (ADDRESS)`.
fn libraries(listed: &str) -> Vec<PathBuf> {
    let path = |line: &str| Some(line.split_once("=> ")?.1.rsplit_once(" (")?.0.into());
    listed.lines().filter_map(path).collect()
}

/// Starts the QEMU of a host.
pub(super) fn start(
    kit: &Kit,
    xen: &Xen,
    host: &Host,
    number: usize,
    overlay: &[u8],
    sockets: &Path,
) -> Result<Child> {
    let initramfs = host.run_dir.join("initramfs");
    let domain_zero = fs::read(&xen.domain_zero).at("read", &xen.domain_zero)?;
    fs::write(&initramfs, [overlay, &domain_zero[..]].concat()).at("write", &initramfs)?;
    let mut command = host.command(&kit.qemu_system);
    command.args(["-machine", "q35", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", CPU]);
    command.args(["-m", MEMORY_MIB, "-smp", "1", "-nodefaults", "-no-user-config", "-no-reboot"]);
    command.args(["-display", "none", "-serial", &format!("file:{RUN_DIR}/{CONSOLE}")]);
    command.arg("-kernel").arg(&xen.hypervisor).args(["-append", HYPERVISOR_WORDS]);
    let kernel = xen.kernel.display();
    command.args(["-initrd", &format!("{kernel} {KERNEL_WORDS},{RUN_DIR}/initramfs")]);
    let lab = format!("user,id=nic0,restrict=on,hostfwd=tcp:127.0.0.1:{PORT}-:{PORT}");
    command.args(["-netdev", &lab]).args(card(number, 0));
    for nic in 1..=LINKS {
        let socket = |number: usize| sockets.join(format!("{nic}.{number}")).display().to_string();
        let (own, others) = (socket(number), socket(1 - number));
        let link = format!(
            "dgram,id=nic{nic},local.type=unix,local.path={own},remote.type=unix,\
             remote.path={others}"
        );
        command.args(["-netdev", &link]).args(card(number, nic));
    }
    let log = host.run_dir.join("qemu.log");
    let log = fs::File::create(&log).at("create", &log)?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    command.spawn().doing("start an emulated host")
}

/// QEMU's arguments for a card, whose address has the numbers of the host and of the card. Links
/// have large packets: each costs emulated CPUs much.
fn card(number: usize, nic: usize) -> [String; 2] {
    let address = format!("52:54:00:00:0{}:0{nic}", number + 1);
    let mtu = if nic > 0 { ",host_mtu=9000" } else { "" };
    ["-device".to_owned(), format!("virtio-net-pci,netdev=nic{nic},mac={address},romfile={mtu}")]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_list_each_other_with_their_links() {
        let one = peers(1);
        assert!(one.contains("name = \"host-b\"\naddress = \"10.9.1.2:7800\""), "{one}");
        assert!(one.contains("nics = [\"10.9.1.1\"]"), "{one}");
        assert!(peers(LINKS).contains("\"10.9.4.2\"]"));
        let command = agent_command(1, 1);
        assert!(command.contains("peers-1.toml") && command.ends_with("--nic 10.9.1.2"));
        let card = &card(1, 3)[1];
        assert!(card.starts_with("virtio-net-pci,netdev=nic3,mac=52:54:00:00:02:03,"), "{card}");
    }

    #[test]
    fn a_programs_libraries_are_found() {
        let listed = "\tlinux-vdso.so.1 (0x7ffd)\n\tlibc.so.6 => /lib/libc.so.6 (0x7f)\n";
        assert_eq!(libraries(listed), [Path::new("/lib/libc.so.6")]);
    }
}
