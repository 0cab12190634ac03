//! Proxies between two agents, one for each direction in which they connect, that delay bytes.
//! Bytes of a connection stay in order; the connections of a migration overtake one another.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use lab::hosts::{Hosts, RUN_DIR};
use lab_guest::random::Random;
use parking_lot::{Condvar, Mutex};

use crate::world::Side;

const AGENTS_PORT: u16 = 7800;
/// On each host's own address; connections to it lead to the other host's agent.
const PROXYS_PORT: u16 = 7801;
/// Bytes read at a time, and delayed together.
const PIECE_BYTES: usize = 64 << 10;
/// Receive buffer of a connection, small enough for the sender to notice that nothing gets through.
const KEPT_BYTES: usize = 16 << 10;
/// Interval of a trickle.
const DROP_EVERY: Duration = Duration::from_secs(5);

/// Between the agents of two hosts that use [`Proxies::peers`].
pub struct Proxies {
    shared: Arc<Shared>,
    listeners: Vec<TcpListener>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    weather: Mutex<Weather>,
    changed: Condvar,
    over: AtomicBool,
    connections: Mutex<HashMap<u64, [TcpStream; 2]>>,
    next: AtomicU64,
    drops: AtomicU64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Weather {
    late_ms_max: usize,
    held_up: Option<Side>,
    flips: Option<Side>,
    trickles: Option<(Side, usize)>,
}

/// Whether the bytes are text as in guests' pages; agents' own messages have quotation marks.
#[must_use]
pub fn is_text(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == b'\n' || (*byte != b'"' && (b' '..=b'~').contains(byte)))
}

/// One direction of a connection.
struct Way {
    from: TcpStream,
    to: TcpStream,
    /// The side that sends the bytes.
    whose: Side,
    random: Random,
}

impl Proxies {
    /// Starts them, without a delay yet.
    ///
    /// # Panics
    /// If they can't listen.
    #[must_use]
    pub fn start(hosts: &Hosts, seed: u64) -> Self {
        let shared = Arc::new(Shared {
            weather: Mutex::default(),
            changed: Condvar::new(),
            over: AtomicBool::new(false),
            connections: Mutex::default(),
            next: AtomicU64::new(0),
            drops: AtomicU64::new(0),
        });
        let mut proxies =
            Self { shared: Arc::clone(&shared), listeners: Vec::new(), threads: Vec::new() };
        for (side, host, other) in [(Side::A, &hosts.a, &hosts.b), (Side::B, &hosts.b, &hosts.a)] {
            let at = SocketAddr::new(host.addresses[0], PROXYS_PORT);
            let to = SocketAddr::new(other.addresses[0], AGENTS_PORT);
            let (listener, accepting) = host.within(|| {
                let listener = TcpListener::bind(at).unwrap();
                rustix::net::sockopt::set_socket_recv_buffer_size(&listener, KEPT_BYTES).unwrap();
                let (accepting, shared) = (listener.try_clone().unwrap(), Arc::clone(&shared));
                let accept = move || shared.accept(&accepting, to, side, seed);
                let named = thread::Builder::new().name(format!("proxy-{}", side.name()));
                (listener, named.spawn(accept).unwrap())
            });
            proxies.listeners.push(listener);
            proxies.threads.push(accepting);
        }
        proxies
    }

    /// Writes the file for `--peers` that has agents connect through them; its path is the same on
    /// both hosts.
    ///
    /// # Panics
    /// If that fails.
    #[must_use]
    pub fn peers(hosts: &Hosts) -> String {
        let entry = |side: Side, address: SocketAddr| {
            let (name, nic) = (side.name(), address.ip());
            format!("[[host]]\nname = \"{name}\"\naddress = \"{address}\"\nnics = [\"{nic}\"]\n")
        };
        for (side, host) in [(Side::A, &hosts.a), (Side::B, &hosts.b)] {
            let own = entry(side, SocketAddr::new(host.addresses[0], AGENTS_PORT));
            let other = entry(side.other(), SocketAddr::new(host.addresses[0], PROXYS_PORT));
            std::fs::write(host.run_dir.join("peers-by-proxy.toml"), own + &other).unwrap();
        }
        format!("{RUN_DIR}/peers-by-proxy.toml")
    }

    /// Delays each piece by a random time of up to `by_ms_max` from now on.
    pub fn late(&self, by_ms_max: usize) {
        self.change(|weather| weather.late_ms_max = by_ms_max);
    }

    /// Holds up all bytes of a side from now on, until they get through all at once.
    pub fn hold_up(&self, side: Side) {
        self.change(|weather| weather.held_up = Some(side));
    }

    /// Lets bytes of a side get through as a trickle from now on: `bytes` every five seconds, in
    /// each connection.
    pub fn trickle(&self, side: Side, bytes: usize) {
        self.change(|weather| weather.trickles = Some((side, bytes)));
    }

    /// How often a trickle has let bytes through so far, on all connections.
    #[must_use]
    pub fn drops(&self) -> u64 {
        self.shared.drops.load(Relaxed)
    }

    /// Number of open connections.
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.shared.connections.lock().len() as u64
    }

    /// Flips one bit in the next page of text that a side sends uncompressed, like a broken network
    /// card whose checksums are right.
    pub fn flip_a_bit(&self, side: Side) {
        self.change(|weather| weather.flips = Some(side));
    }

    /// Whether the bit was flipped.
    #[must_use]
    pub fn has_flipped(&self) -> bool {
        self.shared.weather.lock().flips.is_none()
    }

    /// Lets everything through again.
    pub fn mend(&self) {
        self.change(|weather| *weather = Weather::default());
    }

    fn change(&self, change: impl FnOnce(&mut Weather)) {
        change(&mut self.shared.weather.lock());
        self.shared.changed.notify_all();
    }
}

impl Drop for Proxies {
    fn drop(&mut self) {
        self.shared.over.store(true, Relaxed);
        self.mend();
        for listener in &self.listeners {
            // Wakes the thread that accepts.
            let _ = rustix::net::shutdown(listener, rustix::net::Shutdown::Both);
        }
        for stream in self.shared.connections.lock().values().flatten() {
            let _ = stream.shutdown(Shutdown::Both);
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Accepts the connections of `caller`, and forwards each.
    fn accept(self: &Arc<Self>, listener: &TcpListener, to: SocketAddr, caller: Side, seed: u64) {
        thread::scope(|scope| {
            while let Ok((from, _)) = listener.accept() {
                if self.over.load(Relaxed) {
                    return;
                }
                scope.spawn(move || {
                    // The caller's connection closes if the agent can't be reached.
                    let _ = self.carry(from, to, caller, seed);
                });
            }
        });
    }

    fn carry(
        &self,
        from: TcpStream,
        to: SocketAddr,
        caller: Side,
        seed: u64,
    ) -> std::io::Result<()> {
        let to = TcpStream::connect_timeout(&to, Duration::from_secs(3))?;
        let number = self.next.fetch_add(1, Relaxed);
        for stream in [&from, &to] {
            stream.set_nodelay(true)?;
        }
        let clones = [from.try_clone()?, to.try_clone()?];
        self.connections.lock().insert(number, clones);
        let there = Way {
            from: from.try_clone()?,
            to: to.try_clone()?,
            whose: caller,
            random: Random::new(seed, 2 * number),
        };
        let whose = caller.other();
        let back = Way { from: to, to: from, whose, random: Random::new(seed, 2 * number + 1) };
        if !self.over.load(Relaxed) {
            thread::scope(|scope| {
                scope.spawn(|| self.pass_on(there));
                self.pass_on(back);
            });
        }
        self.connections.lock().remove(&number);
        Ok(())
    }

    /// Forwards bytes until the connection ends, in order or not.
    fn pass_on(&self, mut way: Way) {
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            let bytes_max = self.bytes_max(way.whose);
            match way.from.read(&mut piece[..bytes_max]) {
                Ok(0) => break,
                Ok(bytes) => {
                    self.wait(way.whose, &mut way.random);
                    self.flip(way.whose, &mut piece[..bytes]);
                    if way.to.write_all(&piece[..bytes]).is_err() {
                        // The sender has to notice it, too.
                        let _ = way.from.shutdown(Shutdown::Both);
                        return;
                    }
                }
                Err(_) => {
                    let _ = way.to.shutdown(Shutdown::Both);
                    return;
                }
            }
        }
        self.wait(way.whose, &mut way.random);
        let _ = way.to.shutdown(Shutdown::Write);
    }

    /// Flips a bit in a page of text.
    fn flip(&self, whose: Side, piece: &mut [u8]) {
        let mut weather = self.weather.lock();
        if weather.flips != Some(whose) {
            return;
        }
        if let Some(text) = piece.chunks_exact_mut(512).find(|bytes| is_text(bytes)) {
            text[256] ^= 1;
            weather.flips = None;
        }
    }

    /// Bytes to pass on at a time.
    fn bytes_max(&self, whose: Side) -> usize {
        match self.weather.lock().trickles {
            Some((side, bytes)) if side == whose => bytes.min(PIECE_BYTES),
            _ => PIECE_BYTES,
        }
    }

    /// Waits as long as the weather demands.
    fn wait(&self, whose: Side, random: &mut Random) {
        let mut weather = self.weather.lock();
        while weather.held_up == Some(whose) {
            self.changed.wait(&mut weather);
        }
        if weather.trickles.is_some_and(|(side, _)| side == whose) {
            self.changed.wait_for(&mut weather, DROP_EVERY);
            self.drops.fetch_add(1, Relaxed);
        }
        let late_ms_max = weather.late_ms_max;
        drop(weather);
        if late_ms_max > 0 {
            thread::sleep(Duration::from_millis(random.below(late_ms_max) as u64));
        }
    }
}
