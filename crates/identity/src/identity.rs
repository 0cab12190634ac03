//! This host's identity, and the TLS configurations for its connections.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::{Mutex, RwLock};
use rustls::client::danger::ServerCertVerifier;
use rustls::client::{Resumption, TicketRequest};
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::UnixTime;
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, Error, ServerConfig, sign::SingleCertAndKey};

use crate::certificate::{self, Validity};
use crate::credentials::{IdentityError, VERSIONS, check_key, not_ours, read, unusable};
use crate::files::Files;
use crate::handshake::HandshakeError;
use crate::people;
use crate::refusal::{CertificateProblem, Refusal};
use crate::subject::Subject;
use crate::tickets::Tickets;
use crate::verify::{Called, Calling, Trust, Who};

/// The ALPN protocol: a connection between agents can't be passed off as one to another
/// port of the host.
pub(crate) const PROTOCOL: &[u8] = b"droveway-agent";
/// Tickets for a peer that connects for the first time: enough for the lanes of a
/// migration, by default up to 8, and again after all have failed once.
const TICKETS_FIRST: u8 = 16;
/// Tickets for a peer that used one: its replacement.
const TICKETS_AGAIN: u8 = 1;
/// How long before its end a certificate should be replaced.
const NOTICE: Duration = Duration::from_secs(30 * 24 * 3600);

/// A host's certificate and key, the CA that it trusts, and the tickets of earlier
/// connections. One for each agent, shared by all its connections.
pub struct Identity {
    name: String,
    /// Replaced whole by [`Identity::reload`]; connections keep what they started with.
    shown: RwLock<Arc<Shown>>,
}

/// What is shown to peers, and how they are verified.
pub(crate) struct Shown {
    validity: Validity,
    pub(crate) trust: Arc<Trust>,
    pub(crate) calling: Arc<Calling>,
    server: Arc<ServerConfig>,
    people: Arc<ServerConfig>,
    certified: Arc<CertifiedKey>,
    /// By peer. An agent connects only to hosts in its peers file, so they are few.
    clients: Mutex<HashMap<String, Arc<ClientConfig>>>,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Identity {
    /// Reads what `droveway ca issue` made for the host of that name. An expired
    /// certificate is accepted; see [`Identity::warning`].
    ///
    /// # Errors
    /// If the files don't exist, or are not this host's.
    pub fn load(name: &str, files: &Files) -> Result<Self, IdentityError> {
        let shown = RwLock::new(Arc::new(Shown::read(name, files)?));
        Ok(Self { name: name.to_owned(), shown })
    }

    /// Reads the files again, for all connections that start from now on.
    ///
    /// # Errors
    /// As [`Identity::load`]: then the identity stays as it was.
    pub fn reload(&self, files: &Files) -> Result<(), IdentityError> {
        let read = Arc::new(Shown::read(&self.name, files)?);
        *self.shown.write() = read;
        Ok(())
    }

    pub(crate) fn shown(&self) -> Arc<Shown> {
        Arc::clone(&self.shown.read())
    }

    /// This host's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// When its certificate is valid.
    #[must_use]
    pub fn validity(&self) -> Validity {
        self.shown().validity
    }

    /// A warning for the operator, if the certificate expires soon, has expired, or is not valid
    /// yet.
    #[must_use]
    pub fn warning(&self, now: SystemTime) -> Option<String> {
        self.validity().warning(&format!("host {}", self.name), NOTICE, now)
    }

    /// The peer's refusal of this host, with what this host knows of the reason.
    pub(crate) fn refused(&self, refusal: Refusal) -> HandshakeError {
        if !refusal.is_about_time() {
            return refusal.into();
        }
        let here = self.validity().as_seen_here(SystemTime::now());
        HandshakeError::OutOfTime { refusal, here }
    }

    /// The configuration of the API's port, which shows this host's certificate and
    /// accepts people's.
    #[must_use]
    pub fn for_people(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.shown().people)
    }
}

impl Shown {
    fn read(name: &str, files: &Files) -> Result<Self, IdentityError> {
        let (trust, certified) = read(files)?;
        let validity = check(name, files, &certified, &trust)?;

        let chain = WebPkiClientVerifier::builder_with_provider(
            Arc::clone(&trust.roots),
            Arc::clone(&trust.provider),
        )
        .build()
        .map_err(|error| unusable(&files.authority, &error))?;
        let calling = |who| Calling { who, trust: Arc::clone(&trust), chain: Arc::clone(&chain) };
        let (calling, asking) = (Arc::new(calling(Who::Hosts)), calling(Who::People));
        let certified = Arc::new(certified);
        let server = server(&trust, &calling, &certified)
            .map_err(|error| unusable(&files.certificate, &error))?;
        let people = people::server(asking, &certified)
            .map_err(|error| unusable(&files.certificate, &error))?;
        Ok(Self {
            validity,
            trust,
            calling,
            server: Arc::new(server),
            people: Arc::new(people),
            certified,
            clients: Mutex::default(),
        })
    }

    /// The configuration for accepted connections.
    pub(crate) fn server(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.server)
    }

    /// The configuration for connections to a peer; the same each time, so that they can
    /// resume.
    pub(crate) fn client(&self, peer: &str) -> Result<Arc<ClientConfig>, Error> {
        let mut clients = self.clients.lock();
        if let Some(client) = clients.get(peer) {
            return Ok(Arc::clone(client));
        }
        let client = Arc::new(client(&self.trust, &self.certified, peer)?);
        clients.insert(peer.to_owned(), Arc::clone(&client));
        Ok(client)
    }
}

/// Checks that the certificate can be used by this host.
fn check(
    name: &str,
    files: &Files,
    certified: &CertifiedKey,
    trust: &Trust,
) -> Result<Validity, IdentityError> {
    let found = check_key(files, certified)?;
    let file = files.certificate.clone();
    let (certificate, others) = certified.cert.split_first().ok_or_else(|| not_ours(files))?;
    if found != Subject::Host(name.to_owned()) {
        let (expected, found) = (name.to_owned(), found.to_string());
        return Err(IdentityError::OtherName { certificate: file, expected, found });
    }
    match trust.check_chain(certificate, others, UnixTime::now()) {
        Ok(()) => {}
        Err(Error::InvalidCertificate(error)) => match CertificateProblem::of(&error) {
            // Peers will refuse it; until it is replaced, the host's VMs can be looked after.
            CertificateProblem::Expired(_) | CertificateProblem::Early(_) => {}
            CertificateProblem::Stranger => {
                let authority = files.authority.clone();
                return Err(IdentityError::OtherAuthority { certificate: file, authority });
            }
            _ => return Err(IdentityError::Unusable { file, why: error.to_string() }),
        },
        Err(error) => return Err(IdentityError::Unusable { file, why: error.to_string() }),
    }
    certificate::validity(certificate).ok_or_else(|| not_ours(files))
}

fn server(
    trust: &Arc<Trust>,
    calling: &Arc<Calling>,
    certified: &Arc<CertifiedKey>,
) -> Result<ServerConfig, Error> {
    let mut config = ServerConfig::builder_with_provider(Arc::clone(&trust.provider))
        .with_protocol_versions(VERSIONS)?
        .with_client_cert_verifier(Arc::clone(calling) as Arc<dyn ClientCertVerifier>)
        .with_cert_resolver(Arc::new(SingleCertAndKey::from(Arc::clone(certified))));
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    // Tickets are sealed with a key of this process, which it changes every six
    // hours: no state is kept per peer.
    config.ticketer = aws_lc_rs::Ticketer::new()?;
    config.send_tls13_tickets = TICKETS_AGAIN.into();
    config.max_tls13_tickets = TICKETS_FIRST.into();
    config.enable_secret_extraction = true;
    Ok(config)
}

fn client(
    trust: &Arc<Trust>,
    certified: &Arc<CertifiedKey>,
    peer: &str,
) -> Result<ClientConfig, Error> {
    let called = Called { trust: Arc::clone(trust), name: peer.to_owned() };
    let mut config = ClientConfig::builder_with_provider(Arc::clone(&trust.provider))
        .with_protocol_versions(VERSIONS)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(called) as Arc<dyn ServerCertVerifier>)
        .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(Arc::clone(certified))));
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    config.resumption = Resumption::store(Arc::new(Tickets::default()));
    config.send_ticket_request =
        Some(TicketRequest { new_session_count: TICKETS_FIRST, resumption_count: TICKETS_AGAIN });
    // Names of hosts are not DNS names here.
    config.enable_sni = false;
    config.enable_secret_extraction = true;
    Ok(config)
}
