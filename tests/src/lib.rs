//! End-to-end tests: two hosts, an agent on each, a guest that checks itself,
//! the command as people type it. The tests are the files in `tests/`, each
//! for one behaviour and named by it. They need root, as the lab does.

pub mod disk;
pub mod faults;
pub mod files;
mod goal;
pub mod hostile;
pub mod liar;
pub mod memory;
mod moving;
pub mod proxy;
mod racks;
pub mod strangers;
mod unmanaged;
mod world;

pub use goal::{assert_fits_goal, fits_goal_bytes};
pub use moving::{Ended, Frozen, Moving, kill};
pub use racks::RackWorld;
pub use world::{Side, World, assert_intact, bare, guest, own_qmp_argument, twin, until};

/// A MiB.
pub const MIB: u64 = 1 << 20;
