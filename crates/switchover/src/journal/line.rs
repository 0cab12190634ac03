//! A journal's lines: a checksum, a space, JSON, a line feed. Zeros follow the last line.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::entry::{Keeps, Opened};
use crate::migration_id::MigrationId;

/// Our journals are never longer.
pub(super) const FILE_BYTES_MAX: u64 = 1 << 20;
/// Hex digits of the checksum: half of a BLAKE3 hash is plenty against faults of disks.
const SUM_DIGITS: usize = 32;

#[derive(Debug, Serialize, Deserialize)]
struct Line {
    n: u32,
    at_unix_ms: u64,
    boot: String,
    migration: MigrationId,
    #[serde(skip_serializing_if = "Option::is_none")]
    opened: Option<Opened>,
    #[serde(skip_serializing_if = "Option::is_none")]
    record: Option<Value>,
}

/// The content of a file.
#[derive(Debug)]
pub(crate) struct Contents<R> {
    pub(crate) boot: String,
    pub(crate) opened: Opened,
    pub(crate) records: Vec<R>,
    /// The offset of the next record.
    pub(crate) end: usize,
    pub(crate) torn: bool,
}

/// The damage of a file.
#[derive(Debug)]
pub(crate) struct Damage {
    pub(crate) vm: Option<String>,
    pub(crate) at: usize,
    pub(crate) why: &'static str,
}

/// The first line of a journal.
pub(super) fn first(boot: &str, opened: &Opened) -> serde_json::Result<Vec<u8>> {
    write(&Line {
        n: 0,
        at_unix_ms: now_unix_ms(),
        boot: boot.to_owned(),
        migration: opened.migration.clone(),
        opened: Some(opened.clone()),
        record: None,
    })
}

/// The line of the `n`th record, counted from 1.
pub(super) fn nth<R: Keeps>(
    n: u32,
    boot: &str,
    migration: &MigrationId,
    record: &R,
) -> serde_json::Result<Vec<u8>> {
    write(&Line {
        n,
        at_unix_ms: now_unix_ms(),
        boot: boot.to_owned(),
        migration: migration.clone(),
        opened: None,
        record: Some(serde_json::to_value(record)?),
    })
}

fn write(line: &Line) -> serde_json::Result<Vec<u8>> {
    Ok(sealed(&serde_json::to_vec(line)?))
}

/// Makes JSON a line.
pub(crate) fn sealed(json: &[u8]) -> Vec<u8> {
    let mut bytes = sum(json).into_bytes();
    bytes.push(b' ');
    bytes.extend_from_slice(json);
    bytes.push(b'\n');
    bytes
}

/// Reads a whole file. The end of the last record may be missing, but nothing else.
pub(crate) fn read<R: Keeps>(bytes: &[u8]) -> Result<Contents<R>, Damage> {
    let damage =
        |vm: Option<&Opened>, at, why| Damage { vm: vm.map(|opened| opened.vm.clone()), at, why };
    let (line, mut end) = line_at(bytes).ok_or(damage(None, 0, "its first line can't be read"))?;
    let (Line { n: 0, boot, .. }, Some(opened)) = (&line, &line.opened) else {
        return Err(damage(None, 0, "its first line is missing"));
    };
    let mut records = Vec::new();
    let mut torn = false;
    loop {
        let rest = bytes.get(end..).unwrap_or_default();
        if rest.iter().all(|byte| *byte == 0) {
            break;
        }
        let Some((next, length)) = line_at(rest) else {
            if holds_a_line(rest) {
                return Err(damage(Some(opened), end, "and yet there are records behind it"));
            }
            torn = true;
            break;
        };
        if next.migration != opened.migration || next.n as usize != records.len() + 1 {
            return Err(damage(Some(opened), end, "a record is missing, or is another file's"));
        }
        let record = next.record.and_then(|record| serde_json::from_value(record).ok());
        let unknown = "this version of the agent does not know that record";
        records.push(record.ok_or(damage(Some(opened), end, unknown))?);
        end += length;
    }
    let (boot, opened) = (boot.clone(), opened.clone());
    Ok(Contents { boot, opened, records, end, torn })
}

/// The first line of a file whose records can't be read, as if the first record were cut short; none
/// if that line can't be read either. It was flushed.
pub(super) fn without_records<R>(bytes: &[u8]) -> Option<Contents<R>> {
    let (line, end) = line_at(bytes)?;
    let (Line { n: 0, boot, .. }, Some(opened)) = (&line, &line.opened) else { return None };
    let (boot, opened, records) = (boot.clone(), opened.clone(), Vec::new());
    Some(Contents { boot, opened, records, end, torn: true })
}

/// The line at the start of `bytes`, and its length.
fn line_at(bytes: &[u8]) -> Option<(Line, usize)> {
    let length = bytes.iter().position(|byte| *byte == b'\n')?;
    let (digits, json) = bytes.get(..length)?.split_at_checked(SUM_DIGITS)?;
    let json = json.strip_prefix(b" ")?;
    if digits != sum(json).as_bytes() {
        return None;
    }
    Some((serde_json::from_slice(json).ok()?, length + 1))
}

/// Whether a line starts anywhere in `bytes`.
fn holds_a_line(bytes: &[u8]) -> bool {
    let begins = bytes.windows(SUM_DIGITS + 2).enumerate().filter(|(_, window)| {
        let (digits, json) = window.split_at(SUM_DIGITS);
        json == b" {" && digits.iter().all(u8::is_ascii_hexdigit)
    });
    begins.into_iter().any(|(at, _)| bytes.get(at..).and_then(line_at).is_some())
}

fn sum(json: &[u8]) -> String {
    let mut digits = blake3::hash(json).to_hex().to_string();
    digits.truncate(SUM_DIGITS);
    digits
}

/// For humans only: nothing depends on it.
fn now_unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
