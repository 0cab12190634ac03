//! Two hosts with certificates of one CA, and sockets between them.

#![allow(dead_code, reason = "each test uses what it needs")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use identity::{
    Authority, CertificateRequest, Connection, Files, HandshakeError, Identity, Role, Security,
    Subject,
};

/// A CA in a directory of its own.
pub(crate) struct Cluster {
    dir: tempfile::TempDir,
}

impl Cluster {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Authority::create(&dir.path().join("ca"), 100).unwrap();
        Self { dir }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("ca")
    }

    pub(crate) fn issue(&self, subject: Subject, days: u32) -> Files {
        let authority = Authority::open(&self.path()).unwrap();
        let out = authority.place_for(&subject);
        authority.issue(&CertificateRequest { subject, days, out, replace: true }).unwrap().files
    }

    pub(crate) fn files(&self, host: &str) -> Files {
        self.issue(Subject::host(host).unwrap(), 10)
    }

    pub(crate) fn host(&self, name: &str) -> Arc<Identity> {
        Arc::new(Identity::load(name, &self.files(name)).unwrap())
    }

    /// An expired certificate of a host. [`Authority`] makes none, so it is signed here
    /// with the CA's key.
    pub(crate) fn expired(&self, host: &str) -> Files {
        let files = self.files(host);
        let key = std::fs::read_to_string(self.path().join("ca.key")).unwrap();
        let authority = std::fs::read_to_string(&files.authority).unwrap();
        let key = rcgen::KeyPair::from_pem(&key).unwrap();
        let issuer = rcgen::Issuer::from_ca_cert_pem(&authority, key).unwrap();
        let mut params = rcgen::CertificateParams::default();
        let uri = Subject::host(host).unwrap().to_uri();
        params.subject_alt_names = vec![rcgen::SanType::URI(uri.try_into().unwrap())];
        params.not_before = rcgen::date_time_ymd(2020, 1, 1);
        params.not_after = rcgen::date_time_ymd(2021, 1, 1);
        params.extended_key_usages = vec![
            rcgen::ExtendedKeyUsagePurpose::ServerAuth,
            rcgen::ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &issuer).unwrap();
        std::fs::write(&files.key, key.serialize_pem()).unwrap();
        std::fs::write(&files.certificate, certificate.pem()).unwrap();
        files
    }

    /// The files of a person.
    pub(crate) fn client_files(&self, role: Role, name: &str) -> Files {
        self.issue(Subject::client(role, name).unwrap(), 10)
    }
}

/// The CA of `authority`, and everything else of `rest`.
pub(crate) fn mixed(authority: &Files, rest: &Files) -> Files {
    Files {
        authority: authority.authority.clone(),
        certificate: rest.certificate.clone(),
        key: rest.key.clone(),
        content_key: rest.content_key.clone(),
    }
}

pub(crate) fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Both ends of a TCP connection.
pub(crate) fn sockets() -> (TcpStream, TcpStream) {
    let (listener, address) = listen();
    let ours = TcpStream::connect(address).unwrap();
    (ours, listener.accept().unwrap().0)
}

pub(crate) type Ends = (Result<Connection, HandshakeError>, Result<Connection, HandshakeError>);

/// Connects `from` to `to`, which should be the host `name`.
pub(crate) fn call(from: &Security, to: &Security, name: &str) -> Ends {
    let (calling, called) = sockets();
    thread::scope(|scope| {
        let accepted = scope.spawn(|| to.accept(called));
        let connected = from.connect(calling, name);
        (connected, accepted.join().unwrap())
    })
}

/// A connection from host a to host b.
pub(crate) fn secured(cluster: &Cluster) -> (Connection, Connection) {
    let (a, b) = (cluster.host("a"), cluster.host("b"));
    let (ours, theirs) = call(&Security::Tls(a), &Security::Tls(b), "b");
    let (mut ours, mut theirs) = (ours.unwrap(), theirs.unwrap());
    welcome(&mut ours, &mut theirs);
    (ours, theirs)
}

/// Has the called end send the first message, as agents do. Tickets precede it; dropping a
/// connection with unread tickets would reset it.
pub(crate) fn welcome(ours: &mut Connection, theirs: &mut Connection) {
    theirs.write_all(b"welcome").unwrap();
    ours.read_exact(&mut [0; 7]).unwrap();
}

/// Both ends of a connection without protection.
pub(crate) fn plain() -> (Connection, Connection) {
    let (ours, theirs) = sockets();
    (Connection::plain(ours), Connection::plain(theirs))
}

pub(crate) fn mode(file: &Path) -> u32 {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(file).unwrap().permissions().mode() & 0o777
}

/// Pseudo-random numbers, reproducible from a seed.
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(2).wrapping_add(1))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end as u64).unwrap()
    }
}

/// Connects with TLS as another program would, with any certificate or none. Returns the
/// outcome of its first read.
pub(crate) fn speak_tls(stream: &mut TcpStream, trusted: &Files, shown: Option<&Files>) -> String {
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};

    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&trusted.authority).unwrap()).unwrap();
    let config = rustls::ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Anybody(provider)));
    let mut config = match shown {
        None => config.with_no_client_auth(),
        Some(files) => {
            let chain = vec![CertificateDer::from_pem_file(&files.certificate).unwrap()];
            let key = PrivateKeyDer::from_pem_file(&files.key).unwrap();
            config.with_client_auth_cert(chain, key).unwrap()
        }
    };
    config.alpn_protocols = vec![b"droveway-agent".to_vec()];
    let name = "b.example".try_into().unwrap();
    let mut client = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    let mut tls = rustls::Stream::new(&mut client, stream);
    match tls.read(&mut [0; 16]) {
        Ok(bytes) => format!("{bytes} bytes"),
        Err(error) => error.to_string(),
    }
}

/// Accepts any certificate.
#[derive(Debug)]
struct Anybody(Arc<rustls::crypto::CryptoProvider>);

impl rustls::client::danger::ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &[rustls::pki_types::CertificateDer<'_>],
        _: &rustls::pki_types::ServerName<'_>,
        _: &[u8],
        _: rustls::pki_types::UnixTime,
    ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &rustls::pki_types::CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
