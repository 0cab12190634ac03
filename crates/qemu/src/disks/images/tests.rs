//! Decisions by table; images examined and created by the real tool.

use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::disks::{Challenge, Proof, Qcow2};

const MIB: u64 = 1 << 20;

fn moving(path: &Path, format: Format, bytes: u64) -> Moving {
    let proof = Proof::Nonce {
        image: "own".to_owned(),
        file: ".droveway-m1".to_owned(),
        nonce: "n".repeat(32),
        bytes,
        content: None,
    };
    Moving {
        disk: "d0".to_owned(),
        format,
        bytes,
        allocated_bytes: MIB,
        challenge: Challenge { image: path.display().to_string(), proof },
    }
}

fn tool() -> QemuImg {
    QemuImg::new("qemu-img".into(), None)
}

fn try_prepare(moving: &Moving, create: bool, overwrite: bool) -> Result<Prepared, String> {
    let allowed = Allowed { create, overwrite };
    let (disks, promises) = (std::slice::from_ref(moving), Promises::default());
    prepare(disks, &[], Path::new("/"), allowed, &tool(), &promises)
        .map_err(|error| error.to_string())
}

fn image() -> Found {
    Found::Image {
        identity: (0, 0),
        kinship: Kinship::Other,
        bytes: 8 * MIB,
        has_backing: false,
        is_empty: true,
        taken: 0,
        device_bytes: None,
    }
}

fn changed(change: impl Fn(&mut Found)) -> Found {
    let mut found = image();
    change(&mut found);
    found
}

#[test]
fn what_is_found_and_what_is_allowed_decide() {
    let disk = moving(Path::new("/x"), Format::Raw, 8 * MIB);
    let with = |kinship: Kinship| {
        changed(|found| {
            let Found::Image { kinship: it, .. } = found else { return };
            *it = kinship.clone();
        })
    };
    let sized = |size: u64| {
        changed(|found| {
            let Found::Image { bytes, .. } = found else { return };
            *bytes = size;
        })
    };
    let full = || {
        changed(|found| {
            let Found::Image { is_empty, .. } = found else { return };
            *is_empty = false;
        })
    };
    let backed = changed(|found| {
        let Found::Image { has_backing, .. } = found else { return };
        *has_backing = true;
    });
    let (none, create, overwrite) = ((false, false), (true, false), (false, true));
    type Row<'a> = (Found, (bool, bool), Result<(), &'a str>);
    let table: [Row<'_>; 11] = [
        (Found::Nothing, none, Err("--create-disks")),
        (Found::Nothing, overwrite, Err("--create-disks")),
        (Found::Nothing, create, Ok(())),
        (image(), none, Ok(())),
        (full(), none, Err("--overwrite-disks")),
        (full(), overwrite, Ok(())),
        (sized(7 * MIB), overwrite, Err("it has 7340032 bytes, the disk has 8388608")),
        (sized(9 * MIB), overwrite, Err("it has 9437184 bytes")),
        (with(Kinship::Same), (true, true), Err("the source's own image")),
        (with(Kinship::Unsure("why".into())), (true, true), Err("source's (why)")),
        (backed, (true, true), Err("backing file")),
    ];
    for (found, (create, overwrite), expected) in table {
        let decided = decide(&disk, &found, Allowed { create, overwrite });
        match (decided, expected) {
            (Ok(()), Ok(())) => {}
            (Err(problem), Err(part)) => {
                assert!(problem.to_string().contains(part), "{problem}");
            }
            (decided, _) => panic!("{found:?}: {decided:?}"),
        }
    }
}

/// Linux has no SEEK_DATA for block devices. Nor has it for this file, which any user may read.
#[test]
fn an_image_that_does_not_tell_its_holes_is_read() {
    let file = File::open("/proc/version").unwrap();
    let told = rustix::fs::seek(&file, SeekFrom::Data(0));
    assert_eq!(told, Err(Errno::INVAL), "the test needs another file");
    assert!(!holds_zeros(&file).unwrap());
}

/// The image there may be smaller than the disk, but not than what the disk takes up.
#[test]
fn a_qcow2_image_on_a_block_device_needs_room_in_it() {
    let on_device = |size: u64| {
        changed(|found| {
            let Found::Image { device_bytes, .. } = found else { return };
            *device_bytes = Some(size);
        })
    };
    let decided = |format: Format, size: u64| {
        let disk = moving(Path::new("/x"), format, 8 * MIB);
        let decided = decide(&disk, &on_device(size), Allowed::default());
        decided.map_err(|problem| problem.to_string())
    };
    let qcow2 = Format::Qcow2(Qcow2::default());
    assert_eq!(decided(qcow2.clone(), MIB), Ok(()));
    let refused = decided(qcow2, MIB - 1).unwrap_err();
    assert_eq!(refused, "the disk takes up 1048576 bytes, and there is room for 1048575");
    // Its size was compared.
    assert_eq!(decided(Format::Raw, MIB - 1), Ok(()));
}

#[test]
fn created_images_are_like_the_source_s_and_are_removed_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.img");
    let kept = Qcow2 { cluster_bytes: 4096, lazy_refcounts: true, ..Qcow2::default() };
    let old = Qcow2 { compat: "0.10".to_owned(), ..Qcow2::default() };
    for format in [Format::Raw, Format::Qcow2(kept), Format::Qcow2(old)] {
        let disk = moving(&path, format.clone(), 1 << 30);
        let refused = try_prepare(&disk, false, true).unwrap_err();
        assert!(refused.contains("doesn't exist"), "{refused}");
        let prepared = try_prepare(&disk, true, false).unwrap();
        assert!(prepared.images()[0].created);
        let tool = tool();
        let info = tool.info(format.driver(), &File::open(&path).unwrap()).unwrap();
        assert_eq!(info["virtual-size"], 1_u64 << 30);
        if let Format::Qcow2(options) = &format {
            let made = &info["format-specific"]["data"];
            assert_eq!(info["cluster-size"], options.cluster_bytes);
            assert_eq!(made["compat"], options.compat.as_str());
        }
        assert!(fs::metadata(&path).unwrap().blocks() < 4096, "it is sparse");
        drop(prepared);
        assert!(!path.exists(), "a move that failed leaves nothing");

        let mut prepared = try_prepare(&disk, true, false).unwrap();
        prepared.keep();
        drop(prepared);
        let again = try_prepare(&disk, false, false).unwrap();
        assert!(!again.images()[0].created, "an empty one that is there is used");
        drop(again);
        assert!(path.exists(), "and what was not made is not removed");
        fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_file_that_took_the_place_of_ours_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.img");
    let prepared = try_prepare(&moving(&path, Format::Raw, MIB), true, false).unwrap();
    fs::rename(&path, dir.path().join("moved")).unwrap();
    fs::write(&path, b"theirs").unwrap();
    drop(prepared);
    assert!(path.exists());
}

#[test]
fn images_with_content_of_another_format_or_size_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.img");
    let tool = tool();
    let qcow2 = Format::Qcow2(Qcow2::default());
    let file = File::create(&path).unwrap();
    file.set_len(8 * MIB).unwrap();
    assert!(try_prepare(&moving(&path, Format::Raw, 8 * MIB), false, false).is_ok());
    let refused = try_prepare(&moving(&path, qcow2.clone(), 8 * MIB), true, true).unwrap_err();
    assert!(refused.contains("not in qcow2 format"), "{refused}");
    let refused = try_prepare(&moving(&path, Format::Raw, 9 * MIB), true, true).unwrap_err();
    assert!(refused.contains("it has 8388608 bytes"), "{refused}");

    file.write_all_at(&[0; 5000], MIB).unwrap();
    assert!(try_prepare(&moving(&path, Format::Raw, 8 * MIB), false, false).is_ok());
    file.write_all_at(b"somebody's", 3 * MIB).unwrap();
    let disk = moving(&path, Format::Raw, 8 * MIB);
    assert!(try_prepare(&disk, true, false).unwrap_err().contains("it holds data"));
    assert!(try_prepare(&disk, false, true).is_ok());

    let overlay = dir.path().join("overlay");
    tool.create(&qcow2, &File::create_new(&overlay).unwrap(), 8 * MIB).unwrap();
    let rebased = std::process::Command::new("qemu-img")
        .args(["rebase", "-u", "-f", "qcow2", "-F", "raw", "-b", "a.img", "overlay"])
        .current_dir(dir.path())
        .status()
        .unwrap();
    assert!(rebased.success());
    let refused = try_prepare(&moving(&overlay, qcow2, 8 * MIB), true, true).unwrap_err();
    assert!(refused.contains("it has a backing file"), "{refused}");
}

#[test]
fn what_can_t_be_an_image_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("none/a.img");
    let table = [
        (missing.as_path(), "its directory doesn't exist"),
        (dir.path(), "neither a file nor a block device"),
        (Path::new("/dev/null"), "neither a file nor a block device"),
    ];
    for (path, expected) in table {
        let refused = try_prepare(&moving(path, Format::Raw, MIB), true, true).unwrap_err();
        assert!(refused.contains(expected), "{refused}");
    }
    let link = dir.path().join("link");
    std::os::unix::fs::symlink("/nonexistent/a", &link).unwrap();
    assert!(try_prepare(&moving(&link, Format::Raw, MIB), true, true).is_err());
    for bytes in [0, 1, 1 << 63] {
        let disk = moving(&dir.path().join("a"), Format::Raw, bytes);
        assert!(
            try_prepare(&disk, true, true)
                .unwrap_err()
                .contains("an invalid description of the disk")
        );
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left behind");
}

#[test]
fn two_disks_never_move_to_one_image() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.img");
    let first = moving(&path, Format::Raw, MIB);
    let second = Moving { disk: "d1".to_owned(), ..first.clone() };
    let allowed = Allowed { create: true, overwrite: true };
    let tool = tool();
    let promises = Promises::default();
    let refused = prepare(&[first, second], &[], Path::new("/"), allowed, &tool, &promises);
    let refused = refused.unwrap_err();
    assert!(refused.to_string().contains("disk `d0` moves there too"), "{refused}");
    assert!(!path.exists());
}

#[test]
fn disks_need_room_together() {
    let dir = tempfile::tempdir().unwrap();
    let folder = File::open(dir.path()).unwrap();
    let room = rustix::fs::fstatvfs(&folder).map(|all| all.f_bavail * all.f_frsize).unwrap();
    let disk = |name: &str| Moving {
        disk: name.to_owned(),
        allocated_bytes: room / 10 * 6,
        ..moving(&dir.path().join(name), Format::Raw, 8 * MIB)
    };
    let allowed = Allowed { create: true, overwrite: false };
    let (disks, tool, promises) = ([disk("d0"), disk("d1")], tool(), Promises::default());
    let prepare = |disks: &[Moving]| {
        super::prepare(disks, &[], Path::new("/"), allowed, &tool, &promises)
            .map_err(|error| error.to_string())
    };
    for disk in &disks {
        assert!(prepare(std::slice::from_ref(disk)).is_ok());
    }
    let refused = prepare(&disks[..]).unwrap_err();
    assert!(refused.contains("disk `d1`") && refused.contains("there is room for"), "{refused}");
    assert!(!dir.path().join("d0").exists());
    // Nor does an image that was there before take less.
    File::create(dir.path().join("d0")).unwrap().set_len(8 * MIB).unwrap();
    let refused = prepare(&disks[..]).unwrap_err();
    assert!(refused.contains("disk `d1`"), "{refused}");
    assert!(dir.path().join("d0").exists());

    // Nor are they of one VM only.
    let [first, second] = &disks;
    let mut arriving = prepare(std::slice::from_ref(first)).unwrap();
    let refused = prepare(std::slice::from_ref(second)).unwrap_err();
    assert!(refused.contains("for other disks that arrive there"), "{refused}");
    arriving.keep();
    assert!(prepare(std::slice::from_ref(second)).is_ok(), "that VM is here");
}

#[test]
fn no_file_is_made_among_the_devices() {
    let system = |path: &str| fs::metadata(path).unwrap().dev();
    if system("/dev") == system("/") {
        // Files there are on a disk.
        return;
    }
    let path = Path::new("/dev/droveway-no-such-disk");
    let refused = try_prepare(&moving(path, Format::Raw, MIB), true, true).unwrap_err();
    assert!(refused.contains("a file in /dev is lost"), "{refused}");
    assert!(!path.exists());
}

#[test]
fn the_source_s_own_image_is_never_a_target() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("own");
    File::create(&path).unwrap().set_len(MIB).unwrap();
    fs::write(dir.path().join(".droveway-m1"), "n".repeat(32)).unwrap();
    let disk = moving(&path, Format::Raw, MIB);
    let refused = try_prepare(&disk, true, true).unwrap_err();
    assert!(refused.contains("the source's own image"), "{refused}");
    let sent = serde_json::to_string(&disk).unwrap();
    assert_eq!(serde_json::from_str::<Moving>(&sent).unwrap(), disk);
}

/// A peer's choices are carried out with the rights of QEMU's user: no file is created
/// where only root may, and no file is examined that only root may read.
#[test]
fn nothing_is_done_with_more_rights_than_qemus() {
    if !rustix::process::geteuid().is_root() {
        // Only root has rights to give up.
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let [open, closed] = ["open", "closed"].map(|name| dir.path().join(name));
    let mode = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    for (path, bits) in [(&open, 0o777), (&closed, 0o755)] {
        fs::create_dir(path).unwrap();
        mode(path, bits);
    }
    mode(dir.path(), 0o755);
    let user = User { uid: 65534, gid: 65534, groups: vec![65534] };
    let tool = QemuImg::new("qemu-img".into(), Some(&user));
    let allowed = Allowed { create: true, overwrite: true };
    let prepare = |path: &Path, format: Format| {
        let disk = moving(path, format, 8 * MIB);
        super::prepare(&[disk], &[], Path::new("/"), allowed, &tool, &Promises::default())
            .map_err(|error| error.to_string())
    };
    for format in [Format::Raw, Format::Qcow2(Qcow2::default())] {
        let refused = prepare(&closed.join("new"), format.clone()).unwrap_err();
        assert!(refused.contains("may not make files in its directory"), "{refused}");
        // A link in the path leads to another directory.
        let link = open.join("link");
        std::os::unix::fs::symlink(&closed, &link).unwrap();
        let refused = prepare(&link.join("new"), format.clone()).unwrap_err();
        assert!(refused.contains("may not make files in its directory"), "{refused}");
        fs::remove_file(&link).unwrap();
        let made = prepare(&open.join("new"), format).unwrap();
        let image = fs::metadata(open.join("new")).unwrap();
        assert_eq!((image.uid(), image.gid()), (65534, 65534));
        drop(made);
        assert!(!open.join("new").exists());
    }
    assert_eq!(fs::read_dir(&closed).unwrap().count(), 0);

    let secret = closed.join("secret");
    File::create(&secret).unwrap().set_len(8 * MIB).unwrap();
    mode(&secret, 0o600);
    let refused = prepare(&secret, Format::Raw).unwrap_err();
    assert!(refused.contains("may not open it"), "{refused}");

    // A created image whose directory is exchanged before it is removed.
    let victim = closed.join("victim");
    fs::write(&victim, "precious").unwrap();
    fs::create_dir(open.join("dir")).unwrap();
    mode(&open.join("dir"), 0o777);
    let made = prepare(&open.join("dir/victim"), Format::Raw).unwrap();
    fs::rename(open.join("dir"), open.join("was")).unwrap();
    fs::remove_file(open.join("was/victim")).unwrap();
    fs::hard_link(&victim, open.join("was/victim")).unwrap();
    std::os::unix::fs::symlink(&closed, open.join("dir")).unwrap();
    drop(made);
    let own = fs::metadata(&victim).unwrap();
    assert!(remove_made(&victim, (own.dev(), own.ino()), Some(&user)).is_err());
    assert!(victim.exists());
}

/// Between its examination and the copy, QEMU's user may have the path lead elsewhere.
#[test]
fn only_the_prepared_file_is_opened_to_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let (path, other) = (dir.path().join("image"), dir.path().join("other"));
    let prepared = try_prepare(&moving(&path, Format::Raw, MIB), true, false).unwrap();
    let image = &prepared.images()[0];
    image.open().unwrap();
    fs::rename(&path, &other).unwrap();
    assert!(image.open().is_err());
    fs::write(&path, "another").unwrap();
    let refused = image.open().unwrap_err();
    assert!(refused.contains("has become another file"), "{refused}");
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink(&other, &path).unwrap();
    image.open().unwrap();
}

#[test]
fn an_image_is_opened_with_the_rights_of_qemus_user() {
    if !rustix::process::geteuid().is_root() {
        // Only root has rights to give up.
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let path = dir.path().join("image");
    File::create(&path).unwrap().set_len(MIB).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    let user = User { uid: 65534, gid: 65534, groups: vec![65534] };
    let tool = QemuImg::new("qemu-img".into(), Some(&user));
    let disk = moving(&path, Format::Raw, MIB);
    let promises = Promises::default();
    let prepared =
        prepare(&[disk], &[], Path::new("/"), Allowed::default(), &tool, &promises).unwrap();
    // It may read it, and no more.
    let refused = prepared.images()[0].open().unwrap_err();
    assert!(refused.contains("Permission denied"), "{refused}");
}
