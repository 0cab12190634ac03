//! Which hosts may connect to each other, and the errors at both ends if they may
//! not.

use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use identity::{Authority, CertificateRequest, Files, Identity, Security, Subject};
use transport::{Endpoint, connect};
use wire::Kind;

/// Issues a certificate for `host` from the CA in `dir`, which is created if
/// needed.
fn issue(dir: &Path, host: &str) -> Files {
    let ca = dir.join("ca");
    if !ca.exists() {
        Authority::create(&ca, 1).unwrap();
    }
    let request = CertificateRequest {
        subject: Subject::host(host).unwrap(),
        days: 1,
        out: dir.join(host),
        replace: false,
    };
    Authority::open(&ca).unwrap().issue(&request).unwrap().files
}

fn load(host: &str, files: &Files) -> Security {
    Security::Tls(Arc::new(Identity::load(host, files).unwrap()))
}

/// `from` connects to `to`, expecting the host `peer`. Returns the error at each
/// end.
fn refused(from: &Security, to: Security, peer: &str) -> [String; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = Endpoint { local: None, remote: listener.local_addr().unwrap() };
    let called = thread::spawn(move || to.accept(listener.accept().unwrap().0));
    let calls = connect(endpoint, peer, from, Kind::Control).unwrap_err();
    [calls.to_string(), called.join().unwrap().unwrap_err().to_string()]
}

#[test]
fn the_called_agent_is_another_host() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|host| load(host, &issue(dir.path(), host)));
    let [calls, called] = refused(&a, b, "c");
    assert!(calls.contains("the peer there is host b, not host c"), "{calls}");
    assert!(called.contains("peers file there"), "{called}");
}

#[test]
fn one_end_speaks_plaintext() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|host| load(host, &issue(dir.path(), host)));
    let [calls, called] = refused(&a, Security::Plaintext, "b");
    assert!(calls.contains("the peer uses plaintext (--insecure-plaintext)"), "{calls}");
    assert!(called.contains("remove it here"), "{called}");
    let [calls, called] = refused(&Security::Plaintext, b, "b");
    assert!(calls.contains("remove it here"), "{calls}");
    assert!(called.contains("remove --insecure-plaintext there"), "{called}");
}

/// The client is ready before the server has verified it, so its first read brings
/// the reason.
#[test]
fn a_refused_caller_receives_the_reason() {
    let [here, there] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let (a, b) = (issue(here.path(), "a"), issue(there.path(), "b"));
    // Host a knows both CAs and accepts host b, which knows only its own.
    let both = here.path().join("both.crt");
    let text = [&a, &b].map(|files| std::fs::read_to_string(&files.authority).unwrap()).concat();
    std::fs::write(&both, text).unwrap();
    let a = load("a", &Files { authority: both, ..a });
    let [calls, called] = refused(&a, load("b", &b), "b");
    assert!(calls.contains("doesn't know the CA of this host's certificate"), "{calls}");
    assert!(called.contains("not from a CA that this host knows"), "{called}");
}
