//! Certificates for the lab's hosts, of a CA that is removed with this value.

use std::path::PathBuf;

use identity::{Authority, AuthorityError, CertificateRequest, Identity, Role, Subject, Validity};

use crate::error::{LabError, Result, SystemContext};
use crate::hosts::{Host, RUN_DIR};

/// Longer than any lab lives, and than agents warn before the expiry.
const DAYS: u32 = 100;

/// A CA in a temporary directory.
#[derive(Debug)]
pub struct Certificates {
    dir: tempfile::TempDir,
}

impl Certificates {
    /// Makes a CA.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn new() -> Result<Self> {
        let dir = tempfile::tempdir().doing("make a directory for a CA")?;
        Authority::create(dir.path(), DAYS).map_err(|error| failed(&error))?;
        Ok(Self { dir })
    }

    /// The directory on a host where [`Certificates::give`] puts its files.
    #[must_use]
    pub fn place() -> String {
        format!("{RUN_DIR}/tls")
    }

    /// Gives a host what its agent needs to speak as the host `name`, and replaces what it had.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn give(&self, host: &Host, name: &str) -> Result<()> {
        self.issue(host, Subject::host(name), DAYS).map(drop)
    }

    /// An identity whose holder speaks as the host `name`.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn identity(&self, name: &str) -> Result<Identity> {
        let subject = Subject::host(name).map_err(|error| failed(&error.into()))?;
        let out = self.dir.path().join("given").join(name);
        let request = CertificateRequest { subject, days: DAYS, out, replace: true };
        let authority = Authority::open(self.dir.path()).map_err(|error| failed(&error))?;
        let files = authority.issue(&request).map_err(|error| failed(&error))?.files;
        Identity::load(name, &files).map_err(|error| LabError::Unsupported(error.to_string()))
    }

    /// Makes a certificate for the API over TCP, for a person with this role. Returns its
    /// directory, which is the same on every host.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn person(&self, name: &str, role: Role) -> Result<PathBuf> {
        let subject = Subject::client(role, name).map_err(|error| failed(&error.into()))?;
        let out = self.dir.path().join("given").join(name);
        let request = CertificateRequest { subject, days: DAYS, out: out.clone(), replace: true };
        let authority = Authority::open(self.dir.path()).map_err(|error| failed(&error))?;
        authority.issue(&request).map_err(|error| failed(&error))?;
        Ok(out)
    }

    /// Like [`Certificates::give`], with a certificate that is valid until the end of this second.
    /// Returns its validity.
    ///
    /// # Errors
    /// As [`Certificates::give`].
    pub fn give_ending(&self, host: &Host, name: &str) -> Result<Validity> {
        self.issue(host, Subject::host(name), 0)
    }

    fn issue(
        &self,
        host: &Host,
        subject: std::result::Result<Subject, identity::NameError>,
        days: u32,
    ) -> Result<Validity> {
        let subject = subject.map_err(|error| failed(&error.into()))?;
        let out = host.run_dir.join("tls");
        let request = CertificateRequest { subject, days, out, replace: true };
        let authority = Authority::open(self.dir.path()).map_err(|error| failed(&error))?;
        Ok(authority.issue(&request).map_err(|error| failed(&error))?.validity)
    }
}

fn failed(error: &AuthorityError) -> LabError {
    LabError::Unsupported(error.to_string())
}
