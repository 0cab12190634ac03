//! Guest RAM that the agent made, or was let into, and shares with QEMU.
//!
//! A [`RamFile`] is a file of memory that QEMU uses as a RAM block; a
//! [`Mapping`] is that file in this process, to be read and written while QEMU
//! and the guest do the same. The mapping belongs to this process alone and
//! stays whole when QEMU ends.
//!
//! # Memory that others write
//! No reference, shared or exclusive, to mapped memory ever exists here: a
//! `&[u8]` promises that the bytes don't change and a `&mut [u8]` that nobody
//! else looks, and a running guest keeps neither promise. All access goes
//! through raw pointers, as a copy to or from memory of our own, or by the
//! kernel. A byte that the guest writes during a copy may come out old or new,
//! and nothing may be concluded from reading it twice: whoever needs a stable
//! page copies it and works on the copy.
//!
//! Offsets come from peers. Every one is checked against the mapping's size,
//! and one outside is an error, never an access.
//!
//! A file that shrinks under its mapping would kill the process that touches
//! the lost part. Files made here are sealed against that; a file made by
//! somebody else is only as safe as they are.

mod error;
mod file;
mod mapping;
mod receive;

pub use error::RamError;
pub use file::RamFile;
pub use mapping::{DataRanges, Mapping};
pub use receive::{Piece, await_bytes};
