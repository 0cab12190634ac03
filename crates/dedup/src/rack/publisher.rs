//! Publishes to the directory which content is here, and which is not. No caller waits for it.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use content::Name;
use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use data_threads::Joined;
use directory::{Directory, HostName};

/// Batches that wait to be published. More are dropped: the directory holds hints.
const WAITING_MAX: usize = 4096;
/// The most names that are published at once.
const AT_ONCE: usize = 8192;
const WAIT: Duration = Duration::from_secs(2);

enum Change {
    Holds(Vec<Name>),
    Lacks(Vec<Name>),
}

/// Dropping it ends its thread.
#[derive(Debug)]
pub(super) struct Publisher {
    changes: Sender<Change>,
    _thread: Joined,
}

impl Publisher {
    /// Starts for the host `me`. The directory first forgets what it knew of that host, because
    /// this agent no longer knows it.
    pub(super) fn start(me: HostName, directory: Arc<dyn Directory>) -> io::Result<Self> {
        let (changes, published) = bounded(WAITING_MAX);
        let thread = thread::Builder::new().name("directory-tell".to_owned()).spawn(move || {
            // A directory that can't be reached has nothing to forget.
            let _ = directory.forget(&me, Instant::now() + WAIT);
            run(&me, &*directory, &published);
        })?;
        Ok(Self { changes, _thread: thread.into() })
    }

    pub(super) fn holds(&self, names: Vec<Name>) {
        self.publish(Change::Holds(names));
    }

    pub(super) fn lacks(&self, names: Vec<Name>) {
        self.publish(Change::Lacks(names));
    }

    fn publish(&self, change: Change) {
        if let Err(TrySendError::Full(_)) = self.changes.try_send(change) {
            tracing::debug!("the directory is slow; dropping a notification");
        }
    }
}

fn run(me: &HostName, directory: &dyn Directory, published: &Receiver<Change>) {
    let (mut held, mut lacked) = (Vec::new(), Vec::new());
    while let Ok(first) = published.recv() {
        held.clear();
        lacked.clear();
        for one in std::iter::once(first).chain(published.try_iter()) {
            match one {
                Change::Holds(names) => held.extend(names),
                Change::Lacks(names) => lacked.extend(names),
            }
            if held.len() + lacked.len() >= AT_ONCE {
                break;
            }
        }
        let until = Instant::now() + WAIT;
        let held = if held.is_empty() { Ok(()) } else { directory.hold(me, &held, until) };
        let lacked = if lacked.is_empty() { Ok(()) } else { directory.release(me, &lacked, until) };
        if let Err(error) = held.and(lacked) {
            tracing::debug!(%error, "cannot notify the directory");
        }
    }
}
