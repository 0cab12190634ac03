//! The phases of one migration at its source, in their order.

pub(crate) mod audit;
mod effects;
mod listening;
pub(crate) mod stream;
mod switchover;
mod undo;
