//! Where domains run, and when they stop, in one file of both hosts.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// What xl appends to a domain's name while it moves.
pub(super) const INCOMING: &str = "--incoming";
pub(super) const AWAY: &str = "--migratedaway";

const RUNS: &str = "runs";
const STOPS: &str = "stops";

/// A domain's name as its owner knows it.
pub(super) fn own_name(name: &str) -> &str {
    let name = name.strip_suffix(INCOMING).unwrap_or(name);
    name.strip_suffix(AWAY).unwrap_or(name)
}

/// The file.
#[derive(Clone, Debug)]
pub struct Life(PathBuf);

impl Life {
    /// The file at this path.
    #[must_use]
    pub fn at(path: &Path) -> Self {
        Self(path.to_owned())
    }

    /// The file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    pub(super) fn note_running(&self, host: &str, domain: &str) -> io::Result<()> {
        self.note(host, RUNS, domain)
    }

    pub(super) fn note_stopped(&self, host: &str, domain: &str) -> io::Result<()> {
        self.note(host, STOPS, domain)
    }

    /// One write at the file's end: those of several processes do not mix.
    fn note(&self, host: &str, what: &str, domain: &str) -> io::Result<()> {
        let line = format!("{host} {what} {}\n", own_name(domain));
        let mut file = File::options().create(true).append(true).open(&self.0)?;
        file.write_all(line.as_bytes())
    }

    /// The hosts where a domain runs now.
    ///
    /// # Errors
    /// If it ran at two hosts at some time; with all that happened to it.
    ///
    /// # Panics
    /// If the file can't be read.
    pub fn hosts_of(&self, domain: &str) -> Result<Vec<String>, String> {
        let text = fs::read_to_string(&self.0).unwrap();
        let mut hosts: Vec<String> = Vec::new();
        for line in text.lines() {
            let [host, what, name] = line.splitn(3, ' ').collect::<Vec<_>>()[..] else {
                panic!("{line:?} is not a line of fake-xl");
            };
            if name != domain {
                continue;
            }
            hosts.retain(|it| it != host);
            if what == RUNS {
                hosts.push(host.to_owned());
            }
            if hosts.len() > 1 {
                return Err(text);
            }
        }
        Ok(hosts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_that_ran_twice_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let life = Life::at(&dir.path().join("life"));
        life.note_running("a", "web1").unwrap();
        life.note_running("b", "web2").unwrap();
        assert_eq!(life.hosts_of("web1"), Ok(vec!["a".to_owned()]));
        life.note_stopped("a", "web1--migratedaway").unwrap();
        assert_eq!(life.hosts_of("web1"), Ok(vec![]));
        life.note_running("b", "web1--incoming").unwrap();
        assert_eq!(life.hosts_of("web1"), Ok(vec!["b".to_owned()]));
        life.note_running("a", "web1").unwrap();
        life.note_stopped("a", "web1").unwrap();
        assert!(life.hosts_of("web1").is_err());
    }
}
