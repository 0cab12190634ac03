//! The files of a cluster in one directory: the CA, a certificate and an archive for each host, and
//! the peers file.
//!
//! Existing files stay, so that a second run changes nothing and a later run adds hosts.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use agent::config::{PeerEntry, file};
use client::Problem;
use identity::{
    Authority, AuthorityError, CertificateRequest, Files, Readers, Role, Subject, Writing,
};

use super::hosts::TypedHost;
use super::{agent_file, archive, certificates, peers_file};
use crate::commands::ca::{CA_DAYS, DAYS};

/// The cluster to set up; everything is checked before anything is written.
pub(crate) struct Cluster {
    dir: PathBuf,
    operator: Subject,
    qemu_user: Option<String>,
    old_peers: String,
    peers: String,
    hosts: Vec<PeerEntry>,
}

/// What was created and what existed, one line each.
#[derive(Default)]
pub(crate) struct Done {
    lines: Vec<String>,
}

impl Done {
    fn made(&mut self, what: &str) {
        self.lines.push(format!("made  {what}"));
    }

    fn kept(&mut self, what: &str) {
        self.lines.push(format!("kept  {what}"));
    }

    /// The lines as text.
    pub(crate) fn lines(&self) -> String {
        self.lines.iter().map(|line| format!("{line}\n")).collect()
    }
}

impl Cluster {
    /// The cluster in the directory, with the typed hosts added.
    pub(crate) fn understood(
        dir: PathBuf,
        operator: &str,
        qemu_user: Option<String>,
        old_peers: &str,
        typed: &[TypedHost],
    ) -> Result<Self, Problem> {
        let operator = Subject::client(Role::Admin, operator).map_err(AuthorityError::from)?;
        let (peers, hosts) = peers_file::extended(&peers_file::path(&dir), old_peers, typed)?;
        let old_peers = old_peers.to_owned();
        let cluster = Self { dir, operator, qemu_user, old_peers, peers, hosts };
        if let Some(authority) = cluster.authority()? {
            for subject in cluster.subjects()? {
                certificates::find(&cluster.dir, &authority.place_for(&subject), &subject)?;
            }
        }
        Ok(cluster)
    }

    /// The directory.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Its hosts, in the order of the peers file.
    pub(crate) fn hosts(&self) -> &[PeerEntry] {
        &self.hosts
    }

    /// The user that QEMU is to run as on all hosts; none: the agent's.
    pub(crate) fn qemu_user(&self) -> Option<&str> {
        self.qemu_user.as_deref()
    }

    /// The archive of a host.
    pub(crate) fn archive(&self, host: &str) -> PathBuf {
        self.dir.join(format!("{host}.tar"))
    }

    /// Creates the files that do not exist.
    pub(crate) fn make(&self) -> Result<Done, Problem> {
        let mut done = Done::default();
        let authority = self.make_authority(&mut done)?;
        for subject in self.subjects()? {
            self.make_certificate(&authority, subject, &mut done)?;
        }
        self.make_peers(&mut done)?;
        for host in &self.hosts {
            self.make_archive(&authority, host, &mut done)?;
        }
        Ok(done)
    }

    fn authority(&self) -> Result<Option<Authority>, Problem> {
        match Authority::open(&self.dir) {
            Ok(authority) => Ok(Some(authority)),
            Err(AuthorityError::None { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn make_authority(&self, done: &mut Done) -> Result<Authority, Problem> {
        let what = |validity| format!("a CA, {validity}: {}", self.dir.join("ca.crt").display());
        if let Some(authority) = self.authority()? {
            done.kept(&what(authority.validity()));
            return Ok(authority);
        }
        done.made(&what(Authority::create(&self.dir, CA_DAYS)?));
        Ok(Authority::open(&self.dir)?)
    }

    fn subjects(&self) -> Result<Vec<Subject>, Problem> {
        let hosts = self.hosts.iter().map(|host| Subject::host(&host.name));
        let subjects: Result<Vec<_>, _> = hosts.chain([Ok(self.operator.clone())]).collect();
        Ok(subjects.map_err(AuthorityError::from)?)
    }

    fn make_certificate(
        &self,
        authority: &Authority,
        subject: Subject,
        done: &mut Done,
    ) -> Result<(), Problem> {
        let out = authority.place_for(&subject);
        let place = format!("a certificate for {subject}: {}", out.display());
        if let Some(found) = certificates::find(&self.dir, &out, &subject)? {
            done.kept(&place);
            done.lines.extend(found.warning.map(|warning| format!("      {warning}")));
            return Ok(());
        }
        authority.issue(&CertificateRequest { subject, days: DAYS, out, replace: false })?;
        done.made(&place);
        Ok(())
    }

    fn make_peers(&self, done: &mut Done) -> Result<(), Problem> {
        let path = peers_file::path(&self.dir);
        let what = format!("the peers file: {}", path.display());
        if self.peers == self.old_peers {
            done.kept(&what);
            return Ok(());
        }
        replace(&path, &self.peers, Readers::Everybody)?;
        done.made(&what);
        Ok(())
    }

    fn make_archive(
        &self,
        authority: &Authority,
        host: &PeerEntry,
        done: &mut Done,
    ) -> Result<(), Problem> {
        let subject = Subject::host(&host.name).map_err(AuthorityError::from)?;
        let place = authority.place_for(&subject);
        let bytes =
            archive::pack(written_s(&Files::within(&place).certificate)?, |path| {
                match path.strip_prefix("tls/") {
                    Some(name) => Ok(file::read(&place.join(name))?),
                    None if path == archive::PEERS => Ok(self.peers.clone()),
                    None => Ok(agent_file::of(host, self.qemu_user.as_deref())),
                }
            })?;
        let path = self.archive(&host.name);
        let what = format!("the files of {}: {}", host.name, path.display());
        if fs::read(&path).is_ok_and(|there| there == bytes) {
            done.kept(&what);
            return Ok(());
        }
        replace(&path, &bytes, Readers::Owner)?;
        done.made(&what);
        Ok(())
    }
}

fn replace(path: &Path, bytes: impl AsRef<[u8]>, readers: Readers) -> Result<(), Problem> {
    let mut writing = Writing::over();
    writing.add(path, bytes, readers)?;
    Ok(writing.finish()?)
}

fn written_s(path: &Path) -> Result<u64, Problem> {
    let reading = |source| Problem::Local { what: format!("reading {}", path.display()), source };
    let modified = fs::metadata(path).and_then(|there| there.modified()).map_err(reading)?;
    Ok(modified.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()))
}
