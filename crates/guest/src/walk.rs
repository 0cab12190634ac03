//! Walks the directories of a file system.

use std::collections::HashSet;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use cachemap::PAGE_BYTES;
use rustix::fs::{CWD, FileType, Mode, OFlags, RawDir, openat};
use rustix::mount::{OpenTreeFlags, open_tree};

use crate::file::{self, Effort};
use crate::found::{DirId, Entry, FileTree};

/// Room for one directory's entries.
const ENTRIES_BYTES: usize = 32 << 10;
/// What the kernel caches for a file that it did not know: an inode and a name.
pub(crate) const KERNEL_BYTES: u64 = 1536;
/// Memory for each inode in the set of those with several names.
const SEEN_BYTES: u64 = 24;
/// The unit of `st_blocks`.
const BLOCK_BYTES: i64 = 512;
/// Directories, and names in them, that are looked up between checks of the budget. A name that the
/// kernel doesn't remember is read from disk, and one directory may have millions.
const STEPS_AT_ONCE: usize = 64;
const NAMES_AT_ONCE: u64 = 1024;

/// A file system, from its mounted directory on.
#[derive(Debug)]
pub(crate) struct Tree {
    root: OwnedFd,
    device: u64,
}

impl Tree {
    /// Opens it without the mounts below it, so that the files hidden by them are visible. This is
    /// a private mount, which ends with this value.
    pub(crate) fn open(at: &Path) -> io::Result<Self> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let root = open_tree(CWD, at, flags).or_else(|_| {
            // Some mounts can't be cloned. Files hidden by other mounts stay hidden.
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            openat(CWD, at, flags, Mode::empty())
        })?;
        let device = rustix::fs::fstat(&root)?.st_dev;
        Ok(Self { root, device })
    }

    /// Its device's number.
    pub(crate) fn device(&self) -> u64 {
        self.device
    }

    pub(crate) fn root(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }
}

/// The state of a walk.
#[derive(Debug)]
pub(crate) struct Walk {
    effort: Effort,
    todo: Vec<DirId>,
    /// A directory with more entries than fit into one read.
    listing: Option<(DirId, OwnedFd)>,
    found: FileTree,
    /// Inodes with more than one name, with their devices: btrfs has several.
    seen: HashSet<(u64, u64)>,
    /// Entries that could not be examined.
    pub(crate) unreadable: u64,
    /// Names looked up.
    pub(crate) looked_up: u64,
    entries: Box<[MaybeUninit<u8>]>,
    path: Vec<u8>,
}

impl Walk {
    pub(crate) fn new(effort: Effort) -> Self {
        Self {
            effort,
            todo: vec![FileTree::ROOT],
            listing: None,
            found: FileTree::default(),
            seen: HashSet::new(),
            unreadable: 0,
            looked_up: 0,
            entries: vec![MaybeUninit::uninit(); ENTRIES_BYTES].into_boxed_slice(),
            path: Vec::new(),
        }
    }

    /// Whether every directory was listed.
    pub(crate) fn is_over(&self) -> bool {
        self.todo.is_empty() && self.listing.is_none()
    }

    /// Memory of the files found since files were last taken.
    pub(crate) fn files_bytes(&self) -> u64 {
        self.found.files_bytes()
    }

    /// Memory of everything else, which only grows.
    pub(crate) fn other_bytes(&self) -> u64 {
        let todo = self.todo.capacity() * size_of::<DirId>();
        self.found.dirs_bytes() + todo as u64 + self.seen.capacity() as u64 * SEEN_BYTES
    }

    /// Lists some directories, or parts of them.
    pub(crate) fn advance(&mut self, tree: &Tree) {
        let enough = self.looked_up.saturating_add(NAMES_AT_ONCE);
        for _ in 0..STEPS_AT_ONCE {
            self.step(tree);
            if self.looked_up >= enough {
                return;
            }
        }
    }

    /// Lists one directory, or a part of one: it may have millions of entries.
    fn step(&mut self, tree: &Tree) {
        if let Some((dir, opened)) = self.listing.take() {
            return self.list(dir, opened);
        }
        let Some(dir) = self.todo.pop() else { return };
        self.found.dir_path(dir, &mut self.path);
        match file::directory(tree.root(), &self.path, self.effort) {
            Ok(opened) => self.list(dir, opened),
            Err(error) => self.miss(&error),
        }
    }

    /// Takes the files found since the last call, the biggest first. They have to be given back.
    pub(crate) fn take_files(&mut self) -> Vec<Entry> {
        self.found.take_files()
    }

    /// Drops files that were taken.
    pub(crate) fn give_back(&mut self, files: Vec<Entry>) {
        self.found.give_back(files);
    }

    /// Opens a file that was found, unless it has been deleted or dropped from the cache meanwhile.
    pub(crate) fn open(&mut self, tree: &Tree, entry: &Entry) -> Option<OwnedFd> {
        self.found.file_path(entry, &mut self.path);
        file::file(tree.root(), &self.path, self.effort).map_err(|error| self.miss(&error)).ok()
    }

    fn list(&mut self, dir: DirId, opened: OwnedFd) {
        let mut room = std::mem::take(&mut self.entries);
        let mut entries = RawDir::new(&opened, &mut room);
        let mut goes_on = false;
        while let Some(entry) = entries.next() {
            let Ok(entry) = entry else {
                self.unreadable += 1;
                break;
            };
            let name = entry.file_name().to_bytes();
            if matches!(name, b"." | b"..") {
                continue;
            }
            match entry.file_type() {
                FileType::Directory => {
                    self.looked_up += 1;
                    match self.found.add_dir(dir, name) {
                        Some(id) => self.todo.push(id),
                        None => self.unreadable += 1,
                    }
                }
                FileType::RegularFile => self.add(dir, &opened, name),
                // The file system doesn't say, like some very old XFS.
                FileType::Unknown => self.unreadable += 1,
                _ => {}
            }
            // Only at this point no entry that was read is lost.
            if entries.is_buffer_empty() {
                goes_on = true;
                break;
            }
        }
        self.entries = room;
        self.listing = goes_on.then_some((dir, opened));
    }

    fn add(&mut self, dir: DirId, opened: &OwnedFd, name: &[u8]) {
        self.looked_up += 1;
        let stat = file::glimpse(opened.as_fd(), name, self.effort).and_then(|f| file::regular(&f));
        match stat {
            Ok(Some(stat)) => {
                let is_new = stat.st_nlink < 2 || self.seen.insert((stat.st_dev, stat.st_ino));
                // A file may be mostly holes, which have no place on a disk.
                let on_disk = stat.st_blocks.saturating_mul(BLOCK_BYTES);
                let size = u64::try_from(stat.st_size.min(on_disk)).unwrap_or(0);
                if is_new && !self.found.add_file(dir, name, size.div_ceil(PAGE_BYTES)) {
                    self.unreadable += 1;
                }
            }
            Ok(None) => {}
            Err(error) => self.miss(&error),
        }
    }

    /// Counts a failed lookup, unless the file is not cached by name or has been deleted: then it
    /// has no pages in the cache.
    fn miss(&mut self, error: &io::Error) {
        let is_fine = match error.raw_os_error() {
            Some(libc::EAGAIN) => self.effort == Effort::Remembered,
            // Another mount is on top, which is walked separately.
            Some(libc::ENOENT | libc::EXDEV) => true,
            _ => false,
        };
        if !is_fine {
            self.unreadable += 1;
        }
    }
}

/// The efforts that the kernel supports: `RESOLVE_CACHED` needs Linux 5.12, `openat2` needs 5.6.
pub(crate) fn efforts() -> io::Result<&'static [Effort]> {
    let try_it = |effort| {
        let root = openat(CWD, "/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        file::glimpse(root.as_fd(), b".", effort).map(drop)
    };
    if try_it(Effort::Remembered).is_ok() {
        return Ok(&[Effort::Remembered, Effort::Full]);
    }
    try_it(Effort::Full)?;
    Ok(&[Effort::Full])
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const TRIES: usize = 20;

    #[test]
    fn all_files_are_found_once_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("a/b/c")).unwrap();
        fs::write(at("a/b/c/big"), [1; 50_000]).unwrap();
        fs::write(at("a/small"), [1]).unwrap();
        fs::write(at("empty"), []).unwrap();
        fs::hard_link(at("a/small"), at("a/b/again")).unwrap();
        std::os::unix::fs::symlink("a", at("link")).unwrap();
        for nth in 0..2000 {
            fs::write(at(&format!("a/b/many-{nth}-{}", "x".repeat(100))), [1; 5000]).unwrap();
        }
        let _socket = std::os::unix::net::UnixListener::bind(at("a/socket")).unwrap();
        let tree = Tree::open(dir.path()).unwrap();
        let walked = |effort| {
            let mut walk = Walk::new(effort);
            while !walk.is_over() {
                walk.advance(&tree);
            }
            (walk.take_files(), walk)
        };
        for effort in efforts().unwrap() {
            let (mut files, mut walk) = walked(*effort);
            // While another file is being renamed, the kernel needs locks to look a file up, which
            // it may not take here. So the lookup is tried again: renames don't last.
            for _ in 0..TRIES {
                if *effort == Effort::Full || files.len() >= 2002 {
                    break;
                }
                (files, walk) = walked(*effort);
            }
            let pages: Vec<u32> = files.iter().map(|file| file.pages).collect();
            assert_eq!((pages[0], pages[1], *pages.last().unwrap()), (13, 2, 1));
            assert_eq!((pages.len(), walk.unreadable), (2002, 0), "{effort:?}");
            for file in &files {
                // As above.
                assert!((0..TRIES).any(|_| walk.open(&tree, file).is_some()), "{effort:?}");
            }
        }
    }

    /// As the budget is checked in between.
    #[test]
    fn large_directories_are_listed_bit_by_bit() {
        const NAMES: u64 = 1500;
        let dir = tempfile::tempdir().unwrap();
        for name in ["a", "b", "c"] {
            let at = dir.path().join(name);
            fs::create_dir(&at).unwrap();
            (0..NAMES).for_each(|nth| fs::write(at.join(nth.to_string()), []).unwrap());
        }
        let tree = Tree::open(dir.path()).unwrap();
        let mut walk = Walk::new(Effort::Full);
        walk.advance(&tree);
        assert!((1..2 * NAMES).contains(&walk.looked_up), "{}", walk.looked_up);
        while !walk.is_over() {
            walk.advance(&tree);
        }
        assert_eq!((walk.looked_up, walk.unreadable), (3 * NAMES + 3, 0));
    }
}
