//! The API over TCP, for people with certificates: their admission, and the requests that
//! each role permits.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use api::{ErrorCode, MigrateRequest};
use axum::Router;
use axum::extract::{ConnectInfo, Request, connect_info::Connected};
use axum::http::Method;
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::serve::{IncomingStream, Listener};
use identity::{AdmissionBounds, Admissions, HANDSHAKE_MAX, Identity, LEAVING_MAX, Role, Subject};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::{Api, answer, router};
use crate::denied::Denied;

/// Connections at a time that are not authenticated yet, from this host and from addresses that
/// have authenticated before.
///
/// A script may make that many requests at once.
const UNKNOWN_OF_PEOPLE: AdmissionBounds = AdmissionBounds { all: 96, per_source: 64 };
/// The same from all other addresses.
///
/// With connections that are closing, these are at most 192 descriptors, which the agents' port
/// relies on.
const UNKNOWN_OF_STRANGERS: AdmissionBounds = AdmissionBounds { all: 64, per_source: 32 };
const _: () = assert!(UNKNOWN_OF_PEOPLE.all + UNKNOWN_OF_STRANGERS.all + 2 * LEAVING_MAX <= 192);
/// How long a rejected client may keep sending before it reads the reason.
const LINGER_MAX: Duration = Duration::from_secs(1);
/// How much it may send until then.
const LINGER_BYTES_MAX: u64 = 64 << 10;
/// The pause after a failed accept, often for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The person or program that makes a request.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    name: String,
    role: Role,
}

#[cfg(test)]
impl Caller {
    pub(super) fn example() -> Self {
        Self { name: "ann".to_owned(), role: Role::Observe }
    }
}

/// The TCP port, bound.
pub(crate) struct Port {
    pub(crate) listener: std::net::TcpListener,
    pub(crate) identity: Arc<Identity>,
}

impl Port {
    /// Serves the API at the port until it is closed.
    pub(crate) async fn serve(self, api: Api, mut closed: watch::Receiver<bool>) -> io::Result<()> {
        self.listener.set_nonblocking(true)?;
        let listener = TcpListener::from_std(self.listener)?;
        let (let_in, known) = mpsc::channel(1);
        let welcoming = tokio::spawn(welcome(listener, self.identity, let_in));
        let app = limited(router(api)).into_make_service_with_connect_info::<Caller>();
        let served = axum::serve(Door { known }, app)
            .with_graceful_shutdown(async move {
                // An error means that the sender was dropped, which is an end as well.
                let _ = closed.wait_for(|closing| *closing).await;
            })
            .await;
        welcoming.abort();
        served
    }
}

/// The source of authenticated connections for the server.
struct Door {
    known: mpsc::Receiver<(TlsStream<TcpStream>, Caller)>,
}

impl Listener for Door {
    type Io = TlsStream<TcpStream>;
    type Addr = Caller;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        match self.known.recv().await {
            Some(known) => known,
            // No more connections will come.
            None => std::future::pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl Connected<IncomingStream<'_, Door>> for Caller {
    fn connect_info(stream: IncomingStream<'_, Door>) -> Self {
        stream.remote_addr().clone()
    }
}

/// Accepts connections and authenticates them, several at a time.
async fn welcome(
    listener: TcpListener,
    identity: Arc<Identity>,
    let_in: mpsc::Sender<(TlsStream<TcpStream>, Caller)>,
) {
    let local = [IpAddr::from(Ipv4Addr::LOCALHOST)];
    let unknown = Admissions::new(local, UNKNOWN_OF_PEOPLE, UNKNOWN_OF_STRANGERS);
    loop {
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot take a connection to the API");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let from = counted_as(&stream, address);
        let (stay, gives_way) = oneshot::channel::<()>();
        // The connection that has to make room is dropped with its handle.
        let Some((admission, _)) = unknown.admit(from, stay) else {
            tracing::warn!(from = %address, "too many connections to the API; turned away");
            continue;
        };
        let acceptor = TlsAcceptor::from(identity.for_people());
        let (let_in, unknown) = (let_in.clone(), Arc::clone(&unknown));
        tokio::spawn(async move {
            let known = tokio::select! {
                known = identify(stream, address, &acceptor) => known,
                _ = gives_way => {
                    let why = "said nothing, and made room for other connections to the API";
                    tracing::warn!(from = %address, "{why}");
                    None
                }
            };
            drop(admission);
            if let Some(known) = known {
                unknown.remember(from);
                // An error means that the API is closed.
                let _ = let_in.send(known).await;
            }
        });
    }
}

/// The address of the peer, or loopback if the peer is this host at any of its addresses.
fn counted_as(stream: &TcpStream, from: SocketAddr) -> IpAddr {
    match stream.local_addr() {
        Ok(here) if here.ip() == from.ip() => Ipv4Addr::LOCALHOST.into(),
        _ => from.ip(),
    }
}

async fn identify(
    stream: TcpStream,
    address: SocketAddr,
    acceptor: &TlsAcceptor,
) -> Option<(TlsStream<TcpStream>, Caller)> {
    // Only an optimization, so an error does not matter.
    let _ = stream.set_nodelay(true);
    let why = match timeout(HANDSHAKE_MAX, acceptor.accept(stream).into_fallible()).await {
        Ok(Ok(stream)) => {
            match identity::shown(stream.get_ref().1.peer_certificates()) {
                Some(Subject::Client { role, name }) => {
                    return Some((stream, Caller { name, role }));
                }
                // Never happens: the certificate is already verified.
                _ => "its certificate names no person".to_owned(),
            }
        }
        Ok(Err((error, stream))) => {
            let why = identity::explain(&error).unwrap_or_else(|| error.to_string());
            // The client is rejected, whatever the result.
            let _ = timeout(LINGER_MAX, linger(stream)).await;
            why
        }
        Err(_) => format!("it took more than {} s to identify itself", HANDSHAKE_MAX.as_secs()),
    };
    tracing::warn!(from = %address, why, "turned away from the API");
    None
}

/// Gives the client time to read the last message: closing a socket with unread input
/// discards output that the client hasn't read yet.
async fn linger(mut stream: TcpStream) -> io::Result<()> {
    stream.shutdown().await?;
    tokio::io::copy(&mut stream.take(LINGER_BYTES_MAX), &mut tokio::io::sink()).await.map(drop)
}

/// Restricts each route to callers whose role suffices.
fn limited(router: Router) -> Router {
    router.layer(from_fn(permit))
}

async fn permit(
    ConnectInfo(caller): ConnectInfo<Caller>,
    mut request: Request,
    next: Next,
) -> Response {
    let needed = needed(request.method(), request.uri().path());
    if caller.role < needed {
        let Caller { name, role } = &caller;
        let text =
            format!("this takes the role {needed}, and the certificate of {name} says {role}");
        tracing::warn!(who = name, %role, path = request.uri().path(), "not allowed");
        return answer::error(ErrorCode::Forbidden, &text);
    }
    if needed > Role::Observe {
        let (method, path) = (request.method(), request.uri().path());
        tracing::info!(who = caller.name, role = %caller.role, %method, path, "asked over TCP");
    }
    request.extensions_mut().insert(caller);
    next.run(request).await
}

/// The role that a request needs: to look, to move, or anything else.
pub(super) fn needed(method: &Method, path: &str) -> Role {
    let predicts = path.strip_prefix("/v1/vms/").is_some_and(|rest| rest.ends_with("/predict"));
    let of = |what: &str| {
        path.strip_prefix(what).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let moves = of("/v1/migrations") || of("/v1/gangs") || predicts;
    match *method {
        Method::GET | Method::HEAD => Role::Observe,
        _ if moves => Role::Migrate,
        _ => Role::Admin,
    }
}

/// Refuses options of a migration that do more than move a VM, unless the caller is an
/// admin: the command line at the destination decides which program is started there.
pub(super) fn may_migrate(caller: Option<&Caller>, request: &MigrateRequest) -> Result<(), Denied> {
    let more = [
        ("--set", !request.set.is_empty()),
        ("--incoming-qmp", request.incoming_qmp.is_some()),
        ("--overwrite-disks", request.overwrite_disks),
    ];
    match (caller, more.iter().find(|(_, asked)| *asked)) {
        (Some(Caller { name, role }), Some((flag, _))) if *role < Role::Admin => {
            Err(Denied::Forbidden(format!(
                "{flag} takes the role admin, and the certificate of {name} says {role}"
            )))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_for_each_route() {
        for (method, path, role) in [
            (Method::GET, "/v1/vms", Role::Observe),
            (Method::GET, "/v1/events", Role::Observe),
            (Method::GET, "/v1/migrations/1/report", Role::Observe),
            (Method::POST, "/v1/migrations", Role::Migrate),
            (Method::PATCH, "/v1/migrations/1", Role::Migrate),
            (Method::POST, "/v1/migrations/1/cancel", Role::Migrate),
            (Method::POST, "/v1/vms/web1/predict", Role::Migrate),
            (Method::GET, "/v1/gangs/g1/report", Role::Observe),
            (Method::POST, "/v1/gangs", Role::Migrate),
            (Method::POST, "/v1/gangs/g1/resume", Role::Migrate),
            (Method::POST, "/v1/gangsx", Role::Admin),
            (Method::POST, "/v1/vms/predict", Role::Admin),
            (Method::POST, "/v1/vms", Role::Admin),
            (Method::POST, "/v1/vms/attach", Role::Admin),
            (Method::DELETE, "/v1/vms/web1", Role::Admin),
            (Method::POST, "/v1/migrationsx", Role::Admin),
            (Method::POST, "/v1/whatever/comes", Role::Admin),
        ] {
            assert_eq!(needed(&method, path), role, "{method} {path}");
        }
    }

    #[test]
    fn what_is_more_than_a_move_takes_an_admin() {
        let caller = |role| Caller { name: "ann".to_owned(), role };
        let request = |more: &str| -> MigrateRequest {
            serde_json::from_str(&format!(r#"{{"vm":"v","to":"b"{more}}}"#)).unwrap()
        };
        let set = request(r#","set":["/usr/bin/qemu=/tmp/mine"]"#);
        let may = |caller: Option<&Caller>, request: &_| may_migrate(caller, request).is_ok();
        let (mover, admin) = (caller(Role::Migrate), caller(Role::Admin));
        assert!(may(Some(&mover), &request("")));
        assert!(!may(Some(&mover), &set));
        assert!(!may(Some(&mover), &request(r#","incoming_qmp":"/s""#)));
        assert!(may(Some(&admin), &set) && may(None, &set));
    }
}
