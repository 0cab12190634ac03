//! VMs that arrive at one host, without their sources.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use audit::Delivery;
use content::{Domain, Holder, Key, NAME_BYTES, Name};
use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use data_threads::{DataThreads, SchedParams};
use directory::protocol::RequestKind;
use directory::{Directory, DirectoryError, HostName};
use identity::Security;
use page::{BlockId, Epoch, Fill, PAGE_BYTES, PageIndex, Reserve};
use parking_lot::Mutex;
use placer::{BlockPlan, Feeder, Placement, Placer};
use ram::Mapping;
use transport::{Incoming, LaneEnd};
use wire::{Answer, LaneHeader, Late, Names, Tables, ToSource};

use super::drained::Drained;
use super::in_flight::Claim;
use super::outbox::SourceReport;
use super::recipient::{OWN_PAGES, WAITING_MAX};
use super::*;
use crate::rack::{DirectoryAt, Rack};

const MAPPED: BlockId = BlockId(0);
const INLINE: BlockId = BlockId(1);
const NAME: Name = Name([7; NAME_BYTES]);

/// The provider of the content with that name.
const BRINGS: Provider = Provider::Vm(7);

fn key() -> Key {
    Key::new(b"test", &Domain::default())
}

/// A VM with a block that is mapped, and one that goes through QEMU's stream.
fn arriving() -> Arriving {
    let bytes = 16 * PAGE_BYTES as u64;
    let mapping = Arc::new(Mapping::own(bytes));
    let (qemu, _other_end) = UnixStream::pair().unwrap();
    let feeder = Feeder::start(qemu, page::Pool::new(1 << 20)).unwrap();
    let plan = |name: &str, placement| BlockPlan { name: name.to_owned(), bytes, placement };
    let mapped = plan("ram", Placement::Mapped(Arc::clone(&mapping)));
    let plans = vec![mapped, plan("rom", Placement::Inline)];
    let placer = Arc::new(Placer::new(plans, feeder.handle()).unwrap());
    let mut blocks = Blocks::default();
    blocks.push("ram".to_owned(), bytes, Some(mapping));
    blocks.push("rom".to_owned(), bytes, None);
    let memory = Reserve::new(NAMED_BYTES_MAX);
    Arriving { placer, blocks, disks: None, sleeps: false, memory }
}

/// Keeps what is placed, and can't be read.
#[derive(Default)]
struct Pipe(Mutex<Vec<(PageIndex, Vec<u8>)>>);

impl PagePlacer for Pipe {
    fn place_fills(&self, _: BlockId, _: Epoch, _: &[Fill]) -> Result<(), LaneEnd> {
        Ok(())
    }

    fn check(&self, _: BlockId, _: Epoch, _: &[PageIndex]) -> Result<(), LaneEnd> {
        Ok(())
    }

    fn place_bodies(
        &self,
        _: BlockId,
        _: Epoch,
        pages: &[PageIndex],
        bytes: &[u8],
        _: Delivery,
    ) -> Result<(), LaneEnd> {
        let bodies = bytes.chunks_exact(PAGE_BYTES).map(<[u8]>::to_vec);
        self.0.lock().extend(pages.iter().copied().zip(bodies));
        Ok(())
    }

    fn never_waits(&self) -> bool {
        true
    }
}

/// A VM whose pages go into a pipe.
fn arriving_by(pipe: &Arc<Pipe>) -> Arriving {
    let mut blocks = Blocks::default();
    blocks.push("web1".to_owned(), 16 * PAGE_BYTES as u64, None);
    Arriving { placer: Arc::clone(pipe) as _, blocks, ..arriving() }
}

/// The answer to its source for a page by name: whether it is wanted, and whether it is awaited.
fn said(vm: &Resolving, block: BlockId, page: u32) -> (u128, u128) {
    let (mut source, _lane) = named(vm, block, page, page);
    received(&mut source)
}

/// The next answer to its source.
fn received(source: &mut TcpStream) -> (u128, u128) {
    let mut answer = [0; Answer::BYTES];
    source.read_exact(&mut answer).unwrap();
    let Answer { requested: wanted, later, .. } = Answer::parse(&answer).unwrap();
    (wanted.bits(), later.bits())
}

/// Its source names a page on a new lane. Returns both ends.
fn named(vm: &Resolving, block: BlockId, page: u32, ticket: u32) -> (TcpStream, Incoming) {
    named_as(vm, (NAME, Epoch(1)), block, page, ticket)
}

/// The same for a version of the page.
fn named_as(
    vm: &Resolving,
    (name, epoch): (Name, Epoch),
    block: BlockId,
    page: u32,
    ticket: u32,
) -> (TcpStream, Incoming) {
    let names =
        Names { block, epoch, ticket, may_wait: true, names: &[name], places: &[], fills: &[] };
    let mut bytes = Vec::new();
    names.write([PageIndex(page)].into_iter(), &mut bytes);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut source = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    source.write_all(&bytes).unwrap();
    let (accepted, _) = listener.accept().unwrap();
    let mut lane = Incoming::new(Security::Plaintext.accept(accepted).unwrap());
    let Some(LaneHeader::Named(header)) = lane.next_header().unwrap() else {
        panic!("names were sent")
    };
    vm.take(&mut lane, header).unwrap();
    (source, lane)
}

/// The thread that serves waiters serves all VMs, and must not wait for one VM's QEMU.
#[test]
fn inline_pages_wait_for_no_other_vm() {
    let threads = DataThreads::new(SchedParams::default(), |_| {});
    let admit = |exchange: &Arc<Exchange>| exchange.admit(key(), None, arriving(), &threads);
    let exchange = Exchange::start(1 << 10, None).unwrap();
    let (one, _hears_one) = admit(&exchange).unwrap();
    let (other, _hears_other) = admit(&exchange).unwrap();
    assert_eq!(said(&one, MAPPED, 0), (1, 0), "it brings it");
    assert_eq!(said(&other, MAPPED, 1), (0, 1));
    assert_eq!(said(&other, INLINE, 2), (1, 0));
    let exchange = Exchange::start_for_one(32).unwrap();
    let (alone, _hears) = admit(&exchange).unwrap();
    assert_eq!(said(&alone, MAPPED, 0), (1, 0));
    assert_eq!(said(&alone, INLINE, 2), (0, 1), "it holds up nobody else");
}

#[test]
fn what_a_vm_can_not_wait_for_is_sent_at_once() {
    let threads = DataThreads::new(SchedParams::default(), |_| {});
    let exchange = Exchange::start(1 << 10, None).unwrap();
    let admit = || exchange.admit(key(), None, arriving(), &threads).unwrap();
    let ((one, _hears_one), (other, _hears_other)) = (admit(), admit());
    assert_eq!(said(&one, MAPPED, 0), (1, 0), "it brings it");
    let recipient = other.recipient();
    recipient.wait(&mut recipient.tickets.lock(), 7, WAITING_MAX);
    assert_eq!(said(&other, MAPPED, 1), (1, 0));
    // One of those that it waits for is placed.
    let place =
        AwaitedPage { block: MAPPED, epoch: Epoch(1), page: PageIndex(3), ticket: 7, nth: 0 };
    recipient.settled(place, false);
    assert_eq!(said(&other, MAPPED, 2), (0, 1));
}

/// They share what they have beyond their own parts. Nothing waits for it, and nothing is claimed
/// by a VM that gets no more.
#[test]
fn what_there_is_no_memory_for_is_sent_at_once() {
    let threads = DataThreads::new(SchedParams::default(), |_| {});
    let exchange = Exchange::start(1 << 10, None).unwrap();
    let memory = Reserve::new(NAMED_BYTES_MAX);
    let admit = || {
        let vm = Arriving { memory: Arc::clone(&memory), ..arriving() };
        exchange.admit(key(), None, vm, &threads).unwrap()
    };
    let [(one, _hears_one), (greedy, _hears_greedy), (other, _hears_other)] =
        [(); 3].map(|()| admit());
    assert_eq!(said(&one, MAPPED, 0), (1, 0), "it brings it");
    let wait = |vm: &Resolving, pages| {
        let recipient = vm.recipient();
        recipient.wait(&mut recipient.tickets.lock(), 7, pages);
    };
    wait(&greedy, WAITING_MAX + OWN_PAGES - 1);
    assert_eq!(said(&greedy, MAPPED, 1), (1, 0));
    assert_eq!(memory.borrowed_bytes(), memory.bytes());
    wait(&other, OWN_PAGES - 1);
    assert_eq!(said(&other, MAPPED, 2), (0, 1), "it has its own part");
    assert_eq!(said(&other, MAPPED, 3), (1, 0));
    drop(greedy);
    assert_eq!(said(&other, MAPPED, 4), (0, 1));
    assert!(memory.borrowed_bytes() > 0);
    // What it waited for is placed, and its source names no more.
    let place =
        AwaitedPage { block: MAPPED, epoch: Epoch(1), page: PageIndex(3), ticket: 7, nth: 0 };
    (0..OWN_PAGES).for_each(|_| other.recipient().settled(place, false));
    other.trim();
    assert_eq!(memory.borrowed_bytes(), 0);
}

/// A newer version of a page is sent, so the one that was requested before may never arrive.
#[test]
fn nothing_waits_for_what_is_displaced_by_a_page_that_there_is_no_memory_for() {
    let threads = DataThreads::new(SchedParams::default(), |_| {});
    let exchange = Exchange::start(1 << 10, None).unwrap();
    let memory = Reserve::new(0);
    let admit = || {
        let vm = Arriving { memory: Arc::clone(&memory), ..arriving() };
        exchange.admit(key(), None, vm, &threads).unwrap()
    };
    let ((one, _hears_one), (other, mut hears_other)) = (admit(), admit());
    assert_eq!(said(&one, MAPPED, 0), (1, 0), "it brings it");
    assert_eq!(said(&other, MAPPED, 1), (0, 1));
    let recipient = one.recipient();
    recipient.wait(&mut recipient.tickets.lock(), 7, OWN_PAGES);
    // The same version again, after its lane has died, is still to come.
    assert_eq!(said(&one, MAPPED, 0), (1, 0));
    assert!(!recipient.has_asked(MAPPED, Epoch(1), &[PageIndex(0)], &[NAME]).is_empty());
    let newer = (Name([8; NAME_BYTES]), Epoch(2));
    let (mut source, _lane) = named_as(&one, newer, MAPPED, 0, 2);
    assert_eq!(received(&mut source), (1, 0));
    assert!(recipient.has_asked(MAPPED, Epoch(1), &[PageIndex(0)], &[NAME]).is_empty());
    let waiting = exchange.in_flight.lock().came(&NAME);
    assert!(waiting.is_empty());
    let Some(ToSource::Late { batches }) = hears_other.next() else { panic!("its source is told") };
    assert!(matches!(&*batches, [Late { ticket: 1, requested, more: false }] if *requested == [0]));
}

#[test]
fn a_vm_that_arrives_may_have_content_for_vms_of_its_domain() {
    let sharing = Sharing::start(b"secret".to_vec(), None).unwrap();
    let threads = DataThreads::new(SchedParams::default(), |_| {});
    let red = Domain("red".to_owned());
    let has_any = |domain: &Domain| sharing.has_any(&sharing.key(domain));
    assert!(!has_any(&red));
    let admitted = sharing.admit((&red, false), arriving(), &threads).unwrap();
    assert!(has_any(&red) && !has_any(&Domain::default()));
    drop(admitted);
    assert!(!has_any(&red));
}

#[test]
fn content_is_found_by_a_name_that_came_with_it() {
    let threads = DataThreads::new(SchedParams::default(), |_| {});
    let exchange = Exchange::start(1 << 10, None).unwrap();
    let admit = || exchange.admit(key(), None, arriving(), &threads).unwrap();
    let ((one, mut hears_one), (other, _hears_other)) = (admit(), admit());
    let content = vec![9; PAGE_BYTES];
    let name = key().name(&content);
    let ask = |vm: &Resolving, page| {
        let (mut source, _lane) = named_as(vm, (name, Epoch(1)), MAPPED, page, page);
        received(&mut source)
    };
    assert_eq!(ask(&one, 0), (1, 0), "its source sends it");
    assert_eq!(ask(&one, 5), (0, 1), "the same is on its way");
    // It comes with another page, of which nothing was asked.
    let pages = vec![PageIndex(2), PageIndex(3)];
    let bytes = [&*content, &[8; PAGE_BYTES]].concat();
    let placer = &one.recipient().placer;
    placer.place_bodies(MAPPED, Epoch(1), &pages, &bytes, Delivery::Body).unwrap();
    let names = vec![name, key().name(&[8; PAGE_BYTES])];
    let tables = Tables { pages, names, ..Tables::default() };
    one.came(MAPPED, Epoch(1), &tables);
    assert_eq!(ask(&other, 7), (0, 0), "the other VM has it");
    let mut page = vec![0; PAGE_BYTES];
    assert!(other.recipient().blocks.read(7, &mut page) && page == content);
    // What was requested before still comes.
    let tables = Tables { pages: vec![PageIndex(0)], ..Tables::default() };
    placer.place_bodies(MAPPED, Epoch(1), &tables.pages, &content, Delivery::Body).unwrap();
    one.came(MAPPED, Epoch(1), &tables);
    assert!(matches!(hears_one.next(), Some(ToSource::Late { .. })));
}

/// It can't be copied from its memory later.
#[test]
fn what_a_vm_that_can_not_be_read_gets_is_handed_on_as_it_comes() {
    let threads = DataThreads::new(SchedParams::default(), |_| {});
    let exchange = Exchange::start(1 << 10, None).unwrap();
    let pipe = Arc::<Pipe>::default();
    let (one, mut hears_one) = exchange.admit(key(), None, arriving_by(&pipe), &threads).unwrap();
    let (other, mut hears_other) = exchange.admit(key(), None, arriving(), &threads).unwrap();
    let content = vec![9; PAGE_BYTES];
    let version = (key().name(&content), Epoch(1));
    let ask = |vm: &Resolving, page, ticket| {
        let (mut source, _lane) = named_as(vm, version, MAPPED, page, ticket);
        received(&mut source)
    };
    let came = |page| {
        let tables = Tables { pages: vec![PageIndex(page)], ..Tables::default() };
        one.came_as(MAPPED, Epoch(1), &tables, &content);
    };
    let placed = |outbox: &mut Outbox| match outbox.next() {
        Some(ToSource::Late { batches }) => {
            matches!(&*batches, [Late { requested, more: false, .. }] if requested.is_empty())
        }
        _ => false,
    };
    assert_eq!(ask(&one, 0, 1), (1, 0), "its source sends it");
    assert_eq!(ask(&one, 5, 2), (0, 1), "the same is on its way");
    came(0);
    assert!(placed(&mut hears_one));
    assert_eq!(*pipe.0.lock(), [(PageIndex(5), content.clone())]);
    assert_eq!(ask(&one, 7, 3), (1, 0), "it is not found any more");
    assert_eq!(ask(&other, 3, 4), (0, 1));
    came(7);
    assert!(placed(&mut hears_other));
    let mut page = vec![0; PAGE_BYTES];
    assert!(other.recipient().blocks.read(3, &mut page) && page == content);
    assert_eq!(ask(&one, 8, 5), (0, 0), "the other VM has it");
    assert_eq!(pipe.0.lock().last(), Some(&(PageIndex(8), content.clone())));
}

/// A directory that knows of nothing, and reports what it is asked.
#[derive(Debug)]
struct Empty(Sender<(RequestKind, Vec<Name>)>);

impl Directory for Empty {
    fn request(
        &self,
        kind: RequestKind,
        _: &HostName,
        names: &[Name],
        answers: &mut Vec<directory::Answer>,
        _: Instant,
    ) -> Result<(), DirectoryError> {
        if kind == RequestKind::Claim {
            answers.extend(names.iter().map(|_| directory::Answer::Yours));
        }
        let _ = self.0.send((kind, names.to_vec()));
        Ok(())
    }
}

#[test]
fn other_hosts_are_not_made_to_wait_for_what_can_not_be_read_here() {
    let (tell, told) = unbounded();
    let at = DirectoryAt::Elsewhere(Arc::new(Empty(tell)));
    let rack = Rack::new("a", Vec::new(), Security::Plaintext, at).unwrap();
    let exchange = Exchange::start(1 << 10, Some(rack)).unwrap();
    let threads = DataThreads::new(SchedParams::default(), |_| {});
    let (domain, vm) = (Domain::default(), arriving_by(&Arc::default()));
    let (vm, _hears) = exchange.admit(key(), Some(&domain), vm, &threads).unwrap();
    assert_eq!(said(&vm, MAPPED, 0), (1, 0));
    let next = || told.recv_timeout(Duration::from_secs(10)).expect("the directory is asked");
    let mut asked = [next(), next(), next()];
    // Another thread has the host forgotten at the start.
    let order = [RequestKind::Forget, RequestKind::Claim, RequestKind::Release];
    asked.sort_by_key(|(kind, _)| order.iter().position(|one| one == kind));
    let expected = [
        (RequestKind::Forget, vec![]),
        (RequestKind::Claim, vec![NAME]),
        (RequestKind::Release, vec![NAME]),
    ];
    assert_eq!(asked, expected);
}

/// A directory that answers once the other end is dropped, or late.
#[derive(Debug)]
struct Slow(Receiver<()>);

impl Directory for Slow {
    fn request(
        &self,
        kind: RequestKind,
        _: &HostName,
        names: &[Name],
        answers: &mut Vec<directory::Answer>,
        _: Instant,
    ) -> Result<(), DirectoryError> {
        if kind == RequestKind::Claim {
            let _ = self.0.recv_timeout(Duration::from_secs(10));
            answers.extend(names.iter().map(|_| directory::Answer::Yours));
        }
        Ok(())
    }
}

/// Its lane has died, so its source names the page again. The page must not wait for itself.
#[test]
fn a_page_that_waits_for_the_directory_is_requested_when_it_is_named_again() {
    let (answers, asked) = bounded(0);
    let at = DirectoryAt::Elsewhere(Arc::new(Slow(asked)));
    let rack = Rack::new("a", Vec::new(), Security::Plaintext, at).unwrap();
    let exchange = Exchange::start(1 << 10, Some(rack)).unwrap();
    let threads = DataThreads::new(SchedParams::default(), |_| {});
    let (domain, vm) = (Domain::default(), arriving());
    let (vm, _hears) = exchange.admit(key(), Some(&domain), vm, &threads).unwrap();
    let (mut first, _lane) = named(&vm, MAPPED, 0, 1);
    let (mut second, _other_lane) = named(&vm, MAPPED, 0, 2);
    assert_eq!(received(&mut second), (1, 0));
    drop(answers);
    assert_eq!(received(&mut first), (1, 0));
}

/// An arriving VM, and the reports to its source.
fn recipient(exchange: &Exchange) -> (Arc<Recipient>, Receiver<SourceReport>) {
    let Arriving { placer, blocks, memory, .. } = arriving();
    let blocks = Arc::new(blocks);
    let member = exchange.index.join(Arc::clone(&blocks) as _, key(), blocks.pages()).unwrap();
    let (tell, told) = unbounded();
    let held = (Arc::new(member), blocks);
    exchange.arriving.lock().extend([1, 7]);
    (Arc::new(Recipient::new((1, key()), placer, held, tell, false, &memory)), told)
}

/// One of its pages waits for content.
fn wait(exchange: &Exchange, recipient: &Arc<Recipient>, name: Name, ticket: u32) {
    let place = AwaitedPage { block: MAPPED, epoch: Epoch(1), page: PageIndex(3), ticket, nth: 0 };
    let page = Page { recipient: Arc::clone(recipient), place };
    let (by, now) = (Provider::Vm(recipient.number), Instant::now());
    let mut tickets = recipient.tickets.lock();
    let mut in_flight = exchange.in_flight.lock();
    assert_eq!(in_flight.claim(name, BRINGS, now, || None), Claim::Yours);
    assert_eq!(in_flight.claim(name, by, now, || Some(Waiter::Page(page))), Claim::Waits);
    drop(in_flight);
    Recipient::open_ticket(&mut tickets, ticket);
    recipient.wait(&mut tickets, ticket, 1);
    drop(tickets);
    recipient.close_ticket(ticket, true);
}

/// Waits until a ticket is settled. Returns whether its source is to send the page.
fn is_wanted(told: &Receiver<SourceReport>, ticket: u32) -> bool {
    let told = told.recv_timeout(Duration::from_secs(10)).expect("its source is told");
    let SourceReport::Late(Late { ticket: of, requested: wanted, more: false }) = told else {
        panic!("it is all")
    };
    assert_eq!(of, ticket);
    wanted == [0]
}

/// A VM whose memory can't be read without a panic.
struct Faulty;

impl Holder for Faulty {
    fn read(&self, _: u64, _: &mut [u8]) -> bool {
        panic!("a fault, for a test")
    }
}

#[test]
fn a_fault_while_content_is_copied_leaves_nobody_waiting() {
    let exchange = Exchange::start(1 << 10, None).unwrap();
    let faulty = exchange.index.join(Arc::new(Faulty), key(), 8).unwrap();
    faulty.note(&[(3, NAME)]);
    let (recipient, told) = recipient(&exchange);
    // The thread survives the first panic.
    for ticket in [1, 2] {
        wait(&exchange, &recipient, NAME, ticket);
        exchange.wake_waiters(&[NAME]);
        assert!(is_wanted(&told, ticket));
    }
}

#[test]
fn a_fault_while_what_was_brought_is_placed_leaves_nobody_waiting() {
    let exchange = Exchange::start(1 << 10, None).unwrap();
    let (recipient, told) = recipient(&exchange);
    wait(&exchange, &recipient, NAME, 1);
    let body = |_: usize| -> &'static [u8] { panic!("a fault, for a test") };
    let brought = catch_unwind(AssertUnwindSafe(|| exchange.brought(BRINGS, &[NAME], &body)));
    assert!(brought.is_err());
    assert!(is_wanted(&told, 1));
}

#[test]
fn a_fault_while_a_group_is_settled_leaves_the_rest_of_it_not_waiting() {
    let exchange = Exchange::start(1 << 10, None).unwrap();
    let (recipient, told) = recipient(&exchange);
    let pages = [1, 2, 3].map(|ticket| {
        let mut tickets = recipient.tickets.lock();
        Recipient::open_ticket(&mut tickets, ticket);
        recipient.wait(&mut tickets, ticket, 1);
        drop(tickets);
        recipient.close_ticket(ticket, true);
        let place =
            AwaitedPage { block: MAPPED, epoch: Epoch(1), page: PageIndex(3), ticket, nth: 0 };
        (NAME, Page { recipient: Arc::clone(&recipient), place })
    });
    let mut drained = Drained::new(&exchange, pages.into());
    let settling = catch_unwind(AssertUnwindSafe(|| {
        drained.settle(3, |_, _, page| {
            page.recipient.settled(page.place, false);
            panic!("a fault, for a test")
        });
    }));
    assert!(settling.is_err());
    drop(drained);
    for (ticket, wanted) in [(3, false), (1, true), (2, true)] {
        assert_eq!(is_wanted(&told, ticket), wanted);
    }
}

/// Its source listens only to the ticket of the last time that it named the page.
#[test]
fn a_page_that_was_named_twice_is_requested_on_both_tickets() {
    let exchange = Exchange::start(1 << 10, None).unwrap();
    let (recipient, told) = recipient(&exchange);
    wait(&exchange, &recipient, NAME, 1);
    let place =
        AwaitedPage { block: MAPPED, epoch: Epoch(1), page: PageIndex(3), ticket: 2, nth: 0 };
    let again = Waiter::Page(Page { recipient: Arc::clone(&recipient), place });
    let mut tickets = recipient.tickets.lock();
    let mut in_flight = exchange.in_flight.lock();
    let claim = in_flight.claim(NAME, Provider::Vm(1), Instant::now(), || Some(again));
    drop(in_flight);
    assert_eq!(claim, Claim::Waits);
    Recipient::open_ticket(&mut tickets, 2);
    recipient.wait(&mut tickets, 2, 1);
    drop(tickets);
    recipient.close_ticket(2, true);
    exchange.not_brought(BRINGS, &[NAME]);
    for ticket in [1, 2] {
        assert!(is_wanted(&told, ticket));
    }
}

#[test]
fn what_was_brought_is_placed_if_it_has_the_name() {
    let exchange = Exchange::start(1 << 10, None).unwrap();
    let (recipient, told) = recipient(&exchange);
    let content = vec![9; PAGE_BYTES];
    let right = recipient.key.name(&content);
    for (ticket, name) in [(1, right), (2, NAME)] {
        wait(&exchange, &recipient, name, ticket);
        let wrong = exchange.brought(BRINGS, &[name], &|_| &content[..]);
        assert_eq!(wrong == 1, name == NAME);
        assert_eq!(is_wanted(&told, ticket), name == NAME);
    }
    assert!(told.try_recv().is_err(), "each is settled once");
}
