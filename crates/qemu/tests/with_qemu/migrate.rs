use std::io::{self, Read, Write};
use std::mem::ManuallyDrop;
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread::JoinHandle;
use std::time::Duration;

use qemu::incoming::Incoming;
use qemu::outgoing::{self, Hold, Outgoing, Progress, Status, StreamKind, choose_stream};
use qemu::qmp::{Qmp, RunState};
use qemu::ram_blocks::RamBlocks;
use qemu::rendezvous::Rendezvous;
use qemu::shape;
use serde_json::{Value, json};
use stream::GlobalState;
use stream::return_path::{SHUT, SWITCHOVER_ACK};

use crate::{Vm, start, start_other, wait_for};

/// A machine type that both versions have.
pub(crate) const TYPE: &str = "pc-q35-7.2";
pub(crate) const PLAIN: &str = "-machine pc-q35-7.2 -m 64";
pub(crate) const WAIT: Duration = Duration::from_secs(60);

pub(crate) fn settings(qmp: &Qmp) -> (Value, Value) {
    let ask = |command| qmp.execute(command, json!({})).unwrap();
    (ask("query-migrate-capabilities"), ask("query-migrate-parameters"))
}

/// The capabilities of QEMU's migration that are on.
fn on(vm: &Vm) -> Vec<String> {
    let (capabilities, _) = settings(&vm.qmp);
    let listed = capabilities.as_array().unwrap().iter();
    let on = listed.filter(|one| one["state"] == true);
    on.map(|one| one["capability"].as_str().unwrap().to_owned()).collect()
}

/// A socket for QEMU's stream.
pub(crate) fn socket(vm: &Vm) -> (Rendezvous, UnixListener) {
    let (listener, at) = Rendezvous::open(vm, vm.dir.path()).unwrap();
    (at, listener)
}

/// Sends the answers with which a held QEMU may stop its VM and end its migration.
fn let_finish(outgoing: &Outgoing, mut main: &UnixStream) -> io::Result<()> {
    if outgoing.is_held() {
        main.write_all(&SWITCHOVER_ACK)?;
        main.write_all(&SHUT)?;
    }
    Ok(())
}

/// Starts a migration and forwards its one stream unchanged.
pub(crate) fn carry(
    outgoing: &Outgoing,
    listener: &UnixListener,
    mut to: UnixStream,
) -> JoinHandle<io::Result<u64>> {
    outgoing.start().unwrap();
    let (mut from, _) = listener.accept().unwrap();
    let_finish(outgoing, &from).unwrap();
    std::thread::spawn(move || io::copy(&mut from, &mut to))
}

fn moved(was_running: bool) -> (Vm, Outgoing, Vm, Incoming) {
    moved_by(StreamKind::Classic, was_running)
}

fn moved_by(kind: StreamKind, was_running: bool) -> (Vm, Outgoing, Vm, Incoming) {
    let source = start(PLAIN);
    if !was_running {
        source.qmp.stop().unwrap();
    }
    let destination = wait_for(PLAIN, TYPE);
    assert_eq!(destination.qmp.run_state().unwrap(), RunState::InMigrate);
    assert_eq!(outgoing::runs(&source.qmp).unwrap(), was_running);

    let incoming = Incoming::of(&destination).unwrap();
    let stream = incoming.open().unwrap();
    let (at, listener) = socket(&source);
    let outgoing = Outgoing::new(&source, kind, at.path()).unwrap();
    let carrier = carry(&outgoing, &listener, stream);
    outgoing.allow(1 << 30, 300).unwrap();
    outgoing.wait_completed(WAIT).unwrap();
    carrier.join().unwrap().unwrap();
    incoming.wait_loaded(WAIT).unwrap();
    (source, outgoing, destination, incoming)
}

#[test]
fn a_running_vm_goes_on_at_the_destination() {
    let (source, outgoing, destination, incoming) = moved(true);
    assert_eq!(source.qmp.run_state().unwrap(), RunState::PostMigrate);
    assert_eq!(destination.qmp.run_state().unwrap(), RunState::Paused);
    let progress = outgoing.progress().unwrap();
    assert_eq!(progress.status, Status::Completed);
    assert!(progress.total_bytes > 64 << 20 && progress.dirty_sync_count > 0, "{progress:?}");
    incoming.cont().unwrap();
    incoming.announce();
    assert_eq!(destination.qmp.run_state().unwrap(), RunState::Running);
}

#[test]
fn a_paused_vm_arrives_paused() {
    let (_source, _outgoing, destination, incoming) = moved(false);
    assert_eq!(destination.qmp.run_state().unwrap(), RunState::Paused);
    incoming.restore();
}

/// Only `cont` has QEMU take it back.
#[test]
fn a_paused_vm_that_was_sent_can_be_moved_again_after_a_cont() {
    let (source, outgoing, _destination, _incoming) = moved(false);
    assert_eq!(outgoing.back_out(false).unwrap(), Status::Completed);
    assert_eq!(source.qmp.run_state().unwrap(), RunState::PostMigrate);
    assert!(outgoing.has_given_up());
    let error = outgoing::runs(&source.qmp).unwrap_err().to_string();
    assert!(error.contains("`cont` it in QEMU's monitor"), "{error}");
    source.qmp.cont().unwrap();
    source.qmp.stop().unwrap();
    assert!(!outgoing.has_given_up());
    assert!(!outgoing::runs(&source.qmp).unwrap());
}

/// With `switchover-ack` on at the source alone, the state of a VFIO device is not loaded.
#[test]
fn a_stream_that_passes_whole_needs_no_answer() {
    for was_running in [true, false] {
        let (source, outgoing, destination, incoming) = moved_by(StreamKind::Whole, was_running);
        assert_eq!(outgoing.hold(), Hold::Unknown);
        assert_eq!(on(&source), ["events"]);
        assert_eq!(source.qmp.run_state().unwrap(), RunState::PostMigrate);
        assert_eq!(destination.qmp.run_state().unwrap(), RunState::Paused);
        incoming.restore();
    }
}

#[test]
fn a_vm_that_was_sent_and_never_ran_elsewhere_comes_back() {
    let (source, outgoing, _destination, _incoming) = moved(true);
    outgoing.back_out(true).unwrap();
    assert_eq!(source.qmp.run_state().unwrap(), RunState::Running);
}

/// A first pass would end, and the VM might be stopped, by the figures of a migration that has
/// ended.
#[test]
fn one_that_has_not_begun_has_made_no_progress_whatever_the_last_one_did() {
    let (source, outgoing, _destination, _incoming) = moved(true);
    outgoing.back_out(true).unwrap();
    assert!(outgoing.progress().unwrap().dirty_sync_count > 1);
    drop(outgoing);
    let (at, listener) = socket(&source);
    let again = Outgoing::new(&source, StreamKind::Classic, at.path()).unwrap();
    assert_eq!(again.progress().unwrap(), Progress::default());
    let swallowed = swallow(listener, 1);
    again.start().unwrap();
    // It may have ended already, if this test got no CPU.
    assert_ne!(again.progress().unwrap(), Progress::default());
    again.back_out(true).unwrap();
    swallowed.join().unwrap();
}

#[test]
fn settings_are_as_before_after_the_end_and_after_a_failure() {
    let source = start(PLAIN);
    let odd = json!({"max-bandwidth": 12_345_678, "downtime-limit": 777, "multifd-channels": 3});
    source.qmp.execute("migrate-set-parameters", odd).unwrap();
    let capability = json!([{"capability": "auto-converge", "state": true},
        {"capability": "x-ignore-shared", "state": true}]);
    source.qmp.execute("migrate-set-capabilities", json!({ "capabilities": capability })).unwrap();
    let before = settings(&source.qmp);

    let (at, listener) = socket(&source);
    let outgoing = Outgoing::new(&source, StreamKind::Multifd(4), at.path()).unwrap();
    let (_, parameters) = settings(&source.qmp);
    if outgoing.is_held() {
        assert_eq!(on(&source), ["events", "return-path", "multifd", "switchover-ack"]);
    } else {
        assert_eq!(on(&source), ["events", "multifd"]);
    }
    assert_eq!(
        (&parameters["downtime-limit"], &parameters["multifd-channels"]),
        (&json!(1), &json!(4))
    );
    outgoing.allow(0, 0).unwrap();
    assert_eq!(settings(&source.qmp).1["downtime-limit"], 1, "never 0");
    drop(listener);
    assert_ne!(settings(&source.qmp), before);
    drop(outgoing);
    assert_eq!(settings(&source.qmp), before);

    let outgoing = Outgoing::new(&source, StreamKind::Classic, at.path()).unwrap();
    // The socket has no listener any more.
    let started = outgoing.start();
    let ended = outgoing.wait_completed(WAIT).unwrap_err();
    assert!(started.is_err() || ended.to_string().contains("failed"), "{started:?} {ended}");
    outgoing.back_out(true).unwrap();
    assert_eq!(source.qmp.run_state().unwrap(), RunState::Running);
    assert_eq!(settings(&source.qmp), before);
}

/// A VM whose memory has content that doesn't fit the sockets' buffers.
fn start_filled() -> Vm {
    let vm = start("-machine q35 -m 256");
    fill(&vm);
    vm
}

/// Gives each page of the guest's memory other content.
pub(crate) fn fill(vm: &Vm) {
    let ram = RamBlocks::of(vm).reached.remove(0);
    for offset in (0..ram.bytes).step_by(4096) {
        ram.mapping.write(offset, &offset.to_le_bytes()).unwrap();
    }
}

/// Accepts QEMU's connections and reads only a little from each, so that QEMU blocks.
fn starve(listener: &UnixListener, count: usize) -> Vec<UnixStream> {
    (0..count)
        .map(|_| {
            let (mut stream, _) = listener.accept().unwrap();
            stream.read_exact(&mut [0; 64]).unwrap();
            stream
        })
        .collect()
}

#[test]
fn a_held_migration_is_cancelled_and_the_vm_runs_on() {
    for (kind, sockets) in [(StreamKind::Classic, 1), (StreamKind::Multifd(2), 3)] {
        let source = start_filled();
        let before = settings(&source.qmp);
        let (at, listener) = socket(&source);
        let outgoing = Outgoing::new(&source, kind, at.path()).unwrap();
        outgoing.start().unwrap();
        let streams = starve(&listener, sockets);
        let progress = outgoing.progress().unwrap();
        assert!(progress.status.is_going_on(), "{progress:?}");
        let again = Outgoing::new(&source, kind, at.path()).unwrap_err();
        assert!(again.to_string().contains("another migration"), "{again}");
        // Like a tap that stops, this reads on: if the connections are cut at this
        // moment, QEMU 7.2 may crash.
        streams.into_iter().for_each(discard);
        outgoing.back_out(true).unwrap();
        assert_eq!(source.qmp.run_state().unwrap(), RunState::Running);
        assert_eq!(settings(&source.qmp), before);
    }
}

/// Discards what QEMU writes, until it closes the connection.
fn discard(mut stream: UnixStream) {
    std::thread::spawn(move || io::copy(&mut stream, &mut io::sink()));
}

/// Discards what QEMU writes on all channels, and returns the main channel: the one
/// without multifd's magic.
pub(crate) fn drink(listener: &UnixListener, count: usize) -> UnixStream {
    let mut main = None;
    for _ in 0..count {
        let (mut stream, _) = listener.accept().unwrap();
        let mut magic = [0; 4];
        stream.read_exact(&mut magic).unwrap();
        if &magic == b"QEVM" {
            main = Some(stream.try_clone().unwrap());
        }
        discard(stream);
    }
    main.unwrap()
}

/// Waits until QEMU has looked for dirty pages 20 times, and found none at last.
fn wait_until_nothing_is_dirty(outgoing: &Outgoing) {
    loop {
        let progress = outgoing.progress().unwrap();
        assert!(progress.status.is_going_on(), "{progress:?}");
        if progress.dirty_sync_count >= 20 && progress.remaining_bytes == 0 {
            return;
        }
        // Questions without a pause would keep a core busy, and QEMU's main loop another.
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn version(vm: &Vm) -> (u32, u32) {
    let mut numbers = vm.version.split('.').map(|number| number.parse().unwrap());
    (numbers.next().unwrap(), numbers.next().unwrap())
}

/// Only QEMU from 8.1 on is held: both QEMUs are tried, either of which may be one.
#[test]
fn a_held_vm_runs_on_with_nothing_dirty_and_stops_once_it_may() {
    for (kind, sockets) in [(StreamKind::Classic, 1), (StreamKind::Multifd(2), 3)] {
        for source in [start(PLAIN), start_other(PLAIN)] {
            let before = settings(&source.qmp);
            let (at, listener) = socket(&source);
            let prepared = || Outgoing::new(&source, kind, at.path()).unwrap();
            let outgoing = prepared();
            assert_eq!(outgoing.is_held(), version(&source) >= (8, 1), "{}", source.version);
            if !outgoing.is_held() {
                continue;
            }
            outgoing.start().unwrap();
            drop(drink(&listener, sockets));
            outgoing.allow(1 << 30, 300).unwrap();
            wait_until_nothing_is_dirty(&outgoing);
            assert_eq!(source.qmp.run_state().unwrap(), RunState::Running);
            outgoing.back_out(true).unwrap();
            assert_eq!(source.qmp.run_state().unwrap(), RunState::Running);
            assert_eq!(settings(&source.qmp), before);

            let outgoing = prepared();
            outgoing.start().unwrap();
            let main = drink(&listener, sockets);
            outgoing.allow(1 << 30, 300).unwrap();
            wait_until_nothing_is_dirty(&outgoing);
            let_finish(&outgoing, &main).unwrap();
            outgoing.wait_completed(WAIT).unwrap();
            outgoing.back_out(true).unwrap();
            assert_eq!(source.qmp.run_state().unwrap(), RunState::Running);
        }
    }
}

#[test]
fn a_held_migration_of_a_paused_vm_ends_only_with_the_answers() {
    let source = start_other(PLAIN);
    let (at, listener) = socket(&source);
    let outgoing = Outgoing::new(&source, StreamKind::Classic, at.path()).unwrap();
    if !outgoing.is_held() {
        return;
    }
    outgoing.start().unwrap();
    let main = drink(&listener, 1);
    outgoing.allow(1 << 30, 300).unwrap();
    wait_until_nothing_is_dirty(&outgoing);
    source.qmp.stop().unwrap();
    let ended = outgoing.wait_completed(Duration::from_secs(1)).unwrap_err();
    assert!(ended.to_string().contains("did not end"), "{ended}");
    let_finish(&outgoing, &main).unwrap();
    outgoing.wait_completed(WAIT).unwrap();
    outgoing.back_out(false).unwrap();
}

/// Reads QEMU's one stream to its end. Returns the VM's state that the stream reports.
fn state_in(mut main: UnixStream) -> JoinHandle<Option<String>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        main.read_to_end(&mut bytes).unwrap();
        let mut global_state = GlobalState::default();
        global_state.push(&bytes);
        global_state.state().map(str::to_owned)
    })
}

#[test]
fn its_stream_says_whether_a_vm_ran_until_qemu_stopped_it() {
    for (runs, expected) in [(true, "running"), (false, "paused")] {
        for source in [start(PLAIN), start_other(PLAIN)] {
            if !runs {
                source.qmp.stop().unwrap();
            }
            let (at, listener) = socket(&source);
            let outgoing = Outgoing::new(&source, StreamKind::Classic, at.path()).unwrap();
            outgoing.start().unwrap();
            let (main, _) = listener.accept().unwrap();
            let_finish(&outgoing, &main).unwrap();
            let state = state_in(main);
            outgoing.allow(1 << 30, 300).unwrap();
            outgoing.wait_completed(WAIT).unwrap();
            assert_eq!(state.join().unwrap().as_deref(), Some(expected), "{}", source.version);
        }
    }
}

/// QEMU finishes at once, so a query no longer shows that the VM was paused.
#[test]
fn a_held_vm_that_is_paused_with_nothing_left_is_still_known_as_paused() {
    for is_cancelled in [false, true] {
        let source = start_other(PLAIN);
        let (at, listener) = socket(&source);
        let outgoing = Outgoing::new(&source, StreamKind::Classic, at.path()).unwrap();
        if !outgoing.is_held() {
            return;
        }
        outgoing.start().unwrap();
        let (main, _) = listener.accept().unwrap();
        let state = state_in(main.try_clone().unwrap());
        outgoing.allow(1 << 30, 300).unwrap();
        wait_until_nothing_is_dirty(&outgoing);
        source.qmp.stop().unwrap();
        while source.qmp.run_state().unwrap() != RunState::FinishMigrate {}
        if is_cancelled {
            outgoing.back_out(true).unwrap();
            assert_eq!(source.qmp.run_state().unwrap(), RunState::Paused);
        } else {
            let_finish(&outgoing, &main).unwrap();
            outgoing.wait_completed(WAIT).unwrap();
            assert_eq!(state.join().unwrap().as_deref(), Some("paused"));
        }
    }
}

#[test]
fn what_a_crashed_agent_left_is_cleaned_up() {
    for (kind, sockets) in [(StreamKind::Classic, 1), (StreamKind::Multifd(2), 3)] {
        let source = start_filled();
        let odd = json!({"downtime-limit": 777});
        source.qmp.execute("migrate-set-parameters", odd).unwrap();
        let before = settings(&source.qmp);
        let (at, listener) = socket(&source);
        // Without `Drop`, nothing is restored.
        let outgoing = ManuallyDrop::new(Outgoing::new(&source, kind, at.path()).unwrap());
        outgoing.start().unwrap();
        let streams = starve(&listener, sockets);
        outgoing.allow(1 << 30, 5).unwrap();
        assert_ne!(settings(&source.qmp), before);
        // The kernel closes a crashed process's sockets.
        drop((streams, listener));
        assert!(outgoing::make_up(&source).unwrap());
        assert_eq!(settings(&source.qmp), before);
        assert_eq!(source.qmp.run_state().unwrap(), RunState::Running);
        assert!(!outgoing::make_up(&source).unwrap(), "nothing is left to make up for");
    }
    let destination = wait_for(PLAIN, TYPE);
    let before = settings(&destination.qmp);
    let _incoming = ManuallyDrop::new(Incoming::of(&destination).unwrap());
    assert_ne!(settings(&destination.qmp), before);
    assert!(outgoing::make_up(&destination).unwrap());
    assert_eq!(settings(&destination.qmp), before);
}

#[test]
fn an_unfinished_migration_does_not_pass_its_settings_on() {
    let source = start("-machine q35 -m 64 -S");
    let before = settings(&source.qmp);
    let (at, _listener) = socket(&source);
    let lost = ManuallyDrop::new(Outgoing::new(&source, StreamKind::Classic, at.path()).unwrap());
    lost.allow(1 << 30, 5).unwrap();
    drop(Outgoing::new(&source, StreamKind::Multifd(2), at.path()).unwrap());
    assert_eq!(settings(&source.qmp), before);
}

#[test]
fn a_migration_begins_as_soon_as_the_last_one_has_failed() {
    for source in [start(PLAIN), start_other(PLAIN)] {
        let (at, listener) = socket(&source);
        let outgoing = Outgoing::new(&source, StreamKind::Classic, at.path()).unwrap();
        for _ in 0..20 {
            outgoing.start().unwrap();
            drop(listener.accept().unwrap());
            while outgoing.progress().unwrap().status.is_going_on() {}
        }
        outgoing.restore();
        assert_eq!(source.qmp.run_state().unwrap(), RunState::Running);
    }
}

/// Discards what QEMU writes on all of its connections, until it closes them.
fn swallow(listener: UnixListener, count: usize) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let streams: Vec<_> = listener.incoming().take(count).map_while(Result::ok).collect();
        drop(listener);
        streams.into_iter().for_each(discard);
    })
}

#[test]
fn a_migration_can_be_cancelled_during_its_set_up_while_its_stream_is_read() {
    let source = start("-machine q35 -m 64");
    let before = settings(&source.qmp);
    for round in 0..60u64 {
        let (at, listener) = socket(&source);
        let swallowed = swallow(listener, 5);
        let outgoing = Outgoing::new(&source, StreamKind::Multifd(4), at.path()).unwrap();
        outgoing.start().unwrap();
        std::thread::sleep(Duration::from_micros(100 * (round % 20)));
        outgoing.back_out(true).unwrap();
        assert_eq!(source.qmp.run_state().unwrap(), RunState::Running, "round {round}");
        // The set-up has ended by now: all channels have connected.
        swallowed.join().unwrap();
    }
    assert_eq!(settings(&source.qmp), before);
}

#[test]
fn multifd_is_chosen_where_it_can_be() {
    for arguments in [
        "-machine q35 -m 64 -S",
        "-machine q35 -m 64,maxmem=256M -S -object memory-backend-ram,id=m,size=64M \
         -device virtio-mem-pci,memdev=m,id=vm0",
    ] {
        let vm = start(arguments);
        let devices = shape::of(&vm.qmp).unwrap().devices;
        let chosen = choose_stream(&vm.qmp, &devices, 4).unwrap();
        assert_eq!(chosen, (StreamKind::Multifd(4), None), "{arguments}");
    }
}

#[test]
fn a_destination_says_in_qemus_words_why_it_cannot_load() {
    let source = start("-machine pc-q35-7.2 -m 64 -S");
    let destination = wait_for("-machine q35 -m 128", TYPE);
    let incoming = Incoming::of(&destination).unwrap();
    let stream = incoming.open().unwrap();
    let (at, listener) = socket(&source);
    let outgoing = Outgoing::new(&source, StreamKind::Classic, at.path()).unwrap();
    let carrier = carry(&outgoing, &listener, stream);
    let _ = carrier.join().unwrap();
    let error = incoming.wait_loaded(WAIT).unwrap_err().to_string();
    assert!(error.contains("pc.ram") || error.contains("ize mismatch"), "{error}");
    let explained = incoming.explain(&"the stream broke");
    assert_ne!(explained, "the stream broke");
    outgoing.back_out(false).unwrap();
}

#[test]
fn a_qemu_that_does_not_wait_is_no_destination() {
    let vm = start("-machine q35 -m 64 -S");
    let error = Incoming::of(&vm).unwrap_err().to_string();
    assert!(error.contains("-incoming defer"), "{error}");
}

#[test]
fn migration_blockers_are_reported_before_the_start() {
    let vm = start(
        "-machine q35 -m 64 -S -device ivshmem-plain,memdev=m -object \
         memory-backend-ram,id=m,size=1M,share=on",
    );
    let (at, _listener) = socket(&vm);
    let before = settings(&vm.qmp);
    let error = Outgoing::new(&vm, StreamKind::Classic, at.path()).unwrap_err();
    assert!(error.to_string().contains("this VM can't be moved: "), "{error}");
    assert!(error.to_string().contains("ivshmem"), "{error}");
    assert_eq!(settings(&vm.qmp), before);
}
