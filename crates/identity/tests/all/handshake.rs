//! Which peers may connect to each other, and what refused ones receive.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use identity::{
    CertificateProblem, Connection, HandshakeError, Identity, Role, Security, Subject, is_tls_alert,
};

use crate::common::{self, Cluster, call, listen, mixed, sockets};

fn tls(identity: &Arc<Identity>) -> Security {
    Security::Tls(Arc::clone(identity))
}

/// The error of the calling end's first read.
fn first_read(connection: &mut Connection) -> String {
    connection.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    connection.read(&mut [0; 16]).unwrap_err().to_string()
}

#[test]
fn two_hosts_of_one_ca_know_each_other_by_name() {
    let cluster = Cluster::new();
    let (a, b) = (cluster.host("Host_A..x"), cluster.host("host-b"));
    let (ours, theirs) = call(&tls(&a), &tls(&b), "host-b");
    let (mut ours, mut theirs) = (ours.unwrap(), theirs.unwrap());
    assert_eq!((ours.peer(), theirs.peer()), (Some("host-b"), Some("Host_A..x")));
    hears(&mut ours, &mut theirs);
    hears(&mut theirs, &mut ours);
}

/// Checks that what `other` writes arrives at `one`.
fn hears(one: &mut Connection, other: &mut Connection) {
    other.write_all(b"ping").unwrap();
    let mut received = [0; 4];
    one.read_exact(&mut received).unwrap();
    assert_eq!(&received, b"ping");
}

/// Existing connections continue with the certificate that they started with.
#[test]
fn renewing_a_certificate_disturbs_no_connection() {
    let cluster = Cluster::new();
    let (a, b) = (cluster.host("a"), cluster.host("b"));
    let (ours, theirs) = call(&tls(&a), &tls(&b), "b");
    let (mut ours, mut theirs) = (ours.unwrap(), theirs.unwrap());
    let before = b.validity();
    let longer = cluster.issue(Subject::host("b").unwrap(), 20);
    b.reload(&longer).unwrap();
    assert!(b.validity().not_after_s > before.not_after_s);
    hears(&mut ours, &mut theirs);
    // The caller's tickets no longer work, and it needs none.
    for _ in 0..2 {
        let (ours, theirs) = call(&tls(&a), &tls(&b), "b");
        let (mut ours, mut theirs) = (ours.unwrap(), theirs.unwrap());
        hears(&mut ours, &mut theirs);
        assert_eq!((ours.peer(), theirs.peer()), (Some("b"), Some("a")));
    }
    // A certificate that can't be used changes nothing.
    let used = b.validity();
    b.reload(&cluster.files("c")).unwrap_err();
    assert_eq!(b.validity(), used);
    let (ours, theirs) = call(&tls(&b), &tls(&a), "a");
    hears(&mut ours.unwrap(), &mut theirs.unwrap());
}

#[test]
fn lanes_resume_and_still_know_their_peer() {
    let cluster = Cluster::new();
    let (a, b, c) = (cluster.host("a"), cluster.host("b"), cluster.host("c"));
    let mut resumed = 0;
    for round in 0..3 {
        // A migration: control first, then 8 lanes at once.
        let (ours, theirs) = call(&tls(&a), &tls(&b), "b");
        let (mut control, mut received) = (ours.unwrap(), theirs.unwrap());
        assert_eq!(control.is_resumed(), round > 0);
        received.write_all(b"w").unwrap();
        control.read_exact(&mut [0]).unwrap();
        let lanes: Vec<_> = thread::scope(|scope| {
            let lanes: Vec<_> =
                (0..8).map(|_| scope.spawn(|| call(&tls(&a), &tls(&b), "b"))).collect();
            lanes.into_iter().map(|lane| lane.join().unwrap()).collect()
        });
        for (ours, theirs) in lanes {
            let (mut ours, mut theirs) = (ours.unwrap(), theirs.unwrap());
            assert_eq!((ours.peer(), theirs.peer()), (Some("b"), Some("a")));
            assert_eq!(ours.is_resumed(), theirs.is_resumed());
            resumed += u32::from(ours.is_resumed());
            theirs.write_all(b"w").unwrap();
            ours.read_exact(&mut [0]).unwrap();
        }
    }
    assert_eq!(resumed, 24);
    // Tickets from b are no use at c.
    let (ours, theirs) = call(&tls(&a), &tls(&c), "c");
    assert!(!ours.unwrap().is_resumed() && !theirs.unwrap().is_resumed());
    // Nor at b after a restart, which can't open them.
    let (ours, theirs) = call(&tls(&a), &tls(&cluster.host("b")), "b");
    let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
    assert!(!ours.is_resumed() && !theirs.is_resumed());
    assert_eq!((ours.peer(), theirs.peer()), (Some("b"), Some("a")));
}

#[test]
fn another_cas_hosts_are_strangers_on_both_sides() {
    let (ours, theirs) = (Cluster::new(), Cluster::new());
    let (a, b) = (ours.host("a"), theirs.host("b"));
    let (calls, called) = call(&tls(&a), &tls(&b), "b");
    assert!(matches!(calls, Err(HandshakeError::Certificate(CertificateProblem::Stranger))));
    let received = called.unwrap_err().to_string();
    assert!(received.contains("doesn't know the CA of this host's certificate"), "{received}");

    // A host that trusts the other CA, with a certificate of its own, has no usable
    // identity.
    let trusting = mixed(&theirs.files("b"), &ours.files("a"));
    assert!(Identity::load("a", &trusting).unwrap_err().to_string().contains("not issued by"));
}

#[test]
fn a_host_that_is_not_the_one_called_is_found_out() {
    let cluster = Cluster::new();
    let (a, b) = (cluster.host("a"), cluster.host("b"));
    let (calls, called) = call(&tls(&a), &tls(&b), "c");
    let Err(HandshakeError::Certificate(problem)) = calls else { panic!("{calls:?}") };
    let found = Subject::host("b").unwrap();
    assert_eq!(problem, CertificateProblem::OtherName { expected: "c".to_owned(), found });
    let received = called.unwrap_err().to_string();
    assert!(received.contains("peers file there"), "{received}");
}

#[test]
fn a_connection_without_a_certificate_or_with_a_persons_is_refused() {
    let cluster = Cluster::new();
    let b = cluster.host("b");
    let files = cluster.client_files(Role::Admin, "a");
    let said = Identity::load("a", &files).unwrap_err().to_string();
    assert!(said.contains("a certificate of a (admin), and this host is a"), "{said}");

    // `Identity` refuses such files, so another TLS client tries them.
    for certificate in [Some(&files), None] {
        let (mut calling, called) = sockets();
        let (received, refused) = thread::scope(|scope| {
            let accepted = scope.spawn(|| tls(&b).accept(called));
            let received = common::speak_tls(&mut calling, &cluster.files("b"), certificate);
            (received, accepted.join().unwrap().unwrap_err())
        });
        let (alert, problem) = match certificate {
            Some(_) => ("AccessDenied", CertificateProblem::NotAHost),
            None => ("CertificateRequired", CertificateProblem::None),
        };
        assert!(received.contains(alert), "{received}");
        let HandshakeError::Certificate(found) = refused else { panic!("{refused}") };
        assert_eq!(found, problem);
    }
}

#[test]
fn a_refused_caller_learns_why_at_its_first_read() {
    let (ours, theirs) = (Cluster::new(), Cluster::new());
    // a knows both CAs; b knows its own.
    let (a, b) = (ours.files("a"), theirs.files("b"));
    let both = [&a, &b].map(|files| std::fs::read_to_string(&files.authority).unwrap()).concat();
    std::fs::write(&a.authority, both).unwrap();
    let a = Arc::new(Identity::load("a", &a).unwrap());
    let b = Arc::new(Identity::load("b", &b).unwrap());
    let (calls, called) = call(&tls(&a), &tls(&b), "b");
    assert!(matches!(called, Err(HandshakeError::Certificate(CertificateProblem::Stranger))));
    let said = first_read(&mut calls.unwrap());
    assert!(said.contains("doesn't know the CA of this host's certificate"), "{said}");
}

#[test]
fn both_ends_learn_of_an_expired_certificate() {
    let cluster = Cluster::new();
    let a = Arc::new(Identity::load("a", &cluster.expired("a")).unwrap());
    let now = std::time::SystemTime::now();
    assert!(a.warning(now).unwrap().contains("certificate of host a has expired on 2"));
    let b = cluster.host("b");
    let warning = b.warning(now).unwrap();
    assert!(warning.contains("certificate of host b expires on"), "{warning}");

    let (calls, called) = call(&tls(&a), &tls(&b), "b");
    let refused = called.unwrap_err();
    assert!(
        matches!(refused, HandshakeError::Certificate(CertificateProblem::Expired(_))),
        "{refused}"
    );
    let said = first_read(&mut calls.unwrap());
    assert!(said.contains("this host's certificate has expired"), "{said}");

    let (calls, called) = call(&tls(&b), &tls(&a), "a");
    let refused = calls.unwrap_err().to_string();
    assert!(refused.contains("the peer's certificate has expired on 2"), "{refused}");
    assert!(called.unwrap_err().to_string().contains("has expired"));
}

#[test]
fn plaintext_and_tls_agents_recognize_each_other() {
    let cluster = Cluster::new();
    let a = cluster.host("a");
    let (calls, called) = call(&Security::Tls(a), &Security::Plaintext, "b");
    assert!(matches!(called, Err(HandshakeError::PeerIsSecure)));
    let received = calls.unwrap_err().to_string();
    assert!(received.contains("the peer uses plaintext (--insecure-plaintext)"), "{received}");

    let b = cluster.host("b");
    let (mut calling, called) = sockets();
    let answer = thread::scope(|scope| {
        let accepted = scope.spawn(|| tls(&b).accept(called));
        calling.write_all(b"DROVEWAY\x02\0\0\0\0\0\0\0rest of a preamble").unwrap();
        let mut answer = [0; 16];
        calling.read_exact(&mut answer).unwrap();
        let refused = accepted.join().unwrap().unwrap_err();
        assert!(matches!(refused, HandshakeError::PeerIsPlain), "{refused}");
        answer
    });
    assert!(is_tls_alert(&answer));
    assert!(!is_tls_alert(b"DROVEWAY") && !is_tls_alert(&[]));
}

#[test]
fn a_peer_that_closes_at_the_first_message_is_recognized() {
    let cluster = Cluster::new();
    let a = cluster.host("a");
    let (calling, called) = sockets();
    drop(called);
    let refused = tls(&a).connect(calling, "b").unwrap_err();
    assert!(matches!(refused, HandshakeError::Unanswered), "{refused}");
}

#[test]
fn slow_peers_are_given_up_and_delay_nobody() {
    let cluster = Cluster::new();
    let (a, b) = (cluster.host("a"), cluster.host("b"));
    let (listener, address) = listen();
    let silent = TcpStream::connect(address).unwrap();
    let mut trickling = TcpStream::connect(address).unwrap();
    thread::scope(|scope| {
        let taken: Vec<_> = (0..2)
            .map(|_| {
                let (stream, b) = (listener.accept().unwrap().0, tls(&b));
                scope.spawn(move || b.accept(stream))
            })
            .collect();
        // Half a record, byte by byte: no byte extends the limit.
        scope.spawn(move || {
            for byte in [22, 3, 1, 2, 0].into_iter().chain([1; 400]) {
                if trickling.write_all(&[byte]).is_err() {
                    break;
                }
                thread::sleep(Duration::from_millis(50));
            }
        });
        for _ in 0..3 {
            let (ours, theirs) = call(&tls(&a), &tls(&b), "b");
            assert!(ours.is_ok() && theirs.is_ok());
        }
        for thread in taken {
            let refused = thread.join().unwrap().unwrap_err();
            assert!(matches!(refused, HandshakeError::TooSlow), "{refused}");
        }
    });
    drop(silent);
}

#[test]
fn the_first_message_is_bounded() {
    let cluster = Cluster::new();
    let b = cluster.host("b");
    // Records of a handshake message that never ends, and one too long record.
    let endless = [[22, 3, 1, 0x40, 0].as_slice(), &[1, 0, 0xff, 0xff], &[0; 16380]].concat();
    for (hello, says) in [
        (endless.repeat(8), "invalid TLS"),
        ([22, 3, 1, 0xff, 0xff].repeat(100), "a record is too long"),
        (vec![22; 40_000], "invalid TLS"),
    ] {
        let (mut calling, called) = sockets();
        let refused = thread::scope(|scope| {
            let accepted = scope.spawn(|| tls(&b).accept(called));
            // It may be cut off in the middle.
            let _ = calling.write_all(&hello);
            let _ = calling.shutdown(std::net::Shutdown::Write);
            accepted.join().unwrap().unwrap_err()
        });
        assert!(refused.to_string().contains(says), "{refused}");
    }
}
