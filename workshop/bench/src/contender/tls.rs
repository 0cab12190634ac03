//! Certificates for QEMU's own TLS.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use lab::error::{FileContext, LabError, Result};
use lab::hosts::{Hosts, RUN_DIR};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

/// The name in the destination's certificate.
pub(super) const DESTINATION: &str = "host-b";
/// Id of QEMU's object for them.
pub(super) const CREDENTIALS: &str = "tls";
const DIR: &str = "qemu-tls";

/// The lines of `qemu.conf` for them.
pub(super) fn of_libvirt() -> String {
    format!("migrate_tls_x509_cert_dir = \"{RUN_DIR}/{DIR}\"\nmigrate_tls_x509_verify = 1\n")
}

/// QEMU's arguments for them, with `server` or `client` as the endpoint.
pub(super) fn arguments(endpoint: &str) -> Vec<String> {
    let object = format!("tls-creds-x509,id={CREDENTIALS},dir={RUN_DIR}/{DIR},endpoint={endpoint}");
    vec!["-object".to_owned(), object + ",verify-peer=on"]
}

/// Gives both hosts certificates, under the file names that QEMU looks for and with the names and
/// key usages that QEMU demands.
pub(super) fn give(hosts: &Hosts) -> Result<()> {
    let authority = Authority::new()?;
    for (host, name) in [(&hosts.a, "host-a"), (&hosts.b, DESTINATION)] {
        let (certificate, key) = authority.issue(name)?;
        let dir = host.run_dir.join(DIR);
        fs::create_dir_all(&dir).at("make", &dir)?;
        open_to_all(&dir, 0o755)?;
        for (file, content) in [
            ("ca-cert.pem", &authority.certificate),
            ("server-cert.pem", &certificate),
            ("server-key.pem", &key),
            ("client-cert.pem", &certificate),
            ("client-key.pem", &key),
        ] {
            let path = dir.join(file);
            fs::write(&path, content).at("write", &path)?;
            open_to_all(&path, 0o644)?;
        }
    }
    Ok(())
}

/// QEMU runs as another user.
fn open_to_all(path: &std::path::Path, mode: u32) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).at("open to all", path)
}

struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: String,
}

impl Authority {
    fn new() -> Result<Self> {
        let key = KeyPair::generate().map_err(|error| failed(&error))?;
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        // QEMU tells a CA from what it has issued by their names.
        params.distinguished_name.push(DnType::CommonName, "lab CA");
        let certificate = params.self_signed(&key).map_err(|error| failed(&error))?.pem();
        Ok(Self { issuer: Issuer::new(params, key), certificate })
    }

    /// A certificate and its key.
    fn issue(&self, name: &str) -> Result<(String, String)> {
        let key = KeyPair::generate().map_err(|error| failed(&error))?;
        let mut params =
            CertificateParams::new(vec![name.to_owned()]).map_err(|error| failed(&error))?;
        params.distinguished_name.push(DnType::CommonName, name);
        params.key_usages =
            vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let certificate = params.signed_by(&key, &self.issuer).map_err(|error| failed(&error))?;
        Ok((certificate.pem(), key.serialize_pem()))
    }
}

fn failed(error: &rcgen::Error) -> LabError {
    LabError::Unsupported(format!("certificates: {error}"))
}
