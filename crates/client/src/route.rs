//! The route to an agent: its socket on this host, or TCP with a certificate.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use identity::{Files, Person};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::Problem;

const HTTPS: &str = "https://";
/// How long a host may take to accept a connection: three seconds, if two packets get lost.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// How long the agent's host may be silent, whatever the agent works at.
const HOST_SILENT_MAX: Duration = Duration::from_secs(30);
/// How long an agent may take to show its certificate.
const HANDSHAKE_MAX: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 15 });

/// The route to an agent.
pub enum Route {
    /// Its socket on this host.
    Socket(PathBuf),
    /// An agent on another host.
    Https {
        /// The host's name, in the DNS and in its certificate.
        host: String,
        /// The port of its API.
        port: u16,
        /// The TLS configuration: the name to verify, and this side's certificate.
        security: Arc<ClientConfig>,
    },
}

/// A connection to an agent.
pub(crate) trait Bytes: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Bytes for T {}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(socket) => socket.display().fmt(f),
            Self::Https { host, port, .. } => write!(f, "{HTTPS}{host}:{port}"),
        }
    }
}

impl Route {
    /// The route as typed, or the default socket.
    ///
    /// # Errors
    /// If that is neither a socket's path nor an agent's address, or the certificate in `tls`, which
    /// the latter requires, can't be used.
    pub fn new(api: Option<PathBuf>, tls: Option<&Path>) -> Result<Self, Problem> {
        let socket = api.unwrap_or_else(|| PathBuf::from(agent::config::API_DEFAULT));
        match socket.to_str().and_then(|api| api.strip_prefix(HTTPS)) {
            Some(address) => Self::https(address, tls),
            None if is_other_address(&socket) => Err(Problem::Typed(format!(
                "--api {}: write https://HOST:PORT for an agent on another host, or the path of a \
                 socket, with a /",
                socket.display()
            ))),
            None => Ok(Self::Socket(socket)),
        }
    }

    /// Whether the agent is on another host, which requires a certificate.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        matches!(self, Self::Https { .. })
    }

    fn https(address: &str, tls: Option<&Path>) -> Result<Self, Problem> {
        let typed = |why: &str| Problem::Typed(format!("--api {HTTPS}{address}: {why}"));
        let (host, port) = address
            .trim_end_matches('/')
            .rsplit_once(':')
            .ok_or_else(|| typed("write https://HOST:PORT"))?;
        let port = port.parse().map_err(|_| typed("write https://HOST:PORT"))?;
        if host.starts_with('[') || host.parse::<IpAddr>().is_ok() {
            return Err(typed(
                "write the host's name, which is in its certificate (and put it into /etc/hosts \
                 if it isn't in the DNS)",
            ));
        }
        let dir = tls.ok_or_else(|| {
            typed(
                "name the directory of your certificate, from `droveway ca issue NAME --role \
                 ROLE`, with --tls (or DROVEWAY_TLS)",
            )
        })?;
        let person = Person::load(&Files::within(dir))?;
        let security = person.calls(host).map_err(|error| typed(&error.to_string()))?;
        Ok(Self::Https { host: host.to_owned(), port, security })
    }

    /// Opens a connection.
    pub(crate) async fn take(&self) -> Result<Box<dyn Bytes>, Problem> {
        match self {
            Self::Socket(socket) => match UnixStream::connect(socket).await {
                Ok(stream) => Ok(Box::new(stream)),
                Err(error) => Err(self.unreachable(&error)),
            },
            Self::Https { host, port, security } => {
                let stream =
                    connect(host, *port).await.map_err(|error| self.unreachable(&error))?;
                // `security` has the name to verify, which is not a DNS name.
                let nowhere = ServerName::IpAddress(IpAddr::from(Ipv4Addr::LOCALHOST).into());
                let secured = TlsConnector::from(Arc::clone(security)).connect(nowhere, stream);
                match timeout(HANDSHAKE_MAX, secured).await {
                    Ok(Ok(stream)) => Ok(Box::new(stream)),
                    Ok(Err(error)) => {
                        let why = identity::explain(&error);
                        Err(self.insecure(why.unwrap_or_else(|| error.to_string())))
                    }
                    Err(_) => Err(self.insecure(format!(
                        "it has not shown its certificate within {} s. If that is the agent's \
                         `api-listen`, see the agent's log",
                        HANDSHAKE_MAX.as_secs()
                    ))),
                }
            }
        }
    }

    fn unreachable(&self, error: &io::Error) -> Problem {
        let at = self.to_string();
        match (self, error.kind()) {
            (Self::Https { .. }, _) => Problem::Unreached { at, why: error.to_string() },
            (_, io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => Problem::NoAgent(at),
            (_, io::ErrorKind::PermissionDenied) => Problem::NotAllowed(at),
            _ => Problem::Lost { at, why: error.to_string() },
        }
    }

    fn insecure(&self, why: String) -> Problem {
        Problem::Insecure { at: self.to_string(), why }
    }
}

/// Whether it is meant as an address, and not as the path of a socket: `http://HOST:PORT`, or
/// `HOST:PORT`.
fn is_other_address(api: &Path) -> bool {
    let text = api.to_string_lossy();
    let port = text.rsplit_once(':').map_or("", |(_, port)| port);
    text.contains("://") || (!text.contains('/') && port.parse::<u16>().is_ok())
}

/// Connects to the first address of a host that answers. The connection ends if the host does: an
/// answer may take minutes.
async fn connect(host: &str, port: u16) -> io::Result<TcpStream> {
    let mut last = io::Error::other("its name has no address");
    for address in lookup_host((host, port)).await? {
        match timeout(CONNECT_MAX, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => {
                identity::notice_dead_peer(&stream, HOST_SILENT_MAX)?;
                return Ok(stream);
            }
            Ok(Err(error)) => last = error,
            Err(_) => last = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use identity::{Authority, CertificateRequest, Role, Subject};

    use super::*;

    #[tokio::test]
    async fn an_agent_that_says_nothing_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        Authority::create(dir.path(), 1).unwrap();
        let authority = Authority::open(dir.path()).unwrap();
        let subject = Subject::client(Role::Observe, "ann").unwrap();
        let out = authority.place_for(&subject);
        let request = CertificateRequest { subject, days: 1, out, replace: false };
        let files = authority.issue(&request).unwrap().files;
        let security = Person::load(&files).unwrap().calls("localhost").unwrap();
        // The kernel accepts the connection.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = silent.local_addr().unwrap().port();
        let route = Route::Https { host: "127.0.0.1".to_owned(), port, security };
        let problem = route.take().await.err().unwrap().to_string();
        assert!(problem.contains("has not shown its certificate"), "{problem}");
    }

    #[test]
    fn invalid_routes_are_refused_with_what_to_type() {
        let why = |api: &str, tls: Option<&str>| {
            let route = Route::new(Some(api.into()), tls.map(Path::new));
            route.err().map(|problem| problem.to_string()).unwrap_or_default()
        };
        assert!(why("https://host-a", None).contains("https://HOST:PORT"));
        assert!(why("https://host-a:x", None).contains("https://HOST:PORT"));
        assert!(why("https://10.0.0.1:7801", None).contains("the host's name"));
        assert!(why("https://[::1]:7801/", None).contains("the host's name"));
        assert!(why("https://host-a:7801", None).contains("--role"));
        assert!(why("https://host-a:7801", Some("/nowhere")).contains("/nowhere/ca.crt"));
        for other in ["http://host-a:7801", "HTTPS://host-a:7801", "host-a:7801", "[::1]:7801"] {
            assert!(why(other, None).contains("write https://HOST:PORT"), "{other}");
        }
        for socket in ["/run/api.sock", "api.sock", "./host-a:7801", "a:b"] {
            assert_eq!(why(socket, None), "");
        }
    }
}
