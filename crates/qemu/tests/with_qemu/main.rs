//! Against real QEMU: `DROVEWAY_QEMU`, or `qemu-system-x86_64` from the path.
//! Without one these tests fail. `DROVEWAY_QEMU_OTHER`, if set, is a QEMU of
//! another version for the tests that have one at each end.
//!
//! - `start`: a VM started, reopened, attached, ended; and refused
//! - `memory`: the guest's RAM, reached in QEMU's memory
//! - `shape`: what a live VM consists of
//! - `guest_port`: the port for the helper in a guest
//! - `guest_disks`: the disks that a guest sees, and where their content is
//! - `disks`: challenges for the images of a live VM
//! - `hand_over`: RAM that stays where it is when a VM gets another QEMU
//! - `taken_over`: what only one QEMU of a VM can have, when it gets another one
//! - `migrate`: both ends of QEMU's migration, its settings before and after
//! - `killed_agent`: a migration whose agent ended while QEMU's channels connected
//! - `announce`: a network card whose VM moves
//! - `mirror`: disks that move with their VM, and what can go wrong: a file for each
//!   kind

mod announce;
mod disks;
mod guest_disks;
mod guest_port;
mod hand_over;
mod killed_agent;
mod memory;
mod migrate;
mod mirror;
mod shape;
mod start;
mod taken_over;

use std::path::Path;

use qemu::machine::{By, GuestPort, Machine, Start, StartError, UP_MAX};

/// A VM that ends with the test.
struct Vm {
    machine: Option<Machine>,
    dir: tempfile::TempDir,
}

impl Vm {
    /// Reopens the VM as after a restart of the agent: the connection ends, QEMU
    /// doesn't.
    fn found_again(mut self, record: &str) -> Self {
        self.machine = None;
        let record = serde_json::from_str(record).unwrap();
        self.machine = Some(qemu::machine::reopen(&record, self.dir.path()).unwrap());
        self
    }
}

impl std::ops::Deref for Vm {
    type Target = Machine;

    fn deref(&self) -> &Machine {
        self.machine.as_ref().expect("not being found again")
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.machine.as_ref().map(Machine::quit) {
            eprintln!("a test's QEMU stays behind: {error}");
        }
    }
}

fn program() -> String {
    std::env::var("DROVEWAY_QEMU").unwrap_or_else(|_| "qemu-system-x86_64".to_owned())
}

/// QEMU's command line with these arguments, split at spaces.
fn argv(arguments: &str) -> Vec<String> {
    argv_of(&program(), arguments)
}

/// The program may be given with arguments of its own, such as -L. QEMU takes the first
/// accelerator that works, so TCG is left out where another one is named.
fn argv_of(program: &str, arguments: &str) -> Vec<String> {
    let accelerator = if arguments.contains("-accel ") { "" } else { "-accel tcg" };
    [program, "-nodefaults -display none", accelerator, arguments]
        .iter()
        .flat_map(|part| part.split_whitespace())
        .map(str::to_owned)
        .collect()
}

fn try_start(arguments: &str, dir: &Path) -> Result<Machine, StartError> {
    try_start_by(&program(), arguments, dir)
}

fn try_start_by(program: &str, arguments: &str, dir: &Path) -> Result<Machine, StartError> {
    let argv = argv_of(program, arguments);
    let start = Start {
        name: "test",
        argv: &argv,
        cwd: dir,
        dir,
        incoming: false,
        machine: None,
        by: By::Operator,
        user: None,
        guest_port: GuestPort::None,
        knows_legacy_ack: false,
        up_max: UP_MAX,
        idle_max: UP_MAX,
    };
    qemu::machine::start(&start)
}

/// The QEMU of another version, if there is one.
fn other() -> String {
    std::env::var("DROVEWAY_QEMU_OTHER").unwrap_or_else(|_| program())
}

fn start_other(arguments: &str) -> Vm {
    let dir = tempfile::tempdir().unwrap();
    let machine = try_start_by(&other(), arguments, dir.path()).unwrap();
    Vm { machine: Some(machine), dir }
}

fn start(arguments: &str) -> Vm {
    let dir = tempfile::tempdir().unwrap();
    let machine = try_start(arguments, dir.path()).unwrap();
    Vm { machine: Some(machine), dir }
}

/// A destination for a VM of that machine type, by the other QEMU if there is
/// one.
fn wait_for(arguments: &str, machine: &str) -> Vm {
    let argv = argv_of(&other(), arguments);
    let dir = tempfile::tempdir().unwrap();
    let start = Start {
        name: "test",
        argv: &argv,
        cwd: dir.path(),
        dir: dir.path(),
        incoming: true,
        machine: Some(machine),
        by: By::Operator,
        user: None,
        guest_port: GuestPort::None,
        knows_legacy_ack: false,
        up_max: UP_MAX,
        idle_max: UP_MAX,
    };
    let machine = qemu::machine::start(&start).unwrap();
    Vm { machine: Some(machine), dir }
}
