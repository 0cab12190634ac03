//! Watching a migration or a gang on the terminal: its progress and Ctrl-C.

mod bar;
mod follow;
pub(crate) mod gang;
pub(crate) mod migration;
mod requests;
mod signals;
mod states;
#[cfg(test)]
mod tests;

pub(crate) use follow::{Followed, Shown, follow, leave};
pub(crate) use requests::{begin, leave_unanswered, report};
pub(crate) use signals::Signals;
