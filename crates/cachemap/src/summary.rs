//! The end of an answer.

use std::fmt;

use crate::Fault;
use crate::code::{Cursor, put};

/// The most reasons in a summary.
const REASONS_MAX: usize = 32;

/// Why something is not in the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    /// Pages that are newer than their disk.
    Dirty,
    /// Pages that are being moved, read, or freed.
    Unsettled,
    /// Pages without a block of their own: holes, or not yet allocated.
    NoBlock,
    /// Pages whose blocks are in several places.
    Scattered,
    /// Files that are encrypted, compressed, in the journal, or on memory.
    FileKind,
    /// Files that could not be opened, mapped or looked at.
    Unreadable,
    /// Files that the budget did not last for.
    Budget,
    /// File systems that are not ext4, xfs or btrfs on a virtio disk.
    FileSystem,
    /// Cached pages that it did not come to.
    Unseen,
    /// File systems on a mapped device (LVM, dm-crypt) that is not linear, or on several devices
    /// (btrfs).
    Mapping,
    /// A reason that only a newer helper knows.
    Other(u8),
}

impl Reason {
    fn number(self) -> u8 {
        match self {
            Self::Dirty => 1,
            Self::Unsettled => 2,
            Self::NoBlock => 3,
            Self::Scattered => 4,
            Self::FileKind => 5,
            Self::Unreadable => 6,
            Self::Budget => 7,
            Self::FileSystem => 8,
            Self::Unseen => 9,
            Self::Mapping => 10,
            Self::Other(number) => number,
        }
    }

    fn from_number(number: u8) -> Self {
        match number {
            1 => Self::Dirty,
            2 => Self::Unsettled,
            3 => Self::NoBlock,
            4 => Self::Scattered,
            5 => Self::FileKind,
            6 => Self::Unreadable,
            7 => Self::Budget,
            8 => Self::FileSystem,
            9 => Self::Unseen,
            10 => Self::Mapping,
            other => Self::Other(other),
        }
    }
}

/// What was counted and why it was left out, to follow a number.
impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dirty => f.write_str("pages newer than the disk"),
            Self::Unsettled => f.write_str("pages in motion"),
            Self::NoBlock => f.write_str("pages without a block on disk"),
            Self::Scattered => f.write_str("pages in several pieces on disk"),
            Self::FileKind => f.write_str("files of an unsuitable kind"),
            Self::Unreadable => f.write_str("files that can't be inspected"),
            Self::Budget => f.write_str("files beyond the budget"),
            Self::FileSystem => f.write_str("file systems not on a virtio disk"),
            Self::Unseen => f.write_str("pages that were not reached"),
            Self::Mapping => {
                f.write_str("file systems on a mapped device that is not linear, or on several")
            }
            Self::Other(number) => write!(f, "for the unknown reason {number}"),
        }
    }
}

/// How much was left out for one reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeftOut {
    /// The reason, which also says what is counted.
    pub reason: Reason,
    /// How many.
    pub count: u64,
}

/// Why the helper stopped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum End {
    /// It had checked everything.
    #[default]
    Complete,
    /// Its time was up.
    Time,
    /// It had as many runs as the query allows.
    Runs,
    /// It may not make the kernel cache more files.
    Memory,
}

impl End {
    fn number(self) -> u8 {
        match self {
            Self::Complete => 0,
            Self::Time => 1,
            Self::Runs => 2,
            Self::Memory => 3,
        }
    }

    fn from_number(number: u8) -> Self {
        match number {
            0 => Self::Complete,
            2 => Self::Runs,
            3 => Self::Memory,
            // Of an unknown reason, only this is known: the map is not complete.
            _ => Self::Time,
        }
    }
}

/// A helper's summary of its answer. The numbers are its own and unverified.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Why it stopped.
    pub end: End,
    /// Whether it had to open files whose names the kernel had forgotten.
    pub full_walk: bool,
    /// Files with pages in the cache.
    pub files: u64,
    /// Cached pages of these files.
    pub cached_pages: u64,
    /// Cached pages that are in the map.
    pub pages: u64,
    /// Runs in the map.
    pub runs: u64,
    /// The time from the query to the summary.
    pub elapsed_ms: u64,
    /// The guest's CPU time.
    pub cpu_ms: u64,
    /// What is not in the map.
    pub left_out: Vec<LeftOut>,
}

impl Summary {
    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&[self.end.number(), u8::from(self.full_walk)]);
        for number in self.numbers() {
            put(number, out);
        }
        let left_out = self.left_out.iter().take(REASONS_MAX);
        put(left_out.len() as u64, out);
        for LeftOut { reason, count } in left_out {
            out.push(reason.number());
            put(*count, out);
        }
    }

    fn numbers(&self) -> [u64; 6] {
        [self.files, self.cached_pages, self.pages, self.runs, self.elapsed_ms, self.cpu_ms]
    }

    pub(crate) fn read(content: &[u8]) -> Result<Self, Fault> {
        let mut cursor = Cursor(content);
        let end = End::from_number(cursor.byte()?);
        let full_walk = cursor.byte()? & 1 == 1;
        let mut number = || cursor.number();
        let mut summary = Self {
            end,
            full_walk,
            files: number()?,
            cached_pages: number()?,
            pages: number()?,
            runs: number()?,
            elapsed_ms: number()?,
            cpu_ms: number()?,
            left_out: Vec::new(),
        };
        let reasons = cursor.number()?;
        if reasons > REASONS_MAX as u64 {
            return Err(Fault::TooMuch);
        }
        for _ in 0..reasons {
            let reason = Reason::from_number(cursor.byte()?);
            summary.left_out.push(LeftOut { reason, count: cursor.number()? });
        }
        cursor.end()?;
        Ok(summary)
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { files, cached_pages, pages, runs, elapsed_ms, cpu_ms, .. } = self;
        write!(
            f,
            "{pages} of {cached_pages} cached pages of {files} files are on disk, in {runs} runs"
        )?;
        write!(f, "; {elapsed_ms} ms, {cpu_ms} ms of CPU")?;
        if self.full_walk {
            f.write_str("; all files were opened")?;
        }
        match self.end {
            End::Complete => {}
            End::Time => f.write_str("; ended by its time")?,
            End::Runs => f.write_str("; ended by the number of runs")?,
            End::Memory => f.write_str("; ended by its memory")?,
        }
        for LeftOut { reason, count } in &self.left_out {
            write!(f, "\n  left out: {count} {reason}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summaries_come_back() {
        let summary = Summary {
            end: End::Runs,
            full_walk: true,
            files: 1,
            cached_pages: 2,
            pages: u64::MAX,
            runs: 4,
            elapsed_ms: 5,
            cpu_ms: 6,
            left_out: (0..=u8::MAX)
                .take(20)
                .map(|number| LeftOut { reason: Reason::from_number(number), count: 7 })
                .collect(),
        };
        let mut bytes = Vec::new();
        summary.write(&mut bytes);
        assert_eq!(Summary::read(&bytes), Ok(summary));
        for end in 0..bytes.len() {
            assert!(Summary::read(&bytes[..end]).is_err(), "{end}");
        }
        let many = [&[0; 8][..], &[33]].concat();
        assert_eq!(Summary::read(&many), Err(Fault::TooMuch));
    }
}
