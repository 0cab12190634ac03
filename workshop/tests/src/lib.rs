//! End-to-end tests: two hosts, an agent on each, a guest that checks itself, and commands as
//! people type them. The tests are the files in `tests/`, each for the behaviour in its name. They
//! need root, as the lab does.

pub mod addresses;
pub mod browser;
pub mod commander;
pub mod disk;
pub mod domains;
pub mod fake_xl;
pub mod faults;
pub mod field;
pub mod files;
mod goal;
pub mod hostile;
pub mod liar;
pub mod libvirt;
pub mod long_life;
pub mod memory;
mod moving;
mod own_program;
pub mod pattern;
pub mod proxmox;
pub mod proxy;
mod racks;
pub mod simulated;
pub mod strangers;
mod systemd;
mod terminal;
mod unmanaged;
mod world;

use std::io::Write;

pub use goal::{assert_fits_goal, fits_goal_bytes};
pub use moving::{Ended, Frozen, Moving, kill, terminate};
pub use own_program::OwnProgram;
pub use racks::RackWorld;
pub use systemd::{Systemd, boot_host};
pub use terminal::Terminal;
pub use world::{
    Side, World, assert_intact, assert_no_page_is_wrong, bare, guest, own_qmp_argument, reached,
    twin, until,
};

/// Prints what this machine can't test; the suite repeats it at the end, also if the test passes.
/// Not by `println!`, whose output is captured unless the test fails.
pub fn note(text: &str) {
    // This line may begin with the test's name. A reader that has closed it is no error.
    let _ = writeln!(std::io::stdout(), "\nsuite note: {text}");
}

/// A MiB.
pub const MIB: u64 = 1 << 20;
