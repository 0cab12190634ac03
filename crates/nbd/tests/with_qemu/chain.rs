use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread;

use nbd::Client;
use nbd::client::Settings;
use nbd::server::{Connection, Export, RequestKind};
use tempfile::tempdir;

use crate::disk::accept;
use crate::vm::Vm;
use crate::{noise, say};

const MIB: usize = 1 << 20;
const DISK: usize = 128 * MIB;

/// Forwards requests from the server to the client, without lanes. A request is answered
/// when it is done at the destination; QEMU never has overlapping ones in flight.
fn pass_on(listener: &UnixListener, sink: &Path) {
    let exports = [Export { name: "vda".to_owned(), bytes: DISK as u64 }];
    let Connection { mut requests, replier, .. } = accept(listener, &exports);
    let client = Client::connect(sink, "vda", &Settings::default(), {
        let replier = replier.clone();
        move |cookie, outcome| {
            outcome.unwrap();
            replier.ok(cookie).unwrap();
        }
    });
    let client = client.unwrap();
    let mut payload = Vec::new();
    while let Some(request) = requests.next_request().unwrap() {
        match request.kind {
            RequestKind::Write => {
                payload.resize(request.bytes as usize, 0);
                requests.read_payload(&mut payload).unwrap();
                client.write(request.offset, &payload, request.cookie).unwrap();
            }
            RequestKind::WriteZeroes | RequestKind::Trim => {
                client.write_zeroes(request.offset, request.bytes.into(), request.cookie).unwrap();
            }
            RequestKind::Flush => client.flush(request.cookie).unwrap(),
        }
    }
    // QEMU leaves when all its requests are answered.
    assert!(client.failure().is_none());
}

#[test]
fn a_disk_moves_from_vm_to_vm_with_its_holes() {
    for (from, to) in [("raw", "raw"), ("qcow2", "raw"), ("raw", "qcow2")] {
        let dir = tempdir().unwrap();
        let mut content = vec![0; DISK];
        for at in [0, 50 * MIB, 127 * MIB] {
            content[at..at + MIB].copy_from_slice(&noise(at as u64, MIB));
        }
        fs::write(dir.path().join("plain"), &content).unwrap();
        say(dir.path(), "qemu-img", &format!("convert -f raw -O {from} plain source.img"));
        say(dir.path(), "qemu-img", &format!("create -f {to} destination.img {DISK}"));

        let destination = Vm::start(dir.path(), "destination.img", to, true);
        let (sink, tap) = (dir.path().join("sink"), dir.path().join("tap"));
        destination.export(&sink, "vda");
        let listener = UnixListener::bind(&tap).unwrap();
        let passing = thread::spawn(move || pass_on(&listener, &sink));

        let source = Vm::start(dir.path(), "source.img", from, false);
        source.mirror(&tap, "vda", "ignore", "background");
        source.guest("write -P 77 10M 1M");
        content[10 * MIB..11 * MIB].fill(77);
        source.wait_ready();
        for round in 0..20_usize {
            let at = 60 * MIB + round * 700 * 512;
            source.guest(&format!("write -P {} {at} 2560", round + 1));
            content[at..at + 2560].fill(u8::try_from(round).unwrap() + 1);
        }
        source.guest("write -z -u 50M 512k");
        content[50 * MIB..50 * MIB + (512 << 10)].fill(0);
        source.drain();
        passing.join().unwrap();
        destination.stop_export();
        destination.quit();
        source.quit();

        let path = dir.path();
        say(path, "qemu-img", &format!("compare -f {from} -F {to} source.img destination.img"));
        say(path, "qemu-img", &format!("convert -f {to} -O raw destination.img back"));
        assert!(fs::read(path.join("back")).unwrap() == content, "{from} {to}");
        let taken = |name| fs::metadata(path.join(name)).unwrap().blocks() * 512;
        let (before, after) = (taken("source.img"), taken("destination.img"));
        assert!(after <= before + 3 * MIB as u64, "{from} {to}: {before} became {after}");
    }
}
