//! The operator's CA, which issues certificates for hosts and people.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use rustls::pki_types::CertificateDer;
use time::{Duration, OffsetDateTime};

use crate::certificate::{self, Validity};
use crate::files::{self, FileError, Files, Readers, Writing};
use crate::subject::{NameError, Subject};

/// How far certificates are backdated: they work at once, though hosts' clocks differ.
const BACKDATED: Duration = Duration::hours(1);
/// Bytes of its public key that tell one CA's name from another's.
const MARK_BYTES: usize = 4;

/// A request for a certificate.
#[derive(Clone, Debug)]
pub struct CertificateRequest {
    /// Its holder.
    pub subject: Subject,
    /// How long it is valid.
    pub days: u32,
    /// The directory for its files.
    pub out: PathBuf,
    /// Whether files there are replaced.
    pub replace: bool,
}

/// An issued certificate.
#[derive(Clone, Debug)]
pub struct Issued {
    /// Its files.
    pub files: Files,
    /// When it is valid.
    pub validity: Validity,
    /// Whether it ends earlier than requested, with its CA.
    pub is_shortened: bool,
}

/// Why a CA can't be made or used.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// One of the files can't be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// There is no CA.
    #[error(
        "there is no CA in {0}: create one with `droveway ca init --dir {0}`, or name its \
         directory with --dir",
        dir.display()
    )]
    None {
        /// Where.
        dir: PathBuf,
    },
    /// Its files are not a CA's, or not of one CA.
    #[error("the CA in {} can't be used: {why}", dir.display())]
    Broken {
        /// Where.
        dir: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// It has expired.
    #[error(
        "the CA in {} has expired on {day}: make a new one in another directory and issue all \
         certificates again",
        dir.display()
    )]
    Expired {
        /// Where.
        dir: PathBuf,
        /// When.
        day: String,
    },
    /// The name is not valid.
    #[error(transparent)]
    Name(#[from] NameError),
    /// A key or a signature could not be made.
    #[error("making a certificate: {0}")]
    Making(#[from] rcgen::Error),
}

/// A CA that can sign.
pub struct Authority {
    dir: PathBuf,
    certificate_pem: String,
    issuer: Issuer<'static, KeyPair>,
    validity: Validity,
    content_key: String,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").field("dir", &self.dir).finish_non_exhaustive()
    }
}

impl Authority {
    /// Makes a CA that is valid for `days`, in a directory without one. Returns
    /// when it is valid.
    ///
    /// # Errors
    /// If there is one already, or it can't be written.
    pub fn create(dir: &Path, days: u32) -> Result<Validity, AuthorityError> {
        files::make_dir(dir)?;
        let key = KeyPair::generate()?;
        let now = OffsetDateTime::now_utc();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        // The end of a public key is as good as random, so no two CAs have the
        // same name.
        let public = key.public_key_raw();
        let mark = &public[public.len().saturating_sub(MARK_BYTES)..];
        let mark: String = mark.iter().map(|byte| format!("{byte:02x}")).collect();
        params.distinguished_name = distinguished(&format!("Droveway CA {mark}"));
        params.not_before = now - BACKDATED;
        params.not_after = now + Duration::days(days.into());
        let certificate = params.self_signed(&key)?;

        let (certificate_file, key_file) = files_of(dir);
        let mut writing =
            Writing::new("a CA is never replaced, since that would invalidate all it has issued");
        writing.add(&key_file, key.serialize_pem(), Readers::Owner)?;
        writing.add(&certificate_file, certificate.pem(), Readers::Everybody)?;
        writing.finish()?;
        Ok(Validity {
            not_before_s: params.not_before.unix_timestamp(),
            not_after_s: params.not_after.unix_timestamp(),
        })
    }

    /// Opens the CA in a directory.
    ///
    /// # Errors
    /// If there is none, or it can't be used.
    pub fn open(dir: &Path) -> Result<Self, AuthorityError> {
        let (certificate_file, key_file) = files_of(dir);
        if !certificate_file.exists() && !key_file.exists() {
            return Err(AuthorityError::None { dir: dir.to_owned() });
        }
        let broken =
            |why: &str| AuthorityError::Broken { dir: dir.to_owned(), why: why.to_owned() };
        let certificates = files::certificates(&certificate_file)?;
        let [certificate] = &certificates[..] else {
            return Err(broken("ca.crt holds more than one certificate"));
        };
        let validity = certificate::validity(certificate)
            .ok_or_else(|| broken("ca.crt is not a certificate"))?;
        let now = SystemTime::now();
        if validity.has_expired(now) {
            return Err(AuthorityError::Expired { dir: dir.to_owned(), day: validity.last_day() });
        }
        let key = KeyPair::try_from(&files::key(&key_file)?)
            .map_err(|_| broken("ca.key is not a key that it can sign with"))?;
        if !belongs(certificate, &key) {
            return Err(broken("ca.key is not the key of ca.crt, or ca.crt is not a CA's"));
        }
        let content_key = content_key(&key);
        let issuer = Issuer::from_ca_cert_der(certificate, key)
            .map_err(|error| broken(&error.to_string()))?;
        let certificate_pem = files::text(&certificate_file)?;
        Ok(Self { dir: dir.to_owned(), certificate_pem, issuer, validity, content_key })
    }

    /// When it is valid.
    #[must_use]
    pub fn validity(&self) -> Validity {
        self.validity
    }

    /// The default directory for a certificate's files: one for each holder.
    #[must_use]
    pub fn place_for(&self, subject: &Subject) -> PathBuf {
        let kind = match subject {
            Subject::Host(_) => "hosts",
            Subject::Client { .. } => "clients",
        };
        self.dir.join(kind).join(subject.name())
    }

    /// Makes a key and its certificate, and writes both, with the CA's
    /// certificate next to them.
    ///
    /// # Errors
    /// If files exist and must not be replaced, or can't be written.
    pub fn issue(&self, request: &CertificateRequest) -> Result<Issued, AuthorityError> {
        let key = KeyPair::generate()?;
        let now = OffsetDateTime::now_utc();
        let mut params = CertificateParams::default();
        params.distinguished_name = distinguished(request.subject.name());
        params.subject_alt_names = vec![SanType::URI(request.subject.to_uri().try_into()?)];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = match request.subject {
            // An agent is both server and client.
            Subject::Host(_) => {
                vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth]
            }
            Subject::Client { .. } => vec![ExtendedKeyUsagePurpose::ClientAuth],
        };
        params.use_authority_key_identifier_extension = true;
        params.not_before = now - BACKDATED;
        let not_after = now + Duration::days(request.days.into());
        params.not_after = not_after.min(self.end());
        let certificate = params.signed_by(&key, &self.issuer)?;

        files::make_dir(&request.out)?;
        let files = Files::within(&request.out);
        let mut writing = if request.replace {
            Writing::over()
        } else {
            Writing::new("add --replace to replace it, or choose another --out")
        };
        writing.add(&files.key, key.serialize_pem(), Readers::Owner)?;
        writing.add(&files.certificate, certificate.pem(), Readers::Everybody)?;
        writing.add(&files.authority, &self.certificate_pem, Readers::Everybody)?;
        if matches!(request.subject, Subject::Host(_)) {
            writing.add(&files.content_key, &self.content_key, Readers::Owner)?;
        }
        writing.finish()?;
        let validity = Validity {
            not_before_s: params.not_before.unix_timestamp(),
            not_after_s: params.not_after.unix_timestamp(),
        };
        Ok(Issued { files, validity, is_shortened: params.not_after < not_after })
    }

    /// When the CA expires. Verifiers of a certificate don't check that, so no
    /// certificate that it issues may outlast it.
    fn end(&self) -> OffsetDateTime {
        OffsetDateTime::from_unix_timestamp(self.validity.not_after_s)
            .unwrap_or_else(|_| OffsetDateTime::now_utc())
    }
}

/// A secret that all hosts of a CA share, and no one else knows. The CA's key can't be
/// derived from it.
fn content_key(key: &KeyPair) -> String {
    let secret = blake3::derive_key("droveway 2026-11 content.key", &key.serialize_der());
    format!("{}\n", blake3::Hash::from_bytes(secret).to_hex())
}

fn files_of(dir: &Path) -> (PathBuf, PathBuf) {
    (dir.join("ca.crt"), dir.join("ca.key"))
}

fn distinguished(name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::OrganizationName, "Droveway");
    distinguished.push(DnType::CommonName, name);
    distinguished
}

fn belongs(certificate: &CertificateDer<'_>, key: &KeyPair) -> bool {
    x509_parser::parse_x509_certificate(certificate).is_ok_and(|(_, certificate)| {
        certificate.is_ca()
            && *certificate.public_key().subject_public_key.data == *key.public_key_raw()
    })
}
