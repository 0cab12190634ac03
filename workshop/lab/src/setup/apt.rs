//! Packages from the distribution, unpacked into the lab's own store, not installed. Apt runs with
//! a configuration of the lab's own, so that the system's lists, sources and packages stay as they
//! are.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{FileContext, LabError, Result};
use crate::program;

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
const COMPONENT: &str = "main";

/// The current Debian, and its suite with later versions.
pub(super) const CURRENT_SUITES: [&str; 2] = ["trixie", "trixie-backports"];

/// A directory that is removed unless it was renamed.
pub(super) struct Scratch(pub(super) PathBuf);

impl Scratch {
    pub(super) fn new(store: &Path, name: &str) -> Result<Self> {
        let path = store.join(format!("{name}.{}.partial", std::process::id()));
        fs::create_dir_all(&path).at("create", &path)?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Already gone if it was renamed.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Sources of packages.
#[derive(Clone, Copy)]
pub(super) enum Sources<'s> {
    /// The system's own.
    System,
    /// Suites of Debian, from the system's mirror.
    Suites(&'s [&'s str]),
}

/// Apt with lists and cache of its own.
pub(super) struct Apt {
    home: PathBuf,
    config: PathBuf,
}

impl Apt {
    pub(super) fn new(store: &Path, name: &str, sources: Sources<'_>) -> Result<Self> {
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
        if let Sources::Suites(suites) = sources {
            let mirror = debian_mirror()?;
            let lines = suites.iter().map(|suite| source(&mirror, suite) + "\n");
            let list = home.join("sources.list");
            fs::write(&list, lines.collect::<String>()).at("write", &list)?;
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

    pub(super) fn update(&self) -> Result<()> {
        program::output(self.command("apt-get").args(["update", "-q"])).map(|_| ())
    }

    /// The package on which a kernel's meta package depends.
    pub(super) fn kernel_behind(&self, meta: &str) -> Option<String> {
        let text = program::output(self.command("apt-cache").args(["depends", meta])).ok()?;
        kernel_dependency(&text)
    }

    /// The libraries on which a package depends.
    pub(super) fn libraries_of(&self, package: &str) -> Vec<String> {
        let text = program::output(self.command("apt-cache").args(["depends", package]));
        library_dependencies(&text.unwrap_or_default())
    }

    /// Downloads packages and unpacks them into a directory.
    pub(super) fn unpack(&self, packages: &[&str], into: &Path) -> Result<()> {
        let downloads = Scratch::new(&self.home, "downloads")?;
        let mut download = self.command("apt-get");
        program::output(download.arg("download").args(packages).current_dir(&downloads.0))?;
        unpack_all(&downloads.0, into)
    }

    /// Downloads packages from `suite`, with all that they depend on, and unpacks them into a
    /// directory: a root of their own, whatever the system has.
    pub(super) fn unpack_root(&self, packages: &[&str], suite: &str, into: &Path) -> Result<()> {
        // No package counts as installed.
        let status = self.home.join("status");
        fs::write(&status, "").at("write", &status)?;
        let status = format!("Dir::State::status={}", status.display());
        self.unpack_with_dependencies(&["-o", &status, "-t", suite], packages, into)
    }

    /// Downloads packages, with dependencies that the system lacks, and unpacks them into a
    /// directory.
    pub(super) fn unpack_missing(&self, packages: &[&str], into: &Path) -> Result<()> {
        // Nothing is installed, and only root may lock the database of installed packages.
        self.unpack_with_dependencies(&["-o", "Debug::NoLocking=true"], packages, into)
    }

    fn unpack_with_dependencies(
        &self,
        options: &[&str],
        packages: &[&str],
        into: &Path,
    ) -> Result<()> {
        let archives = Scratch::new(&self.home, "archives")?;
        fs::create_dir_all(archives.0.join("partial")).at("create", &archives.0)?;
        let mut download = self.command("apt-get");
        download
            .arg("-o")
            .arg(format!("Dir::Cache::archives={}", archives.0.display()))
            .args(["-y", "-q", "--no-install-recommends", "--download-only"])
            .args(options)
            .arg("install")
            .args(packages);
        program::output(&mut download)?;
        unpack_all(&archives.0, into)
    }
}

/// Apt's line for a suite of Debian.
pub(super) fn source(mirror: &str, suite: &str) -> String {
    format!("deb [signed-by={KEYRING}] {mirror} {suite} {COMPONENT}")
}

/// Unpacks all packages in a directory.
fn unpack_all(packages: &Path, into: &Path) -> Result<()> {
    for entry in fs::read_dir(packages).at("list", packages)? {
        let package = entry.at("list", packages)?.path();
        if package.extension().is_some_and(|end| end == "deb") {
            program::output(program::command("dpkg-deb").arg("-x").arg(&package).arg(into))?;
        }
    }
    Ok(())
}

/// Debian's name for this system's release, if it is Debian.
pub(super) fn debian_release() -> Option<String> {
    let text = fs::read_to_string("/etc/os-release").ok()?;
    release_of(&text)
}

/// Whether this system is Ubuntu.
pub(super) fn is_ubuntu() -> bool {
    fs::read_to_string("/etc/os-release").is_ok_and(|text| value(&text, "ID") == Some("ubuntu"))
}

fn release_of(os_release: &str) -> Option<String> {
    let is_debian = value(os_release, "ID") == Some("debian");
    is_debian.then(|| value(os_release, "VERSION_CODENAME").map(str::to_owned))?
}

fn value<'t>(os_release: &'t str, key: &str) -> Option<&'t str> {
    let line = os_release.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    line.map(|value| value.trim_matches('"'))
}

/// The system's Debian mirror. Apt itself is asked, since it knows both formats of its sources.
pub(super) fn debian_mirror() -> Result<String> {
    let mut ask = program::command("apt-get");
    let format = "$(RELEASE) $(COMPONENT) $(REPO_URI)";
    let ask = ask.args(["indextargets", "--format", format, "Created-By: Packages"]);
    let listed = program::output(ask.env("LC_ALL", "C"))?;
    let mirror = debian_release().and_then(|release| mirror_in(&listed, &release));
    mirror.ok_or_else(|| {
        let text = "apt's sources don't have Debian's main component for this release of Debian: \
                    the lab takes other versions of programs from there";
        LabError::Unsupported(text.to_owned())
    })
}

fn mirror_in(listed: &str, release: &str) -> Option<String> {
    listed.lines().find_map(|line| {
        let (suite, rest) = line.split_once(' ')?;
        let (component, mirror) = rest.split_once(' ')?;
        (suite == release && component == COMPONENT).then(|| mirror.to_owned())
    })
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
    use super::*;

    #[test]
    fn finds_the_libraries_of_a_package() {
        let depends = "memcached\n  PreDepends: init-system-helpers\n  Depends: adduser\n \
                       |Depends: <perl:any>\n  Depends: libc6\n  Depends: libssl3\n  \
                       Suggests: libanyevent-perl\n";
        assert_eq!(library_dependencies(depends), ["libc6", "libssl3"]);
    }

    #[test]
    fn finds_the_kernel_behind_a_meta_package() {
        let debian = "linux-image-cloud-amd64\n  Depends: linux-image-6.1.0-56-cloud-amd64\n";
        let expected = Some("linux-image-6.1.0-56-cloud-amd64".to_owned());
        assert_eq!(kernel_dependency(debian), expected);
        assert_eq!(kernel_dependency("linux-image-virtual\n  Depends: <none>\n"), None);
    }

    #[test]
    fn knows_a_release_of_debian_and_its_mirror() {
        let debian = "PRETTY_NAME=\"Debian GNU/Linux 12\"\nVERSION_CODENAME=bookworm\nID=debian\n";
        assert_eq!(release_of(debian).as_deref(), Some("bookworm"));
        let ubuntu = "VERSION_ID=\"24.04\"\nID=ubuntu\nID_LIKE=debian\nVERSION_CODENAME=noble\n";
        assert_eq!(release_of(ubuntu), None);
        assert_eq!((value(ubuntu, "ID"), value(debian, "ID")), (Some("ubuntu"), Some("debian")));
        let listed = "bookworm-updates main http://mirror.example/debian/\n\
                      bookworm contrib http://other.example/debian/\n\
                      bookworm main http://mirror.example/debian/\n";
        let mirror = Some("http://mirror.example/debian/".to_owned());
        assert_eq!(mirror_in(listed, "bookworm"), mirror);
        assert_eq!(mirror_in(listed, "trixie"), None);
        assert_eq!(mirror_in("", "bookworm"), None);
    }
}
