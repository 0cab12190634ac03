//! The other hosts, from the peers file, which is reread when it changes, on SIGHUP, and again and
//! again while it can't be used.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use tokio::signal::unix::Signal;
use tokio::time::{MissedTickBehavior, interval};

use crate::config::{self, ConfigError, PeerEntry};
use crate::watched::Watched;

const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// The other hosts; all clones share one list.
#[derive(Clone, Debug, Default)]
pub(crate) struct Peers {
    list: Arc<RwLock<Arc<[PeerEntry]>>>,
    /// Without a peers file, a certificate is enough.
    has_file: bool,
}

impl Peers {
    /// Those of the peers file, if there is one.
    pub(crate) fn new(entries: Vec<PeerEntry>, file: Option<&Path>) -> Self {
        Self { list: Arc::new(RwLock::new(entries.into())), has_file: file.is_some() }
    }

    /// Whether a host with a certificate may send VMs here.
    pub(crate) fn admit(&self, name: &str) -> bool {
        !self.has_file || self.named(name).is_some()
    }

    /// In the order of the file.
    pub(crate) fn now(&self) -> Arc<[PeerEntry]> {
        Arc::clone(&self.list.read())
    }

    pub(crate) fn named(&self, name: &str) -> Option<PeerEntry> {
        self.list.read().iter().find(|peer| peer.name == name).cloned()
    }

    pub(crate) fn replace(&self, entries: Vec<PeerEntry>) {
        *self.list.write() = entries.into();
    }
}

/// The hosts that VMs can move to.
#[derive(Clone, Debug)]
pub(crate) struct Routes {
    pub(crate) peers: Peers,
    pub(crate) insecure_plaintext: bool,
}

impl Routes {
    pub(crate) fn no_such_host(&self, name: &str) -> String {
        let peers = self.peers.now();
        let known: Vec<&str> = peers.iter().map(|peer| peer.name.as_str()).collect();
        if known.is_empty() {
            return format!(
                "there is no host `{name}`: this agent has no peers file, set --peers FILE"
            );
        }
        format!("there is no host `{name}` in the peers file; there is: {}", known.join(", "))
    }
}

/// The peers file, and what this agent took from it at its start.
pub(crate) struct PeersFile {
    pub(crate) path: PathBuf,
    /// This host.
    pub(crate) name: String,
    /// Its own entry at the agent's start; changes of it are not applied.
    pub(crate) own: Option<PeerEntry>,
    pub(crate) rack: Option<String>,
}

/// Notifies parts of the agent of the hosts after a change, which don't read [`Peers`].
pub(crate) type NotifyOthers = dyn Fn(&[PeerEntry]) + Send + Sync;

/// Watches the file until the agent ends.
pub(crate) async fn follow(
    file: PeersFile,
    peers: Peers,
    others: Box<NotifyOthers>,
    mut hup: Signal,
) {
    let changed = || std::fs::metadata(&file.path).and_then(|there| there.modified()).ok();
    let mut turns = interval(LOOK_AGAIN);
    turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut watched = Watched::new(changed());
    loop {
        let is_told = tokio::select! {
            _ = turns.tick() => false,
            _ = hup.recv() => true,
        };
        if !watched.look(changed(), is_told) {
            continue;
        }
        match file.apply(&peers, &*others) {
            Ok(Change { came, left }) => {
                watched.accept();
                if came.is_empty() && left.is_empty() {
                    tracing::info!("the peers file was read again");
                } else {
                    tracing::info!(?came, ?left, "the peers file was read again");
                }
            }
            Err(error) if watched.refuse(&error.to_string()) => {
                tracing::error!(
                    %error,
                    "the peers file was not applied, the previous one is used; retrying"
                );
            }
            Err(_) => {}
        }
    }
}

/// Hosts, by name.
#[derive(Debug, PartialEq, Eq)]
struct Change {
    came: Vec<String>,
    left: Vec<String>,
}

impl PeersFile {
    fn apply(&self, peers: &Peers, others: &NotifyOthers) -> Result<Change, ConfigError> {
        let (own, new) = config::read_peers(&self.path, &self.name)?;
        let old = peers.now();
        if own != self.own {
            tracing::warn!(
                host = self.name,
                "the peers file's settings of this host take effect at the agent's next start"
            );
        }
        if self.rack.is_some() && self.rack_of(&old) != self.rack_of(&new) {
            tracing::warn!(
                rack = self.rack,
                "the hosts that share content within the rack change at the agent's next start"
            );
        }
        let names_beside = |all: &[PeerEntry], others: &[PeerEntry]| -> Vec<String> {
            let is_new = |one: &&PeerEntry| !others.iter().any(|other| other.name == one.name);
            all.iter().filter(is_new).map(|one| one.name.clone()).collect()
        };
        let change = Change { came: names_beside(&new, &old), left: names_beside(&old, &new) };
        peers.replace(new.clone());
        others(&new);
        Ok(change)
    }

    /// The other hosts of this one's rack, which share content whatever its uplink is.
    fn rack_of(&self, peers: &[PeerEntry]) -> Vec<PeerEntry> {
        let sharing = peers.iter().filter(|peer| peer.rack == self.rack);
        sharing.map(|peer| PeerEntry { uplink: None, ..peer.clone() }).collect()
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn hosts_come_and_leave_and_a_file_with_a_mistake_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("peers.toml");
        let write = |names: &[&str]| {
            let entry = |name| format!("[[host]]\nname = '{name}'\naddress = '10.0.0.1:7450'\n");
            let text: String = names.iter().map(entry).collect();
            std::fs::write(&path, text).unwrap();
        };
        write(&["a", "b", "c"]);
        let (own, entries) = config::read_peers(&path, "a").unwrap();
        let peers = Peers::new(entries, Some(&path));
        let names = || peers.now().iter().map(|peer| peer.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(), ["b", "c"]);
        assert!(peers.admit("b") && !peers.admit("d") && !peers.admit("a"));
        assert!(Peers::default().admit("b"), "there is no file");
        let file = PeersFile { path: path.clone(), name: "a".to_owned(), own, rack: None };
        let noted = Arc::<Mutex<Vec<String>>>::default();
        let note = {
            let noted = Arc::clone(&noted);
            move |peers: &[PeerEntry]| {
                *noted.lock() = peers.iter().map(|peer| peer.name.clone()).collect();
            }
        };
        write(&["a", "c", "d"]);
        let change = file.apply(&peers, &note).unwrap();
        assert_eq!(change, Change { came: vec!["d".to_owned()], left: vec!["b".to_owned()] });
        assert_eq!((names(), &*noted.lock()), (vec!["c".to_owned(), "d".to_owned()], &names()));
        assert!(!peers.admit("b") && peers.admit("d"), "b was removed");
        for text in ["[[host]]\nname = 'b'\n", "nonsense", "[[host]]\nname = 'b'\naddress = '1'"] {
            std::fs::write(&path, text).unwrap();
            assert!(file.apply(&peers, &note).is_err(), "{text}");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(file.apply(&peers, &note).is_err());
        assert_eq!(names(), ["c", "d"]);
        assert!(peers.named("b").is_none() && peers.named("d").is_some());
    }
}
