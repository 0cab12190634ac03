//! The commands: each with its arguments beside the code that runs it.

pub(crate) mod set;
