//! The files of one host as a tar archive, with their paths on the host.
//!
//! It holds the host's key, so only root may read it.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use client::Problem;
use identity::Readers;
use tar::{Builder, EntryType, Header};

use super::agent_file;

/// The directory of an agent's files, below the host's root.
pub(crate) const DIR: &str = "etc/droveway";
/// The directory of the certificate and its keys, below [`DIR`].
pub(crate) const TLS: &str = "tls";
/// The agent's own file.
pub(crate) const AGENT: &str = "agent.toml";
/// The peers file.
pub(crate) const PEERS: &str = "peers.toml";
/// All files and their permitted readers.
const FILES: [(&str, Readers); 6] = [
    (AGENT, Readers::Everybody),
    (PEERS, Readers::Everybody),
    ("tls/ca.crt", Readers::Everybody),
    ("tls/droveway.crt", Readers::Everybody),
    ("tls/droveway.key", Readers::Owner),
    ("tls/content.key", Readers::Owner),
];
/// Far more than any file has: a peers file of ten thousand hosts is smaller.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// All files with tar's headers and padding.
const ARCHIVE_BYTES_MAX: u64 = (FILES.len() as u64 + 1) * FILE_BYTES_MAX;

/// The files of one host.
pub(crate) struct Archive {
    /// The host.
    pub(crate) name: String,
    /// Its files.
    pub(crate) files: Vec<HostFile>,
}

/// One file of a host.
pub(crate) struct HostFile {
    /// Its path below `/etc/droveway`.
    pub(crate) path: &'static str,
    /// Its permitted readers.
    pub(crate) readers: Readers,
    /// Its contents.
    pub(crate) text: String,
}

/// Makes an archive of the text for each path.
///
/// The same files make the same archive, because they all get the certificate's modification time;
/// so an agent notices a newer certificate that tar unpacked.
pub(crate) fn pack(
    mtime_s: u64,
    text: impl Fn(&str) -> Result<String, Problem>,
) -> Result<Vec<u8>, Problem> {
    let packing = |source| Problem::Local { what: "making an archive".to_owned(), source };
    let mut builder = Builder::new(Vec::new());
    let mut add = |path: &str, kind, mode, bytes: &[u8]| {
        let mut header = Header::new_ustar();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_mtime(mtime_s);
        header.set_uid(0);
        header.set_gid(0);
        header.set_size(bytes.len() as u64);
        builder.append_data(&mut header, format!("{DIR}/{path}"), bytes).map_err(packing)
    };
    add(&format!("{TLS}/"), EntryType::Directory, 0o700, &[])?;
    for (path, readers) in FILES {
        let mode = if readers == Readers::Owner { 0o600 } else { 0o644 };
        add(path, EntryType::Regular, mode, text(path)?.as_bytes())?;
    }
    builder.into_inner().map_err(packing)
}

/// Reads the files of an archive.
pub(crate) fn read(path: &Path) -> Result<Archive, Problem> {
    let reading = |source| Problem::Local { what: format!("reading {}", path.display()), source };
    let file = File::open(path).map_err(reading)?;
    unpack(file.take(ARCHIVE_BYTES_MAX)).map_err(|why| {
        Problem::Typed(format!(
            "{} is not a complete archive of `droveway init` ({why}): copy it again from where it \
             was made",
            path.display()
        ))
    })
}

fn unpack(archive: impl Read) -> Result<Archive, String> {
    let said = |error: io::Error| error.to_string();
    let mut files: Vec<HostFile> = Vec::new();
    for entry in tar::Archive::new(archive).entries().map_err(said)? {
        let entry = entry.map_err(said)?;
        let path: PathBuf = entry.path().map_err(said)?.into_owned();
        match entry.header().entry_type() {
            EntryType::Directory => continue,
            EntryType::Regular => {}
            _ => return Err(format!("{} in it is no file", path.display())),
        }
        let inside = path.strip_prefix(DIR).ok();
        let known = FILES.into_iter().find(|(known, _)| inside == Some(Path::new(known)));
        let Some((known, readers)) = known else {
            return Err(format!("{} is not one of a host's files", path.display()));
        };
        if files.iter().any(|file| file.path == known) {
            return Err(format!("{known} exists twice"));
        }
        if entry.size() > FILE_BYTES_MAX {
            return Err(format!("{known} is too large"));
        }
        let mut text = String::new();
        entry.take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(said)?;
        files.push(HostFile { path: known, readers, text });
    }
    if let Some((missing, _)) =
        FILES.into_iter().find(|(path, _)| !files.iter().any(|file| file.path == *path))
    {
        return Err(format!("{missing} is missing"));
    }
    let agent = files.iter().find(|file| file.path == AGENT);
    let name = agent.and_then(|file| agent_file::name(&file.text));
    Ok(Archive { name: name.ok_or("agent.toml names no host")?, files })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed() -> Vec<u8> {
        pack(7, |path| Ok(format!("name = '{}'\n", path.replace('/', "-")))).unwrap()
    }

    fn one(path: &str, kind: EntryType) -> Vec<u8> {
        let mut builder = Builder::new(Vec::new());
        let mut header = Header::new_ustar();
        header.set_entry_type(kind);
        header.set_size(0);
        builder.append_data(&mut header, path, &[][..]).unwrap();
        builder.into_inner().unwrap()
    }

    #[test]
    fn files_come_back_as_they_were() {
        let archive = unpack(&packed()[..]).unwrap();
        assert_eq!(archive.name, "agent.toml");
        let paths: Vec<_> = archive.files.iter().map(|file| file.path).collect();
        assert_eq!(paths, FILES.map(|(path, _)| path));
        assert_eq!(archive.files[4].text, "name = 'tls-droveway.key'\n");
        assert_eq!(packed(), packed());
    }

    #[test]
    fn keys_unpacked_by_tar_are_for_their_owner_only() {
        let packed = packed();
        let mut archive = tar::Archive::new(&packed[..]);
        for entry in archive.entries().unwrap() {
            let entry = entry.unwrap();
            let (path, mode) = (entry.path().unwrap().into_owned(), entry.header().mode().unwrap());
            let is_secret = path.ends_with("tls") || path.extension() == Some("key".as_ref());
            assert_eq!(mode & 0o077 == 0, is_secret, "{} {mode:o}", path.display());
        }
    }

    #[test]
    fn what_does_not_belong_to_a_host_is_refused() {
        for (bytes, says) in [
            (Vec::new(), "agent.toml is missing"),
            (vec![7; 4096], ""),
            (one("etc/passwd", EntryType::Regular), "etc/passwd is not one of"),
            (one("etc/droveway/agent.toml", EntryType::Symlink), "is no file"),
            (packed()[..2048].to_vec(), ""),
        ] {
            let error = unpack(&bytes[..]).err().unwrap();
            assert!(error.contains(says), "{error}");
        }
    }
}
