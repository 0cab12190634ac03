//! Bounds connections whose peers are not identified yet, by their source address.
//! Known addresses have places of their own, so strangers can't keep them out. When
//! all places are taken, the source with most connections loses one, and the newcomer
//! is admitted.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use parking_lot::Mutex;

/// Most connections that gave way and have not ended yet, of known addresses and of
/// strangers each. They still hold descriptors: at this limit no more give way, and
/// newcomers that need a place are refused.
pub const LEAVING_MAX: usize = 16;
/// Addresses that are remembered, besides those that are always known.
const REMEMBERED_MAX: usize = 256;

/// How many connections may be unidentified at a time.
#[derive(Clone, Copy, Debug)]
pub struct AdmissionBounds {
    /// Of all addresses together.
    pub all: usize,
    /// Of one source: an address, or the /64 of an IPv6 stranger.
    pub per_source: usize,
}

/// The unidentified connections of a port, each with a handle that ends it.
#[derive(Debug)]
pub struct Admissions<H> {
    known_max: AdmissionBounds,
    strangers_max: AdmissionBounds,
    state: Mutex<State<H>>,
}

#[derive(Debug)]
struct State<H> {
    always_known: HashSet<IpAddr>,
    /// In the order of their last identification.
    remembered: VecDeque<IpAddr>,
    known: Class<H>,
    strangers: Class<H>,
    admitted: u64,
}

/// Known addresses, or strangers.
#[derive(Debug)]
struct Class<H> {
    /// By source, the oldest first; sources without connections are removed.
    waiting: HashMap<IpAddr, VecDeque<(u64, H)>>,
    count: usize,
    leaving: usize,
}

/// The source that a connection counts for.
#[derive(Clone, Copy, Debug)]
enum Source {
    Known(IpAddr),
    Stranger(IpAddr),
}

/// The place of one unidentified connection, given back when dropped.
#[derive(Debug)]
pub struct Admission<H> {
    admissions: Arc<Admissions<H>>,
    source: Source,
    number: u64,
}

impl<H> Admissions<H> {
    /// No connections yet. Those from `always_known` count as from known addresses.
    pub fn new(
        always_known: impl IntoIterator<Item = IpAddr>,
        known_max: AdmissionBounds,
        strangers_max: AdmissionBounds,
    ) -> Arc<Self> {
        Arc::new(Self {
            known_max,
            strangers_max,
            state: Mutex::new(State {
                always_known: always_known.into_iter().map(plain).collect(),
                remembered: VecDeque::new(),
                known: Class::default(),
                strangers: Class::default(),
                admitted: 0,
            }),
        })
    }

    /// Replaces the addresses that are always known.
    pub fn know(&self, always_known: impl IntoIterator<Item = IpAddr>) {
        self.state.lock().always_known = always_known.into_iter().map(plain).collect();
    }

    /// Admits a connection, unless too many are just ending. If another has to give way,
    /// its handle is returned, and the caller must end it.
    pub fn admit(self: &Arc<Self>, from: IpAddr, handle: H) -> Option<(Admission<H>, Option<H>)> {
        let mut state = self.state.lock();
        let address = plain(from);
        let is_known = state.always_known.contains(&address) || state.remembered.contains(&address);
        let source =
            if is_known { Source::Known(address) } else { Source::Stranger(network(address)) };
        let (class, max) = match source {
            Source::Known(_) => (&mut state.known, self.known_max),
            Source::Stranger(_) => (&mut state.strangers, self.strangers_max),
        };
        let gives_way = class.make_room(source.address(), max).ok()?;
        state.admitted += 1;
        let number = state.admitted;
        let class = state.class(source);
        class.count += 1;
        class.waiting.entry(source.address()).or_default().push_back((number, handle));
        Some((Admission { admissions: Arc::clone(self), source, number }, gives_way))
    }

    /// Remembers an address at which a peer was identified: from now on it counts as
    /// known.
    pub fn remember(&self, address: IpAddr) {
        let address = plain(address);
        let State { always_known, remembered, .. } = &mut *self.state.lock();
        if always_known.contains(&address) {
            return;
        }
        remembered.retain(|other| *other != address);
        if remembered.len() >= REMEMBERED_MAX {
            remembered.pop_front();
        }
        remembered.push_back(address);
    }
}

impl<H> Default for Class<H> {
    fn default() -> Self {
        Self { waiting: HashMap::new(), count: 0, leaving: 0 }
    }
}

impl<H> State<H> {
    fn class(&mut self, source: Source) -> &mut Class<H> {
        match source {
            Source::Known(_) => &mut self.known,
            Source::Stranger(_) => &mut self.strangers,
        }
    }
}

/// There is no room, and none can be made.
struct Full;

impl<H> Class<H> {
    /// Makes room for one more connection of `source`. If it has its share, its own oldest
    /// gives way; if all places are taken, the oldest of the source with most.
    fn make_room(&mut self, source: IpAddr, max: AdmissionBounds) -> Result<Option<H>, Full> {
        let has = self.waiting.get(&source).map_or(0, VecDeque::len);
        let from = if has >= max.per_source {
            source
        } else if self.count >= max.all {
            self.largest().ok_or(Full)?
        } else {
            return Ok(None);
        };
        if self.leaving >= LEAVING_MAX {
            return Err(Full);
        }
        let oldest = self.waiting.get(&from).and_then(|waiting| waiting.front());
        let (number, _) = oldest.ok_or(Full)?;
        let handle = self.take_out(from, *number);
        self.leaving += 1;
        Ok(handle)
    }

    /// The source with most connections; of several, the one with the oldest connection.
    fn largest(&self) -> Option<IpAddr> {
        let first = |waiting: &VecDeque<(u64, H)>| waiting.front().map(|(number, _)| *number);
        let sources = self.waiting.iter();
        let largest = sources.max_by_key(|(_, waiting)| (waiting.len(), Reverse(first(waiting))));
        largest.map(|(source, _)| *source)
    }

    /// Removes a connection; `None` if it has given way.
    fn take_out(&mut self, source: IpAddr, number: u64) -> Option<H> {
        let waiting = self.waiting.get_mut(&source)?;
        let nth = waiting.iter().position(|(other, _)| *other == number)?;
        let (_, handle) = waiting.remove(nth)?;
        if waiting.is_empty() {
            self.waiting.remove(&source);
        }
        self.count -= 1;
        Some(handle)
    }
}

impl Source {
    fn address(self) -> IpAddr {
        match self {
            Self::Known(address) | Self::Stranger(address) => address,
        }
    }
}

impl<H> Admission<H> {
    /// Whether it had to give way to another.
    #[must_use]
    pub fn gave_way(&self) -> bool {
        let mut state = self.admissions.state.lock();
        let waiting = state.class(self.source).waiting.get(&self.source.address());
        !waiting.is_some_and(|all| all.iter().any(|(number, _)| *number == self.number))
    }
}

impl<H> Drop for Admission<H> {
    fn drop(&mut self) {
        let mut state = self.admissions.state.lock();
        let class = state.class(self.source);
        let handle = class.take_out(self.source.address(), self.number);
        if handle.is_none() {
            class.leaving -= 1;
        }
        drop(state);
        // Outside of the lock: what dropping a handle does is not known here.
        drop(handle);
    }
}

/// Normalizes an address for comparison: an IPv4-mapped IPv6 address becomes IPv4,
/// and all loopback addresses, of which a local process has millions, become one.
fn plain(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        address if address.is_loopback() => Ipv4Addr::LOCALHOST.into(),
        address => address,
    }
}

/// The addresses that one stranger easily has: with IPv6, a /64.
fn network(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(address) => {
            Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into()
        }
    }
}

#[cfg(test)]
mod tests;
