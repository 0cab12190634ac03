//! Images that were made for a VM that is on its way here: they go if it doesn't
//! come, also when the agent has crashed meanwhile.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use qemu::disks::remove_made;
use qemu::launch::User;
use serde::{Deserialize, Serialize};

use crate::state;

const FILE: &str = "made-images.json";

/// One file, told apart from another of the same name.
#[derive(Debug, Serialize, Deserialize)]
struct Made {
    path: PathBuf,
    device: u64,
    inode: u64,
    /// With whose rights it was made; none are the agent's own.
    #[serde(default)]
    user: Option<User>,
}

/// Notes which were made, with that user's rights.
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

/// The VM is here: they are its own.
pub(super) fn forget(dir: &Path) {
    match fs::remove_file(dir.join(FILE)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(dir = %dir.display(), %error, "the note of a VM's images stays behind");
        }
        _ => {}
    }
}

/// The VM doesn't come: removes those that are still what was made.
pub(super) fn remove(dir: &Path) {
    let Ok(text) = fs::read(dir.join(FILE)) else { return };
    let made: Vec<Made> = serde_json::from_slice(&text).unwrap_or_default();
    for Made { path, device, inode, user } in made {
        if let Err(error) = remove_made(&path, (device, inode), user.as_ref()) {
            tracing::warn!(image = %path.display(), %error, "an image that was made stays behind");
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
        // Somebody has put another file in its place.
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
