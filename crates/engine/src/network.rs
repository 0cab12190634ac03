//! Traffic of this agent's migrations, and of all other programs, over its NICs.
//!
//! All migrations query it, each about once a second. The NICs' counters are read once for all of
//! them, together with the bytes that the migrations wrote and read in the same time.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use host::nic::{self, NicError, Nics, Rate, Sample};
use parking_lot::Mutex;
use policy::pace::NicUse;

/// Counters are read again at this age, which is above the interval in which `host::nic` returns
/// the same sample.
const OLD: Duration = Duration::from_millis(600);
/// Bytes that one connection's sockets can hold: written bytes are on the wire up to that much
/// later.
const HELD_BYTES: f64 = 4e6;

/// The direction of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Out,
    In,
}

/// The NICs of an agent.
pub(crate) struct Network {
    /// Speeds that the operator has configured, by address.
    speeds: Vec<(IpAddr, u64)>,
    state: Mutex<State>,
}

struct State {
    nics: Nics,
    at: Instant,
    samples: Vec<Sample>,
    flows: Vec<Entry>,
    next: u64,
}

type Counter = Box<dyn Fn() -> u64 + Send>;

struct Entry {
    number: u64,
    way: Way,
    place: usize,
    /// The number of its migration.
    migration: u64,
    counter: Counter,
    last_bytes: u64,
    bytes_per_s: f64,
    before_bytes_per_s: f64,
    /// The bytes that its lane carried in all, once it has ended.
    ended_at: Option<u64>,
}

/// A lane's part of a NIC's traffic, until it is dropped.
pub(crate) struct Flow {
    network: Arc<Network>,
    number: u64,
    /// The index of its NIC.
    pub(crate) place: usize,
}

impl std::fmt::Debug for Network {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Network").field("speeds", &self.speeds).finish_non_exhaustive()
    }
}

impl Network {
    pub(crate) fn new(speeds: Vec<(IpAddr, u64)>) -> Arc<Self> {
        let state = State {
            nics: Nics::new(),
            at: Instant::now(),
            samples: Vec::new(),
            flows: Vec::new(),
            next: 0,
        };
        Arc::new(Self { speeds, state: Mutex::new(state) })
    }

    /// A number for a new migration.
    pub(crate) fn migration(&self) -> u64 {
        let mut state = self.state.lock();
        state.next += 1;
        state.next
    }

    /// Adds a lane of `migration` that uses the NIC with `address`; `counter` returns how much it
    /// has carried.
    pub(crate) fn join(
        self: &Arc<Self>,
        way: Way,
        migration: u64,
        address: IpAddr,
        counter: impl Fn() -> u64 + Send + 'static,
    ) -> Result<Flow, NicError> {
        let address = address.to_canonical();
        let speed = self.speeds.iter().find(|(nic, _)| *nic == address).map(|(_, speed)| *speed);
        let mut state = self.state.lock();
        let before = state.samples.len();
        let place = state.nics.add(address, speed)?;
        // A new NIC restarts counting for all of them. And traffic from before the first query says
        // nothing about the time to come: it may be that of the last migration.
        if place >= before || state.flows.iter().all(|flow| flow.ended_at.is_some()) {
            state.rebase();
        }
        state.next += 1;
        let number = state.next;
        let last_bytes = counter();
        state.flows.push(Entry {
            number,
            way,
            place,
            migration,
            counter: Box::new(counter),
            last_bytes,
            bytes_per_s: 0.0,
            before_bytes_per_s: 0.0,
            ended_at: None,
        });
        Ok(Flow { network: Arc::clone(self), number, place })
    }

    /// The traffic of all NICs, by index, in about the last second.
    pub(crate) fn uses(&self, way: Way) -> Result<Vec<NicUse>, NicError> {
        let mut state = self.state.lock();
        state.refresh()?;
        Ok((0..state.samples.len()).map(|place| state.used(way, place)).collect())
    }
}

impl State {
    fn refresh(&mut self) -> Result<(), NicError> {
        let now = Instant::now();
        let passed = now.duration_since(self.at);
        if passed < OLD {
            return Ok(());
        }
        // If this fails, the next sample is of all the time since the last one.
        self.samples = self.nics.sample()?;
        self.at = now;
        // An ended flow is kept until it has carried nothing for a whole sample, because its last
        // bytes are not other traffic.
        self.flows.retain(|flow| flow.ended_at != Some(flow.last_bytes));
        for flow in &mut self.flows {
            let bytes = flow.ended_at.unwrap_or_else(&flow.counter);
            let moved = bytes.saturating_sub(flow.last_bytes);
            flow.last_bytes = bytes;
            flow.before_bytes_per_s = flow.bytes_per_s;
            flow.bytes_per_s = moved as f64 / passed.as_secs_f64();
        }
        Ok(())
    }

    fn rebase(&mut self) {
        self.at = Instant::now();
        // All samples are of this moment, and say nothing yet.
        self.samples = self.nics.restart().unwrap_or_default();
        self.flows.retain(|flow| flow.ended_at.is_none());
        for flow in &mut self.flows {
            flow.last_bytes = (flow.counter)();
        }
    }

    fn used(&self, way: Way, place: usize) -> NicUse {
        let sample = &self.samples[place];
        let Rate { all_bytes_per_s, content_bytes_per_s } = match way {
            Way::Out => sample.sent,
            Way::In => sample.received,
        };
        let mut migrations = Vec::new();
        let mut ours = 0.0;
        for flow in self.flows.iter().filter(|flow| flow.way == way && flow.place == place) {
            ours += flow.used();
            if flow.ended_at.is_none() && !migrations.contains(&flow.migration) {
                migrations.push(flow.migration);
            }
        }
        NicUse {
            speed_bytes_per_s: sample.speed_bytes_per_s,
            all_bytes_per_s,
            content_bytes_per_s,
            ours_bytes_per_s: whole(ours),
            migrations: u32::try_from(migrations.len()).unwrap_or(u32::MAX),
        }
    }
}

impl Entry {
    /// A flow that has slowed down still sends what its sockets held, which is not other traffic.
    fn used(&self) -> f64 {
        self.bytes_per_s + (self.before_bytes_per_s - self.bytes_per_s).clamp(0.0, HELD_BYTES)
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn whole(bytes_per_s: f64) -> u64 {
    bytes_per_s as u64
}

impl Drop for Flow {
    fn drop(&mut self) {
        let mut state = self.network.state.lock();
        let flow = state.flows.iter_mut().find(|flow| flow.number == self.number);
        let counter = flow.map(|flow| {
            flow.ended_at = Some((flow.counter)());
            std::mem::replace(&mut flow.counter, Box::new(|| 0))
        });
        drop(state);
        // The counter's captures are dropped outside of the lock.
        drop(counter);
    }
}

/// The local address of a connection to `remote`.
pub(crate) fn leaves_from(local: Option<IpAddr>, remote: SocketAddr) -> Option<IpAddr> {
    local.or_else(|| nic::local_towards(remote).ok())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use super::*;

    fn make_old(network: &Network) {
        let mut state = network.state.lock();
        state.at = state.at.checked_sub(Duration::from_secs(1)).unwrap();
    }

    #[test]
    fn traffic_of_migrations_is_summed_by_nic_and_direction() {
        let loopback: IpAddr = "127.0.0.1".parse().unwrap();
        let network = Network::new(vec![(loopback, 125_000_000)]);
        let carried = Arc::new(AtomicU64::new(7));
        let join = |way, migration| {
            let carried = Arc::clone(&carried);
            network.join(way, migration, loopback, move || carried.load(Relaxed)).unwrap()
        };
        let (one, other) = (network.migration(), network.migration());
        let flows = [join(Way::Out, one), join(Way::Out, one), join(Way::Out, other)];
        let _incoming = join(Way::In, other);
        carried.fetch_add(1_000_000, Relaxed);
        make_old(&network);
        let place = flows[0].place;
        let used = network.uses(Way::Out).unwrap()[place];
        assert_eq!((used.speed_bytes_per_s, used.migrations), (Some(125_000_000), 2));
        assert!((2_500_000..=3_000_000).contains(&used.ours_bytes_per_s), "{used:?}");
        let coming = network.uses(Way::In).unwrap()[place];
        assert_eq!(coming.migrations, 1);
        assert!(coming.ours_bytes_per_s <= 1_000_000, "{coming:?}");
        // What they carried until their end is still theirs, not other traffic.
        carried.fetch_add(1_000_000, Relaxed);
        drop(flows);
        for expected in [2_500_000..=3_000_000, 0..=3_000_000, 0..=0] {
            make_old(&network);
            let used = network.uses(Way::Out).unwrap()[place];
            assert!(expected.contains(&used.ours_bytes_per_s), "{used:?} for {expected:?}");
            assert_eq!(used.migrations, 0);
        }
    }

    #[test]
    fn traffic_before_a_migration_is_not_counted() {
        use std::net::UdpSocket;
        let loopback: IpAddr = "127.0.0.1".parse().unwrap();
        let network = Network::new(Vec::new());
        drop(network.join(Way::Out, 1, loopback, || 0).unwrap());
        let (from, to) = (UdpSocket::bind((loopback, 0)), UdpSocket::bind((loopback, 0)));
        let (from, to) = (from.unwrap(), to.unwrap().local_addr().unwrap());
        let seen = || {
            for _ in 0..1000 {
                from.send_to(&[0; 32 << 10], to).unwrap();
            }
            let flow = network.join(Way::Out, 2, loopback, || 0).unwrap();
            // Counters are not read again before that.
            std::thread::sleep(OLD);
            network.uses(Way::Out).unwrap()[flow.place].all_bytes_per_s
        };
        // Other tests use loopback too, now and then. Traffic that is not dropped would show every
        // time.
        let least = (0..40).map(|_| seen()).find(|bytes_per_s| *bytes_per_s < 16 << 20);
        assert!(least.is_some());
    }

    #[test]
    fn bytes_held_in_sockets_are_not_other_traffic() {
        let entry = |bytes_per_s, before_bytes_per_s| Entry {
            number: 0,
            way: Way::Out,
            place: 0,
            migration: 0,
            counter: Box::new(|| 0),
            last_bytes: 0,
            bytes_per_s,
            before_bytes_per_s,
            ended_at: None,
        };
        assert!((entry(5e6, 6e6).used() - 6e6).abs() < 1.0);
        assert!((entry(5e6, 1e6).used() - 5e6).abs() < 1.0);
        assert!((entry(5e6, 100e6).used() - 9e6).abs() < 1.0);
    }
}
