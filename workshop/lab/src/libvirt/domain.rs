//! A guest of the lab as a libvirt domain.

use std::fmt::Write;
use std::fs;

use super::Libvirtd;
use crate::error::{FileContext, LabError, Result};
use crate::guest::{Boot, Guest, GuestSpec};
use crate::hosts::{Host, RUN_DIR};
use crate::program;
use crate::setup::{Accelerator, Kit, Qemu};

/// How a guest's memory is backed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// libvirt's default: private to QEMU.
    Default,
    /// A memfd that other processes may map.
    SharedMemfd,
}

/// A disk of a domain.
#[derive(Clone, Debug)]
pub struct Disk {
    /// Path of its image on the hosts.
    pub path: String,
    /// The image's format.
    pub format: &'static str,
}

impl Disk {
    /// Makes an empty image in a host's own directory. Called for both hosts, it makes an image at
    /// the same path on each.
    ///
    /// # Errors
    /// If `qemu-img` fails.
    pub fn make(host: &Host, name: &str, format: &'static str, bytes: u64) -> Result<Self> {
        let mut make = program::command("qemu-img");
        make.args(["create", "-q", "-f", format]).arg(host.run_dir.join(name));
        program::output(make.arg(bytes.to_string()))?;
        Ok(Self { path: format!("{RUN_DIR}/{name}"), format })
    }
}

/// A guest as a domain. Its name is the guest's.
#[derive(Clone, Debug)]
pub struct Domain {
    /// The guest; its `extra` arguments for QEMU are not used.
    pub guest: GuestSpec,
    /// How its memory is backed.
    pub memory: Memory,
    /// Its disks: vda, vdb and so on.
    pub disks: Vec<Disk>,
    /// Names of its virtio ports, each a socket `GUEST.NAME` on its host.
    pub channels: Vec<String>,
    /// Its UUID, if libvirt isn't to choose it.
    pub uuid: Option<String>,
}

impl Domain {
    /// A domain without disks.
    #[must_use]
    pub fn new(guest: GuestSpec) -> Self {
        let (disks, channels) = (Vec::new(), Vec::new());
        Self { guest, memory: Memory::Default, disks, channels, uuid: None }
    }

    /// Copies what it boots to `host`. Each host needs a copy of its own, since libvirt gives it to
    /// QEMU's user.
    ///
    /// # Errors
    /// If it can't be copied.
    pub fn bring(&self, host: &Host, kit: &Kit) -> Result<()> {
        let Boot { kernel, initrd, .. } = self.guest.boots(kit);
        for (from, end) in [(Some(kernel), "kernel"), (initrd, "initrd")] {
            let Some(from) = from else { continue };
            let to = host.run_dir.join(format!("{}.{end}", self.guest.name));
            fs::copy(from, &to).at("copy", from)?;
        }
        Ok(())
    }

    /// Starts it on `host` as a transient domain, and waits until the guest has booted.
    ///
    /// # Errors
    /// If libvirt refuses it, or it stays silent.
    pub fn start(&self, daemon: &Libvirtd, host: &Host, kit: &Kit, qemu: &Qemu) -> Result<Guest> {
        self.give(daemon, host, kit, qemu, "create")?;
        Guest::meet(self.guest.clone(), host)
    }

    /// Defines it on `host` as a persistent domain.
    ///
    /// # Errors
    /// If libvirt refuses it.
    pub fn define(&self, daemon: &Libvirtd, host: &Host, kit: &Kit, qemu: &Qemu) -> Result<()> {
        self.give(daemon, host, kit, qemu, "define")
    }

    fn give(
        &self,
        daemon: &Libvirtd,
        host: &Host,
        kit: &Kit,
        qemu: &Qemu,
        verb: &str,
    ) -> Result<()> {
        self.bring(host, kit)?;
        let file = format!("{}.xml", self.guest.name);
        let outside = host.run_dir.join(&file);
        fs::write(&outside, self.xml(kit, qemu)?).at("write", &outside)?;
        daemon.tells(host, &[verb, &format!("{RUN_DIR}/{file}")]).map(drop)
    }

    /// Its XML.
    ///
    /// # Errors
    /// If its memory isn't a size.
    pub fn xml(&self, kit: &Kit, qemu: &Qemu) -> Result<String> {
        let guest = &self.guest;
        let accelerator = guest.accelerator.unwrap_or(kit.accelerator);
        let kind = match accelerator {
            Accelerator::Kvm => "kvm",
            Accelerator::Tcg => "qemu",
        };
        let cpu = match guest.cpu(accelerator) {
            "host" => "<cpu mode='host-passthrough'/>".to_owned(),
            model => format!(
                "<cpu mode='custom' match='exact' check='none'><model \
                 fallback='forbid'>{model}</model></cpu>"
            ),
        };
        let machine = match guest.machine.as_str() {
            // `q35` means each QEMU's own newest, which the other host's QEMU may lack.
            "q35" => qemu.machine(),
            named => named.to_owned(),
        };
        let reboot = if guest.no_reboot { "destroy" } else { "restart" };
        let mut xml = format!("<domain type='{kind}'>\n  <name>{}</name>\n", text(&guest.name));
        if let Some(uuid) = &self.uuid {
            line(&mut xml, &format!("<uuid>{}</uuid>", text(uuid)));
        }
        line(&mut xml, &format!("<memory unit='KiB'>{}</memory>", kib(&guest.memory)?));
        if self.memory == Memory::SharedMemfd {
            let memfd = "<source type='memfd'/><access mode='shared'/>";
            line(&mut xml, &format!("<memoryBacking>{memfd}</memoryBacking>"));
        }
        line(&mut xml, &format!("<vcpu>{}</vcpu>", guest.vcpus));
        line(&mut xml, &self.os(kit, &machine));
        line(&mut xml, "<features><acpi/><apic/></features>");
        line(&mut xml, &cpu);
        line(&mut xml, "<on_poweroff>destroy</on_poweroff>");
        line(&mut xml, &format!("<on_reboot>{reboot}</on_reboot>"));
        line(&mut xml, "<on_crash>destroy</on_crash>");
        line(&mut xml, "<devices>");
        line(
            &mut xml,
            &format!("<emulator>{}</emulator>", text(&qemu.program.display().to_string())),
        );
        self.devices(&mut xml);
        line(&mut xml, "</devices>");
        Ok(xml + "</domain>\n")
    }

    fn os(&self, kit: &Kit, machine: &str) -> String {
        let boot = self.guest.boots(kit);
        let at = |end: &str| text(&format!("{RUN_DIR}/{}.{end}", self.guest.name));
        let initrd = boot.initrd.map(|_| format!("<initrd>{}</initrd>", at("initrd")));
        format!(
            "<os><type arch='x86_64' machine='{}'>hvm</type><kernel>{}</kernel>{}<cmdline>{}\
             </cmdline></os>",
            text(machine),
            at("kernel"),
            initrd.unwrap_or_default(),
            text(&boot.line),
        )
    }

    fn devices(&self, xml: &mut String) {
        for (disk, letter) in self.disks.iter().zip('a'..='z') {
            let (path, format) = (text(&disk.path), disk.format);
            line(
                xml,
                &format!(
                    "<disk type='file' device='disk'><driver name='qemu' type='{format}' \
                     discard='unmap'/><source file='{path}'/><target dev='vd{letter}' \
                     bus='virtio'/></disk>"
                ),
            );
        }
        line(xml, "<controller type='usb' model='none'/>");
        let console = text(&self.guest.console_path());
        let talk = text(&self.guest.talk_path());
        for (kind, source, port) in [
            ("file", format!("<source path='{console}'/>"), 0),
            ("unix", format!("<source mode='bind' path='{talk}'/>"), 1),
        ] {
            let target = format!("<target type='isa-serial' port='{port}'/>");
            line(xml, &format!("<serial type='{kind}'>{source}{target}</serial>"));
        }
        for name in &self.channels {
            let path = text(&format!("{RUN_DIR}/{}.{name}", self.guest.name));
            let source = format!("<source mode='bind' path='{path}'/>");
            let target = format!("<target type='virtio' name='{}'/>", text(name));
            line(xml, &format!("<channel type='unix'>{source}{target}</channel>"));
        }
        line(xml, "<video><model type='none'/></video>");
        line(xml, "<memballoon model='none'/>");
    }
}

fn line(xml: &mut String, what: &str) {
    // Writing to a string can't fail.
    let _ = writeln!(xml, "  {what}");
}

/// Escapes text or an attribute's value for XML.
fn text(plain: &str) -> String {
    let mut out = String::with_capacity(plain.len());
    for letter in plain.chars() {
        match letter {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '\'' => out += "&apos;",
            '"' => out += "&quot;",
            other => out.push(other),
        }
    }
    out
}

/// A size as in QEMU's `-m`, in KiB.
fn kib(memory: &str) -> Result<u64> {
    let wrong = || LabError::Text { what: "a guest's memory", text: memory.to_owned() };
    let (digits, factor) = match memory.as_bytes().last() {
        Some(b'k') => (memory.get(..memory.len() - 1), 1),
        Some(b'G') => (memory.get(..memory.len() - 1), 1 << 20),
        Some(b'M') => (memory.get(..memory.len() - 1), 1 << 10),
        _ => (Some(memory), 1 << 10),
    };
    let number: u64 = digits.and_then(|digits| digits.parse().ok()).ok_or_else(wrong)?;
    number.checked_mul(factor).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use lab_guest::orders::Orders;

    use super::*;
    use crate::setup::Version;

    fn kit() -> Kit {
        let version = Version { major: 7, minor: 2, patch: 22 };
        Kit {
            qemu: "/newer/qemu".into(),
            qemu_version: Version { major: 10, minor: 0, patch: 2 },
            qemu_system: "/usr/bin/qemu".into(),
            qemu_system_version: version,
            kernel: "/linux".into(),
            initrd: "/initrd".into(),
            bare_kernel: "/bare".into(),
            accelerator: Accelerator::Tcg,
        }
    }

    #[test]
    fn sizes_are_those_of_qemu() {
        for (memory, expected) in [("64", 65536), ("64M", 65536), ("1G", 1 << 20), ("8k", 8)] {
            assert_eq!(kib(memory).unwrap(), expected, "{memory}");
        }
        for wrong in
            ["", "M", "64T", "1,maxmem=2G", "99999999999999999999", "18446744073709551615G"]
        {
            assert!(kib(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_domain_has_what_its_guest_is() {
        let mut domain = Domain::new(GuestSpec::new("a<b", "64M", Orders::default()));
        domain.disks.push(Disk { path: "/d".to_owned(), format: "qcow2" });
        domain.channels.push("org.droveway.guest.0".to_owned());
        let kit = kit();
        let newer = Qemu { program: kit.qemu.clone(), version: kit.qemu_version };
        let xml = domain.xml(&kit, &newer).unwrap();
        for part in [
            "<domain type='qemu'>",
            "<name>a&lt;b</name>",
            "machine='pc-q35-10.0'",
            "<initrd>/run/droveway-lab/a&lt;b.initrd</initrd>",
            "lab.seed=0",
            "<target dev='vda' bus='virtio'/>",
            "<target type='virtio' name='org.droveway.guest.0'/>",
            "<emulator>/newer/qemu</emulator>",
        ] {
            assert!(xml.contains(part), "{part} is not in {xml}");
        }
        assert!(!xml.contains("memfd"), "{xml}");
    }

    #[test]
    fn a_bare_guest_in_memory_that_is_shared() {
        let mut domain = Domain::new(GuestSpec::bare("a", "64M", Orders::default()));
        domain.memory = Memory::SharedMemfd;
        let kit = kit();
        let system = Qemu { program: "/script".into(), version: kit.qemu_system_version };
        let xml = domain.xml(&kit, &system).unwrap();
        assert!(xml.contains("<emulator>/script</emulator>"), "{xml}");
        assert!(xml.contains("machine='pc-q35-7.2'"), "{xml}");
        assert!(xml.contains("<source type='memfd'/><access mode='shared'/>"), "{xml}");
        assert!(!xml.contains("<initrd>"), "{xml}");
    }
}
