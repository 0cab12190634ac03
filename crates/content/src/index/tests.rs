use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use parking_lot::Mutex;
use proptest::prelude::*;

use super::*;
use crate::Domain;

const WORDS: usize = PAGE_BYTES / 8;

/// RAM that may change while it is read, word by word, as a guest's does.
struct Ram {
    pages: Vec<Vec<AtomicU64>>,
    gone: AtomicBool,
    reads: AtomicUsize,
}

impl Ram {
    fn new(pages: usize) -> Arc<Self> {
        let page = || (0..WORDS).map(|_| AtomicU64::new(0)).collect();
        Arc::new(Self {
            pages: (0..pages).map(|_| page()).collect(),
            gone: AtomicBool::new(false),
            reads: AtomicUsize::new(0),
        })
    }

    fn write(&self, page: usize, content: u64) {
        for (nth, word) in self.pages[page].iter().enumerate() {
            word.store(word_of(content, nth), Relaxed);
        }
    }
}

impl Holder for Ram {
    fn read(&self, page: u64, into: &mut [u8]) -> bool {
        self.reads.fetch_add(1, Relaxed);
        let page = usize::try_from(page).ok().and_then(|page| self.pages.get(page));
        let Some(page) = page.filter(|_| !self.gone.load(Relaxed)) else {
            into.fill(0xee);
            return false;
        };
        for (word, into) in page.iter().zip(into.as_chunks_mut::<8>().0) {
            *into = word.load(Relaxed).to_le_bytes();
        }
        true
    }
}

fn word_of(content: u64, nth: usize) -> u64 {
    content.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ nth as u64
}

impl Index {
    /// How much memory the index takes.
    fn bytes(&self) -> usize {
        let members: usize = self.seats().map(|seat| seat.bytes()).sum();
        let fixed = size_of::<Self>() + self.seats.bytes() + self.numbers.bytes();
        fixed + self.table.bytes() + members
    }
}

fn bytes_of(content: u64) -> Vec<u8> {
    (0..WORDS).flat_map(|nth| word_of(content, nth).to_le_bytes()).collect()
}

fn key(domain: &str) -> Key {
    Key::new(b"secret", &Domain(domain.to_owned()))
}

fn name_of(content: u64) -> Name {
    key("").name(&bytes_of(content))
}

/// The contents that the index finds; their bytes are checked.
fn find(index: &Index, contents: &[u64]) -> Vec<u64> {
    let names: Vec<_> = contents.iter().map(|content| name_of(*content)).collect();
    let (mut into, mut found) = (vec![0; names.len() * PAGE_BYTES], Vec::new());
    let count = index.find(&names, &key(""), &mut into, &mut found);
    let each = contents.iter().zip(into.chunks(PAGE_BYTES)).zip(&found);
    let each = each.filter(|(_, found)| **found).map(|((content, bytes), _)| {
        assert_eq!(bytes, bytes_of(*content), "content {content}");
        *content
    });
    let all: Vec<_> = each.collect();
    assert_eq!(all.len(), count);
    all
}

/// A member whose pages have these contents, all noted.
fn joined(index: &Arc<Index>, contents: &[u64]) -> (Arc<Ram>, Member) {
    let ram = Ram::new(contents.len());
    let member = index.join(Arc::clone(&ram) as _, key(""), contents.len() as u64).unwrap();
    for (page, content) in contents.iter().enumerate() {
        ram.write(page, *content);
        member.note(&[(page as u64, name_of(*content))]);
    }
    (ram, member)
}

#[test]
fn what_a_member_has_is_found_until_it_changes_or_leaves() {
    let index = Index::new(1 << 20);
    let (ram, member) = joined(&index, &[10, 11, 12, 13]);
    let (_other, others) = joined(&index, &[13, 20]);
    assert_eq!(find(&index, &[9, 10, 10, 20, 12, 11, 13]), [10, 10, 20, 12, 11, 13]);
    ram.write(1, 99);
    assert!(index.has(&name_of(11)) && !index.has(&name_of(99)));
    assert_eq!(find(&index, &[11, 10]), [10]);
    assert!(!index.has(&name_of(11)), "an entry that was wrong is gone");
    ram.write(2, 98);
    member.note(&[(2, name_of(98))]);
    assert!(!index.has(&name_of(12)), "and so is one that is out of date");
    member.note(&[(1, name_of(99)), (4, name_of(5)), (u64::MAX, name_of(5))]);
    member.index.forget(member.seat(), 0);
    member.index.forget(member.seat(), 4);
    assert_eq!(find(&index, &[99, 5, 10]), [99]);
    assert_eq!(member.scanned().named, 3);
    drop(member);
    assert_eq!(find(&index, &[10, 11, 98, 99, 13, 20]), [13, 20]);
    assert!(!index.has(&name_of(98)));
    assert_eq!(Arc::strong_count(&ram), 1);
    drop(others);
    assert_eq!(find(&index, &[13, 20]), []);
}

#[test]
fn names_that_share_their_first_bits_do_not_push_each_other_out() {
    let index = Index::new(1 << 20);
    let (_ram, _member) = joined(&index, &[1]);
    let name = name_of(1);
    let mut other = name;
    other.0[19] ^= 1;
    let (mut into, mut found) = (vec![0; PAGE_BYTES], Vec::new());
    assert_eq!(index.find(&[other], &key(""), &mut into, &mut found), 0);
    assert_eq!(find(&index, &[1]), [1]);
}

#[test]
fn domains_never_meet_and_nothing_is_read_for_another_one() {
    let index = Index::new(1 << 20);
    let ram = Ram::new(1);
    ram.write(0, 7);
    let member = index.join(Arc::clone(&ram) as _, key("theirs"), 1).unwrap();
    member.note(&[(0, key("theirs").name(&bytes_of(7)))]);
    assert_eq!(find(&index, &[7]), []);
    // Not even if a name of our domain is noted there.
    member.note(&[(0, name_of(7))]);
    assert_eq!(find(&index, &[7]), []);
    assert_eq!(ram.reads.load(Relaxed), 0);
    let (mut into, mut found) = (vec![0; PAGE_BYTES], Vec::new());
    let name = key("theirs").name(&bytes_of(7));
    member.note(&[(0, name)]);
    assert_eq!(index.find(&[name], &key("theirs"), &mut into, &mut found), 1);
    assert_eq!(into, bytes_of(7));
}

#[test]
fn a_holder_that_fails_to_read_is_tried_once() {
    let index = Index::new(1 << 20);
    let contents: Vec<u64> = (0..300).collect();
    let (first, _first) = joined(&index, &contents);
    let (_second, _second_member) = joined(&index, &contents);
    assert_eq!(find(&index, &contents), contents);
    first.gone.store(true, Relaxed);
    assert_eq!(find(&index, &contents), contents);
    let asked = first.reads.load(Relaxed);
    assert_eq!(find(&index, &contents), contents);
    assert_eq!(first.reads.load(Relaxed), asked);
}

#[test]
fn the_sample_follows_the_names() {
    let index = Index::new(1 << 20);
    let contents: Vec<u64> = (0..2000).collect();
    let (_ram, member) = joined(&index, &contents);
    let sampled = |contents: &[u64], one_in: u32| {
        let names = contents.iter().map(|content| name_of(*content));
        let mut hints: Vec<u32> = names.map(|name| Hint::of(&name).bits()).collect();
        hints.retain(|hint| *hint <= u32::MAX / one_in);
        hints.sort_unstable();
        hints
    };
    let sample = |one_in| {
        let Sample { one_in: of, mut hints } = member.sample(one_in);
        assert_eq!(of, one_in);
        hints.sort_unstable();
        hints
    };
    assert_eq!(sample(1), sampled(&contents, 1));
    assert_eq!(sample(16), sampled(&contents, 16));
    assert!((60..=190).contains(&sample(16).len()), "one in 16 of 2000");
    // Half of the pages change, and some of these become zero; all are noted again.
    let contents: Vec<u64> = (0..2000).map(|nth| nth + nth % 2 * 5000).collect();
    for (page, content) in (0..).zip(&contents) {
        member.note(&[(page, name_of(*content))]);
    }
    (0..1000).for_each(|page| member.index.forget(member.seat(), page));
    assert_eq!(sample(4), sampled(&contents[1000..], 4));
    assert_eq!(member.scanned(), Scanned { rounds: 0, named: 1000 });
    assert!(member.has_names());
    (1000..2000).for_each(|page| member.index.forget(member.seat(), page));
    assert!(!member.has_names());
}

#[test]
fn a_member_that_leaves_while_it_is_read_stays_until_the_copy_is_made() {
    /// A holder that reads only when the test lets it.
    struct Slow(Mutex<Receiver<()>>, Sender<()>);
    impl Holder for Slow {
        fn read(&self, _: u64, into: &mut [u8]) -> bool {
            self.1.send(()).unwrap();
            self.0.lock().recv().unwrap();
            into.copy_from_slice(&bytes_of(1));
            true
        }
    }
    let index = Index::new(1 << 20);
    let ((go, told), (tell, asked)) = (channel(), channel());
    let slow = Arc::new(Slow(Mutex::new(told), tell));
    let member = index.join(Arc::clone(&slow) as _, key(""), 1).unwrap();
    member.note(&[(0, name_of(1))]);
    thread::scope(|scope| {
        // Dropped if an assertion fails, so that the reader does not wait for ever.
        let go = go;
        let finding = scope.spawn(|| find(&index, &[1]));
        asked.recv().unwrap();
        drop(member);
        // No other call waits for the copy, and the next member is not taken for the one that
        // left.
        let (_ram, _next) = joined(&index, &[2]);
        assert_eq!(find(&index, &[1, 2]), [2]);
        go.send(()).unwrap();
        assert_eq!(finding.join().unwrap(), [1]);
    });
    assert_eq!(Arc::strong_count(&slow), 1);
}

#[test]
fn many_more_members_come_and_go_than_there_are_numbers() {
    let index = Index::new(1 << 20);
    let (_ram, _stays) = joined(&index, &[7]);
    for content in 100..9_000 {
        let member = index.join(Ram::new(0), key(""), 1).unwrap();
        member.note(&[(0, name_of(content))]);
        assert!(index.has(&name_of(content)));
    }
    assert!(!(100..9_000).any(|content| index.has(&name_of(content))));
    assert_eq!(find(&index, &[7]), [7]);
    let all: Vec<_> = (0..4094).map(|_| index.join(Ram::new(0), key(""), 0).unwrap()).collect();
    assert!(index.join(Ram::new(0), key(""), 0).is_none());
    drop(all);
    assert!(index.join(Ram::new(0), key(""), 0).is_some());
}

#[test]
fn a_million_pages_cost_half_a_percent_of_their_memory_and_leave_nothing_behind() {
    const VMS: u64 = 8;
    const PAGES: u64 = 131_072;
    let index = Index::new(1 << 22);
    let empty = index.bytes();
    // The table sees only the names of content.
    let name = |vm: u64, page: u64| key("").name(&(vm * PAGES + page).to_le_bytes());
    let mut members = Vec::new();
    for vm in 0..VMS {
        let member = index.join(Ram::new(0), key(""), PAGES).unwrap();
        (0..PAGES).for_each(|page| member.note(&[(page, name(vm, page))]));
        members.push(member);
    }
    let bytes_per_page = index.bytes() as f64 / (VMS * PAGES) as f64;
    assert!(bytes_per_page < 0.005 * PAGE_BYTES as f64, "{bytes_per_page} bytes a page");
    // All pages differ: the worst case for the table.
    let all = || (0..VMS).flat_map(|vm| (0..PAGES).map(move |page| (vm, page)));
    let held = all().filter(|(vm, page)| index.has(&name(*vm, *page))).count();
    assert!(held as f64 > 0.97 * (VMS * PAGES) as f64, "{held} are known");
    drop(members);
    assert_eq!(index.bytes(), empty);
}

/// Its RAM takes long to unmap, and the table long to shrink. The thread that notices its end has
/// others to serve.
#[test]
fn a_large_member_leaves_on_another_thread() {
    /// A holder that tells which thread drops it.
    struct Large(Sender<thread::ThreadId>);
    impl Holder for Large {
        fn read(&self, _: u64, _: &mut [u8]) -> bool {
            false
        }
    }
    impl Drop for Large {
        fn drop(&mut self) {
            let _ = self.0.send(thread::current().id());
        }
    }
    let index = Index::new(1 << 22);
    let empty = index.bytes();
    let (tell, dropped) = channel();
    let member = index.join(Arc::new(Large(tell)), key(""), FEW_PAGES).unwrap();
    member.note(&[(7, name_of(1))]);
    assert!(index.has(&name_of(1)) && index.bytes() > empty);
    drop(member);
    assert!(!index.has(&name_of(1)), "it has left at once");
    assert_ne!(dropped.recv().unwrap(), thread::current().id());
    assert_eq!(index.bytes(), empty);
}

#[test]
fn earlier_names_leave_with_their_member_once_no_migration_reads_them() {
    let index = Index::new(1 << 22);
    let member = index.join(Ram::new(0), key(""), 300).unwrap();
    let (names, page) = (member.earlier_names(), [7; PAGE_BYTES]);
    names.keep(true);
    let fingerprint = names.fingerprint(&page).unwrap();
    names.note((0, 256), &[(3, name_of(1))], &[fingerprint]);
    drop(member);
    assert_eq!(names.read().name(3, &page), Some(name_of(1)));
    assert!(index.earlier_names.borrowed_bytes() > 0);
    drop(names);
    assert_eq!(index.earlier_names.borrowed_bytes(), 0);
}

#[test]
fn pages_that_change_again_and_again_take_no_more_room_than_others() {
    const PAGES: u64 = 50_000;
    let index = Index::new(1 << 22);
    let member = index.join(Ram::new(0), key(""), PAGES).unwrap();
    let name = |round: u64, page: u64| key("").name(&(round * PAGES + page).to_le_bytes());
    for round in 0..8 {
        (0..PAGES).for_each(|page| member.note(&[(page, name(round, page))]));
    }
    let held = |round| (0..PAGES).filter(|page| index.has(&name(round, *page))).count();
    assert!(held(7) as f64 > 0.97 * PAGES as f64);
    assert!((0..7).all(|round| held(round) < 10));
}

#[test]
fn no_wrong_byte_is_found_while_all_pages_change() {
    const PAGES: usize = 64;
    const CONTENTS: u64 = 200;
    let index = Index::new(1 << 20);
    let rams: Vec<_> = (0..3).map(|_| Ram::new(PAGES)).collect();
    let over = AtomicBool::new(false);
    let found = AtomicUsize::new(0);
    // Finders start only once something is noted.
    let noted = Barrier::new(5);
    let names: Vec<Name> = (0..CONTENTS).map(name_of).collect();
    thread::scope(|scope| {
        for (ram, seed) in rams.iter().zip(1_u64..) {
            let (index, over, names, first) = (&index, &over, &names, &noted);
            // A guest, and notes of its pages: sometimes too early, sometimes too late, and
            // sometimes as another VM.
            scope.spawn(move || {
                let mut random = seed;
                let mut first = Some(first);
                while !over.load(Relaxed) {
                    let member = index.join(Arc::clone(ram) as _, key(""), PAGES as u64).unwrap();
                    for _ in 0..500 {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let page = (random >> 33) as usize % PAGES;
                        let content = (random >> 45) % CONTENTS;
                        let noted = [(page as u64, names[content as usize])];
                        if random >> 62 == 0 {
                            member.note(&noted);
                        }
                        ram.write(page, content);
                        if random >> 62 != 1 {
                            member.note(&noted);
                        }
                    }
                    first.take().map(Barrier::wait);
                }
            });
        }
        let finders: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let contents: Vec<u64> = (0..CONTENTS).collect();
                    noted.wait();
                    for _ in 0..100 {
                        found.fetch_add(find(&index, &contents).len(), Relaxed);
                    }
                })
            })
            .collect();
        let all_well =
            finders.into_iter().map(thread::ScopedJoinHandle::join).all(|end| end.is_ok());
        over.store(true, Relaxed);
        assert!(all_well);
    });
    assert!(found.into_inner() > 0, "something was found");
}

#[derive(Clone, Debug)]
enum Step {
    Join(usize),
    Leave(usize),
    /// A guest writes a page.
    Write(usize, usize, u64),
    /// The page is scanned.
    Note(usize, usize),
    Forget(usize, usize),
    Find(Vec<u64>),
}

const SLOTS: usize = 3;
const SLOT_PAGES: usize = 6;

/// A VM, and its contents.
type Slot = (Arc<Ram>, Member, [u64; SLOT_PAGES]);

fn step() -> impl Strategy<Value = Step> {
    let (slot, page, content) = (0..SLOTS, 0..SLOT_PAGES, 1..12_u64);
    prop_oneof![
        2 => slot.clone().prop_map(Step::Join),
        1 => slot.clone().prop_map(Step::Leave),
        8 => (slot.clone(), page.clone(), content).prop_map(|(s, p, c)| Step::Write(s, p, c)),
        8 => (slot.clone(), page.clone()).prop_map(|(s, p)| Step::Note(s, p)),
        1 => (slot, page).prop_map(|(s, p)| Step::Forget(s, p)),
        4 => prop::collection::vec(1..12_u64, 0..8).prop_map(Step::Find),
    ]
}

proptest! {
    #[test]
    fn what_is_found_is_there_and_what_was_just_noted_is_found(
        steps in prop::collection::vec(step(), 1..80)
    ) {
        let index = Index::new(1 << 20);
        let mut slots: [Option<Slot>; SLOTS] = Default::default();
        for step in steps {
            match step {
                Step::Join(slot) => {
                    let ram = Ram::new(SLOT_PAGES);
                    let pages = SLOT_PAGES as u64;
                    let member = index.join(Arc::clone(&ram) as _, key(""), pages).unwrap();
                    slots[slot] = Some((ram, member, [0; SLOT_PAGES]));
                }
                Step::Leave(slot) => slots[slot] = None,
                Step::Write(slot, page, content) => {
                    if let Some((ram, _, contents)) = &mut slots[slot] {
                        ram.write(page, content);
                        contents[page] = content;
                    }
                }
                Step::Note(slot, page) => {
                    if let Some((_, member, contents)) = &slots[slot] && contents[page] != 0 {
                        member.note(&[(page as u64, name_of(contents[page]))]);
                        prop_assert_eq!(find(&index, &[contents[page]]), [contents[page]]);
                    }
                }
                Step::Forget(slot, page) => {
                    if let Some((_, member, _)) = &slots[slot] {
                        member.index.forget(member.seat(), page as u64);
                    }
                }
                Step::Find(contents) => {
                    for found in find(&index, &contents) {
                        let there = |slot: &Slot| slot.2.contains(&found);
                        prop_assert!(slots.iter().flatten().any(there));
                    }
                }
            }
        }
    }
}
