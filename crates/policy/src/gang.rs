//! Many VMs as one operation: which VM goes to which host, and which may start now, and
//! how much of the network each may use.

mod admission;
mod limits;
mod placement;

pub use admission::{Move, PARALLEL_MAX, Stage, admit, is_landing};
pub use limits::{Limits, Link, Need, UNLIMITED};
pub use placement::{CONTENTS_MAX, Contents, Host, NoPlace, Placed, Unfit, Vm, place};
