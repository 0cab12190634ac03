//! The NBD protocol, both ends.
//!
//! ```text
//! server -> client   greeting: NBDMAGIC IHAVEOPT flags
//! client -> server   flags, then options:  GO {export's name}
//! server -> client   replies to options:   INFO {size, flags}, INFO {block sizes}, ACK
//! client -> server   requests:  WRITE {cookie, offset, bytes} payload ...
//! server -> client   replies:   {cookie, errno}, in any order
//! ```
//!
//! The [`server`] is what the source's QEMU mirrors a disk to. The [`client`]
//! writes into the export of the destination's QEMU. The [`reader`] reads an
//! export of shared storage, with many requests in flight. All use fixed
//! newstyle negotiation and simple replies, and nothing newer: structured
//! replies report holes and errors in the middle of a read, and the reader needs
//! neither.
//!
//! [`handshake`] and [`transmission`] are the bytes, without I/O. Lengths from
//! the peer are checked before anything is allocated or repeated by them.

#![forbid(unsafe_code)]

pub mod client;
mod errno;
mod error;
mod flags;
#[doc(hidden)]
pub mod fuzzing;
pub mod handshake;
mod read;
pub mod reader;
pub mod server;
pub mod transmission;

pub use client::Client;
pub use errno::Errno;
pub use error::ProtocolError;
pub use flags::ExportFlags;
