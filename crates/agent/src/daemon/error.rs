//! Why an agent can't run.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use host::quota::QuotaError;
use identity::IdentityError;
use qemu::programs::PatternError;
use switchover::journal::JournalError;

use super::rack::RackError;
use crate::api::socket::SocketError;
use crate::carry::CarryListenersError;
use crate::config::ConfigError;
use crate::state::StateError;
use crate::user::UserError;

/// Why an agent can't run.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// Its configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Its state directory.
    #[error(transparent)]
    State(#[from] StateError),
    /// Its journals.
    #[error(transparent)]
    Journals(#[from] JournalError),
    /// Its API's socket.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The user that QEMUs are to run as.
    #[error(transparent)]
    User(#[from] UserError),
    /// The programs that other hosts may start here.
    #[error(transparent)]
    Programs(#[from] PatternError),
    /// It can't listen at its address.
    #[error("listening at {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The reason.
        source: io::Error,
    },
    /// A NIC does not belong to this host.
    #[error("nic {nic} can't be used: {source}; is it an address of this host?")]
    Nic {
        /// Its address.
        nic: IpAddr,
        /// The reason.
        source: io::Error,
    },
    /// Its certificate is missing.
    #[error(
        "{source}; `droveway ca issue {name}` makes what belongs in {dir} (and `droveway ca init` \
         the CA)",
        dir = dir.display()
    )]
    NoCertificate {
        /// The directory that was searched.
        dir: PathBuf,
        /// This host.
        name: String,
        /// What is missing.
        source: IdentityError,
    },
    /// Its certificate can't be used.
    #[error(transparent)]
    Certificate(IdentityError),
    /// An earlier run's notes of throttled VMs can't be read.
    #[error(transparent)]
    Throttled(#[from] QuotaError),
    /// The rack's directory can't be used or kept.
    #[error(transparent)]
    Rack(#[from] RackError),
    /// The listeners at which it stands for other hosts.
    #[error(transparent)]
    CarryListeners(#[from] CarryListenersError),
    /// Another operation on this host failed.
    #[error("{what}: {source}")]
    Local {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

pub(super) fn local_error(what: &'static str, source: io::Error) -> AgentError {
    AgentError::Local { what, source }
}
