//! Pages by name: whatever the destination says of them, and wherever connections
//! are cut, each page arrives, as bytes or from where the destination has it.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Barrier, OnceLock};
use std::thread;

use audit::Delivery;
use content::{Domain, Key, Name};
use identity::Security;
use page::{Batch, BlockId, Encoding, Epoch, PAGE_BYTES, PageIndex, Pool, SLOT_BYTES};
use parking_lot::Mutex;
use placer::{BlockPlan, Feeder, Placement, Placer};
use ram::Mapping;
use transport::{Asking, Endpoint, Incoming, Labels, LaneEnd, Lanes, LanesPlan, Namer, Question};
use wire::{DiskPlace, LaneHeader, NamedHeader, NamedTables, Preamble, Reply, Token};

const PAGES: u32 = 1500;

fn content(page: u32) -> Vec<u8> {
    let byte = |at: u32| (page.wrapping_mul(31) ^ (at / 64)).to_le_bytes()[0];
    (0..).take(PAGE_BYTES).map(byte).collect()
}

/// What a page contained when the destination was told of it ahead, if it was.
fn content_ahead(page: u32) -> Vec<u8> {
    content(if has_changed(page) { page + 1 } else { page })
}

fn has_changed(page: u32) -> bool {
    page % 11 == 1
}

fn key() -> Key {
    Key::new(b"test", &Domain::default())
}

/// Where a disk has what a page contains.
fn place_of(page: u32) -> Option<DiskPlace> {
    let sector = u64::from(page) << 20;
    (!page.is_multiple_of(3)).then_some(DiskPlace { disk: 7, sector })
}

/// A source whose pages can be read once more.
#[derive(Debug)]
struct Source {
    /// Whether only those that disks have go by name.
    of_disks: bool,
    /// What the destination was told ahead; none for what was handed over first.
    told: Vec<OnceLock<Option<Name>>>,
}

impl Source {
    /// Tells of all pages that disks have, downwards.
    fn tell(&self, lanes: &Lanes) {
        let pages: Vec<u32> = (0..PAGES).rev().filter(|page| place_of(*page).is_some()).collect();
        for some in pages.chunks(100) {
            let mut reserved = lanes.reserve((BlockId(0), Epoch(0)), || false).unwrap();
            for page in some {
                let name = key().name(&content_ahead(*page));
                if self.told[*page as usize].set(Some(name)).is_ok() {
                    reserved.add(PageIndex(*page), name, place_of(*page).unwrap());
                }
            }
            reserved.tell();
        }
    }

    fn was_told(&self, page: u32) -> Option<Name> {
        *self.told[page as usize].get()?
    }
}

impl Namer for Source {
    fn take_out_announced(&self, batch: &mut Batch) -> usize {
        let pages: Vec<u32> = batch.bodies().iter().map(|body| body.page.0).collect();
        batch.retain_bodies(|nth, bytes| {
            let told = self.told[pages[nth] as usize].get_or_init(|| None);
            told.is_none_or(|name| name != key().name(bytes))
        })
    }

    fn name(&self, batch: &Batch, labels: &mut Labels) -> Asking {
        let mut bits = 0;
        for (nth, body) in batch.bodies().iter().enumerate() {
            let place = place_of(body.page.0).filter(|_| self.was_told(body.page.0).is_none());
            if place.is_some() || !self.of_disks {
                labels.names.push(key().name(batch.bytes_of(*body)));
                labels.places.push(place);
                bits |= 1 << nth;
            }
        }
        if self.of_disks { Asking::Only(bits) } else { Asking::MayWait }
    }

    fn read_again(&self, _: BlockId, pages: &[PageIndex], into: &mut [u8]) -> bool {
        for (page, into) in pages.iter().zip(into.chunks_exact_mut(PAGE_BYTES)) {
            into.copy_from_slice(&content(page.0));
        }
        true
    }
}

/// A destination that has some of the pages, gets some later, and some not after
/// all: by the dice.
struct Fickle {
    placer: Arc<Placer>,
    seed: u64,
    rolls: AtomicU64,
    /// Told of what became of pages later.
    lanes: Mutex<Option<Arc<Lanes>>>,
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

    fn place(&self, epoch: Epoch, page: PageIndex, name: &Name) {
        let bytes = if epoch == Epoch(0) { content_ahead(page.0) } else { content(page.0) };
        assert_eq!(key().name(&bytes), *name, "the name that was sent is the page's");
        self.placer.place_bodies(BlockId(0), epoch, &[page], &bytes, Delivery::Body).unwrap();
    }

    fn answer_late(self: &Arc<Self>, header: NamedHeader, later: Vec<(u8, PageIndex, Name)>) {
        let mut wanted = Vec::new();
        for (nth, page, name) in later {
            if self.roll(3) == 0 {
                wanted.push(nth);
            } else {
                self.place(header.epoch, page, &name);
            }
        }
        let lanes = self.lanes.lock().clone().expect("there are lanes");
        if self.roll(2) == 0 {
            let first = wanted.drain(..wanted.len() / 2).collect();
            lanes.late(header.ticket, first, true);
        }
        lanes.late(header.ticket, wanted, false);
    }
}

impl Fickle {
    fn take_all(self: &Arc<Self>, lane: &mut Incoming) -> Result<(), LaneEnd> {
        let mut named = NamedTables::default();
        while let Some(header) = lane.next_header()? {
            match header {
                LaneHeader::Pages(header) => drop(lane.place(header, &self.placer)?),
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
        for (page, place) in pages.iter().zip(places) {
            assert_eq!(*place, place_of(page.0));
        }
        let (mut wanted, mut later) = (0, 0);
        let mut waits = Vec::new();
        for (nth, (page, name)) in pages.iter().zip(names).enumerate() {
            match self.roll(3) {
                0 => wanted |= 1 << nth,
                1 => {
                    later |= 1 << nth;
                    waits.push((u8::try_from(nth).unwrap(), *page, *name));
                }
                _ => self.place(header.epoch, *page, name),
            }
        }
        let fickle = Arc::clone(self);
        let answer_late = move || {
            if !waits.is_empty() {
                fickle.answer_late(header, waits);
            }
        };
        // What comes later before or after the answer, and that at once or while the
        // lane goes on.
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

/// Serves connections, the first of them only for so many bytes.
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
                Preamble::parse(&preamble).unwrap();
                if connection.write_all(&Reply::Welcome.to_bytes()).is_err() {
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

fn lanes(count: usize, remote: SocketAddr, encoding: Encoding, namer: &Arc<Source>) -> Arc<Lanes> {
    let plan = LanesPlan {
        endpoints: vec![Endpoint { local: None, remote }; count],
        peer: "destination".to_owned(),
        security: Security::Plaintext,
        token: Token([1; 16]),
        encoding,
        stale_filter: None,
        namer: Some(Arc::clone(namer) as _),
    };
    Arc::new(Lanes::start(plan).unwrap())
}

fn deliver(seed: u64, cuts: &[usize], encoding: Encoding) {
    let bytes = u64::from(PAGES) * PAGE_BYTES as u64;
    let mapping = Arc::new(Mapping::own(bytes));
    let (qemu, _other_end) = UnixStream::pair().unwrap();
    let feeder = Feeder::start(qemu, 1 << 20).unwrap();
    let placement = Placement::Mapped(Arc::clone(&mapping));
    let plan = BlockPlan { name: "pc.ram".to_owned(), bytes, placement };
    let fickle = Arc::new(Fickle {
        placer: Arc::new(Placer::new(vec![plan], feeder.handle()).unwrap()),
        seed,
        rolls: AtomicU64::new(0),
        lanes: Mutex::new(None),
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
        let told = std::iter::repeat_with(OnceLock::new).take(PAGES as usize).collect();
        let source = Arc::new(Source { of_disks: encoding == Encoding::Lz4, told });
        let carrier = lanes(1 + (seed % 4 / 2) as usize, address, encoding, &source);
        *fickle.lanes.lock() = Some(Arc::clone(&carrier));
        ready.wait();
        let telling = source.of_disks.then(|| {
            let (source, carrier) = (Arc::clone(&source), Arc::clone(&carrier));
            scope.spawn(move || source.tell(&carrier))
        });
        let pool = Pool::new(8 * SLOT_BYTES);
        let mut batch = pool.take().unwrap();
        for page in 0..PAGES {
            let at = batch.bodies().len() * PAGE_BYTES;
            batch.buffer_mut()[at..at + PAGE_BYTES].copy_from_slice(&content(page));
            batch.push_body(PageIndex(page), at);
            // Of all lengths.
            if batch.room() == 0 || page % 97 == 0 {
                batch.epoch = Epoch(3);
                carrier.submit(std::mem::replace(&mut batch, pool.take().unwrap())).unwrap();
            }
        }
        batch.epoch = Epoch(3);
        carrier.submit(batch).unwrap();
        if let Some(telling) = telling {
            telling.join().unwrap();
        }
        carrier.wait_drained().unwrap();
        assert_eq!(pool.out_bytes(), 0, "every buffer is back");
        let delivered = carrier.delivered();
        assert_eq!((delivered.backlog_bytes, delivered.pending_bytes), (0, 0));
        let twice =
            (0..PAGES).filter(|page| source.was_told(*page).is_some() && has_changed(*page));
        let twice = (twice.count() * PAGE_BYTES) as u64;
        assert_eq!(delivered.named_bytes + delivered.body_bytes, bytes + twice);
        for page in 0..PAGES {
            let mut found = vec![0; PAGE_BYTES];
            mapping.read(PageIndex(page).offset(), &mut found).unwrap();
            assert!(found == content(page), "page {page}, seed {seed}");
        }
        for answering in fickle.answering.lock().drain(..) {
            answering.join().unwrap();
        }
        *fickle.lanes.lock() = None;
        carrier.finish();
        over.store(true, SeqCst);
        drop(TcpStream::connect(address));
    });
}

#[test]
fn whatever_the_destination_says() {
    for seed in 1..30 {
        let encoding = [Encoding::Raw, Encoding::Zstd, Encoding::Lz4][(seed % 3) as usize];
        deliver(seed, &[], encoding);
    }
}

#[test]
fn wherever_connections_are_cut() {
    for seed in 1..60_u64 {
        let cuts: Vec<usize> =
            (1..6).map(|nth| (seed * nth * 77_773 % 200_000) as usize + 40).collect();
        deliver(seed, &cuts, [Encoding::Raw, Encoding::Lz4][(seed % 2) as usize]);
    }
}
