//! The destination's side: does this host meet the challenge?

use std::fs;
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use super::challenge::{PREFIX, content, open_plain};
use super::{GoesOn, Proof, block_device, network};

/// A nonce's file holds 32 bytes; one more is enough to see that it differs.
const NONCE_READ: u64 = 33;

pub(super) fn verify(image: &str, proof: &Proof, goes_on: GoesOn<'_>) -> Result<(), String> {
    let path = Path::new(image);
    match proof {
        Proof::Nonce { image: name, file, nonce, bytes, content } => {
            let found = beside(path, name, file, nonce, *bytes);
            found.or_else(|why| match content {
                Some(hash) => same_content(path, *bytes, hash, goes_on),
                None => Err(why),
            })
        }
        Proof::Content { bytes, hash } => same_content(path, *bytes, hash, goes_on),
        Proof::Identity { identity } => same_device(path, identity),
        Proof::Network { cluster } => network::verify(image, cluster.as_deref()),
        Proof::Impossible { reason } => Err(reason.clone()),
    }
}

fn beside(path: &Path, image: &str, file: &str, nonce: &str, bytes: u64) -> Result<(), String> {
    if !file.starts_with(PREFIX) || file.contains('/') {
        return Err("the source's challenge can't be understood".to_owned());
    }
    let real = path.canonicalize().map_err(|error| error.to_string())?;
    if real.file_name().and_then(|name| name.to_str()) != Some(image) {
        return Err(format!("here it is {}, there it is called {image}", real.display()));
    }
    let length = plain_file(&real)?;
    let folder = real.parent().ok_or("it is in no directory")?;
    let mut found = String::new();
    let read = open_plain(&folder.join(file))
        .and_then(|opened| opened.take(NONCE_READ).read_to_string(&mut found));
    if read.is_err() || found != nonce {
        return Err(format!(
            "{} here is another directory than at the source, so the image is a copy",
            folder.display()
        ));
    }
    if length != bytes {
        return Err(format!("it has {length} bytes here and {bytes} at the source"));
    }
    Ok(())
}

fn same_content(path: &Path, bytes: u64, hash: &str, goes_on: GoesOn<'_>) -> Result<(), String> {
    // The cheap test first: it also bounds what a peer can make this host read.
    if plain_file(path)? != bytes {
        return Err("it has another length here".to_owned());
    }
    let (_, here) = content(path, goes_on)?;
    if here == hash { Ok(()) } else { Err("it has other content here".to_owned()) }
}

fn same_device(path: &Path, identity: &str) -> Result<(), String> {
    let file = fs::metadata(path).map_err(|error| error.to_string())?;
    if !file.file_type().is_block_device() {
        return Err("it is a block device at the source and none here".to_owned());
    }
    let here = block_device::identity(file.rdev())?;
    if here != identity {
        return Err(format!("here it is the device {here}, at the source {identity}"));
    }
    if block_device::is_local_name(&here) {
        return Err(format!("other hosts may have another disk with its name, {here}"));
    }
    Ok(())
}

fn plain_file(path: &Path) -> Result<u64, String> {
    let file = fs::metadata(path).map_err(|error| error.to_string())?;
    if file.is_file() { Ok(file.len()) } else { Err("it is not a file here".to_owned()) }
}
