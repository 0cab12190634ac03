//! The files that a walk found, in little memory: a hundred thousand of them must
//! fit into a few MiB.

/// A directory, by its place in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DirId(u32);

#[derive(Clone, Copy, Debug)]
struct Name {
    start: u32,
    bytes: u16,
}

#[derive(Clone, Copy, Debug)]
struct Dir {
    parent: DirId,
    name: Name,
}

/// A file of a tree.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    dir: DirId,
    name: Name,
    /// Its size, in pages.
    pub(crate) pages: u32,
}

/// Directories and files of one tree.
#[derive(Debug, Default)]
pub(crate) struct Found {
    dirs: Vec<Dir>,
    names: Vec<u8>,
    files: Vec<Entry>,
}

impl Found {
    /// The tree's root, which has no name.
    pub(crate) const ROOT: DirId = DirId(u32::MAX);

    /// What it takes up.
    pub(crate) fn bytes(&self) -> u64 {
        let dirs = self.dirs.capacity() * size_of::<Dir>();
        let files = self.files.capacity() * size_of::<Entry>();
        (dirs + files + self.names.capacity()) as u64
    }

    /// Adds a directory, if numbers last.
    pub(crate) fn add_dir(&mut self, parent: DirId, name: &[u8]) -> Option<DirId> {
        let name = self.add_name(name)?;
        let id = DirId(u32::try_from(self.dirs.len()).ok()?);
        self.dirs.push(Dir { parent, name });
        (id != Self::ROOT).then_some(id)
    }

    /// Adds a file; whether that could be done.
    pub(crate) fn add_file(&mut self, dir: DirId, name: &[u8], pages: u64) -> bool {
        let Some(name) = self.add_name(name) else { return false };
        let pages = u32::try_from(pages).unwrap_or(u32::MAX);
        self.files.push(Entry { dir, name, pages });
        true
    }

    fn add_name(&mut self, name: &[u8]) -> Option<Name> {
        let start = u32::try_from(self.names.len()).ok()?;
        let bytes = u16::try_from(name.len()).ok()?;
        self.names.extend_from_slice(name);
        Some(Name { start, bytes })
    }

    /// The files, the biggest first, which are no longer in the list.
    pub(crate) fn take_files(&mut self) -> Vec<Entry> {
        let mut files = std::mem::take(&mut self.files);
        files.sort_unstable_by_key(|file| std::cmp::Reverse(file.pages));
        files
    }

    /// A directory's path from the tree's root.
    pub(crate) fn dir_path(&self, dir: DirId, path: &mut Vec<u8>) {
        path.clear();
        self.put_dir(dir, path);
        if path.is_empty() {
            path.push(b'.');
        }
    }

    /// A file's.
    pub(crate) fn file_path(&self, file: &Entry, path: &mut Vec<u8>) {
        path.clear();
        self.put_dir(file.dir, path);
        self.put_name(file.name, path);
    }

    /// From the innermost to the outermost, then turned round: a path can be deep.
    fn put_dir(&self, dir: DirId, path: &mut Vec<u8>) {
        let mut names = Vec::new();
        let mut next = dir;
        while let Some(dir) = usize::try_from(next.0).ok().and_then(|nth| self.dirs.get(nth)) {
            names.push(dir.name);
            next = dir.parent;
        }
        for name in names.into_iter().rev() {
            self.put_name(name, path);
        }
    }

    fn put_name(&self, name: Name, path: &mut Vec<u8>) {
        if !path.is_empty() {
            path.push(b'/');
        }
        let start = usize::try_from(name.start).unwrap_or(usize::MAX);
        let end = start.saturating_add(name.bytes.into());
        path.extend_from_slice(self.names.get(start..end).unwrap_or_default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_put_together_and_the_biggest_come_first() {
        let mut found = Found::default();
        let usr = found.add_dir(Found::ROOT, b"usr").unwrap();
        let bin = found.add_dir(usr, b"bin").unwrap();
        assert!(found.add_file(Found::ROOT, b"small", 1));
        assert!(found.add_file(bin, b"ls", 30));
        assert!(found.add_file(usr, b"huge", 1 << 40));
        let mut path = Vec::new();
        let paths: Vec<String> = found
            .take_files()
            .iter()
            .map(|file| {
                found.file_path(file, &mut path);
                String::from_utf8(path.clone()).unwrap()
            })
            .collect();
        assert_eq!(paths, ["usr/huge", "usr/bin/ls", "small"]);
        found.dir_path(bin, &mut path);
        assert_eq!(path, b"usr/bin");
        found.dir_path(Found::ROOT, &mut path);
        assert_eq!(path, b".");
        assert!(found.take_files().is_empty() && found.bytes() > 0);
    }
}
