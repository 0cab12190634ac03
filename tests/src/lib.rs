//! End-to-end tests: two hosts, an agent on each, a guest that checks itself,
//! the command as people type it. The tests are the files in `tests/`, each
//! for one behaviour and named by it. They need root, as the lab does.

pub mod browser;
pub mod commander;
pub mod disk;
pub mod faults;
pub mod files;
mod goal;
pub mod hostile;
pub mod liar;
pub mod libvirt;
pub mod memory;
mod moving;
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
pub use moving::{Ended, Frozen, Moving, kill};
pub use racks::RackWorld;
pub use systemd::Systemd;
pub use terminal::Terminal;
pub use world::{Side, World, assert_intact, bare, guest, own_qmp_argument, twin, until};

/// Says something that the suite repeats in the end, also of a test that passes: what
/// this machine doesn't let it try. Not by `println!`, which is heard of tests only
/// that fail.
pub fn note(text: &str) {
    // The test's name may be in this line. Whoever closed it wants to hear nothing.
    let _ = writeln!(std::io::stdout(), "\nsuite note: {text}");
}

/// A MiB.
pub const MIB: u64 = 1 << 20;
