//! A QEMU whose agent is killed while its channels connect can be moved again.

use std::mem::ManuallyDrop;
use std::os::unix::net::UnixListener;
use std::time::Duration;

use qemu::outgoing::{self, Outgoing, Status, StreamKind};
use qemu::qmp::{QmpError, RunState};
use qemu::rendezvous::Rendezvous;
use rustix::net::listen;
use serde_json::json;

use crate::migrate::{PLAIN, drink, fill, socket, version};
use crate::{Vm, start, start_other};

const CHANNELS: u8 = 4;

/// The QEMUs that need their agent's socket: either may be one.
fn concerned(arguments: &str) -> impl Iterator<Item = Vm> {
    let vms = [start(arguments), start_other(arguments)].into_iter();
    vms.filter(|vm| version(vm) >= (9, 0))
}

/// A migration that nothing ends properly: without `Drop`, as when its agent is killed.
fn begin(source: &Vm, at: &Rendezvous, listener: &UnixListener) -> ManuallyDrop<Outgoing> {
    let outgoing = Outgoing::new(source, StreamKind::Multifd(CHANNELS), at.path()).unwrap();
    outgoing.keep_open(listener).unwrap();
    outgoing.start().unwrap();
    ManuallyDrop::new(outgoing)
}

/// Whether it can be moved: its migration starts, and its channels connect.
fn check_that_it_migrates(source: &Vm) {
    assert_eq!(source.qmp.run_state().unwrap(), RunState::Running);
    let (at, listener) = socket(source);
    let outgoing = ManuallyDrop::into_inner(begin(source, &at, &listener));
    drop(drink(&listener, 1 + usize::from(CHANNELS)));
    outgoing.back_out(true).unwrap();
    assert_eq!(source.qmp.run_state().unwrap(), RunState::Running);
    check_that_it_keeps_no_socket(source);
}

/// One that stays would be open for as long as QEMU runs.
fn check_that_it_keeps_no_socket(source: &Vm) {
    let closed = source.qmp.execute("closefd", json!({ "fdname": "droveway-tap" }));
    assert!(matches!(closed, Err(QmpError::Refused { .. })), "{closed:?}");
}

#[test]
fn channels_connect_though_no_agent_listens_any_more() {
    for source in concerned(PLAIN) {
        let (at, listener) = socket(&source);
        // Room for one connection: the others wait until there is more.
        listen(&listener, 0).unwrap();
        let _outgoing = begin(&source, &at, &listener);
        let (main, _) = listener.accept().unwrap();
        listen(&listener, 128).unwrap();
        // The kernel closes a killed process's sockets.
        drop((listener, main));
        assert!(outgoing::make_up(&source).unwrap());
        check_that_it_keeps_no_socket(&source);
        check_that_it_migrates(&source);
    }
}

/// QEMU's main channel connected as well, and nothing but the agent's next run ends its migration.
#[test]
fn a_migration_that_no_one_has_accepted_is_ended() {
    for source in concerned("-machine q35 -m 256") {
        fill(&source);
        let (at, listener) = socket(&source);
        let outgoing = begin(&source, &at, &listener);
        drop(listener);
        wait_until_it_is_stuck(&outgoing);
        assert!(outgoing::make_up(&source).unwrap());
        check_that_it_keeps_no_socket(&source);
        check_that_it_migrates(&source);
    }
}

/// Waits until the sockets' buffers are full, and QEMU sends no more.
fn wait_until_it_is_stuck(outgoing: &Outgoing) {
    let mut pages_before = 0;
    loop {
        let progress = outgoing.progress().unwrap();
        assert!(progress.status.is_going_on(), "{progress:?}");
        if progress.status == Status::Active && progress.normal_pages > 0 {
            if progress.normal_pages == pages_before {
                return;
            }
            pages_before = progress.normal_pages;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}
