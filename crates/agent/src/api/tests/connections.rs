//! Connections of people, over real ones to the real server.

use std::net::SocketAddr;

use identity::{Person, Role, Subject};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;

use super::events::Ca;
use super::*;

/// Makes a connection, and a request on it. Returns both, with the beginning of the response.
async fn ask(at: SocketAddr, by: &Arc<ClientConfig>) -> (TlsStream<TcpStream>, String) {
    let nowhere = ServerName::IpAddress(at.ip().into());
    let stream = TcpStream::connect(at).await.unwrap();
    let mut stream = TlsConnector::from(Arc::clone(by)).connect(nowhere, stream).await.unwrap();
    stream.write_all(b"GET /v1/migrations HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    let mut bytes = [0; 1024];
    let count = stream.read(&mut bytes).await.unwrap();
    (stream, String::from_utf8_lossy(&bytes[..count]).into_owned())
}

#[tokio::test]
async fn one_person_does_not_have_all_connections() {
    let ca = Ca::new();
    let files = ca.issue(Subject::host("here").unwrap());
    let identity = Arc::new(Identity::load("here", &files).unwrap());
    let site = Site::with(Limits::default(), Some(Arc::clone(&identity)));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let (_close, closed) = tokio::sync::watch::channel(false);
    tokio::spawn(Port { listener, identity }.serve(site.api.clone(), closed));
    let person = |name| {
        let files = ca.issue(Subject::client(Role::Observe, name).unwrap());
        Person::load(&files).unwrap().calls("here").unwrap()
    };
    let (ann, bob) = (person("ann"), person("bob"));
    let mut open = Vec::new();
    for _ in 0..crate::api::people::KNOWN_OF_ONE_MAX {
        let (stream, said) = ask(at, &ann).await;
        assert!(said.starts_with("HTTP/1.1 200"), "{said}");
        open.push(stream);
    }
    let (_, said) = ask(at, &ann).await;
    assert!(said.starts_with("HTTP/1.1 503"), "{said}");
    assert!(said.contains("too-many-connections"), "{said}");
    let (_, said) = ask(at, &bob).await;
    assert!(said.starts_with("HTTP/1.1 200"), "{said}");
    // A connection that has ended leaves its place.
    drop(open.pop());
    while !ask(at, &ann).await.1.starts_with("HTTP/1.1 200") {}
}
