//! What stands between two agents: a proxy for each direction in which they
//! call, which lets bytes through late. In each connection they stay in order;
//! the connections of a migration overtake one another.

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
/// At each host's own address: what is said to it goes to the other one's agent.
const PROXYS_PORT: u16 = 7801;
/// What is read at a time, and is late together.
const PIECE_BYTES: usize = 64 << 10;
/// The kernel takes no more of a connection than that: what does not get through shows
/// at who says it.
const KEPT_BYTES: usize = 16 << 10;
/// In a trickle.
const DROP_EVERY: Duration = Duration::from_secs(5);

/// Between the agents of two hosts that were told of [`Proxies::peers`].
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

/// Whether it is of the text that guests fill pages with: agents' own messages have
/// quotation marks.
#[must_use]
pub fn is_text(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == b'\n' || (*byte != b'"' && (b' '..=b'~').contains(byte)))
}

/// What a connection carries in one direction.
struct Way {
    from: TcpStream,
    to: TcpStream,
    /// Whose bytes.
    whose: Side,
    random: Random,
}

impl Proxies {
    /// Starts them; nothing is late yet.
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

    /// Writes what an agent is told by `--peers`, to call through them; the same
    /// path at both hosts.
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

    /// From now on each piece is late by up to so much, as chance has it.
    pub fn late(&self, by_ms_max: usize) {
        self.change(|weather| weather.late_ms_max = by_ms_max);
    }

    /// From now on nothing that a side says gets through, until it does all at
    /// once.
    pub fn hold_up(&self, side: Side) {
        self.change(|weather| weather.held_up = Some(side));
    }

    /// From now on what a side says gets through as a trickle: so many bytes every
    /// five seconds, in each connection.
    pub fn trickle(&self, side: Side, bytes: usize) {
        self.change(|weather| weather.trickles = Some((side, bytes)));
    }

    /// How often something of a trickle got through until now, on any connection.
    #[must_use]
    pub fn drops(&self) -> u64 {
        self.shared.drops.load(Relaxed)
    }

    /// How many connections there are.
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.shared.connections.lock().len() as u64
    }

    /// One bit flips in the next page of text that a side sends as it is, as a
    /// broken network card does it whose checksums are right.
    pub fn flip_a_bit(&self, side: Side) {
        self.change(|weather| weather.flips = Some(side));
    }

    /// Whether it has.
    #[must_use]
    pub fn has_flipped(&self) -> bool {
        self.shared.weather.lock().flips.is_none()
    }

    /// Everything gets through again.
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
            // Wakes who accepts.
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
    /// Takes the calls of `caller`, and carries each.
    fn accept(self: &Arc<Self>, listener: &TcpListener, to: SocketAddr, caller: Side, seed: u64) {
        thread::scope(|scope| {
            while let Ok((from, _)) = listener.accept() {
                if self.over.load(Relaxed) {
                    return;
                }
                scope.spawn(move || {
                    // Who can't be reached is not: the caller learns it so.
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

    /// To its end, in order or not.
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
                        // Neither hears the other any more.
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

    /// So much is passed on at a time.
    fn bytes_max(&self, whose: Side) -> usize {
        match self.weather.lock().trickles {
            Some((side, bytes)) if side == whose => bytes.min(PIECE_BYTES),
            _ => PIECE_BYTES,
        }
    }

    /// As long as the weather has it.
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
