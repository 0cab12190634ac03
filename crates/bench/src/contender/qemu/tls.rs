//! Certificates for QEMU's own TLS.

use std::fs;

use lab::certificates::Certificates;
use lab::error::{FileContext, Result};
use lab::hosts::{Hosts, RUN_DIR};

/// Id of QEMU's object for them.
pub(super) const CREDENTIALS: &str = "tls";
/// Name in the destination's certificate.
pub(super) const DESTINATION: &str = "host-b";

/// Gives both hosts their certificates, under the file names that QEMU expects.
pub(super) fn give(hosts: &Hosts) -> Result<()> {
    let certificates = Certificates::new()?;
    for (host, name) in [(&hosts.a, "host-a"), (&hosts.b, DESTINATION)] {
        certificates.give(host, name)?;
        let dir = host.run_dir.join("tls");
        for (ours, theirs) in [
            ("ca.crt", "ca-cert.pem"),
            ("droveway.crt", "server-cert.pem"),
            ("droveway.key", "server-key.pem"),
            ("droveway.crt", "client-cert.pem"),
            ("droveway.key", "client-key.pem"),
        ] {
            fs::copy(dir.join(ours), dir.join(theirs)).at("copy", dir.join(ours))?;
        }
    }
    Ok(())
}

/// QEMU's arguments for them, with `server` or `client` as the endpoint. Without `sanity-check=off`
/// it would demand keys for key encipherment, which TLS 1.3 doesn't use.
pub(super) fn arguments(endpoint: &str) -> Vec<String> {
    let dir = format!("{RUN_DIR}/tls");
    let object = format!("tls-creds-x509,id={CREDENTIALS},dir={dir},endpoint={endpoint}");
    vec!["-object".to_owned(), object + ",verify-peer=on,sanity-check=off"]
}
