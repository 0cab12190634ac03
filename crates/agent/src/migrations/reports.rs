//! Reports on disk, by the migration's id.

use std::fs;
use std::io::{self, Read};
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use api::{Outcome, Progress, Report};

use crate::state;

/// The most reports to keep; one is some 100 KB.
const KEPT_MAX: usize = 500;
/// Hex digits of an id.
const ID_DIGITS: usize = 8;

/// The directory of reports.
pub(super) struct Reports {
    dir: PathBuf,
}

impl Reports {
    pub(super) fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    pub(super) fn save(&self, report: &Report) -> io::Result<()> {
        let path = self.path(&report.id).ok_or_else(|| io::Error::other("not an id"))?;
        let text = serde_json::to_vec(report).map_err(io::Error::other)?;
        state::replace(&path, &text)?;
        self.prune()
    }

    pub(super) fn read(&self, id: &str) -> io::Result<Option<Report>> {
        let Some(path) = self.path(id) else { return Ok(None) };
        match fs::read(path) {
            Ok(text) => serde_json::from_slice(&text).map(Some).map_err(io::Error::other),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether the text may be a migration's id.
    pub(super) fn is_id(id: &str) -> bool {
        id.len() == ID_DIGITS && id.bytes().all(|b| b.is_ascii_hexdigit())
    }

    pub(super) fn has(&self, id: &str) -> bool {
        self.path(id).is_some_and(|path| path.exists())
    }

    /// The path of a report; none if `id`, which comes from a caller of the API, is not an id.
    fn path(&self, id: &str) -> Option<PathBuf> {
        Self::is_id(id).then(|| self.dir.join(format!("{id}.json")))
    }

    fn prune(&self) -> io::Result<()> {
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            // Another migration that ends now may have removed it.
            if let Ok(file) = entry.metadata() {
                files.push((file.modified()?, entry.path()));
            }
        }
        files.sort();
        let excess = files.len().saturating_sub(KEPT_MAX);
        for (_, path) in files.into_iter().take(excess) {
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

/// A random id, short enough to type.
pub(crate) fn random_id() -> io::Result<String> {
    let mut bytes = [0; ID_DIGITS / 2];
    fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(format!("{:08x}", u32::from_be_bytes(bytes)))
}

/// A report without the engine's figures.
pub(super) fn empty(progress: &Progress, outcome: Outcome) -> Report {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    Report::empty(progress, now, outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_id_finds_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let reports = Reports::new(dir.path().join("reports"));
        fs::write(dir.path().join("secret.json"), "{}").unwrap();
        for id in ["../secret", "", "deadbeef0", "deadbee", "deadbee/", "..%2fsecr", "DEADBEEZ"] {
            assert!(reports.read(id).unwrap().is_none(), "{id}");
            assert!(!reports.has(id));
        }
    }

    #[test]
    fn ids_are_short_and_differ() {
        let ids: std::collections::HashSet<String> =
            (0..64).map(|_| random_id().unwrap()).collect();
        assert!(ids.len() > 60 && ids.iter().all(|id| id.len() == ID_DIGITS));
    }
}
