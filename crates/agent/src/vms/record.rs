//! A VM's record on disk: `record.json` in its directory.
//!
//! The record is written first to a VM's directory and removed last, so a directory with
//! other files and no record has lost it. A record that can't be read, or that a newer agent
//! wrote, permits nothing: neither to end a QEMU nor to remove a file.
//!
//! A VM that gets another QEMU on this host has `next.json` as well, the record of the QEMU that
//! is to have it. Each of the two has a seat: the VM's directory, or one in it.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use qemu::machine;
use qemu::outgoing::forget_settings;
use serde::{Deserialize, Serialize};

use crate::state;

/// The version that this agent writes; a change that older agents would misread gets a new number.
const VERSION: u32 = 1;
/// The longest record: Linux allows a command line of some MiB.
const BYTES_MAX: u64 = 16 << 20;
const FILE: &str = "record.json";
/// A record that is not complete yet.
const NEW: &str = "record.new";
/// The record of the QEMU that is to have the VM.
const NEXT: &str = "next.json";
/// The second seat in a VM's directory. Its name is short, as paths of sockets are.
const SECOND: &str = "2";
/// What a QEMU has in its seat, besides its settings.
const QEMUS: [&str; 4] = ["qmp", "gst", "qemu.log", "qemu.log.1"];
/// The directory in which its VNC server listens until it has its VM.
const VNC: &str = "vnc";

/// Whether a recorded VM belongs to this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Standing {
    /// Its QEMU is being started.
    Starting,
    /// It arrives from another host, which has not given it up yet.
    Arriving,
    /// It belongs to this host.
    Here,
}

/// A VM's record on disk.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Records of the first version may lack it.
    #[serde(default = "first")]
    version: u32,
    pub(crate) standing: Standing,
    /// None until QEMU answers.
    pub(crate) machine: Option<machine::Record>,
    pub(crate) ram_bytes: u64,
    pub(crate) qemu: String,
    /// See [`crate::vms::vm::Vm::share_domain`].
    #[serde(default)]
    pub(crate) share_domain: String,
}

/// The part that every version has.
#[derive(Deserialize)]
struct Form {
    #[serde(default = "first")]
    version: u32,
}

fn first() -> u32 {
    1
}

/// Why a record can't be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordError {
    #[error("there is no {}", .0.display())]
    Missing(PathBuf),
    #[error("{} can't be read: {source}", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{} is longer than any record: {BYTES_MAX} bytes", .0.display())]
    TooLong(PathBuf),
    #[error("{} is damaged: {source}", path.display())]
    Damaged { path: PathBuf, source: serde_json::Error },
    #[error(
        "{} is of form {version}, and this agent reads up to form {VERSION}: a newer droveway \
         wrote it: use that version",
        path.display()
    )]
    Newer { path: PathBuf, version: u32 },
}

impl Record {
    /// The record before there is a QEMU.
    pub(crate) fn starting() -> Self {
        Self::new(Standing::Starting, None, 0, "", "")
    }

    pub(crate) fn new(
        standing: Standing,
        machine: Option<machine::Record>,
        ram_bytes: u64,
        qemu: &str,
        share_domain: &str,
    ) -> Self {
        let (qemu, share_domain) = (qemu.to_owned(), share_domain.to_owned());
        Self { version: VERSION, standing, machine, ram_bytes, qemu, share_domain }
    }

    /// The seat of its QEMU, in the VM's directory `dir`.
    pub(crate) fn home(&self, dir: &Path) -> PathBuf {
        let home = self.machine.as_ref().and_then(|machine| machine.dir());
        home.unwrap_or(dir).to_owned()
    }

    pub(crate) fn read(dir: &Path) -> Result<Self, RecordError> {
        Self::read_file(dir.join(FILE))
    }

    /// The record of the QEMU that is to have the VM.
    pub(crate) fn read_next(dir: &Path) -> Result<Self, RecordError> {
        Self::read_file(dir.join(NEXT))
    }

    fn read_file(path: PathBuf) -> Result<Self, RecordError> {
        let text = match limited(&path) {
            Ok(Some(text)) => text,
            Ok(None) => return Err(RecordError::TooLong(path)),
            Err(source) if source.kind() == io::ErrorKind::NotFound => {
                return Err(RecordError::Missing(path));
            }
            Err(source) => return Err(RecordError::Unreadable { path, source }),
        };
        let damaged = |source| RecordError::Damaged { path: path.clone(), source };
        // Only the version: a newer record may have anything else.
        let Form { version } = serde_json::from_slice(&text).map_err(damaged)?;
        if version > VERSION {
            return Err(RecordError::Newer { path, version });
        }
        serde_json::from_slice(&text).map_err(damaged)
    }

    /// Writes the record, which is on disk when this returns.
    pub(crate) fn write(&self, dir: &Path) -> io::Result<()> {
        let text = serde_json::to_vec_pretty(self).map_err(io::Error::other)?;
        state::replace(&dir.join(FILE), &text)
    }

    /// Writes it as the record of the QEMU that is to have the VM.
    pub(crate) fn write_next(&self, dir: &Path) -> io::Result<()> {
        let text = serde_json::to_vec_pretty(self).map_err(io::Error::other)?;
        state::replace(&dir.join(NEXT), &text)
    }
}

/// The seats in a VM's directory.
pub(crate) fn seats(dir: &Path) -> [PathBuf; 2] {
    [dir.to_owned(), dir.join(SECOND)]
}

/// The seat next to that of a QEMU with the directory `home`.
pub(crate) fn other_seat(dir: &Path, home: &Path) -> PathBuf {
    let [first, second] = seats(dir);
    if home == second { first } else { second }
}

/// Whether a VM may have a record of a QEMU that is to have it.
pub(crate) fn may_have_next(dir: &Path) -> bool {
    // If that can't be determined, it may.
    dir.join(NEXT).try_exists().unwrap_or(true)
}

/// Removes the record of the QEMU that was to have the VM; if that fails, the log has the reason.
pub(crate) fn remove_next(dir: &Path) {
    let removed = gone_is_fine(fs::remove_file(dir.join(NEXT))).and_then(|()| state::flush(dir));
    if let Err(error) = removed {
        tracing::warn!(dir = %dir.display(), %error, "cannot remove the record of a next QEMU");
    }
}

/// Empties the seat of a QEMU that has ended; if that fails, the log has the reason.
pub(crate) fn clear_seat(dir: &Path, home: &Path) {
    let [first, second] = seats(dir);
    let cleared = if home == first {
        // The VM's records are there too.
        forget_settings(home).and_then(|()| {
            gone_is_fine(fs::remove_dir_all(home.join(VNC)))?;
            let mut files = QEMUS.iter().map(|file| home.join(file));
            files.try_for_each(|file| gone_is_fine(fs::remove_file(file)))
        })
    } else if home == second {
        gone_is_fine(fs::remove_dir_all(home))
    } else {
        // It is not the agent's.
        return;
    };
    if let Err(error) = cleared {
        tracing::warn!(home = %home.display(), %error, "cannot remove what a former QEMU left");
    }
}

/// Reads a file; none if it is too long.
fn limited(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let mut text = Vec::new();
    File::open(path)?.take(BYTES_MAX + 1).read_to_end(&mut text)?;
    Ok((text.len() as u64 <= BYTES_MAX).then_some(text))
}

/// Renames a record that can't be read, so that a new one can take its place and the
/// operator still finds the old one.
pub(crate) fn set_aside(dir: &Path) -> io::Result<()> {
    // Seconds would not do: the next one may be unreadable in the same second.
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let aside = dir.join(format!("record.unreadable-{nanos}"));
    match fs::rename(dir.join(FILE), aside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Whether nothing was ever started in a VM's directory: it lacks even a complete record,
/// which is written before everything else.
pub(crate) fn is_blank(dir: &Path) -> bool {
    let entries = fs::read_dir(dir);
    entries.is_ok_and(|mut all| {
        all.all(|entry| entry.is_ok_and(|entry| entry.file_name().to_str() == Some(NEW)))
    })
}

/// Removes a VM's directory; if that fails, the log has the reason.
pub(crate) fn remove_dir(dir: &Path) {
    if let Err(error) = remove_with(dir) {
        tracing::warn!(dir = %dir.display(), %error, "cannot remove a VM's directory");
    }
}

/// Removes a VM's directory, its record last: after a crash meanwhile, the record still
/// says what the rest is.
fn remove_with(dir: &Path) -> io::Result<()> {
    // An empty directory can be removed even if no more files can be opened.
    if fs::remove_dir(dir).is_ok() {
        return Ok(());
    }
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_name().to_str() == Some(FILE) {
            continue;
        }
        match entry.file_type()?.is_dir() {
            true => fs::remove_dir_all(entry.path())?,
            false => gone_is_fine(fs::remove_file(entry.path()))?,
        }
    }
    fs::remove_dir_all(dir)
}

/// Ignores that a file does not exist: an ending QEMU removes its own sockets.
fn gone_is_fine(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_also_without_a_version() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(Record::read(dir.path()), Err(RecordError::Missing(_))));
        Record::new(Standing::Here, None, 7, "10.0.2", "tenant").write(dir.path()).unwrap();
        let read = Record::read(dir.path()).unwrap();
        assert_eq!((read.version, read.standing, read.ram_bytes), (VERSION, Standing::Here, 7));
        let old = r#"{"standing":"arriving","machine":null,"ram_bytes":7,"qemu":"8.0"}"#;
        fs::write(dir.path().join(FILE), old).unwrap();
        assert_eq!(Record::read(dir.path()).unwrap().standing, Standing::Arriving);
    }

    #[test]
    fn the_next_qemu_has_a_record_and_a_seat_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        Record::new(Standing::Here, None, 7, "10.0.2", "").write(dir.path()).unwrap();
        assert!(!may_have_next(dir.path()));
        assert!(matches!(Record::read_next(dir.path()), Err(RecordError::Missing(_))));
        Record::new(Standing::Arriving, None, 7, "11.1.3", "").write_next(dir.path()).unwrap();
        assert!(may_have_next(dir.path()));
        assert_eq!(Record::read_next(dir.path()).unwrap().qemu, "11.1.3");
        assert_eq!(Record::read(dir.path()).unwrap().qemu, "10.0.2");
        remove_next(dir.path());
        remove_next(dir.path());
        assert!(!may_have_next(dir.path()));

        let [first, second] = seats(Path::new("/vms/web1"));
        let other = |home: &Path| other_seat(Path::new("/vms/web1"), home);
        assert_eq!([other(&first), other(&second)], [second, first.clone()]);
        assert_eq!(other(Path::new("/elsewhere")), first.join("2"));
    }

    #[test]
    fn a_seat_is_emptied_and_the_records_stay() {
        let vm = tempfile::tempdir().unwrap();
        let [first, second] = seats(vm.path());
        fs::create_dir(&second).unwrap();
        Record::starting().write(&first).unwrap();
        Record::starting().write_next(&first).unwrap();
        fs::create_dir(first.join("vnc")).unwrap();
        for at in ["qmp", "qemu.log", "vnc/7"].map(|file| first.join(file)) {
            fs::write(at, "").unwrap();
        }
        fs::write(second.join("qmp"), "").unwrap();
        // No seat of this VM.
        clear_seat(&second, &first);
        assert!(first.join("qmp").exists());
        clear_seat(vm.path(), &first);
        assert!(["qmp", "qemu.log", "vnc"].iter().all(|file| !first.join(file).exists()));
        assert!(Record::read(&first).is_ok() && may_have_next(&first));
        assert!(second.join("qmp").exists());
        for _ in 0..2 {
            clear_seat(vm.path(), &second);
            assert!(!second.exists());
        }
    }

    #[test]
    fn records_that_cannot_be_used_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        let read = |text: &[u8]| {
            fs::write(&path, text).unwrap();
            Record::read(dir.path()).unwrap_err()
        };
        for text in [&b""[..], b"{", b"[]", b"\xff\xfe", b"{\"version\":1}"] {
            assert!(matches!(read(text), RecordError::Damaged { .. }), "{text:?}");
        }
        // Whatever else a newer one has or lacks.
        let newer = read(br#"{"version":2,"standing":"resting"}"#);
        assert!(matches!(newer, RecordError::Newer { version: 2, .. }));
        let said = newer.to_string();
        assert!(said.contains("record.json") && said.contains("newer droveway"), "{said}");
        let long = vec![b' '; usize::try_from(BYTES_MAX).unwrap() + 1];
        assert!(matches!(read(&long), RecordError::TooLong(_)));
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        let directory = Record::read(dir.path()).unwrap_err();
        assert!(matches!(directory, RecordError::Unreadable { .. }), "{directory}");
        set_aside(dir.path()).unwrap();
        Record::starting().write(dir.path()).unwrap();
        Record::read(dir.path()).unwrap();
    }

    #[test]
    fn records_set_aside_within_a_moment_are_all_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE);
        fs::write(&path, "{").unwrap();
        set_aside(dir.path()).unwrap();
        fs::create_dir(&path).unwrap();
        set_aside(dir.path()).unwrap();
        set_aside(dir.path()).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_directory_is_blank_until_its_first_record() {
        let dir = tempfile::tempdir().unwrap();
        let vm = dir.path().join("web1");
        assert!(!is_blank(&vm));
        fs::create_dir(&vm).unwrap();
        assert!(is_blank(&vm));
        fs::write(vm.join(NEW), "{").unwrap();
        assert!(is_blank(&vm));
        fs::write(vm.join("qemu.log"), "").unwrap();
        assert!(!is_blank(&vm));
        fs::create_dir(vm.join(FILE)).unwrap();
        remove_with(&vm).unwrap();
        assert!(!vm.exists());
        remove_with(&vm).unwrap();
    }
}
