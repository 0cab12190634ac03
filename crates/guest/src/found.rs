//! The files that a walk found, stored compactly: a hundred thousand of them must fit into a few
//! MiB.

/// A directory, by its index.
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
pub(crate) struct FileTree {
    dirs: Vec<Dir>,
    dir_names: Vec<u8>,
    files: Vec<Entry>,
    file_names: Vec<u8>,
}

impl FileTree {
    /// The tree's root, which has no name.
    pub(crate) const ROOT: DirId = DirId(u32::MAX);

    /// Memory of the directories, which are never dropped.
    pub(crate) fn dirs_bytes(&self) -> u64 {
        (self.dirs.capacity() * size_of::<Dir>() + self.dir_names.capacity()) as u64
    }

    /// Memory of the files.
    pub(crate) fn files_bytes(&self) -> u64 {
        (self.files.len() * size_of::<Entry>() + self.file_names.len()) as u64
    }

    /// Adds a directory; none if indexes are exhausted.
    pub(crate) fn add_dir(&mut self, parent: DirId, name: &[u8]) -> Option<DirId> {
        let name = add_name(&mut self.dir_names, name)?;
        let id = DirId(u32::try_from(self.dirs.len()).ok()?);
        self.dirs.push(Dir { parent, name });
        (id != Self::ROOT).then_some(id)
    }

    /// Adds a file; returns whether there was room.
    pub(crate) fn add_file(&mut self, dir: DirId, name: &[u8], pages: u64) -> bool {
        let Some(name) = add_name(&mut self.file_names, name) else { return false };
        let pages = u32::try_from(pages).unwrap_or(u32::MAX);
        self.files.push(Entry { dir, name, pages });
        true
    }

    /// Takes the files, the biggest first. Their names are kept until they are given back.
    pub(crate) fn take_files(&mut self) -> Vec<Entry> {
        let mut files = std::mem::take(&mut self.files);
        files.sort_unstable_by_key(|file| std::cmp::Reverse(file.pages));
        files
    }

    /// Drops files that were taken.
    pub(crate) fn give_back(&mut self, mut files: Vec<Entry>) {
        files.clear();
        self.files = files;
        self.file_names.clear();
    }

    /// A directory's path from the tree's root.
    pub(crate) fn dir_path(&self, dir: DirId, path: &mut Vec<u8>) {
        path.clear();
        self.put_dir(dir, path);
        if path.is_empty() {
            path.push(b'.');
        }
    }

    /// A file's path from the tree's root.
    pub(crate) fn file_path(&self, file: &Entry, path: &mut Vec<u8>) {
        path.clear();
        self.put_dir(file.dir, path);
        put_name(&self.file_names, file.name, path);
    }

    /// Collects names from the innermost outwards, then reverses them: a path can be too deep for
    /// recursion.
    fn put_dir(&self, dir: DirId, path: &mut Vec<u8>) {
        let mut names = Vec::new();
        let mut next = dir;
        while let Some(dir) = usize::try_from(next.0).ok().and_then(|nth| self.dirs.get(nth)) {
            names.push(dir.name);
            next = dir.parent;
        }
        for name in names.into_iter().rev() {
            put_name(&self.dir_names, name, path);
        }
    }
}

fn add_name(names: &mut Vec<u8>, name: &[u8]) -> Option<Name> {
    let start = u32::try_from(names.len()).ok()?;
    let bytes = u16::try_from(name.len()).ok()?;
    names.extend_from_slice(name);
    Some(Name { start, bytes })
}

fn put_name(names: &[u8], name: Name, path: &mut Vec<u8>) {
    if !path.is_empty() {
        path.push(b'/');
    }
    let start = usize::try_from(name.start).unwrap_or(usize::MAX);
    let end = start.saturating_add(name.bytes.into());
    path.extend_from_slice(names.get(start..end).unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_assembled_and_the_biggest_files_come_first() {
        let mut found = FileTree::default();
        let usr = found.add_dir(FileTree::ROOT, b"usr").unwrap();
        let bin = found.add_dir(usr, b"bin").unwrap();
        assert!(found.add_file(FileTree::ROOT, b"small", 1));
        assert!(found.add_file(bin, b"ls", 30));
        assert!(found.add_file(usr, b"huge", 1 << 40));
        let mut path = Vec::new();
        let files = found.take_files();
        let paths: Vec<String> = files
            .iter()
            .map(|file| {
                found.file_path(file, &mut path);
                String::from_utf8(path.clone()).unwrap()
            })
            .collect();
        assert_eq!(paths, ["usr/huge", "usr/bin/ls", "small"]);
        found.dir_path(bin, &mut path);
        assert_eq!(path, b"usr/bin");
        found.dir_path(FileTree::ROOT, &mut path);
        assert_eq!(path, b".");
        assert!(found.dirs_bytes() > 0 && found.files_bytes() > 0);
        found.give_back(files);
        assert!(found.add_file(bin, b"cat", 7));
        let files = found.take_files();
        found.file_path(&files[0], &mut path);
        assert_eq!((files.len(), &path[..]), (1, &b"usr/bin/cat"[..]));
    }
}
