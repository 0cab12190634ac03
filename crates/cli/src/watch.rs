//! Watching an operation on the terminal: its progress and Ctrl-C.

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
pub(crate) use requests::{begin, leave_stopping, leave_unanswered, leave_upgrading, report, wait};
pub(crate) use signals::{Signals, terminated};
pub(crate) use states::last;
