//! Whose certificates are taken: of hosts (or of people), from our CA, within their time, and
//! at the end that calls, of the host that was called. Chains and signatures are
//! rustls's to verify, with its own code.

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

/// What both ends need to verify.
#[derive(Debug)]
pub(crate) struct Trust {
    pub(crate) roots: Arc<RootCertStore>,
    pub(crate) provider: Arc<CryptoProvider>,
}

impl Trust {
    /// That a certificate is from one of our CAs, holds now, and may be shown by
    /// an end that is called.
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

    fn check_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// An end that was shown certificates, and can look at them again: a connection
/// that resumes was verified when the first one was, and time has passed since.
pub(crate) trait Again {
    /// The name of the host, if its certificates still hold.
    fn verify_again(&self, shown: &[CertificateDer<'_>]) -> Result<String, Error>;
}

impl Again for Called {
    fn verify_again(&self, shown: &[CertificateDer<'_>]) -> Result<String, Error> {
        let (first, others) = shown.split_first().ok_or(Error::NoCertificatesPresented)?;
        self.check(first, others, UnixTime::now())
    }
}

impl Again for Calling {
    fn verify_again(&self, shown: &[CertificateDer<'_>]) -> Result<String, Error> {
        let (first, others) = shown.split_first().ok_or(Error::NoCertificatesPresented)?;
        self.check(first, others, UnixTime::now())
    }
}

/// The name of the host whose certificate it is.
fn host(certificate: &CertificateDer<'_>) -> Result<String, Error> {
    match certificate::subject(certificate) {
        Some(Subject::Host(name)) => Ok(name),
        // Answered with "access denied".
        _ => Err(CertificateError::ApplicationVerificationFailure.into()),
    }
}

/// Verifies the host that is called.
#[derive(Debug)]
pub(crate) struct Called {
    pub(crate) trust: Arc<Trust>,
    pub(crate) name: String,
}

impl Called {
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
        // DNS has none of our names: it is in `Called`.
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(certificate, others, now)?;
        Ok(ServerCertVerified::assertion())
    }

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
        self.trust.check_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.trust.schemes()
    }
}

/// Who may call at a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Who {
    /// Agents of other hosts.
    Hosts,
    /// People with a role.
    People,
}

/// Verifies whoever calls. Whether it is the one that it says it is, its
/// name tells whoever took the connection.
#[derive(Debug)]
pub(crate) struct Calling {
    pub(crate) who: Who,
    pub(crate) trust: Arc<Trust>,
    /// rustls's own: who may call, by any certificate of our CA.
    pub(crate) chain: Arc<dyn ClientCertVerifier>,
}

impl Calling {
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
            // Answered with "access denied".
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
        self.trust.check_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.trust.schemes()
    }
}
