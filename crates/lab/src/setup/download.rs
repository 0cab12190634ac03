//! Packages that are unpacked into the lab's own store, not installed: the
//! guests' kernel, and a newer QEMU where the distribution's is not correct
//! under TCG. Apt is used with a configuration of the lab's own, so that the
//! system's lists, sources and packages stay as they are.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{FileContext, LabError, Result};
use crate::program;
use crate::setup::say;

/// Small kernels with virtio and serial ports built in; the first that the
/// distribution has is taken.
const KERNEL_PACKAGES: [&str; 3] =
    ["linux-image-cloud-amd64", "linux-image-virtual", "linux-image-amd64"];

const NEWER_QEMU: &str = "qemu-10.0";
/// Without `ipxe-qemu`: backports has none, and the system's serves both.
const QEMU_PACKAGES: [&str; 4] =
    ["qemu-system-x86", "qemu-system-common", "qemu-system-data", "seabios"];

const BACKPORTS: &str = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] \
                         http://deb.debian.org/debian bookworm-backports main\n";

/// Drivers that kernel packages have as modules. One that isn't there is built
/// in.
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

/// For a helper's port, and a file system that kernels don't have built in.
const HELPER_MODULES: [&str; 3] = ["libcrc32c", "xfs", "virtio_console"];

/// The server that a guest may have, and the package that brings it.
const SERVER_PACKAGE: &str = "memcached";
/// Where packages have libraries, in a distribution that has merged `/usr` or not.
const LIBRARY_PLACES: [&str; 2] = ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"];
const NIC_MODULES_DIR: &str = "nic-modules";
const HELPER_MODULES_DIR: &str = "helper-modules";
/// What loads a program's libraries.
pub(super) const LINKER: &str = "ld-linux-x86-64.so.2";

/// The guests' kernel, and the directory of its modules.
pub(super) fn kernel(store: &Path) -> Result<(PathBuf, PathBuf)> {
    let home = store.join("kernel");
    let kernel = (home.join("vmlinuz"), home.join("modules"));
    let is_whole = [NIC_MODULES_DIR, HELPER_MODULES_DIR].iter().all(|dir| home.join(dir).is_dir());
    if kernel.0.is_file() && is_whole {
        return Ok(kernel);
    }
    let apt = Apt::new(store, "system", None)?;
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
    fs::rename(&image, new.0.join("vmlinuz")).at("take", &image)?;
    keep_modules(&MODULES, &scratch.0.join("lib"), &new.0.join("modules"))?;
    keep_modules(&NIC_MODULES, &scratch.0.join("lib"), &new.0.join(NIC_MODULES_DIR))?;
    keep_modules(&HELPER_MODULES, &scratch.0.join("lib"), &new.0.join(HELPER_MODULES_DIR))?;
    // A store of an earlier time has fewer modules.
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

/// The directory of the server that a guest may have, with its libraries.
pub(super) fn server(store: &Path) -> Result<PathBuf> {
    let home = store.join(SERVER_PACKAGE);
    if home.is_dir() {
        return Ok(home);
    }
    let apt = Apt::new(store, "system", None)?;
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
        // Lists that are too old name packages that are gone.
        apt.update()?;
        apt.unpack(&names, &scratch.0)?;
    }
    let program = scratch.0.join("usr/bin").join(SERVER_PACKAGE);
    let places: Vec<PathBuf> = LIBRARY_PLACES.map(|place| scratch.0.join(place)).to_vec();
    let linker = places.iter().map(|place| place.join(LINKER)).find(|path| path.is_file());
    let missing = || LabError::Missing { what: format!("{LINKER} in {}", packages.join(", ")) };
    let linker = linker.ok_or_else(missing)?;
    // The linker says which libraries it takes; the same ones as in a guest.
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

/// The paths in what the dynamic linker lists: `NAME => PATH (ADDRESS)`.
fn linked(text: &str) -> Vec<PathBuf> {
    let path = |line: &str| Some(line.split_once("=> ")?.1.rsplit_once(" (")?.0.into());
    text.lines().filter_map(path).collect()
}

/// Copies modules out of a package, as the kernel takes them: not compressed.
fn keep_modules(names: &[&str], from: &Path, to: &Path) -> Result<()> {
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
        fs::write(&kept, module).at("write", &kept)?;
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

pub(super) fn newer_home(store: &Path) -> PathBuf {
    store.join(NEWER_QEMU)
}

/// What starts it.
pub(super) fn newer_qemu_in(store: &Path) -> PathBuf {
    newer_home(store).join("bin/qemu-system-x86_64")
}

/// QEMU 10.0 from Debian's backports.
pub(super) fn newer_qemu(store: &Path) -> Result<PathBuf> {
    let home = newer_home(store);
    let wrapper = newer_qemu_in(store);
    if wrapper.is_file() {
        return Ok(wrapper);
    }
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    if !release.contains("VERSION_CODENAME=bookworm") {
        let text = "KVM can't boot a guest here, and this distribution's QEMU loses pages under \
                    TCG (it is older than 9.0): install QEMU 9.0 or newer, or use a machine with \
                    KVM";
        return Err(LabError::Unsupported(text.to_owned()));
    }
    say("unpacking QEMU 10.0 from bookworm-backports (7.2 loses pages under TCG; the system's \
         QEMU stays as it is)");
    let apt = Apt::new(store, "backports", Some(BACKPORTS))?;
    apt.update()?;
    let scratch = Scratch::new(store, "qemu")?;
    apt.unpack(&QEMU_PACKAGES, &scratch.0)?;
    let bin = scratch.0.join("bin");
    fs::create_dir_all(&bin).at("create", &bin)?;
    let script = bin.join("qemu-system-x86_64");
    fs::write(&script, wrapper_script(&home)).at("write", &script)?;
    let executable = fs::Permissions::from_mode(0o755);
    fs::set_permissions(&script, executable).at("make executable", &script)?;
    fs::rename(&scratch.0, &home).at("create", &home)?;
    Ok(wrapper)
}

fn wrapper_script(home: &Path) -> String {
    let home = home.display();
    format!(
        "#!/bin/sh\n\
         # The QEMU that is unpacked beside this, with its own modules and firmware.\n\
         home='{home}'\n\
         export QEMU_MODULE_DIR=\"$home/usr/lib/x86_64-linux-gnu/qemu\"\n\
         exec \"$home/usr/bin/qemu-system-x86_64\" -L \"$home/usr/share/qemu\" \
         -L \"$home/usr/share/seabios\" -L /usr/lib/ipxe/qemu \"$@\"\n"
    )
}

/// A directory that is removed unless it was renamed.
struct Scratch(PathBuf);

impl Scratch {
    fn new(store: &Path, name: &str) -> Result<Self> {
        let path = store.join(format!("{name}.{}.partial", std::process::id()));
        fs::create_dir_all(&path).at("create", &path)?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Gone already where it was renamed.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Apt with lists and cache of its own.
struct Apt {
    home: PathBuf,
    config: PathBuf,
}

impl Apt {
    /// With the system's sources, or with `sources` instead.
    fn new(store: &Path, name: &str, sources: Option<&str>) -> Result<Self> {
        if program::find("apt-get").is_none() {
            let text = "the lab unpacks its guests' kernel from a Debian or Ubuntu package, and \
                        this system has no apt-get";
            return Err(LabError::Unsupported(text.to_owned()));
        }
        let home = store.join("apt").join(name);
        for dir in ["lists/partial", "cache/archives/partial"] {
            let dir = home.join(dir);
            fs::create_dir_all(&dir).at("create", &dir)?;
        }
        let at = home.display();
        let mut text = format!(
            "Dir::State::Lists \"{at}/lists\";\nDir::Cache \"{at}/cache\";\n\
             APT::Sandbox::User \"\";\n"
        );
        if let Some(sources) = sources {
            let list = home.join("sources.list");
            fs::write(&list, sources).at("write", &list)?;
            text += &format!(
                "Dir::Etc::SourceList \"{at}/sources.list\";\nDir::Etc::SourceParts \"-\";\n"
            );
        }
        let config = home.join("apt.conf");
        fs::write(&config, text).at("write", &config)?;
        Ok(Self { home, config })
    }

    fn command(&self, program: &str) -> Command {
        let mut command = program::command(program);
        command.env("APT_CONFIG", &self.config).env("LC_ALL", "C");
        command
    }

    fn update(&self) -> Result<()> {
        program::output(self.command("apt-get").args(["update", "-q"])).map(|_| ())
    }

    /// The package that a kernel's meta package stands for.
    fn kernel_behind(&self, meta: &str) -> Option<String> {
        let text = program::output(self.command("apt-cache").args(["depends", meta])).ok()?;
        kernel_dependency(&text)
    }

    /// The libraries that a package wants.
    fn libraries_of(&self, package: &str) -> Vec<String> {
        let text = program::output(self.command("apt-cache").args(["depends", package]));
        library_dependencies(&text.unwrap_or_default())
    }

    /// Downloads packages and unpacks them into a directory.
    fn unpack(&self, packages: &[&str], into: &Path) -> Result<()> {
        let downloads = Scratch::new(&self.home, "downloads")?;
        let mut download = self.command("apt-get");
        program::output(download.arg("download").args(packages).current_dir(&downloads.0))?;
        for entry in fs::read_dir(&downloads.0).at("list", &downloads.0)? {
            let package = entry.at("list", &downloads.0)?.path();
            program::output(program::command("dpkg-deb").arg("-x").arg(&package).arg(into))?;
        }
        Ok(())
    }
}

fn library_dependencies(text: &str) -> Vec<String> {
    text.lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "))
        .filter(|name| name.starts_with("lib"))
        .map(str::to_owned)
        .collect()
}

fn kernel_dependency(text: &str) -> Option<String> {
    text.lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "))
        .find(|name| name.starts_with("linux-image-"))
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::{kernel_dependency, library_dependencies, linked};

    #[test]
    fn finds_the_libraries_of_a_package_and_those_that_are_linked() {
        let depends = "memcached\n  PreDepends: init-system-helpers\n  Depends: adduser\n \
                       |Depends: <perl:any>\n  Depends: libc6\n  Depends: libssl3\n  \
                       Suggests: libanyevent-perl\n";
        assert_eq!(library_dependencies(depends), ["libc6", "libssl3"]);
        let list = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibc.so.6 => /x/lib/libc.so.6 (0x00007f)\n\
                    \t/x/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        assert_eq!(linked(list), [std::path::Path::new("/x/lib/libc.so.6")]);
    }

    #[test]
    fn finds_the_kernel_behind_a_meta_package() {
        let debian = "linux-image-cloud-amd64\n  Depends: linux-image-6.1.0-56-cloud-amd64\n";
        let expected = Some("linux-image-6.1.0-56-cloud-amd64".to_owned());
        assert_eq!(kernel_dependency(debian), expected);
        assert_eq!(kernel_dependency("linux-image-virtual\n  Depends: <none>\n"), None);
    }
}
