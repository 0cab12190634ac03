//! The destination's side of moving disks: exports that write the images.
//!
//! Blocks are written through QEMU, which knows the images' formats, but
//! through separate nodes over the same files: these punch holes for zeros,
//! whatever the VM's command line says, and are removed before the VM runs. Until
//! then the VM's own nodes stay inactive and hold no locks; they read the images
//! again when the VM runs.
//!
//! QEMU gets images and socket as open files: so it needs no rights to open them
//! any more (`-runas`), and it writes to the file that was checked.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::OFlags;
use serde_json::json;

use crate::disks::{Disk, Format, PreparedImage, disks, identity_of};
use crate::process::directory_of;
use crate::qmp::{Qmp, QmpError, RunState, odd};
use crate::shape::{self, Shape};

/// How the names of nodes and exports made here start.
const PREFIX: &str = "droveway-export-";
/// QEMU's name for the listening socket until it uses it.
const LISTENER: &str = "droveway-exports";
/// For opening an image, which QEMU does in its main loop.
const OPEN: Duration = Duration::from_secs(30);
/// For closing images: their dirty pages in the host's page cache are written first.
const CLOSE: Duration = Duration::from_secs(120);

/// Why a disk can't be exported. Nothing was written to it.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// QEMU does not wait for an incoming VM.
    #[error("the destination's QEMU is {state} and doesn't wait for a VM's disks")]
    NotWaiting {
        /// Its state.
        state: RunState,
    },
    /// QEMU has no such disk.
    #[error("the destination's QEMU has no disk `{disk}`")]
    Unknown {
        /// Which.
        disk: String,
    },
    /// QEMU's disk differs from the prepared image.
    #[error("disk `{disk}` of the destination's QEMU: {reason}")]
    Differs {
        /// Which.
        disk: String,
        /// How.
        reason: String,
    },
    /// QEMU refuses.
    #[error("disk `{disk}` can't be written at the destination: {source}")]
    Qemu {
        /// Which.
        disk: String,
        /// QEMU's error.
        source: QmpError,
    },
    /// Another process uses its image.
    #[error("disk `{disk}` can't be written at the destination: its image is in use: {source}")]
    InUse {
        /// Which.
        disk: String,
        /// QEMU's error.
        source: QmpError,
    },
    /// The socket can't be made.
    #[error("listening at {}: {source}", path.display())]
    Socket {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// QEMU doesn't answer, or has exited.
    #[error(transparent)]
    Qmp(#[from] QmpError),
}

/// One disk's export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// The disk's name.
    pub disk: String,
    /// The export's name.
    pub name: String,
    /// Its size.
    pub bytes: u64,
}

/// Exports of a VM's images, at one socket.
#[derive(Debug)]
pub struct Exports {
    qmp: Arc<Qmp>,
    socket: PathBuf,
    exports: Vec<Export>,
    open: Mutex<Open>,
}

/// What has to be closed again.
#[derive(Debug, Default)]
struct Open {
    serves: bool,
    nodes: Vec<String>,
    /// QEMU's fd sets that hold the images.
    fdsets: Vec<u64>,
}

impl Exports {
    /// Makes a QEMU that waits for a VM serve its images at the unix socket.
    ///
    /// # Errors
    /// If it doesn't wait, if its disks are not the images, or an image is
    /// locked by another process. Nothing has changed then.
    pub fn start(
        qmp: Arc<Qmp>,
        socket: &Path,
        images: &[PreparedImage],
    ) -> Result<Self, ExportError> {
        let state = qmp.run_state()?;
        if state != RunState::InMigrate {
            return Err(ExportError::NotWaiting { state });
        }
        let shape = shape::of(&qmp)?;
        let there = disks(&qmp, &shape)?;
        let socket = socket.to_owned();
        let mut exports =
            Self { qmp, socket, exports: Vec::new(), open: Mutex::new(Open::default()) };
        let outcome = exports.open_all(images, &there, &shape);
        if outcome.is_err()
            && let Err(error) = exports.stop()
        {
            tracing::warn!(%error, "cannot remove exports of disks from QEMU");
        }
        outcome.map(|()| exports)
    }

    fn open_all(
        &mut self,
        images: &[PreparedImage],
        there: &[Disk],
        shape: &Shape,
    ) -> Result<(), ExportError> {
        self.serve()?;
        for (nth, image) in images.iter().enumerate() {
            let disk = there
                .iter()
                .find(|disk| disk.name == image.disk)
                .ok_or_else(|| ExportError::Unknown { disk: image.disk.clone() })?;
            let file = checked(image, disk, shape)
                .map_err(|reason| ExportError::Differs { disk: image.disk.clone(), reason })?;
            self.open(&format!("{PREFIX}{nth}"), image, disk, &file)?;
        }
        Ok(())
    }

    fn serve(&self) -> Result<(), ExportError> {
        let local = |source| ExportError::Socket { path: self.socket.clone(), source };
        let listener = UnixListener::bind(&self.socket).map_err(local)?;
        self.open.lock().serves = true;
        self.qmp.execute_with(listener.as_fd(), "getfd", json!({ "fdname": LISTENER }))?;
        let address = json!({ "type": "fd", "data": { "str": LISTENER } });
        self.qmp.execute("nbd-server-start", json!({ "addr": address }))?;
        Ok(())
    }

    /// Passes the image to QEMU, and returns its file name there.
    fn hand(&self, file: &File) -> Result<String, QmpError> {
        let answer = self.qmp.execute_with(file.as_fd(), "add-fd", json!({}))?;
        let fdset = answer["fdset-id"].as_u64().ok_or_else(|| odd("add-fd", &answer))?;
        self.open.lock().fdsets.push(fdset);
        Ok(format!("/dev/fdset/{fdset}"))
    }

    fn open(
        &mut self,
        name: &str,
        image: &PreparedImage,
        disk: &Disk,
        file: &File,
    ) -> Result<(), ExportError> {
        let failed = |source| refused(disk, source);
        let filename = self.hand(file).map_err(failed)?;
        // Past the host's page cache only if the VM's command line does so, too:
        // not every file system can.
        let cache = json!({ "direct": disk.direct, "no-flush": false });
        let node = json!({
            "driver": image.format.driver(),
            "node-name": name,
            "discard": "unmap",
            "detect-zeroes": "unmap",
            "cache": cache,
            "file": {
                "driver": disk.protocol,
                "filename": filename,
                "discard": "unmap",
                "cache": cache,
            },
        });
        self.qmp.execute_within("blockdev-add", node, OPEN).map_err(failed)?;
        self.open.lock().nodes.push(name.to_owned());
        let export = json!({
            "type": "nbd",
            "id": name,
            "name": name,
            "node-name": name,
            "writable": true,
        });
        self.qmp.execute_within("block-export-add", export, OPEN).map_err(failed)?;
        self.exports.push(Export {
            disk: disk.name.clone(),
            name: name.to_owned(),
            bytes: image.bytes,
        });
        Ok(())
    }

    /// The exports, in the order of the images.
    #[must_use]
    pub fn exports(&self) -> &[Export] {
        &self.exports
    }

    /// Where they are served.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Ends the exports and closes the images. Only then may the VM run. The client
    /// must have flushed before, successfully: a failure to flush is not reported
    /// here.
    ///
    /// # Errors
    /// If QEMU doesn't close an image; the VM must not run then.
    pub fn stop(&self) -> Result<(), ExportError> {
        let mut open = self.open.lock();
        if open.serves {
            // So that no client connects while it ends.
            let _ = fs::remove_file(&self.socket);
            match self.qmp.execute_within("nbd-server-stop", json!({}), CLOSE) {
                // It is not running if it could not be started.
                Ok(_) | Err(QmpError::Refused { .. }) => open.serves = false,
                Err(error) => return Err(error.into()),
            }
        }
        while let Some(node) = open.nodes.last() {
            self.qmp.execute_within("blockdev-del", json!({ "node-name": node }), CLOSE)?;
            open.nodes.pop();
        }
        for fdset in open.fdsets.drain(..) {
            if let Err(error) = self.qmp.execute("remove-fd", json!({ "fdset-id": fdset })) {
                tracing::debug!(%error, "QEMU keeps an image open until it ends");
            }
        }
        Ok(())
    }
}

fn refused(disk: &Disk, source: QmpError) -> ExportError {
    let disk = disk.name.clone();
    match &source {
        QmpError::Refused { desc, .. } if desc.contains(" lock") => {
            ExportError::InUse { disk, source }
        }
        _ => ExportError::Qemu { disk, source },
    }
}

/// Opens the image, if QEMU will run the VM from the one that was prepared.
fn checked(image: &PreparedImage, disk: &Disk, shape: &Shape) -> Result<File, String> {
    if let Some(stays) = &disk.stays {
        return Err(stays.reason().to_owned());
    }
    if !disk.backing.is_empty() {
        return Err("it has a backing file, and what moves is one image".to_owned());
    }
    let driver = disk.format.as_ref().map(Format::driver);
    if driver != Some(image.format.driver()) {
        let driver = driver.unwrap_or("of no known format");
        return Err(format!("its image is {driver}, the source's {}", image.format.driver()));
    }
    if disk.bytes != image.bytes {
        return Err(format!("it has {} bytes, the source's {}", disk.bytes, image.bytes));
    }
    let mut used = PathBuf::from(&disk.file);
    if used.is_relative() {
        let pid = shape.pid.ok_or("QEMU's process is not visible from here")?;
        used = directory_of(pid).map_err(|error| error.to_string())?.join(used);
    }
    let words = |error: io::Error| format!("{}: {error}", image.path.display());
    let file = image.open()?;
    let there = fs::metadata(&used).map_err(|error| format!("{}: {error}", used.display()))?;
    // Otherwise the copy would overwrite a file that nothing has examined.
    if image.identity == identity_of(&there) {
        return if disk.direct {
            past_the_cache(&file).map_err(words).map(|()| file)
        } else {
            Ok(file)
        };
    }
    Err(format!(
        "its image is {}, and {} was prepared: give it with --set OLD=NEW",
        used.display(),
        image.path.display()
    ))
}

/// Sets O_DIRECT: QEMU 10 refuses a file that is not open as it would open it.
fn past_the_cache(file: &File) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    Ok(rustix::fs::fcntl_setfl(file, flags | OFlags::DIRECT)?)
}
