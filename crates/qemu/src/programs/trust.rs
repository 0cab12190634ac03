//! Whether only root can change or replace a file.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

/// Most links followed, as in the kernel.
const LINKS_MAX: usize = 40;
/// The apparent owner of files whose owner a user namespace doesn't map.
const OVERFLOW_UID: u32 = 65_534;
const WRITABLE_BY_GROUP: u32 = 0o020;
const WRITABLE_BY_ALL: u32 = 0o002;

/// The users whose files are trusted.
#[derive(Clone, Debug)]
pub(super) struct Trust {
    owners: Vec<u32>,
    /// Directories above it are not checked.
    from: PathBuf,
}

impl Trust {
    /// Trusts root and the agent's own user.
    pub(super) fn here() -> Self {
        let mut owners = vec![0, rustix::process::geteuid().as_raw()];
        if !knows_root() {
            owners.push(OVERFLOW_UID);
        }
        Self { owners, from: PathBuf::from("/") }
    }

    #[cfg(test)]
    pub(super) fn below(self, dir: &Path) -> Self {
        Self { from: dir.to_owned(), ..self }
    }

    /// The file that a path leads to, as a path without links. No directory on
    /// that path, or on the path of a followed link, can be changed by others, so
    /// it stays the same file.
    pub(super) fn resolve(&self, path: &Path) -> Result<PathBuf, String> {
        let mut found = PathBuf::from("/");
        // The parts still to resolve, the next one last.
        let mut parts = reversed(path);
        let mut links = 0;
        while let Some(part) = parts.pop() {
            match part.as_path() {
                up if up == Path::new("..") => {
                    found.pop();
                    continue;
                }
                root if root.is_absolute() => {
                    found = PathBuf::from("/");
                    continue;
                }
                name => self.check(&found).map(|()| found.push(name))?,
            }
            let seen = look(&found)?;
            if seen.file_type().is_symlink() {
                links += 1;
                if links > LINKS_MAX {
                    return Err(format!("{} is a loop of links", path.display()));
                }
                let to = fs::read_link(&found).map_err(|error| why(&found, &error))?;
                found.pop();
                parts.extend(reversed(&to));
            }
        }
        self.check(&found).map(|()| found)
    }

    fn check(&self, path: &Path) -> Result<(), String> {
        if !path.starts_with(&self.from) {
            return Ok(());
        }
        let seen = look(path)?;
        if !self.owners.contains(&seen.uid()) {
            return Err(format!("{} belongs to user {}, not to root", path.display(), seen.uid()));
        }
        // Root's group is assumed to have no other members.
        let by_group = seen.mode() & WRITABLE_BY_GROUP != 0 && seen.gid() != 0;
        if by_group || seen.mode() & WRITABLE_BY_ALL != 0 {
            return Err(format!("other users than root can write to {}", path.display()));
        }
        Ok(())
    }
}

fn reversed(path: &Path) -> Vec<PathBuf> {
    let parts = path.components().rev().filter(|part| *part != Component::CurDir);
    parts.map(|part| PathBuf::from(part.as_os_str())).collect()
}

fn look(path: &Path) -> Result<Metadata, String> {
    fs::symlink_metadata(path).map_err(|error| why(path, &error))
}

fn why(path: &Path, error: &std::io::Error) -> String {
    format!("{}: {error}", path.display())
}

/// Whether this user namespace maps the host's root. If not, root's files look
/// like any unmapped user's, and the agent is not root on the host.
fn knows_root() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.split_whitespace().eq(["0", "0", "4294967295"])
}
