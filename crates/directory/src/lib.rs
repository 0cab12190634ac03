//! Who in a rack holds, or is about to receive, which content.
//!
//! A [`Directory`] is asked before a page goes to a rack: is its content there,
//! or on its way, and at which host? If not, whoever asked has claimed it. It is
//! a hint, which may be wrong, late or gone: what comes by its word is verified
//! where it arrives, and else comes from the source.
//!
//! - [`Embedded`] keeps it in an agent of the rack.
//! - [`Remote`] asks one that [`serve`] answers for at the other end of a
//!   connection.
//! - [`Redis`] keeps it in Redis or Valkey, alone or as a cluster.

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
pub use host::{HostName, HostNameError};
pub use remote::{Halves, Remote};
pub use server::{ServeError, serve};
