//! Who this host is, and how it speaks to others.

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
use crate::people;
use crate::refusal::CertificateProblem;
use crate::subject::Subject;
use crate::tickets::Tickets;
use crate::verify::{Called, Calling, Trust, Who};

/// What is spoken inside: a host's certificate for agents is no use at another
/// port of his.
pub(crate) const PROTOCOL: &[u8] = b"droveway-agent";
/// Tickets for a peer that calls for the first time: the lanes of a migration,
/// up to 8 without being asked, and again after all have died once.
const TICKETS_FIRST: u8 = 16;
/// For one that used a ticket: another in its place.
const TICKETS_AGAIN: u8 = 1;
/// A new certificate is due that long before the end.
const NOTICE: Duration = Duration::from_secs(30 * 24 * 3600);

/// A host's certificate and key, the CA that it trusts, and what it knows of
/// connections that were. One for each agent, shared by all its connections.
pub struct Identity {
    name: String,
    /// Replaced whole by [`Identity::reload`]; connections keep what they began with.
    shown: RwLock<Arc<Shown>>,
}

/// What is shown to others, and asked of them.
pub(crate) struct Shown {
    validity: Validity,
    pub(crate) trust: Arc<Trust>,
    pub(crate) calling: Arc<Calling>,
    server: Arc<ServerConfig>,
    people: Arc<ServerConfig>,
    certified: Arc<CertifiedKey>,
    /// By peer. Whom an agent calls stands in its peers file.
    clients: Mutex<HashMap<String, Arc<ClientConfig>>>,
}

impl std::fmt::Debug for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Identity").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Identity {
    /// Reads what `droveway ca issue` made for the host of that name. A
    /// certificate that has expired is taken; see [`Identity::warning`].
    ///
    /// # Errors
    /// If the files are not there, or not this host's.
    pub fn load(name: &str, files: &Files) -> Result<Self, IdentityError> {
        let shown = RwLock::new(Arc::new(Shown::read(name, files)?));
        Ok(Self { name: name.to_owned(), shown })
    }

    /// Reads the files again, for all connections that begin from now on.
    ///
    /// # Errors
    /// As [`Identity::load`]: then it stays as it was.
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

    /// When its certificate holds.
    #[must_use]
    pub fn validity(&self) -> Validity {
        self.shown().validity
    }

    /// What to tell the operator, if the certificate ends soon or has ended.
    #[must_use]
    pub fn warning(&self, now: SystemTime) -> Option<String> {
        self.validity().warning(&format!("host {}", self.name), NOTICE, now)
    }

    /// For connections that come to the API's port: shows this host's certificate,
    /// and takes people's.
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

    /// For connections that come.
    pub(crate) fn server(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.server)
    }

    /// For connections to a peer; the same each time, so that they can resume.
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

/// What the certificate must be to be of use.
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
            // The peers will say so; until then VMs can be seen to.
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
    // Sealed for ourselves with a key that this process makes, and changes every
    // six hours: nothing is kept for a peer.
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
    // Our names are none of the DNS.
    config.enable_sni = false;
    config.enable_secret_extraction = true;
    Ok(config)
}
