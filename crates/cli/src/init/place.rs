//! Puts a host's files in place.
//!
//! Existing files stay as they are, except that the agent's file gets settings that it lacks, and
//! the peers file gets hosts at its end. Any other difference is an error before the first file is
//! changed.

use std::fs::{self, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use agent::config::parse_peers;
use client::Problem;
use identity::{FileError, Readers, Writing, make_dir};

use super::agent_file;
use super::archive::{AGENT, Archive, DIR, HostFile, PEERS, TLS};
use crate::libvirt::write;

/// A host, and the change of each of its files.
pub(crate) struct Placed {
    /// The host.
    pub(crate) name: String,
    /// Another host, to test the connection to.
    pub(crate) other: Option<String>,
    changes: Vec<(PathBuf, Change)>,
}

#[derive(Debug, PartialEq, Eq)]
enum Change {
    Written,
    Kept,
    /// It has everything that the archive has, and more.
    Newer,
    /// A key that others could read is closed to them.
    Closed,
    /// Something was added, as described.
    Added(String),
}

struct Step<'a> {
    file: &'a HostFile,
    path: PathBuf,
    change: Change,
    /// Its new contents.
    text: String,
}

/// Why a file, and so all files, are left unchanged.
enum Conflict {
    /// Its contents differ.
    Differs(PathBuf),
    Other(Problem),
}

impl Placed {
    /// The changes as text.
    pub(crate) fn lines(&self) -> String {
        let line = |(path, change): &(PathBuf, Change)| {
            let path = path.display();
            match change {
                Change::Written => format!("written  {path}\n"),
                Change::Kept => format!("kept     {path}\n"),
                Change::Newer => {
                    format!("kept     {path}, which has more hosts than the archive\n")
                }
                Change::Added(what) => format!("changed  {path}: added {what}\n"),
                Change::Closed => format!(
                    "changed  {path}: every user of this host could read it; if one may have, \
                     issue a new certificate\n"
                ),
            }
        };
        self.changes.iter().map(line).collect()
    }

    /// Whether the host had no certificate before.
    pub(crate) fn is_first(&self) -> bool {
        let is_first = |(path, change): &(PathBuf, Change)| {
            *change == Change::Written && path.parent().is_some_and(|dir| dir.ends_with(TLS))
        };
        self.changes.iter().any(is_first)
    }

    /// Whether a running agent has to be restarted to use the changes.
    pub(crate) fn needs_restart(&self) -> bool {
        let matters = |(path, change): &(PathBuf, Change)| match change {
            Change::Written => true,
            Change::Added(_) => !path.ends_with(PEERS),
            Change::Kept | Change::Newer | Change::Closed => false,
        };
        self.changes.iter().any(matters)
    }

    /// Whether hosts were added to the peers file, which a running agent rereads.
    pub(crate) fn has_new_peers(&self) -> bool {
        let has_new = |(path, change): &(PathBuf, Change)| {
            matches!(change, Change::Added(_)) && path.ends_with(PEERS)
        };
        self.changes.iter().any(has_new)
    }
}

/// Puts the files in place below `root`; `from` is the archive's path.
pub(crate) fn place(archive: &Archive, from: &Path, root: &Path) -> Result<Placed, Problem> {
    if !root.is_dir() {
        return Err(Problem::Typed(format!(
            "{} is no directory: --root is the root directory of the host",
            root.display()
        )));
    }
    let dir = root.join(DIR);
    let steps = planned(archive, from, &dir)?;
    carry_out(&steps, &dir).map_err(with_advice)?;
    let peers = archive.files.iter().find(|file| file.path == PEERS);
    let hosts = parse_peers(from, peers.map_or("", |file| &file.text))?;
    let other = hosts.into_iter().map(|host| host.name).find(|name| *name != archive.name);
    let changes = steps.into_iter().map(|step| (step.path, step.change)).collect();
    Ok(Placed { name: archive.name.clone(), other, changes })
}

/// Plans the change of each file, or fails before any change.
fn planned<'a>(archive: &'a Archive, from: &Path, dir: &Path) -> Result<Vec<Step<'a>>, Problem> {
    let mut steps = Vec::new();
    let mut different = Vec::new();
    for file in &archive.files {
        match plan(file, dir) {
            Ok(step) => steps.push(step),
            Err(Conflict::Differs(path)) => different.push(path.display().to_string()),
            Err(Conflict::Other(problem)) => return Err(problem),
        }
    }
    if different.is_empty() {
        return Ok(steps);
    }
    Err(Problem::Typed(format!(
        "nothing was changed, since {} here differ from those in {}: if the archive is right, \
         rename them and run this again",
        different.join(", "),
        from.display()
    )))
}

fn plan<'a>(file: &'a HostFile, dir: &Path) -> Result<Step<'a>, Conflict> {
    let path = dir.join(file.path);
    let step =
        |change, text: &str| Step { file, path: path.clone(), change, text: text.to_owned() };
    let old = match fs::read_to_string(&path) {
        Ok(old) => old,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Ok(step(Change::Written, &file.text));
        }
        Err(source) => {
            let unreadable = FileError::Unreadable { file: path.clone(), source };
            return Err(Conflict::Other(with_advice(unreadable.into())));
        }
    };
    if old == file.text {
        let change = if is_open(file, &path) { Change::Closed } else { Change::Kept };
        return Ok(step(change, &old));
    }
    match file.path {
        AGENT => {
            let (text, added) = agent_file::merged(&old, &file.text, &Path::new("/").join(DIR))
                .map_err(|why| {
                    let message = format!("nothing was changed: {} {why}", path.display());
                    Conflict::Other(Problem::Typed(message))
                })?;
            let change =
                if added.is_empty() { Change::Kept } else { Change::Added(added.join(", ")) };
            Ok(step(change, &text))
        }
        PEERS if old.starts_with(&file.text) => Ok(step(Change::Newer, &old)),
        PEERS if file.text.starts_with(&old) => {
            let hosts = added_hosts(&path, &old, &file.text).map_err(Conflict::Other)?;
            Ok(step(Change::Added(hosts.join(", ")), &file.text))
        }
        _ => Err(Conflict::Differs(path)),
    }
}

fn is_open(file: &HostFile, path: &Path) -> bool {
    let mode = fs::metadata(path).map_or(0, |there| there.permissions().mode());
    file.readers == Readers::Owner && mode & 0o007 != 0
}

fn added_hosts(path: &Path, old: &str, new: &str) -> Result<Vec<String>, Problem> {
    let before = parse_peers(path, old)?.len();
    Ok(parse_peers(path, new)?.into_iter().skip(before).map(|host| host.name).collect())
}

fn carry_out(steps: &[Step<'_>], dir: &Path) -> Result<(), Problem> {
    let tls = dir.join(TLS);
    fs::create_dir_all(dir)
        .map_err(|source| FileError::Unwritable { file: dir.to_owned(), source })?;
    make_dir(&tls)?;
    let mut writing = Writing::new("rename it and run this again");
    for Step { file, path, change, text } in steps {
        let unwritable = |source| FileError::Unwritable { file: path.clone(), source };
        match change {
            Change::Written => writing.add(path, text, file.readers)?,
            Change::Added(_) => write::replace(path, text).map_err(unwritable)?,
            Change::Closed => {
                fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(unwritable)?;
            }
            Change::Kept | Change::Newer => {}
        }
    }
    Ok(writing.finish()?)
}

fn with_advice(problem: Problem) -> Problem {
    match &problem {
        Problem::File(
            FileError::Unwritable { source, .. } | FileError::Unreadable { source, .. },
        ) if source.kind() == ErrorKind::PermissionDenied => {
            Problem::Typed(format!("{problem}: run this as root, often with sudo"))
        }
        _ => problem,
    }
}
