//! This crate's server with a disk in memory.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread::{self, JoinHandle};

use nbd::Errno;
use nbd::server::{Connection, Export, Replier, Request, RequestKind, Requests, negotiate};

/// The disk's content before anything is written: not zero, so that missing zeroes
/// are noticed.
pub(crate) const BEFORE: u8 = 0xee;

/// A disk, and the requests that it has served.
#[derive(Default)]
pub(crate) struct Disk {
    pub(crate) bytes: Vec<u8>,
    pub(crate) seen: Vec<Request>,
    pub(crate) goodbye: bool,
}

impl Disk {
    /// How many requests of a kind it has served, and for how many bytes.
    pub(crate) fn count(&self, kind: RequestKind) -> (usize, u64) {
        let of_kind = self.seen.iter().filter(|request| request.kind == kind);
        of_kind
            .fold((0, 0), |(count, bytes), request| (count + 1, bytes + u64::from(request.bytes)))
    }

    fn new(bytes: usize) -> Self {
        Self { bytes: vec![BEFORE; bytes], ..Self::default() }
    }

    fn serve(mut self, mut requests: Requests, replier: &Replier, fail: Fail) -> Self {
        loop {
            let request = match requests.next_request() {
                Ok(Some(request)) => request,
                Ok(None) => {
                    self.goodbye = true;
                    return self;
                }
                Err(_) => return self,
            };
            self.seen.push(request);
            if fail(&request) {
                replier.fail(request.cookie, Errno::IO).unwrap();
                continue;
            }
            let from = usize::try_from(request.offset).unwrap();
            let range = &mut self.bytes[from..from + request.bytes as usize];
            match request.kind {
                RequestKind::Write => requests.read_payload(range).unwrap(),
                RequestKind::WriteZeroes | RequestKind::Trim => range.fill(0),
                RequestKind::Flush => {}
            }
            // A client that has disconnected needs no answer.
            let _ = replier.ok(request.cookie);
        }
    }
}

/// Which requests fail.
pub(crate) type Fail = fn(&Request) -> bool;

/// A server for the next client that chooses this disk; any number may query it before.
pub(crate) fn listen(socket: &Path, name: &str, bytes: usize, fail: Fail) -> JoinHandle<Disk> {
    let listener = UnixListener::bind(socket).unwrap();
    let exports = [Export { name: name.to_owned(), bytes: bytes as u64 }];
    let serve = move || {
        let Connection { requests, replier, .. } = accept(&listener, &exports);
        Disk::new(bytes).serve(requests, &replier, fail)
    };
    thread::Builder::new().name("disk".to_owned()).spawn(serve).unwrap()
}

/// The next client that chooses an export.
pub(crate) fn accept(listener: &UnixListener, exports: &[Export]) -> Connection {
    loop {
        let socket: UnixStream = listener.accept().unwrap().0;
        if let Ok(Some(connection)) = negotiate(socket, exports) {
            return connection;
        }
    }
}
