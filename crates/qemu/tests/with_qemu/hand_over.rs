use qemu::incoming::Incoming;
use qemu::machine::{
    By, GuestPort, Inherited, InheritedSockets, NextTaps, SharedRam, Start, UP_MAX, start_next,
};
use qemu::outgoing::Outgoing;
use qemu::qmp::RunState;
use qemu::ram_blocks::{RamBlocks, Reached};

use crate::migrate::{TYPE, WAIT, carry, socket};
use crate::{Vm, argv_of, other, start};

/// Where a test writes to RAM, and how much: more than there is of anything else in a stream.
const WRITTEN_AT: u64 = 16 << 20;
const WRITTEN_BYTES: u64 = 8 << 20;

/// A VM with all of its RAM in that file.
pub(crate) fn in_file(path: &str) -> String {
    format!(
        "-machine {TYPE},memory-backend=r -m 64 -object \
         memory-backend-file,id=r,size=64M,share=on,mem-path={path}"
    )
}

fn ram(vm: &Vm) -> Reached {
    let mut blocks = RamBlocks::of(vm);
    assert_eq!(blocks.reached.len(), 1, "{blocks:?}");
    blocks.reached.remove(0)
}

fn byte(vm: &Vm, at: u64) -> u8 {
    let mut byte = [0];
    ram(vm).mapping.read(at, &mut byte).unwrap();
    byte[0]
}

/// Starts the next QEMU of a VM, which maps its RAM.
pub(crate) fn start_after(former: &Vm, arguments: &str) -> Vm {
    let inherited = Inherited {
        sockets: InheritedSockets::of(former).unwrap(),
        ram: SharedRam::of(former).unwrap(),
        taps: NextTaps::default(),
    };
    let argv = argv_of(&other(), arguments);
    let dir = tempfile::tempdir().unwrap();
    let start = Start {
        name: "test",
        argv: &argv,
        cwd: &former.cwd,
        dir: dir.path(),
        incoming: true,
        machine: Some(TYPE),
        by: By::Operator,
        user: None,
        guest_port: GuestPort::None,
        knows_legacy_ack: false,
        up_max: UP_MAX,
        idle_max: UP_MAX,
    };
    let machine = start_next(&start, &inherited, &|_| {}).unwrap();
    assert_eq!(machine.argv, argv, "each QEMU gets its own number");
    Vm { machine: Some(machine), dir }
}

/// Gives a VM another QEMU, which has its RAM; returns what went through the socket.
pub(crate) fn hand_over(former: &Vm, next: &Vm) -> u64 {
    let incoming = Incoming::mapped(next).unwrap();
    let stream = incoming.open().unwrap();
    let (at, listener) = socket(former);
    let outgoing = Outgoing::handing_over(former, at.path()).unwrap();
    let carrier = carry(&outgoing, &listener, stream);
    outgoing.allow(1 << 30, 300).unwrap();
    outgoing.wait_completed(WAIT).unwrap();
    // Both still have it.
    ram(former).mapping.write(WRITTEN_AT + WRITTEN_BYTES, &[0xa5]).unwrap();
    let bytes = carrier.join().unwrap().unwrap();
    incoming.wait_loaded(WAIT).unwrap();
    former.is_one_of_two(true);
    former.quit().unwrap();
    incoming.cont().unwrap();
    incoming.announce();
    bytes
}

#[test]
fn another_qemu_has_the_same_ram_and_hands_it_over_again() {
    // A file of the agent's, one with a name, and one that QEMU makes in a directory.
    for path in ["/proc/self/fd/droveway-ram", "own.ram", "."] {
        let arguments = in_file(path);
        let first = start(&arguments);
        ram(&first).mapping.fill(WRITTEN_AT, WRITTEN_BYTES, 0x5a).unwrap();
        let second = start_after(&first, &arguments);
        assert_eq!(byte(&second, WRITTEN_AT), 0x5a, "{path}");
        let bytes = hand_over(&first, &second);
        assert!(bytes < WRITTEN_BYTES, "{path}: {bytes} bytes were sent");
        assert_eq!(second.qmp.run_state().unwrap(), RunState::Running);

        let third = start_after(&second, &arguments);
        hand_over(&second, &third);
        assert_eq!(third.qmp.run_state().unwrap(), RunState::Running);
        for (at, expected) in [
            (WRITTEN_AT, 0x5a),
            (WRITTEN_AT + WRITTEN_BYTES - 1, 0x5a),
            (WRITTEN_AT + WRITTEN_BYTES, 0xa5),
        ] {
            assert_eq!(byte(&third, at), expected, "{path}: {at}");
        }
    }
}

/// Another file may be there by now.
#[test]
fn the_file_that_qemu_has_open_counts_and_not_its_name() {
    let arguments = in_file("own.ram");
    let first = start(&arguments);
    ram(&first).mapping.write(WRITTEN_AT, &[0x5a]).unwrap();
    let name = first.dir.path().join("own.ram");
    std::fs::remove_file(&name).unwrap();
    std::fs::write(&name, "another file").unwrap();
    let second = start_after(&first, &arguments);
    assert_eq!(byte(&second, WRITTEN_AT), 0x5a);
}

#[test]
fn memory_of_qemus_own_is_not_handed_over() {
    for arguments in [
        format!("-machine {TYPE} -m 64"),
        format!(
            "-machine {TYPE},memory-backend=r -m 64 -object \
             memory-backend-file,id=r,size=64M,share=off,mem-path=own.ram"
        ),
    ] {
        let vm = start(&arguments);
        assert_eq!(SharedRam::of(&vm).unwrap().ids().count(), 0, "{arguments}");
    }
}
