//! Users of an agent's API over TCP, people and programs: each has a certificate with a
//! role. Their HTTP traffic is little, so it goes through rustls's own connections, as
//! with any HTTP library.

use std::error::Error as StdError;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt::{
    set_socket_keepalive, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl,
    set_tcp_user_timeout,
};
use rustls::client::Resumption;
use rustls::client::danger::ServerCertVerifier;
use rustls::pki_types::CertificateDer;
use rustls::server::danger::ClientCertVerifier;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, Error, ServerConfig};

use crate::certificate;
use crate::credentials::{self, IdentityError, VERSIONS};
use crate::files::Files;
use crate::handshake::HandshakeError;
use crate::subject::Subject;
use crate::verify::{Called, Calling, Trust};

/// The ALPN protocol: a connection of a person is no use at the agent's port for other
/// agents, nor an agent's at this one.
const PROTOCOL: &[u8] = b"http/1.1";
/// After such a silence the kernel asks the other end's kernel whether it is still there.
const PROBE_AFTER: Duration = Duration::from_secs(10);
const PROBE_EVERY: Duration = Duration::from_secs(5);
const PROBES: u32 = 4;

/// A person's certificate and key, and the trusted CA.
pub struct Person {
    subject: Subject,
    trust: Arc<Trust>,
    certified: Arc<CertifiedKey>,
}

impl std::fmt::Debug for Person {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Person").field("subject", &self.subject).finish_non_exhaustive()
    }
}

impl Person {
    /// Reads what `droveway ca issue NAME --role ROLE` made.
    ///
    /// # Errors
    /// If the files don't exist, or are a host's.
    pub fn load(files: &Files) -> Result<Self, IdentityError> {
        let (trust, certified) = credentials::read(files)?;
        let subject = credentials::check_key(files, &certified)?;
        if let Subject::Host(_) = subject {
            return Err(IdentityError::NotAPerson { certificate: files.certificate.clone() });
        }
        Ok(Self { subject, trust, certified: Arc::new(certified) })
    }

    /// The person's name and role.
    #[must_use]
    pub fn subject(&self) -> &Subject {
        &self.subject
    }

    /// The configuration for connections to the API of the host of that name, and of no
    /// other.
    ///
    /// # Errors
    /// If the certificate can't be used.
    pub fn calls(&self, host: &str) -> Result<Arc<ClientConfig>, HandshakeError> {
        let called = Called { trust: Arc::clone(&self.trust), name: host.to_owned() };
        let config = ClientConfig::builder_with_provider(Arc::clone(&self.trust.provider))
            .with_protocol_versions(VERSIONS)
            .map_err(HandshakeError::of)?;
        let mut config = config
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(called) as Arc<dyn ServerCertVerifier>)
            .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(Arc::clone(
                &self.certified,
            ))));
        config.alpn_protocols = vec![PROTOCOL.to_vec()];
        config.resumption = Resumption::disabled();
        config.enable_sni = false;
        Ok(Arc::new(config))
    }
}

/// The configuration of the API's port, which shows the host's certificate and accepts people's.
pub(crate) fn server(
    calling: Calling,
    certified: &Arc<CertifiedKey>,
) -> Result<ServerConfig, Error> {
    let mut config = ServerConfig::builder_with_provider(Arc::clone(&calling.trust.provider))
        .with_protocol_versions(VERSIONS)?
        .with_client_cert_verifier(Arc::new(calling) as Arc<dyn ClientCertVerifier>)
        .with_cert_resolver(Arc::new(SingleCertAndKey::from(Arc::clone(certified))));
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    // Connections are few, so each is verified again.
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// Has a connection end if the other end's host is down: nothing is sent while an answer takes its
/// time. It ends once the other end has acknowledged nothing, neither data nor probes, or taken
/// nothing, for `patience`.
pub fn notice_dead_peer(socket: impl AsFd, patience: Duration) -> io::Result<()> {
    let socket = socket.as_fd();
    let patience_ms = u32::try_from(patience.as_millis()).unwrap_or(u32::MAX);
    set_socket_keepalive(socket, true)?;
    set_tcp_keepidle(socket, PROBE_AFTER)?;
    set_tcp_keepintvl(socket, PROBE_EVERY)?;
    set_tcp_keepcnt(socket, PROBES)?;
    Ok(set_tcp_user_timeout(socket, patience_ms)?)
}

/// The holder of the certificates that a peer has shown in a handshake.
#[must_use]
pub fn shown(certificates: Option<&[CertificateDer<'_>]>) -> Option<Subject> {
    certificate::subject(certificates?.first()?)
}

/// Explains a TLS error in words for the operator; `None` if the error is not about TLS.
#[must_use]
pub fn explain(error: &(dyn StdError + 'static)) -> Option<String> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<Error>() {
            return Some(HandshakeError::of(found.clone()).to_string());
        }
        // An I/O error displays the error that it wraps, and doesn't return it as its source.
        let held = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        next = match held {
            Some(held) => Some(held),
            None => error.source(),
        };
    }
    None
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use rustix::net::sockopt::{socket_keepalive, tcp_keepidle, tcp_user_timeout};
    use rustls::AlertDescription;

    use super::*;

    #[test]
    fn a_host_that_is_gone_is_noticed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        notice_dead_peer(&stream, Duration::from_secs(30)).unwrap();
        assert!(socket_keepalive(&stream).unwrap());
        assert_eq!(tcp_keepidle(&stream).unwrap(), PROBE_AFTER);
        assert_eq!(tcp_user_timeout(&stream).unwrap(), 30_000);
    }

    #[test]
    fn an_alert_is_explained_however_deep_it_lies() {
        let alert = Error::AlertReceived(AlertDescription::UnknownCA);
        let error = io::Error::other(io::Error::other(alert));
        let said = explain(&error).unwrap();
        assert!(said.contains("doesn't know the CA"), "{said}");
        assert_eq!(explain(&io::Error::other("lost")), None);
        assert_eq!(explain(&io::Error::from(io::ErrorKind::NotFound)), None);
    }
}
