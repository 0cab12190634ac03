use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::path::Path;

use qemu::machine::Machine;
use qemu::qmp::{Qmp, RunState};

use crate::hand_over::{hand_over, in_file, start_after};
use crate::migrate::WAIT;
use crate::{Vm, start};

/// Two ports at which nothing listens.
fn free_ports() -> [u16; 2] {
    let bound = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    bound.map(|listener| listener.local_addr().unwrap().port())
}

/// Where clients find a VM's QEMU.
struct Addresses {
    vnc: u16,
    serial: u16,
}

impl Addresses {
    fn new() -> Self {
        let [vnc, serial] = free_ports();
        Self { vnc, serial }
    }

    fn arguments(&self) -> String {
        format!(
            "{} -vnc 127.0.0.1:{},share=ignore -serial telnet:127.0.0.1:{},server=on,wait=off \
             -qmp unix:own.qmp,server=on,wait=off -pidfile own.pid",
            in_file("own.ram"),
            self.vnc - 5900,
            self.serial
        )
    }

    /// Asserts that they lead to this QEMU, which is the only one.
    fn assert_lead_to(&self, vm: &Machine) {
        assert_eq!(first_bytes(self.vnc), *b"RFB 003.008\n");
        assert_eq!(first_bytes(self.serial), [0xff], "telnet");
        let own = Qmp::connect(&vm.cwd.join("own.qmp"), WAIT).unwrap();
        assert_eq!(own.run_state().unwrap(), RunState::Running);
        assert_eq!(pid_file(vm), format!("{}\n", vm.process.pid()));
        assert_eq!(hidden(&vm.cwd), [""; 0]);
    }
}

fn first_bytes<const N: usize>(port: u16) -> [u8; N] {
    let mut connection = TcpStream::connect(("127.0.0.1", port)).unwrap();
    connection.set_read_timeout(Some(WAIT)).unwrap();
    let mut bytes = [0; N];
    connection.read_exact(&mut bytes).unwrap();
    bytes
}

fn pid_file(vm: &Machine) -> String {
    std::fs::read_to_string(vm.cwd.join("own.pid")).unwrap()
}

fn hidden(dir: &Path) -> Vec<String> {
    let names = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
    let names = names.map(|name| name.into_string().unwrap());
    names.filter(|name| name.contains(".droveway-")).collect()
}

/// Until then the former one has them all.
fn next_of(former: &Vm, addresses: &Addresses) -> Vm {
    let next = start_after(former, &addresses.arguments());
    assert_eq!(first_bytes(addresses.vnc), *b"RFB 003.008\n");
    let own = Qmp::connect(&former.cwd.join("own.qmp"), WAIT).unwrap();
    assert_eq!(own.run_state().unwrap(), RunState::Running);
    assert_eq!(pid_file(former), format!("{}\n", former.process.pid()));
    next
}

#[test]
fn the_next_qemu_takes_over_addresses_and_the_pid_file() {
    let addresses = Addresses::new();
    let first = start(&addresses.arguments());
    addresses.assert_lead_to(&first);
    let second = next_of(&first, &addresses);
    hand_over(&first, &second);
    // It is repeated after a crash of the agent.
    for _ in 0..2 {
        second.take_over();
        addresses.assert_lead_to(&second);
    }
    let third = next_of(&second, &addresses);
    hand_over(&second, &third);
    third.take_over();
    addresses.assert_lead_to(&third);
    assert!(!third.dir.path().join("vnc").exists());

    third.is_one_of_two(false);
    third.quit().unwrap();
    for file in ["own.pid", "own.qmp"] {
        assert!(!first.cwd.join(file).exists(), "{file} of a VM that has ended");
    }
}

#[test]
fn the_former_qemu_keeps_all_of_it_if_it_goes_on() {
    let addresses = Addresses::new();
    let first = start(&addresses.arguments());
    let next = next_of(&first, &addresses);
    drop(next);
    first.take_over();
    addresses.assert_lead_to(&first);
}

#[test]
fn a_qemu_whose_record_is_lost_has_its_addresses_again() {
    let addresses = Addresses::new();
    let first = start(&addresses.arguments());
    let mut second = next_of(&first, &addresses);
    hand_over(&first, &second);
    second.take_over();
    second.machine = None;
    let home = second.dir.path();
    second.machine = Some(qemu::machine::attach(&home.join("qmp"), home).unwrap());
    let line = second.argv.join(" ");
    let vnc = format!("-vnc 127.0.0.1:{},share=ignore", addresses.vnc - 5900);
    let serial = format!("host=127.0.0.1,port={}", addresses.serial);
    let own = format!("path={}", first.cwd.join("own.qmp").display());
    for part in [vnc, serial, own] {
        assert!(line.contains(&part), "{part}: {line}");
    }
}
