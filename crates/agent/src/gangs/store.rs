//! Gangs on disk, by id.
//!
//! Each step is saved before it is done, so that a restarted agent can resume a gang from its file
//! alone.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use api::{GangOutcome, GangReport};

use crate::id::random_id;
use crate::state;

/// The most gangs to keep of those that have moved all of their VMs, and as many of the others,
/// which can be resumed.
const KEPT_MAX: usize = 100;
/// The most VMs that each of these kinds has in all, some 100 bytes each: a list of gangs reads
/// them all.
const KEPT_MOVES_MAX: usize = 10_000;
/// Distinguishes a gang's id from a migration's.
const MARK: char = 'g';

/// The directory of gangs.
#[derive(Clone, Debug)]
pub(super) struct GangStore {
    dir: PathBuf,
}

impl GangStore {
    pub(super) fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    /// An id that no gang has.
    pub(super) fn unused_id(&self) -> io::Result<String> {
        for _ in 0..16 {
            let id = format!("{MARK}{}", random_id()?);
            if self.path(&id).is_some_and(|path| !path.exists()) {
                return Ok(id);
            }
        }
        Err(io::Error::other("no id is free"))
    }

    /// Saves a gang's report, and replaces the old one.
    pub(super) fn save(&self, report: &GangReport) -> io::Result<()> {
        let path = self.path(&report.id).ok_or_else(|| io::Error::other("not an id"))?;
        let text = serde_json::to_vec(report).map_err(io::Error::other)?;
        state::replace(&path, &text)
    }

    /// Reads a gang's report.
    pub(super) fn read(&self, id: &str) -> io::Result<Option<GangReport>> {
        let Some(path) = self.path(id) else { return Ok(None) };
        match fs::read(path) {
            Ok(text) => serde_json::from_slice(&text).map(Some).map_err(io::Error::other),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// All reports that can be read, the latest first.
    pub(super) fn all(&self) -> io::Result<Vec<GangReport>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let name = entry?.file_name().into_string().unwrap_or_default();
            match self.read(name.trim_end_matches(".json")) {
                Ok(Some(report)) => all.push(report),
                Ok(None) => {}
                Err(error) => tracing::warn!(name, %error, "cannot read the record of a gang"),
            }
        }
        all.sort_by(|one, other| {
            let key = |report: &GangReport| (report.started_unix_s, report.id.clone());
            key(other).cmp(&key(one))
        });
        Ok(all)
    }

    /// Removes the oldest reports of gangs that have ended, except the one of the gang `ended`.
    pub(super) fn prune(&self, ended: &str) -> io::Result<()> {
        let mut all = self.all()?;
        all.retain(|report| report.outcome.is_some());
        self.keep_newest(all, ended)
    }

    /// As [`GangStore::prune`], when the agent starts and no gang runs: those without an outcome
    /// were interrupted.
    pub(super) fn prune_at_start(&self) -> io::Result<()> {
        self.keep_newest(self.all()?, "")
    }

    fn keep_newest(&self, mut ended: Vec<GangReport>, last: &str) -> io::Result<()> {
        let now_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs());
        // The latest first, as before. One with a time to come is from before the clock was set
        // back, and older than all that began since.
        ended.sort_by_key(|report| (report.id != last, report.started_unix_s > now_s));
        let (done, left): (Vec<_>, Vec<_>) =
            ended.into_iter().partition(|report| report.outcome == Some(GangOutcome::Done));
        for kind in [done, left] {
            let mut moves = 0;
            for (nth, report) in kind.iter().enumerate() {
                moves += report.moves.len();
                if nth < KEPT_MAX && moves <= KEPT_MOVES_MAX {
                    continue;
                }
                match self.path(&report.id).map(fs::remove_file) {
                    Some(Err(error)) if error.kind() != io::ErrorKind::NotFound => {
                        return Err(error);
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// The path of a report; none if `id`, which comes from a caller of the API, is not an id.
    fn path(&self, id: &str) -> Option<PathBuf> {
        let digits = id.strip_prefix(MARK)?;
        let sound = digits.len() == 8 && digits.bytes().all(|b| b.is_ascii_hexdigit());
        sound.then(|| self.dir.join(format!("{id}.json")))
    }
}

#[cfg(test)]
mod tests {
    use api::{MoveReport, MoveState};

    use super::*;

    fn report(id: &str, started_unix_s: u64, outcome: Option<GangOutcome>) -> GangReport {
        GangReport {
            id: id.to_owned(),
            started_unix_s,
            total_s: 0.0,
            parallel: 2,
            atomic: false,
            evacuates: None,
            options: api::GangOptions::default(),
            outcome,
            moves: Vec::new(),
            notes: Vec::new(),
        }
    }

    #[test]
    fn saved_gangs_are_found_and_old_ones_of_each_kind_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let store = GangStore::new(dir.path().to_owned());
        let id = store.unused_id().unwrap();
        assert!(store.read(&id).unwrap().is_none());
        store.save(&report(&id, 1, None)).unwrap();
        assert_eq!(store.read(&id).unwrap().unwrap().id, id);
        for wrong in ["../gdeadbeef", "deadbeef", "g", "gdeadbeeg", "gdeadbeef0"] {
            assert!(store.read(wrong).unwrap().is_none(), "{wrong}");
        }
        for number in 0..=KEPT_MAX as u64 {
            for (kind, outcome) in [(0, GangOutcome::Done), (1 << 28, GangOutcome::Failed)] {
                let id = format!("g{:08x}", kind + number);
                store.save(&report(&id, 2 + number, Some(outcome))).unwrap();
            }
        }
        store.prune(&id).unwrap();
        let all = store.all().unwrap();
        let of = |outcome| all.iter().filter(|report| report.outcome == Some(outcome)).count();
        assert_eq!(of(GangOutcome::Done), KEPT_MAX);
        assert_eq!(of(GangOutcome::Failed), KEPT_MAX, "others don't push them out");
        assert_eq!(all.first().unwrap().started_unix_s, 2 + KEPT_MAX as u64, "the latest first");
        assert_eq!(all.last().unwrap().id, id, "one that has not ended stays");
        // No gang runs when the agent starts, and that one is the oldest.
        store.prune_at_start().unwrap();
        assert!(store.read(&id).unwrap().is_none());
        assert_eq!(store.all().unwrap().len(), 2 * KEPT_MAX);
    }

    #[test]
    fn of_large_gangs_fewer_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let store = GangStore::new(dir.path().to_owned());
        let vms = KEPT_MOVES_MAX / 4;
        let one = MoveReport {
            vm: "web1".to_owned(),
            from: "here".to_owned(),
            to: "there".to_owned(),
            ram_bytes: 1,
            used_bytes: 1,
            state: MoveState::Failed,
            migration: None,
            reason: None,
            in_doubt: false,
            limit_bits_per_s: None,
            figures: None,
        };
        for number in 1..=6 {
            let large = report(&format!("g{number:08x}"), number, Some(GangOutcome::Failed));
            store.save(&GangReport { moves: vec![one.clone(); vms], ..large }).unwrap();
        }
        store.prune("g00000006").unwrap();
        let kept: Vec<u64> = store.all().unwrap().iter().map(|one| one.started_unix_s).collect();
        assert_eq!(kept, [6, 5, 4, 3]);
    }

    #[test]
    fn the_clock_may_be_set_back() {
        let dir = tempfile::tempdir().unwrap();
        let store = GangStore::new(dir.path().to_owned());
        let done = |id: &str, started_unix_s| {
            store.save(&report(id, started_unix_s, Some(GangOutcome::Done))).unwrap();
        };
        // All but one are of the wrong time.
        let wrong_s = u64::MAX - KEPT_MAX as u64;
        for number in 1..KEPT_MAX as u64 {
            done(&format!("g{number:08x}"), wrong_s + number);
        }
        done("gaaaaaaaa", 1);
        for (id, started_unix_s) in [("gbbbbbbbb", 2), ("gcccccccc", wrong_s)] {
            done(id, started_unix_s);
            store.prune(id).unwrap();
        }
        let has = |id: &str| store.read(id).unwrap().is_some();
        assert_eq!(store.all().unwrap().len(), KEPT_MAX);
        assert!(["gaaaaaaaa", "gbbbbbbbb", "gcccccccc", "g00000003"].into_iter().all(has));
        assert!(!["g00000001", "g00000002"].into_iter().any(has), "they are the oldest");
    }
}
