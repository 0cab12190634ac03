//! Replaces another program's socket file for a while: its clients connect to us, and can still be
//! passed on to the other program.

mod directory;
mod replaced;
mod resolve;
mod watch;

pub use directory::{Directory, Inode};
pub use replaced::Replaced;
pub use resolve::can_open_resolved;
pub(crate) use resolve::{open_resolved, open_socket};
pub use watch::Watch;
