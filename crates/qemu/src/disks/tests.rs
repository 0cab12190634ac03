//! Challenges made and met in directories that play hosts.

use std::fs::{self, File};
use std::path::Path;

use super::*;
use crate::shape::{Image, Shape};

fn image(driver: &str, file: &Path, read_only: bool) -> Shape {
    let image =
        Image { driver: driver.to_owned(), file: file.display().to_string(), read_only, bytes: 0 };
    // This process plays QEMU: it has the image open.
    Shape { images: vec![image], pid: Some(std::process::id()), ..Shape::default() }
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
    assert!(refused.to_string().contains("the image is a copy"), "{refused}");
    let refused = verify(&made[0], &moved(&disk, Path::new("/nonexistent"))).unwrap_err();
    assert!(refused.reason.contains("No such file"), "{refused}");

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
    assert!(verify(&made[0], &[]).unwrap_err().reason.contains("4000 bytes here and 5000"));
}

#[test]
fn a_name_that_leads_elsewhere_than_qemus_file_proves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk.img");
    fs::write(&disk, b"x").unwrap();
    let (made, _cleanup) = challenges(&image("file", &disk, false), "m1");
    assert!(verify(&made[0], &[]).unwrap_err().reason.contains("another file open"));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "and no nonce was made");
}

#[test]
fn content_stands_in_where_nothing_writes() {
    let dir = tempfile::tempdir().unwrap();
    let iso = dir.path().join("a.iso");
    fs::write(&iso, [7; 5000]).unwrap();
    let (bytes, hash) = challenge::content(&iso).unwrap();
    let made =
        Challenge { image: iso.display().to_string(), proof: Proof::Content { bytes, hash } };
    assert_eq!(verify(&made, &[]), Ok(()));
    fs::write(&iso, [8; 5000]).unwrap();
    assert!(verify(&made, &[]).unwrap_err().reason.contains("other content"));
    fs::write(&iso, [7; 5001]).unwrap();
    assert!(verify(&made, &[]).unwrap_err().reason.contains("another length"));
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
            },
        };
        assert!(verify(&made, &[]).is_err(), "{file}");
    }
}
