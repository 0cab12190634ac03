//! Why a command failed, and what to do.

use std::io;

/// Why a command failed.
///
/// It is printed after `droveway: ` on one line.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// Nothing listens.
    #[error(
        "no agent answers at {0}: start it (`systemctl start droveway`, or `droveway agent`), or \
         name its socket with --api or DROVEWAY_API"
    )]
    NoAgent(String),
    /// The user may not use the socket.
    #[error(
        "the agent's socket {0} can't be opened by this user: run this as the user that the agent \
         runs as (often with sudo), or as a member of its api-group"
    )]
    NotAllowed(String),
    /// The agent's host can't be connected to.
    #[error(
        "no agent answers at {at}: {why}. Is that host up, does its agent run with `api-listen`, \
         and does the firewall allow the connection?"
    )]
    Unreached {
        /// The agent's address.
        at: String,
        /// The reason.
        why: String,
    },
    /// The agent and this command don't trust one another.
    #[error("there is no secure connection to the agent at {at}: {why}")]
    Insecure {
        /// The agent's address.
        at: String,
        /// The reason, and what to do.
        why: String,
    },
    /// The connection was lost, or the response is invalid.
    #[error("lost the connection to the agent at {at}: {why}")]
    Lost {
        /// The agent's address.
        at: String,
        /// The reason.
        why: String,
    },
    /// The agent refused the request.
    #[error("{0}")]
    Refused(String),
    /// The agent refused the request for now; a later attempt may succeed.
    #[error("{0}")]
    NotNow(String),
    /// An operation on this side failed.
    #[error("{what}: {source}")]
    Local {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
    /// The command line or another input is invalid.
    #[error("{0}")]
    Typed(String),
    /// The agent did not start, or ended with an error.
    #[error(transparent)]
    Agent(#[from] agent::AgentError),
    /// The user's certificate can't be used.
    #[error(transparent)]
    Identity(#[from] identity::IdentityError),
    /// A configuration is invalid for an agent.
    #[error(transparent)]
    Config(#[from] agent::config::ConfigError),
    /// A file of a certificate, or next to one, can't be used.
    #[error(transparent)]
    File(#[from] identity::FileError),
    /// The CA could not be created or opened, or a certificate not issued.
    #[error(transparent)]
    Authority(#[from] identity::AuthorityError),
}
