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
mod kit;
mod libvirt;
mod nfs;
mod nft;
mod progress;
mod qemus;
mod ssh;
mod store;
mod version;
mod vmlinux;
mod xen;

use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::{env, thread};

pub use accelerator::Accelerator;
pub use answers::qemu_answers;
pub(crate) use field::OVMF;
pub use field::{Image, Kernel, Release};
pub use host_root::HOSTS_QEMU;
use kit::QEMU_CORRECT_UNDER_TCG;
pub use kit::{Kit, Qemu};
pub use libvirt::Libvirt;
pub(crate) use libvirt::MODULES as QEMU_MODULES;
pub use nfs::Nfs;
pub use nft::Nft;
pub(crate) use progress::say;
pub use qemus::own_qemus;
pub(crate) use store::VARIABLE as STORE_VARIABLE;
pub use store::{remove_store, repository, store};
pub use version::Version;
pub use xen::Xen;

use crate::error::{LabError, Result};
use crate::program;

/// Environment variable with the kit, for programs that run one after the other.
const KIT_VARIABLE: &str = "LAB_KIT";
/// Environment variable with the wanted libvirt release.
const LIBVIRT_VARIABLE: &str = "LAB_LIBVIRT";

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

fn system_qemu() -> Result<PathBuf> {
    program::find("qemu-system-x86_64")
        .ok_or_else(|| LabError::Missing { what: "qemu-system-x86_64".to_owned() })
}
