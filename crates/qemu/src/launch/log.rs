//! What QEMU writes to its stdout and stderr: its messages, and with `-nographic` or
//! `-serial stdio` whatever its guest writes.
//!
//! QEMU writes to the file itself, without a process between them, since it outlives the agent.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::secrets;

/// Most bytes of QEMU's output that are shown.
const TAIL_BYTES: u64 = 4096;
/// A log that is longer is emptied: room for a boot's console, and for hundreds of VMs' logs on a
/// small disk.
pub const LOG_BYTES_MAX: u64 = 1 << 20;

/// The end of what QEMU wrote to its log after byte `from`, if it wrote anything, without secrets:
/// QEMU's messages repeat options, and this is reported to others.
#[must_use]
pub fn log_tail(path: &Path, from: u64) -> Option<String> {
    let mut file = File::open(path).ok()?;
    let end = file.metadata().ok()?.len();
    // It was emptied since, because it had grown too large.
    let from = if from > end { 0 } else { from };
    let start = from.max(end.saturating_sub(TAIL_BYTES));
    file.seek(SeekFrom::Start(start)).ok()?;
    let mut bytes = Vec::new();
    file.take(TAIL_BYTES).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let mut text = text.trim();
    if start > from {
        // A line that is cut may start within a secret.
        text = text.split_once('\n').map_or(text, |(_, lines)| lines);
    }
    (!text.is_empty()).then(|| secrets::hidden_in_text(text))
}

/// Empties a log that is longer than [`LOG_BYTES_MAX`] into a file next to it, `qemu.log.1`, of
/// which the newest part is kept, and returns whether it did. QEMU continues at the log's new end.
///
/// What QEMU writes in the moment between the copy and the cut is lost.
///
/// # Errors
/// If the log can't be read or emptied, or its content can't be written to the other file. In the
/// latter case it is empty anyway: a lack of room may be the cause.
pub fn bound_log(path: &Path) -> io::Result<bool> {
    let mut file = match OpenOptions::new().read(true).write(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        file => file?,
    };
    let length = file.metadata()?.len();
    if length <= LOG_BYTES_MAX {
        return Ok(false);
    }
    file.seek(SeekFrom::Start(length - LOG_BYTES_MAX))?;
    let mut newest = Vec::new();
    // With what was written meanwhile, which has no end if QEMU writes faster than this reads.
    (&file).take(2 * LOG_BYTES_MAX).read_to_end(&mut newest)?;
    file.set_len(0)?;
    let before = before(path);
    let mut options = OpenOptions::new();
    options.create(true).truncate(true).write(true).mode(0o600);
    options.open(before)?.write_all(&newest)?;
    Ok(true)
}

/// The file that has what was in the log before.
fn before(log: &Path) -> PathBuf {
    let mut path = log.as_os_str().to_owned();
    path.push(".1");
    path.into()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    use std::thread;

    use super::*;

    #[test]
    fn the_end_of_a_long_log_is_shown() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        fs::write(&log, format!("{}the end\n", "x".repeat(10_000))).unwrap();
        assert!(log_tail(&log, 0).unwrap().ends_with("xthe end"));
        assert_eq!(log_tail(&log, 10_004).as_deref(), Some("end"));
        assert_eq!(log_tail(&log, 10_008), None);
        assert_eq!(log_tail(&log, 20_000), log_tail(&log, 0), "it was emptied since");
    }

    #[test]
    fn secrets_in_a_log_are_not_shown() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        fs::write(&log, "qemu: -object secret,id=s,data=hunter2: no\n").unwrap();
        let tail = log_tail(&log, 0).unwrap();
        assert_eq!(tail, "qemu: -object secret,id=s,data=(hidden) no");
        let long = "7".repeat(5000);
        fs::write(&log, format!("qemu: -object secret,id=s,data={long}: no\nthe end\n")).unwrap();
        assert_eq!(log_tail(&log, 0).as_deref(), Some("the end"));
    }

    /// The numbers of a log's whole lines.
    fn numbers(text: &str) -> Vec<u64> {
        let (whole, _) = text.rsplit_once('\n').unwrap();
        whole.lines().map(|line| line.trim_start_matches('.').parse().unwrap()).collect()
    }

    #[test]
    fn a_log_that_is_written_to_all_the_time_stays_bounded_and_keeps_the_newest() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qemu.log");
        let ends = AtomicBool::new(false);
        let mut appended = OpenOptions::new().create(true).append(true).open(&path).unwrap();
        let mut line = |number: u64| {
            appended.write_all(format!("{}{number}\n", ".".repeat(200)).as_bytes()).unwrap();
        };
        let (cuts, written) = thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut written = 0;
                while !ends.load(Relaxed) {
                    written += 1;
                    line(written);
                }
                written
            });
            let mut cuts = 0;
            while cuts < 20 {
                cuts += u32::from(bound_log(&path).unwrap());
            }
            ends.store(true, Relaxed);
            (cuts, writer.join().unwrap())
        });
        // A line has less than 220 bytes, so that many were written.
        assert!(written * 220 > u64::from(cuts) * LOG_BYTES_MAX, "{written} lines");
        line(written + 1);
        bound_log(&path).unwrap();
        let length = |path: &Path| fs::metadata(path).unwrap().len();
        assert!(length(&path) <= LOG_BYTES_MAX && length(&before(&path)) <= 2 * LOG_BYTES_MAX);
        line(written + 2);
        let text = fs::read_to_string(before(&path)).unwrap();
        // Its first line may be cut.
        let mut kept = numbers(text.split_once('\n').unwrap().1);
        kept.extend(numbers(&fs::read_to_string(&path).unwrap()));
        assert!(kept.is_sorted_by(|one, next| one < next), "whole lines, in their order");
        assert_eq!(kept.last_chunk(), Some(&[written + 1, written + 2]));
        let mode = fs::metadata(before(&path)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn a_log_within_its_bound_stays_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qemu.log");
        assert!(!bound_log(&path).unwrap() && !path.exists());
        fs::write(&path, vec![b'x'; usize::try_from(LOG_BYTES_MAX).unwrap()]).unwrap();
        assert!(!bound_log(&path).unwrap());
        assert_eq!(fs::metadata(&path).unwrap().len(), LOG_BYTES_MAX);
        assert!(!before(&path).exists());
    }

    /// As where the file system is full.
    #[test]
    fn a_log_that_cannot_be_kept_is_emptied_all_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qemu.log");
        fs::create_dir(before(&path)).unwrap();
        fs::write(&path, vec![b'x'; usize::try_from(LOG_BYTES_MAX).unwrap() + 1]).unwrap();
        bound_log(&path).unwrap_err();
        assert_eq!(fs::metadata(&path).unwrap().len(), 0);
    }
}
