//! The source's side: one challenge for each image.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};

use super::{CONTENT_BYTES_MAX, Challenge, Cleanup, Proof, block_device};
use crate::process::{directory_of, proc_path};
use crate::shape::{Image, Shape};

/// How the names of nonces' files begin, in the images' own directories.
pub(super) const PREFIX: &str = ".droveway-";

/// Protocols whose names mean the same service at every host.
pub(crate) const NETWORK: [&str; 11] =
    ["nbd", "rbd", "iscsi", "nfs", "ssh", "http", "https", "ftp", "ftps", "gluster", "glusterfs"];
/// Protocols without content.
pub(super) const EMPTY: [&str; 2] = ["null-co", "null-aio"];

/// Challenges for all images of a live VM, and a guard that removes their files
/// again: keep it until the destination has answered. `id` names the migration.
#[must_use]
pub fn challenges(shape: &Shape, id: &str) -> (Vec<Challenge>, Cleanup) {
    let mut cleanup = Cleanup::default();
    let challenges = shape
        .images
        .iter()
        .filter(|image| !EMPTY.contains(&image.driver.as_str()))
        .enumerate()
        .map(|(nth, image)| challenge(image, shape.pid, &format!("{id}-{nth}"), &mut cleanup))
        .collect();
    (challenges, cleanup)
}

pub(super) fn challenge(
    image: &Image,
    pid: Option<u32>,
    id: &str,
    cleanup: &mut Cleanup,
) -> Challenge {
    let impossible = |reason: String| Proof::Impossible { reason };
    let (name, proof) = match image.driver.as_str() {
        "file" | "host_device" | "host_cdrom" => match local(image, pid) {
            Ok(path) => {
                let proof = local_proof(&path, image.read_only, id, cleanup);
                (path.display().to_string(), proof.unwrap_or_else(impossible))
            }
            Err(reason) => (image.file.clone(), impossible(reason)),
        },
        driver if NETWORK.contains(&driver) => (image.file.clone(), network(&image.file)),
        driver => {
            let reason = format!("Droveway can't tell for the driver {driver}");
            (image.file.clone(), impossible(reason))
        }
    };
    Challenge { image: name, proof }
}

fn network(file: &str) -> Proof {
    // A unix socket leads to something on this host.
    let local = ["unix", "localhost", "127.0.0.1", "[::1]"].iter().any(|mark| file.contains(mark));
    if local {
        let reason = format!("{file} is a service of this host");
        return Proof::Impossible { reason };
    }
    Proof::Network
}

/// The image's absolute path, if QEMU has the file at that path open.
fn local(image: &Image, pid: Option<u32>) -> Result<PathBuf, String> {
    let pid = pid.ok_or("QEMU's process can't be seen from here")?;
    let mut path = PathBuf::from(&image.file);
    if path.is_relative() {
        path = directory_of(pid).map_err(|error| error.to_string())?.join(path);
    }
    let there = fs::metadata(&path).map_err(|error| error.to_string())?;
    let entries = fs::read_dir(proc_path(pid, "fd")).map_err(|error| error.to_string())?;
    // For a process in a container, or after a rename, the name leads elsewhere.
    let open = entries.filter_map(Result::ok).filter_map(|entry| fs::metadata(entry.path()).ok());
    if open.into_iter().any(|file| (file.dev(), file.ino()) == (there.dev(), there.ino())) {
        Ok(path)
    } else {
        Err("QEMU has another file open than the one of that name".to_owned())
    }
}

fn local_proof(
    path: &Path,
    read_only: bool,
    id: &str,
    cleanup: &mut Cleanup,
) -> Result<Proof, String> {
    let file = fs::metadata(path).map_err(|error| error.to_string())?;
    if file.file_type().is_block_device() {
        let identity = block_device::identity(file.rdev())?;
        return Ok(Proof::Identity { identity });
    }
    if !file.is_file() {
        return Err("it is neither a file nor a block device".to_owned());
    }
    match nonce(path, file.len(), id, cleanup) {
        Ok(proof) => Ok(proof),
        Err(_) if read_only => {
            let (bytes, hash) = content(path)?;
            Ok(Proof::Content { bytes, hash })
        }
        Err(error) => Err(format!("no file can be made beside it: {error}")),
    }
}

fn nonce(path: &Path, bytes: u64, id: &str, cleanup: &mut Cleanup) -> std::io::Result<Proof> {
    // Beside the file itself, not beside a link to it.
    let real = path.canonicalize()?;
    let name = |path: &Path| Some(path.file_name()?.to_str()?.to_owned());
    let (Some(image), Some(folder)) = (name(&real), real.parent()) else {
        return Err(std::io::Error::other("its name is not text"));
    };
    let nonce = random()?;
    let plain: String =
        id.chars().filter(|one| one.is_ascii_alphanumeric() || *one == '-').take(64).collect();
    let file = format!("{PREFIX}{plain}-{}", nonce.get(..8).unwrap_or_default());
    let beside = folder.join(&file);
    let mut created = File::create_new(&beside)?;
    cleanup.add(beside);
    created.write_all(nonce.as_bytes())?;
    created.sync_all()?;
    Ok(Proof::Nonce { image, file, nonce, bytes })
}

fn random() -> std::io::Result<String> {
    let mut bytes = [0_u8; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(format!("{:032x}", u128::from_be_bytes(bytes)))
}

/// Opens a regular file that another host has named, and nothing else of that name: opening
/// a pipe would block, and opening a device would have effects.
pub(super) fn open_plain(path: &Path) -> std::io::Result<File> {
    let by_file = OFlags::PATH | OFlags::CLOEXEC;
    let found = rustix::fs::open(path, by_file, Mode::empty())?;
    let stat = rustix::fs::fstat(&found)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(std::io::Error::other("it is not a file"));
    }
    File::open(format!("/proc/self/fd/{}", found.as_raw_fd()))
}

/// Length and hash of a file that nothing writes to.
pub(super) fn content(path: &Path) -> Result<(u64, String), String> {
    let text = |error: std::io::Error| error.to_string();
    let mut file = open_plain(path).map_err(text)?;
    let bytes = file.metadata().map_err(text)?.len();
    if bytes > CONTENT_BYTES_MAX {
        return Err(format!(
            "no file can be made beside it, and with {bytes} bytes it is too large to compare"
        ));
    }
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let count = file.read(&mut buffer).map_err(text)?;
        if count == 0 {
            return Ok((bytes, hasher.finalize().to_hex().to_string()));
        }
        hasher.update(&buffer[..count]);
    }
}
