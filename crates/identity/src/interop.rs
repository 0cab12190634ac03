//! This crate's records against rustls's own, in both roles: tickets, new keys, ends.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;

use rustls::pki_types::ServerName;
use rustls::{ClientConnection, ServerConnection};

use crate::{Authority, CertificateRequest, Connection, Identity, Subject};

const BYTES: usize = 3 << 20;

fn host(dir: &Path, name: &str) -> Identity {
    let ca = dir.join("ca");
    if !ca.exists() {
        Authority::create(&ca, 10).unwrap();
    }
    let subject = Subject::host(name).unwrap();
    let request = CertificateRequest { subject, days: 1, out: dir.join(name), replace: false };
    let files = Authority::open(&ca).unwrap().issue(&request).unwrap().files;
    Identity::load(name, &files).unwrap()
}

fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (ours, listener.accept().unwrap().0)
}

fn content(seed: u8) -> Vec<u8> {
    (0..BYTES).map(|at| (at / 7).to_le_bytes()[0] ^ seed).collect()
}

/// Exchanges content with rustls in turns, with new keys in between.
fn converse(
    mut ours: Connection,
    mut theirs: impl Read + Write + Send,
    renew: impl Fn() + Send + Sync,
) {
    ours.change_key_after(50);
    let [there, back] = [content(1), content(2)];
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut came = vec![0; BYTES];
            for _ in 0..3 {
                theirs.read_exact(&mut came).unwrap();
                assert!(came == there);
                renew();
                theirs.write_all(&back).unwrap();
            }
            assert_eq!(theirs.read(&mut came).unwrap(), 0);
        });
        let mut came = vec![0; BYTES];
        for _ in 0..3 {
            ours.write_all(&there).unwrap();
            ours.read_exact(&mut came).unwrap();
            assert!(came == back);
        }
        ours.close();
    });
}

#[test]
fn rustls_answers() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (host(dir.path(), "a"), host(dir.path(), "b"));
    for is_resumed in [false, true] {
        let (calling, called) = sockets();
        let server = ServerConnection::new(b.shown().server()).unwrap();
        let theirs = Mirror::new(rustls::StreamOwned::new(server, called));
        let answering = theirs.clone();
        let ours = thread::scope(|scope| {
            scope.spawn(|| answering.shake());
            a.connect(calling, "b").unwrap()
        });
        assert_eq!((ours.peer(), ours.is_resumed()), (Some("b"), is_resumed));
        converse(ours, theirs.clone(), || theirs.renew());
    }
}

#[test]
fn rustls_calls() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (host(dir.path(), "a"), host(dir.path(), "b"));
    for is_resumed in [false, true] {
        let (calling, called) = sockets();
        let name = ServerName::try_from("127.0.0.1").unwrap();
        let client = ClientConnection::new(a.shown().client("b").unwrap(), name).unwrap();
        let theirs = Mirror::new(rustls::StreamOwned::new(client, calling));
        let calling = theirs.clone();
        let ours = thread::scope(|scope| {
            scope.spawn(|| calling.shake());
            b.accept(called).unwrap()
        });
        assert_eq!((ours.peer(), ours.is_resumed()), (Some("a"), is_resumed));
        converse(ours, theirs.clone(), || theirs.renew());
    }
}

/// A connection of rustls that several threads of a test use.
struct Mirror<C>(Arc<parking_lot::Mutex<rustls::StreamOwned<C, TcpStream>>>);

impl<C> Clone for Mirror<C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<C, D> Mirror<C>
where
    C: std::ops::DerefMut<Target = rustls::ConnectionCommon<D>>,
    D: rustls::SideData,
{
    fn new(stream: rustls::StreamOwned<C, TcpStream>) -> Self {
        Self(Arc::new(parking_lot::Mutex::new(stream)))
    }

    fn shake(&self) {
        let stream = &mut *self.0.lock();
        while stream.conn.is_handshaking() {
            stream.conn.complete_io(&mut stream.sock).unwrap();
        }
    }

    fn renew(&self) {
        self.0.lock().conn.refresh_traffic_keys().unwrap();
    }
}

impl<C, D> Read for Mirror<C>
where
    C: std::ops::DerefMut<Target = rustls::ConnectionCommon<D>>,
    D: rustls::SideData,
{
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        self.0.lock().read(into)
    }
}

impl<C, D> Write for Mirror<C>
where
    C: std::ops::DerefMut<Target = rustls::ConnectionCommon<D>>,
    D: rustls::SideData,
{
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.lock().flush()
    }
}

#[test]
fn a_key_that_the_peer_wants_replaced_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (host(dir.path(), "a"), host(dir.path(), "b"));
    let (calling, called) = sockets();
    let (mut ours, mut theirs) = thread::scope(|scope| {
        let accepted = scope.spawn(|| b.accept(called).unwrap());
        (a.connect(calling, "b").unwrap(), accepted.join().unwrap())
    });
    ours.change_key_after(3);
    theirs.change_key_after(5);
    let mut came = [0; 9];
    for round in 0..100_u8 {
        ours.write_all(&[round; 9]).unwrap();
        theirs.read_exact(&mut came).unwrap();
        assert_eq!(came, [round; 9]);
        theirs.write_all(&came).unwrap();
        ours.read_exact(&mut came).unwrap();
        if round % 10 == 0 {
            theirs.ask_new_key();
        }
    }
}
