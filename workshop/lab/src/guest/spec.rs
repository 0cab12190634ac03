//! The description of a guest, and QEMU's arguments for it.

use std::path::{Path, PathBuf};

use lab_guest::orders::Orders;

use crate::hosts::{Host, RUN_DIR};
use crate::setup::{Accelerator, Kit};

/// Huge pages in the guest would move memory that it left alone. A kernel that tests its timer
/// takes it for broken when a busy host delays QEMU. The last line turns off what Linux can do
/// without under TCG, so it boots a sixth faster.
const LINUX_WORDS: &str = "console=ttyS0 quiet panic=1 transparent_hugepage=never no_timer_check \
     mitigations=off cryptomgr.notests audit=0 nowatchdog random.trust_cpu=on";

/// The CPU of guests without an operating system: it has all that they need, and all of it can be
/// emulated.
pub(crate) const BARE_CPU: &str = "qemu64";

/// Firmware that comes with QEMU and does little but start such a kernel. Where KVM only emulates,
/// the usual one takes four seconds for all the devices that such guests don't have.
const BARE_FIRMWARE: &str = "qboot.rom";

/// What runs in a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum System {
    /// Linux, with `lab-guest` in it.
    Linux,
    /// `bare-guest` alone: it boots in a tenth of a second, and costs next to nothing. It has
    /// memory, one or two vCPUs, and no devices.
    Bare,
}

/// What a guest boots.
pub(crate) struct Boot<'s> {
    pub(crate) kernel: &'s Path,
    pub(crate) initrd: Option<&'s Path>,
    /// The kernel's command line.
    pub(crate) line: String,
}

/// The description of a guest.
#[derive(Clone, Debug)]
pub struct GuestSpec {
    /// Its name, in paths.
    pub name: String,
    /// QEMU's `-m`, such as `512M`.
    pub memory: String,
    /// What runs in it.
    pub system: System,
    /// The accelerator, if not the one for Linux guests.
    pub accelerator: Option<Accelerator>,
    /// Entries of each vCPU's dirty ring, if KVM is to report dirty pages by rings instead of a
    /// log.
    pub dirty_ring: Option<u32>,
    /// Its machine type.
    pub machine: String,
    /// How many virtual CPUs it has.
    pub vcpus: u32,
    /// Its orders.
    pub orders: Orders,
    /// Whether QEMU exits when the guest reboots, which it does after a panic, too.
    pub no_reboot: bool,
    /// More parameters for its kernel.
    pub kernel_words: &'static str,
    /// Its kernel, if it is not the usual one.
    pub kernel: Option<PathBuf>,
    /// Its initramfs, if it is not the usual one.
    pub initrd: Option<PathBuf>,
    /// More arguments for QEMU.
    pub extra: Vec<String>,
}

impl GuestSpec {
    /// A guest of `memory` that follows `orders`, with Linux.
    #[must_use]
    pub fn new(name: &str, memory: &str, orders: Orders) -> Self {
        Self {
            name: name.to_owned(),
            memory: memory.to_owned(),
            system: System::Linux,
            accelerator: None,
            dirty_ring: None,
            machine: "q35".to_owned(),
            vcpus: 1,
            orders,
            no_reboot: true,
            kernel_words: "",
            kernel: None,
            initrd: None,
            extra: Vec::new(),
        }
    }

    /// The same without an operating system.
    #[must_use]
    pub fn bare(name: &str, memory: &str, orders: Orders) -> Self {
        Self { system: System::Bare, ..Self::new(name, memory, orders) }
    }

    /// QEMU and its arguments, as a user would write them.
    #[must_use]
    pub fn argv(&self, kit: &Kit, qemu: &Path) -> Vec<String> {
        let accelerator = self.accelerator.unwrap_or(kit.accelerator);
        let mut argv: Vec<String> = [
            &qemu.display().to_string(),
            // With named threads, CPU time of vCPUs can be told from that of the migration.
            "-name",
            &format!("{},debug-threads=on", self.name),
            "-machine",
            &self.machine,
            "-accel",
            &self.accel(accelerator),
            "-cpu",
            self.cpu(accelerator),
            "-m",
            &self.memory,
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
        ]
        .map(str::to_owned)
        .to_vec();
        argv.extend(self.boot(kit));
        argv.extend([
            "-serial".to_owned(),
            format!("file:{}", self.console_path()),
            "-chardev".to_owned(),
            format!("socket,id=talk,path={},server=on,wait=off", self.talk_path()),
            "-serial".to_owned(),
            "chardev:talk".to_owned(),
        ]);
        if self.vcpus != 1 {
            argv.extend(["-smp".to_owned(), self.vcpus.to_string()]);
        }
        if self.no_reboot {
            argv.push("-no-reboot".to_owned());
        }
        argv.extend(self.extra.iter().cloned());
        argv
    }

    fn accel(&self, accelerator: Accelerator) -> String {
        let ring = self.dirty_ring.map(|entries| format!(",dirty-ring-size={entries}"));
        format!("{accelerator}{}", ring.unwrap_or_default())
    }

    pub(crate) fn cpu(&self, accelerator: Accelerator) -> &'static str {
        match (self.system, accelerator) {
            (System::Bare, _) => BARE_CPU,
            (System::Linux, Accelerator::Kvm) => "host",
            // `max` under TCG has features that 7.2 can't migrate.
            (System::Linux, Accelerator::Tcg) => "qemu64",
        }
    }

    /// QEMU's arguments for what the guest boots.
    fn boot(&self, kit: &Kit) -> Vec<String> {
        let Boot { kernel, initrd, line } = self.boots(kit);
        let mut boot = vec!["-kernel".to_owned(), kernel.display().to_string()];
        if let Some(initrd) = initrd {
            boot.extend(["-initrd".to_owned(), initrd.display().to_string()]);
        }
        boot.extend(["-append".to_owned(), line]);
        if self.system == System::Bare && self.accelerator == Some(Accelerator::Kvm) {
            boot.extend(["-bios", BARE_FIRMWARE].map(str::to_owned));
        }
        boot
    }

    /// What the guest boots.
    pub(crate) fn boots<'s>(&'s self, kit: &'s Kit) -> Boot<'s> {
        let (kernel, initrd, words) = match self.system {
            System::Linux => {
                let kernel = self.kernel.as_ref().unwrap_or(&kit.kernel);
                (kernel, Some(self.initrd.as_ref().unwrap_or(&kit.initrd)), LINUX_WORDS)
            }
            System::Bare => (&kit.bare_kernel, None, ""),
        };
        let mut line = String::new();
        for word in words.split_whitespace().chain(self.kernel_words.split_whitespace()) {
            line += word;
            line += " ";
        }
        Boot {
            kernel,
            initrd: initrd.map(PathBuf::as_path),
            line: format!("{line}{}", self.orders),
        }
    }

    /// Path, on its host, of the socket on which the guest speaks.
    pub(crate) fn talk_path(&self) -> String {
        format!("{RUN_DIR}/{}.talk", self.name)
    }

    /// Path, on its host, of the output of its first serial port.
    pub(crate) fn console_path(&self) -> String {
        format!("{RUN_DIR}/{}.console", self.name)
    }

    /// Path of that socket on `host`, as seen from outside.
    pub(super) fn socket(&self, host: &Host) -> PathBuf {
        host.run_dir.join(format!("{}.talk", self.name))
    }

    /// The end of the guest's console on `host`, for error messages.
    #[must_use]
    pub fn console(&self, host: &Host) -> String {
        let console = host.run_dir.join(format!("{}.console", self.name));
        let text = std::fs::read(console).unwrap_or_default();
        String::from_utf8_lossy(&text[text.len().saturating_sub(2000)..]).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setup::Version;

    fn kit() -> Kit {
        let version = Version { major: 10, minor: 0, patch: 2 };
        Kit {
            qemu: "/qemu".into(),
            qemu_version: version,
            qemu_system: "/qemu".into(),
            qemu_system_version: version,
            kernel: "/linux".into(),
            initrd: "/initrd".into(),
            bare_kernel: "/bare".into(),
            accelerator: Accelerator::Tcg,
        }
    }

    fn after<'a>(argv: &'a [String], option: &str) -> Option<&'a str> {
        argv.iter().skip_while(|word| *word != option).nth(1).map(String::as_str)
    }

    #[test]
    fn linux_has_an_initramfs_and_words_of_its_own() {
        let mut spec = GuestSpec::new("a", "64M", Orders::default());
        spec.kernel_words = "more words";
        let argv = spec.argv(&kit(), Path::new("/other"));
        assert_eq!(argv[0], "/other");
        assert_eq!(after(&argv, "-kernel"), Some("/linux"));
        assert_eq!(after(&argv, "-initrd"), Some("/initrd"));
        let line = after(&argv, "-append").unwrap();
        assert!(line.starts_with("console=ttyS0 quiet "), "{line}");
        assert!(line.contains(" random.trust_cpu=on more words lab.seed=0 "), "{line}");
    }

    #[test]
    fn a_guest_without_an_operating_system_has_its_orders_only() {
        let mut spec = GuestSpec::bare("a", "64M", Orders::default());
        let argv = spec.argv(&kit(), Path::new("/qemu"));
        assert_eq!(after(&argv, "-kernel"), Some("/bare"));
        assert_eq!(after(&argv, "-initrd"), None);
        assert_eq!(["-machine", "-accel"].map(|it| after(&argv, it)), [Some("q35"), Some("tcg")]);
        assert!(after(&argv, "-append").unwrap().starts_with("lab.seed=0 "));
        assert_eq!(after(&argv, "-bios"), None);
        (spec.accelerator, spec.dirty_ring) = (Some(Accelerator::Kvm), Some(4096));
        let argv = spec.argv(&kit(), Path::new("/qemu"));
        assert_eq!(after(&argv, "-accel"), Some("kvm,dirty-ring-size=4096"));
        assert_eq!(after(&argv, "-bios"), Some("qboot.rom"));
        assert_eq!(after(&argv, "-cpu"), Some(BARE_CPU));
    }
}
