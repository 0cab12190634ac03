//! A directory at the other end of a connection, and what callers get when the connection breaks.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, unbounded};
use directory::protocol::HEADER_BYTES;
use directory::{Answer, Directory, DirectoryError, Halves, HostName, Remote, serve};

use crate::cases;
use crate::embedded::InMemory;
use crate::world::{World, claim, host, names, soon};

/// A client's end, and the peer's.
fn pair() -> io::Result<(Halves, UnixStream)> {
    let (ours, theirs) = UnixStream::pair()?;
    let (writer, closer) = (ours.try_clone()?, ours.try_clone()?);
    let shutdown = move || drop(closer.shutdown(Shutdown::Both));
    Ok((Halves::new(ours, writer, shutdown), theirs))
}

/// A client, and the peer's ends of its connections.
fn remote() -> (Remote, Receiver<UnixStream>) {
    let (made, ends) = unbounded();
    let connect = move |_until| {
        let (halves, end) = pair()?;
        made.send(end).map_err(io::Error::other)?;
        Ok(halves)
    };
    (Remote::new("the other end", connect).unwrap(), ends)
}

/// The in-memory directory, queried over connections.
struct OverSockets {
    remote: Option<Remote>,
    memory: InMemory,
    server: Option<JoinHandle<()>>,
}

impl OverSockets {
    fn new(may_speak_for: fn(&HostName) -> bool) -> Self {
        let memory = InMemory::new(1 << 20);
        let (remote, ends) = remote();
        let directory = Arc::clone(&memory.directory);
        let server = thread::spawn(move || {
            for end in ends {
                let reader = end.try_clone().unwrap();
                // A connection that is cut ends with an error.
                let _ = serve(reader, end, &*directory, &may_speak_for);
            }
        });
        Self { remote: Some(remote), memory, server: Some(server) }
    }
}

impl World for OverSockets {
    fn directory(&self) -> &dyn Directory {
        self.remote.as_ref().unwrap()
    }

    fn pass(&self, time: Duration) {
        self.memory.pass(time);
    }
}

impl Drop for OverSockets {
    fn drop(&mut self) {
        self.remote = None;
        self.server.take().unwrap().join().unwrap();
    }
}

#[test]
fn it_does_what_all_do() {
    cases::check(&OverSockets::new(|_| true));
}

#[test]
fn a_client_speaks_only_for_its_hosts() {
    let world = OverSockets::new(|host| host.as_str().starts_with("a"));
    let all = names("permit", 0..10);
    let [ours, theirs] = ["a-1", "b-1"].map(host);
    assert!(claim(world.directory(), &ours, &all).iter().all(|said| *said == Answer::Yours));
    let directory = world.directory();
    let refusals = [
        directory.claim(&theirs, &all, &mut Vec::new(), soon()),
        directory.hold(&theirs, &all, soon()),
        directory.release(&theirs, &all, soon()),
        directory.forget(&theirs, soon()),
    ];
    for refusal in refusals {
        let Err(DirectoryError::Refused { why, .. }) = refusal else { panic!("{refusal:?}") };
        assert!(why.contains("b-1"), "{why}");
    }
    // The connection continues.
    assert!(claim(directory, &ours, &all).iter().all(|said| *said == Answer::Yours));
}

/// A peer that accepts, reads and never answers: each caller waits until its deadline, and no
/// longer.
#[test]
fn a_caller_without_a_reply_waits_until_its_deadline() {
    let (remote, _ends) = remote();
    let waits = [0, 1, 50].map(Duration::from_millis);
    for wait in waits {
        let said =
            remote.claim(&host("a"), &names("x", 0..9), &mut Vec::new(), Instant::now() + wait);
        assert!(matches!(said, Err(DirectoryError::Late { .. })), "{said:?}");
    }
}

/// The peer does not read: a request that can't be sent ends at its deadline as well.
#[test]
fn a_request_that_can_not_be_sent_waits_until_its_deadline() {
    let (remote, _ends) = remote();
    let until = Instant::now() + Duration::from_millis(300);
    let said = remote.claim(&host("a"), &names("x", 0..200_000), &mut Vec::new(), until);
    assert!(matches!(said, Err(DirectoryError::Late { .. })), "{said:?}");
}

#[test]
fn a_connection_that_breaks_is_an_error_for_all_at_once_and_then_made_anew() {
    const ASKING: usize = 5;
    let (remote, ends) = remote();
    thread::scope(|scope| {
        let waiting: Vec<_> = (0..ASKING)
            .map(|number| {
                let remote = &remote;
                scope.spawn(move || {
                    let all = names("break", 0..100);
                    remote.claim(&host(&format!("h{number}")), &all, &mut Vec::new(), soon())
                })
            })
            .collect();
        let mut end = ends.recv().unwrap();
        // All requests have arrived.
        let mut requests = vec![0; ASKING * (HEADER_BYTES + 2 + 100 * 20)];
        end.read_exact(&mut requests).unwrap();
        drop(end);
        for one in waiting {
            let said = one.join().unwrap();
            assert!(matches!(said, Err(DirectoryError::Unreachable { .. })), "{said:?}");
        }
    });
    // Now there is a server. The first requests may be refused until a second has passed.
    let memory = InMemory::new(1024);
    let directory = Arc::clone(&memory.directory);
    let server = thread::spawn(move || {
        let end = ends.recv().unwrap();
        let _ = serve(end.try_clone().unwrap(), end, &*directory, &|_| true);
    });
    let all = names("break", 0..100);
    let mut answers = Vec::new();
    let until = soon();
    while let Err(error) = remote.claim(&host("z"), &all, &mut answers, until) {
        assert!(matches!(error, DirectoryError::Unreachable { .. }), "{error}");
        assert!(Instant::now() < until, "{error}");
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(answers, vec![Answer::Yours; 100]);
    drop(remote);
    server.join().unwrap();
}

#[test]
fn it_connects_at_most_once_a_second() {
    let tried = Arc::new(AtomicUsize::new(0));
    let its = Arc::clone(&tried);
    let connect = move |_until| {
        its.fetch_add(1, SeqCst);
        Err(io::Error::other("nobody there"))
    };
    let remote = Remote::new("nowhere", connect).unwrap();
    let begun = Instant::now();
    for _ in 0..1000 {
        let said = remote.hold(&host("a"), &names("x", 0..1), soon());
        let Err(DirectoryError::Unreachable { at, why }) = said else { panic!("{said:?}") };
        assert!(at == "nowhere" && why == "nobody there", "{at}: {why}");
    }
    let seconds = usize::try_from(begun.elapsed().as_secs()).unwrap();
    assert!(tried.load(SeqCst) <= 1 + seconds);
}

/// A host that is down answers no attempt to connect. Only the first one is waited for.
#[test]
fn no_claim_waits_for_another_attempt_after_one_that_failed() {
    let (tried, attempts) = unbounded();
    let (answer, answers) = unbounded::<io::Result<Halves>>();
    let connect = move |_until| {
        tried.send(()).map_err(io::Error::other)?;
        answers.recv().map_err(io::Error::other)?
    };
    let remote = Remote::new("the other end", connect).unwrap();
    let all = names("down", 0..10);
    let ask = || {
        let mut answers = Vec::new();
        remote.claim(&host("a"), &all, &mut answers, soon()).map(|()| answers)
    };
    let is_unreachable = |said| matches!(said, Err(DirectoryError::Unreachable { .. }));
    answer.send(Err(io::Error::other("no answer"))).unwrap();
    assert!(is_unreachable(ask()));
    attempts.recv().unwrap();
    while attempts.try_recv().is_err() {
        assert!(is_unreachable(ask()));
        thread::sleep(Duration::from_millis(20));
    }
    assert!(is_unreachable(ask()), "the second attempt is open");
    let (halves, end) = pair().unwrap();
    answer.send(Ok(halves)).unwrap();
    let memory = InMemory::new(1024);
    let directory = Arc::clone(&memory.directory);
    let server = thread::spawn(move || {
        let _ = serve(end.try_clone().unwrap(), end, &*directory, &|_| true);
    });
    let answers = loop {
        match ask() {
            Ok(answers) => break answers,
            said => assert!(is_unreachable(said)),
        }
    };
    assert_eq!(answers, vec![Answer::Yours; 10]);
    // Its thread waits for an answer to another attempt if this connection broke.
    drop(answer);
    drop(remote);
    server.join().unwrap();
}

/// An invalid reply ends the connection, and is an error for the caller.
#[test]
fn an_invalid_reply_is_an_error() {
    let mut short = vec![0xd2, 0xd7, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
    short.extend([0, 0]);
    for nonsense in [b"HTTP/1.1 400 Bad Request\r\n\r\n".as_slice(), &short] {
        let (remote, ends) = remote();
        thread::scope(|scope| {
            let asking = scope
                .spawn(|| remote.claim(&host("a"), &names("x", 0..2), &mut Vec::new(), soon()));
            let mut end = ends.recv().unwrap();
            let mut request = vec![0; HEADER_BYTES + 1 + 40];
            end.read_exact(&mut request).unwrap();
            end.write_all(nonsense).unwrap();
            let said = asking.join().unwrap();
            assert!(said.is_err(), "{said:?}");
            assert_eq!(end.read(&mut [0]).unwrap(), 0);
        });
    }
}

/// Late replies don't disturb callers that still wait.
#[test]
fn late_replies_are_dropped() {
    let world = OverSockets::new(|_| true);
    let all = names("late", 0..1000);
    let mut late = 0;
    for round in 0..200_u64 {
        let until = Instant::now() + Duration::from_micros(round * 5);
        let said = world.directory().claim(&host("a"), &all, &mut Vec::new(), until);
        late += usize::from(said.is_err());
    }
    assert!(late > 0);
    assert_eq!(claim(world.directory(), &host("b"), &all), vec![Answer::Coming(host("a")); 1000]);
}
