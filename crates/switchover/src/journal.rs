//! A side's decisions on disk.
//!
//! A [`JournalDir`] is a directory with one file for each migration and side, `MIGRATION.source` or
//! `MIGRATION.destination`. The file is created completely under another name, with its first line
//! and room for the rest; from then on records are written into that room and flushed. So a record
//! needs no new block, no change of the file's length, and no wait for the file system's own
//! journal, which can take long on a host that moves disks: these flushes are part of the downtime.
//!
//! Records of a migration within one host are not flushed. They have to outlive the agent, not the
//! host: one that crashes has neither QEMU any more, whatever its journals say.
//!
//! A record at the end of a file that was cut short by a crash was never acted upon, so it is
//! dropped. Damage anywhere else is an error for a human; but not within one host that has been
//! booted since, which may have lost any of the records that were not flushed.

mod entry;
mod error;
mod line;
#[cfg(test)]
mod tests;

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::marker::PhantomData;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::migration_id::MigrationId;
pub use entry::{Keeps, Listed, Opened, Side};
pub use error::JournalError;
use line::{Contents, FILE_BYTES_MAX};
pub(crate) use line::{read, sealed};

/// Room for records after the first line. A migration writes three to five, each below 2 KiB.
const ROOM_BYTES: usize = 8 << 10;
/// Extension of a file that is not complete yet.
const NEW: &str = "new";

/// A directory of journals.
#[derive(Clone, Debug)]
pub struct JournalDir {
    dir: PathBuf,
    boot: String,
}

/// One migration's journal on one side.
#[derive(Debug)]
pub struct Journal<R> {
    path: PathBuf,
    file: File,
    boot: String,
    opened: Opened,
    next: u32,
    end: usize,
    /// A failed write may have left bytes up to here.
    dirty_to: usize,
    records: PhantomData<fn(R)>,
}

/// A journal left by an earlier run of the agent.
#[derive(Debug)]
pub struct Reopened<R> {
    /// The journal, to continue.
    pub journal: Journal<R>,
    /// Its records.
    pub records: Vec<R>,
    /// Whether its last record was cut short, and dropped.
    pub torn: bool,
    /// Whether the host has not been booted since it was opened, so that its QEMU may still exist.
    pub same_boot: bool,
}

impl<R: Keeps> Reopened<R> {
    /// The state that its records mean.
    #[must_use]
    pub fn noted(&self) -> R::Noted {
        R::noted(&self.journal.opened, &self.records)
    }
}

/// Identifies the current boot of this host.
///
/// # Errors
/// If the kernel doesn't report it.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

impl JournalDir {
    /// Opens the directory, which is created if it doesn't exist.
    ///
    /// # Errors
    /// If it can't be created or read.
    pub fn open(dir: &Path) -> Result<Self, JournalError> {
        let boot = boot_id().map_err(|source| failed(dir, "which boot this is", source))?;
        Self::open_in_boot(dir, boot)
    }

    /// As [`JournalDir::open`], for tests that simulate a boot.
    ///
    /// # Errors
    /// As [`JournalDir::open`].
    #[doc(hidden)]
    pub fn open_in_boot(dir: &Path, boot: String) -> Result<Self, JournalError> {
        if !dir.is_dir() {
            DirBuilder::new()
                .mode(0o700)
                .create(dir)
                .and_then(|()| dir.parent().map_or(Ok(()), flush))
                .map_err(|source| failed(dir, "making it", source))?;
        }
        let journals = Self { dir: dir.to_owned(), boot };
        for path in journals.paths()? {
            // An incomplete journal was never acted upon.
            if path.extension().is_some_and(|extension| extension == NEW) {
                fs::remove_file(&path).map_err(|source| failed(&path, "removing it", source))?;
            }
        }
        Ok(journals)
    }

    /// Creates the journal of a new migration. It is on disk when this returns.
    ///
    /// # Errors
    /// If it can't be written, or if it exists already.
    pub fn create<R: Keeps>(&self, opened: Opened) -> Result<Journal<R>, JournalError> {
        let path = self.path(&opened.migration, R::SIDE);
        if self.keeps(&opened.migration, R::SIDE) {
            return Err(JournalError::Exists(opened.migration));
        }
        let mut bytes = line::first(&self.boot, &opened)
            .map_err(|source| failed(&path, "encoding it", source.into()))?;
        let end = bytes.len();
        bytes.resize((end + ROOM_BYTES).next_multiple_of(4096), 0);
        if bytes.len() as u64 > FILE_BYTES_MAX {
            return Err(JournalError::TooLong(path));
        }
        let file =
            self.place(&path, &bytes).map_err(|source| failed(&path, "making it", source))?;
        let (boot, records) = (self.boot.clone(), PhantomData);
        Ok(Journal { path, file, boot, opened, next: 1, end, dirty_to: end, records })
    }

    fn place(&self, path: &Path, bytes: &[u8]) -> io::Result<File> {
        let mut new = path.as_os_str().to_owned();
        new.push(".");
        new.push(NEW);
        let file =
            OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&new)?;
        let placed = file
            .write_all_at(bytes, 0)
            .and_then(|()| file.sync_all())
            .and_then(|()| fs::rename(&new, path))
            .and_then(|()| flush(&self.dir));
        if let Err(error) = placed {
            let _ = fs::remove_file(&new);
            let _ = fs::remove_file(path);
            return Err(error);
        }
        Ok(file)
    }

    /// Whether there is a journal of this migration, readable or not. An agent without one does not
    /// know the migration, and says so.
    #[must_use]
    pub fn keeps(&self, migration: &MigrationId, side: Side) -> bool {
        // A journal that can't be looked up must not be denied.
        self.path(migration, side).try_exists().unwrap_or(true)
    }

    /// How many journals there are, readable or not.
    ///
    /// # Errors
    /// If the directory can't be read.
    pub fn count(&self) -> Result<usize, JournalError> {
        let entries = fs::read_dir(&self.dir);
        Ok(entries.map_err(|source| failed(&self.dir, "reading it", source))?.count())
    }

    pub(crate) fn reopen<R: Keeps>(&self, path: PathBuf) -> Result<Reopened<R>, JournalError> {
        let io = |what| {
            let path = path.clone();
            move |source| JournalError::Io { path, what, source }
        };
        let file =
            OpenOptions::new().read(true).write(true).open(&path).map_err(io("opening it"))?;
        let length = file.metadata().map_err(io("reading it"))?.len();
        if length > FILE_BYTES_MAX {
            return Err(JournalError::TooLong(path));
        }
        let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
        file.read_exact_at(&mut bytes, 0).map_err(io("reading it"))?;
        let contents = read::<R>(&bytes).or_else(|damage| {
            let without = line::without_records(&bytes);
            let moot = without.filter(|contents| self.is_moot(contents));
            moot.ok_or_else(|| JournalError::Damaged {
                path: path.clone(),
                vm: damage.vm,
                at: damage.at,
                why: damage.why,
            })
        })?;
        let Contents { boot, opened, records, end, torn } = contents;
        if self.path(&opened.migration, R::SIDE) != path {
            let (vm, why) = (Some(opened.vm), "it is another migration's");
            return Err(JournalError::Damaged { path, vm, at: 0, why });
        }
        let next = u32::try_from(records.len()).unwrap_or(u32::MAX).saturating_add(1);
        let same_boot = boot == self.boot;
        let (boot, marker) = (self.boot.clone(), PhantomData);
        let dirty_to = if torn { bytes.len() } else { end };
        let journal = Journal { path, file, boot, opened, next, end, dirty_to, records: marker };
        Ok(Reopened { journal, records, torn, same_boot })
    }

    /// Whether the records of a journal decide nothing any more: neither of the QEMUs that they are
    /// about has outlived an earlier boot of this host.
    fn is_moot<R>(&self, contents: &Contents<R>) -> bool {
        contents.opened.is_within_host() && contents.boot != self.boot
    }

    /// The file of a migration's journal.
    #[must_use]
    pub fn path(&self, migration: &MigrationId, side: Side) -> PathBuf {
        self.dir.join(format!("{migration}.{}", side.extension()))
    }

    pub(crate) fn paths(&self) -> Result<Vec<PathBuf>, JournalError> {
        let listed = fs::read_dir(&self.dir)
            .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>());
        let mut paths: Vec<PathBuf> =
            listed.map_err(|source| failed(&self.dir, "reading it", source))?;
        paths.sort();
        Ok(paths)
    }
}

impl<R: Keeps> Journal<R> {
    /// What was known when the journal was created.
    #[must_use]
    pub fn opened(&self) -> &Opened {
        &self.opened
    }

    /// Adds a record. It is on disk when this returns; of a migration within one host, it is in the
    /// file, for the agent's next run.
    ///
    /// # Errors
    /// If it can't be written or flushed. Then it may be on disk or not, and the next record
    /// replaces it.
    pub fn append(&mut self, record: &R) -> Result<(), JournalError> {
        let end = self.write(record)?;
        if !self.opened.is_within_host() {
            self.file.sync_data().map_err(|source| failed(&self.path, "flushing it", source))?;
        }
        self.advance(end);
        Ok(())
    }

    /// Adds a record without waiting for it: it is on disk with the next one.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn note(&mut self, record: &R) -> Result<(), JournalError> {
        let end = self.write(record)?;
        self.advance(end);
        Ok(())
    }

    /// Removes the journal, durably. Calling it again is harmless.
    ///
    /// # Errors
    /// If the file may reappear.
    pub fn forget(&mut self) -> Result<(), JournalError> {
        match fs::remove_file(&self.path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                return Err(failed(&self.path, "removing it", source));
            }
            _ => {}
        }
        let dir = self.path.parent().unwrap_or(Path::new("."));
        flush(dir).map_err(|source| failed(dir, "flushing it", source))
    }

    fn write(&mut self, record: &R) -> Result<usize, JournalError> {
        let mut bytes = line::nth(self.next, &self.boot, &self.opened.migration, record)
            .map_err(|source| failed(&self.path, "encoding it", source.into()))?;
        let end = self.end + bytes.len();
        if end as u64 > FILE_BYTES_MAX {
            return Err(JournalError::TooLong(self.path.clone()));
        }
        // The rest of a failed write is overwritten too.
        bytes.resize(bytes.len().max(self.dirty_to.saturating_sub(self.end)), 0);
        self.dirty_to = self.dirty_to.max(end);
        self.file
            .write_all_at(&bytes, self.end as u64)
            .map_err(|source| failed(&self.path, "writing it", source))?;
        Ok(end)
    }

    fn advance(&mut self, end: usize) {
        self.end = end;
        self.dirty_to = end;
        self.next = self.next.saturating_add(1);
    }
}

fn flush(dir: &Path) -> io::Result<()> {
    // The parent of a relative path can be empty.
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    File::open(dir)?.sync_all()
}

fn failed(path: &Path, what: &'static str, source: io::Error) -> JournalError {
    JournalError::Io { path: path.to_owned(), what, source }
}
