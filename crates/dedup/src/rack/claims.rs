//! Batches of names, from the claim on this host until the answer. Content that no VM here has or
//! gets is claimed in the whole rack by a separate thread. Lanes go on meanwhile, and one query
//! covers all batches that have arrived since the last.

use std::fmt::Display;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use content::{Domain, Name};
use crossbeam_channel::{Receiver, Sender, bounded};
use data_threads::DataThreads;
use directory::HostName;
use page::PageIndex;
use parking_lot::Mutex;
use transport::Question;
use wire::{DiskPlace, NamedHeader, NamedTables};

use super::Rack;
use super::patience::{Answered, Patience};
use crate::destination::{Exchange, Page, Place, Provider, Recipient, Waiter};

/// The most batches in one query: what a source sends by name before it has an answer.
const AT_ONCE: usize = 16;
/// The most batches that wait for a query. Lanes wait when there are more.
const WAITING_MAX: usize = 64;

/// One batch of names. The bits say what happens to its pages; those without a bit are placed.
pub(crate) struct Batch {
    pub(crate) header: NamedHeader,
    pub(crate) pages: Vec<PageIndex>,
    pub(crate) names: Vec<Name>,
    pub(crate) places: Vec<Option<DiskPlace>>,
    /// Whether its pages may wait for content in flight from another provider.
    pub(crate) may_wait: bool,
    /// Whether its ticket is open, which counts its awaited pages.
    pub(crate) has_ticket: bool,
    /// Pages whose content no VM here has, and that this VM is to provide.
    pub(crate) ours: u128,
    /// Pages that its source is to send as bytes.
    pub(crate) wanted: u128,
    pub(crate) later: u128,
    /// Pages that were requested when its source named them again, before this answer.
    named_again: u128,
}

impl Batch {
    pub(crate) fn new(header: NamedHeader, named: NamedTables) -> Self {
        let NamedTables { pages, names, places, .. } = named;
        Self {
            header,
            pages,
            names,
            places,
            may_wait: false,
            has_ticket: false,
            ours: 0,
            wanted: 0,
            later: 0,
            named_again: 0,
        }
    }

    /// One of its pages, as a waiter.
    pub(crate) fn waiting(&self, recipient: &Arc<Recipient>, nth: usize) -> Option<Page> {
        let NamedHeader { block, epoch, ticket, .. } = self.header;
        let place =
            Place { block, epoch, page: self.pages[nth], ticket, nth: u8::try_from(nth).ok()? };
        Some(Page { recipient: Arc::clone(recipient), place })
    }

    /// The indices of the pages that this VM is to provide.
    fn our_places(&self) -> impl Iterator<Item = usize> + use<'_> {
        (0..self.names.len()).filter(|nth| self.ours >> nth & 1 == 1)
    }

    /// Answers the batch. Its source sends what is still this VM's to provide.
    pub(crate) fn answer(self, exchange: &Exchange, recipient: &Recipient, question: Question) {
        let Self { header, pages, names, ours, later, named_again, .. } = self;
        let NamedHeader { block, epoch, ticket, .. } = header;
        if self.has_ticket {
            recipient.close_ticket(ticket, later != 0);
        }
        let wanted = self.wanted | ours;
        let asked = pages.iter().zip(names).enumerate().filter(|(nth, _)| wanted >> nth & 1 == 1);
        let asked = asked.map(|(_, (page, name))| (block, epoch, *page, name));
        // Noted before the source can send them.
        exchange.wake_waiters(&recipient.asks(asked));
        question.answer(wanted | named_again, later);
    }
}

/// Batches whose answers wait for the rack. A lane may die meanwhile, and its source then names
/// their pages again: without this they would wait for themselves.
#[derive(Debug, Default)]
struct Unanswered(Mutex<Vec<Open>>);

#[derive(Debug)]
struct Open {
    header: NamedHeader,
    pages: Vec<PageIndex>,
    /// Pages that this VM is to provide, and those of them that were named again.
    ours: u128,
    named_again: u128,
}

impl Unanswered {
    fn add(&self, batch: &Batch) {
        let Batch { header, pages, ours, .. } = batch;
        let open = Open { header: *header, pages: pages.clone(), ours: *ours, named_again: 0 };
        self.0.lock().push(open);
    }

    /// A batch is named again, and lacks these of its pages. Returns those that wait here.
    fn name_again(&self, header: NamedHeader, pages: &[PageIndex], lacks: u128) -> u128 {
        let mut waiting = 0;
        for open in &mut *self.0.lock() {
            let place = |header: NamedHeader| (header.block, header.epoch);
            if place(open.header) == place(header) && open.pages == pages {
                open.named_again |= open.ours & lacks;
                waiting |= open.ours & lacks;
            }
        }
        waiting
    }

    /// The pages of a batch that were named again.
    fn named_again(&self, ticket: u32) -> u128 {
        let open = self.0.lock();
        open.iter().find(|open| open.header.ticket == ticket).map_or(0, |open| open.named_again)
    }

    fn remove(&self, ticket: u32) {
        let mut open = self.0.lock();
        if let Some(nth) = open.iter().position(|open| open.header.ticket == ticket) {
            open.swap_remove(nth);
        }
    }
}

/// Queries the rack for one arriving VM. Dropping it ends its thread, after the open query.
pub(crate) struct Claims {
    rack: Arc<Rack>,
    unanswered: Arc<Unanswered>,
    ask: Option<Sender<(Batch, Question)>>,
    thread: Option<JoinHandle<()>>,
}

impl Claims {
    pub(crate) fn start(
        (exchange, rack): (&Arc<Exchange>, &Arc<Rack>),
        recipient: &Arc<Recipient>,
        domain: &Domain,
        threads: &Arc<DataThreads>,
    ) -> io::Result<Self> {
        let (ask, asked) = bounded(WAITING_MAX);
        let unanswered = Arc::<Unanswered>::default();
        let asking = Asking {
            exchange: Arc::clone(exchange),
            rack: Arc::clone(rack),
            unanswered: Arc::clone(&unanswered),
            recipient: Arc::clone(recipient),
            domain: domain.clone(),
            patience: Patience::default(),
            noted: false,
        };
        let guard = threads.guard();
        let run = move || {
            let _guard = guard;
            asking.run(&asked);
        };
        let thread = data_threads::spawn("claims", run)?;
        Ok(Self { rack: Arc::clone(rack), unanswered, ask: Some(ask), thread: Some(thread) })
    }

    /// Queries the rack for what this VM is still to provide, and then answers the batch.
    pub(crate) fn ask(&self, batch: Batch, question: Question) {
        if let Some(ask) = &self.ask {
            self.unanswered.add(&batch);
            // The thread lives as long.
            let _ = ask.send((batch, question));
        }
    }

    /// Which of a batch's pages, of those that it `lacks`, wait for an answer to the same batch on
    /// another lane, as bits. The caller requests them.
    pub(crate) fn name_again(&self, batch: &Batch, lacks: u128) -> u128 {
        self.unanswered.name_again(batch.header, &batch.pages, lacks)
    }

    /// Publishes that these contents are here now.
    pub(crate) fn holds(&self, names: Vec<Name>) {
        self.rack.holds(names);
    }
}

impl Drop for Claims {
    fn drop(&mut self) {
        self.ask = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The thread that queries the rack.
struct Asking {
    exchange: Arc<Exchange>,
    rack: Arc<Rack>,
    unanswered: Arc<Unanswered>,
    recipient: Arc<Recipient>,
    domain: Domain,
    patience: Patience,
    /// Whether the report says already that other hosts' content is not used.
    noted: bool,
}

impl Asking {
    fn run(mut self, asked: &Receiver<(Batch, Question)>) {
        while let Ok(first) = asked.recv() {
            data_threads::point();
            let more = asked.try_iter().take(AT_ONCE - 1);
            let batches: Vec<_> = std::iter::once(first).chain(more).collect();
            let names: Vec<Name> = batches
                .iter()
                .flat_map(|(batch, _)| batch.our_places().map(|nth| batch.names[nth]))
                .collect();
            let mut hosts = self.hosts(&names).into_iter();
            for (mut batch, question) in batches {
                let ticket = batch.header.ticket;
                let named_again = self.unanswered.named_again(ticket);
                let places: Vec<usize> = batch.our_places().collect();
                let elsewhere: Vec<(HostName, usize)> = places
                    .into_iter()
                    .filter_map(|nth| Some((hosts.next().flatten()?, nth)))
                    .filter(|(_, nth)| named_again >> nth & 1 == 0)
                    .collect();
                (batch.named_again, batch.ours) = (named_again, batch.ours & !named_again);
                // Other hosts of the rack get it from here now, in any case.
                if batch.may_wait {
                    let far = self.fetch(&batch, elsewhere);
                    (batch.later, batch.ours) = (batch.later | far, batch.ours & !far);
                }
                batch.answer(&self.exchange, &self.recipient, question);
                // Only now: what was requested is noted.
                self.unanswered.remove(ticket);
            }
        }
    }

    /// Which hosts have these contents, one answer for each. Empty if the directory has no answer
    /// or is not queried.
    fn hosts(&mut self, names: &[Name]) -> Vec<Option<HostName>> {
        let began = Instant::now();
        if !self.patience.asks(began) {
            return Vec::new();
        }
        let hosts = match self.rack.claim(names) {
            Ok(hosts) => hosts,
            Err(error) => {
                self.note(&error);
                return Vec::new();
            }
        };
        let now = Instant::now();
        let answered = Answered {
            took: now - began,
            source_is_idle: self.recipient.source_is_idle(),
            is_elsewhere: 2 * hosts.iter().flatten().count() > names.len(),
        };
        if self.patience.answered(answered, now) {
            self.note(&"its directory answers too slowly");
        }
        hosts
    }

    /// Has other hosts send what they have or get. Returns which pages come from there, as bits.
    fn fetch(&self, batch: &Batch, mut elsewhere: Vec<(HostName, usize)>) -> u128 {
        let Self { exchange, rack, recipient, .. } = self;
        elsewhere.sort_unstable();
        let mut far = 0;
        for group in elsewhere.chunk_by(|(one, _), (other, _)| one == other) {
            let host = &group[0].0;
            let Some(line) = rack.line(exchange, host) else { continue };
            let by = (Provider::Vm(recipient.number), Provider::Peer(line));
            let now = Instant::now();
            let mut handed = Vec::with_capacity(group.len());
            // Locked in this order, as everywhere.
            let mut tickets = recipient.tickets.lock();
            let mut in_flight = exchange.in_flight.lock();
            for (_, nth) in group {
                let Some(page) = batch.waiting(recipient, *nth) else { continue };
                if in_flight.hand_over(&batch.names[*nth], by, now, Waiter::Page(page)) {
                    handed.push(batch.names[*nth]);
                    far |= 1 << nth;
                }
            }
            drop(in_flight);
            recipient.wait(&mut tickets, batch.header.ticket, handed.len());
            drop(tickets);
            rack.want(host, line, &self.domain, handed);
        }
        far
    }

    /// Notes once in the report why content of other hosts is not used.
    fn note(&mut self, why: &dyn Display) {
        if !self.noted {
            self.noted = true;
            let text =
                format!("content of other hosts of the rack is not used for some of it: {why}");
            self.recipient.note(text);
        }
    }
}
