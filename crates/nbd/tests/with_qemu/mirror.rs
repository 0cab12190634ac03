use std::fs;

use nbd::server::RequestKind;
use serde_json::json;
use tempfile::tempdir;

use crate::disk::listen;
use crate::vm::Vm;
use crate::{noise, say};

const MIB: usize = 1 << 20;
const DISK: usize = 64 * MIB;

/// Makes an image with data in two places, and returns what its guest reads from it.
fn image(dir: &std::path::Path, format: &str) -> Vec<u8> {
    let mut content = vec![0; DISK];
    for at in [0, 33 * MIB] {
        content[at..at + 4 * MIB].copy_from_slice(&noise(at as u64, 4 * MIB));
    }
    fs::write(dir.join("plain"), &content).unwrap();
    say(dir, "qemu-img", &format!("convert -f raw -O {format} plain image"));
    content
}

fn first_difference(one: &[u8], other: &[u8]) -> Option<usize> {
    assert_eq!(one.len(), other.len());
    // As a whole first: byte by byte takes seconds without optimization.
    if one == other {
        return None;
    }
    one.iter().zip(other).position(|(one, other)| one != other)
}

#[test]
fn a_mirrored_disk_arrives_complete_with_holes_as_zeroes() {
    for (format, discard) in [("raw", "ignore"), ("qcow2", "ignore"), ("raw", "unmap")] {
        let dir = tempdir().unwrap();
        let content = image(dir.path(), format);
        let socket = dir.path().join("nbd");
        let disk = listen(&socket, "vda", DISK, |_| false);
        let vm = Vm::start(dir.path(), "image", format, false);
        vm.mirror(&socket, "vda", discard, "background");
        vm.wait_ready();
        vm.drain();
        let disk = disk.join().unwrap();
        assert!(disk.goodbye);
        assert!(disk.bytes == content, "{format} {discard}");
        let written = disk.count(RequestKind::Write).1;
        assert!(written <= 9 * MIB as u64, "{format} {discard}: {written} bytes written");
        assert!(disk.count(RequestKind::Flush).0 > 0);
    }
}

#[test]
fn writes_and_discards_during_the_mirror_arrive_too() {
    for copy_mode in ["background", "write-blocking"] {
        let dir = tempdir().unwrap();
        let mut content = image(dir.path(), "raw");
        let socket = dir.path().join("nbd");
        let disk = listen(&socket, "vda", DISK, |_| false);
        let vm = Vm::start(dir.path(), "image", "raw", false);
        vm.mirror(&socket, "vda", "unmap", copy_mode);
        for round in 0..40_usize {
            if round == 20 {
                vm.wait_ready();
            }
            let at = round * 37 % 125 * 512 * 1024 + round * 512;
            vm.guest(&format!("write -P {} {at} 1536", round + 1));
            content[at..at + 1536].fill(u8::try_from(round).unwrap() + 1);
        }
        vm.guest("write -z 34M 64k");
        content[34 * MIB..34 * MIB + (64 << 10)].fill(0);
        // A mirrored disk ignores discards (7.2), or its target gets them, too.
        vm.guest("discard 1M 1M");
        vm.guest("write -f -P 99 60M 4k");
        content[60 * MIB..60 * MIB + 4096].fill(99);
        vm.drain();
        let disk = disk.join().unwrap();
        vm.quit();
        let source = fs::read(dir.path().join("image")).unwrap();
        assert_eq!(first_difference(&disk.bytes, &source), None, "{copy_mode}");
        content[MIB..2 * MIB].copy_from_slice(&source[MIB..2 * MIB]);
        assert_eq!(first_difference(&disk.bytes, &content), None, "{copy_mode}");
    }
}

#[test]
fn a_failed_write_ends_the_mirror_with_an_error_and_not_the_vm() {
    let dir = tempdir().unwrap();
    image(dir.path(), "raw");
    let socket = dir.path().join("nbd");
    let disk = listen(&socket, "vda", DISK, |request| request.offset >= 33 << 20);
    let vm = Vm::start(dir.path(), "image", "raw", false);
    vm.mirror(&socket, "vda", "ignore", "background");
    let ended = vm.wait("BLOCK_JOB_COMPLETED");
    assert!(ended.data["error"].as_str().unwrap().contains("Input/output error"), "{ended:?}");
    vm.guest("write -P 1 0 4k");
    assert_eq!(vm.qmp("query-block-jobs", json!({})), json!([]));
    vm.quit();
    drop(disk.join().unwrap());
}
