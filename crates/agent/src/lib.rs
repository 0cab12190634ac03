//! The agent: the daemon that serves the API of one host and owns its VMs.
//!
//! [`run`] is the whole daemon, and [`config`] its configuration. `registry` keeps the VMs,
//! `migrations` those that leave, `arrivals` those that arrive, `gangs` those that move
//! together. `recovery` settles switchovers that were interrupted. `http` is the API over
//! all of them. QEMU and the engine block and have their own threads; only the API is async.

#![forbid(unsafe_code)]

mod arrivals;
mod carry;
pub mod config;
mod daemon;
mod denied;
mod events;
mod examiner;
mod few;
mod gangs;
mod holdings;
mod http;
mod log;
mod metrics;
mod migrations;
mod name;
mod parallel;
mod peers;
mod rack;
mod record;
mod recovery;
mod registry;
mod renewal;
mod scopes;
mod service_manager;
mod shares;
mod socket;
mod state;
mod user;
mod vm;
mod vm_logs;
mod watched;
mod webhook;

pub use carry::DoorsError;
pub use daemon::{AgentError, run};
pub use few::Few;
pub use name::NameError;
pub use qemu::secrets;
pub use socket::SocketError;
pub use state::StateError;
pub use user::UserError;
