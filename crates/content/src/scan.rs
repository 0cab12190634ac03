//! Maintains the index for VMs that run here: a thread goes round their RAM and notes the pages'
//! names, which another thread makes that runs only when its CPU is idle.
//!
//! It hashes every page again in every round. The kernel could report which pages were written
//! (soft-dirty bits, `PAGEMAP_SCAN`), but the reader has to clear the bits, and others may rely
//! on them: a debugger, CRIU, QEMU's own background snapshots. So the cost of a round is bounded
//! by the threads' share of a CPU, and the age of the index follows from that: with 5 % of a
//! core, some 100 MB of RAM are scanned a second.

mod hashing;
mod idle;
mod pace;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use data_threads::Joined;
use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};

use self::hashing::{Found, Hasher, Turn};
use self::pace::Pace;
use crate::Name;
use crate::earlier_names::CHUNK_PAGES;
use crate::index::{Index, Seat};

/// Pages that are scanned before the next member's turn, and before the thread checks whether to
/// rest or stop: less than a millisecond.
const TURN_PAGES: usize = 256;
/// Their earlier names are replaced together.
const _: () = assert!(CHUNK_PAGES.is_multiple_of(TURN_PAGES));
/// The shortest time between the beginnings of a member's rounds: a small VM's content is not
/// worth all of the budget.
const ROUND_MIN: Duration = Duration::from_secs(5);
/// How often all of a member's content is reported again, even if unchanged: a rack's directory
/// forgets content that was not reported for an hour.
const TELL_ALL: Duration = Duration::from_secs(1800);
/// The part of the share that is left while VMs arrive or leave. To run only on an idle CPU does
/// not suffice: schedulers first divide CPUs among groups of processes (cgroups, sessions), and
/// an agent's part is better used for the VMs that move.
const GIVING_WAY: f64 = 0.1;
/// The longest wait of a new member for its first turn.
const LOOK: Duration = Duration::from_millis(500);

/// The threads that scan the RAM of all members of an index. They end when this is dropped.
#[derive(Debug)]
pub struct Scanner {
    moving: Arc<AtomicUsize>,
    _stop: Sender<()>,
    _thread: Joined,
    refused: Arc<Mutex<Option<String>>>,
}

impl Scanner {
    /// Starts it with at most `share` of one CPU: 0.05 is 5 %. It reads and hashes only when its
    /// CPU is otherwise idle. To use no CPU at all, don't start it: it takes a thousandth
    /// whatever the share.
    ///
    /// It calls `tell` with batches of names that it finds: new names at once, and all names of a
    /// member every half hour. Some may be out of date by then.
    pub fn start(
        index: &Arc<Index>,
        share: f64,
        tell: impl Fn(&[Name]) + Send + 'static,
    ) -> io::Result<Self> {
        let (stop, told) = channel();
        let refused = Arc::new(Mutex::new(None));
        let moving = Arc::<AtomicUsize>::default();
        let hasher = Hasher::start(Arc::clone(&refused))?;
        let thread = thread::Builder::new().name("scan".to_owned()).spawn({
            let (index, moving) = (Arc::clone(index), Arc::clone(&moving));
            move || {
                let mut look = |turn| hasher.look(turn);
                Work::new(&index, (share, &moving), &told, &tell, &mut look).run();
            }
        })?;
        Ok(Self { moving, _stop: stop, _thread: thread.into(), refused })
    }

    /// Reduces the threads' share to a tenth until the result is dropped, for the time in which a
    /// VM arrives or leaves.
    #[must_use]
    pub fn give_way(&self) -> GivingWay {
        self.moving.fetch_add(1, Relaxed);
        GivingWay(Arc::clone(&self.moving))
    }

    /// What the system has refused since the last call, for the operator.
    #[must_use]
    pub fn refused(&self) -> Option<String> {
        self.refused.lock().take()
    }
}

/// A [`Scanner`] gives way until this is dropped.
#[derive(Debug)]
pub struct GivingWay(Arc<AtomicUsize>);

impl Drop for GivingWay {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// The scanner was ordered to stop, or its hashing thread has ended.
#[derive(Debug)]
struct Stop;

/// The state of the thread that knows the index.
struct Work<'i> {
    index: &'i Index,
    share: f64,
    moving: &'i AtomicUsize,
    pace: Pace,
    told: &'i Receiver<()>,
    tell: &'i dyn Fn(&[Name]),
    /// Reads and names the pages of a turn.
    look: &'i mut dyn FnMut(Turn) -> Result<Turn, Stop>,
    found: Found,
    news: Vec<Name>,
}

impl<'i> Work<'i> {
    fn new(
        index: &'i Index,
        (share, moving): (f64, &'i AtomicUsize),
        told: &'i Receiver<()>,
        tell: &'i dyn Fn(&[Name]),
        look: &'i mut dyn FnMut(Turn) -> Result<Turn, Stop>,
    ) -> Self {
        Self {
            index,
            share,
            moving,
            pace: Pace::default(),
            told,
            tell,
            look,
            found: Found::default(),
            news: Vec::new(),
        }
    }

    fn run(mut self) {
        while self.every_member().is_ok() {}
    }

    /// A turn for each member that is due, or a rest if none is.
    fn every_member(&mut self) -> Result<(), Stop> {
        let mut nobody = true;
        let index = self.index;
        for seat in index.seats() {
            if self.turn(&seat, Instant::now())? {
                nobody = false;
                // A member that leaves does not wait while this thread rests.
                drop(seat);
                self.rest()?;
            }
        }
        if nobody { self.wait(LOOK) } else { Ok(()) }
    }

    /// Scans the member's next pages. False if its round is not due.
    fn turn(&mut self, seat: &Arc<Seat>, now: Instant) -> Result<bool, Stop> {
        let (first, tells_all) = {
            let mut round = seat.round.lock();
            if round.next == 0 {
                let due = |began| now.saturating_duration_since(began) >= ROUND_MIN;
                if seat.pages() == 0 || !round.began.is_none_or(due) {
                    return Ok(false);
                }
                round.began = Some(now);
                let long_ago = |told| now.saturating_duration_since(told) >= TELL_ALL;
                round.tells_all = round.told.is_none_or(long_ago);
                if round.tells_all {
                    round.told = Some(now);
                }
            }
            (round.next, round.tells_all)
        };
        if first == 0 {
            seat.earlier_names.keep(self.index.has_others_like(seat));
        }
        let left = usize::try_from(seat.pages() - first).unwrap_or(TURN_PAGES);
        let (pages, found) = (left.min(TURN_PAGES), std::mem::take(&mut self.found));
        let turn = Turn { seat: Arc::clone(seat), first, pages, found };
        self.found = (self.look)(turn)?.found;
        self.note(seat, (first, pages), tells_all);
        let mut round = seat.round.lock();
        round.next = first + pages as u64;
        if round.next == seat.pages() {
            round.next = 0;
            round.completed += 1;
        }
        Ok(true)
    }

    /// Notes what a turn has found in these `pages`.
    fn note(&mut self, seat: &Seat, pages: (u64, usize), tells_all: bool) {
        let Self { index, found, news, .. } = self;
        seat.earlier_names.note(pages, &found.named, &found.fingerprints);
        for page in &found.nothing {
            index.forget(seat, *page);
        }
        news.clear();
        index.note(seat, &found.named, |name| news.push(name));
        if tells_all {
            news.clear();
            news.extend(found.named.iter().map(|(_, name)| name));
        }
        if !news.is_empty() {
            (self.tell)(&self.news);
        }
    }

    /// Rests as long as the budget demands.
    fn rest(&mut self) -> Result<(), Stop> {
        let gives_way = self.moving.load(Relaxed) > 0;
        let share = if gives_way { self.share * GIVING_WAY } else { self.share };
        match self.pace.rest(share, cpu_time() + self.found.cpu, Instant::now()) {
            Some(rest) => self.wait(rest),
            None => match self.told.try_recv() {
                Err(TryRecvError::Empty) => Ok(()),
                _ => Err(Stop),
            },
        }
    }

    fn wait(&self, how_long: Duration) -> Result<(), Stop> {
        match self.told.recv_timeout(how_long) {
            Err(RecvTimeoutError::Timeout) => Ok(()),
            _ => Err(Stop),
        }
    }
}

/// How much CPU time the calling thread has used.
fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "the pages counted here are few")]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

    use page::PAGE_BYTES;

    use super::hashing::Hashing;
    use super::*;
    use crate::{Domain, Holder, Key, Scanned};

    /// Pages by their first byte: 0 is a zero page, 255 a hole. Page 3 can't be read while it is
    /// `broken`.
    struct Ram {
        pages: Vec<AtomicU64>,
        broken: AtomicBool,
        holes_read: AtomicUsize,
        read: Sender<()>,
    }

    const HOLE: u64 = 255;
    static NOBODY: AtomicUsize = AtomicUsize::new(0);

    impl Holder for Ram {
        fn read(&self, page: u64, into: &mut [u8]) -> bool {
            let _ = self.read.send(());
            let content = self.pages[page as usize].load(Relaxed);
            self.holes_read.fetch_add(usize::from(content == HOLE), Relaxed);
            into.fill(content as u8);
            page != 3 || !self.broken.load(Relaxed)
        }

        fn present(&self, first: u64, present: &mut [bool]) {
            for (page, present) in self.pages[first as usize..].iter().zip(present) {
                *present = page.load(Relaxed) != HOLE;
            }
        }
    }

    fn ram(contents: impl IntoIterator<Item = u64>) -> (Arc<Ram>, Receiver<()>) {
        let (read, told) = channel();
        let pages = contents.into_iter().map(AtomicU64::new).collect();
        let (broken, holes_read) = (AtomicBool::new(false), AtomicUsize::new(0));
        (Arc::new(Ram { pages, broken, holes_read, read }), told)
    }

    fn key() -> Key {
        Key::new(b"secret", &Domain::default())
    }

    fn name(content: u8) -> Name {
        key().name(&[content; PAGE_BYTES])
    }

    /// Looks on the caller's thread.
    fn looking() -> impl FnMut(Turn) -> Result<Turn, Stop> {
        let mut hashing = Hashing::default();
        move |turn| Ok(hashing.look(turn))
    }

    /// Gives the member turns until its round has ended.
    fn round(work: &mut Work<'_>, seat: &Arc<Seat>) {
        let completed = seat.round.lock().completed;
        let later = Instant::now() + ROUND_MIN * (completed as u32 + 2) * 2;
        while seat.round.lock().completed == completed {
            assert!(work.turn(seat, later).unwrap(), "a round is due");
        }
        assert!(!work.turn(seat, later).unwrap(), "and over");
    }

    #[test]
    fn a_round_names_what_is_there_and_forgets_what_is_not() {
        let index = Index::new(1 << 20);
        let (ram, _told) = ram((0..600).map(|page| [7, 0, HOLE, 1 + page % 90][page as usize % 4]));
        let member = index.join(Arc::clone(&ram) as _, key(), 600).unwrap();
        let seat = index.seats().next().unwrap();
        let (_stop, told) = channel();
        let mut look = looking();
        let mut work = Work::new(&index, (1.0, &NOBODY), &told, &|_| {}, &mut look);
        round(&mut work, &seat);
        assert_eq!(member.scanned(), Scanned { rounds: 1, named: 300 });
        assert!(index.has(&name(7)) && index.has(&name(1 + 3)));
        assert!(!index.has(&name(0)) && !index.has(&name(255)));
        // Some pages become holes, some zero; one can't be read, one is new.
        for page in 0..600 {
            if page % 4 == 0 {
                ram.pages[page].store([0, HOLE][page / 4 % 2], Relaxed);
            }
        }
        ram.broken.store(true, Relaxed);
        ram.pages[5].store(200, Relaxed);
        round(&mut work, &seat);
        assert_eq!(member.scanned().named, 150);
        assert!(index.has(&name(200)) && !index.has(&name(7)));
        assert_eq!(ram.holes_read.load(Relaxed), 0);
    }

    #[test]
    fn names_are_kept_if_another_vm_may_have_the_same_content() {
        let index = Index::new(1 << 20);
        let (ram, _told) = ram((0..600).map(|page| [7, 0, HOLE][page % 3]));
        let member = index.join(Arc::clone(&ram) as _, key(), 600).unwrap();
        let seat = index.seats().next().unwrap();
        let (_stop, told) = channel();
        let mut look = looking();
        let mut work = Work::new(&index, (1.0, &NOBODY), &told, &|_| {}, &mut look);
        let kept = |page: u64, content: u8| {
            member.earlier_names().read().name(page, &[content; PAGE_BYTES])
        };
        round(&mut work, &seat);
        assert_eq!(kept(300, 7), None, "no other VM is in its domain");
        let other = index.join(Arc::clone(&ram) as _, key(), 0).unwrap();
        round(&mut work, &seat);
        assert_eq!([0, 300, 597].map(|page| kept(page, 7)), [Some(name(7)); 3]);
        assert_eq!([1, 2].map(|page| kept(page, 0)), [None; 2], "zero pages and holes have none");
        ram.pages[300].store(9, Relaxed);
        assert_eq!(kept(300, 9), None, "it has changed since");
        round(&mut work, &seat);
        let now = [kept(300, 9), kept(300, 7), kept(303, 7)];
        assert_eq!(now, [Some(name(9)), None, Some(name(7))]);
        drop(other);
        round(&mut work, &seat);
        assert_eq!([0, 303, 597].map(|page| kept(page, 7)), [None; 3], "the other VM has left");
        index.set_common(key());
        round(&mut work, &seat);
        assert_eq!(kept(303, 7), Some(name(7)), "VMs of other hosts are in its domain");
    }

    #[test]
    fn new_names_are_reported_at_once_and_all_names_sometimes() {
        use std::cell::RefCell;
        let index = Index::new(1 << 20);
        let (ram, _told) = ram(1..=100);
        let member = index.join(Arc::clone(&ram) as _, key(), 100).unwrap();
        let seat = index.seats().next().unwrap();
        let (_stop, stopped) = channel();
        let received = RefCell::new(Vec::new());
        let tell = |names: &[Name]| received.borrow_mut().extend_from_slice(names);
        let mut look = looking();
        let mut work = Work::new(&index, (1.0, &NOBODY), &stopped, &tell, &mut look);
        let began = Instant::now();
        let mut round = |nth: u32| {
            assert!(work.turn(&seat, began + ROUND_MIN * nth).unwrap(), "a round is due");
            std::mem::take(&mut *received.borrow_mut())
        };
        assert_eq!(round(0).len(), 100);
        assert_eq!(round(1), []);
        ram.pages[7].store(200, Relaxed);
        assert_eq!(round(2), [name(200)]);
        let later = u32::try_from(TELL_ALL.as_secs() / ROUND_MIN.as_secs()).unwrap();
        assert_eq!(round(later).len(), 100);
        assert_eq!(round(later + 1), []);
        assert_eq!(member.scanned().named, 100);
    }

    #[test]
    fn the_thread_scans_new_members_until_it_is_stopped() {
        let index = Index::new(1 << 20);
        let scanner = Scanner::start(&index, 1.0, |_| {}).unwrap();
        let (ram, read) = ram(1..=40);
        let member = index.join(Arc::clone(&ram) as _, key(), 40).unwrap();
        for _ in 0..40 {
            read.recv().unwrap();
        }
        drop(scanner);
        assert_eq!(member.scanned(), Scanned { rounds: 1, named: 40 });
        assert!((1..=40).all(|content| index.has(&name(content))));
        drop(member);
        assert_eq!(Arc::strong_count(&ram), 1);
    }

    #[test]
    fn it_ends_at_once_in_the_middle_of_a_round_and_of_a_rest() {
        let index = Index::new(1 << 20);
        let (ram, read) = ram((0..1_000_000).map(|page| page % 200));
        let _member = index.join(ram, key(), 1_000_000).unwrap();
        let scanner = Scanner::start(&index, 1.0, |_| {}).unwrap();
        read.recv().unwrap();
        drop(scanner);
        let (stop, told) = channel();
        let mut look = looking();
        let mut work = Work::new(&index, (0.05, &NOBODY), &told, &|_| {}, &mut look);
        assert!(work.rest().is_ok());
        drop(stop);
        assert!(work.rest().is_err() && work.wait(Duration::from_secs(3600)).is_err());
    }

    /// On a busy host the thread may not run for seconds, also in the middle of a note, and others
    /// would wait for its lock.
    #[test]
    fn the_thread_that_runs_only_on_an_idle_cpu_notes_nothing() {
        fn here() -> String {
            thread::current().name().unwrap_or_default().to_owned()
        }
        struct Read(Sender<String>);
        impl Holder for Read {
            fn read(&self, _: u64, into: &mut [u8]) -> bool {
                let _ = self.0.send(here());
                into.fill(7);
                true
            }
        }
        let index = Index::new(1 << 20);
        let (read, threads) = channel();
        let noted = read.clone();
        // Told while it is noted.
        let tell = move |_: &[Name]| drop(noted.send(here()));
        let _scanner = Scanner::start(&index, 1.0, tell).unwrap();
        let _member = index.join(Arc::new(Read(read)), key(), 1).unwrap();
        assert_eq!([(); 2].map(|()| threads.recv().unwrap()), ["scan-hash", "scan"]);
    }

    #[test]
    fn it_gives_way_as_long_as_anything_moves() {
        let scanner = Scanner::start(&Index::new(1), 1.0, |_| {}).unwrap();
        let moving = |scanner: &Scanner| scanner.moving.load(Relaxed);
        let (one, other) = (scanner.give_way(), scanner.give_way());
        drop(one);
        assert_eq!(moving(&scanner), 1);
        drop(other);
        assert_eq!(moving(&scanner), 0);
    }

    #[test]
    fn its_thread_runs_only_on_an_idle_cpu() {
        thread::spawn(|| {
            idle::only_when_idle().unwrap();
            let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
            let fields: Vec<_> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
            // As proc(5) numbers them, less the two before the parenthesis.
            let (nice, policy) = (fields[19 - 3], fields[41 - 3]);
            assert_eq!((nice, policy), ("19", "5"));
        })
        .join()
        .unwrap();
    }
}
