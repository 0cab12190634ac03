//! Room in file systems for disks that arrive.
//!
//! A disk takes its room only while it is copied. Until then the file system has it for others,
//! too: for the VM's other disks, and for those of VMs that arrive at the same time.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use super::ImageProblem;

/// The unit of a file's blocks.
const BLOCK: u64 = 512;

/// What disks that arrive have yet to take from this host's file systems. All arrivals of a host
/// share one; clones are the same.
#[derive(Clone, Debug, Default)]
pub struct Promises(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// How many were made.
    made: u64,
    all: Vec<Promise>,
}

#[derive(Clone, Debug)]
struct Promise {
    number: u64,
    /// The file system's device number.
    system: u64,
    /// The image.
    path: PathBuf,
    /// What the disk takes in all.
    bytes: u64,
}

/// Room that a disk has for itself until this is dropped.
#[derive(Debug)]
pub(super) struct Promised {
    promises: Promises,
    number: u64,
}

impl Promises {
    /// Promises the disk whose image is, or will be, at `path` that it can take `bytes` in all.
    /// `there` is the image, or the directory for it, and `taken` is what it has already.
    pub(super) fn promise(
        &self,
        path: &Path,
        there: &File,
        bytes: u64,
        taken: u64,
    ) -> Result<Promised, ImageProblem> {
        let system = there.metadata()?.dev();
        // Not under the lock, because storage may hang. What is made meanwhile has taken nothing.
        let others: Vec<Promise> = self.0.lock().of(system).cloned().collect();
        let left: Vec<(u64, u64)> = others.iter().map(|one| (one.number, one.left())).collect();
        let all = rustix::fs::fstatvfs(there).map_err(io::Error::from)?;
        let free = all.f_bavail.saturating_mul(all.f_frsize);

        let mut state = self.0.lock();
        let left_of = |one: &Promise| {
            let known = left.iter().find(|(number, _)| *number == one.number);
            known.map_or(one.bytes, |(_, left)| *left)
        };
        let promised = state.of(system).map(left_of).fold(0, u64::saturating_add);
        let available = free.saturating_sub(promised).saturating_add(taken);
        if bytes > available {
            return Err(ImageProblem::NoRoom { needed: bytes, available, promised });
        }
        let number = state.made;
        state.made += 1;
        state.all.push(Promise { number, system, path: path.to_owned(), bytes });
        Ok(Promised { promises: self.clone(), number })
    }
}

impl State {
    fn of(&self, system: u64) -> impl Iterator<Item = &Promise> {
        self.all.iter().filter(move |one| one.system == system)
    }
}

impl Promise {
    /// What it has yet to take.
    fn left(&self) -> u64 {
        let image = fs::metadata(&self.path).ok().filter(|image| image.dev() == self.system);
        let taken = image.map_or(0, |image| image.blocks().saturating_mul(BLOCK));
        self.bytes.saturating_sub(taken)
    }
}

impl Drop for Promised {
    fn drop(&mut self) {
        self.promises.0.lock().all.retain(|one| one.number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn free(folder: &File) -> u64 {
        let all = rustix::fs::fstatvfs(folder).unwrap();
        all.f_bavail * all.f_frsize
    }

    #[test]
    fn what_is_promised_to_one_disk_is_not_there_for_another() {
        let dir = tempfile::tempdir().unwrap();
        let folder = File::open(dir.path()).unwrap();
        let most = free(&folder) / 10 * 6;
        let promises = Promises::default();
        let promise = |name: &str| promises.promise(&dir.path().join(name), &folder, most, 0);
        let first = promise("a").unwrap();
        match promise("b").unwrap_err() {
            ImageProblem::NoRoom { needed, available, promised } => {
                assert_eq!((needed, promised), (most, most));
                assert!(available < most);
            }
            other => panic!("{other}"),
        }
        // An image that has its room already needs no more.
        let b = dir.path().join("b");
        drop(promises.promise(&b, &folder, most, most).unwrap());
        drop(first);
        promise("b").unwrap();
        assert!(promises.0.lock().all.is_empty());
    }

    #[test]
    fn a_disk_that_is_being_copied_takes_less_and_less_more() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        let folder = File::open(dir.path()).unwrap();
        let system = folder.metadata().unwrap().dev();
        let promise = Promise { number: 0, system, path: path.clone(), bytes: 8 * MIB };
        assert_eq!(promise.left(), 8 * MIB, "there is no image yet");
        fs::write(&path, vec![7_u8; 2 << 20]).unwrap();
        File::open(&path).unwrap().sync_all().unwrap();
        let left = promise.left();
        assert!(left < 8 * MIB, "{left}");
        fs::write(&path, vec![7_u8; 9 << 20]).unwrap();
        File::open(&path).unwrap().sync_all().unwrap();
        assert!(promise.left() < left);
        let elsewhere = Promise { system: system + 1, ..promise };
        assert_eq!(elsewhere.left(), 8 * MIB, "another file is at its path");
    }
}
