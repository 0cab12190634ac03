//! Proves that an image is another one than the source's: copying an image onto
//! itself starts with zeroing it.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use super::Proof;
use super::block_device::{self, Device};
use super::challenge::PREFIX;
use super::content::open_plain;

/// How an image at the destination compares with the source's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kinship {
    /// It is another.
    Other,
    /// It is the very same.
    Same,
    /// Not known, with the reason.
    Unsure(String),
}

/// A nonce's file holds 32 bytes; one more is enough to see that it differs.
const NONCE_READ: u64 = 33;

/// How the image at `path` compares with the one that the source made `proof`
/// for.
pub(super) fn compare(path: &Path, proof: &Proof) -> Kinship {
    match proof {
        Proof::Nonce { image, file, nonce, .. } => beside(path, image, file, nonce),
        Proof::Identity { identity } => device(path, identity),
        Proof::Content { .. } | Proof::Network { .. } => {
            Kinship::Unsure("the source made no challenge for it".to_owned())
        }
        Proof::Impossible { reason } => Kinship::Unsure(reason.clone()),
    }
}

/// The source's nonce is next to the image only if both hosts see the same directory.
fn beside(path: &Path, image: &str, file: &str, nonce: &str) -> Kinship {
    let unsure = |reason: &str| Kinship::Unsure(reason.to_owned());
    if !file.starts_with(PREFIX) || file.contains('/') || image.contains('/') {
        return unsure("the source's challenge can't be understood");
    }
    let Ok(real) = path.canonicalize() else { return unsure("its directory can't be determined") };
    let Some(folder) = real.parent() else { return unsure("it is in no directory") };
    let mut found = String::new();
    let read = open_plain(&folder.join(file))
        .and_then(|opened| opened.take(NONCE_READ).read_to_string(&mut found));
    match read {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Kinship::Other,
        Err(error) => return Kinship::Unsure(error.to_string()),
        Ok(_) if found != nonce => return unsure("the source's challenge was changed"),
        Ok(_) => {}
    }
    // In the same directory, another name may be the same file.
    match (fs::metadata(&real), fs::metadata(folder.join(image))) {
        (Ok(here), Ok(there)) if (here.dev(), here.ino()) == (there.dev(), there.ino()) => {
            Kinship::Same
        }
        (Ok(_), Ok(_)) => Kinship::Other,
        _ => unsure("the source's image is not visible next to it"),
    }
}

fn device(path: &Path, identity: &str) -> Kinship {
    match fs::metadata(path) {
        Err(error) => Kinship::Unsure(error.to_string()),
        Ok(file) if !file.file_type().is_block_device() => Kinship::Other,
        Ok(file) => match block_device::identity(file.rdev()) {
            Ok(here) => identified(&here, identity),
            Err(reason) => Kinship::Unsure(reason),
        },
    }
}

/// How the device with the identity `here` compares with the source's. One LUN may have an identity
/// of each kind: of its own, of a multipath device, of a logical volume on it.
fn identified(here: &str, there: &str) -> Kinship {
    let unsure = |reason: &str| Kinship::Unsure(reason.to_owned());
    let (here, there) = (Device::of(here), Device::of(there));
    if here.identity == there.identity {
        return match (here.partition, there.partition) {
            (here, there) if here == there => Kinship::Same,
            (Some(_), Some(_)) => Kinship::Other,
            _ => unsure("one is a partition of the other"),
        };
    }
    match (here.kind(), there.kind()) {
        (Some(here), Some(there)) if here == there => Kinship::Other,
        _ => unsure("the two hosts identify them in different ways, so one may be on the other"),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn nonce(image: &str, file: &str) -> Proof {
        Proof::Nonce {
            image: image.to_owned(),
            file: file.to_owned(),
            nonce: "n".repeat(32),
            bytes: 1,
            content: None,
        }
    }

    #[test]
    fn the_source_s_own_image_is_known_by_any_name() {
        let (shared, local) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let own = shared.path().join("own");
        for path in [&own, &shared.path().join("next"), &local.path().join("own")] {
            fs::write(path, b"x").unwrap();
        }
        fs::hard_link(&own, shared.path().join("hard")).unwrap();
        std::os::unix::fs::symlink(&own, local.path().join("soft")).unwrap();
        let proof = nonce("own", ".droveway-m1");
        let of = |path: &Path| compare(path, &proof);
        // A host that doesn't see the source's directory.
        assert_eq!(of(&own), Kinship::Other);

        fs::write(shared.path().join(".droveway-m1"), "n".repeat(32)).unwrap();
        for same in ["own", "hard"] {
            assert_eq!(of(&shared.path().join(same)), Kinship::Same, "{same}");
        }
        assert_eq!(of(&local.path().join("soft")), Kinship::Same);
        assert_eq!(of(&shared.path().join("next")), Kinship::Other);
        assert_eq!(of(&local.path().join("own")), Kinship::Other);

        fs::write(shared.path().join(".droveway-m1"), "another").unwrap();
        assert!(matches!(of(&own), Kinship::Unsure(_)));
        fs::remove_file(&own).unwrap();
        assert!(matches!(of(&own), Kinship::Unsure(_)));
    }

    /// Opening a pipe would wait for a writer.
    #[test]
    fn a_pipe_in_the_place_of_a_nonce_is_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let (image, pipe) = (dir.path().join("own"), dir.path().join(".droveway-m1"));
        fs::write(&image, b"x").unwrap();
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let found = compare(&image, &nonce("own", ".droveway-m1"));
        assert_eq!(found, Kinship::Unsure("it is not a file".to_owned()));
    }

    #[test]
    fn without_proof_an_image_does_not_count_as_another() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for proof in [
            nonce("x", "../secret"),
            nonce("../x", ".droveway-1"),
            Proof::Network { cluster: None },
            Proof::Content { bytes: 0, hash: String::new() },
            Proof::Impossible { reason: "why".to_owned() },
        ] {
            assert!(matches!(compare(file.path(), &proof), Kinship::Unsure(_)), "{proof:?}");
        }
        let device = Proof::Identity { identity: "naa.5".to_owned() };
        assert_eq!(compare(file.path(), &device), Kinship::Other);
    }

    #[test]
    fn only_identities_of_one_kind_tell_devices_apart() {
        let (same, other) = (Some(Kinship::Same), Some(Kinship::Other));
        for (one, another, expected) in [
            ("naa.600a", "naa.600a", &same),
            ("naa.600a", "mpath-3600a", &same),
            ("eui.0025", "mpath-20025", &same),
            ("eui.0025", "mpath-eui.0025", &same),
            ("naa.600a part 1", "naa.600a part 1", &same),
            ("mpath-1ATA_A", "mpath-1ATA_A", &same),
            ("naa.600a", "naa.600b", &other),
            ("naa.600a", "mpath-3600b", &other),
            ("naa.600a part 1", "naa.600a part 2", &other),
            ("naa.600a part 1", "naa.600b", &other),
            ("mpath-1ATA_A", "mpath-1ATA_B", &other),
            ("LVM-abc", "LVM-abd", &other),
            ("naa.600a", "eui.600a", &None),
            ("naa.600a", "mpath-1ATA_A", &None),
            ("naa.600a", "naa.600a part 1", &None),
            ("LVM-abc", "naa.600a", &None),
            ("LVM-abc", "mpath-3600a", &None),
            ("LVM-abc", "LVM-abd-tpool", &None),
            ("LVM-abc", "LVM-abc-real", &None),
            ("", "naa.600a", &None),
            ("what", "ever", &None),
        ] {
            for (here, there) in [(one, another), (another, one)] {
                let found = identified(here, there);
                let known = Some(&found).filter(|found| !matches!(found, Kinship::Unsure(_)));
                assert_eq!(known, expected.as_ref(), "{here}, {there}");
            }
        }
    }
}
