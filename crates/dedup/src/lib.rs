//! Content that need not be sent: a page that comes by name, and is found at the
//! destination.
//!
//! [`source`] names what QEMU hands over, and what disks have, before it does.
//! [`destination`] is a stage behind the lanes: it gets batches of names and says of
//! each page whether it is here, comes from elsewhere, or is wanted from the source.
//! [`rack`] is what other hosts have, [`storage`] what disks have.

#![forbid(unsafe_code)]

pub mod destination;
pub mod rack;
pub mod source;
pub mod storage;
