//! Finds or makes all that the lab needs: programs, a QEMU that is correct with the accelerator at
//! hand, a kernel, an initramfs. Reports what it does, and does nothing if nothing is missing.

mod accelerator;
mod answers;
mod apt;
mod bare;
mod download;
mod field;
mod host_root;
mod initramfs;
mod install;
mod libvirt;
mod nfs;
mod nft;
mod qemus;
mod ssh;
mod store;
mod version;
mod vmlinux;
mod xen;

use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::{env, fmt, thread};

pub use accelerator::Accelerator;
pub use answers::qemu_answers;
pub(crate) use field::OVMF;
pub use field::{Image, Kernel, Release};
pub use host_root::HOSTS_QEMU;
pub use libvirt::Libvirt;
pub(crate) use libvirt::MODULES as QEMU_MODULES;
pub use nfs::Nfs;
pub use nft::Nft;
pub(crate) use store::VARIABLE as STORE_VARIABLE;
pub use store::{remove_store, store};
pub use version::Version;
pub use xen::Xen;

use serde::{Deserialize, Serialize};

use crate::error::{LabError, Result};
use crate::program;

/// The first QEMU whose own migration is correct under TCG.
const QEMU_CORRECT_UNDER_TCG: Version = Version { major: 9, minor: 0, patch: 0 };

/// The current Debian, and its suite with later versions.
const CURRENT_SUITES: [&str; 2] = ["trixie", "trixie-backports"];

/// Environment variable with the kit, for programs that run one after the other.
const KIT_VARIABLE: &str = "LAB_KIT";
/// Environment variable with the wanted libvirt release.
const LIBVIRT_VARIABLE: &str = "LAB_LIBVIRT";

/// All that guests need.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Kit {
    /// A QEMU that migrates correctly with `accelerator`.
    pub qemu: PathBuf,
    /// Its version.
    pub qemu_version: Version,
    /// The distribution's QEMU; often the same.
    pub qemu_system: PathBuf,
    /// Its version.
    pub qemu_system_version: Version,
    /// The guests' kernel.
    pub kernel: PathBuf,
    /// The guests' initramfs.
    pub initrd: PathBuf,
    /// The kernel of guests without an operating system.
    pub bare_kernel: PathBuf,
    /// KVM where it can boot Linux, else TCG.
    pub accelerator: Accelerator,
}

impl Kit {
    /// Whether a QEMU loses writes of its guest while that is moved.
    #[must_use]
    pub fn loses_writes(&self, qemu: &Qemu) -> bool {
        self.accelerator == Accelerator::Tcg && qemu.version < QEMU_CORRECT_UNDER_TCG
    }

    /// The QEMU that migrates correctly.
    #[must_use]
    pub fn own_qemu(&self) -> Qemu {
        Qemu { program: self.qemu.clone(), version: self.qemu_version }
    }
}

impl fmt::Display for Kit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let qemu = self.qemu.display();
        let system = self.qemu_system.display();
        writeln!(f, "QEMU_{}={qemu}", self.qemu_version.major)?;
        if self.qemu_system_version.major != self.qemu_version.major {
            writeln!(f, "QEMU_{}={system}", self.qemu_system_version.major)?;
        }
        writeln!(f, "QEMU={qemu}")?;
        writeln!(f, "KERNEL={}", self.kernel.display())?;
        writeln!(f, "INITRD={}", self.initrd.display())?;
        writeln!(f, "BARE_KERNEL={}", self.bare_kernel.display())?;
        write!(f, "ACCEL={}", self.accelerator)
    }
}

/// The repository's root.
#[must_use]
pub fn repository() -> PathBuf {
    let workshop = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    workshop.and_then(Path::parent).map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// An environment variable that spares other programs the search for the kit.
///
/// # Errors
/// Like [`ensure`].
pub(crate) fn for_others() -> Result<(&'static str, String)> {
    let kit = ensure()?;
    helper_initrd(&kit)?;
    answers::keep(&kit);
    let kit = serde_json::to_string(&kit);
    let kit = kit.map_err(|error| LabError::Text { what: "the kit", text: error.to_string() })?;
    Ok((KIT_VARIABLE, kit))
}

/// Finds what exists, and installs or makes what doesn't.
///
/// # Errors
/// Names what is missing and not available.
pub fn ensure() -> Result<Kit> {
    if let Ok(text) = env::var(KIT_VARIABLE) {
        return serde_json::from_str(&text)
            .map_err(|error| LabError::Text { what: KIT_VARIABLE, text: error.to_string() });
    }
    if env::consts::ARCH != "x86_64" {
        let text = format!("the lab's guests are x86-64; this machine is {}", env::consts::ARCH);
        return Err(LabError::Unsupported(text));
    }
    let store = store::create()?;
    // Compiles and fetches in parallel.
    let (guest, bare_kernel, fetched) = thread::scope(|scope| {
        let building = scope.spawn(|| (initramfs::guest(&store), bare::build(&store)));
        let fetched = install::programs().and_then(|()| download::kernel(&store));
        let (guest, bare_kernel) = building.join().unwrap_or_else(|panic| resume_unwind(panic));
        (guest, bare_kernel, fetched)
    });
    let (kernel, modules) = fetched?;
    let initrd = initramfs::pack(&store, &guest?, &modules)?;
    let bare_kernel = bare_kernel.unwrap_or_else(|error| {
        say(&format!(
            "guests without an operating system, which tests need, can't be had: {error}"
        ));
        bare::path(&store)
    });
    let qemu_system = system_qemu()?;
    let qemu_system_version = version::of(&qemu_system)?;
    let accelerator = accelerator::find(&store, &qemu_system, &kernel, &initrd)?;
    let wanted = accelerator == Accelerator::Tcg && qemu_system_version < QEMU_CORRECT_UNDER_TCG;
    let qemu = if wanted { qemus::newer(&store)? } else { qemu_system.clone() };
    let qemu_version = version::of(&qemu)?;
    Ok(Kit {
        qemu,
        qemu_version,
        qemu_system,
        qemu_system_version,
        kernel,
        initrd,
        bare_kernel,
        accelerator,
    })
}

/// Whether KVM runs guests without an operating system here, which it may even where it can't boot
/// Linux.
///
/// # Errors
/// If it can't be tried.
pub fn kvm_runs_bare(kit: &Kit) -> Result<bool> {
    accelerator::runs_bare(&store(), &kit.qemu, &kit.bare_kernel)
}

/// The initramfs of guests with a server and a NIC.
///
/// # Errors
/// Names what is missing and not available.
pub fn server_initrd(kit: &Kit) -> Result<PathBuf> {
    let store = store();
    let server = download::server(&store)?;
    let modules = download::nic_modules(&store)?;
    initramfs::with_server(&store, &kit.initrd, &server, &modules)
}

/// The initramfs of guests that have a NIC, and no server.
///
/// # Errors
/// Names what is missing and not available.
pub fn nic_initrd(kit: &Kit) -> Result<PathBuf> {
    let store = store();
    let modules = download::nic_modules(&store)?;
    initramfs::with_modules(&store, &kit.initrd, "initrd-nic", &modules)
}

/// The initramfs of guests that can use memory plugged while they run.
///
/// # Errors
/// Names what is missing and not available.
pub fn plugged_memory_initrd(kit: &Kit) -> Result<PathBuf> {
    let store = store();
    let modules = download::plugged_memory_modules(&store)?;
    initramfs::with_modules(&store, &kit.initrd, "initrd-plugged-memory", &modules)
}

/// The initramfs of guests with a helper, and the drivers that it needs.
///
/// # Errors
/// Names what is missing and not available.
pub fn helper_initrd(kit: &Kit) -> Result<PathBuf> {
    let store = store();
    if env::var_os(KIT_VARIABLE).is_some() {
        // Made with the kit: asking cargo again would take each test half a second of a core.
        return Ok(initramfs::of_helper(&store));
    }
    let modules = download::helper_modules(&store)?;
    initramfs::with_helper(&store, &kit.initrd, &modules)
}

/// The same for guests whose disks are at a SCSI controller.
///
/// # Errors
/// Names what is missing and not available.
pub fn scsi_initrd(kit: &Kit) -> Result<PathBuf> {
    let store = store();
    let modules = download::scsi_modules(&store)?;
    initramfs::with_modules(&store, &helper_initrd(kit)?, "initrd-scsi", &modules)
}

/// The same for guests with btrfs.
///
/// # Errors
/// Names what is missing and not available.
pub fn btrfs_initrd(kit: &Kit) -> Result<PathBuf> {
    let store = store();
    let modules = download::btrfs_modules(&store)?;
    initramfs::with_modules(&store, &helper_initrd(kit)?, "initrd-btrfs", &modules)
}

/// A QEMU, and its version.
#[derive(Clone, Debug)]
pub struct Qemu {
    /// The program that starts it.
    pub program: PathBuf,
    /// Its version.
    pub version: Version,
}

impl Qemu {
    /// The environment variable, `NAME=VALUE`, without which another start of a running QEMU of
    /// this kind lacks devices that are modules; none for the distribution's.
    #[must_use]
    pub fn environment(&self) -> Option<String> {
        qemus::environment(&self.program)
    }

    /// Its own newest machine type, which `q35` stands for.
    #[must_use]
    pub fn machine(&self) -> String {
        format!("pc-q35-{}.{}", self.version.major, self.version.minor)
    }

    /// The same of i440fx, the older chipset.
    #[must_use]
    pub(crate) fn i440fx(&self) -> String {
        format!("pc-i440fx-{}.{}", self.version.major, self.version.minor)
    }
}

/// All QEMUs available here, from the oldest to the newest, one of each release: the
/// distribution's, the one of `kit`, and the current one where Debian's packages are available.
///
/// # Errors
/// If the current one should be available and isn't.
pub fn qemus(kit: &Kit) -> Result<Vec<Qemu>> {
    let mut all = vec![
        Qemu { program: kit.qemu_system.clone(), version: kit.qemu_system_version },
        Qemu { program: kit.qemu.clone(), version: kit.qemu_version },
    ];
    if let Some(program) = qemus::current(&store())? {
        let version = version::of(&program)?;
        all.push(Qemu { program, version });
    }
    let release = |qemu: &Qemu| (qemu.version.major, qemu.version.minor);
    all.sort_by_key(release);
    all.dedup_by_key(|qemu| release(qemu));
    Ok(all)
}

/// The same kit with the QEMU of another release, such as `11.1`.
///
/// # Errors
/// If it isn't available; names those that are.
pub fn with_release(kit: Kit, release: &str) -> Result<Kit> {
    let all = qemus(&kit)?;
    let name = |qemu: &Qemu| format!("{}.{}", qemu.version.major, qemu.version.minor);
    if let Some(qemu) = all.iter().find(|qemu| name(qemu) == release) {
        let (qemu, qemu_version) = (qemu.program.clone(), qemu.version);
        return Ok(Kit { qemu, qemu_version, ..kit });
    }
    let known: Vec<String> = all.iter().map(name).collect();
    let text = format!("there is no QEMU {release} here, but {}", known.join(", "));
    Err(LabError::Unsupported(text))
}

/// libvirt, for hosts that run a libvirtd each: the distribution's, or with `LAB_LIBVIRT` that
/// release, such as `11.3`, or the `newest`.
///
/// # Errors
/// If it isn't available.
pub fn libvirt(kit: &Kit) -> Result<Libvirt> {
    match env::var(LIBVIRT_VARIABLE) {
        Ok(release) if !release.is_empty() => libvirt::of_release(&libvirts(kit)?, &release),
        _ => libvirt::ensure(&store(), kit),
    }
}

/// All libvirts available here, from the oldest to the newest: the distribution's, and the current
/// one where Debian's packages are available.
///
/// # Errors
/// If one should be available and isn't.
pub fn libvirts(kit: &Kit) -> Result<Vec<Libvirt>> {
    libvirt::all(&store(), kit)
}

/// A root with AppArmor's parser, and libvirt's AppArmor rules for VMs.
///
/// # Errors
/// If it isn't available.
pub fn apparmor() -> Result<PathBuf> {
    libvirt::apparmor(&store())
}

/// Directory of libvirt's Python module, unpacked and not installed.
///
/// # Errors
/// If it isn't available.
pub fn python_libvirt() -> Result<PathBuf> {
    libvirt::python(&store())
}

/// Directory of the distribution's `sshd`, unpacked and not installed.
///
/// # Errors
/// If it isn't available.
pub fn sshd() -> Result<PathBuf> {
    ssh::server(&store())
}

/// The program `nft`.
///
/// # Errors
/// If it isn't available.
pub fn nft() -> Result<Nft> {
    nft::nft(&store())
}

/// An NFS server in user space, and a client for the kit's QEMU and the distribution's tools.
///
/// # Errors
/// If it isn't available.
pub fn nfs(kit: &Kit) -> Result<Nfs> {
    nfs::ensure(&store(), kit)
}

/// Xen and what its emulated hosts boot.
///
/// # Errors
/// If it isn't available.
pub fn xen() -> Result<Xen> {
    xen::ensure(&store())
}

/// A guest with all of Debian, for the field lab. It takes some minutes to make.
///
/// # Errors
/// If it isn't available.
pub fn field_image(release: Release) -> Result<Image> {
    field::image(release)
}

/// A guest with all of Debian and the programs that benchmarks use. It takes some minutes to make.
///
/// # Errors
/// If it isn't available.
pub fn apps_image() -> Result<Image> {
    field::apps()
}

/// A root for hosts with this package of ours. It takes some minutes to make.
///
/// # Errors
/// If it isn't available.
pub fn host_root(kit: &Kit, package: &Path) -> Result<PathBuf> {
    host_root::root(kit, package)
}

/// Installs what the field lab's guests with UEFI and a TPM need.
///
/// # Errors
/// If it isn't available.
pub(crate) fn field_firmware() -> Result<()> {
    field::firmware()
}

/// A Chromium and its driver.
#[derive(Clone, Debug)]
pub struct Chromium {
    /// The browser.
    pub browser: PathBuf,
    /// Its driver, which speaks WebDriver.
    pub driver: PathBuf,
}

/// The distribution's Chromium, which is installed if it is missing. Ubuntu has it only as a snap:
/// there it is one that was installed by other means, or none.
///
/// # Errors
/// If it isn't available.
pub fn chromium() -> Result<Option<Chromium>> {
    if !install::browser()? {
        say("Ubuntu has Chromium only as a snap: tests of the dashboard in a browser are left out");
        return Ok(None);
    }
    let find =
        |name: &str| program::find(name).ok_or_else(|| LabError::Missing { what: name.to_owned() });
    Ok(Some(Chromium { browser: find("chromium")?, driver: find("chromedriver")? }))
}

/// Where QEMUs besides the distribution's are, if the lab needs them.
#[must_use]
pub fn own_qemus() -> Vec<PathBuf> {
    qemus::places(&store()).to_vec()
}

fn system_qemu() -> Result<PathBuf> {
    program::find("qemu-system-x86_64")
        .ok_or_else(|| LabError::Missing { what: "qemu-system-x86_64".to_owned() })
}

pub(crate) fn say(text: &str) {
    eprintln!("setup: {text}");
}
