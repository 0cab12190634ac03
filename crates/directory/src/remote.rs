//! A directory at the other end of a connection.
//!
//! A caller writes its request into a buffer and waits for the reply, but never beyond its
//! deadline, whatever happens to the connection. One thread connects and writes the buffer: all
//! requests since the last time at once. Another thread reads replies and wakes their callers. So
//! many requests of many threads are in flight at a time, and only these two threads ever wait in
//! a system call.

mod line;

use std::fmt;
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use content::Name;
use data_threads::Joined;

use crate::directory::{Answer, Directory};
use crate::error::DirectoryError;
use crate::host::HostName;
use crate::protocol::{NAMES_MAX, RequestKind};
use line::{Line, Ticket};

/// The shortest time between attempts to connect, and the longest that one takes.
const RECONNECT: Duration = Duration::from_secs(1);
const CONNECT_MAX: Duration = Duration::from_secs(2);

/// A connection: for the reading thread, the writing thread, and the one that ends it.
pub struct Halves {
    reader: Box<dyn Read + Send>,
    writer: Box<dyn Write + Send>,
    shutdown: Box<dyn Fn() + Send + Sync>,
}

impl Halves {
    /// `shutdown` ends both directions at once: the reader sees the end, and the writer an error.
    /// It may be called more than once.
    pub fn new(
        reader: impl Read + Send + 'static,
        writer: impl Write + Send + 'static,
        shutdown: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        Self { reader: Box::new(reader), writer: Box::new(writer), shutdown: Box::new(shutdown) }
    }
}

/// A directory that is queried over a connection.
///
/// The connection is made on the first call. When it breaks, all waiting callers get an error at
/// once. So do later callers, until a second after the last attempt to connect. If that attempt
/// failed, later claims get an error until another one has succeeded.
pub struct Remote {
    line: Arc<Line>,
    _sender: Joined,
}

impl Remote {
    /// A client of the directory at `at`, a name for messages only. `connect` connects, on a
    /// separate thread, to a peer that runs [`serve`](crate::serve). It should return by the time
    /// that it is given, because dropping this value waits for it.
    pub fn new(
        at: impl Into<String>,
        connect: impl Fn(Instant) -> io::Result<Halves> + Send + 'static,
    ) -> io::Result<Self> {
        let line = Arc::new(Line::new(at.into()));
        let its = Arc::clone(&line);
        let sender = thread::Builder::new().name("directory-send".to_owned());
        let sender = sender.spawn(move || send(&its, &connect))?;
        Ok(Self { line, _sender: sender.into() })
    }
}

impl Directory for Remote {
    /// Sends requests for all names, and then waits for the replies.
    fn request(
        &self,
        kind: RequestKind,
        host: &HostName,
        names: &[Name],
        answers: &mut Vec<Answer>,
        until: Instant,
    ) -> Result<(), DirectoryError> {
        if kind == RequestKind::Forget {
            return self.line.request(kind, host, &[], until)?.wait(until).map(drop);
        }
        let parts = names.chunks(NAMES_MAX);
        let tickets: Result<Vec<Ticket<'_>>, _> =
            parts.map(|part| self.line.request(kind, host, part, until)).collect();
        for ticket in tickets? {
            answers.extend(ticket.wait(until)?);
        }
        Ok(())
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.line.end();
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote").field("at", &self.line.at()).finish_non_exhaustive()
    }
}

/// Connects when a request needs it, and writes requests.
fn send(line: &Arc<Line>, connect: &dyn Fn(Instant) -> io::Result<Halves>) {
    let mut number = 0;
    while line.is_needed() {
        number += 1;
        let begun = Instant::now();
        match connect(begun + CONNECT_MAX) {
            Ok(halves) => carry(line, number, begun + RECONNECT, halves),
            Err(error) => line.failed(begun + RECONNECT, &error.to_string()),
        }
    }
}

/// Uses one connection until it breaks.
fn carry(line: &Arc<Line>, number: u64, again: Instant, halves: Halves) {
    let Halves { reader, mut writer, shutdown } = halves;
    line.opened(number, again, shutdown);
    let its = Arc::clone(line);
    let hearer = thread::Builder::new().name("directory-hear".to_owned());
    let hearer = hearer.spawn(move || {
        let why = its.receive(reader);
        its.broke(number, &why);
    });
    let mut out = Vec::new();
    while hearer.is_ok() && line.take(number, &mut out) {
        if let Err(error) = writer.write_all(&out).and_then(|()| writer.flush()) {
            line.broke(number, &error.to_string());
        }
    }
    match hearer {
        // The thread has reported why it ended.
        Ok(hearer) => drop(hearer.join()),
        Err(error) => line.broke(number, &error.to_string()),
    }
}
