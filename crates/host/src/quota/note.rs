//! Notes on disk of what is throttled, for the program's next start.

use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind, Write};
use std::iter;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::quota::error::{At, NoteError, QuotaError};
use crate::quota::group::Group;
use crate::quota::lift_all;

/// Our notes are never longer: a group takes some 300 bytes, and QEMU permits some thousand vCPUs,
/// each of which may be in a group of its own.
const BYTES_MAX: u64 = 16 << 20;
const EXTENSION: &str = "slowed";

/// A directory of notes.
#[derive(Clone, Debug)]
pub struct Notes {
    dir: PathBuf,
}

#[derive(Debug)]
pub(crate) struct Note {
    path: PathBuf,
}

#[derive(Debug, Serialize, Deserialize)]
struct Written {
    pid: u32,
    group: Group,
    /// Further groups, which earlier versions never made.
    #[serde(default)]
    more: Vec<Group>,
}

/// A process whose threads were throttled when the program ended.
#[derive(Debug)]
pub struct Left {
    note: Note,
    written: Written,
}

impl Notes {
    /// Opens the notes in `dir`, which is created if it doesn't exist.
    ///
    /// # Errors
    /// If it can't be created.
    pub fn open(dir: &Path) -> Result<Self, QuotaError> {
        DirBuilder::new().recursive(true).mode(0o700).create(dir).at("making", dir)?;
        Ok(Self { dir: dir.to_owned() })
    }

    /// What an earlier run of the program left behind. A note that can't be read is returned as an
    /// error.
    ///
    /// # Errors
    /// If the directory can't be read.
    pub fn left(&self) -> Result<Vec<Result<Left, QuotaError>>, QuotaError> {
        let entries = fs::read_dir(&self.dir).at("reading", &self.dir)?;
        let mut left = Vec::new();
        for entry in entries {
            let path = entry.at("reading", &self.dir)?.path();
            if path.extension().is_some_and(|extension| extension == EXTENSION) {
                left.push(read(path));
            }
        }
        Ok(left)
    }

    /// Writes a note, which is on disk when this returns.
    pub(crate) fn write(&self, pid: u32, mut groups: Vec<Group>) -> Result<Note, QuotaError> {
        let path = self.dir.join(format!("{pid}.{EXTENSION}"));
        let new = path.with_extension("new");
        let wrong = |source: NoteError| QuotaError::Note { path: path.clone(), source };
        if groups.is_empty() {
            return Err(wrong(NoteError::Empty));
        }
        let more = groups.split_off(1);
        let group = groups.remove(0);
        let text = serde_json::to_vec(&Written { pid, group, more })
            .map_err(|error| wrong(error.into()))?;
        let bytes = text.len() as u64;
        if bytes > BYTES_MAX {
            return Err(wrong(NoteError::TooLong { bytes }));
        }
        let written = durably(&new, &text).at("writing", &new);
        written.and_then(|()| fs::rename(&new, &path).at("making", &path)).inspect_err(|_| {
            // It would only take room, the lack of which may be the reason.
            let _ = fs::remove_file(&new);
        })?;
        File::open(&self.dir).and_then(|dir| dir.sync_all()).at("flushing", &self.dir)?;
        Ok(Note { path })
    }
}

fn durably(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(text)?;
    file.sync_all()
}

fn read(path: PathBuf) -> Result<Left, QuotaError> {
    let bytes = fs::metadata(&path).at("reading", &path)?.len();
    let wrong = |source: NoteError| QuotaError::Note { path: path.clone(), source };
    if bytes > BYTES_MAX {
        return Err(wrong(NoteError::TooLong { bytes }));
    }
    let text = fs::read(&path).at("reading", &path)?;
    let written = serde_json::from_slice(&text).map_err(|error| wrong(error.into()))?;
    Ok(Left { note: Note { path }, written })
}

impl Note {
    pub(crate) fn remove(&self) -> Result<(), QuotaError> {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(error).at("removing", &self.path)
            }
            _ => Ok(()),
        }
    }
}

impl Left {
    /// The process whose threads were throttled.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.written.pid
    }

    /// Releases its threads, and removes the note.
    ///
    /// # Errors
    /// If the system refuses; the note stays.
    pub fn lift(self) -> Result<(), QuotaError> {
        let Written { group, more, .. } = &self.written;
        lift_all(iter::once(group).chain(more))?;
        self.note.remove()
    }
}

#[cfg(test)]
mod tests;
