//! The lanes of one arrival. They may connect before the block list is known, and end with the
//! arrival.

mod reading;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crossbeam_channel::Sender;
use data_threads::{DataThreads, SchedParams};
use identity::{Closer, Connection};
use parking_lot::{Condvar, Mutex};
use transport::{BlockSink, Incoming, Unpackers, thread_cpu};

use super::by_name::ByName;
use crate::network::{Flow, Network, Way};
use crate::resources::{LANES_MAX, Resources};
pub(crate) use reading::Memory;
use reading::Pages;

/// Twice the lanes, because a lane's old connection may not be known to be dead when the next one
/// replaces it.
pub(crate) const CONNECTIONS_MAX: usize = 2 * LANES_MAX;

#[derive(Default)]
struct State {
    /// None before the block list is known.
    pages: Option<Pages>,
    /// None: no disks move.
    disks: Option<Arc<dyn BlockSink>>,
    over: bool,
    /// Connections being served, each by its own thread.
    connections: HashMap<u64, Closer>,
    begun: u64,
}

impl State {
    fn by_name(&self) -> Option<&Arc<ByName>> {
        self.pages.as_ref()?.by_name.as_ref()
    }
}

/// The state that the lanes of one migration share with its arrival.
pub(crate) struct ArrivingLanes {
    state: Mutex<State>,
    changed: Condvar,
    /// Receives errors that end the migration.
    broken: Sender<String>,
    /// The source host, if its certificate names it: its lanes must come from there too.
    peer: Option<String>,
    cpu_ns: AtomicU64,
    threads: Arc<DataThreads>,
    pub(super) network: Arc<Network>,
    unpackers: Arc<Unpackers>,
    migration: u64,
    /// By lane number, from its first connection on.
    counted: Mutex<Vec<Option<Counted>>>,
}

/// The bytes that a lane has received, over all its connections, and its NIC.
struct Counted {
    received_bytes: Arc<AtomicU64>,
    flow: Option<Flow>,
}

impl ArrivingLanes {
    pub(crate) fn new(broken: Sender<String>, resources: &Resources, peer: Option<String>) -> Self {
        let network = &resources.network;
        let panicked = broken.clone();
        let threads = DataThreads::new(SchedParams::default(), move |thread| {
            let _ = panicked.try_send(format!(
                "a fault in the agent: its thread {thread} panicked; see the agent's log"
            ));
        });
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            broken,
            peer,
            cpu_ns: AtomicU64::new(0),
            threads,
            network: Arc::clone(network),
            unpackers: Unpackers::new(&resources.unpackers),
            migration: network.migration(),
            counted: Mutex::default(),
        }
    }

    /// Whether a connection from this host may be one of its lanes.
    pub(crate) fn are_of(&self, peer: Option<&str>) -> bool {
        let are = self.peer.as_deref() == peer;
        if !are {
            tracing::warn!(from = self.peer, peer, "a lane is from another host than its VM");
        }
        are
    }

    /// The threads that serve lanes and disks.
    pub(crate) fn threads(&self) -> &Arc<DataThreads> {
        &self.threads
    }

    /// For each lane, the index of its NIC.
    pub(crate) fn places(&self) -> Vec<Option<u16>> {
        let place =
            |counted: &Option<Counted>| u16::try_from(counted.as_ref()?.flow.as_ref()?.place).ok();
        self.counted.lock().iter().map(place).collect()
    }

    /// The byte counter of lane `number`, which uses this connection now.
    fn counter(&self, connection: &Connection, number: u16) -> Arc<AtomicU64> {
        let number = usize::from(number);
        let mut counted = self.counted.lock();
        if number >= LANES_MAX {
            return Arc::default();
        }
        if counted.len() <= number {
            counted.resize_with(number + 1, || None);
        }
        let lane = counted[number].get_or_insert_with(|| {
            let received_bytes = Arc::new(AtomicU64::new(0));
            let bytes = Arc::clone(&received_bytes);
            let flow = connection.local_address().ok().and_then(|address| {
                let counter = move || bytes.load(Relaxed);
                let joined = self.network.join(Way::In, self.migration, address.ip(), counter);
                joined.inspect_err(|error| tracing::warn!(%error, "a lane is not paced")).ok()
            });
            Counted { received_bytes, flow }
        });
        Arc::clone(&lane.received_bytes)
    }

    /// Lets batches be placed, now that the block list is known, or that there is a domain of Xen.
    pub(crate) fn open(&self, memory: Memory, by_name: Option<Arc<ByName>>) {
        self.state.lock().pages = Some(Pages { memory, by_name });
        self.changed.notify_all();
    }

    /// Serves one connection to its end, on its own thread.
    pub(crate) fn carry(&self, connection: Connection, number: u16) {
        let Some(served) = self.begin(&connection) else { return };
        let member = self.threads.join();
        let received_bytes = self.counter(&connection, number);
        let outcome =
            self.read(&mut Incoming::within(&self.unpackers, connection), &received_bytes);
        match outcome {
            Ok(()) => {}
            Err(error) if error.only_this_lane() => {
                tracing::info!(lane = number, %error, "lane ended");
            }
            Err(error) => {
                // Only the first error matters; a full channel has one already.
                let _ = self.broken.try_send(error.to_string());
            }
        }
        drop(member);
        let cpu = u64::try_from(thread_cpu().as_nanos()).unwrap_or(u64::MAX);
        self.cpu_ns.fetch_add(cpu, Relaxed);
        drop(served);
    }

    fn begin(&self, connection: &Connection) -> Option<Served<'_>> {
        let mut state = self.state.lock();
        if state.over || state.connections.len() >= CONNECTIONS_MAX {
            return None;
        }
        let number = state.begun;
        state.begun += 1;
        state.connections.insert(number, connection.closer());
        Some(Served { lanes: self, number })
    }

    /// Frees buffers that no lane uses, and memory for pages by name. To be called now and then.
    pub(crate) fn trim(&self) {
        self.unpackers.trim();
        // Locked, so that this is never the last reference: dropping that one may take long.
        let state = self.state.lock();
        if let Some(by_name) = state.by_name() {
            by_name.trim();
        }
    }

    /// Bytes that lanes have received so far.
    pub(crate) fn received_bytes(&self) -> u64 {
        let counted = self.counted.lock();
        counted.iter().flatten().map(|lane| lane.received_bytes.load(Relaxed)).sum()
    }

    /// Bytes that have arrived so far, over lanes and from disks.
    pub(crate) fn came_bytes(&self) -> u64 {
        let by_name = self.state.lock().by_name().cloned();
        let stored = by_name.map_or(0, |by_name| by_name.stored().read_bytes);
        self.received_bytes() + stored
    }

    /// The sender for errors that end the migration.
    pub(crate) fn broken(&self) -> Sender<String> {
        self.broken.clone()
    }

    /// The VM's disks move too. Called before any lane can connect.
    pub(crate) fn with_disks(&self, disks: Arc<dyn BlockSink>) {
        self.state.lock().disks = Some(disks);
    }

    /// Ends all lanes, without waiting for them.
    pub(crate) fn shut(&self) {
        let mut state = self.state.lock();
        state.over = true;
        for closer in state.connections.values() {
            closer.close();
        }
        self.changed.notify_all();
    }

    /// Ends all lanes, and waits until none writes any more: a lane that the source gave up long
    /// ago may still hold half of a batch that has since arrived by another.
    pub(crate) fn end(&self) {
        while !self.end_within(Duration::from_secs(3600)) {}
    }

    /// As [`ArrivingLanes::end`], for a VM that doesn't arrive; returns whether all have ended. The
    /// others end as soon as whatever they wait for permits.
    pub(crate) fn end_within(&self, limit: Duration) -> bool {
        self.shut();
        let mut state = self.state.lock();
        let is_served = |state: &mut State| !state.connections.is_empty();
        if self.changed.wait_while_for(&mut state, is_served, limit).timed_out()
            && is_served(&mut state)
        {
            return false;
        }
        let pages = state.pages.take();
        if let Some(Pages { memory: Memory::Qemu(placer), .. }) = &pages {
            placer.close();
        }
        drop(state);
        if pages.is_some() {
            // Tables as large as a part of the VM's RAM, disks whose storage may hang, and a thread
            // that may be writing to the source: the VM may stand still meanwhile. If there is no
            // thread, the closure is dropped here.
            let _ = data_threads::spawn("arrived", move || drop(pages));
        }
        true
    }

    /// CPU time of the lanes' threads that have ended.
    pub(crate) fn cpu(&self) -> Duration {
        Duration::from_nanos(self.cpu_ns.load(Relaxed))
    }
}

/// A connection that is served, until this is dropped.
struct Served<'l> {
    lanes: &'l ArrivingLanes,
    number: u64,
}

impl Drop for Served<'_> {
    fn drop(&mut self) {
        self.lanes.state.lock().connections.remove(&self.number);
        self.lanes.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::os::unix::net::UnixStream;
    use std::thread;

    use identity::Security;
    use page::{BlockBatch, Encoding, Pool, SLOT_BYTES};
    use placer::{Feeder, Placer};
    use transport::{Endpoint, Lanes, LanesPlan, TakeError};
    use wire::{Preamble, Reply, Token};

    use super::*;

    /// A sink that panics while it holds a batch.
    struct Faulty;

    impl BlockSink for Faulty {
        fn room(&self) -> Result<BlockBatch, TakeError> {
            panic!("on purpose")
        }

        fn take(&self, _: BlockBatch) -> Result<(), TakeError> {
            panic!("on purpose")
        }
    }

    /// Without this, its lane would reconnect, and the migration would only look slow.
    #[test]
    fn a_thread_that_panics_ends_the_migration() {
        let (broken, inbox) = crossbeam_channel::bounded(1);
        let lanes = ArrivingLanes::new(broken, &Resources::new(16 << 20, Vec::new()), None);
        lanes.with_disks(Arc::new(Faulty));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let remote = listener.local_addr().unwrap();
        let destination = std::thread::Builder::new().name("peer-7".to_owned()).spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut connection = Connection::plain(stream);
            connection.read_exact(&mut [0; Preamble::BYTES]).unwrap();
            connection.write_all(&Reply::Welcome.to_bytes(wire::VERSION)).unwrap();
            lanes.carry(connection, 0);
        });
        let source = Lanes::start(LanesPlan {
            endpoints: vec![Endpoint { local: None, remote }],
            peer: String::new(),
            security: Security::Plaintext,
            token: Token([1; 16]),
            encoding: Encoding::Raw,
            stale_filter: None,
            deltas: None,
        });
        let source = source.unwrap();
        let mut blocks = Pool::new(SLOT_BYTES).take_blocks().unwrap();
        blocks.push_data(4096);
        source.submit(blocks).unwrap();
        let why = inbox.recv().unwrap();
        assert!(why.contains("a fault in the agent") && why.contains("peer-7"), "{why}");
        assert!(destination.unwrap().join().is_err());
        source.stop();
    }

    /// Reports the thread that drops it.
    struct Freed(Sender<Option<String>>);

    impl Freed {
        fn is_kept(&self) {}
    }

    impl Drop for Freed {
        fn drop(&mut self) {
            let _ = self.0.send(thread::current().name().map(str::to_owned));
        }
    }

    /// That may take seconds, and the VM stands still until QEMU has its device state.
    #[test]
    fn what_places_pages_is_freed_by_another_thread() {
        let (broken, _inbox) = crossbeam_channel::bounded(1);
        let lanes = ArrivingLanes::new(broken, &Resources::new(16 << 20, Vec::new()), None);
        let (qemu, _other_end) = UnixStream::pair().unwrap();
        let feeder = Feeder::start(qemu, page::Pool::new(1 << 20)).unwrap();
        let (tell, told) = crossbeam_channel::bounded(1);
        let freed = Freed(tell);
        feeder.notify_sections(move || freed.is_kept());
        let placer = Placer::new(Vec::new(), feeder.handle()).unwrap();
        // The placer's handle is the last one now.
        drop(feeder);
        lanes.open(Memory::Qemu(Arc::new(placer)), None);
        lanes.end();
        assert_eq!(told.recv().unwrap().as_deref(), Some("arrived"));
    }

    #[test]
    fn a_lane_must_come_from_the_source_host() {
        let lanes = |peer: Option<&str>| {
            let (broken, _) = crossbeam_channel::bounded(1);
            ArrivingLanes::new(
                broken,
                &Resources::new(16 << 20, Vec::new()),
                peer.map(str::to_owned),
            )
        };
        assert!(lanes(Some("host-a")).are_of(Some("host-a")));
        assert!(!lanes(Some("host-a")).are_of(Some("host-c")));
        // Without certificates, hosts are not identified.
        assert!(lanes(None).are_of(None));
    }
}
