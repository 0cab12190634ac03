//! The commands: each with its arguments beside the code that runs it.

pub(crate) mod cancel;
pub(crate) mod migrate;
pub(crate) mod report;
pub(crate) mod set;
