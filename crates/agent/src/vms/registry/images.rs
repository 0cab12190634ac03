//! Images that were made for an arriving VM.
//!
//! They are removed if it does not arrive, even if the agent has crashed meanwhile.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use qemu::disks::remove_made;
use qemu::launch::User;
use serde::{Deserialize, Serialize};

use crate::state;

const FILE: &str = "made-images.json";

/// One file, distinguishable from another of the same name.
#[derive(Debug, Serialize, Deserialize)]
struct Made {
    path: PathBuf,
    device: u64,
    inode: u64,
    /// The user with whose rights it was made; none: the agent's own.
    #[serde(default)]
    user: Option<User>,
}

/// Notes the images that were made with the rights of `user`.
pub(super) fn note(dir: &Path, paths: &[PathBuf], user: Option<&User>) -> io::Result<()> {
    if paths.is_empty() {
        return Ok(());
    }
    let made = |path: &PathBuf| {
        let file = fs::metadata(path)?;
        let (device, inode) = (file.dev(), file.ino());
        Ok(Made { path: path.clone(), device, inode, user: user.cloned() })
    };
    let made: Vec<Made> = paths.iter().map(made).collect::<io::Result<_>>()?;
    fs::create_dir_all(dir)?;
    state::replace(&dir.join(FILE), &serde_json::to_vec(&made)?)
}

/// Forgets the images of a VM that has arrived: they belong to it.
pub(super) fn forget(dir: &Path) {
    match fs::remove_file(dir.join(FILE)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(
                dir = %dir.display(),
                %error,
                "cannot remove the record of a VM's images"
            );
        }
        _ => {}
    }
}

/// Removes the images of a VM that does not arrive, except for files that were replaced.
pub(super) fn remove(dir: &Path) {
    let Ok(text) = fs::read(dir.join(FILE)) else { return };
    let made: Vec<Made> = serde_json::from_slice(&text).unwrap_or_default();
    for Made { path, device, inode, user } in made {
        if let Err(error) = remove_made(&path, (device, inode), user.as_ref()) {
            tracing::warn!(
                image = %path.display(),
                %error,
                "cannot remove an image that was created"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_made_goes() {
        let dir = tempfile::tempdir().unwrap();
        let [made, other] = ["made.img", "other.img"].map(|name| dir.path().join(name));
        for path in [&made, &other] {
            fs::write(path, "x").unwrap();
        }
        let vm = dir.path().join("web1");
        note(&vm, &[made.clone(), other.clone()], None).unwrap();
        // Another file takes its place.
        fs::write(dir.path().join("new.img"), "y").unwrap();
        fs::rename(dir.path().join("new.img"), &other).unwrap();
        remove(&vm);
        assert!(!made.exists() && other.exists());
        fs::write(&made, "x").unwrap();
        note(&vm, std::slice::from_ref(&made), None).unwrap();
        forget(&vm);
        remove(&vm);
        assert!(made.exists());
    }
}
