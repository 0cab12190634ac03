//! A target that dies or hangs blocks nothing.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};
use qemu::mirror::{MirrorError, Mirrors, Side};

use super::{Destination, MIB, Source, WAIT, pauses};

#[test]
fn a_dead_target_is_reported_with_its_disk_and_undone() {
    let source = Source::start();
    let disks = source.disks();
    let there = Destination::of(&source, &disks);
    let way = Way::to(there.exports.socket(), 6 * MIB, Hang::Full);
    let targets = there.targets(&disks, &way.path);
    let mirrors = Mirrors::start(Arc::clone(&source.vm.qmp), &targets).unwrap();
    way.wait_full();
    there.vm.process.kill().unwrap();
    way.cut();
    let failed = mirrors.wait_ready(WAIT).unwrap_err();
    let MirrorError::Failed { disk, side, .. } = &failed else { panic!("{failed}") };
    assert_eq!(*side, Side::Target);
    assert!(failed.to_string().contains(&format!("disk `{disk}` can't move: it can't be written")));
    assert!(mirrors.check().is_err(), "and it stays so");
    assert!(mirrors.finish(WAIT).is_err());
    mirrors.undo().unwrap();
    source.is_unhurt();
}

/// How a target can hang.
#[derive(Clone, Copy)]
enum Hang {
    /// It reads requests and never answers.
    Silent,
    /// It reads nothing any more, and is closed when the mirror is cancelled.
    Full,
}

#[test]
fn mirrors_to_a_hanging_target_can_be_undone() {
    for hang in [Hang::Silent, Hang::Full] {
        let source = Source::start();
        let disks = source.disks();
        let there = Destination::of(&source, &disks);
        let way = Way::to(there.exports.socket(), 6 * MIB, hang);
        let targets = there.targets(&disks, &way.path);
        let mirrors = Mirrors::start(Arc::clone(&source.vm.qmp), &targets).unwrap();
        way.wait_full();
        let late = mirrors.wait_ready(Duration::from_millis(100)).unwrap_err().to_string();
        assert!(late.starts_with("nothing was copied for 0 s: disk d"), "{late}");
        let _silent = way.give_up(hang);
        mirrors.undo().unwrap();
        source.is_unhurt();
    }
}

#[test]
fn mirrors_to_a_hanging_target_can_be_undone_during_a_switchover() {
    for hang in [Hang::Silent, Hang::Full] {
        let source = Source::start();
        let disks = source.disks();
        let there = Destination::of(&source, &disks);
        let way = Way::to(there.exports.socket(), 6 * MIB, hang);
        let targets = there.targets(&disks, &way.path);
        let mirrors = Mirrors::start(Arc::clone(&source.vm.qmp), &targets).unwrap();
        way.wait_full();
        let (outgoing, _at) = there.migrate(&source);
        // To stop the VM, QEMU waits for its mirrors' requests, and doesn't answer.
        assert!(!pauses(&outgoing, Duration::from_secs(3)));
        let _silent = way.give_up(hang);
        mirrors.undo().unwrap();
        outgoing.back_out(true).unwrap();
        source.is_unhurt();
    }
}

/// A proxy to an NBD server that hangs after `bytes` for the second disk, and can be
/// cut. It is the second since, to start a disk's mirror, QEMU waits for the requests
/// in flight of those before it.
struct Way {
    path: PathBuf,
    _dir: tempfile::TempDir,
    full: Receiver<()>,
    ends: Arc<Mutex<Vec<UnixStream>>>,
    let_go: Sender<()>,
}

impl Way {
    fn to(server: &Path, bytes: u64, hang: Hang) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("way");
        let listener = UnixListener::bind(&path).unwrap();
        let (full, is_full) = bounded(64);
        let (let_go, held) = bounded(0);
        let ends = Arc::new(Mutex::new(Vec::new()));
        let (server, all) = (server.to_owned(), Arc::clone(&ends));
        std::thread::spawn(move || {
            for (nth, client) in listener.incoming().enumerate() {
                let (Ok(client), Ok(server)) = (client, UnixStream::connect(&server)) else {
                    continue;
                };
                let copies = || (client.try_clone().unwrap(), server.try_clone().unwrap());
                all.lock().unwrap().extend(<[UnixStream; 2]>::from(copies()));
                let back = copies();
                std::thread::spawn(move || copy((back.1, back.0)));
                if nth != 1 {
                    std::thread::spawn(move || copy((client, server)));
                    continue;
                }
                let (full, held) = (full.clone(), held.clone());
                std::thread::spawn(move || {
                    take(&client, &server, bytes);
                    let _ = full.send(());
                    if matches!(hang, Hang::Silent) {
                        let _ = io::copy(&mut &client, &mut io::sink());
                    }
                    let _: Result<(), _> = held.recv();
                });
            }
        });
        Self { path, _dir: dir, full: is_full, ends, let_go }
    }

    fn wait_full(&self) {
        self.full.recv_timeout(WAIT).unwrap();
    }

    /// As the agent does: closes a connection that it no longer reads.
    fn give_up(self, hang: Hang) -> Option<Self> {
        match hang {
            Hang::Silent => Some(self),
            Hang::Full => {
                self.cut();
                None
            }
        }
    }

    /// Closes all of its connections.
    fn cut(self) {
        for end in self.ends.lock().unwrap().drain(..) {
            let _ = end.shutdown(std::net::Shutdown::Both);
        }
        drop(self.let_go);
    }
}

fn copy((mut from, mut to): (UnixStream, UnixStream)) {
    let _ = io::copy(&mut from, &mut to);
}

fn take(mut from: &UnixStream, mut to: &UnixStream, most: u64) {
    let (mut buffer, mut taken) = (vec![0; 64 << 10], 0);
    while taken < most {
        match from.read(&mut buffer) {
            Ok(count) if count > 0 && to.write_all(&buffer[..count]).is_ok() => {
                taken += count as u64;
            }
            _ => return,
        }
    }
}
