//! Many VMs as one operation: which VM goes to which host, and which may start now.

mod admission;
mod placement;

pub use admission::{Move, PARALLEL_MAX, Stage, admit, is_landing};
pub use placement::{CONTENTS_MAX, Contents, Host, NoPlace, Placed, Unfit, Vm, place};
