//! The destination's side of one migration within this host.
//!
//! The source's side connects to it by pairs of sockets. So it needs no port, certificate or peers
//! file, and no other program can be at the other end.

use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};

use identity::{Connection, Security, WithinProcess};
use parking_lot::Mutex;

use super::connections::Connections;
use super::serve_connection;
use super::shared::Shared;
use crate::host::{Host, Local};

/// Where its connections count as coming from.
const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// The destination's side of one migration within this host.
pub struct SameHost {
    serving: Arc<Serving>,
    local: Local,
}

struct Serving {
    shared: Arc<Shared>,
    served: AtomicU64,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl SameHost {
    /// A destination whose QEMU `host` starts, with the settings of this agent.
    #[must_use]
    pub fn new(host: Arc<dyn Host>, local: &Local) -> Self {
        // Lanes have no network card.
        let local = Local { nics: Vec::new(), ..local.clone() };
        let shared = Arc::new(Shared {
            host,
            local: local.clone(),
            leaving: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            arrivals: Mutex::default(),
            connections: Connections::new([HERE]),
            postcopies: Arc::default(),
            same_host: true,
        });
        let (served, threads) = (AtomicU64::new(0), Mutex::default());
        let serving = Arc::new(Serving { shared, served, threads });
        let connecting = Arc::clone(&serving);
        let process = WithinProcess::new(move || connecting.connect());
        let local = Local { security: Security::Within(process), ..local };
        Self { serving, local }
    }

    /// The settings for the source's side, which lead its connections here.
    #[must_use]
    pub fn source(&self) -> &Local {
        &self.local
    }

    /// Waits until this side has ended, once the source's side has.
    pub fn wait_ended(&self) {
        let threads = std::mem::take(&mut *self.serving.threads.lock());
        for thread in threads {
            // A panic was logged there.
            let _ = thread.join();
        }
    }
}

impl Serving {
    /// Serves one end of a pair of sockets on a thread of its own, and returns the other.
    fn connect(&self) -> io::Result<TcpStream> {
        let (ours, theirs) = UnixStream::pair()?;
        // Whatever socket it is: nothing reads its address.
        let stream = TcpStream::from(OwnedFd::from(theirs));
        let place = self.shared.connections.admit(&stream, HERE);
        let mut place = place.ok_or_else(|| io::Error::other("there are too many connections"))?;
        let number = self.served.fetch_add(1, Relaxed);
        let thread = thread::Builder::new().name(format!("peer-{number}")).spawn({
            let shared = Arc::clone(&self.shared);
            move || {
                let connection = Connection::plain(stream);
                if let Err(error) = serve_connection(&shared, connection, number, &mut place) {
                    tracing::warn!(%error, "a connection within this host has broken");
                }
            }
        })?;
        self.threads.lock().push(thread);
        Ok(TcpStream::from(OwnedFd::from(ours)))
    }
}
