//! Reports on disk, by the migration's id.

use std::cmp::Reverse;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use api::{Outcome, Progress, Report};

use crate::id::is_id;
use crate::state;

/// The most reports to keep; one is some 100 KB.
const KEPT_MAX: usize = 500;

/// The directory of reports.
pub(in crate::moves) struct Reports {
    dir: PathBuf,
}

impl Reports {
    pub(in crate::moves) fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    pub(in crate::moves) fn save(&self, report: &Report) -> io::Result<()> {
        let path = self.path(&report.id).ok_or_else(|| io::Error::other("not an id"))?;
        let text = serde_json::to_vec(report).map_err(io::Error::other)?;
        state::replace(&path, &text)?;
        self.prune(&path)
    }

    pub(in crate::moves) fn read(&self, id: &str) -> io::Result<Option<Report>> {
        let Some(path) = self.path(id) else { return Ok(None) };
        match fs::read(path) {
            Ok(text) => serde_json::from_slice(&text).map(Some).map_err(io::Error::other),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The reports that were saved last, at most `most`.
    pub(in crate::moves) fn newest(&self, most: usize) -> io::Result<impl Iterator<Item = Report>> {
        let mut files = self.files()?;
        files.sort_by_key(|(at, _)| Reverse(*at));
        let read = |path: PathBuf| {
            let report = fs::read(&path).and_then(|text| Ok(serde_json::from_slice(&text)?));
            report.inspect_err(|error| tracing::warn!(?path, %error, "a report can't be read")).ok()
        };
        Ok(files.into_iter().take(most).filter_map(move |(_, path)| read(path)))
    }

    /// All files, with the times when they were saved.
    fn files(&self) -> io::Result<Vec<(SystemTime, PathBuf)>> {
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            // Another migration that ends now may have removed it.
            if let Ok(file) = entry.metadata() {
                files.push((file.modified()?, entry.path()));
            }
        }
        Ok(files)
    }

    pub(in crate::moves) fn has(&self, id: &str) -> bool {
        self.path(id).is_some_and(|path| path.exists())
    }

    /// The path of a report; none if `id`, which comes from a caller of the API, is not an id.
    fn path(&self, id: &str) -> Option<PathBuf> {
        is_id(id).then(|| self.dir.join(format!("{id}.json")))
    }

    /// Removes the oldest reports, except the one that was just saved.
    fn prune(&self, saved: &Path) -> io::Result<()> {
        let mut files = self.files()?;
        // One with a time to come is from before the clock was set back, and so older than all that
        // were saved since.
        let now = SystemTime::now();
        files.sort_by_key(|(at, path)| (path == saved, *at <= now, *at));
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

/// A report without the engine's figures.
pub(in crate::moves) fn empty(progress: &Progress, outcome: Outcome) -> Report {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    Report::empty(progress, now, outcome)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
    fn the_oldest_are_removed_also_after_the_clock_was_set_back() {
        let dir = tempfile::tempdir().unwrap();
        let reports = Reports::new(dir.path().to_owned());
        let now = SystemTime::now();
        for number in 0..KEPT_MAX {
            let path = reports.path(&format!("{number:08x}")).unwrap();
            // The first one is of last week, the others are of the wrong time.
            let hours = Duration::from_secs(3600) * u32::try_from(number).unwrap();
            let at = if number == 0 { now - Duration::from_secs(7 * 86400) } else { now + hours };
            fs::File::create(path).unwrap().set_modified(at).unwrap();
        }
        for id in ["aaaaaaaa", "bbbbbbbb", "cccccccc"] {
            let progress = Progress::new((id, "web1"), ("here", "there"), 0);
            reports.save(&empty(&progress, Outcome::Done)).unwrap();
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), KEPT_MAX);
        for (id, is_kept) in [
            ("aaaaaaaa", true),
            ("bbbbbbbb", true),
            ("cccccccc", true),
            ("00000000", true),
            ("00000001", false),
            ("00000002", false),
            ("00000003", false),
            ("00000004", true),
        ] {
            assert_eq!(reports.has(id), is_kept, "{id}");
        }
    }

    #[test]
    fn a_report_that_was_just_saved_is_kept_whatever_the_time_of_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let reports = Reports::new(dir.path().to_owned());
        let saved = reports.path("00000000").unwrap();
        for at in [SystemTime::UNIX_EPOCH, SystemTime::now() + Duration::from_secs(3600)] {
            for number in 0..=KEPT_MAX {
                fs::write(reports.path(&format!("{number:08x}")).unwrap(), "").unwrap();
            }
            fs::File::options().write(true).open(&saved).unwrap().set_modified(at).unwrap();
            reports.prune(&saved).unwrap();
            assert!(reports.has("00000000"), "{at:?}");
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), KEPT_MAX);
        }
    }
}
