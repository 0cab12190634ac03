//! What crosses this host's NICs, what they can carry, what TCP counts of one
//! connection, and whose it is.
//!
//! Everything is as the calling thread's network namespace has it: counters from
//! its `/proc/thread-self/net/dev`, speeds from the ethtool ioctl on a socket of
//! its own. `/sys` shows the namespace it was mounted in, which may be another,
//! and is only asked where it shows the same interfaces.
//!
//! There is no thread here: whoever wants to know asks, once a second.

mod counters;
mod lower;
mod mtu;
mod owner;
mod speed;
mod tcp;

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use crate::counters::{Counters, Table};
pub use crate::owner::{listener_at, processes_of, user_of};
pub use crate::tcp::TcpCounts;

/// Samples closer together than this are the same one: several migrations look
/// at the same NICs, and rates over moments say little.
const BETWEEN_LEAST: Duration = Duration::from_millis(500);

/// What went wrong on this host.
#[derive(Debug, thiserror::Error)]
pub enum NicError {
    /// No interface has the address.
    #[error("no network interface here has the address {0}; `ip address` lists what there is")]
    NoSuchAddress(IpAddr),
    /// The system does not say.
    #[error("{action}: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// What it said.
        source: io::Error,
    },
}

/// Bytes per second in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rate {
    /// As the NIC counts: with headers.
    pub all_bytes_per_s: u64,
    /// Without headers, as far as packets tell.
    pub content_bytes_per_s: u64,
}

/// A NIC since the sample before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Its name.
    pub name: String,
    /// What it can carry in each direction; none if nobody knows.
    pub speed_bytes_per_s: Option<u64>,
    /// What it sent.
    pub sent: Rate,
    /// What it received.
    pub received: Rate,
}

#[derive(Debug)]
struct Nic {
    configured_bytes_per_s: Option<u64>,
    last: Counters,
    sample: Sample,
}

/// The NICs that somebody is interested in, each at a place that stays.
#[derive(Debug)]
pub struct Nics {
    nics: Vec<Nic>,
    at: Instant,
}

impl Default for Nics {
    fn default() -> Self {
        Self { nics: Vec::new(), at: Instant::now() }
    }
}

impl Nics {
    /// None yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The place of the NIC that carries what is sent from and to `address`, one
    /// of this host's: the one that has it, or what that stands on, if it is a
    /// VLAN or a bridge, since others use that too. `configured_bytes_per_s` is
    /// what the operator says that it can carry.
    ///
    /// # Errors
    /// If no interface has the address, or the system does not say.
    pub fn add(
        &mut self,
        address: IpAddr,
        configured_bytes_per_s: Option<u64>,
    ) -> Result<usize, NicError> {
        let name = lower::carrier(&holding(address)?);
        let known = self.nics.iter().position(|nic| nic.sample.name == name);
        let place = match known {
            Some(place) => place,
            None => self.join(name)?,
        };
        if configured_bytes_per_s.is_some() {
            self.nics[place].configured_bytes_per_s = configured_bytes_per_s;
            self.nics[place].sample.speed_bytes_per_s = configured_bytes_per_s;
        }
        Ok(place)
    }

    fn join(&mut self, name: String) -> Result<usize, NicError> {
        // All begin with the same moment.
        self.sample_at(Instant::now())?;
        let last = Table::read()?.of(&name).unwrap_or_default();
        let (sent, received) = Default::default();
        let speed_bytes_per_s = speed::bytes_per_s(&name);
        let sample = Sample { name, speed_bytes_per_s, sent, received };
        self.nics.push(Nic { configured_bytes_per_s: None, last, sample });
        Ok(self.nics.len() - 1)
    }

    /// What crossed them since the sample before, or since they were added. Half
    /// a second apart at least, or it is the one before.
    ///
    /// # Errors
    /// If the system does not say.
    pub fn sample(&mut self) -> Result<Vec<Sample>, NicError> {
        let now = Instant::now();
        if now.duration_since(self.at) >= BETWEEN_LEAST {
            self.sample_at(now)?;
        }
        Ok(self.nics.iter().map(|nic| nic.sample.clone()).collect())
    }

    /// Begins anew for all of them: what crossed them before is forgotten.
    ///
    /// # Errors
    /// If the system does not say.
    pub fn restart(&mut self) -> Result<Vec<Sample>, NicError> {
        self.sample_at(Instant::now())?;
        let nothing = Rate::default();
        for nic in &mut self.nics {
            (nic.sample.sent, nic.sample.received) = (nothing, nothing);
        }
        Ok(self.nics.iter().map(|nic| nic.sample.clone()).collect())
    }

    fn sample_at(&mut self, now: Instant) -> Result<(), NicError> {
        let passed = now.duration_since(self.at);
        self.at = now;
        if self.nics.is_empty() {
            return Ok(());
        }
        let table = Table::read()?;
        for nic in &mut self.nics {
            // One that is gone carries nothing.
            let counters = table.of(&nic.sample.name).unwrap_or(nic.last);
            nic.sample.sent = counters.sent.since(nic.last.sent, passed);
            nic.sample.received = counters.received.since(nic.last.received, passed);
            nic.last = counters;
            // Links come up at another speed than they went down with.
            nic.sample.speed_bytes_per_s =
                nic.configured_bytes_per_s.or_else(|| speed::bytes_per_s(&nic.sample.name));
        }
        Ok(())
    }
}

/// What a NIC is, for a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Described {
    /// The name of the interface that has the address.
    pub name: String,
    /// What the NIC behind it can carry in each direction; none if nobody knows.
    pub speed_bytes_per_s: Option<u64>,
    /// Its longest packet.
    pub mtu: Option<u32>,
}

/// The NIC that has `address`.
///
/// # Errors
/// If no interface has the address, or the system does not say.
pub fn describe(address: IpAddr) -> Result<Described, NicError> {
    let name = holding(address)?;
    let speed_bytes_per_s = speed::bytes_per_s(&lower::carrier(&name));
    Ok(Described { speed_bytes_per_s, mtu: mtu::bytes(&name), name })
}

/// The interface that has `address`.
fn holding(address: IpAddr) -> Result<String, NicError> {
    let interfaces = if_addrs::get_if_addrs()
        .map_err(|source| NicError::System { action: "listing network interfaces", source })?;
    let address = address.to_canonical();
    let holding = interfaces.into_iter().find(|interface| interface.ip() == address);
    holding.map(|interface| interface.name).ok_or(NicError::NoSuchAddress(address))
}

/// The address from which this host reaches `remote`, where routing decides.
///
/// # Errors
/// If there is no route.
pub fn local_towards(remote: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr = match remote {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    // Connecting a datagram socket sends nothing.
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(remote)?;
    Ok(socket.local_addr()?.ip())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::thread;

    use super::*;

    #[test]
    fn what_crosses_loopback_is_seen_in_both_directions() {
        const BYTES: usize = 8 << 20;
        let mut nics = Nics::new();
        let place = nics.add("127.0.0.1".parse().unwrap(), None).unwrap();
        assert_eq!(nics.add("127.0.0.1".parse().unwrap(), None).unwrap(), place);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut receiver, _) = listener.accept().unwrap();
        let began = nics.at;
        thread::scope(|scope| {
            scope.spawn(move || sender.write_all(&vec![1; BYTES]).unwrap());
            receiver.read_exact(&mut vec![0; BYTES]).unwrap();
        });
        // As if just this second had passed.
        nics.sample_at(began + Duration::from_secs(1)).unwrap();
        let Sample { name, speed_bytes_per_s, sent, received } = &nics.nics[place].sample;
        assert_eq!((name.as_str(), *speed_bytes_per_s), ("lo", None));
        for rate in [sent, received] {
            assert!(rate.content_bytes_per_s >= BYTES as u64 * 9 / 10, "{rate:?}");
            assert!(rate.all_bytes_per_s > rate.content_bytes_per_s);
        }
        nics.add("127.0.0.1".parse().unwrap(), Some(125_000_000)).unwrap();
        let sample = nics.sample().unwrap().remove(place);
        assert_eq!(sample.speed_bytes_per_s, Some(125_000_000));
    }

    #[test]
    fn an_address_of_somebody_else_is_no_nic_of_ours() {
        let stranger: IpAddr = "192.0.2.77".parse().unwrap();
        let refused = Nics::new().add(stranger, None).unwrap_err();
        assert!(matches!(refused, NicError::NoSuchAddress(address) if address == stranger));
    }

    #[test]
    fn routing_says_where_we_leave_from() {
        let local = local_towards("127.0.0.1:9".parse().unwrap()).unwrap();
        assert!(local.is_loopback());
    }
}
