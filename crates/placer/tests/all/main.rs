//! The placer, with a QEMU that the tests play. One program, since each is linked by itself.

mod any_order;
mod common;
mod deltas;
mod feeding;
mod mistakes;
mod placing;
