//! Batches over real sockets into real memory, plain and encrypted, with lanes
//! that are cut.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread::{self, JoinHandle};

use identity::{Authority, CertificateRequest, Identity, Security, Subject};
use page::{BlockId, Encoding, Epoch, PAGE_BYTES, PageIndex, Pool, SLOT_BYTES};
use parking_lot::Mutex;
use placer::{BlockPlan, Feeder, Placement, Placer};
use ram::Mapping;
use transport::{Endpoint, Incoming, LaneEnd, Lanes, LanesError, LanesPlan};
use wire::{LaneHeader, Preamble, Reply, Token, Versions};

const PAGES: u32 = 2048;
const EPOCHS: u32 = 6;

/// A destination: accepts lanes, places their batches, and cuts connection number
/// `n` after `cut_after(n)` bytes.
struct Destination {
    address: SocketAddr,
    mapping: Arc<Mapping>,
    stopping: Arc<AtomicBool>,
    accepting: Option<JoinHandle<()>>,
    accepted: Arc<AtomicU64>,
    /// Connections that resumed an earlier TLS session.
    resumed: Arc<AtomicU64>,
    received_bytes: Arc<AtomicU64>,
    /// The source's security.
    security: Security,
}

/// Two hosts with certificates of one CA.
fn certified() -> [Security; 2] {
    let dir = tempfile::tempdir().unwrap();
    let ca = dir.path().join("ca");
    Authority::create(&ca, 1).unwrap();
    let authority = Authority::open(&ca).unwrap();
    ["source", "destination"].map(|name| {
        let subject = Subject::host(name).unwrap();
        let request =
            CertificateRequest { out: dir.path().join(name), subject, days: 1, replace: false };
        let files = authority.issue(&request).unwrap().files;
        Security::Tls(Arc::new(Identity::load(name, &files).unwrap()))
    })
}

const PLAIN: [Security; 2] = [Security::Plaintext, Security::Plaintext];

impl Destination {
    fn start(cut_after: impl Fn(u64) -> Option<usize> + Send + 'static) -> Self {
        Self::start_as(PLAIN, cut_after)
    }

    /// Both hosts' security, the source's first.
    fn start_as(
        [security, own]: [Security; 2],
        cut_after: impl Fn(u64) -> Option<usize> + Send + 'static,
    ) -> Self {
        let mapping = Mapping::own(u64::from(PAGES) * PAGE_BYTES as u64);
        let mapping = Arc::new(mapping);
        let (qemu, _other_end) = UnixStream::pair().unwrap();
        let feeder = Feeder::start(qemu, page::Pool::new(1 << 20)).unwrap();
        let plan = BlockPlan {
            name: "pc.ram".to_owned(),
            bytes: u64::from(PAGES) * PAGE_BYTES as u64,
            placement: Placement::Mapped(Arc::clone(&mapping)),
        };
        let placer = Arc::new(Placer::new(vec![plan], feeder.handle()).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let stopping = Arc::new(AtomicBool::new(false));
        let accepted = Arc::new(AtomicU64::new(0));
        let received_bytes = Arc::new(AtomicU64::new(0));
        let resumed = Arc::new(AtomicU64::new(0));
        let accepting = thread::spawn({
            let (stopping, accepted) = (Arc::clone(&stopping), Arc::clone(&accepted));
            let (received_bytes, resumed) = (Arc::clone(&received_bytes), Arc::clone(&resumed));
            move || {
                let _feeder = feeder;
                let threads = Mutex::new(Vec::new());
                loop {
                    let (stream, _) = listener.accept().unwrap();
                    if stopping.load(SeqCst) {
                        break;
                    }
                    let cut = cut_after(accepted.fetch_add(1, SeqCst));
                    let placer = Arc::clone(&placer);
                    let (received, resumed) = (Arc::clone(&received_bytes), Arc::clone(&resumed));
                    let own = own.clone();
                    let serve = move || serve(stream, cut, &own, &placer, &received, &resumed);
                    threads.lock().push(thread::spawn(serve));
                }
                for thread in threads.into_inner() {
                    thread.join().unwrap();
                }
            }
        });
        let accepting = Some(accepting);
        Self { address, mapping, stopping, accepting, accepted, resumed, received_bytes, security }
    }

    fn page(&self, page: u32) -> Vec<u8> {
        let mut bytes = vec![0; PAGE_BYTES];
        self.mapping.read(PageIndex(page).offset(), &mut bytes).unwrap();
        bytes
    }
}

impl Drop for Destination {
    fn drop(&mut self) {
        self.stopping.store(true, SeqCst);
        drop(TcpStream::connect(self.address));
        self.accepting.take().unwrap().join().unwrap();
    }
}

fn place_all(
    lane: &mut Incoming,
    placer: &Placer,
    received_bytes: &AtomicU64,
) -> Result<(), LaneEnd> {
    while let Some(header) = lane.next_header()? {
        received_bytes.fetch_add(header.batch_bytes(), SeqCst);
        let LaneHeader::Pages(header) = header else { panic!("only pages are sent") };
        lane.place(header, placer)?;
    }
    Ok(())
}

fn serve(
    stream: TcpStream,
    cut: Option<usize>,
    own: &Security,
    placer: &Arc<Placer>,
    received: &AtomicU64,
    resumed: &AtomicU64,
) {
    let stream = match cut {
        None => stream,
        Some(bytes) => through_a_proxy(stream, bytes),
    };
    // Either handshake may be cut short.
    let mut preamble = [0; Preamble::BYTES];
    let Ok(mut connection) = own.accept(stream) else { return };
    if connection.read_exact(&mut preamble).is_err() {
        return;
    }
    Preamble::parse(&preamble, Versions::SPOKEN).unwrap();
    if connection.write_all(&Reply::Welcome.to_bytes(wire::VERSION)).is_err() {
        return;
    }
    resumed.fetch_add(u64::from(connection.is_resumed()), SeqCst);
    if let Err(error) = place_all(&mut Incoming::new(connection), placer, received) {
        assert!(error.only_this_lane(), "{error}");
    }
}

/// A connection that passes on `bytes` from the source, after which both ends see
/// it break.
fn through_a_proxy(outer: TcpStream, bytes: usize) -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let inner = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    let back = (inner.try_clone().unwrap(), outer.try_clone().unwrap());
    thread::spawn(move || std::io::copy(&mut &back.0, &mut &back.1));
    thread::spawn(move || {
        let mut limited = (&outer).take(bytes as u64);
        let _ = std::io::copy(&mut limited, &mut &inner);
        let _ = outer.shutdown(Shutdown::Both);
        let _ = inner.shutdown(Shutdown::Both);
    });
    far
}

fn content(page: u32, epoch: u32) -> Vec<u8> {
    let mut state = (u64::from(page) << 32 | u64::from(epoch)) + 1;
    let mut bytes = Vec::with_capacity(PAGE_BYTES);
    while bytes.len() < PAGE_BYTES {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Half of it repeats, so it shrinks.
        bytes.extend_from_slice(&state.to_le_bytes());
        bytes.extend_from_slice(&[7; 8]);
    }
    bytes
}

/// Whether an epoch carries a page: all in the first, then ever fewer.
fn carried(page: u32, epoch: u32) -> bool {
    page.is_multiple_of(epoch + 1)
}

fn newest(page: u32) -> u32 {
    (0..EPOCHS).rev().find(|epoch| carried(page, *epoch)).unwrap()
}

/// Sends all epochs over `lanes` connections, and checks every byte.
fn send_all(lanes: usize, encoding: Encoding, destination: &Destination) -> u32 {
    send_at(None, lanes, encoding, destination)
}

fn send_at(pace: Option<u64>, lanes: usize, encoding: Encoding, destination: &Destination) -> u32 {
    let pool = Pool::new(24 * SLOT_BYTES);
    let endpoint = Endpoint { local: None, remote: destination.address };
    let plan = LanesPlan {
        endpoints: vec![endpoint; lanes],
        peer: "destination".to_owned(),
        security: destination.security.clone(),
        token: Token([1; 16]),
        encoding,
        stale_filter: None,
        deltas: None,
    };
    let carrier = Lanes::start(plan).unwrap();
    (0..lanes).for_each(|lane| carrier.set_pace(lane, pace));
    for epoch in 0..EPOCHS {
        let mut batch = pool.take().unwrap();
        batch.epoch = Epoch(epoch);
        for page in (0..PAGES).filter(|page| carried(*page, epoch)) {
            if batch.room() == 0 {
                carrier.submit(std::mem::replace(&mut batch, pool.take().unwrap())).unwrap();
                batch.epoch = Epoch(epoch);
            }
            let at = batch.bodies().len() * PAGE_BYTES;
            batch.buffer_mut()[at..at + PAGE_BYTES].copy_from_slice(&content(page, epoch));
            batch.push_body(PageIndex(page), at);
        }
        batch.block = BlockId(0);
        carrier.submit(batch).unwrap();
    }
    carrier.wait_drained().unwrap();
    assert_eq!(pool.out_bytes(), 0, "every buffer is back");
    for page in 0..PAGES {
        assert!(destination.page(page) == content(page, newest(page)), "page {page}");
    }
    let deaths = carrier.meters().map(|(_, meter)| meter.deaths.load(SeqCst)).sum();
    if deaths == 0 {
        assert_eq!(destination.received_bytes.load(SeqCst), carrier.wire_bytes());
    }
    carrier.finish();
    deaths
}

#[test]
fn one_two_and_eight_lanes_deliver_every_newest_page() {
    for lanes in [1, 2, 8] {
        for encoding in [Encoding::Raw, Encoding::Lz4, Encoding::Zstd] {
            let destination = Destination::start(|_| None);
            assert_eq!(send_all(lanes, encoding, &destination), 0);
        }
    }
}

#[test]
fn encrypted_lanes_deliver_the_same_and_resume() {
    let hosts = certified();
    for (lanes, encoding) in [(1, Encoding::Zstd), (8, Encoding::Raw), (8, Encoding::Lz4)] {
        let destination = Destination::start_as(hosts.clone(), |_| None);
        assert_eq!(send_all(lanes, encoding, &destination), 0);
        let [resumed, accepted] =
            [&destination.resumed, &destination.accepted].map(|count| count.load(SeqCst));
        // The first connection ever has no session to resume.
        assert!(lanes == 1 || resumed + 1 >= accepted, "{resumed} of {accepted}");
    }
}

#[test]
fn encrypted_lanes_that_are_cut_lose_nothing_either() {
    let hosts = certified();
    for seed in 1..6u64 {
        let cut =
            move |nth: u64| (nth < 5).then_some((seed * (nth + 1) * 77_773 % 900_000) as usize);
        let destination = Destination::start_as(hosts.clone(), cut);
        assert!(send_all(1 + (seed % 3) as usize, Encoding::Raw, &destination) > 0);
    }
}

#[test]
fn lanes_that_are_cut_anywhere_come_back_and_lose_nothing() {
    for seed in 1..12u64 {
        // The first five connections are cut, in headers, tables and bodies.
        let cut =
            move |nth: u64| (nth < 5).then_some((seed * (nth + 1) * 77_773 % 900_000) as usize);
        let destination = Destination::start(cut);
        let lanes = 1 + (seed % 3) as usize;
        assert!(send_all(lanes, Encoding::Raw, &destination) > 0);
        assert!(destination.accepted.load(SeqCst) > lanes as u64);
    }
}

#[test]
fn lanes_with_a_pace_deliver_the_same() {
    let destination = Destination::start(|_| None);
    assert_eq!(send_at(Some(100_000_000), 2, Encoding::Raw, &destination), 0);
}

/// At any pace, each lane still writes at most one batch when it is stopped.
#[test]
fn lanes_that_crawl_can_be_stopped() {
    let destination = Destination::start(|_| None);
    let endpoint = Endpoint { local: None, remote: destination.address };
    let plan = LanesPlan {
        endpoints: vec![endpoint],
        peer: String::new(),
        security: Security::Plaintext,
        token: Token([1; 16]),
        encoding: Encoding::Raw,
        stale_filter: None,
        deltas: None,
    };
    let lanes = Lanes::start(plan).unwrap();
    lanes.set_pace(0, Some(1));
    lanes.set_pace(7, Some(1));
    let pool = Pool::new(4 * SLOT_BYTES);
    let mut batch = pool.take().unwrap();
    batch.push_body(PageIndex(0), 0);
    lanes.submit(batch).unwrap();
    lanes.stop();
    assert_eq!(pool.out_bytes(), 0);
}

/// A destination that reads very slowly. Every byte that it reads tells the kernel
/// that the connection works, so only stopping the lanes can end a write.
#[test]
fn lanes_that_are_read_very_slowly_can_be_stopped() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    socket2::SockRef::from(&listener).set_recv_buffer_size(32 << 10).unwrap();
    let endpoint = Endpoint { local: None, remote: listener.local_addr().unwrap() };
    let reads = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&reads);
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; Preamble::BYTES]).unwrap();
        stream.write_all(&Reply::Welcome.to_bytes(wire::VERSION)).unwrap();
        // A batch takes dozens of these reads.
        let mut piece = vec![0; 16 << 10];
        while stream.read(&mut piece).is_ok_and(|bytes| bytes > 0) {
            counted.fetch_add(1, SeqCst);
            thread::sleep(std::time::Duration::from_secs(1));
        }
    });
    let plan = LanesPlan {
        endpoints: vec![endpoint],
        peer: String::new(),
        security: Security::Plaintext,
        token: Token([1; 16]),
        encoding: Encoding::Raw,
        stale_filter: None,
        deltas: None,
    };
    let lanes = Lanes::start(plan).unwrap();
    let pool = Pool::new(256 * SLOT_BYTES);
    for _ in 0..256 {
        let mut batch = pool.take().unwrap();
        (0..128).for_each(|page| batch.push_body(PageIndex(page), page as usize * PAGE_BYTES));
        lanes.submit(batch).unwrap();
    }
    // The kernel's buffers are full, so the rest of a batch is in a blocked write.
    while reads.load(SeqCst) < 3 {
        thread::sleep(std::time::Duration::from_millis(10));
    }
    lanes.stop();
    let read = reads.load(SeqCst);
    assert!(read <= 4, "they stopped when the destination had read on, {read} times");
    assert_eq!(pool.out_bytes(), 0);
}

#[test]
fn lanes_that_are_stopped_give_everything_back() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = Endpoint { local: None, remote: silent.local_addr().unwrap() };
    let plan = LanesPlan {
        endpoints: vec![endpoint],
        peer: String::new(),
        security: Security::Plaintext,
        token: Token([1; 16]),
        encoding: Encoding::Raw,
        stale_filter: None,
        deltas: None,
    };
    let lanes = Lanes::start(plan).unwrap();
    let pool = Pool::new(4 * SLOT_BYTES);
    let mut batch = pool.take().unwrap();
    batch.push_fill(PageIndex(0), 0);
    lanes.submit(batch).unwrap();
    drop(silent);
    lanes.stop();
    assert_eq!(pool.out_bytes(), 0);
    assert!(matches!(lanes.submit(pool.take().unwrap()), Err(LanesError::Stopped)));
}
