//! The destination's side: accepts connections from other agents, and sorts them into arrivals and
//! their lanes.

mod by_name;
mod connections;
mod disks;
mod domain;
mod greeting;
mod lanes;
mod nic_use;
mod orders;
mod phases;
mod postcopies;
mod same_host;
mod shared;

use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use directory::HostName;
use identity::Connection;
use parking_lot::Mutex;
use wire::{Frame, Inquiry, Kind, Reply, Token, read_frame, read_message};

use crate::host::{Host, Local};
use connections::{ConnectionSlot, Connections};
use greeting::{PREAMBLE_MAX, TurnedAway, check_name, check_user, greet, turn_away};
pub use same_host::SameHost;
use shared::Shared;

/// Listens for other agents. Dropping it stops it.
pub struct Server {
    shared: Arc<Shared>,
    address: SocketAddr,
    accepting: Option<JoinHandle<()>>,
}

/// Starts to accept connections from other agents. Strangers can't keep out connections from
/// `hosts`, the known addresses of other hosts.
///
/// # Errors
/// If the system can't start a thread.
pub fn serve(
    listener: TcpListener,
    hosts: impl IntoIterator<Item = IpAddr>,
    host: Arc<dyn Host>,
    local: Local,
) -> io::Result<Server> {
    let address = listener.local_addr()?;
    let shared = Arc::new(Shared {
        host,
        local,
        leaving: AtomicBool::new(false),
        stopping: AtomicBool::new(false),
        arrivals: Mutex::default(),
        connections: Connections::new(hosts),
        postcopies: Arc::default(),
        same_host: false,
    });
    let accepting = thread::Builder::new().name("peers".to_owned()).spawn({
        let shared = Arc::clone(&shared);
        move || accept(&listener, &shared)
    })?;
    Ok(Server { shared, address, accepting: Some(accepting) })
}

/// The known addresses of other hosts.
#[derive(Clone, Debug)]
pub struct KnownHosts(Arc<Connections>);

impl KnownHosts {
    /// Replaces the known addresses, and ends what is served to hosts that are not listed.
    pub fn are(&self, hosts: impl IntoIterator<Item = IpAddr>, is_listed: impl Fn(&str) -> bool) {
        self.0.know_hosts(hosts);
        self.0.end_unlisted(&is_listed);
    }
}

impl Server {
    /// The known addresses, which can be changed while it listens.
    #[must_use]
    pub fn known_hosts(&self) -> KnownHosts {
        KnownHosts(Arc::clone(&self.shared.connections))
    }

    /// The address at which it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Lets in no more VMs of other agents, and waits until the carried VMs in post-copy have all
    /// of their memory here, at most until `until`. Returns how many have not.
    ///
    /// What is carried is still let in: it may be another connection of one in post-copy.
    #[must_use]
    pub fn wait_postcopies(&self, until: Instant) -> usize {
        self.shared.leaving.store(true, SeqCst);
        self.shared.postcopies.wait_none(until)
    }

    /// Accepts no more connections and breaks off the open ones: VMs that are arriving stay at
    /// their sources.
    pub fn stop(&mut self) {
        self.shared.stopping.store(true, SeqCst);
        self.shared.connections.end_all();
        let Some(accepting) = self.accepting.take() else { return };
        // Wakes the accept by a connection to ourselves, which is turned away.
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
                // Out of descriptors, or the peer has closed the connection at once.
                tracing::warn!(%error, "cannot accept a connection");
                thread::sleep(Duration::from_millis(50));
                continue;
            }
        };
        let Some(mut slot) = shared.connections.admit(&stream, peer.ip()) else {
            tracing::warn!(%peer, "too many connections; rejected");
            continue;
        };
        // Without a thread, the connection is dropped together with its slot.
        let spawned = thread::Builder::new().name(format!("peer-{number}")).spawn({
            let shared = Arc::clone(shared);
            move || {
                if let Err(error) = serve_one(&shared, stream, number, &mut slot) {
                    if slot.gave_way() {
                        tracing::warn!(
                            %peer,
                            "sent nothing, and was closed to make room for other connections"
                        );
                    } else {
                        tracing::warn!(%peer, %error, "connection refused or broken");
                    }
                }
            }
        });
        if let Err(error) = spawned {
            tracing::warn!(%peer, %error, "cannot start a thread for a connection; rejected");
        }
    }
}

/// Identifies a connection's peer and purpose, and serves it to its end.
fn serve_one(
    shared: &Arc<Shared>,
    stream: TcpStream,
    number: u64,
    slot: &mut ConnectionSlot,
) -> Result<(), TurnedAway> {
    transport::tune(&stream)?;
    check_user(&shared.local.security, &stream)?;
    let connection = shared.local.security.accept(stream)?;
    if connection.peer().is_some() {
        slot.is_of_host();
    }
    serve_connection(shared, connection, number, slot)
}

/// Identifies a connection's purpose, and serves it to its end.
fn serve_connection(
    shared: &Shared,
    mut connection: Connection,
    number: u64,
    slot: &mut ConnectionSlot,
) -> Result<(), TurnedAway> {
    let (kind, version) = greet(&mut connection)?;
    // An order has an answer of its own. A message about a switchover is always read: the VM may
    // depend on it, and a host that is removed may still have to learn what became of its own.
    if matches!(kind, Kind::Directory | Kind::Content) {
        let has_room = slot.serves(connection.peer());
        // Checked afterwards: if the host is removed from now on, the connection is broken off.
        let stranger = shared.not_listed(connection.peer()).map(str::to_owned);
        if !has_room || stranger.is_some() {
            turn_away(&mut connection, Reply::Busy, version)?;
            return stranger.map_or(Ok(()), |host| Err(TurnedAway::NotListed(host)));
        }
    }
    match kind {
        Kind::Control => {
            if !slot.leads(connection.peer()) {
                return turn_away(&mut connection, Reply::Busy, version);
            }
            connection.write_all(&Reply::Welcome.to_bytes(version))?;
            phases::run(shared, connection, number, slot)?;
        }
        Kind::Lane { token, number } => {
            serve_lane(shared, connection, version, (token, number), slot)?;
        }
        Kind::Directory => serve_directory(shared, &mut connection, version)?,
        Kind::Content => {
            let sharing = shared.local.sharing.as_ref().filter(|sharing| sharing.rack().is_some());
            let Some(sharing) = sharing else {
                return turn_away(&mut connection, Reply::Busy, version);
            };
            connection.write_all(&Reply::Welcome.to_bytes(version))?;
            dedup::rack::serve(sharing, connection, &shared.local.resources.served)?;
        }
        Kind::Orders => {
            if !slot.orders(connection.peer()) {
                return turn_away(&mut connection, Reply::Busy, version);
            }
            connection.write_all(&Reply::Welcome.to_bytes(version))?;
            orders::obey(&*shared.host, &mut connection)?;
            connection.close();
        }
        Kind::Inquiry => {
            connection.write_all(&Reply::Welcome.to_bytes(version))?;
            connection.set_read_deadline(Some(Instant::now() + PREAMBLE_MAX))?;
            answer(shared, &mut connection)?;
            connection.close();
        }
    }
    Ok(())
}

/// Serves the lane of this number of the migration with this token.
fn serve_lane(
    shared: &Shared,
    mut connection: Connection,
    version: u16,
    (token, number): (Token, u16),
    slot: &mut ConnectionSlot,
) -> Result<(), TurnedAway> {
    let known = shared.arrivals.lock().get(&token).cloned();
    let Some(arrival) = known.filter(|known| known.are_of(connection.peer())) else {
        return turn_away(&mut connection, Reply::UnknownToken, version);
    };
    if !slot.is_lane(connection.peer()) {
        return turn_away(&mut connection, Reply::Busy, version);
    }
    // Also without certificates: only the source knows the token.
    slot.is_of_host();
    connection.write_all(&Reply::Welcome.to_bytes(version))?;
    arrival.carry(connection, number);
    Ok(())
}

/// Serves the directory of the rack, if this agent has it.
fn serve_directory(
    shared: &Shared,
    connection: &mut Connection,
    version: u16,
) -> Result<(), TurnedAway> {
    let rack = shared.local.sharing.as_ref().and_then(|sharing| sharing.rack());
    let Some(directory) = rack.and_then(|rack| rack.embedded()) else {
        return turn_away(connection, Reply::Busy, version);
    };
    connection.write_all(&Reply::Welcome.to_bytes(version))?;
    // With certificates, a host can only register its own content.
    let peer = connection.peer().map(str::to_owned);
    let is_peer = |host: &HostName| peer.as_ref().is_none_or(|peer| peer == host.as_str());
    let (reader, writer) = connection.halves();
    directory::serve(reader, writer, &**directory, &is_peer)?;
    connection.close();
    Ok(())
}

/// Answers one message of a switchover, with at most one message.
fn answer(shared: &Shared, connection: &mut Connection) -> Result<(), TurnedAway> {
    let Some(Frame::Message(json)) = read_frame(connection)? else { return Ok(()) };
    let inquiry: Inquiry = read_message(&json)?;
    check_name(connection, &inquiry.from)?;
    match shared.host.answer(inquiry) {
        Some(message) => Ok(Frame::message(&message)?.write_to(connection)?),
        None => Ok(()),
    }
}
