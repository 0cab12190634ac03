//! Which certificates are accepted: those of hosts (or of people), from a trusted CA, within
//! their validity, and at the calling end only the called host's. rustls's own code verifies
//! chains and signatures.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, RootCertStore,
    SignatureScheme,
};

use crate::certificate;
use crate::refusal::CertificateProblem;
use crate::subject::Subject;

/// What both ends verify certificates with.
#[derive(Debug)]
pub(crate) struct Trust {
    pub(crate) roots: Arc<RootCertStore>,
    pub(crate) provider: Arc<CryptoProvider>,
}

impl Trust {
    /// Checks that a certificate is from a trusted CA, is valid now, and may be used by a
    /// server.
    pub(crate) fn check_chain(
        &self,
        certificate: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), Error> {
        verify_server_cert_signed_by_trust_anchor(
            &ParsedCertificate::try_from(certificate)?,
            &self.roots,
            others,
            now,
            self.provider.signature_verification_algorithms.all,
        )
    }
}

/// The methods about signatures, which rustls's two traits have in common.
macro_rules! signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(Error::General("there is only TLS 1.3".to_owned()))
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            let algorithms = &self.trust.provider.signature_verification_algorithms;
            verify_tls13_signature(message, certificate, signature, algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.trust.provider.signature_verification_algorithms.supported_schemes()
        }
    };
}

/// Verifies shown certificates again. A connection that resumes was verified when the first
/// one was made, and time has passed since.
pub(crate) trait Again {
    /// The name in a certificate that is accepted.
    fn check(
        &self,
        certificate: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<String, Error>;

    /// The name of the host, if its certificates are still valid.
    fn verify_again(&self, shown: &[CertificateDer<'_>]) -> Result<String, Error> {
        let (first, others) = shown.split_first().ok_or(Error::NoCertificatesPresented)?;
        self.check(first, others, UnixTime::now())
    }
}

/// The name of the host whose certificate it is.
fn host(certificate: &CertificateDer<'_>) -> Result<String, Error> {
    match certificate::subject(certificate) {
        Some(Subject::Host(name)) => Ok(name),
        // The peer gets the alert "access denied".
        _ => Err(CertificateError::ApplicationVerificationFailure.into()),
    }
}

/// Verifies the host that is called.
#[derive(Debug)]
pub(crate) struct Called {
    pub(crate) trust: Arc<Trust>,
    pub(crate) name: String,
}

impl Again for Called {
    fn check(
        &self,
        certificate: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<String, Error> {
        self.trust.check_chain(certificate, others, now)?;
        let found = host(certificate)?;
        if found == self.name {
            return Ok(found);
        }
        let (expected, found) = (self.name.clone(), Subject::Host(found));
        let problem = CertificateProblem::OtherName { expected, found };
        Err(CertificateError::Other(OtherError(Arc::new(problem))).into())
    }
}

impl ServerCertVerifier for Called {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        // Hosts' names are not DNS names: the expected one is in `Called`.
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(certificate, others, now)?;
        Ok(ServerCertVerified::assertion())
    }

    signatures!();
}

/// Who may connect to a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Who {
    /// Agents of other hosts.
    Hosts,
    /// People with a role.
    People,
}

/// Verifies the end that calls. It may have any name, which the code that accepted the
/// connection gets.
#[derive(Debug)]
pub(crate) struct Calling {
    pub(crate) who: Who,
    pub(crate) trust: Arc<Trust>,
    /// rustls's own verifier, which accepts any client certificate of a trusted CA.
    pub(crate) chain: Arc<dyn ClientCertVerifier>,
}

impl Again for Calling {
    fn check(
        &self,
        certificate: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<String, Error> {
        self.chain.verify_client_cert(certificate, others, now)?;
        match (self.who, certificate::subject(certificate)) {
            (Who::Hosts, Some(Subject::Host(name)))
            | (Who::People, Some(Subject::Client { name, .. })) => Ok(name),
            // The peer gets the alert "access denied".
            _ => Err(CertificateError::ApplicationVerificationFailure.into()),
        }
    }
}

impl ClientCertVerifier for Calling {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.chain.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(certificate, others, now)?;
        Ok(ClientCertVerified::assertion())
    }

    signatures!();
}
