use std::time::Duration;

use qemu::guest_port::{self, GuestError, HasGuest, NoPort, Port};
use qemu::machine::{self, By, GuestPort, Start, StartError, UP_MAX};
use qemu::shape;

use crate::{Vm, argv};

const LONG: Duration = Duration::from_secs(10);

fn try_start(arguments: &str, guest_port: GuestPort, incoming: bool) -> Result<Vm, StartError> {
    let dir = tempfile::tempdir().unwrap();
    let machine = machine::start(&Start {
        name: "test",
        argv: &argv(arguments),
        cwd: dir.path(),
        dir: dir.path(),
        incoming,
        machine: None,
        by: By::Operator,
        user: None,
        guest_port,
        knows_legacy_ack: false,
        up_max: UP_MAX,
        idle_max: UP_MAX,
    })?;
    Ok(Vm { machine: Some(machine), dir })
}

fn start(arguments: &str, guest_port: GuestPort) -> Vm {
    try_start(arguments, guest_port, false).unwrap()
}

#[test]
fn a_vm_gets_a_port_and_so_does_the_one_that_waits_for_it() {
    for arguments in ["-machine q35 -m 32 -S", "-machine pc -m 32 -S -device virtio-serial-pci"] {
        let vm = start(arguments, GuestPort::IfPossible);
        assert!(vm.guest_port && vm.notes.is_empty());
        let socket = vm.dir.path().join("gst");
        let port = guest_port::find(&vm.qmp, LONG).unwrap();
        assert_eq!(port, Port { socket: socket.clone(), taken: false, open: false });
        let waiting = try_start(arguments, GuestPort::Needed, true).unwrap();
        let shapes = [&vm, &waiting].map(|vm| shape::of(&vm.qmp).unwrap());
        assert_eq!(shape::differences(&shapes[0], &shapes[1], &[]), Vec::<String>::new());
        let record = serde_json::to_string(&vm.record()).unwrap();
        assert!(vm.found_again(&record).guest_port);
    }
}

#[test]
fn a_port_without_a_helper_or_with_another_client_is_an_error() {
    let vm = start("-machine q35 -m 32 -S", GuestPort::IfPossible);
    let error = vm.open_guest_port(LONG).unwrap_err();
    assert!(matches!(error, GuestError::NobodyThere), "{error}");
    let port = guest_port::find(&vm.qmp, LONG).unwrap();
    let had = guest_port::connect(&port.socket).unwrap();
    // QEMU serves clients in the order of their connections.
    assert!(guest_port::find(&vm.qmp, LONG).unwrap().taken);
    let second = guest_port::connect(&port.socket).unwrap();
    let error = guest_port::greet(&second, Duration::from_millis(50)).unwrap_err();
    assert!(matches!(error, GuestError::Absent { .. }), "{error}");
    drop(had);
}

#[test]
fn a_port_of_the_owners_is_found_and_none_is_added() {
    let own = "-machine q35 -m 32 -S -device virtio-serial-pci \
               -chardev socket,id=c,path=own,server=on,wait=off \
               -device virtserialport,chardev=c,name=org.droveway.guest.0";
    let vm = start(own, GuestPort::IfPossible);
    assert!(!vm.guest_port);
    let port = guest_port::find(&vm.qmp, LONG).unwrap();
    assert_eq!(port.socket.to_str(), Some("own"));
    // The path is relative to QEMU's directory.
    guest_port::connect(&vm.cwd.join(port.socket)).unwrap();
}

#[test]
fn a_machine_that_can_have_no_port_runs_without() {
    let vm = start("-machine isapc -m 32 -S", GuestPort::IfPossible);
    assert!(!vm.guest_port);
    assert!(vm.notes[0].contains("No 'PCI' bus"), "{:?}", vm.notes);
    let error = guest_port::find(&vm.qmp, LONG).unwrap_err();
    assert!(matches!(error, NoPort::Missing), "{error}");
    assert!(!vm.dir.path().join("gst").exists());
    let error = try_start("-machine isapc -m 32 -S", GuestPort::Needed, true).err().unwrap();
    assert!(error.to_string().contains("No 'PCI' bus"), "{error}");
    let error = try_start("-machine nosuch", GuestPort::IfPossible, false).err().unwrap();
    assert!(error.to_string().contains("machine type"), "{error}");
}

#[test]
fn a_port_that_leads_to_no_socket_is_named() {
    let vm = start(
        "-machine q35 -m 32 -S -device virtio-serial-pci -chardev null,id=c \
         -device virtserialport,chardev=c,name=org.droveway.guest.0",
        GuestPort::None,
    );
    let error = vm.open_guest_port(LONG).unwrap_err().to_string();
    assert!(error.contains("leads to `null`"), "{error}");
}
