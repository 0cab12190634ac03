//! The files of a certificate, and how they are written: keys readable by their
//! owner alone, and existing files replaced only on request.

use std::fs::{DirBuilder, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// Far more than any valid file has: a bundle of hundreds of CAs is smaller.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The files that `droveway ca issue` made for an agent or a user of the API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// The CA's certificate, or those of several CAs while one replaces another.
    pub authority: PathBuf,
    /// The holder's certificate.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// The secret with which all hosts of a cluster compute the names of page contents;
    /// people have none.
    pub content_key: PathBuf,
}

impl Files {
    /// `ca.crt`, `droveway.crt`, `droveway.key` and `content.key` in a directory.
    #[must_use]
    pub fn within(dir: &Path) -> Self {
        Self {
            authority: dir.join("ca.crt"),
            certificate: dir.join("droveway.crt"),
            key: dir.join("droveway.key"),
            content_key: dir.join("content.key"),
        }
    }

    /// When the files that [`Identity::reload`](crate::Identity::reload) reads were last
    /// written; `None` for those that don't exist.
    #[must_use]
    pub fn changed(&self) -> [Option<SystemTime>; 3] {
        [&self.authority, &self.certificate, &self.key]
            .map(|file| std::fs::metadata(file).and_then(|there| there.modified()).ok())
    }

    /// The secret for names of contents. `None` if the certificate was issued by a
    /// version without it, and has to be issued again.
    ///
    /// # Errors
    /// If the file can't be read, or everybody can read it.
    pub fn content_secret(&self) -> Result<Option<Vec<u8>>, FileError> {
        if !self.content_key.exists() {
            return Ok(None);
        }
        check_closed(&self.content_key)?;
        let secret = read(&self.content_key)?.trim_ascii().to_vec();
        let missing = || FileError::Content { file: self.content_key.clone(), what: "key" };
        if secret.is_empty() { Err(missing()) } else { Ok(Some(secret)) }
    }
}

/// What is wrong with a file.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It can't be read.
    #[error("reading {}: {source}", file.display())]
    Unreadable {
        /// Which.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It can't be written.
    #[error("writing {}: {source}", file.display())]
    Unwritable {
        /// Which.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It exists, and is not replaced.
    #[error("{} already exists: {}", file.display(), advice)]
    Exists {
        /// Which.
        file: PathBuf,
        /// What to do.
        advice: &'static str,
    },
    /// It holds something else.
    #[error("{} holds no {what} in PEM form", file.display())]
    Content {
        /// Which.
        file: PathBuf,
        /// What was looked for.
        what: &'static str,
    },
    /// A key that everybody can read.
    #[error(
        "every user of this host can read {}: a key is for its owner alone; chmod 600 it, and \
         issue a new one if another user may have read it",
        .0.display()
    )]
    Open(PathBuf),
}

/// The certificates in a file, at least one.
pub(crate) fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>, FileError> {
    let text = read(file)?;
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let missing = || FileError::Content { file: file.to_owned(), what: "certificate" };
    certificates.ok().filter(|found| !found.is_empty()).ok_or_else(missing)
}

/// The key in a file, which not everybody may be able to read.
pub(crate) fn key(file: &Path) -> Result<PrivateKeyDer<'static>, FileError> {
    check_closed(file)?;
    let text = read(file)?;
    PrivateKeyDer::from_pem_slice(&text)
        .map_err(|_| FileError::Content { file: file.to_owned(), what: "private key" })
}

/// Refuses a key that everybody can read: any local user could impersonate its holder.
fn check_closed(file: &Path) -> Result<(), FileError> {
    let unreadable = |source| FileError::Unreadable { file: file.to_owned(), source };
    let mode = std::fs::metadata(file).map_err(unreadable)?.permissions().mode();
    if mode & 0o004 != 0 { Err(FileError::Open(file.to_owned())) } else { Ok(()) }
}

/// A file's text.
pub(crate) fn text(file: &Path) -> Result<String, FileError> {
    String::from_utf8(read(file)?)
        .map_err(|_| FileError::Content { file: file.to_owned(), what: "text" })
}

fn read(file: &Path) -> Result<Vec<u8>, FileError> {
    let unreadable = |source| FileError::Unreadable { file: file.to_owned(), source };
    let bytes = std::fs::metadata(file).map_err(unreadable)?.len();
    if bytes > FILE_BYTES_MAX {
        let source = io::Error::new(io::ErrorKind::FileTooLarge, "too large for such a file");
        return Err(unreadable(source));
    }
    std::fs::read(file).map_err(unreadable)
}

/// Makes a directory for keys, with access for its owner alone, unless it exists.
///
/// # Errors
/// If it can't be made.
pub fn make_dir(dir: &Path) -> Result<(), FileError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(|source| FileError::Unwritable { file: dir.to_owned(), source })
}

/// Who may read a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readers {
    /// Its owner alone.
    Owner,
    /// Everybody.
    Everybody,
}

/// Files that appear together: each is written next to its place, and all are moved
/// into place only when every one is on disk.
#[derive(Debug)]
pub struct Writing {
    replace: Option<&'static str>,
    written: Vec<(tempfile::NamedTempFile, PathBuf)>,
}

impl Writing {
    /// New files; `advice` says what to do if one exists.
    #[must_use]
    pub fn new(advice: &'static str) -> Self {
        Self { replace: Some(advice), written: Vec::new() }
    }

    /// Files that may replace others.
    #[must_use]
    pub fn over() -> Self {
        Self { replace: None, written: Vec::new() }
    }

    /// Writes one, whose mode is never too permissive. Its directory must exist.
    ///
    /// # Errors
    /// If it exists and must not be replaced, or can't be written.
    pub fn add(
        &mut self,
        file: &Path,
        content: impl AsRef<[u8]>,
        readers: Readers,
    ) -> Result<(), FileError> {
        if let Some(advice) = self.replace
            && file.symlink_metadata().is_ok()
        {
            return Err(FileError::Exists { file: file.to_owned(), advice });
        }
        let write = || {
            let dir = file.parent().unwrap_or(Path::new("."));
            // Made with mode 0600.
            let mut beside = tempfile::NamedTempFile::new_in(dir)?;
            beside.write_all(content.as_ref())?;
            if readers == Readers::Everybody {
                beside.as_file().set_permissions(Permissions::from_mode(0o644))?;
            }
            beside.as_file().sync_all()?;
            Ok(beside)
        };
        let beside =
            write().map_err(|source| FileError::Unwritable { file: file.to_owned(), source })?;
        self.written.push((beside, file.to_owned()));
        Ok(())
    }

    /// Moves all of them into place.
    ///
    /// # Errors
    /// If one can't be moved; those before it are in place.
    pub fn finish(self) -> Result<(), FileError> {
        for (beside, file) in self.written {
            let outcome = match self.replace {
                None => beside.persist(&file),
                Some(_) => beside.persist_noclobber(&file),
            };
            outcome.map_err(|error| match (error.error.kind(), self.replace) {
                (io::ErrorKind::AlreadyExists, Some(advice)) => {
                    FileError::Exists { file: file.clone(), advice }
                }
                _ => FileError::Unwritable { file: file.clone(), source: error.error },
            })?;
        }
        Ok(())
    }
}
