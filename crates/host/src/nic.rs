//! Traffic and speeds of this host's NICs, TCP counters of a connection, and the owners of TCP
//! sockets.
//!
//! All of it is for the calling thread's network namespace: counters are from its
//! `/proc/thread-self/net/dev`, speeds from the ethtool ioctl on a socket in it. `/sys` shows the
//! namespace in which it was mounted, so it is used only if it shows the same interfaces.
//!
//! There is no thread here: callers take a sample once a second.

mod counters;
mod error;
mod link;
mod lower;
mod owner;
mod sock_diag;
mod speed;
mod tcp;

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use counters::{Counters, Table};
pub use error::NicError;
use link::without_label;
pub use link::{LinkState, has_spanning_tree, link_state, remove_link};
pub use owner::{has_listener, listener_at, processes_of, user_of};
pub use tcp::TcpCounts;

/// Closer samples are not taken: several migrations look at the same NICs, and rates over shorter
/// times mean little.
const BETWEEN_LEAST: Duration = Duration::from_millis(500);

/// The loopback interface of every network namespace.
const LOOPBACK: &str = "lo";

/// Bytes per second in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rate {
    /// As the NIC counts them, with headers.
    pub all_bytes_per_s: u64,
    /// Without headers, estimated from the number of packets.
    pub content_bytes_per_s: u64,
}

/// A NIC's traffic since the previous sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Its name.
    pub name: String,
    /// Its speed in each direction; none if it is unknown.
    pub speed_bytes_per_s: Option<u64>,
    /// The traffic that it sent.
    pub sent: Rate,
    /// The traffic that it received.
    pub received: Rate,
}

#[derive(Debug)]
struct Nic {
    configured_bytes_per_s: Option<u64>,
    last: Counters,
    sample: Sample,
}

/// The NICs that are of interest, each at a fixed index.
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
    /// Without NICs yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the NIC that carries traffic of `address`, one of this host's addresses, and returns
    /// its index. That is the interface with the address, or the one below it if it is a VLAN or a
    /// bridge, because others use that one too. `configured_bytes_per_s` is the speed that the
    /// operator has configured.
    ///
    /// # Errors
    /// If no interface has the address, if that interface is no NIC, or if the system refuses.
    pub fn add(
        &mut self,
        address: IpAddr,
        configured_bytes_per_s: Option<u64>,
    ) -> Result<usize, NicError> {
        let interface = holding(address)?;
        if only_holds(&interface, address.to_canonical()) {
            return Err(NicError::NotOnNic { address, interface });
        }
        let name = lower::carrier(&interface);
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
        // All NICs have their samples taken at the same moment.
        self.sample_at(Instant::now())?;
        let last = Table::read()?.of(&name).unwrap_or_default();
        let (sent, received) = Default::default();
        let speed_bytes_per_s = speed::bytes_per_s(&name);
        let sample = Sample { name, speed_bytes_per_s, sent, received };
        self.nics.push(Nic { configured_bytes_per_s: None, last, sample });
        Ok(self.nics.len() - 1)
    }

    /// The traffic since the previous sample, or since the NICs were added. Within half a second of
    /// the previous sample, returns that one.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn sample(&mut self) -> Result<Vec<Sample>, NicError> {
        let now = Instant::now();
        if now.duration_since(self.at) >= BETWEEN_LEAST {
            self.sample_at(now)?;
        }
        Ok(self.nics.iter().map(|nic| nic.sample.clone()).collect())
    }

    /// Starts again for all NICs: traffic before this call is not counted.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn restart(&mut self) -> Result<Vec<Sample>, NicError> {
        self.sample_at(Instant::now())?;
        let nothing = Rate::default();
        for nic in &mut self.nics {
            (nic.sample.sent, nic.sample.received) = (nothing, nothing);
        }
        Ok(self.nics.iter().map(|nic| nic.sample.clone()).collect())
    }

    fn sample_at(&mut self, now: Instant) -> Result<(), NicError> {
        // If this fails, the next sample is of all the time since the last one.
        let table = if self.nics.is_empty() { None } else { Some(Table::read()?) };
        let passed = now.duration_since(self.at);
        self.at = now;
        let Some(table) = table else { return Ok(()) };
        for nic in &mut self.nics {
            // A NIC that no longer exists carries nothing.
            let counters = table.of(&nic.sample.name).unwrap_or(nic.last);
            nic.sample.sent = counters.sent.since(nic.last.sent, passed);
            nic.sample.received = counters.received.since(nic.last.received, passed);
            nic.last = counters;
            // A link may come up at another speed than before.
            nic.sample.speed_bytes_per_s =
                nic.configured_bytes_per_s.or_else(|| speed::bytes_per_s(&nic.sample.name));
        }
        Ok(())
    }
}

/// A NIC's properties, for an operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Described {
    /// The name of the interface that has the address.
    pub name: String,
    /// The speed, in each direction, of the NIC below it; none if it is unknown.
    pub speed_bytes_per_s: Option<u64>,
    /// Its MTU.
    pub mtu: Option<u32>,
}

/// The NIC that has `address`.
///
/// # Errors
/// If no interface has the address, or the system refuses.
pub fn describe(address: IpAddr) -> Result<Described, NicError> {
    let name = holding(address)?;
    let speed_bytes_per_s = speed::bytes_per_s(&lower::carrier(&name));
    Ok(Described { speed_bytes_per_s, mtu: link::mtu(&name), name })
}

/// The interface that has `address`.
fn holding(address: IpAddr) -> Result<String, NicError> {
    let interfaces = if_addrs::get_if_addrs()
        .map_err(|source| NicError::System { action: "listing network interfaces", source })?;
    let address = address.to_canonical();
    let holding = interfaces.into_iter().find(|interface| interface.ip() == address);
    let name = holding.map(|interface| without_label(&interface.name).to_owned());
    name.ok_or(NicError::NoSuchAddress(address))
}

/// Whether the interface has the address, but none of its traffic with other hosts: a routed host
/// has its address on its loopback or a dummy interface, whatever NICs it is reached by.
fn only_holds(interface: &str, address: IpAddr) -> bool {
    let is_loopback = interface == LOOPBACK;
    !address.is_loopback() && (is_loopback || speed::is_dummy(interface))
}

/// The local address from which routing reaches `remote`.
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
        // As if exactly one second had passed.
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
    fn an_address_of_another_host_is_refused() {
        let stranger: IpAddr = "192.0.2.77".parse().unwrap();
        let refused = Nics::new().add(stranger, None).unwrap_err();
        assert!(matches!(refused, NicError::NoSuchAddress(address) if address == stranger));
    }

    #[test]
    fn an_address_on_loopback_says_nothing_about_nics() {
        let addresses = [("10.0.0.1", true), ("2001:db8::1", true), ("127.0.0.2", false)];
        for (address, is_elsewhere) in addresses {
            assert_eq!(only_holds(LOOPBACK, address.parse().unwrap()), is_elsewhere, "{address}");
        }
        assert!(!only_holds("no such interface", "10.0.0.1".parse().unwrap()));
    }

    #[test]
    fn routing_gives_the_local_address() {
        let local = local_towards("127.0.0.1:9".parse().unwrap()).unwrap();
        assert!(local.is_loopback());
    }
}
