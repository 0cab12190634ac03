//! The other hosts of this one's rack: what they have need not come from a source.

mod line;
mod serve;
mod teller;

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use content::Name;
use directory::{Answer, Directory, DirectoryError, Embedded, Halves, HostName, Remote};
use identity::Security;
use parking_lot::Mutex;
use transport::{Endpoint, connect};
use wire::Kind;

use crate::host::Peer;
use line::Line;
pub(super) use serve::Far;
pub(crate) use serve::serve;
use teller::Teller;

/// A batch waits so long for the directory at most...
const CLAIM_WAIT: Duration = Duration::from_millis(250);
/// ...and after a failure nobody asks it for so long.
const REST: Duration = Duration::from_secs(3);

/// Where a rack's directory is.
#[derive(Debug)]
pub enum DirectoryAt {
    /// Here.
    Here(Arc<Embedded>),
    /// In the agent of this host of the rack.
    At(Peer),
    /// In something else, such as Redis.
    Elsewhere(Arc<dyn Directory>),
}

/// This host's rack.
#[derive(Debug)]
pub struct Rack {
    me: HostName,
    security: Security,
    directory: Arc<dyn Directory>,
    /// What others ask, if it is here.
    embedded: Option<Arc<Embedded>>,
    /// Until when it isn't asked, and why not.
    rests: Mutex<Option<(Instant, DirectoryError)>>,
    peers: HashMap<HostName, Peer>,
    /// Connections by which content comes, by host.
    lines: Mutex<HashMap<HostName, Arc<Line>>>,
    last_line: AtomicU64,
    teller: Teller,
}

impl Rack {
    /// The rack of the host `me`, where `peers` are the others.
    ///
    /// # Errors
    /// If a name is none, or the system gives no thread.
    pub fn new(
        me: &str,
        peers: Vec<Peer>,
        security: Security,
        at: DirectoryAt,
    ) -> io::Result<Arc<Self>> {
        let name = |name: &str| HostName::new(name).map_err(io::Error::other);
        let (directory, embedded): (Arc<dyn Directory>, _) = match at {
            DirectoryAt::Here(embedded) => (Arc::clone(&embedded) as _, Some(embedded)),
            DirectoryAt::At(peer) => (Arc::new(ask_at(peer, security.clone())?), None),
            DirectoryAt::Elsewhere(directory) => (directory, None),
        };
        let me = name(me)?;
        let teller = Teller::start(me.clone(), Arc::clone(&directory))?;
        let peers: io::Result<_> =
            peers.into_iter().map(|peer| Ok((name(&peer.name)?, peer))).collect();
        Ok(Arc::new(Self {
            me,
            security,
            directory,
            embedded,
            rests: Mutex::default(),
            peers: peers?,
            lines: Mutex::default(),
            last_line: AtomicU64::new(0),
            teller,
        }))
    }

    /// The directory that is kept here, for others of the rack.
    pub(crate) fn embedded(&self) -> Option<&Arc<Embedded>> {
        self.embedded.as_ref()
    }

    /// Where these contents are or go to, one answer for each: none is here or at
    /// nobody's, and is this host's now.
    ///
    /// # Errors
    /// If the directory doesn't answer, or is let rest because it didn't before.
    pub(super) fn claim(&self, names: &[Name]) -> Result<Vec<Option<HostName>>, DirectoryError> {
        if let Some((until, why)) = &*self.rests.lock()
            && Instant::now() < *until
        {
            return Err(why.clone());
        }
        let mut answers = Vec::with_capacity(names.len());
        let asked =
            self.directory.claim(&self.me, names, &mut answers, Instant::now() + CLAIM_WAIT);
        if let Err(error) = asked {
            tracing::warn!(%error, "content of other hosts is not used for now");
            *self.rests.lock() = Some((Instant::now() + REST, error.clone()));
            return Err(error);
        }
        let elsewhere = |answer| match answer {
            Answer::Held(host) | Answer::Coming(host) if host != self.me => Some(host),
            Answer::Held(_) | Answer::Coming(_) | Answer::Yours => None,
        };
        Ok(answers.into_iter().map(elsewhere).collect())
    }

    /// These contents are here.
    pub(super) fn holds(&self, names: Vec<Name>) {
        self.teller.holds(names);
    }

    /// These contents are not here, whatever the directory says.
    fn lacks(&self, names: Vec<Name>) {
        self.teller.lacks(names);
    }
}

/// Asks the directory that another agent keeps.
fn ask_at(peer: Peer, security: Security) -> io::Result<Remote> {
    let at = format!("the agent of {}", peer.name);
    Remote::new(at, move |_until| {
        let way = Endpoint { local: None, remote: peer.address };
        let connection = connect(way, &peer.name, &security, Kind::Directory);
        let connection = connection.map_err(io::Error::other)?;
        let closer = connection.closer();
        let (reader, writer) = connection.into_halves();
        Ok(Halves::new(reader, writer, move || closer.close()))
    })
}
