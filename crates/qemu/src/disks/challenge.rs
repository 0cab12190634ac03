//! The source's side: one challenge for each image.

use std::fs::{self, File, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::content::{GoesOn, content};
use super::{Challenge, Cleanup, Proof, block_device, network, served};
use crate::process::{directory_of, proc_path};
use crate::shape::{Image, Shape};

/// How the names of nonces' files start, in the images' own directories.
pub(super) const PREFIX: &str = ".droveway-";

/// Protocols whose names mean the same service at every host.
pub(crate) const NETWORK: [&str; 11] =
    ["nbd", "rbd", "iscsi", "nfs", "ssh", "http", "https", "ftp", "ftps", "gluster", "glusterfs"];
/// Drivers of files and devices of the host.
const LOCAL: [&str; 3] = ["file", "host_device", "host_cdrom"];
/// Protocols without content.
pub(super) const EMPTY: [&str; 2] = ["null-co", "null-aio"];

/// File systems of networks and clusters, by `statfs`'s type: NFS, SMB, Ceph, FUSE (Gluster), GFS2,
/// OCFS2, Lustre, GPFS. Each host sees the same file there, so its content needn't be read.
const REMOTE: [i64; 9] = [
    0x6969,
    0xff53_4d42,
    0xfe53_4d42,
    0x00c3_6400,
    0x6573_5546,
    0x0116_1970,
    0x7461_636f,
    0x0bd0_0bd0,
    0x4750_4653,
];

/// Bytes that are read of read-only images for one move, in case the other host has a copy: enough
/// for firmware and small CDs. They delay each move, and slow storage reads 10 MB/s.
const COPIES_BYTES_MAX: u64 = 64 << 20;

/// An image whose name leads elsewhere for this agent than for the VM's QEMU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("another QEMU would not find its image {image}: {reason}")]
pub struct ElsewhereError {
    /// The image, as QEMU calls it.
    pub image: String,
    /// Why not.
    pub reason: String,
}

/// Checks that another QEMU which this agent starts finds the images of a live VM: those of a QEMU
/// in a container may be other files.
///
/// # Errors
/// With the first image that it would not find.
pub fn check_names(shape: &Shape) -> Result<(), ElsewhereError> {
    let local = shape.images.iter().filter(|image| LOCAL.contains(&image.driver.as_str()));
    for image in local {
        let found = self::local(image, shape.pid);
        found.map_err(|reason| ElsewhereError { image: image.file.clone(), reason })?;
    }
    Ok(())
}

/// Challenges for all images of a live VM, and a guard that removes their files
/// again: keep it until the destination has answered. `id` names the migration.
/// Images whose content is read may take minutes; once that doesn't continue, they have
/// no proof.
#[must_use]
pub fn challenges(shape: &Shape, id: &str, goes_on: GoesOn<'_>) -> (Vec<Challenge>, Cleanup) {
    let mut cleanup = Cleanup::default();
    let mut left = COPIES_BYTES_MAX;
    let challenges = shape
        .images
        .iter()
        .filter(|image| !EMPTY.contains(&image.driver.as_str()))
        .enumerate()
        .map(|(nth, image)| {
            let id = format!("{id}-{nth}");
            let mut made = challenge(image, shape.pid, &id, goes_on, &mut cleanup);
            if image.read_only {
                allow_copy(&mut made, goes_on, &mut left);
            }
            made
        })
        .chain(served::challenges(shape))
        .collect();
    (challenges, cleanup)
}

pub(super) fn challenge(
    image: &Image,
    pid: Option<u32>,
    id: &str,
    goes_on: GoesOn<'_>,
    cleanup: &mut Cleanup,
) -> Challenge {
    let impossible = |reason: String| Proof::Impossible { reason };
    let (name, proof) = match image.driver.as_str() {
        driver if LOCAL.contains(&driver) => match local(image, pid) {
            Ok(path) => {
                let proof = local_proof(&path, image.read_only, id, goes_on, cleanup);
                (path.display().to_string(), proof.unwrap_or_else(impossible))
            }
            Err(reason) => (image.file.clone(), impossible(reason)),
        },
        driver if NETWORK.contains(&driver) => {
            (image.file.clone(), network::proof(driver, &image.file))
        }
        driver => {
            let reason = format!("Droveway can't compare images of the driver {driver}");
            (image.file.clone(), impossible(reason))
        }
    };
    Challenge { image: name, proof }
}

/// A host may have its own copy of an image that nothing writes to, such as firmware or a CD: its
/// content is a proof, too. Whether the other host sees the same directory isn't known yet.
fn allow_copy(made: &mut Challenge, goes_on: GoesOn<'_>, left: &mut u64) {
    let path = Path::new(&made.image);
    if let Proof::Nonce { bytes, content, .. } = &mut made.proof
        && !is_remote(path)
    {
        *content = hash_of_copy(path, *bytes, goes_on, left);
    }
}

/// The hash that a copy of an image of this length has, if that many bytes are left to be read.
pub(super) fn hash_of_copy(
    path: &Path,
    bytes: u64,
    goes_on: GoesOn<'_>,
    left: &mut u64,
) -> Option<String> {
    let after = left.checked_sub(bytes)?;
    let (length, hash) = content(path, goes_on).ok()?;
    *left = after;
    (length == bytes).then_some(hash)
}

#[allow(clippy::unnecessary_cast, reason = "its type is not the same on all systems")]
fn is_remote(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|found| REMOTE.contains(&(found.f_type as i64)))
}

/// The image's absolute path, if QEMU has the file at that path open.
fn local(image: &Image, pid: Option<u32>) -> Result<PathBuf, String> {
    let pid = pid.ok_or("QEMU's process is not visible from here")?;
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
    goes_on: GoesOn<'_>,
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
            let (bytes, hash) = content(path, goes_on)?;
            Ok(Proof::Content { bytes, hash })
        }
        Err(error) => Err(format!("no file can be created next to it: {error}")),
    }
}

fn nonce(path: &Path, bytes: u64, id: &str, cleanup: &mut Cleanup) -> std::io::Result<Proof> {
    // Next to the file itself, not next to a link to it.
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
    // The destination reads it with the rights of QEMU's user.
    created.set_permissions(Permissions::from_mode(0o644))?;
    created.write_all(nonce.as_bytes())?;
    created.sync_all()?;
    Ok(Proof::Nonce { image, file, nonce, bytes, content: None })
}

fn random() -> std::io::Result<String> {
    let mut bytes = [0_u8; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(format!("{:032x}", u128::from_be_bytes(bytes)))
}
