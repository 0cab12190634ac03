//! Why certificates are refused, at either end, in words for the operator.

use rustls::pki_types::UnixTime;
use rustls::{AlertDescription, CertificateError};

use crate::certificate::minute;
use crate::subject::Subject;

/// Why the peer's certificate is refused here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CertificateProblem {
    /// The peer shows none.
    #[error(
        "the peer shows no certificate: only agents with a certificate of the same CA may connect"
    )]
    None,
    /// From an unknown CA, or with a bad signature.
    #[error(
        "the peer's certificate is not from a CA that this host knows (its ca.crt): issue one \
         with `droveway ca issue` and the same CA"
    )]
    Stranger,
    /// It has expired.
    #[error(
        "the peer's certificate has expired on {0}: issue a new one (or correct this host's clock)"
    )]
    Expired(String),
    /// It is not valid yet.
    #[error("the peer's certificate is valid only from {0}: one of the two hosts' clocks is wrong")]
    Early(String),
    /// Another host's.
    #[error(
        "the peer there is {found}, not host {expected}: the peers file names another address \
         than that host's, or the host has another's certificate"
    )]
    OtherName {
        /// The host that was called.
        expected: String,
        /// The host that answered.
        found: Subject,
    },
    /// Not an agent's, or not a person's.
    #[error(
        "the peer's certificate is of the wrong kind: agents need a host's (`droveway ca issue \
         HOST`), and people one with --role"
    )]
    NotAHost,
    /// Something else.
    #[error("the peer's certificate can't be used: {0}")]
    Other(String),
}

impl CertificateProblem {
    /// The alert for the peer, unless rustls has sent one.
    pub(crate) fn alert(&self) -> AlertDescription {
        match self {
            Self::None => AlertDescription::CertificateRequired,
            Self::Stranger => AlertDescription::UnknownCA,
            Self::Expired(_) | Self::Early(_) => AlertDescription::CertificateExpired,
            Self::OtherName { .. } => AlertDescription::CertificateUnknown,
            Self::NotAHost => AlertDescription::AccessDenied,
            Self::Other(_) => AlertDescription::BadCertificate,
        }
    }

    /// Converts an error of rustls, or the problem that this crate's verifier gave it.
    pub(crate) fn of(error: &CertificateError) -> Self {
        match error {
            CertificateError::UnknownIssuer | CertificateError::BadSignature => Self::Stranger,
            CertificateError::Expired => Self::Expired("a day before today".to_owned()),
            CertificateError::ExpiredContext { time, not_after } => {
                Self::Expired(and_now(*not_after, *time))
            }
            CertificateError::NotValidYet => Self::Early("a day after today".to_owned()),
            CertificateError::NotValidYetContext { time, not_before } => {
                Self::Early(and_now(*not_before, *time))
            }
            CertificateError::ApplicationVerificationFailure => Self::NotAHost,
            CertificateError::Other(other) => match other.0.downcast_ref::<Self>() {
                Some(ours) => ours.clone(),
                None => Self::Other(other.to_string()),
            },
            other => Self::Other(other.to_string()),
        }
    }
}

/// A time in a certificate, and what this host's clock says.
fn and_now(at: UnixTime, now: UnixTime) -> String {
    let shown = |at: UnixTime| minute(i64::try_from(at.as_secs()).unwrap_or(i64::MAX));
    format!("{}, and this host's clock shows {}", shown(at), shown(now))
}

/// The TLS alert with which the peer ended the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal(pub(crate) u8);

/// A plaintext agent's answer to TLS. An agent with TLS never sends it as a version
/// error: agents speak only one version of TLS.
pub(crate) const PLAINTEXT_ONLY: AlertDescription = AlertDescription::ProtocolVersion;

impl Refusal {
    /// Whether the peer says that this host's certificate has expired, or is not valid yet.
    pub(crate) fn is_about_time(self) -> bool {
        AlertDescription::from(self.0) == AlertDescription::CertificateExpired
    }
}

impl std::error::Error for Refusal {}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let says = match AlertDescription::from(self.0) {
            AlertDescription::UnknownCA => {
                "the peer doesn't know the CA of this host's certificate: both need certificates \
                 of the same CA"
            }
            AlertDescription::CertificateExpired => {
                "the peer reports that this host's certificate has expired, or isn't valid yet: \
                 issue a new one, or correct that host's clock"
            }
            AlertDescription::CertificateUnknown => {
                "the peer expected another host's certificate: compare this host's name with the \
                 peers file there"
            }
            AlertDescription::AccessDenied => {
                "the peer doesn't accept a certificate of this kind: agents need a host's, and \
                 their API a person's with a role"
            }
            AlertDescription::CertificateRequired => "the peer requires a certificate",
            AlertDescription::BadCertificate
            | AlertDescription::UnsupportedCertificate
            | AlertDescription::DecryptError => "the peer can't use this host's certificate",
            AlertDescription::ProtocolVersion => {
                "the peer uses plaintext (--insecure-plaintext) or an older TLS: agents that move \
                 VMs to each other need the same setting"
            }
            AlertDescription::NoApplicationProtocol => {
                "the peer uses TLS, but is not an agent: is this its API's port?"
            }
            other => return write!(f, "the peer ended the TLS connection: {other:?}"),
        };
        f.write_str(says)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_out_of_its_time_is_refused_with_both_times() {
        let at = |s| UnixTime::since_unix_epoch(std::time::Duration::from_secs(s));
        let early =
            CertificateError::NotValidYetContext { time: at(3600), not_before: at(2 * 3600) };
        let early = CertificateProblem::of(&early).to_string();
        assert!(early.contains("only from 1970-01-01 02:00 UTC, and"), "{early}");
        assert!(early.contains("clock shows 1970-01-01 01:00 UTC: one of"), "{early}");
        let late = CertificateError::ExpiredContext { time: at(3600), not_after: at(60) };
        let late = CertificateProblem::of(&late).to_string();
        assert!(late.contains("has expired on 1970-01-01 00:01 UTC, and"), "{late}");
        assert!(late.contains("clock shows 1970-01-01 01:00 UTC"), "{late}");
    }

    #[test]
    fn every_alert_has_words() {
        for code in 0..=u8::MAX {
            let text = Refusal(code).to_string();
            assert!(text.starts_with("the peer") && !text.contains('\n'), "{text}");
        }
    }
}
