//! Why a question about this host's network has no answer.

use std::io;
use std::net::IpAddr;

/// Errors of this host.
#[derive(Debug, thiserror::Error)]
pub enum NicError {
    /// No interface has the address.
    #[error("no network interface here has the address {0}; `ip address` lists what there is")]
    NoSuchAddress(IpAddr),
    /// The interface with the address carries nothing to other hosts.
    #[error(
        "the address {address} is on {interface}, and which network cards carry its traffic is \
         not known"
    )]
    NotOnNic {
        /// The address.
        address: IpAddr,
        /// The interface.
        interface: String,
    },
    /// The system refuses.
    #[error("{action}: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
}
