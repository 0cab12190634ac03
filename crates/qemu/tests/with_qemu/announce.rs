//! What happens to a network card when its VM moves: QEMU announces it once it runs, and its guest
//! may reset it.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::time::Duration;

use qemu::incoming::Incoming;
use qemu::outgoing::{Outgoing, StreamKind};
use qemu::qmp::RunState;
use serde_json::json;

use crate::migrate::{PLAIN, TYPE, WAIT, carry, settings, socket};
use crate::{Vm, start, wait_for};

const VIRTIO: &str =
    "-device virtio-net-pci,netdev=n0,id=nic0,addr=3,romfile=,mac=52:54:00:00:00:07";
const E1000: &str = "-device e1000,netdev=n0,id=nic0,addr=3,romfile=,mac=52:54:00:00:00:07";
const MAC: [u8; 6] = [0x52, 0x54, 0, 0, 0, 7];
const UNCONNECTED: &str = "-netdev hubport,id=n0,hubid=0";

/// Moves a VM to a QEMU with these arguments, which has loaded it when this returns. `rounds` are
/// set by that QEMU's owner.
fn moved(source: &Vm, arguments: &str, rounds: Option<u64>) -> (Vm, Incoming) {
    let destination = wait_for(arguments, TYPE);
    if let Some(rounds) = rounds {
        let set = json!({ "announce-rounds": rounds });
        destination.qmp.execute("migrate-set-parameters", set).unwrap();
    }
    let incoming = Incoming::of(&destination).unwrap();
    let stream = incoming.open().unwrap();
    let (at, listener) = socket(source);
    let outgoing = Outgoing::new(source, StreamKind::Classic, at.path()).unwrap();
    let carrier = carry(&outgoing, &listener, stream);
    outgoing.allow(1 << 30, 300).unwrap();
    outgoing.wait_completed(WAIT).unwrap();
    carrier.join().unwrap().unwrap();
    incoming.wait_loaded(WAIT).unwrap();
    (destination, incoming)
}

/// A VM whose guest uses its network card as Linux does, with announcements of its own. QEMU's test
/// protocol does what the guest's driver would.
fn used() -> Vm {
    // The register of that name at PCI address 0:3.0, and the card's registers behind its first BAR.
    const CONFIG: u32 = 0x8000_1800;
    const PORTS: u32 = 0xc000;
    const ANNOUNCE_AND_CONTROL: u32 = 1 << 21 | 1 << 17;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qtest");
    let listen = format!("-qtest unix:{},server=on,wait=off -qtest-log none", path.display());
    let vm = start(&format!("{PLAIN} -S {UNCONNECTED} {VIRTIO} {listen}"));
    let mut port = BufReader::new(UnixStream::connect(&path).unwrap());
    let mut ask = |line: &str| {
        port.get_mut().write_all(format!("{line}\n").as_bytes()).unwrap();
        let mut answer = String::new();
        port.read_line(&mut answer).unwrap();
        assert!(answer.starts_with("OK"), "{line}: {answer}");
        answer
    };
    for (register, value) in [(0x10, PORTS), (0x04, 5)] {
        ask(&format!("outl 0xcf8 {:#x}", CONFIG + register));
        ask(&format!("outl 0xcfc {value:#x}"));
    }
    let (features, status) = (PORTS + 4, PORTS + 18);
    ask(&format!("outb {status:#x} 3"));
    ask(&format!("outl {features:#x} {ANNOUNCE_AND_CONTROL:#x}"));
    ask(&format!("outb {status:#x} 7"));
    let taken = ask(&format!("inl {features:#x}"));
    assert_eq!(taken.trim(), format!("OK {ANNOUNCE_AND_CONTROL:#06x}"));
    vm
}

/// As a reboot does. QEMU once crashed in it: it was ordered to announce in no rounds, removed the
/// card's timer when it loaded the VM, and used that.
#[test]
fn the_guest_may_reset_its_network_card_after_a_move() {
    let arguments = format!("{PLAIN} {UNCONNECTED} {VIRTIO}");
    for rounds in [None, Some(0), Some(3)] {
        for depth in 1..=2 {
            let mut vm = used();
            for _ in 0..depth {
                let (destination, incoming) = moved(&vm, &arguments, rounds);
                incoming.restore();
                vm = destination;
            }
            vm.qmp.cont().unwrap();
            vm.qmp.execute("system_reset", json!({})).unwrap();
            let state = vm.qmp.run_state();
            assert_eq!(state.unwrap(), RunState::Running, "rounds {rounds:?}, {depth} moves deep");
        }
    }
}

/// A frame that announces the card (RARP) to switches.
fn announces(frame: &[u8]) -> bool {
    frame.get(6..12) == Some(&MAC[..]) && frame.get(12..14) == Some(&[0x80, 0x35][..])
}

#[test]
fn a_vm_is_announced_when_it_runs_and_not_before() {
    for nic in [VIRTIO, E1000] {
        let source = start(&format!("{PLAIN} {UNCONNECTED} {nic}"));
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let network = UnixDatagram::bind(at("network")).unwrap();
        let netdev = format!(
            "-netdev dgram,id=n0,local.type=unix,local.path={},remote.type=unix,remote.path={}",
            at("card").display(),
            at("network").display()
        );
        let (destination, incoming) = moved(&source, &format!("{PLAIN} {netdev} {nic}"), None);
        let mut frame = [0; 2048];
        network.set_nonblocking(true).unwrap();
        let early = network.recv(&mut frame).unwrap_err();
        assert_eq!(early.kind(), ErrorKind::WouldBlock, "{nic}");
        network.set_nonblocking(false).unwrap();
        network.set_read_timeout(Some(Duration::from_secs(60))).unwrap();

        incoming.cont().unwrap();
        // QEMU's own, at once.
        let bytes = network.recv(&mut frame).unwrap();
        assert!(announces(&frame[..bytes]), "{nic}: {:x?}", &frame[..bytes]);
        incoming.announce();
        for round in 0..5 {
            let bytes = network.recv(&mut frame).unwrap();
            assert!(announces(&frame[..bytes]), "{nic}, {round}: {:x?}", &frame[..bytes]);
        }
        assert_eq!(destination.qmp.run_state().unwrap(), RunState::Running);
    }
}

#[test]
fn its_owner_keeps_the_number_of_announcements() {
    for rounds in [0, 1, 7] {
        let destination = wait_for(PLAIN, TYPE);
        let set = json!({ "announce-rounds": rounds });
        destination.qmp.execute("migrate-set-parameters", set).unwrap();
        let before = settings(&destination.qmp);
        let incoming = Incoming::of(&destination).unwrap();
        incoming.restore();
        assert_eq!(settings(&destination.qmp), before);
    }
}

/// By its record, which lacks what this agent notes.
#[test]
fn a_vm_that_an_earlier_agent_has_moved_is_known() {
    let on_its_own = "-nic user,model=virtio-net-pci";
    let named = format!("{UNCONNECTED} {VIRTIO}");
    let other = format!("{UNCONNECTED} {E1000}");
    for (nic, may_crash) in [(named.as_str(), true), (on_its_own, true), (&other, false)] {
        let arguments = format!("{PLAIN} {nic}");
        for (vm, arrived) in [(start(&arguments), false), (wait_for(&arguments, TYPE), true)] {
            let mut record = serde_json::to_value(vm.record()).unwrap();
            let vm = vm.found_again(&record.to_string());
            assert!(!vm.may_crash_at_reset(), "{nic}");
            record.as_object_mut().unwrap().remove("keeps_announce_timers").unwrap();
            let vm = vm.found_again(&record.to_string());
            assert_eq!(vm.may_crash_at_reset(), may_crash && arrived, "{nic}");
        }
    }
}
