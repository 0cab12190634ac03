//! The daemon of one host: its API and its VMs.
//!
//! [`run`] is all of it. [`config`] says what it is told; `registry` keeps the
//! VMs, `migrations` those that leave, `arrivals` those that come, `recovery`
//! those of which only one host knows whose they are, `gangs` those that move
//! together; `http` is the API over
//! them. QEMU and the engine are blocking and have threads of
//! their own; only the API is async.

#![forbid(unsafe_code)]

mod arrivals;
mod carry;
pub mod config;
mod daemon;
mod denied;
mod events;
mod examiner;
mod gangs;
mod holdings;
mod http;
mod log;
mod metrics;
mod migrations;
mod name;
mod peers;
mod rack;
mod record;
mod recovery;
mod registry;
mod renewal;
mod scopes;
mod service_manager;
mod socket;
mod state;
mod user;
mod vm;
mod webhook;

pub use carry::DoorsError;
pub use daemon::{AgentError, run};
pub use name::NameError;
pub use socket::SocketError;
pub use state::StateError;
pub use user::UserError;
