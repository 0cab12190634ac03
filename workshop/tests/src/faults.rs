//! Injects faults in the middle of a migration, and checks what has become of the VM: see [`Plan`]
//! for the faults, and [`Yard`] for the hosts.

mod inject;
mod judge;
mod plan;
mod yard;

pub use inject::Traced;
pub use judge::{phase, phase_within};
pub use plan::{End, Fault, Moment, Plan, Way};
pub use yard::{Fate, Seen, Yard};
