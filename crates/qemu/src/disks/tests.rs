//! Challenges made and met in directories that play hosts.

use std::cell::Cell;
use std::fs::{self, File, Permissions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::*;
use crate::shape::{Image, Shape};

fn image(driver: &str, file: &Path, read_only: bool) -> Shape {
    let image =
        Image { driver: driver.to_owned(), file: file.display().to_string(), read_only, bytes: 0 };
    // This process plays QEMU: it has the image open.
    Shape { images: vec![image], pid: Some(std::process::id()), ..Shape::default() }
}

fn challenges(shape: &Shape, id: &str) -> (Vec<Challenge>, Cleanup) {
    super::challenges(shape, id, &|| Ok(()))
}

fn verify(challenge: &Challenge, overrides: &[(String, String)]) -> Result<(), NotShared> {
    super::verify(challenge, overrides, None, &|| Ok(()))
}

fn moved(from: &Path, to: &Path) -> Vec<(String, String)> {
    vec![(from.display().to_string(), to.display().to_string())]
}

#[test]
fn the_same_directory_meets_the_challenge_and_a_copy_does_not() {
    let (shared, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let disk = shared.path().join("disk.img");
    fs::write(&disk, [7; 5000]).unwrap();
    fs::copy(&disk, other.path().join("disk.img")).unwrap();
    let _open = File::open(&disk).unwrap();

    let (made, cleanup) = challenges(&image("file", &disk, false), "m1");
    assert!(matches!(made[0].proof, Proof::Nonce { .. }));
    assert_eq!(verify(&made[0], &[]), Ok(()));

    let link = other.path().join("mount");
    std::os::unix::fs::symlink(shared.path(), &link).unwrap();
    assert_eq!(verify(&made[0], &moved(shared.path(), &link)), Ok(()));

    let refused = verify(&made[0], &moved(shared.path(), other.path())).unwrap_err();
    assert!(refused.reason.for_log().contains("the image is a copy"), "{refused:?}");
    let refused = verify(&made[0], &moved(&disk, Path::new("/nonexistent"))).unwrap_err();
    assert!(refused.reason.for_log().contains("No such file"), "{refused}");

    drop(cleanup);
    let left: Vec<_> =
        fs::read_dir(shared.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["disk.img"], "nothing is left behind");
}

#[test]
fn another_length_is_another_image() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk.img");
    fs::write(&disk, [7; 5000]).unwrap();
    let _open = File::open(&disk).unwrap();
    let (made, _cleanup) = challenges(&image("file", &disk, false), "m1");
    fs::write(&disk, [7; 4000]).unwrap();
    assert!(
        verify(&made[0], &[]).unwrap_err().reason.for_log().contains("4000 bytes here and 5000")
    );
}

/// As a qcow2 image does whenever its guest writes to a new place.
#[test]
fn an_image_that_has_grown_is_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk.img");
    fs::write(&disk, [7; 5000]).unwrap();
    let _open = File::open(&disk).unwrap();
    let (made, _cleanup) = challenges(&image("file", &disk, false), "m1");
    fs::write(&disk, [7; 9000]).unwrap();
    assert_eq!(verify(&made[0], &[]), Ok(()));
}

#[test]
fn a_name_that_leads_elsewhere_than_qemus_file_proves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk.img");
    fs::write(&disk, b"x").unwrap();
    let (made, _cleanup) = challenges(&image("file", &disk, false), "m1");
    assert!(verify(&made[0], &[]).unwrap_err().reason.for_log().contains("another file open"));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "and no nonce was made");
}

#[test]
fn content_stands_in_where_nothing_writes() {
    let dir = tempfile::tempdir().unwrap();
    let iso = dir.path().join("a.iso");
    fs::write(&iso, [7; 5000]).unwrap();
    let (bytes, hash) = content::content(&iso, &|| Ok(())).unwrap();
    let made =
        Challenge { image: iso.display().to_string(), proof: Proof::Content { bytes, hash } };
    assert_eq!(verify(&made, &[]), Ok(()));
    fs::write(&iso, [8; 5000]).unwrap();
    assert!(verify(&made, &[]).unwrap_err().reason.for_log().contains("other content"));
    fs::write(&iso, [7; 5001]).unwrap();
    assert!(verify(&made, &[]).unwrap_err().reason.for_log().contains("another length"));
}

#[test]
fn each_host_may_have_its_own_copy_of_a_read_only_image() {
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let firmware = here.path().join("code.fd");
    fs::write(&firmware, [7; 5000]).unwrap();
    let _open = File::open(&firmware).unwrap();
    let copy = there.path().join("other-name.fd");
    fs::write(&copy, [7; 5000]).unwrap();
    let renamed = moved(&firmware, &copy);

    let (made, _cleanup) = challenges(&image("file", &firmware, true), "m1");
    assert!(matches!(made[0].proof, Proof::Nonce { content: Some(_), .. }), "{made:?}");
    assert_eq!(verify(&made[0], &[]), Ok(()));
    assert_eq!(verify(&made[0], &renamed), Ok(()));
    fs::write(&copy, [8; 5000]).unwrap();
    assert!(verify(&made[0], &renamed).unwrap_err().reason.for_log().contains("other content"));
    fs::write(&copy, [7; 5001]).unwrap();
    assert!(verify(&made[0], &renamed).unwrap_err().reason.for_log().contains("another length"));

    // One that the VM writes to has to be the same.
    fs::write(&copy, [7; 5000]).unwrap();
    let (made, _cleanup) = challenges(&image("file", &firmware, false), "m2");
    assert!(matches!(made[0].proof, Proof::Nonce { content: None, .. }), "{made:?}");
    assert!(verify(&made[0], &renamed).is_err());
}

#[test]
fn no_more_is_read_for_copies_than_is_allowed() {
    let dir = tempfile::tempdir().unwrap();
    let iso = dir.path().join("a.iso");
    fs::write(&iso, [7; 5000]).unwrap();
    let mut left = 9000;
    let goes_on: GoesOn<'_> = &|| Ok(());
    assert!(challenge::hash_of_copy(&iso, 5000, goes_on, &mut left).is_some());
    assert_eq!(left, 4000);
    assert_eq!(challenge::hash_of_copy(&iso, 5000, goes_on, &mut left), None);
    assert_eq!(left, 4000);
}

/// Reading them may take minutes: at the source its operator may give up the move, and at the
/// destination the source may.
#[test]
fn a_copy_is_read_only_as_long_as_the_move_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let iso = dir.path().join("a.iso");
    fs::write(&iso, vec![7_u8; 3 << 20]).unwrap();
    let _open = File::open(&iso).unwrap();
    let shape = image("file", &iso, true);
    let asked = Cell::new(0);
    let twice = || {
        asked.set(asked.get() + 1);
        if asked.get() > 2 { Err("it was cancelled".to_owned()) } else { Ok(()) }
    };
    let (made, _cleanup) = super::challenges(&shape, "m1", &twice);
    assert!(matches!(made[0].proof, Proof::Nonce { content: None, .. }), "{made:?}");
    assert_eq!(asked.get(), 3, "it was not read to its end");

    let (bytes, hash) = content::content(&iso, &|| Ok(())).unwrap();
    let made =
        Challenge { image: iso.display().to_string(), proof: Proof::Content { bytes, hash } };
    asked.set(0);
    let refused = super::verify(&made, &[], None, &twice).unwrap_err();
    assert_eq!(refused.reason.for_log(), "it was cancelled");
    assert_eq!(verify(&made, &[]), Ok(()));
}

#[test]
fn services_of_the_network_are_shared_and_those_of_the_host_are_not() {
    let proof = |driver: &str, file: &str| {
        let (made, _cleanup) = challenges(&image(driver, Path::new(file), false), "m1");
        made.first().map(|one| verify(one, &[]).is_ok())
    };
    assert_eq!(proof("nbd", "nbd://store:10809/disk"), Some(true));
    assert_eq!(proof("nbd", "nbd+unix:///disk?socket=/run/nbd"), Some(false));
    assert_eq!(proof("nbd", "nbd://localhost/disk"), Some(false));
    assert_eq!(proof("nbd", "nbd://unixstore/localhost-disk"), Some(true));
    assert_eq!(proof("rbd", "rbd:pool/disk"), Some(true));
    assert_eq!(proof("vvfat", "/srv"), Some(false));
    assert_eq!(proof("null-co", "null-co://"), None);
}

#[test]
fn a_hostile_challenge_reads_no_other_file() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk.img");
    fs::write(&disk, b"x").unwrap();
    fs::write(dir.path().join("secret"), b"nonce").unwrap();
    for file in ["secret", "../secret", ".droveway-/../secret"] {
        let made = Challenge {
            image: disk.display().to_string(),
            proof: Proof::Nonce {
                image: "disk.img".to_owned(),
                file: file.to_owned(),
                nonce: "nonce".to_owned(),
                bytes: 1,
                content: None,
            },
        };
        assert!(verify(&made, &[]).is_err(), "{file}");
    }
}

/// Whatever a host has, its answer is the same.
#[test]
fn a_peer_learns_nothing_about_files() {
    let dir = tempfile::tempdir().unwrap();
    let (present, opened) = (dir.path().join("present"), dir.path().join("opened"));
    fs::write(&present, [7; 5000]).unwrap();
    fs::write(&opened, [7; 5000]).unwrap();
    let open = File::open(&opened).unwrap();
    let by_descriptor = format!("/proc/self/fd/{}", open.as_raw_fd());
    let nonce = |name: &str| Proof::Nonce {
        image: name.to_owned(),
        file: ".droveway-m1".to_owned(),
        nonce: "n".to_owned(),
        bytes: 4000,
        content: None,
    };
    let (_, hash) = content::content(&opened, &|| Ok(())).unwrap();
    let content = |bytes| Proof::Content { bytes, hash: hash.clone() };
    let identity = || Proof::Identity { identity: "naa.1".to_owned() };
    let present = present.to_str().unwrap();
    for (image, proof) in [
        ("/nonexistent", nonce("nonexistent")),
        (present, nonce("other-name")),
        (present, nonce("present")),
        (present, content(4000)),
        (present, identity()),
        ("/proc/self/status", content(0)),
        ("/sys/kernel/uevent_seqnum", content(4096)),
        ("/dev/null", content(0)),
        ("/dev/fd/0", identity()),
        (dir.path().to_str().unwrap(), content(4096)),
        // As a file it would do.
        (&by_descriptor, content(5000)),
    ] {
        let made = Challenge { image: image.to_owned(), proof };
        let refused = verify(&made, &[]).unwrap_err();
        let text = refused.to_string();
        let expected = "can't be proved to be the same at both hosts: the log of the agent there \
                        has the reason";
        assert_eq!(text, format!("{image} {expected}"), "{refused:?}");
    }
}

#[test]
fn images_are_opened_with_the_rights_of_qemus_user() {
    if !rustix::process::geteuid().is_root() {
        // Only root has another user's rights to use.
        return;
    }
    let nobody = crate::launch::User { uid: 65534, gid: 65534, groups: Vec::new() };
    let dir = tempfile::tempdir().unwrap();
    let mode = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    mode(dir.path(), 0o755);
    let disk = dir.path().join("disk.img");
    fs::write(&disk, [7; 5000]).unwrap();
    let _open = File::open(&disk).unwrap();
    let as_nobody = |made: &Challenge| super::verify(made, &[], Some(&nobody), &|| Ok(()));

    let (made, _cleanup) = challenges(&image("file", &disk, false), "m1");
    assert_eq!(as_nobody(&made[0]), Ok(()));
    let (bytes, hash) = content::content(&disk, &|| Ok(())).unwrap();
    let by_content =
        Challenge { image: disk.display().to_string(), proof: Proof::Content { bytes, hash } };
    assert_eq!(as_nobody(&by_content), Ok(()));
    mode(&disk, 0o600);
    assert_eq!(verify(&by_content, &[]), Ok(()));
    assert!(as_nobody(&by_content).is_err());
    mode(dir.path(), 0o700);
    assert!(as_nobody(&made[0]).is_err());
}

#[test]
fn agents_of_release_0_1_0_understand_proofs_and_are_understood() {
    #[derive(Debug, PartialEq, serde::Deserialize)]
    #[serde(rename_all = "kebab-case", tag = "by")]
    enum Known {
        Nonce { image: String, file: String, nonce: String, bytes: u64 },
        Network,
    }
    let nonce = |content: Option<String>| Proof::Nonce {
        image: "i".to_owned(),
        file: "f".to_owned(),
        nonce: "n".to_owned(),
        bytes: 9,
        content,
    };
    let network = |cluster: Option<String>| Proof::Network { cluster };
    let some = || Some("c".to_owned());
    for (sent, theirs) in [
        (nonce(some()), r#"{"by":"nonce","image":"i","file":"f","nonce":"n","bytes":9}"#),
        (network(some()), r#"{"by":"network"}"#),
    ] {
        let json = serde_json::to_string(&sent).unwrap();
        let known: Known = serde_json::from_str(theirs).unwrap();
        assert_eq!(serde_json::from_str::<Known>(&json).unwrap(), known);
        assert_eq!(serde_json::from_str::<Proof>(&json).unwrap(), sent);
    }
    for (proof, theirs) in [
        (nonce(None), r#"{"by":"nonce","image":"i","file":"f","nonce":"n","bytes":9}"#),
        (network(None), r#"{"by":"network"}"#),
    ] {
        assert_eq!(serde_json::to_string(&proof).unwrap(), theirs);
        assert_eq!(serde_json::from_str::<Proof>(theirs).unwrap(), proof);
    }
}
