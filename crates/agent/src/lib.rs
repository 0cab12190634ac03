//! The agent: the daemon that serves the API of one host and owns its VMs.
//!
//! [`run`] is the whole daemon, and [`config`] its configuration. `registry` keeps the VMs,
//! `migrations` those that leave, `arrivals` those that arrive, `gangs` those that move
//! together. `recovery` settles switchovers that were interrupted. `http` is the API over
//! all of them. QEMU and the engine block and have their own threads; only the API is async.

#![forbid(unsafe_code)]

mod api;
mod carry;
pub mod config;
mod daemon;
mod denied;
mod events;
mod examiner;
mod gangs;
mod id;
mod metrics;
mod moves;
mod name;
mod parallel;
mod peers;
mod shares;
mod state;
mod user;
mod vms;
mod watched;

pub use self::api::few::Few;
pub use self::api::socket::SocketError;
pub use carry::DoorsError;
pub use daemon::{AgentError, run};
pub use name::NameError;
pub use qemu::secrets;
pub use state::StateError;
pub use user::UserError;
