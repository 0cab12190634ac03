//! Guests as people have them, for the field lab and benchmarks: a Debian of some release with
//! systemd, made by mmdebstrap from the system's sources, in an image that QEMU boots. The helper
//! comes from its package. The lab's check runs in it as a service, and for the field lab so does
//! what writes to the database.

use std::fmt;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use super::apt::{Scratch, debian_mirror};
use super::initramfs::linked_statically;
use super::{install, repository, say, store};
use crate::error::{FileContext, LabError, Result};
use crate::program;

/// Programs of the field lab, each with its Debian package.
pub(super) const PROGRAMS: [(&str, &str); 3] =
    [("mmdebstrap", "mmdebstrap"), ("mke2fs", "e2fsprogs"), ("dnsmasq", "dnsmasq-base")];

/// UEFI's code, and an empty variable store.
pub(crate) const OVMF: [&str; 2] =
    ["/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd"];
/// What a guest with UEFI and a TPM needs: files, each with its Debian package.
const FIRMWARE: [(&str, &str); 2] = [("swtpm", "swtpm"), (OVMF[0], "ovmf")];

/// What is installed in a guest besides the essential packages: two kernels, a small one for
/// virtio, and one with drivers for all devices.
const PACKAGES: &str = "systemd,systemd-sysv,udev,dbus,kmod,linux-image-cloud-amd64,\
     linux-image-amd64,zstd,initramfs-tools,qemu-guest-agent,openssh-server,kexec-tools,iproute2,\
     pciutils,postgresql";

/// Where the helper's package is in a root until it is installed.
const HELPER_PACKAGE: &str = "var/tmp/droveway-guest.deb";

/// Before the kernels are installed, whose initramfs would otherwise hold the drivers of all
/// disks, and take ten seconds longer to boot under TCG.
const BEFORE_KERNELS: &str = "mkdir -p \"$1/etc/initramfs-tools/conf.d\" \
     \"$1/usr/share/initramfs-tools/modules.d\"; \
     echo MODULES=list >\"$1/etc/initramfs-tools/conf.d/lab\"; \
     printf 'virtio_pci\\nvirtio_blk\\next4\\n' >\"$1/usr/share/initramfs-tools/modules.d/lab\"";

/// What an image has besides what all have.
struct More {
    /// The end of the image's name.
    suffix: &'static str,
    /// More packages, each after a comma.
    packages: &'static str,
    /// Commands before any package is configured.
    before_packages: &'static str,
    /// More files, or others of these names.
    files: &'static [(&'static str, &'static str)],
    /// More services that start.
    enabled: &'static [&'static str],
    bytes: &'static str,
}

/// What the field lab needs: something that writes to the database.
const FIELD: More = More {
    suffix: "",
    packages: "",
    before_packages: "",
    files: &[
        (
            "etc/systemd/system/lab-database.service",
            "[Unit]\nDescription=Writes to the database\nAfter=postgresql.service\n\
             StartLimitIntervalSec=0\n\n[Service]\nUser=postgres\nRuntimeDirectory=lab-database\n\
             ExecStart=/bin/sh /usr/local/lib/lab/write-rows\nRestart=always\nRestartSec=1\n\n\
             [Install]\nWantedBy=multi-user.target\n",
        ),
        ("usr/local/lib/lab/write-rows", include_str!("field/write-rows.sh")),
        ("usr/local/lib/lab/check-rows", include_str!("field/check-rows.sh")),
    ],
    enabled: &["lab-database"],
    bytes: "3G",
};

/// Programs that benchmarks use.
const APPS: More = More {
    suffix: "-apps",
    packages: ",memcached,dbench,postmark,sysbench,nginx-light,procps,e2fsprogs",
    before_packages: "; mkdir -p \"$1/etc/postgresql-common/createcluster.d\"; \
         echo \"initdb_options = '--data-checksums'\" \
         >\"$1/etc/postgresql-common/createcluster.d/lab.conf\"",
    files: &[
        ("etc/hostname", "apps\n"),
        ("etc/fstab", "/dev/vda / ext4 noatime 0 1\n/dev/vdb /srv ext4 noatime 0 0\n"),
        // The address that clients of the lab's servers know (`lab_guest::net::ADDRESS`).
        (
            "etc/systemd/network/10-cards.network",
            "[Match]\nName=en* eth*\n\n[Network]\nAddress=10.78.0.10/24\n",
        ),
        ("etc/memcached.conf", "-m 256\n-p 11211\n-u memcache\n-l 0.0.0.0\n"),
        // A file set of 190 MB at first, which appends let grow to 350 MB at most.
        (
            "usr/local/lib/lab/postmark.conf",
            "set location /srv/postmark\nset number 500\nset size 65536 716800\n\
             set transactions 100000000\nrun\nquit\n",
        ),
        ("usr/local/lib/lab/report-postmark", include_str!("apps/report-postmark.sh")),
        ("etc/systemd/system/postmark.service", include_str!("apps/postmark.service")),
    ],
    enabled: &[],
    bytes: "4G",
};

impl More {
    /// Packages of the image, and what comes before them.
    fn packages(&self) -> [String; 2] {
        [PACKAGES.to_owned() + self.packages, BEFORE_KERNELS.to_owned() + self.before_packages]
    }

    fn files(&self) -> impl Iterator<Item = &'static (&'static str, &'static str)> {
        FILES.iter().chain(self.files)
    }

    fn enabled(&self) -> impl Iterator<Item = &'static &'static str> {
        ENABLED.iter().chain(self.enabled)
    }
}

/// Files of the guest, as its owner would write them.
static FILES: [(&str, &str); 6] = [
    ("etc/hostname", "field\n"),
    ("etc/fstab", "/dev/vda / ext4 noatime 0 1\n"),
    // Whatever the card is called, also one that is plugged later. For the host name that the server
    // sends, each boot would start a service, which may not set it.
    (
        "etc/systemd/network/10-cards.network",
        "[Match]\nName=en* eth*\n\n[Network]\nDHCP=ipv4\n\n[DHCPv4]\nUseHostname=no\n",
    ),
    (
        "etc/systemd/system/lab-guest.service",
        "[Unit]\nDescription=The lab's check\n\n[Service]\nExecStart=/usr/local/sbin/lab-guest\n\
         Restart=always\n\n[Install]\nWantedBy=multi-user.target\n",
    ),
    // A kernel is loaded by the test that needs it.
    ("etc/default/kexec", "LOAD_KEXEC=false\n"),
    // Each takes a part of the boot under TCG, and no test uses it.
    (
        "etc/modprobe.d/lab.conf",
        "blacklist pcspkr\nblacklist joydev\nblacklist i2c_i801\nblacklist kvm_amd\n\
         blacklist powernow_k8\n",
    ),
];

static ENABLED: [&str; 2] = ["systemd-networkd", "lab-guest"];
/// What the helper's package is made of, besides its program.
const HELPER_SOURCES: [&str; 6] = [
    "scripts/packages",
    "crates/guest/Cargo.toml",
    "crates/guest/dist/droveway-guest.service",
    "dist/deb/droveway-guest/postinst",
    "dist/deb/droveway-guest/prerm",
    "dist/deb/droveway-guest/postrm",
];
/// What would work in the background, at times that no test chooses.
const MASKED: [&str; 8] = [
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "kexec-load.service",
    "systemd-networkd-wait-online.service",
];

/// A release of Debian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// Debian 11.
    Bullseye,
    /// Debian 12.
    Bookworm,
    /// Debian 13.
    Trixie,
}

impl Release {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Bullseye, Self::Bookworm, Self::Trixie];

    /// The release of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|release| release.to_string() == name)
    }

    /// Its number.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Self::Bullseye => 11,
            Self::Bookworm => 12,
            Self::Trixie => 13,
        }
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bullseye => "bullseye",
            Self::Bookworm => "bookworm",
            Self::Trixie => "trixie",
        })
    }
}

/// A kernel of an image, with its initramfs.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// The kernel.
    pub image: PathBuf,
    /// Its initramfs.
    pub initrd: PathBuf,
}

/// An installed guest.
#[derive(Clone, Debug)]
pub struct Image {
    /// Its directory, where what is made of it may be kept.
    pub home: PathBuf,
    /// Its disk: a file system, without partitions.
    pub disk: PathBuf,
    /// The kernel for virtio alone.
    pub small: Kernel,
    /// The kernel with drivers for all devices.
    pub large: Kernel,
}

/// Finds or makes the image of a release.
///
/// # Errors
/// Names what is missing and not available.
pub(super) fn image(release: Release) -> Result<Image> {
    image_with(release, &FIELD)
}

/// Finds or makes the image with programs that benchmarks use.
///
/// # Errors
/// As [`image`].
pub(super) fn apps() -> Result<Image> {
    image_with(Release::Bookworm, &APPS)
}

fn image_with(release: Release, more: &More) -> Result<Image> {
    let store = store::create()?.join("field");
    fs::create_dir_all(&store).at("create", &store)?;
    let check = linked_statically(&super::store(), "lab-guest")?;
    let home = store.join(format!("{release}{}", more.suffix));
    let image = Image {
        disk: home.join("disk"),
        small: kernel(&home, "small"),
        large: kernel(&home, "large"),
        home,
    };
    let [packages, before] = more.packages();
    let files: Vec<_> = more.files().collect();
    let enabled: Vec<_> = more.enabled().collect();
    let recipe = format!("{packages}\n{before}\n{files:?}\n{enabled:?}\n{MASKED:?}\n");
    let mut recipe = recipe.into_bytes();
    recipe.extend_from_slice(&check);
    // Not the package itself: no two of them are the same.
    recipe.extend(linked_statically(&super::store(), "droveway-guest")?);
    for path in HELPER_SOURCES.map(|path| repository().join(path)) {
        recipe.extend(fs::read(&path).at("read", &path)?);
    }
    if fs::read(image.home.join("recipe")).is_ok_and(|old| old == recipe) {
        return Ok(image);
    }
    require_root_of_all()?;
    install::missing(&PROGRAMS)?;
    let scratch = Scratch::new(&store, "helper")?;
    // Both take minutes, and a root mostly waits.
    let (root, package) = thread::scope(|scope| {
        let building = scope.spawn(|| helper_package(&store, &scratch.0));
        let root = root(&store, release, more);
        (root, building.join().unwrap_or_else(|panic| resume_unwind(panic)))
    });
    let (root, package) = (root?, package?);
    write(&root, "usr/local/sbin/lab-guest", &check, 0o755)?;
    install_helper(&root, &package)?;
    furnish(&root, more)?;
    if image.home.is_dir() {
        fs::remove_dir_all(&image.home).at("remove", &image.home)?;
    }
    let new = Scratch::new(&store, "image")?;
    take_kernels(&root, &new.0)?;
    let mut make = program::command("mke2fs");
    make.args(["-q", "-t", "ext4", "-d"]).arg(&root).arg(new.0.join("disk")).arg(more.bytes);
    program::output(&mut make)?;
    fs::write(new.0.join("recipe"), recipe).at("write", new.0.join("recipe"))?;
    fs::rename(&new.0, &image.home).at("create", &image.home)?;
    Ok(image)
}

/// Installs what guests with UEFI and a TPM need.
pub(super) fn firmware() -> Result<()> {
    install::missing(&FIRMWARE)
}

/// Whether this is root outside of user namespaces.
pub(super) fn is_root_of_all() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    program::root() && map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// Only that root can make all of Debian's files.
pub(super) fn require_root_of_all() -> Result<()> {
    if is_root_of_all() {
        return Ok(());
    }
    let text = "files of all of Debian's users need root, not a user namespace: run it as root or \
                with sudo";
    Err(LabError::Unsupported(text.to_owned()))
}

fn kernel(home: &Path, name: &str) -> Kernel {
    Kernel {
        image: home.join(format!("{name}-vmlinuz")),
        initrd: home.join(format!("{name}-initrd")),
    }
}

/// A root of a guest's release.
fn root(store: &Path, release: Release, more: &More) -> Result<PathBuf> {
    let name = format!("{release}{}-root", more.suffix);
    let [packages, before] = more.packages();
    let hook = format!("--essential-hook={before}");
    kept_root(store, &name, &release.to_string(), &[format!("--include={packages}"), hook])
}

/// A root of a release, by these words for mmdebstrap, which is kept, since it takes minutes to make.
pub(super) fn kept_root(
    store: &Path,
    name: &str,
    release: &str,
    words: &[String],
) -> Result<PathBuf> {
    let root = store.join(name);
    let made_by = store.join(format!("{name}.recipe"));
    let recipe = words.join("\n");
    if fs::read_to_string(&made_by).is_ok_and(|old| old == recipe) {
        return Ok(root);
    }
    say(&format!("making {name}, a root of Debian {release} (some minutes, once)"));
    if root.is_dir() {
        fs::remove_dir_all(&root).at("remove", &root)?;
    }
    let mut make = program::command("mmdebstrap");
    make.args(["--mode=root", "--variant=minbase"]);
    make.arg(release).arg(&root).arg(debian_mirror()?).args(words);
    // Without a locale that the root has, PostgreSQL's package makes no database.
    program::output(make.env("LC_ALL", "C.UTF-8"))?;
    fs::write(&made_by, recipe).at("write", &made_by)?;
    Ok(root)
}

/// Builds the package of the guest's helper.
fn helper_package(store: &Path, into: &Path) -> Result<PathBuf> {
    say("building the package of the guest's helper (some minutes the first time)");
    let store = fs::canonicalize(store).at("find", store)?;
    let package = fs::canonicalize(into).at("find", into)?.join("droveway-guest.deb");
    let mut build = Command::new(repository().join("scripts/packages"));
    // A directory of its own: this is root, and others may build in the usual one.
    build.arg("guest").arg(&package).env("CARGO_TARGET_DIR", store.join("package"));
    // Flags of the build that runs this would replace the script's.
    build.env_remove("CARGO_ENCODED_RUSTFLAGS");
    program::output(&mut build)?;
    Ok(package)
}

/// Installs the guest's helper from its package, as its owner would.
fn install_helper(root: &Path, package: &Path) -> Result<()> {
    let copy = root.join(HELPER_PACKAGE);
    fs::copy(package, &copy).at("copy", package)?;
    install_package(root, HELPER_PACKAGE)
}

/// Installs a package that is in a root, at this path from there, and removes its file.
pub(super) fn install_package(root: &Path, package: &str) -> Result<()> {
    let mut install = program::command("chroot");
    install.arg(root).args(["dpkg", "--install"]).arg(Path::new("/").join(package));
    install.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("DEBIAN_FRONTEND", "noninteractive");
    program::output(&mut install)?;
    let file = root.join(package);
    fs::remove_file(&file).at("remove", &file)
}

fn furnish(root: &Path, more: &More) -> Result<()> {
    for (path, text) in more.files() {
        write(root, path, text.as_bytes(), 0o644)?;
    }
    let mut enable = program::command("chroot");
    enable.arg(root).args(["systemctl", "--quiet", "enable"]).args(more.enabled());
    program::output(&mut enable)?;
    mask(root)
}

/// Has no unit of [`MASKED`] start in a root.
pub(super) fn mask(root: &Path) -> Result<()> {
    for unit in MASKED {
        let link = root.join("etc/systemd/system").join(unit);
        let _ = fs::remove_file(&link);
        symlink("/dev/null", &link).at("create", &link)?;
    }
    Ok(())
}

fn write(root: &Path, path: &str, bytes: &[u8], mode: u32) -> Result<()> {
    let path = root.join(path);
    let dir = path.parent().unwrap_or(root);
    fs::create_dir_all(dir).at("create", dir)?;
    fs::write(&path, bytes).at("write", &path)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).at("change", &path)
}

/// Copies both kernels out of a root.
fn take_kernels(root: &Path, to: &Path) -> Result<()> {
    let boot = root.join("boot");
    for entry in fs::read_dir(&boot).at("list", &boot)? {
        let path = entry.at("list", &boot)?.path();
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let which = if file.contains("cloud") { "small" } else { "large" };
        let part = match file.split_once('-') {
            Some(("vmlinuz", _)) => "vmlinuz",
            Some(("initrd.img", _)) => "initrd",
            _ => continue,
        };
        let kept = to.join(format!("{which}-{part}"));
        fs::copy(&path, &kept).at("copy", &path)?;
    }
    let missing = || LabError::Missing { what: format!("a kernel in {}", boot.display()) };
    let kernels = ["small", "large"].map(|name| kernel(to, name));
    let all = kernels.iter().flat_map(|kernel| [&kernel.image, &kernel.initrd]);
    if all.into_iter().all(|path| path.is_file()) { Ok(()) } else { Err(missing()) }
}
