//! The protocol between the helper in a guest and the agent on the host. The agent sends an
//! [`Query`]. The helper answers with a [`Greeting`] and frames that list runs of pages, each with
//! the place on a disk that has the same content.
//!
//! ```text
//! agent                                  helper
//!   | query {nonce, budget}                |
//!   |------------------------------------->|
//!   |           greeting {version, nonce}  |
//!   |<-------------------------------------|
//!   |    device, runs, runs, device, runs  |  numbered frames
//!   |<-------------------------------------|
//!   |              summary, or a refusal   |
//!   |<-------------------------------------|
//! ```
//!
//! The helper runs in the guest, so its answer is hostile input: a [`Listener`] checks every
//! number against a bound before it uses it, and a map that it accepts is still only a hint. The
//! user of the map has to verify which page it names, and whether the disk has that page's
//! content.
//!
//! A virtio-serial port is one pipe that outlives the conversations on it. So a query must be
//! found among any other bytes, and everything before the greeting with the agent's own nonce is
//! left over from an earlier conversation.

#![forbid(unsafe_code)]

mod code;
mod device;
mod fault;
mod frame;
pub mod fuzzing;
mod greeting;
mod listener;
mod map;
mod query;
mod run;
mod summary;
mod write;

pub use device::Device;
pub use fault::Fault;
pub use greeting::{Clears, Greeting};
pub use listener::{Limits, Listener, State};
pub use map::CacheMap;
pub use query::{AnswerKind, Budget, Query, QueryFinder};
pub use run::Run;
pub use summary::{End, LeftOut, Reason, Summary};
pub use write::Reply;

/// The version of the protocol.
pub const VERSION: u16 = 1;
/// The port's name, on QEMU's command line and in the guest.
pub const PORT_NAME: &str = "org.droveway.guest.0";
/// Bytes in a page.
pub const PAGE_BYTES: u64 = 4096;
/// Bytes in a sector, whatever the disk's blocks are.
pub const SECTOR_BYTES: u64 = 512;
/// Sectors in a page.
pub const PAGE_SECTORS: u64 = PAGE_BYTES / SECTOR_BYTES;
/// The most disks in one map.
pub const DEVICES_MAX: usize = 64;
