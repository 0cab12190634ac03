//! Many VMs moved as one operation: the code that `gang` and `evacuate` share.

mod plan;
pub(crate) mod plan_file;
pub(crate) mod start;
