//! Domains of emulated hosts, and what their guests report.

use crate::error::{LabError, Result};

/// How a domain is virtualized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Virtualization {
    /// It manages its page tables with the hypervisor.
    Pv,
    /// It has virtual hardware, and no emulated devices.
    Pvh,
}

/// A domain whose guest fills memory, rewrites and checks it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DomainSpec {
    /// Its name.
    pub name: String,
    /// How it is virtualized.
    pub virtualization: Virtualization,
    /// Its memory.
    pub memory_mib: u32,
    /// The part that its guest fills.
    pub load_mib: u32,
    /// How many pages of that its guest rewrites a second.
    pub pages_per_s: u32,
}

impl DomainSpec {
    /// The file for `xl create`.
    pub(super) fn file(&self) -> String {
        let Self { name, memory_mib, load_mib, pages_per_s, virtualization } = self;
        let kind = match virtualization {
            Virtualization::Pv => "pv",
            Virtualization::Pvh => "pvh",
        };
        format!(
            "name = \"{name}\"\ntype = \"{kind}\"\nkernel = \"/boot/vmlinuz\"\n\
             ramdisk = \"/boot/guest\"\nmemory = {memory_mib}\nmaxmem = {memory_mib}\nvcpus = 1\n\
             extra = \"console=hvc0 quiet mitigations=off load={load_mib},{pages_per_s}\"\n\
             on_crash = \"preserve\"\non_poweroff = \"destroy\"\non_reboot = \"destroy\"\n"
        )
    }
}

/// What a guest prints each second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Beat {
    /// Seconds since its start.
    pub second: u64,
    /// Pages that it has written.
    pub written: u64,
    /// How often it has checked all pages.
    pub checks: u64,
    /// Pages that were not as it wrote them.
    pub wrong: u64,
    /// The longest time in which it did not run, of those that ended in this second.
    pub gap_ms: u64,
}

impl Beat {
    /// A beat, if the line is one.
    fn parse(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let ["guest", second, "written", written, "checks", checks, "wrong", wrong, "gap", gap] =
            words[..]
        else {
            return None;
        };
        let number = |word: &str| word.parse().ok();
        Some(Self {
            second: number(second)?,
            written: number(written)?,
            checks: number(checks)?,
            wrong: number(wrong)?,
            gap_ms: number(gap)?,
        })
    }

    /// All beats of a console, in order, also of one to which a domain has come back.
    pub(super) fn all(console: &str) -> Vec<Self> {
        let mut beats: Vec<Self> = console.lines().filter_map(Self::parse).collect();
        beats.sort_unstable();
        beats.dedup();
        beats
    }
}

/// The first line about a wrong page, as an error.
pub(super) fn right(console: &str) -> Result<()> {
    let wrong = console.lines().find(|line| line.starts_with("guest page "));
    let beats = Beat::all(console);
    let is_wrong = beats.last().is_some_and(|beat| beat.wrong > 0);
    if wrong.is_none() && !is_wrong {
        return Ok(());
    }
    let text = wrong.map_or_else(|| format!("{:?}", beats.last()), str::to_owned);
    Err(LabError::Text { what: "memory of a domain", text })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_console_has_beats_among_other_lines() {
        let later = "guest 8 written 1600 checks 1 wrong 0 gap 16";
        let console = format!("guest filled 7 pages\n{later}\r\nguest 7 written 5\n{later}\n");
        let beat = Beat { second: 8, written: 1600, checks: 1, wrong: 0, gap_ms: 16 };
        assert_eq!(Beat::all(&console), [beat]);
        assert!(right(&console).is_ok());
        assert!(right("guest page 7 is not version 3").is_err());
        assert!(right("guest 9 written 1 checks 2 wrong 3 gap 5").is_err());
    }

    #[test]
    fn the_command_line_of_a_domain_has_its_load() {
        let spec = DomainSpec {
            name: "pv1".to_owned(),
            virtualization: Virtualization::Pv,
            memory_mib: 96,
            load_mib: 32,
            pages_per_s: 200,
        };
        let file = spec.file();
        assert!(file.contains("type = \"pv\"\n") && file.contains(" load=32,200\"\n"), "{file}");
    }
}
