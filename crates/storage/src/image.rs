//! Images, and how they are opened.

use std::fmt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use host::rights::{self, User};
use nbd::reader::Endpoint;

use crate::{Exporter, FileSource, NbdSource, OpenError, Probe, Source};

/// The image that a VM uses, as this host can reach it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Image {
    /// A file or a block device that holds the disk's bytes.
    Raw {
        /// Where.
        path: PathBuf,
        /// Where in it the disk starts.
        base: u64,
        /// The disk's size; `None`: up to the file's end.
        bytes: Option<u64>,
    },
    /// Another format, which `qemu-nbd` reads.
    Format(Layer),
    /// A file on an NFS server, which `qemu-nbd` reads: this host may not have it mounted.
    Nfs(NfsFile),
    /// An export of a server of the storage.
    Nbd {
        /// Where it listens.
        endpoint: Endpoint,
        /// The export's name.
        export: String,
    },
}

/// An image in a format, with the other files that the VM's QEMU reads with it. What the image's
/// own header names is not opened: QEMU may have other options, and an image's maker can
/// name any file or server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Where.
    pub path: PathBuf,
    /// QEMU's name of the format. Never guessed: a guest may write what it likes into a raw
    /// image.
    pub format: String,
    /// The file with the image's data, if it has them aside.
    pub data_file: Option<PathBuf>,
    /// The image that is read where this one has no data.
    pub backing: Option<Box<Layer>>,
}

impl Layer {
    /// An image without other files.
    #[must_use]
    pub fn alone(path: PathBuf, format: &str) -> Self {
        Self { path, format: format.to_owned(), data_file: None, backing: None }
    }

    /// All files, the image's own first.
    fn files(&self) -> impl Iterator<Item = &Path> {
        let layers = std::iter::successors(Some(self), |layer| layer.backing.as_deref());
        let files = layers.flat_map(|layer| [Some(&layer.path), layer.data_file.as_ref()]);
        files.flatten().map(PathBuf::as_path)
    }
}

/// An image on an NFS server that the VM's QEMU is a client of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NfsFile {
    /// The server's name or address.
    pub server: String,
    /// The file's path there.
    pub path: String,
    /// Whom QEMU gives as the file's user; `None`: the user that reads.
    pub user: Option<u64>,
    /// The same of the group.
    pub group: Option<u64>,
    /// QEMU's name of the format. There is no other file behind the image.
    pub format: String,
}

impl fmt::Display for NfsFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "nfs://{}{}", self.server, self.path)
    }
}

impl Image {
    fn name(&self) -> String {
        match self {
            Self::Nfs(file) => file.to_string(),
            Self::Raw { path, .. } | Self::Format(Layer { path, .. }) => path.display().to_string(),
            Self::Nbd { endpoint, export } => format!("'{export}' at {endpoint}"),
        }
    }
}

/// An image that can be read.
pub struct Opened {
    /// For a [`crate::Reader`].
    pub source: Box<dyn Source>,
    /// Whether it is read through this host's page cache, since its file system has no
    /// direct reads.
    pub cached: bool,
}

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opened").field("cached", &self.cached).finish_non_exhaustive()
    }
}

/// How images are opened.
#[derive(Clone, Debug)]
pub struct Opening {
    /// The program that reads formats.
    pub qemu_nbd: PathBuf,
    /// With whose rights images are opened, by that program and by this process;
    /// `None`: its own. Their names may be chosen by another host.
    pub user: Option<User>,
    /// A directory for short-lived files, which only this user can enter.
    pub dir: PathBuf,
    /// Requests at a time, as in the reader's settings.
    pub in_flight: usize,
    /// How long opening may take.
    pub patience: Duration,
}

impl Opening {
    /// The defaults, with short-lived files in `dir`.
    #[must_use]
    pub fn new(dir: &Path) -> Self {
        Self {
            qemu_nbd: PathBuf::from("qemu-nbd"),
            user: None,
            dir: dir.to_owned(),
            in_flight: crate::Settings::default().in_flight,
            patience: Duration::from_secs(5),
        }
    }
}

/// An image that is being opened.
#[derive(Debug)]
pub struct Opens {
    probe: Probe<Result<Opened, OpenError>>,
    what: String,
    patience: Duration,
}

impl Opens {
    /// Waits until it is open, for as long as it may take since it was started.
    ///
    /// # Errors
    /// If it doesn't exist, can't be read, or its storage doesn't answer.
    pub fn wait(self) -> Result<Opened, OpenError> {
        let Self { probe, what, patience } = self;
        probe.wait().unwrap_or(Err(OpenError::Stalled { what, patience }))
    }
}

/// Starts to open an image, on a thread that is left behind if the storage doesn't
/// answer.
///
/// # Errors
/// If that can't be started.
pub fn begin_to_open(image: &Image, how: &Opening) -> Result<Opens, OpenError> {
    let (what, patience) = (image.name(), how.patience);
    let (image, how) = (image.clone(), how.clone());
    let probe = Probe::start(patience, move || reach(&image, &how))?;
    Ok(Opens { probe, what, patience })
}

/// Opens an image; see [`begin_to_open`].
///
/// # Errors
/// If it doesn't exist, can't be read, or its storage doesn't answer.
pub fn open(image: &Image, how: &Opening) -> Result<Opened, OpenError> {
    begin_to_open(image, how)?.wait()
}

fn reach(image: &Image, how: &Opening) -> Result<Opened, OpenError> {
    match image {
        Image::Raw { path, base, bytes } => {
            let source = open_file(path, *base, *bytes, how)?;
            let cached = !source.is_direct();
            Ok(Opened { source: Box::new(source), cached })
        }
        Image::Format(layer) => {
            let mut direct = true;
            for file in layer.files() {
                direct &= open_file(file, 0, None, how)?.is_direct();
            }
            served(Exporter::start(how, layer, direct)?, &image.name(), direct, how)
        }
        // QEMU's client keeps nothing of the file unless its options have it do so.
        Image::Nfs(file) => served(Exporter::of_nfs(how, file)?, &image.name(), true, how),
        Image::Nbd { endpoint, export } => {
            let source = NbdSource::connect(endpoint, export, how.in_flight)?;
            Ok(Opened { source: Box::new(source), cached: false })
        }
    }
}

/// An image that a `qemu-nbd` serves.
fn served(
    (exporter, socket): (Exporter, UnixStream),
    what: &str,
    direct: bool,
    how: &Opening,
) -> Result<Opened, OpenError> {
    let connected = NbdSource::of(exporter, socket, how.in_flight, how.patience);
    let source =
        connected.map_err(|(exporter, error)| exporter.failed(what, &error.to_string()))?;
    Ok(Opened { source: Box::new(source), cached: !direct })
}

fn open_file(
    path: &Path,
    base: u64,
    bytes: Option<u64>,
    how: &Opening,
) -> Result<FileSource, OpenError> {
    let opened = rights::with(how.user.as_ref(), || FileSource::open(path, base, bytes));
    opened.map_err(OpenError::Local)?
}
