//! Reads a certificate, its key, and the CA that their holder trusts.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::sign::CertifiedKey;
use rustls::{Error, RootCertStore, SupportedProtocolVersion, version::TLS13};

use crate::certificate;
use crate::files::{self, FileError, Files};
use crate::subject::Subject;
use crate::verify::Trust;

pub(crate) const VERSIONS: &[&SupportedProtocolVersion] = &[&TLS13];

/// Why a host's or a person's files can't be used.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// One of the files can't be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The certificate doesn't belong to the key.
    #[error("{} is not the key of {}: copy both from where they were issued", key.display(), certificate.display())]
    OtherKey {
        /// The key.
        key: PathBuf,
        /// The certificate.
        certificate: PathBuf,
    },
    /// The certificate is not this host's.
    #[error(
        "{} is a certificate of {found}, and this host is {expected}: issue one with `droveway ca \
         issue {expected}`, or correct the name",
        certificate.display()
    )]
    OtherName {
        /// The file.
        certificate: PathBuf,
        /// This host.
        expected: String,
        /// The holder that it names.
        found: String,
    },
    /// The certificate was not issued by this CA.
    #[error(
        "{} was not issued by the CA whose certificate is {}: copy both from where they were issued",
        certificate.display(), authority.display()
    )]
    OtherAuthority {
        /// The certificate.
        certificate: PathBuf,
        /// The CA's certificate.
        authority: PathBuf,
    },
    /// The certificate is a host's.
    #[error(
        "{} is a host's certificate: the API takes people's, which `droveway ca issue NAME --role \
         ROLE` makes", certificate.display()
    )]
    NotAPerson {
        /// The file.
        certificate: PathBuf,
    },
    /// Something else that TLS can't use.
    #[error("{} can't be used for TLS: {why}", file.display())]
    Unusable {
        /// Which file.
        file: PathBuf,
        /// Why.
        why: String,
    },
}

pub(crate) fn unusable(file: &Path, why: &dyn std::fmt::Display) -> IdentityError {
    IdentityError::Unusable { file: file.to_owned(), why: why.to_string() }
}

/// Reads the trusted CA, and the holder's certificate and key.
pub(crate) fn read(files: &Files) -> Result<(Arc<Trust>, CertifiedKey), IdentityError> {
    let provider = Arc::new(provider());
    let mut roots = RootCertStore::empty();
    for root in files::certificates(&files.authority)? {
        roots.add(root).map_err(|error| unusable(&files.authority, &error))?;
    }
    let chain = files::certificates(&files.certificate)?;
    let key = provider
        .key_provider
        .load_private_key(files::key(&files.key)?)
        .map_err(|error| unusable(&files.key, &error))?;
    let trust = Arc::new(Trust { roots: Arc::new(roots), provider });
    Ok((trust, CertifiedKey::new(chain, key)))
}

/// Checks that the key is the certificate's, and returns its holder.
pub(crate) fn check_key(files: &Files, certified: &CertifiedKey) -> Result<Subject, IdentityError> {
    let certificate = files.certificate.clone();
    match certified.keys_match() {
        Ok(()) => {}
        Err(Error::InconsistentKeys(_)) => {
            return Err(IdentityError::OtherKey { key: files.key.clone(), certificate });
        }
        Err(error) => return Err(unusable(&certificate, &error)),
    }
    let found = certified.cert.first().and_then(certificate::subject);
    found.ok_or_else(|| not_ours(files))
}

pub(crate) fn not_ours(files: &Files) -> IdentityError {
    unusable(&files.certificate, &"`droveway ca issue` did not make it")
}

/// One cipher, for which both ends' CPUs have instructions. The post-quantum key
/// exchange is preferred, so that traffic recorded today stays secret later.
fn provider() -> CryptoProvider {
    CryptoProvider {
        cipher_suites: vec![aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256],
        kx_groups: vec![aws_lc_rs::kx_group::X25519MLKEM768, aws_lc_rs::kx_group::X25519],
        ..aws_lc_rs::default_provider()
    }
}
