//! The API over TCP, for people with certificates: their admission, and that each makes only the
//! requests that its role permits.

mod held;

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use api::{ErrorBody, ErrorCode};
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{ConnectInfo, Request, connect_info::Connected};
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::serve::{IncomingStream, Listener};
use identity::{AdmissionBounds, Admissions, HANDSHAKE_MAX, Identity, LEAVING_MAX, Role, Subject};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::caller::{Caller, needed};
use super::parts::Api;
use super::request::BODY_BYTES_MAX;
use super::{answer, router};
use crate::shares::Shares;
use held::{Held, Requests};

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
/// Connections of people that have shown their certificates, and those of one of them: a script
/// that moves VMs keeps one for each.
const KNOWN_MAX: usize = 192;
pub(super) const KNOWN_OF_ONE_MAX: usize = 96;
/// How long a client may take nothing, or its host be silent. A watcher that was suspended, and
/// given up, still reads the end of its answer until then.
const TAKES_NOTHING_MAX: Duration = Duration::from_secs(600);
/// How long the body of a request may take.
const BODY_MAX: Duration = Duration::from_secs(30);
/// How long a rejected client may keep sending before it reads the reason.
const LINGER_MAX: Duration = Duration::from_secs(1);
/// How much it may send until then.
const LINGER_BYTES_MAX: u64 = 64 << 10;
/// The pause after a failed accept, often for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The caller on a connection, and its requests.
#[derive(Clone, Debug)]
struct Connection {
    caller: Caller,
    requests: Arc<Requests>,
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
        let app = limited(router(api)).into_make_service_with_connect_info::<Connection>();
        let served = axum::serve(AuthenticatedListener { known }, app)
            .with_graceful_shutdown(async move {
                // An error means that the sender was dropped, which is an end as well.
                let _ = closed.wait_for(|closing| *closing).await;
            })
            .await;
        welcoming.abort();
        served
    }
}

type Known = (Held<TlsStream<TcpStream>>, Caller);

/// The source of authenticated connections for the server.
struct AuthenticatedListener {
    known: mpsc::Receiver<Known>,
}

impl Listener for AuthenticatedListener {
    type Io = Held<TlsStream<TcpStream>>;
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

impl Connected<IncomingStream<'_, AuthenticatedListener>> for Connection {
    fn connect_info(stream: IncomingStream<'_, AuthenticatedListener>) -> Self {
        let requests = Arc::clone(&stream.io().requests);
        Self { caller: stream.remote_addr().clone(), requests }
    }
}

/// Accepts connections and authenticates them, several at a time.
async fn welcome(listener: TcpListener, identity: Arc<Identity>, let_in: mpsc::Sender<Known>) {
    let local = [IpAddr::from(Ipv4Addr::LOCALHOST)];
    let unknown = Admissions::new(local, UNKNOWN_OF_PEOPLE, UNKNOWN_OF_STRANGERS);
    let places = Shares::new(KNOWN_MAX, KNOWN_OF_ONE_MAX);
    loop {
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection to the API");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let from = counted_as(&stream, address);
        let (stay, mut gives_way) = oneshot::channel::<()>();
        // The connection that has to make room is dropped with its handle.
        let Some((admission, _)) = unknown.admit(from, stay) else {
            tracing::warn!(from = %address, "too many connections to the API; rejected");
            continue;
        };
        let acceptor = TlsAcceptor::from(identity.for_people());
        let (let_in, unknown, places) = (let_in.clone(), Arc::clone(&unknown), Arc::clone(&places));
        tokio::spawn(async move {
            let known = tokio::select! {
                known = identify(stream, address, &acceptor) => known,
                _ = &mut gives_way => {
                    let why =
                        "sent nothing, and was closed to make room for other connections to the \
                         API";
                    tracing::warn!(from = %address, "{why}");
                    None
                }
            };
            let Some((stream, caller)) = known else { return };
            unknown.remember(from);
            let Some(place) = places.take(&caller.name) else {
                let who = caller.name;
                tracing::warn!(who, from = %address, "has too many connections to the API");
                // It still has the place of one that is not known, and gives way like those.
                tokio::select! {
                    _ = timeout(2 * LINGER_MAX, refuse(stream)) => {}
                    _ = gives_way => {}
                }
                return;
            };
            drop(admission);
            // An error means that the API is closed.
            let _ = let_in.send((Held::new(stream, place), caller)).await;
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
    // An error means that the connection is lost already.
    let _ = identity::notice_dead_peer(&stream, TAKES_NOTHING_MAX);
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
    tracing::warn!(from = %address, why, "rejected by the API");
    None
}

/// Gives the client time to read the last message: closing a socket with unread input
/// discards output that the client hasn't read yet.
async fn linger(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> io::Result<()> {
    stream.shutdown().await?;
    tokio::io::copy(&mut stream.take(LINGER_BYTES_MAX), &mut tokio::io::sink()).await.map(drop)
}

/// Answers the first request of a connection that is one too many.
async fn refuse(mut stream: TlsStream<TcpStream>) -> io::Result<()> {
    let error = "this agent serves no more connections, or no more of this certificate: end some \
                 of them, or try again later. What was started continues";
    let body = ErrorBody { error: error.to_owned(), code: Some(ErrorCode::TooManyConnections) };
    let body = serde_json::to_string(&body)?;
    let response = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n\
         content-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    // HTTP has no answer before the request.
    if stream.read(&mut [0; 1024]).await? > 0 {
        stream.write_all(response.as_bytes()).await?;
    }
    linger(stream).await
}

/// Restricts each route to callers whose role suffices.
fn limited(router: Router) -> Router {
    router.layer(from_fn(permit))
}

async fn permit(
    ConnectInfo(Connection { caller, requests }): ConnectInfo<Connection>,
    request: Request,
    next: Next,
) -> Response {
    let answering = requests.begin();
    let needed = needed(request.method(), request.uri().path());
    if caller.role < needed {
        let Caller { name, role } = &caller;
        let text =
            format!("this needs the role {needed}, and the certificate of {name} has {role}");
        tracing::warn!(
            who = name,
            %role,
            path = request.uri().path(),
            "refused: the role does not permit it"
        );
        return answer::error(ErrorCode::Forbidden, &text);
    }
    if needed > Role::Observe {
        let (method, path) = (request.method(), request.uri().path());
        tracing::info!(who = caller.name, role = %caller.role, %method, path, "request over TCP");
    }
    let mut request = match timeout(BODY_MAX, whole(request)).await {
        Ok(Ok(request)) => request,
        Ok(Err(error)) => return answer::error(ErrorCode::InvalidRequest, &error.to_string()),
        Err(_) => {
            let text = format!("the request took more than {} s to arrive", BODY_MAX.as_secs());
            return answer::error(ErrorCode::InvalidRequest, &text);
        }
    };
    request.extensions_mut().insert(caller);
    answering.until_sent(next.run(request).await)
}

/// A request with all of its body.
async fn whole(request: Request) -> Result<Request, axum::Error> {
    let (head, body) = request.into_parts();
    Ok(Request::from_parts(head, Body::from(to_bytes(body, BODY_BYTES_MAX).await?)))
}
