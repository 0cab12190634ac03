//! Which host of a rack holds, or is about to receive, which content.
//!
//! A [`Directory`] is queried before a page goes to a rack: which host has its content, or is
//! about to get it? If there is none, the query claims it. The answer is a hint, which may be
//! wrong, late or missing: content that comes by it is verified where it arrives, and otherwise
//! comes from the source.
//!
//! - [`Embedded`] is kept in an agent of the rack.
//! - [`Remote`] queries one that [`serve`] answers for at the other end of a connection.
//! - [`Redis`] is kept in Redis or Valkey, alone or as a cluster.

#![forbid(unsafe_code)]

mod directory;
mod embedded;
mod error;
#[doc(hidden)]
pub mod fuzzing;
mod host;
pub mod protocol;
mod redis;
mod remote;
mod server;
mod waiter;

pub use self::redis::{Redis, RedisSettings, Servers};
pub use directory::{Answer, Directory, Terms};
pub use embedded::{Embedded, Limits, Usage};
pub use error::DirectoryError;
pub use host::HostName;
pub use remote::{Halves, Remote};
pub use server::{ServeError, serve};
