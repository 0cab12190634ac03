//! Many VMs as one operation: which goes where, and which may go now.

mod admission;
mod placement;

pub use admission::{Move, PARALLEL_MAX, Stage, admit, is_landing};
pub use placement::{Host, NoPlace, Unfit, Vm, place};
