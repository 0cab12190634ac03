//! Connections whose peers have not said who they are yet, bounded by where they
//! come from. Addresses that are known have places of their own, so strangers can't
//! keep them out; and among strangers one that holds much makes room for the next,
//! rather than that the next is turned away.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use parking_lot::Mutex;

/// Connections that gave way and have not ended yet, of known addresses and of
/// strangers each: they hold descriptors a moment longer. With more of them
/// newcomers are turned away.
pub const LEAVING_MAX: usize = 16;
/// Addresses that are remembered, beside those that are always known.
const REMEMBERED_MAX: usize = 256;

/// How many connections may be unidentified at a time.
#[derive(Clone, Copy, Debug)]
pub struct AdmissionBounds {
    /// Of all addresses together.
    pub all: usize,
    /// Of one source: an address, or what a stranger has of IPv6, a /64.
    pub per_source: usize,
}

/// The unidentified connections of a port, each with a handle by which it is ended.
#[derive(Debug)]
pub struct Admissions<H> {
    known_max: AdmissionBounds,
    strangers_max: AdmissionBounds,
    state: Mutex<State<H>>,
}

#[derive(Debug)]
struct State<H> {
    always_known: HashSet<IpAddr>,
    /// The one that was identified last is the last.
    remembered: VecDeque<IpAddr>,
    known: Class<H>,
    strangers: Class<H>,
    admitted: u64,
}

/// Known addresses, or strangers.
#[derive(Debug)]
struct Class<H> {
    /// By source, the oldest first; no source has none.
    waiting: HashMap<IpAddr, VecDeque<(u64, H)>>,
    count: usize,
    leaving: usize,
}

/// Where a connection comes from, as it is counted.
#[derive(Clone, Copy, Debug)]
enum Source {
    Known(IpAddr),
    Stranger(IpAddr),
}

/// One unidentified connection among the others, until this is dropped.
#[derive(Debug)]
pub struct Admission<H> {
    admissions: Arc<Admissions<H>>,
    source: Source,
    number: u64,
}

impl<H> Admissions<H> {
    /// None yet. Connections from `always_known` count as from known addresses.
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

    /// From now on these are always known, and no others.
    pub fn know(&self, always_known: impl IntoIterator<Item = IpAddr>) {
        self.state.lock().always_known = always_known.into_iter().map(plain).collect();
    }

    /// One more connection, unless too many are just ending. If another has to make
    /// room for it, its handle comes along: the caller ends it.
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

    /// A peer at this address was identified: connections that come from there count
    /// as from a known one.
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
    /// Makes room for one more of this source: where it has its share, its own oldest
    /// gives way, and where all have theirs, the oldest of the source with most.
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

    /// The source with most connections; of several the one that has waited longest.
    fn largest(&self) -> Option<IpAddr> {
        let first = |waiting: &VecDeque<(u64, H)>| waiting.front().map(|(number, _)| *number);
        let sources = self.waiting.iter();
        let largest = sources.max_by_key(|(_, waiting)| (waiting.len(), Reverse(first(waiting))));
        largest.map(|(source, _)| *source)
    }

    /// None if it has given way.
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
    /// Whether it was to make room for another.
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
        // What it does at its end is not known here: outside of the lock.
        drop(handle);
    }
}

/// An address as it is compared: the same by IPv4 and through a socket for IPv6,
/// and loopback, of which every local process has millions, is one.
fn plain(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        address if address.is_loopback() => Ipv4Addr::LOCALHOST.into(),
        address => address,
    }
}

/// All that one stranger easily has: with IPv6, a /64.
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
