//! Watching a migration or a gang on the terminal: its progress, and Ctrl-C.

mod bar;
mod follow;
pub(crate) mod gang;
pub(crate) mod migration;
mod signals;

pub(crate) use follow::{Followed, Shown, follow, leave};
pub(crate) use signals::Signals;
