use std::fs;

use nbd::server::RequestKind;
use tempfile::tempdir;

use crate::disk::{BEFORE, listen};
use crate::{noise, run, say};

const MIB: usize = 1 << 20;

#[test]
fn qemu_io_writes_zeroes_and_discards() {
    let dir = tempdir().unwrap();
    let disk = listen(&dir.path().join("nbd"), "vda", 8 * MIB, |_| false);
    let said = say(
        dir.path(),
        "qemu-io",
        "-f raw -d unmap nbd+unix:///vda?socket=nbd -c |'write -P 7 1000 3000| \
         -c |'write -P 8 1M 5M| -c |'write -z 2M 1M| -c |'write -z -u 3M 64k| \
         -c |'discard 4M 512k| -c |'write -f -P 9 0 512| -c flush",
    );
    assert!(said.contains("wrote 3000/3000 bytes at offset 1000"), "{said}");
    let disk = disk.join().unwrap();
    let mut expected = vec![BEFORE; 8 * MIB];
    expected[1000..4000].fill(7);
    expected[MIB..6 * MIB].fill(8);
    expected[2 * MIB..3 * MIB].fill(0);
    expected[3 * MIB..3 * MIB + (64 << 10)].fill(0);
    expected[4 * MIB..4 * MIB + (512 << 10)].fill(0);
    expected[..512].fill(9);
    assert!(disk.bytes == expected);
    assert!(disk.goodbye);
    // Writes aren't padded, zeroes and trims arrive as such, and a flush follows
    // a durable write.
    assert_eq!(disk.count(RequestKind::Write).1, (3000 + 5 * MIB + 512) as u64);
    assert_eq!(disk.count(RequestKind::WriteZeroes).1, (MIB + (64 << 10)) as u64);
    assert_eq!(disk.count(RequestKind::Trim).1, 512 << 10);
    assert!(disk.count(RequestKind::Flush).0 >= 2);
}

#[test]
fn qemu_img_copies_an_image_and_its_holes() {
    let dir = tempdir().unwrap();
    let mut expected = vec![0; 48 * MIB + 512];
    for at in [0, 20 * MIB, 47 * MIB] {
        expected[at..at + MIB].copy_from_slice(&noise(at as u64, MIB));
    }
    fs::write(dir.path().join("plain"), &expected).unwrap();
    say(dir.path(), "qemu-img", "convert -O qcow2 plain image");
    let disk = listen(&dir.path().join("nbd"), "vda", expected.len(), |_| false);
    say(dir.path(), "qemu-img", "convert -n -f qcow2 -O raw image nbd+unix:///vda?socket=nbd");
    let disk = disk.join().unwrap();
    assert!(disk.bytes == expected);
    assert!(disk.count(RequestKind::Write).1 <= 4 * MIB as u64, "{:?}", disk.seen);
}

#[test]
fn reads_are_refused_with_the_reason() {
    let dir = tempdir().unwrap();
    let disk = listen(&dir.path().join("nbd"), "vda", MIB, |_| false);
    let read = "-f raw nbd+unix:///vda?socket=nbd -c |'read 0 512| -c |'write -P 1 0 512";
    let output = run(dir.path(), "qemu-io", read);
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("read failed: Operation not permitted"), "{said}");
    assert!(said.contains("wrote 512/512"), "the connection goes on: {said}");
    assert_eq!(disk.join().unwrap().bytes[..512], [1; 512]);
}

#[test]
fn exports_are_listed_and_described() {
    let dir = tempdir().unwrap();
    let disk = listen(&dir.path().join("nbd"), "vda", MIB, |_| false);
    let listed = say(dir.path(), "qemu-nbd", &format!("--list -k {}/nbd", dir.path().display()));
    assert!(listed.contains("export: 'vda'") && listed.contains("size:  1048576"), "{listed}");
    assert!(listed.contains("( flush trim zeroes )"), "{listed}");
    let missing = run(dir.path(), "qemu-io", "-f raw nbd+unix:///nosuch?socket=nbd -c flush");
    let said = String::from_utf8_lossy(&missing.stderr);
    assert!(!missing.status.success() && said.contains("no export is called 'nosuch'"), "{said}");
    say(dir.path(), "qemu-io", "-f raw nbd+unix:///vda?socket=nbd -c flush");
    assert!(disk.join().unwrap().goodbye);
}
