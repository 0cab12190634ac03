//! Breaks things on purpose in the middle of a migration, and looks at what has
//! become of the VM: see [`Plan`] for what, and [`Yard`] for where.

mod inject;
mod judge;
mod plan;
mod yard;

pub use inject::Traced;
pub use judge::phase;
pub use plan::{End, Fault, Moment, Plan};
pub use yard::{Fate, Seen, Yard};
