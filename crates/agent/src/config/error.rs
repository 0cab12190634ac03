//! What is wrong with a configuration.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use identity::NameError;

use super::defaults::{POOL_MIB, TLS_DEFAULT};
use super::directory::DirectoryChoiceError;

/// Why a configuration can't be used, for its author.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file can't be read.
    #[error("reading {}: {source}", file.display())]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// A file has the wrong syntax or content.
    #[error("{}:{line}: {message}", file.display())]
    Malformed {
        /// The file.
        file: PathBuf,
        /// The line of the mistake.
        line: usize,
        /// What is wrong.
        message: String,
    },
    /// A file with a secret is not for its owner alone.
    #[error(
        "{file} has a secret, and can be read or written by every user of this host: chmod 600 \
         {file}",
        file = .0.display()
    )]
    Open(PathBuf),
    /// A rack of the peers file is invalid.
    #[error("{}: rack `{rack}`: {message}", file.display())]
    Rack {
        /// The file.
        file: PathBuf,
        /// Its name.
        rack: String,
        /// What is wrong.
        message: String,
    },
    /// An entry of the peers file is invalid.
    #[error("{}: host `{host}`: {message}", file.display())]
    Peer {
        /// The file.
        file: PathBuf,
        /// The entry.
        host: String,
        /// What is wrong.
        message: String,
    },
    /// A setting without a default is missing.
    #[error("no {what}: give --{flag}, or `{flag}` in the file of --config")]
    Missing {
        /// The setting, in words.
        what: &'static str,
        /// The flag and the key.
        flag: &'static str,
    },
    /// The host's name is invalid.
    #[error("name: {0}")]
    Name(#[from] NameError),
    /// It would listen unencrypted where others can reach it.
    #[error(
        "listening at {listen} without a certificate, others on that network could read guest \
         memory and start VMs. Create a CA once (`droveway ca init`), a certificate for each host \
         (`droveway ca issue {name}`), and copy its files to {dir} here, or name their directory \
         with --tls. Or listen at 127.0.0.1; or, on a network of your own, use \
         --insecure-plaintext",
        dir = TLS_DEFAULT
    )]
    Plaintext {
        /// The address at which it would listen.
        listen: SocketAddr,
        /// This host.
        name: String,
    },
    /// Both `tls` and `insecure-plaintext` are set.
    #[error("tls and insecure-plaintext contradict one another: leave one of them out")]
    Contradiction,
    /// The address to listen at has no port.
    #[error("listen: {0} needs a fixed port, such as :7800")]
    Port(SocketAddr),
    /// The API over TCP lacks the certificate by which it admits people.
    #[error(
        "api-listen: over TCP the API is for people with certificates, so this host needs one too: \
         `droveway ca issue {0}`, --tls"
    )]
    ApiWithoutTls(String),
    /// Lanes would connect to an address at which the agent doesn't listen.
    #[error(
        "nic {nic} can't be reached while listening at {listen} alone: listen at {any}, or leave \
         the nic out"
    )]
    NicNotListened {
        /// The NIC.
        nic: IpAddr,
        /// The address at which the agent listens.
        listen: SocketAddr,
        /// The address at which it would listen for all NICs.
        any: SocketAddr,
    },
    /// A speed is given for an address that is no NIC.
    #[error("nic-speed: {0} is not one of this host's nics")]
    NicSpeed(IpAddr),
    /// Two settings that say the same.
    #[error("{0} and {0}-file contradict one another: leave one of them out")]
    Twice(&'static str),
    /// The location of the rack's directory is wrong, in its file.
    #[error("directory-file: {0}")]
    Directory(#[from] DirectoryChoiceError),
    /// A setting under `[carry]` is wrong.
    #[error("[carry] {0}")]
    Carry(String),
    /// A setting under `[webhook]` is wrong.
    #[error("[webhook] {0}")]
    Webhook(String),
    /// A setting under `[xen]` is wrong.
    #[error("[xen] {0}")]
    Xen(String),
    /// The pool's size is out of range.
    #[error(
        "pool-mib: {0} is outside {low} to {high}",
        low = POOL_MIB.start(), high = POOL_MIB.end()
    )]
    Pool(u32),
}
