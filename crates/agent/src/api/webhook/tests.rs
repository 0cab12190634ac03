use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread::{self, JoinHandle};

use api::{Event, Happening};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::*;
use crate::config::webhook::Secret;
use crate::events::{Events, Limits};

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

/// One request to a receiver.
struct Sent {
    id: String,
    at: String,
    signature: String,
    body: String,
}

fn receive(stream: &mut TcpStream, status: &str) -> Sent {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if line.trim().is_empty() {
            break;
        }
        headers.push(line.trim().to_owned());
    }
    assert!(headers[0].starts_with("POST /hook "), "{headers:?}");
    let header = |name: &str| {
        let of = |line: &String| line.to_lowercase().starts_with(&format!("{name}: "));
        headers.iter().find(|line| of(line)).map(|line| line[name.len() + 2..].to_owned()).unwrap()
    };
    let mut body = vec![0; header("content-length").parse().unwrap()];
    reader.read_exact(&mut body).unwrap();
    let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
    stream.write_all(answer.as_bytes()).unwrap();
    Sent {
        id: header("webhook-id"),
        at: header("webhook-timestamp"),
        signature: header("webhook-signature"),
        body: String::from_utf8(body).unwrap(),
    }
}

/// A receiver that gives these answers in turn.
fn receiver(answers: &'static [&'static str]) -> (String, JoinHandle<Vec<Sent>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/hook", listener.local_addr().unwrap());
    let received = thread::spawn(move || {
        let answer = |status: &&str| receive(&mut listener.accept().unwrap().0, status);
        answers.iter().map(answer).collect()
    });
    (url, received)
}

fn webhook(url: String) -> Webhook {
    let secret = Secret::parse(SECRET).unwrap();
    Webhook { url, secret, authorities: Arc::default(), events: None }
}

fn settled(vm: &str) -> Happening {
    Happening::VmSettled { vm: vm.to_owned() }
}

/// The example of Standard Webhooks.
#[test]
fn signatures_are_those_that_libraries_verify() {
    let secret = Secret::parse(SECRET).unwrap();
    assert_eq!(
        secret.sign("msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, r#"{"test": 2432232314}"#),
        "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    );
}

#[test]
fn what_is_for_this_host_goes_by_no_proxy() {
    let usual = || Some(Proxy::new("http://proxy.example.org:3128").unwrap());
    for url in ["http://127.0.0.1:9/hook", "http://localhost/", "https://[::1]:9/hook"] {
        assert!(proxy(&webhook(url.to_owned()), usual()).is_none(), "{url}");
    }
    let elsewhere = webhook("https://hooks.example.org/hook".to_owned());
    assert!(proxy(&elsewhere, usual()).is_some());
    assert!(proxy(&elsewhere, None).is_none());
}

#[test]
fn failures_that_may_be_fixed_are_retried() {
    let outcome = |code| outcome_of(StatusCode::from_u16(code).unwrap());
    assert_eq!((outcome(200), outcome(204)), (Attempt::Accepted, Attempt::Accepted));
    for code in [301, 401, 403, 404, 408, 429, 500, 503] {
        assert!(matches!(outcome(code), Attempt::Failed(_)), "{code}");
    }
    for code in [400, 410, 413, 422] {
        assert!(matches!(outcome(code), Attempt::Refused(_)), "{code}");
    }
}

/// Each event is retried until it is accepted; after a refused one the next follows.
#[tokio::test(flavor = "multi_thread")]
async fn events_are_delivered_in_order() {
    let (url, received) = receiver(&["500 Sorry", "204 Taken", "422 Never", "200 OK"]);
    let events = Events::new(Limits::default()).unwrap();
    let following = tokio::spawn(follow(webhook(url), events.read(None).unwrap()));
    // The reader gets only events that are published after it exists.
    while events.has_no_reader() {
        sleep(Duration::from_millis(5)).await;
    }
    for vm in ["web1", "web2", "web3"] {
        events.publish(settled(vm));
    }
    let sent = tokio::task::spawn_blocking(|| received.join().unwrap()).await.unwrap();
    following.abort();
    let whats: Vec<Happening> =
        sent.iter().map(|one| serde_json::from_str::<Event>(&one.body).unwrap().what).collect();
    assert_eq!(whats, ["web1", "web1", "web2", "web3"].map(settled));
    assert_eq!(sent[0].id, sent[1].id, "it is the same event");
    let secret = Secret::parse(SECRET).unwrap();
    for Sent { id, at, signature, body } in &sent {
        assert_eq!(*signature, secret.sign(id, at.parse().unwrap(), body));
        assert_eq!(serde_json::from_str::<Event>(body).unwrap().id, *id);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_what_is_wanted_is_sent() {
    let (url, received) = receiver(&["200 OK", "200 OK"]);
    let events = Events::new(Limits::default()).unwrap();
    let wanted = Some([String::from("vm-settled")].into());
    let following = tokio::spawn(follow(
        Webhook { events: wanted, ..webhook(url) },
        events.read(None).unwrap(),
    ));
    while events.has_no_reader() {
        sleep(Duration::from_millis(5)).await;
    }
    events.publish(settled("web1"));
    events.publish(Happening::VmInDoubt { vm: "web2".to_owned(), problem: "why".to_owned() });
    events.publish(settled("web3"));
    let sent = tokio::task::spawn_blocking(|| received.join().unwrap()).await.unwrap();
    following.abort();
    let what = |one: &Sent| serde_json::from_str::<Event>(&one.body).unwrap().what;
    assert_eq!(sent.iter().map(what).collect::<Vec<_>>(), ["web1", "web3"].map(settled));
}

/// A receiver with a self-signed certificate for 127.0.0.1, and the number of events that it
/// got from `callers` connections.
fn secure_receiver(callers: usize) -> (String, CertificateDer<'static>, JoinHandle<usize>) {
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let certificate = made.cert.der().clone();
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.clone()], key)
        .unwrap();
    let config = Arc::new(config);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("https://{}/hook", listener.local_addr().unwrap());
    let received = thread::spawn(move || {
        let one = || {
            let (stream, _) = listener.accept().unwrap();
            let connection = rustls::ServerConnection::new(Arc::clone(&config)).unwrap();
            let mut stream = rustls::StreamOwned::new(connection, stream);
            let mut begin = [0; 5];
            let Ok(()) = stream.read_exact(&mut begin) else { return false };
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
            begin == *b"POST "
        };
        (0..callers).filter(|_| one()).count()
    });
    (url, certificate, received)
}

#[test]
fn a_receivers_certificate_has_to_match() {
    let (url, certificate, received) = secure_receiver(3);
    let (_, stranger, _) = secure_receiver(0);
    let post = |url: &str, authorities| {
        let authorities = Arc::new(authorities);
        Sender::new(Webhook { authorities, ..webhook(url.to_owned()) }).post("id", "{}")
    };
    assert_eq!(post(&url, vec![certificate.clone()]), Attempt::Accepted);
    let refused = post(&url, vec![stranger]);
    assert!(matches!(refused, Attempt::Failed(_)), "{refused:?}");
    let by_another_name = url.replace("127.0.0.1", "localhost");
    let refused = post(&by_another_name, vec![certificate]);
    assert!(matches!(refused, Attempt::Failed(_)), "{refused:?}");
    assert_eq!(received.join().unwrap(), 1);
}
