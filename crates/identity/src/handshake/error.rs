//! Why a connection could not be secured, in words for the operator.

use std::io;
use std::time::Duration;

use rustls::Error;

use crate::record::RecordError;
use crate::refusal::{CertificateProblem, Refusal};

/// The longest that a handshake may take. Across the world it takes half a second,
/// and three times that with lost packets; a slower peer counts as dead.
pub const HANDSHAKE_MAX: Duration = Duration::from_secs(5);

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The network failed, or the peer has disconnected.
    #[error("the connection broke during the TLS handshake: {0}")]
    Io(#[from] io::Error),
    /// The peer sent nothing, or too little.
    #[error("the peer took more than {} s for the TLS handshake", HANDSHAKE_MAX.as_secs())]
    TooSlow,
    /// The peer doesn't speak TLS.
    #[error(
        "the peer uses plaintext and this agent TLS: remove --insecure-plaintext there, and give \
         that host a certificate (or is it not an agent?)"
    )]
    PeerIsPlain,
    /// The peer ended the connection at our first message.
    #[error(
        "the peer closed the connection when it received TLS: it is an agent with \
         --insecure-plaintext, or another program"
    )]
    Unanswered,
    /// The peer connected, and left without sending anything.
    #[error("the peer connected and closed the connection without sending data")]
    Silent,
    /// The peer speaks TLS, and this host doesn't.
    #[error(
        "the peer uses TLS, and this agent has --insecure-plaintext: remove it here, and give this \
         host a certificate"
    )]
    PeerIsSecure,
    /// The peer's certificate is refused.
    #[error(transparent)]
    Certificate(#[from] CertificateProblem),
    /// The peer refuses this host.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The peer refuses this host's certificate because of its time.
    #[error("{refusal} ({here})")]
    OutOfTime {
        /// What the peer says.
        refusal: Refusal,
        /// What this host's clock says.
        here: String,
    },
    /// The peer speaks TLS, but not the agents' protocol inside.
    #[error("the peer has a certificate of our CA, but is not an agent")]
    NotAnAgent,
    /// The peer, or something on the path, violates TLS.
    #[error("the peer sent invalid TLS: {0}")]
    Protocol(String),
}

impl HandshakeError {
    /// Converts an error of rustls.
    pub(crate) fn of(error: Error) -> Self {
        match error {
            Error::InvalidCertificate(error) => CertificateProblem::of(&error).into(),
            Error::NoCertificatesPresented => CertificateProblem::None.into(),
            Error::AlertReceived(alert) => Refusal(alert.into()).into(),
            error => Self::Protocol(error.to_string()),
        }
    }
}

impl From<RecordError> for HandshakeError {
    fn from(error: RecordError) -> Self {
        Self::Protocol(error.to_string())
    }
}

/// Whether an answer that was expected in plaintext is a TLS alert: then
/// [`HandshakeError::PeerIsSecure`] is the error to report.
#[must_use]
pub fn is_tls_alert(answer: &[u8]) -> bool {
    matches!(answer, [21, 3, ..])
}
