use std::collections::HashMap;
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use proptest::prelude::*;

use super::*;
use crate::{Buffer, Pages};

/// The image's byte at an offset.
fn byte(offset: u64) -> u8 {
    u8::try_from((offset / 512).wrapping_add(offset.wrapping_mul(5)) % 241).unwrap()
}

type Answer = dyn Fn(u64, usize) -> Result<usize, Failure> + Send + Sync;

/// Storage with a closure that decides how many bytes are read, or that a read fails.
struct Fake {
    bytes: u64,
    answer: Box<Answer>,
    /// Dropped with the storage, to tell the test.
    _dropped: Option<Sender<()>>,
}

impl Fake {
    fn sound(bytes: u64) -> Self {
        Self::new(bytes, |_, bytes| Ok(bytes))
    }

    fn new(
        bytes: u64,
        answer: impl Fn(u64, usize) -> Result<usize, Failure> + Send + Sync + 'static,
    ) -> Self {
        Self { bytes, answer: Box::new(answer), _dropped: None }
    }
}

impl Source for Fake {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read(
        &self,
        offset: u64,
        bytes: usize,
        buffer: &mut Buffer,
    ) -> Result<Range<usize>, Failure> {
        assert!(bytes > 0 && offset + bytes as u64 <= self.bytes, "{bytes} at {offset}");
        let read = (self.answer)(offset, bytes)?;
        let room = &mut buffer.as_mut()[7..];
        room.iter_mut().zip(offset..offset + read as u64).for_each(|(to, at)| *to = byte(at));
        Ok(7..7 + read)
    }

    fn interrupt(&self) {}
}

fn refused(offset: u64, bytes: usize) -> Failure {
    Failure::Refused { offset, bytes, reason: "as a test".to_owned() }
}

/// How each token ended, and which failures were reported.
struct Log {
    image_bytes: u64,
    unwanted: fn(u64) -> bool,
    ends: Mutex<HashMap<u64, Vec<&'static str>>>,
    whys: Mutex<Vec<Failure>>,
    order: Mutex<Vec<u64>>,
    idle: AtomicUsize,
    ended: Mutex<Option<Failure>>,
}

impl Log {
    fn of(image_bytes: u64) -> Arc<Self> {
        Self::without(image_bytes, |_| false)
    }

    fn without(image_bytes: u64, unwanted: fn(u64) -> bool) -> Arc<Self> {
        Arc::new(Self {
            image_bytes,
            unwanted,
            ends: Mutex::default(),
            whys: Mutex::default(),
            order: Mutex::default(),
            idle: AtomicUsize::new(0),
            ended: Mutex::default(),
        })
    }

    fn note(&self, token: u64, how: &'static str) {
        self.ends.lock().entry(token).or_default().push(how);
    }

    fn how(&self, token: u64) -> Vec<&'static str> {
        self.ends.lock().get(&token).cloned().unwrap_or_default()
    }

    fn count(&self, how: &str) -> usize {
        self.ends.lock().values().filter(|ends| **ends == [how]).count()
    }
}

impl Consumer for Log {
    fn wants(&self, item: &Item) -> bool {
        let unwanted = (self.unwanted)(item.token);
        if unwanted {
            self.note(item.token, "refused");
        }
        !unwanted
    }

    fn read(&self, pages: Pages<'_>) {
        assert_eq!(pages.iter().count(), pages.items().len());
        for ((token, page), item) in pages.iter().zip(pages.items()) {
            assert_eq!(token, item.token);
            let end = self.image_bytes;
            let expected = |at| if at < end { byte(at) } else { 0 };
            let right = page.iter().zip(item.offset..).all(|(byte, at)| *byte == expected(at));
            self.note(token, if right { "read" } else { "wrong" });
            self.order.lock().push(item.offset);
        }
    }

    fn failed(&self, items: &[Item], why: &Failure) {
        items.iter().for_each(|item| self.note(item.token, "failed"));
        self.whys.lock().push(why.clone());
    }

    fn idle(&self) {
        self.idle.fetch_add(1, Relaxed);
    }

    fn ended(&self, why: &Failure) {
        assert!(self.ended.lock().replace(why.clone()).is_none(), "said once");
    }
}

fn items(offsets: impl IntoIterator<Item = u64>) -> Vec<Item> {
    offsets.into_iter().zip(0..).map(|(offset, token)| Item { offset, token }).collect()
}

fn settings(in_flight: usize) -> Settings {
    Settings { in_flight, ..Settings::default() }
}

#[test]
fn one_thread_reads_in_order_and_fills_up_the_last_page() {
    let bytes = (3 << 20) + 700;
    let log = Log::of(bytes);
    let reader = Reader::start(Box::new(Fake::sound(bytes)), log.clone(), settings(1)).unwrap();
    assert_eq!(reader.wait_idle(), Ok(()), "nothing is wanted");
    let offsets = [3 << 20, 2 << 20, 8192, (3 << 20) - 512, 512, (3 << 20) + 512, 4608, 0];
    reader.add(&items(offsets)).unwrap();
    reader.add(&[]).unwrap();
    reader.wait_idle().unwrap();
    assert_eq!(log.count("read"), offsets.len());
    let mut sorted = offsets;
    sorted.sort_unstable();
    assert_eq!(*log.order.lock(), sorted);
    let progress = reader.progress();
    assert_eq!((progress.read_pages, progress.in_flight, progress.wanted_pages), (8, 0, 0));
    assert_eq!((progress.requests, progress.read_bytes), (4, 12_288 + 4096 + 1212 + 700));
    let end = reader.finish();
    assert_eq!((end.failed_pages, end.abandoned_threads), (0, 0));
    assert_eq!(log.idle.load(Relaxed), 1);
    assert_eq!(*log.ended.lock(), Some(Failure::Stopped));
}

#[test]
fn a_failed_request_fails_its_own_items() {
    let source = Fake::new(16 << 20, |offset, bytes| match offset >> 20 {
        1 => Err(refused(offset, bytes)),
        2 => Ok(5000),
        _ => Ok(bytes),
    });
    let log = Log::of(16 << 20);
    let reader = Reader::start(Box::new(source), log.clone(), settings(4)).unwrap();
    let all = [0, 1 << 20, 2 << 20, (2 << 20) + 4096, 3 << 20, 16 << 20, u64::MAX, u64::MAX - 9];
    reader.add(&items(all)).unwrap();
    reader.wait_idle().unwrap();
    for token in 0..8 {
        let expected = if [0, 2, 4].contains(&token) { "read" } else { "failed" };
        assert_eq!(log.how(token), [expected], "{token}");
    }
    let whys = log.whys.lock().clone();
    assert!(whys.contains(&refused(1 << 20, 4096)));
    assert!(whys.contains(&Failure::Short { offset: 2 << 20, bytes: 8192, read: 5000 }));
    assert!(whys.contains(&Failure::Outside { image_bytes: 16 << 20 }));
    assert_eq!(reader.failure(), None);
}

#[test]
fn storage_that_fails_again_and_again_is_given_up() {
    let log = Log::of(100 << 20);
    let source = Fake::new(100 << 20, |offset, bytes| Err(refused(offset, bytes)));
    let reader = Reader::start(Box::new(source), log.clone(), settings(1)).unwrap();
    reader.add(&items((0..100).map(|nth| nth << 20))).unwrap();
    let why = reader.wait_idle().unwrap_err();
    let Failure::Unreliable { count: 8, last } = &why else { panic!("{why}") };
    assert!(last.ends_with("as a test"), "{last}");
    assert_eq!(log.count("failed"), 100, "all were given back");
    assert_eq!(reader.add(&items([0])), Err(why.clone()));
    assert_eq!(*log.ended.lock(), Some(why.clone()));
    assert_eq!(log.idle.load(Relaxed), 0);
    assert_eq!(reader.progress().failed_pages, 100);
}

#[test]
fn too_many_failures_altogether_end_the_reader() {
    let log = Log::of(200 << 20);
    let source = Fake::new(200 << 20, |offset, bytes| match (offset >> 20) % 2 {
        0 => Err(refused(offset, bytes)),
        _ => Ok(bytes),
    });
    let reader = Reader::start(Box::new(source), log.clone(), settings(1)).unwrap();
    reader.add(&items((0..200).map(|nth| nth << 20))).unwrap();
    assert!(matches!(reader.wait_idle(), Err(Failure::Unreliable { count: 64, .. })));
    assert_eq!((log.count("read"), log.count("failed")), (63, 137));
}

#[test]
fn a_broken_connection_ends_the_reader_at_once() {
    let log = Log::of(100 << 20);
    let source = Fake::new(100 << 20, |_, _| Err(Failure::Broken("gone".to_owned())));
    let reader = Reader::start(Box::new(source), log.clone(), settings(3)).unwrap();
    let _ = reader.add(&items((0..100).map(|nth| nth << 20)));
    assert_eq!(reader.wait_idle(), Err(Failure::Broken("gone".to_owned())));
    assert_eq!(log.count("failed"), 100);
}

/// Storage that doesn't answer until the sender is dropped. The receiver
/// disconnects when the storage is dropped.
fn stalled(first: u64) -> (Fake, Sender<()>, Receiver<()>) {
    let (release, released) = channel::<()>();
    let (dropped, gone) = channel();
    let released = Mutex::new(released);
    let mut source = Fake::new(100 << 20, move |offset, bytes| {
        if offset >= first {
            let _ = released.lock().recv();
        }
        Ok(bytes)
    });
    source._dropped = Some(dropped);
    (source, release, gone)
}

#[test]
fn threads_without_an_answer_are_left_behind() {
    let (source, release, gone) = stalled(10 << 20);
    let log = Log::of(100 << 20);
    let patience = Duration::from_secs(1);
    let reader =
        Reader::start(Box::new(source), log.clone(), Settings { patience, ..settings(3) }).unwrap();
    reader.add(&items((0..100).map(|nth| nth << 20))).unwrap();
    assert_eq!(reader.wait_idle(), Err(Failure::Stalled(patience)));
    assert_eq!((log.count("read"), log.count("failed")), (10, 90));
    let progress = reader.finish();
    assert_eq!((progress.abandoned_threads, progress.in_flight), (3, 0));
    assert!(abandoned_threads() >= 3);
    assert_eq!((log.count("read"), log.count("failed")), (10, 90));
    // The storage answers after all: the threads end, and what they read is dropped.
    assert!(Arc::into_inner(log).is_some(), "they have nobody to give it to");
    drop(release);
    assert!(gone.recv().is_err());
}

#[test]
fn stopping_does_not_wait_for_storage_that_hangs() {
    let (source, release, gone) = stalled(0);
    let log = Log::of(100 << 20);
    let patience = Duration::from_secs(3600);
    let reader =
        Reader::start(Box::new(source), log.clone(), Settings { patience, ..settings(2) }).unwrap();
    reader.add(&items((0..5).map(|nth| nth << 20))).unwrap();
    drop(reader);
    assert_eq!(log.count("failed"), 5);
    assert_eq!(*log.ended.lock(), Some(Failure::Stopped));
    drop(release);
    assert!(gone.recv().is_err());
}

#[test]
fn items_that_are_not_begun_can_be_taken_from_the_end() {
    let (source, release, _gone) = stalled(0);
    let log = Log::of(100 << 20);
    let reader = Reader::start(Box::new(source), log.clone(), settings(1)).unwrap();
    reader.add(&items((0..50).map(|nth| nth * 100_000))).unwrap();
    let mut tokens = Vec::new();
    assert_eq!(reader.take_from_the_end(10, &mut tokens), 10);
    assert_eq!(tokens, (40..50).rev().collect::<Vec<_>>());
    // The first one may be started, or not yet.
    let rest = reader.take_from_the_end(100, &mut tokens);
    assert!(rest >= 39, "{rest}");
    drop(release);
    reader.wait_idle().unwrap();
    assert_eq!(log.count("read") + tokens.len(), 50);
    let progress = reader.progress();
    assert_eq!(progress.taken_pages, tokens.len() as u64);
    assert_eq!(reader.take_from_the_end(1, &mut tokens), 0);
    drop(reader);
}

#[test]
fn taking_the_last_items_reports_idle() {
    let log = Log::of(100 << 20);
    let pace = Arc::new(Pace::default());
    // The pace holds the thread back for an hour.
    pace.set(Some(1 << 20));
    pace.settle(0, 3600 << 20);
    let settings = Settings { pace: Arc::clone(&pace), ..settings(2) };
    let reader = Reader::start(Box::new(Fake::sound(100 << 20)), log.clone(), settings).unwrap();
    reader.add(&items([0, 1 << 20])).unwrap();
    assert_eq!(reader.take_from_the_end(usize::MAX, &mut Vec::new()), 2);
    reader.wait_idle().unwrap();
    assert_eq!(log.idle.load(Relaxed), 1);
    pace.set(None);
    reader.add(&items([0, 1 << 20])).unwrap();
    reader.wait_idle().unwrap();
    assert_eq!(log.count("read"), 2, "and goes on");
    drop(reader);
    assert_eq!(log.idle.load(Relaxed), 2);
}

struct Panics;

impl Consumer for Panics {
    fn read(&self, _: Pages<'_>) {
        panic!("as a test");
    }

    fn failed(&self, _: &[Item], _: &Failure) {}
}

#[test]
fn a_consumer_that_panics_ends_the_reader() {
    let reader =
        Reader::start(Box::new(Fake::sound(1 << 20)), Arc::new(Panics), settings(2)).unwrap();
    reader.add(&items([0, 4096])).unwrap();
    assert_eq!(reader.wait_idle(), Err(Failure::Panicked));
}

#[test]
fn an_absurd_image_size_is_capped() {
    let log = Log::of(u64::MAX);
    let reader = Reader::start(Box::new(Fake::sound(u64::MAX)), log.clone(), settings(1)).unwrap();
    reader.add(&items([u64::MAX, (1 << 63) - 1, 1 << 62])).unwrap();
    reader.wait_idle().unwrap();
    assert_eq!((log.how(0), log.how(2)), (vec!["failed"], vec!["read"]));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// One thread adds items and one takes them from the end; some reads fail, some
    /// items are not wanted any more, and sometimes the reader is stopped in the middle.
    #[test]
    fn each_item_ends_once(
        batches in prop::collection::vec(prop::collection::vec(0..5000_u64, 1..200), 1..20),
        takes in prop::collection::vec(1..50_usize, 0..30),
        in_flight in 1..6_usize,
        gap_bytes_max in prop_oneof![Just(None), Just(Some(0)), Just(Some(1 << 20))],
        bad in 1..20_u64,
        stop: bool,
    ) {
        let image_bytes = 4900 * 512 + 100;
        let log = Log::without(image_bytes, |token| token % 17 == 3);
        let source = Fake::new(image_bytes, move |offset, bytes| {
            if offset % bad == 1 { Err(refused(offset, bytes)) } else { Ok(bytes) }
        });
        let settings = Settings { in_flight, gap_bytes_max, ..Settings::default() };
        let reader = Reader::start(Box::new(source), log.clone(), settings).unwrap();
        let (mut added, mut taken) = (0, Vec::new());
        thread::scope(|scope| {
            let (reader, taken) = (&reader, &mut taken);
            scope.spawn(move || takes.iter().for_each(|most| {
                reader.take_from_the_end(*most, taken);
                thread::yield_now();
            }));
            for batch in &batches {
                let items: Vec<_> = batch
                    .iter()
                    .zip(added..)
                    .map(|(sector, token)| Item { offset: sector * 512, token })
                    .collect();
                if reader.add(&items).is_err() {
                    break;
                }
                added += items.len() as u64;
            }
        });
        if stop {
            reader.stop();
        }
        let idle = reader.wait_idle();
        let unreliable = matches!(idle, Err(Failure::Unreliable { .. }));
        prop_assert!(idle.is_ok() || stop || unreliable);
        taken.iter().for_each(|token| log.note(*token, "taken"));
        for token in 0..added {
            let how = log.how(token);
            prop_assert!(how.len() == 1 && how[0] != "wrong", "{token}: {how:?}");
            prop_assert!(how[0] != "refused" || token % 17 == 3);
        }
        let progress = reader.finish();
        prop_assert_eq!(progress.read_pages, log.count("read") as u64);
        prop_assert_eq!(progress.failed_pages, log.count("failed") as u64);
        prop_assert_eq!(progress.refused_pages, log.count("refused") as u64);
        prop_assert_eq!(progress.taken_pages, log.count("taken") as u64);
        prop_assert_eq!(progress.abandoned_threads, 0);
    }
}
