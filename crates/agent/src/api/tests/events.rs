//! Events over real connections, to the real server.

use std::net::SocketAddr;
use std::time::Duration;

use api::{Event, GapReason, Happening};
use identity::{Authority, CertificateRequest, Files, Person, Role, Subject};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

use super::*;

/// A client that reads events.
struct Follower<S = TcpStream> {
    status: u16,
    stream: BufReader<S>,
}

impl Follower {
    async fn connect(at: SocketAddr, last: Option<&str>) -> Self {
        Self::over(TcpStream::connect(at).await.unwrap(), last).await
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Follower<S> {
    /// Uses HTTP 1.0, whose responses are not chunked.
    async fn over(mut stream: S, last: Option<&str>) -> Self {
        let last = last.map(|last| format!("Last-Event-ID: {last}\r\n")).unwrap_or_default();
        let request = format!("GET /v1/events HTTP/1.0\r\nHost: x\r\n{last}\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        stream.read_line(&mut line).await.unwrap();
        let status = line.split(' ').nth(1).unwrap().parse().unwrap();
        while line != "\r\n" {
            line.clear();
            stream.read_line(&mut line).await.unwrap();
        }
        Self { status, stream }
    }

    /// The lines up to the next empty one; none at the end.
    async fn frame(&mut self) -> Option<String> {
        let mut frame = String::new();
        while self.stream.read_line(&mut frame).await.unwrap() > 0 {
            if frame.ends_with("\n\n") {
                return Some(frame);
            }
        }
        assert_eq!(frame, "", "half an event");
        None
    }

    /// The next event; none at the end.
    async fn next(&mut self) -> Option<Event> {
        loop {
            let frame = self.frame().await?;
            let field = |name: &str| frame.lines().find_map(|line| line.strip_prefix(name));
            if let Some(data) = field("data: ") {
                let event: Event = serde_json::from_str(data).unwrap();
                assert_eq!(field("id: "), Some(event.id.as_str()));
                let json: serde_json::Value = serde_json::from_str(data).unwrap();
                assert_eq!(field("event: "), json["event"].as_str());
                return Some(event);
            }
        }
    }

    /// The first id, after which every event reaches the reader.
    async fn first_id(&mut self) -> String {
        let frame = self.frame().await.unwrap();
        frame.trim().strip_prefix("id: ").unwrap().to_owned()
    }

    async fn happenings(&mut self, count: usize) -> Vec<Happening> {
        let mut happenings = Vec::new();
        for _ in 0..count {
            happenings.push(self.next().await.unwrap().what);
        }
        happenings
    }
}

impl Site {
    async fn serve(&self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(axum::serve(listener, self.router.clone()).into_future());
        address
    }

    fn publish(&self, numbers: std::ops::Range<u32>) {
        numbers.for_each(|number| self.api.events.publish(settled(number)));
    }
}

fn settled(number: u32) -> Happening {
    Happening::VmSettled { vm: format!("web{number}") }
}

#[tokio::test]
async fn events_come_in_their_order_and_from_now_on() {
    let site = Site::new();
    let at = site.serve().await;
    site.publish(0..3);
    let mut follower = Follower::connect(at, None).await;
    assert_eq!(follower.status, 200);
    follower.first_id().await;
    site.publish(3..40);
    assert_eq!(follower.happenings(37).await, (3..40).map(settled).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_reader_resumes_after_a_lost_connection() {
    let site = Site::new();
    let at = site.serve().await;
    let first = Follower::connect(at, None).await.first_id().await;
    site.publish(0..5);
    // Disconnected before the first, and then after the second.
    let mut follower = Follower::connect(at, Some(&first)).await;
    follower.happenings(1).await;
    let second = follower.next().await.unwrap().id;
    drop(follower);
    site.publish(5..6);
    let mut follower = Follower::connect(at, Some(&second)).await;
    assert_eq!(follower.happenings(4).await, (2..6).map(settled).collect::<Vec<_>>());
    site.publish(6..7);
    assert_eq!(follower.happenings(1).await, [settled(6)], "and then as they happen");
}

#[tokio::test]
async fn missing_events_are_reported_first() {
    let limits = Limits { ring_bytes: 2000, ..Limits::default() };
    let (earlier, site) = (Site::with(limits, None), Site::with(limits, None));
    let at = earlier.serve().await;
    let first = Follower::connect(at, None).await.first_id().await;
    let at = site.serve().await;
    let old = Follower::connect(at, None).await.first_id().await;
    site.publish(0..200);
    for (last, why) in [
        (first.as_str(), GapReason::Restarted),
        (old.as_str(), GapReason::TooOld),
        ("what is this", GapReason::Unknown),
    ] {
        let mut follower = Follower::connect(at, Some(last)).await;
        assert_eq!(follower.happenings(1).await, [Happening::Gap { why }], "{last}");
        let mut next = follower.next().await.unwrap().what;
        assert_ne!(next, settled(0), "the ring is too small for that");
        while next != settled(199) {
            next = follower.next().await.unwrap().what;
        }
    }
}

/// It is behind by more than the ring and the sockets hold, and events still reach others.
#[tokio::test]
async fn a_slow_reader_delays_no_other() {
    let limits = Limits { ring_bytes: 64 << 10, stuck: Duration::MAX, ..Limits::default() };
    let site = Site::with(limits, None);
    let at = site.serve().await;
    let mut slow = Follower::connect(at, None).await;
    slow.first_id().await;
    let mut quick = Follower::connect(at, None).await;
    quick.first_id().await;
    let large =
        |number: u32| Happening::VmSettled { vm: format!("{number}-{}", "w".repeat(10_000)) };
    for number in 0..2000 {
        site.api.events.publish(large(number));
        assert_eq!(quick.happenings(1).await, [large(number)]);
    }
    let mut gaps = 0;
    loop {
        match slow.next().await.unwrap().what {
            Happening::Gap { why } => {
                assert_eq!(why, GapReason::TooOld);
                gaps += 1;
            }
            what if what == large(1999) => break,
            _ => {}
        }
    }
    assert!(gaps > 0, "the agent kept 20 MB for it");
}

#[tokio::test]
async fn a_stalled_reader_is_dropped() {
    let stuck = Duration::from_millis(50);
    let limits = Limits { readers: 1, stuck, ..Limits::default() };
    let site = Site::with(limits, None);
    let at = site.serve().await;
    let mut dead = Follower::connect(at, None).await;
    dead.first_id().await;
    // Until another reader is admitted instead.
    loop {
        site.api.events.publish(Happening::VmSettled { vm: "w".repeat(100_000) });
        if Follower::connect(at, None).await.status == 200 {
            return;
        }
    }
}

#[tokio::test]
async fn readers_are_counted_and_a_place_is_free_when_one_goes() {
    // Nothing is sent that would reveal a lost connection.
    let limits = Limits { readers: 2, silent: Duration::MAX, ..Limits::default() };
    let site = Site::with(limits, None);
    let at = site.serve().await;
    let mut one = Follower::connect(at, None).await;
    one.first_id().await;
    let mut other = Follower::connect(at, None).await;
    other.first_id().await;
    let mut third = Follower::connect(at, None).await;
    assert_eq!(third.status, 503);
    let mut body = String::new();
    third.stream.read_to_string(&mut body).await.unwrap();
    let error: api::ErrorBody = serde_json::from_str(&body).unwrap();
    assert_eq!(error.code, Some(ErrorCode::TooManyReaders), "{body}");
    drop(one);
    while Follower::connect(at, None).await.status != 200 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_connection_is_never_silent_for_long() {
    let limits = Limits { silent: Duration::from_millis(1), ..Limits::default() };
    let site = Site::with(limits, None);
    let mut follower = Follower::connect(site.serve().await, None).await;
    follower.first_id().await;
    assert_eq!(follower.frame().await.as_deref(), Some(":\n\n"), "a comment, which has no event");
}

#[tokio::test]
async fn a_reader_gets_all_events_until_the_agent_ends() {
    let site = Site::new();
    let at = site.serve().await;
    let mut follower = Follower::connect(at, None).await;
    follower.first_id().await;
    site.publish(0..100);
    site.api.events.close();
    assert_eq!(follower.happenings(100).await, (0..100).map(settled).collect::<Vec<_>>());
    assert!(follower.next().await.is_none());
}

/// A CA, with the certificate of the host `here` and those of people.
pub(super) struct Ca {
    dir: tempfile::TempDir,
}

impl Ca {
    pub(super) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        Authority::create(dir.path(), 1).unwrap();
        Self { dir }
    }

    pub(super) fn issue(&self, subject: Subject) -> Files {
        let authority = Authority::open(self.dir.path()).unwrap();
        let out = authority.place_for(&subject);
        authority
            .issue(&CertificateRequest { subject, days: 1, out, replace: false })
            .unwrap()
            .files
    }

    fn person(&self, role: Role) -> Person {
        let name = role.to_string();
        Person::load(&self.issue(Subject::client(role, &name).unwrap())).unwrap()
    }
}

#[tokio::test]
async fn every_role_may_read_events() {
    let ca = Ca::new();
    let files = ca.issue(Subject::host("here").unwrap());
    let identity = Arc::new(Identity::load("here", &files).unwrap());
    let site = Site::with(Limits::default(), Some(Arc::clone(&identity)));
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let (_close, closed) = tokio::sync::watch::channel(false);
    tokio::spawn(Port { listener, identity }.serve(site.api.clone(), closed));
    for role in [Role::Observe, Role::Migrate, Role::Admin] {
        let connector = TlsConnector::from(ca.person(role).calls("here").unwrap());
        let nowhere = ServerName::IpAddress(at.ip().into());
        let stream = TcpStream::connect(at).await.unwrap();
        let stream = connector.connect(nowhere, stream).await.unwrap();
        let mut follower = Follower::over(stream, None).await;
        assert_eq!(follower.status, 200, "{role}");
        follower.first_id().await;
        site.publish(0..1);
        assert_eq!(follower.happenings(1).await, [settled(0)]);
    }
    // Without a certificate there is no connection at all.
    let mut stream = TcpStream::connect(at).await.unwrap();
    stream.write_all(b"GET /v1/events HTTP/1.0\r\n\r\n").await.unwrap();
    let mut response = Vec::new();
    // The connection may also be reset.
    let _ = stream.read_to_end(&mut response).await;
    assert!(!response.starts_with(b"HTTP"), "{}", String::from_utf8_lossy(&response));
}
