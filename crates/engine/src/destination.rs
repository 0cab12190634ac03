//! The destination's side: takes connections from other agents, and sorts them
//! into arrivals and their lanes.

mod arrival;
mod disks;
mod hands;
mod lanes;
mod nic_use;

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::Mutex;
use wire::{Frame, Inquiry, Kind, Preamble, Reply, Token, WireError, read_frame};

use crate::host::{Host, Local};
use lanes::ArrivingLanes;

/// A peer that has connected says who it is at once.
const PREAMBLE_MAX: Duration = Duration::from_secs(5);
/// Connections at a time: 8 arrivals with 64 lanes each are 520.
const CONNECTIONS_MAX: usize = 1024;

/// The agent's ear for other agents. Dropping it stops it.
pub struct Server {
    shared: Arc<Shared>,
    address: SocketAddr,
    accepting: Option<JoinHandle<()>>,
}

pub(crate) struct Shared {
    host: Arc<dyn Host>,
    local: Local,
    stopping: AtomicBool,
    arrivals: Mutex<HashMap<Token, Arc<ArrivingLanes>>>,
    open: Mutex<HashMap<u64, TcpStream>>,
}

/// Takes connections from other agents from now on.
///
/// # Errors
/// If the system gives no thread.
pub fn serve(listener: TcpListener, host: Arc<dyn Host>, local: Local) -> io::Result<Server> {
    let address = listener.local_addr()?;
    let shared = Arc::new(Shared {
        host,
        local,
        stopping: AtomicBool::new(false),
        arrivals: Mutex::default(),
        open: Mutex::default(),
    });
    let accepting = thread::Builder::new().name("peers".to_owned()).spawn({
        let shared = Arc::clone(&shared);
        move || accept(&listener, &shared)
    })?;
    Ok(Server { shared, address, accepting: Some(accepting) })
}

impl Server {
    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes no more connections and breaks off those there are: VMs that are
    /// arriving stay at their sources.
    pub fn stop(&mut self) {
        self.shared.stopping.store(true, SeqCst);
        for (_, stream) in self.shared.open.lock().drain() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        let Some(accepting) = self.accepting.take() else { return };
        // Wakes the accept: a connection to ourselves, turned away.
        let mut address = self.address;
        if address.ip().is_unspecified() {
            address.set_ip(match address {
                SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
                SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
            });
        }
        if TcpStream::connect_timeout(&address, PREAMBLE_MAX).is_ok() {
            let _ = accepting.join();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    for number in 0u64.. {
        let accepted = listener.accept();
        if shared.stopping.load(SeqCst) {
            return;
        }
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors, or a connection that was gone at once.
                tracing::warn!(%error, "cannot take a connection");
                thread::sleep(Duration::from_millis(50));
                continue;
            }
        };
        let Ok(clone) = stream.try_clone() else { continue };
        {
            let mut open = shared.open.lock();
            if open.len() >= CONNECTIONS_MAX {
                tracing::warn!(%peer, "too many connections; turned away");
                continue;
            }
            open.insert(number, clone);
        }
        let spawned = thread::Builder::new().name(format!("peer-{number}")).spawn({
            let shared = Arc::clone(shared);
            move || {
                if let Err(error) = greet(&shared, stream, number) {
                    tracing::warn!(%peer, %error, "connection refused or broken");
                }
                shared.open.lock().remove(&number);
            }
        });
        if spawned.is_err() {
            shared.open.lock().remove(&number);
        }
    }
}

/// Finds out what a connection is for, and serves it to its end.
fn greet(shared: &Arc<Shared>, mut stream: TcpStream, number: u64) -> Result<(), WireError> {
    transport::tune(&stream)?;
    stream.set_read_timeout(Some(PREAMBLE_MAX))?;
    let mut bytes = [0; Preamble::BYTES];
    stream.read_exact(&mut bytes)?;
    let preamble = match Preamble::parse(&bytes) {
        Ok(preamble) => preamble,
        Err(error @ WireError::Version { .. }) => {
            stream.write_all(&Reply::OtherVersion.to_bytes())?;
            return Err(error);
        }
        // A stranger gets no answer.
        Err(error) => return Err(error),
    };
    stream.set_read_timeout(None)?;
    match preamble.kind {
        Kind::Control => {
            stream.write_all(&Reply::Welcome.to_bytes())?;
            arrival::run(shared, stream, number)?;
        }
        Kind::Lane { token, number } => {
            let arrival = shared.arrivals.lock().get(&token).cloned();
            let Some(arrival) = arrival else {
                stream.write_all(&Reply::UnknownToken.to_bytes())?;
                return Ok(());
            };
            stream.write_all(&Reply::Welcome.to_bytes())?;
            arrival.carry(&stream, number);
        }
        Kind::Inquiry => {
            stream.write_all(&Reply::Welcome.to_bytes())?;
            stream.set_read_timeout(Some(PREAMBLE_MAX))?;
            answer(shared, &stream)?;
        }
    }
    Ok(())
}

/// One word about a switchover, and at most one back.
fn answer(shared: &Shared, stream: &TcpStream) -> Result<(), WireError> {
    let mut both = stream;
    let Some(Frame::Message(json)) = read_frame(&mut both)? else { return Ok(()) };
    let inquiry: Inquiry = serde_json::from_slice(&json)?;
    match shared.host.answer(inquiry) {
        Some(word) => Frame::message(&word)?.write_to(&mut both),
        None => Ok(()),
    }
}
