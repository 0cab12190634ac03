//! Pages by name: whatever the destination answers, and wherever connections are cut, each page
//! arrives, as bytes or from the destination's own provider.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Barrier};
use std::thread;

use audit::Delivery;
use content::{Domain, Key, Name};
use data_threads::{DataThreads, SchedParams};
use identity::Security;
use page::{BlockId, Encoding, Epoch, PAGE_BYTES, PageIndex, PageSet, Pool, SLOT_BYTES};
use parking_lot::Mutex;
use placer::{BlockPlan, Feeder, Placement, Placer};
use ram::{Mapping, Numbered};
use transport::{Endpoint, Incoming, LaneEnd, Lanes, LanesPlan, Question, Sender, Sent, Work};
use wire::{
    Announced, DiskLocation, LaneHeader, NamedHeader, NamedTables, Preamble, Reply, Tables, Token,
    Versions,
};

use super::*;

const PAGES: u32 = 1500;

fn content(page: u32) -> Vec<u8> {
    let byte = |at: u32| (page.wrapping_mul(31) ^ (at / 64)).to_le_bytes()[0];
    (0..).take(PAGE_BYTES).map(byte).collect()
}

/// What a page contains before QEMU hands it over.
fn content_ahead(page: u32) -> Vec<u8> {
    content(if has_changed(page) { page + 1 } else { page })
}

fn has_changed(page: u32) -> bool {
    page % 11 == 1
}

fn key() -> Key {
    Key::new(b"test", &Domain::default())
}

/// Where a disk has a page's content.
fn place_of(page: u32) -> Option<DiskLocation> {
    let sector = u64::from(page) * cachemap::PAGE_SECTORS;
    (!page.is_multiple_of(3)).then_some(DiskLocation { disk: 7, sector })
}

/// A source whose pages can be read again, and its lanes.
struct Source {
    ram: Arc<Mapping>,
    naming: Arc<Naming>,
    stage: Arc<Stage>,
    lanes: Lanes<Errand>,
    /// Announces pages on disks, if only those go by name.
    announcer: Option<Announcer>,
}

impl Source {
    fn start(lanes: usize, remote: SocketAddr, kind: Kind) -> Self {
        let Kind { encoding, of_disks, held, .. } = kind;
        let bytes = u64::from(PAGES) * PAGE_BYTES as u64;
        let (ram, numbered) = (Arc::new(Mapping::own(bytes)), Arc::new(Numbered::default()));
        for page in 0..PAGES {
            ram.write(PageIndex(page).offset(), &content_ahead(page)).unwrap();
        }
        numbered.announce([Some(Arc::clone(&ram))].into_iter());
        let rows =
            (0..PAGES).step_by(3).filter_map(|page| Some((page + 1, 2, place_of(page + 1)?)));
        let cached = Arc::new(GuestPageCache::of_rows("ram", rows));
        let readable = (0..8).map(|disk| disk == 7).collect();
        let naming = Arc::new(Naming::new(Plan {
            key: key(),
            before: None,
            shares: !of_disks,
            names_with_bodies: kind.has_missed,
            only: None,
            cached: Some((cached, readable)).filter(|_| !kind.has_missed),
            ram: numbered,
            handed_over: Arc::default(),
            sleeps: false,
            is_fixed: false,
            waits: if held { Waits::Held } else { Waits::FirstPass },
        }));
        if kind.has_missed {
            naming.found(0, 1 << 20);
        }
        naming.announce(&[Announced { name: "ram".to_owned(), bytes }], false);
        naming.all_before(Epoch(3));
        let plan = LanesPlan {
            endpoints: vec![Endpoint { local: None, remote }; lanes],
            peer: "destination".to_owned(),
            security: Security::Plaintext,
            token: Token([1; 16]),
            encoding,
            stale_filter: None,
            deltas: None,
        };
        let lanes = Lanes::new(plan, None);
        let stage = Arc::new(Stage::new(Arc::clone(&naming), Arc::clone(lanes.queue())));
        let run = Arc::clone(&stage);
        let started = lanes.start_with(move |lane| {
            lane.run(|sender| send(&run, sender), |acks| run.receive(acks));
        });
        started.unwrap();
        let threads = DataThreads::new(SchedParams::default(), |_| {});
        let announcer =
            if of_disks && held { Announcer::start(&stage, &threads).unwrap() } else { None };
        Self { ram, naming, stage, lanes, announcer }
    }

    /// QEMU hands all pages over, and none is written afterwards.
    fn hand_over(&self, pool: &Arc<Pool>) {
        let mut batch = pool.take().unwrap();
        for page in 0..PAGES {
            let (at, content) = (batch.bodies().len() * PAGE_BYTES, content(page));
            if has_changed(page) {
                self.ram.write(PageIndex(page).offset(), &content).unwrap();
            }
            batch.buffer_mut()[at..at + PAGE_BYTES].copy_from_slice(&content);
            batch.push_body(PageIndex(page), at);
            // Batches of various lengths.
            if batch.room() == 0 || page % 97 == 0 || page + 1 == PAGES {
                batch.epoch = Epoch(3);
                self.naming.hand_over(&mut batch);
                if !batch.is_empty() {
                    self.lanes.submit(batch).unwrap();
                }
                batch = pool.take().unwrap();
            }
        }
    }
}

/// The variant of a source.
#[derive(Clone, Copy)]
struct Kind {
    encoding: Encoding,
    /// Only pages on disks go by name.
    of_disks: bool,
    /// QEMU is held while the destination awaits pages, so bodies are not kept.
    held: bool,
    /// The destination had nothing so far, so most names go with bodies.
    has_missed: bool,
}

impl Kind {
    fn of(seed: u64) -> Self {
        let encoding = [Encoding::Raw, Encoding::Zstd, Encoding::Lz4][(seed % 3) as usize];
        let (of_disks, held) = (encoding == Encoding::Lz4, (seed / 3).is_multiple_of(2));
        Self { encoding, of_disks, held, has_missed: !of_disks && seed.is_multiple_of(5) }
    }
}

fn send(stage: &Stage, sender: &mut Sender<'_, Errand>) -> std::io::Result<Sent> {
    let mut at_lane = stage.at_lane();
    loop {
        match sender.take() {
            Work::Send(load) => at_lane.send(sender, load)?,
            Work::Settled => {}
            Work::Over(sent) => return Ok(sent),
        }
    }
}

/// A destination that at random has some of the pages, gets some later, and does not get others
/// after all.
struct Fickle {
    placer: Arc<Placer>,
    seed: u64,
    rolls: AtomicU64,
    /// The number of announced batches.
    announced: AtomicU64,
    /// The number of pages whose names came with their bodies.
    named: AtomicU64,
    /// Gets the late reports.
    stage: Mutex<Option<Arc<Stage>>>,
    answering: Mutex<Vec<thread::JoinHandle<()>>>,
}

impl Fickle {
    fn roll(&self, sides: u64) -> u64 {
        let mut state = self.seed ^ self.rolls.fetch_add(1, SeqCst).wrapping_mul(0x9e37_79b9);
        for _ in 0..3 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
        }
        state % sides
    }

    /// Places the content with that name. False if the page never had such content as a whole.
    fn place(&self, epoch: Epoch, page: PageIndex, name: &Name) -> bool {
        let contents = [content_ahead(page.0), content(page.0)];
        let Some(bytes) = contents.iter().find(|bytes| key().name(bytes) == *name) else {
            assert!(epoch == Epoch(0) && has_changed(page.0), "page {page:?}");
            return false;
        };
        self.placer.place_bodies(BlockId(0), epoch, &[page], bytes, Delivery::Body).unwrap();
        true
    }

    fn answer_late(self: &Arc<Self>, header: NamedHeader, later: Vec<(u8, PageIndex, Name)>) {
        let mut wanted = Vec::new();
        for (nth, page, name) in later {
            if self.roll(3) == 0 || !self.place(header.epoch, page, &name) {
                wanted.push(nth);
            }
        }
        let stage = self.stage.lock().clone().expect("there is one");
        if self.roll(2) == 0 {
            let first = wanted.drain(..wanted.len() / 2).collect();
            stage.late(header.ticket, first, true);
        }
        stage.late(header.ticket, wanted, false);
    }
}

impl Fickle {
    fn take_all(self: &Arc<Self>, lane: &mut Incoming) -> Result<(), LaneEnd> {
        let mut named = NamedTables::default();
        while let Some(header) = lane.next_header()? {
            match header {
                LaneHeader::Pages(header) => {
                    let Tables { pages, names, .. } = lane.place(header, &self.placer)?;
                    self.named.fetch_add(names.len() as u64, SeqCst);
                    for (page, name) in pages.iter().zip(names) {
                        assert_eq!(*name, key().name(&content(page.0)));
                    }
                }
                LaneHeader::Blocks(_) => panic!("there are no disks"),
                LaneHeader::Named(header) => {
                    named.parse(header, lane.read_tables(header.tables_bytes())?)?;
                    self.find(header, &named, lane.question());
                }
            }
        }
        Ok(())
    }

    fn find(
        self: &Arc<Self>,
        header: NamedHeader,
        NamedTables { pages, names, places, .. }: &NamedTables,
        question: Question,
    ) {
        assert!(header.may_wait);
        self.announced.fetch_add(u64::from(header.epoch == Epoch(0)), SeqCst);
        for (page, place) in pages.iter().zip(places) {
            assert!(place.is_none() || *place == place_of(page.0));
        }
        let (mut wanted, mut later) = (PageSet::NONE, PageSet::NONE);
        let mut waits = Vec::new();
        for (nth, (page, name)) in pages.iter().zip(names).enumerate() {
            match self.roll(3) {
                1 => {
                    later.insert(nth);
                    waits.push((u8::try_from(nth).unwrap(), *page, *name));
                }
                2 if self.place(header.epoch, *page, name) => {}
                _ => wanted.insert(nth),
            }
        }
        let fickle = Arc::clone(self);
        let answer_late = move || {
            if !waits.is_empty() {
                fickle.answer_late(header, waits);
            }
        };
        // Late reports come before or after the answer, at once or while the lane goes on.
        let answer: Box<dyn FnOnce() + Send> = if self.roll(2) == 0 {
            Box::new(move || {
                answer_late();
                question.answer(wanted, later);
            })
        } else {
            Box::new(move || {
                question.answer(wanted, later);
                answer_late();
            })
        };
        if self.roll(3) == 0 {
            answer();
        } else {
            self.answering.lock().push(thread::spawn(answer));
        }
    }
}

/// Serves connections, and cuts the first ones after so many bytes.
fn serve(listener: &TcpListener, fickle: &Arc<Fickle>, over: &AtomicBool, cuts: &[usize]) {
    thread::scope(|scope| {
        for nth in 0.. {
            let (stream, _) = listener.accept().unwrap();
            if over.load(SeqCst) {
                return;
            }
            let cut = cuts.get(nth).copied();
            let fickle = Arc::clone(fickle);
            scope.spawn(move || {
                let inner = match cut {
                    Some(bytes) => cut_after(stream, bytes),
                    None => stream,
                };
                let mut connection = Security::Plaintext.accept(inner).unwrap();
                let mut preamble = [0; Preamble::BYTES];
                if connection.read_exact(&mut preamble).is_err() {
                    return;
                }
                Preamble::parse(&preamble, Versions::SPOKEN).unwrap();
                if connection.write_all(&Reply::Welcome.to_bytes(wire::VERSION)).is_err() {
                    return;
                }
                if let Err(error) = fickle.take_all(&mut Incoming::new(connection)) {
                    assert!(error.only_this_lane(), "{error}");
                }
            });
        }
    });
}

/// The destination's end of a connection that breaks after `bytes` from the source.
fn cut_after(outer: TcpStream, bytes: usize) -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let inner = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    let back = (inner.try_clone().unwrap(), outer.try_clone().unwrap());
    thread::spawn(move || {
        let _ = std::io::copy(&mut &back.0, &mut &back.1);
        let _ = back.1.shutdown(Shutdown::Both);
    });
    thread::spawn(move || {
        let _ = std::io::copy(&mut (&outer).take(bytes as u64), &mut &inner);
        let _ = outer.shutdown(Shutdown::Both);
        let _ = inner.shutdown(Shutdown::Both);
    });
    far
}

/// Returns how many batches were announced, and how many pages had names with their bodies.
fn deliver(seed: u64, cuts: &[usize], kind: Kind) -> [u64; 2] {
    let bytes = u64::from(PAGES) * PAGE_BYTES as u64;
    let mapping = Arc::new(Mapping::own(bytes));
    let (qemu, _other_end) = UnixStream::pair().unwrap();
    let feeder = Feeder::start(qemu, page::Pool::new(1 << 20)).unwrap();
    let placement = Placement::Mapped(Arc::clone(&mapping));
    let plan = BlockPlan { name: "pc.ram".to_owned(), bytes, placement };
    let fickle = Arc::new(Fickle {
        placer: Arc::new(Placer::new(vec![plan], feeder.handle()).unwrap()),
        seed,
        rolls: AtomicU64::new(0),
        announced: AtomicU64::new(0),
        named: AtomicU64::new(0),
        stage: Mutex::new(None),
        answering: Mutex::new(Vec::new()),
    });
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (over, ready) = (AtomicBool::new(false), Barrier::new(2));
    thread::scope(|scope| {
        scope.spawn(|| {
            ready.wait();
            serve(&listener, &fickle, &over, cuts);
        });
        let Kind { of_disks, held, .. } = kind;
        let lanes = 1 + (seed % 4 / 2) as usize;
        let mut source = Source::start(lanes, address, kind);
        *fickle.stage.lock() = Some(Arc::clone(&source.stage));
        ready.wait();
        let pool = Pool::new(8 * SLOT_BYTES);
        source.hand_over(&pool);
        drop(source.announcer.take());
        if seed.is_multiple_of(3) {
            source.stage.end_first_pass();
        }
        source.lanes.wait_drained().unwrap();
        assert_eq!(pool.out_bytes(), 0, "every buffer is back");
        let delivered = source.lanes.delivered();
        assert_eq!((delivered.backlog_bytes, delivered.awaited_bytes), (0, 0));
        // Pages that have changed since they were announced arrived twice.
        let twice = if of_disks && held { bytes } else { 0 };
        let came = delivered.found_bytes + delivered.body_bytes;
        assert!((bytes..=bytes + twice).contains(&came), "{came} of {bytes}");
        for page in 0..PAGES {
            let mut found = vec![0; PAGE_BYTES];
            mapping.read(PageIndex(page).offset(), &mut found).unwrap();
            assert!(found == content(page), "page {page}, seed {seed}");
        }
        for answering in fickle.answering.lock().drain(..) {
            answering.join().unwrap();
        }
        *fickle.stage.lock() = None;
        source.lanes.finish();
        over.store(true, SeqCst);
        drop(TcpStream::connect(address));
    });
    [fickle.announced.load(SeqCst), fickle.named.load(SeqCst)]
}

#[test]
fn whatever_the_destination_says() {
    let mut all = [0, 0];
    for seed in 1..30 {
        let [announced, named] = deliver(seed, &[], Kind::of(seed));
        all = [all[0] + announced, all[1] + named];
    }
    let [announced, named] = all;
    assert!(announced > 0, "some were announced before they were handed over");
    assert!(named > 0, "some had their names with them");
}

#[test]
fn wherever_connections_are_cut() {
    for seed in 1..60_u64 {
        let cuts: Vec<usize> =
            (1..6).map(|nth| (seed * nth * 77_773 % 200_000) as usize + 40).collect();
        deliver(seed, &cuts, Kind::of(seed));
    }
}
