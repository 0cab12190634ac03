//! The agent: the daemon that serves the API of one host and owns its VMs.
//!
//! [`run`] is the whole daemon, and [`config`] its configuration. `vms` keeps the VMs; `moves` has
//! those that leave and arrive, and settles switchovers that were interrupted; `gangs` moves many
//! together, `carry` what others command, `xen` what `xl` does. `api` serves all of it. A module uses only those on the
//! floors below it, as `floors` lists them. QEMU and the engine block and have their own threads;
//! only the API is async.

#![forbid(unsafe_code)]

mod api;
mod carry;
pub mod config;
mod daemon;
mod denied;
mod events;
mod examiner;
#[cfg(test)]
mod floors;
mod gangs;
mod id;
mod metrics;
mod moves;
mod parallel;
mod peers;
mod shares;
mod state;
mod user;
mod vms;
mod watched;
mod xen;

pub use self::api::few::Few;
pub use self::api::socket::SocketError;
pub use carry::CarryListenersError;
pub use daemon::{AgentError, run};
pub use qemu::secrets;
pub use state::StateError;
pub use user::UserError;
