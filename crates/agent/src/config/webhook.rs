//! `[webhook]`: the receiver of events.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fmt, fs};

use api::Happening;
use aws_lc_rs::hmac;
use axum::http::Uri;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde::Deserialize;
use serde_json::json;

use super::error::ConfigError;
use super::secrets;

/// Files of the CAs that a distribution trusts: of Debian and its derivatives, then of Fedora and
/// its derivatives.
const TRUSTED: [&str; 2] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt"];

/// The event that stands for missing ones.
const GAP: &str = "gap";

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Section {
    url: Option<String>,
    url_file: Option<PathBuf>,
    secret_file: PathBuf,
    ca: Option<PathBuf>,
    events: Option<BTreeSet<String>>,
}

/// The receiver of events.
#[derive(Clone, Debug)]
pub struct Webhook {
    /// The receiver's URL.
    pub(crate) url: String,
    /// The key that signs events.
    pub(crate) secret: Secret,
    /// The CAs that may vouch for the receiver.
    ///
    /// Empty: it is on this host, unencrypted.
    pub(crate) authorities: Arc<Vec<CertificateDer<'static>>>,
    /// The names of the events to send; none: all.
    pub(crate) events: Option<BTreeSet<String>>,
}

/// The key that signs events.
#[derive(Clone)]
pub(crate) struct Secret(hmac::Key);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    /// Parses `whsec_` followed by base64.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let bytes = BASE64.decode(text.strip_prefix("whsec_")?).ok()?;
        let is_long_enough = (24..=64).contains(&bytes.len());
        is_long_enough.then(|| Self(hmac::Key::new(hmac::HMAC_SHA256, &bytes)))
    }

    /// The signature of an event in the headers of [Standard Webhooks](https://www.standardwebhooks.com).
    pub(crate) fn sign(&self, id: &str, at_unix_s: u64, body: &str) -> String {
        let tag = hmac::sign(&self.0, format!("{id}.{at_unix_s}.{body}").as_bytes());
        format!("v1,{}", BASE64.encode(tag))
    }
}

impl Section {
    /// Makes relative paths start from `here`, the directory of the agent's file.
    pub(super) fn paths_from(&mut self, here: &Path) {
        self.secret_file = here.join(&self.secret_file);
        self.url_file = self.url_file.as_ref().map(|file| here.join(file));
        self.ca = self.ca.as_ref().map(|ca| here.join(ca));
    }

    /// Whether `url` has a password.
    pub(super) fn has_password(&self) -> bool {
        self.url.as_ref().is_some_and(|url| secrets::has_password(url))
    }

    pub(super) fn understood(self) -> Result<Webhook, ConfigError> {
        let Self { url, url_file, secret_file, ca, events } = self;
        events.iter().flatten().try_for_each(|name| check_event(name))?;
        let url = match (url, url_file) {
            (Some(_), Some(_)) => return Err(ConfigError::Twice("[webhook] url")),
            (Some(url), None) => url,
            (None, Some(file)) => secrets::read_private(&file)?.trim().to_owned(),
            (None, None) => return Err(wrong("url, or url-file, is missing".to_owned())),
        };
        let is_encrypted = check_url(&url)?;
        let secret = read_secret(&secret_file)?;
        let authorities = if is_encrypted { read_authorities(ca)? } else { Vec::new() };
        Ok(Webhook { url, secret, authorities: Arc::new(authorities), events })
    }
}

impl Webhook {
    /// Whether the receiver is on this host.
    pub(crate) fn is_here(&self) -> bool {
        self.url.parse::<Uri>().is_ok_and(|uri| uri.host().is_some_and(is_loopback))
    }

    /// Whether events of this name are sent to the receiver; `gap` always is.
    pub(crate) fn wants(&self, event: &str) -> bool {
        event == GAP || self.events.as_ref().is_none_or(|events| events.contains(event))
    }
}

/// Checks that such events exist.
///
/// For a known name, the parser fails only because of missing fields.
fn check_event(name: &str) -> Result<(), ConfigError> {
    let parsed: Result<Happening, _> = serde_json::from_value(json!({ "event": name }));
    match parsed {
        Err(error) if error.to_string().starts_with("unknown variant") => {
            Err(wrong(format!("events: {error}")))
        }
        _ => Ok(()),
    }
}

fn wrong(text: String) -> ConfigError {
    ConfigError::Webhook(text)
}

/// Whether the URL is encrypted; an unencrypted one has to be on this host.
fn check_url(url: &str) -> Result<bool, ConfigError> {
    let refused = |why: &str| wrong(format!("url: `{}` {why}", secrets::shown(url)));
    let uri: Uri = url.parse().map_err(|error| refused(&format!("is no URL: {error}")))?;
    let host = uri.host().ok_or_else(|| refused("names no host: write https://HOST/PATH"))?;
    match uri.scheme_str() {
        Some("https") => Ok(true),
        Some("http") if is_loopback(host) => Ok(false),
        Some("http") => Err(refused(
            "would be sent names of VMs and hosts unencrypted: use https, or a receiver on \
             this host",
        )),
        _ => Err(refused("must start with https://")),
    }
}

fn is_loopback(host: &str) -> bool {
    let ip = host.trim_matches(['[', ']']).parse::<IpAddr>();
    host == "localhost" || ip.is_ok_and(|ip| ip.is_loopback())
}

fn read_secret(file: &Path) -> Result<Secret, ConfigError> {
    Secret::parse(secrets::read_private(file)?.trim()).ok_or_else(|| {
        wrong(format!(
            "secret-file: {} has to hold one line, `whsec_` and 24 to 64 random bytes in base64, \
             such as of `echo whsec_$(openssl rand -base64 32)`",
            file.display()
        ))
    })
}

fn read_authorities(ca: Option<PathBuf>) -> Result<Vec<CertificateDer<'static>>, ConfigError> {
    let usual = || TRUSTED.map(PathBuf::from).into_iter().find(|file| file.is_file());
    let file = ca.or_else(usual).ok_or_else(|| {
        wrong(format!(
            "ca: neither {} nor {} exists: install ca-certificates, or name the file of the CAs \
             that may vouch for the receiver",
            TRUSTED[0], TRUSTED[1]
        ))
    })?;
    let text =
        fs::read(&file).map_err(|source| ConfigError::Unreadable { file: file.clone(), source })?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        _ => Err(wrong(format!("ca: {} holds no certificates in PEM", file.display()))),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn unencrypted_urls_have_to_be_on_this_host() {
        for url in ["https://example.org/hook", "https://10.0.0.1:8443"] {
            assert!(check_url(url).unwrap(), "{url}");
        }
        for url in ["http://127.0.0.1:80/x", "http://localhost/", "http://[::1]:9/"] {
            assert!(!check_url(url).unwrap(), "{url}");
        }
        for (url, part) in [
            ("http://example.org/", "unencrypted"),
            ("http://127.0.0.1.example.org/", "unencrypted"),
            ("ftp://example.org/", "https://"),
            ("/hook", "no host"),
            ("https://exa mple/", "no URL"),
        ] {
            let error = check_url(url).unwrap_err().to_string();
            assert!(error.starts_with("[webhook] url: ") && error.contains(part), "{error}");
        }
    }

    #[test]
    fn an_unknown_event_is_refused() {
        for name in ["migration-ended", "vm-in-doubt", "gap", "certificate-expires"] {
            assert!(check_event(name).is_ok(), "{name}");
        }
        for name in ["migration_ended", "", "Gap"] {
            let error = check_event(name).unwrap_err().to_string();
            assert!(error.starts_with("[webhook] events: unknown variant"), "{error}");
            assert!(error.contains("`migration-ended`"), "it names those there are: {error}");
        }
    }

    #[test]
    fn a_secret_has_its_format_and_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("secret");
        let write = |text: &str, mode| {
            fs::write(&file, text).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            read_secret(&file).map_err(|error| error.to_string())
        };
        let good = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n";
        assert!(write(good, 0o600).is_ok());
        assert!(write(good, 0o640).is_ok());
        assert!(write(good, 0o644).unwrap_err().contains("chmod 600"));
        for text in ["", "whsec_", "whsec_c2hvcnQ=", "secret", "whsec_%%%%"] {
            assert!(write(text, 0o600).unwrap_err().contains("openssl rand"), "{text}");
        }
        fs::remove_file(&file).unwrap();
        assert!(read_secret(&file).unwrap_err().to_string().starts_with("reading "));
    }
}
