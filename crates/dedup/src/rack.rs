//! The rack: content that other hosts have need not come from a source.

mod claims;
mod effort;
mod fetch;
mod line;
mod patience;
mod publisher;
mod remote_waiter;
mod server;

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use content::Name;
use directory::{Answer, Directory, DirectoryError, Embedded, Halves, HostName, Remote};
use identity::Security;
use parking_lot::Mutex;
use transport::{Endpoint, connect};
use wire::Kind;

pub(crate) use claims::{Batch, Claims, Fate};
use line::Line;
use publisher::Publisher;
pub(crate) use remote_waiter::RemoteWaiter;
pub use server::{SERVED_BYTES_MAX, serve};

/// The longest wait for the directory. Its answer may be queued behind others' content in a full
/// network card.
const CLAIM_WAIT: Duration = Duration::from_secs(1);
/// The directory is not queried for this long after a failure, and for twice as long after each
/// one that follows. So one that never answers soon costs nearly nothing.
const REST_LEAST: Duration = Duration::from_millis(500);
const REST_MOST: Duration = Duration::from_secs(8);

/// Another host of the rack.
#[derive(Clone, Debug)]
pub struct Mate {
    /// Its name.
    pub name: String,
    /// Where its agent listens.
    pub address: SocketAddr,
}

/// Where a rack's directory is.
#[derive(Debug)]
pub enum DirectoryAt {
    /// In this agent.
    Here(Arc<Embedded>),
    /// In the agent of this host of the rack.
    At(Mate),
    /// In something else, such as Redis.
    Elsewhere(Arc<dyn Directory>),
}

/// This host's rack.
#[derive(Debug)]
pub struct Rack {
    me: HostName,
    security: Security,
    directory: Arc<dyn Directory>,
    /// The directory that other hosts query, if it is here.
    embedded: Option<Arc<Embedded>>,
    /// Set if the directory has failed since its last answer.
    rests: Mutex<Option<Rest>>,
    mates: HashMap<HostName, Mate>,
    /// Connections that carry content to this host, by peer.
    lines: Mutex<HashMap<HostName, Arc<Line>>>,
    last_line: AtomicU64,
    publisher: Publisher,
}

/// A time in which the directory is not queried.
#[derive(Clone, Debug)]
struct Rest {
    until: Instant,
    time: Duration,
    why: DirectoryError,
}

impl Rest {
    fn after(before: Option<&Self>, why: DirectoryError, now: Instant) -> Self {
        let time = before.map_or(REST_LEAST, |rest| {
            // Queries that failed together count as one failure.
            if now < rest.until { rest.time } else { (rest.time * 2).min(REST_MOST) }
        });
        Self { until: now + time, time, why }
    }
}

impl Rack {
    /// The rack of the host `me`, where `mates` are the others.
    ///
    /// # Errors
    /// If a name is invalid, or a thread can't be started.
    pub fn new(
        me: &str,
        mates: Vec<Mate>,
        security: Security,
        at: DirectoryAt,
    ) -> io::Result<Arc<Self>> {
        let name = |name: &str| HostName::new(name).map_err(io::Error::other);
        let (directory, embedded): (Arc<dyn Directory>, _) = match at {
            DirectoryAt::Here(embedded) => (Arc::clone(&embedded) as _, Some(embedded)),
            DirectoryAt::At(mate) => (Arc::new(ask_at(mate, security.clone())?), None),
            DirectoryAt::Elsewhere(directory) => (directory, None),
        };
        let me = name(me)?;
        let publisher = Publisher::start(me.clone(), Arc::clone(&directory))?;
        let mates: io::Result<_> =
            mates.into_iter().map(|mate| Ok((name(&mate.name)?, mate))).collect();
        Ok(Arc::new(Self {
            me,
            security,
            directory,
            embedded,
            rests: Mutex::default(),
            mates: mates?,
            lines: Mutex::default(),
            last_line: AtomicU64::new(0),
            publisher,
        }))
    }

    /// The directory that this agent keeps for the rack.
    #[must_use]
    pub fn embedded(&self) -> Option<&Arc<Embedded>> {
        self.embedded.as_ref()
    }

    /// Claims these contents. Returns for each the other host that has or gets it. None if it is
    /// here, or no host has it: then this host has claimed it.
    ///
    /// # Errors
    /// If the directory doesn't answer, or is not queried because it didn't before.
    pub(crate) fn claim(&self, names: &[Name]) -> Result<Vec<Option<HostName>>, DirectoryError> {
        if let Some(rest) = &*self.rests.lock()
            && Instant::now() < rest.until
        {
            return Err(rest.why.clone());
        }
        let mut answers = Vec::with_capacity(names.len());
        let asked =
            self.directory.claim(&self.me, names, &mut answers, Instant::now() + CLAIM_WAIT);
        if let Err(error) = asked {
            tracing::warn!(%error, "content of other hosts is not used for now");
            let mut rests = self.rests.lock();
            *rests = Some(Rest::after(rests.as_ref(), error.clone(), Instant::now()));
            return Err(error);
        }
        *self.rests.lock() = None;
        let elsewhere = |answer| match answer {
            Answer::Held(host) | Answer::Coming(host) if host != self.me => Some(host),
            Answer::Held(_) | Answer::Coming(_) | Answer::Yours => None,
        };
        Ok(answers.into_iter().map(elsewhere).collect())
    }

    /// Publishes that these contents are here.
    pub(crate) fn holds(&self, names: Vec<Name>) {
        self.publisher.holds(names);
    }

    /// Publishes that these contents are not here, whatever the directory says.
    fn lacks(&self, names: Vec<Name>) {
        self.publisher.lacks(names);
    }
}

/// A client of the directory that another agent keeps.
fn ask_at(mate: Mate, security: Security) -> io::Result<Remote> {
    let at = format!("the agent of {}", mate.name);
    Remote::new(at, move |_until| {
        let way = Endpoint { local: None, remote: mate.address };
        let connection = connect(way, &mate.name, &security, Kind::Directory);
        let connection = connection.map_err(io::Error::other)?;
        let closer = connection.closer();
        let (reader, writer) = connection.into_halves();
        Ok(Halves::new(reader, writer, move || closer.close()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_fails_rests_longer_and_longer() {
        let late = || DirectoryError::Late { at: "a".to_owned() };
        let mut now = Instant::now();
        let (mut rest, mut times) = (None, Vec::new());
        for _ in 0..6 {
            let fails = |before: Option<&Rest>| Some(Rest::after(before, late(), now));
            rest = fails(rest.as_ref());
            // A second query that was made at the same time.
            rest = fails(rest.as_ref());
            let next: &Rest = rest.as_ref().unwrap();
            times.push(next.time.as_millis());
            now = next.until;
        }
        assert_eq!(times, [500, 1000, 2000, 4000, 8000, 8000]);
    }
}
