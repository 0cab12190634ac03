//! Why a command did not do what was asked, and what to do.

use std::io;

/// Printed after `droveway: ` on one line.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Problem {
    /// Nothing listens.
    #[error(
        "no agent answers at {0}: start one with `droveway agent`, or name its socket with --api \
         or DROVEWAY_API"
    )]
    NoAgent(String),
    /// The socket is not ours to use.
    #[error(
        "the agent's socket {0} is not yours to use: run this as the user that the agent runs as \
         (often with sudo)"
    )]
    NotAllowed(String),
    /// The connection broke, or what came over it is no answer.
    #[error("lost the agent at {at}: {why}")]
    Lost {
        /// Where it is.
        at: String,
        /// How.
        why: String,
    },
    /// The agent says no.
    #[error("{0}")]
    Refused(String),
    /// The agent says no, and may say yes in a while.
    #[error("{0}")]
    NotNow(String),
    /// Something on this side.
    #[error("{what}: {source}")]
    Local {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
    /// What was typed can't be done.
    #[error("{0}")]
    Typed(String),
    /// The agent did not start, or ended.
    #[error(transparent)]
    Agent(#[from] agent::AgentError),
    /// The certificate of whoever asks can't be used.
    #[error(transparent)]
    Identity(#[from] identity::IdentityError),
    /// A configuration that no agent would take.
    #[error(transparent)]
    Config(#[from] agent::config::ConfigError),
    /// One of the files of a certificate, or beside them.
    #[error(transparent)]
    File(#[from] identity::FileError),
    /// No certificate was made.
    #[error(transparent)]
    Authority(#[from] identity::AuthorityError),
}
