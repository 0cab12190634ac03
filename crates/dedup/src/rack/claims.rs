//! Batches of names, from the claim on this host until the answer. Content that no VM here has or
//! gets is claimed in the whole rack by a separate thread. Lanes go on meanwhile, and one query
//! covers all batches that have arrived since the last.

use std::fmt::Display;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use content::{Domain, Name};
use crossbeam_channel::{Receiver, Sender, bounded};
use data_threads::{DataThreads, Joined};
use directory::HostName;
use page::{PageIndex, PageSet};
use parking_lot::Mutex;
use transport::Question;
use wire::{DiskLocation, NamedHeader, NamedTables};

use super::Rack;
use super::patience::{Answered, Patience};
use crate::destination::{AwaitedPage, Exchange, Page, Provider, Recipient, Waiter};

/// The most batches in one query: what a source sends by name before it has an answer.
const AT_ONCE: usize = 16;
/// The most batches that wait for a query. Lanes wait when there are more.
const WAITING_MAX: usize = 64;

/// What happens to one page of a batch of names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It is placed.
    Placed,
    /// No VM here has its content, and this VM is to provide it.
    Ours,
    /// Its source is to send it as bytes.
    Requested,
    /// Its content comes from another provider.
    Later,
    /// It was ours, and its source named it again before this answer, and was asked for it then.
    NamedAgain,
}

/// The fates of a batch's pages. Each page has one.
pub(crate) struct Fates(Vec<Fate>);

impl Fates {
    fn placed(pages: usize) -> Self {
        Self(vec![Fate::Placed; pages])
    }

    pub(crate) fn set(&mut self, nth: usize, fate: Fate) {
        if let Some(its) = self.0.get_mut(nth) {
            *its = fate;
        }
    }

    pub(crate) fn set_all(&mut self, pages: PageSet, fate: Fate) {
        pages.iter().for_each(|nth| self.set(nth, fate));
    }

    /// The pages that have this fate.
    pub(crate) fn are(&self, fate: Fate) -> PageSet {
        let pages = self.0.iter().enumerate();
        pages.filter(|(_, its)| **its == fate).map(|(nth, _)| nth).collect()
    }
}

/// One batch of names.
pub(crate) struct Batch {
    pub(crate) header: NamedHeader,
    pub(crate) pages: Vec<PageIndex>,
    pub(crate) names: Vec<Name>,
    pub(crate) places: Vec<Option<DiskLocation>>,
    /// Whether its pages may wait for content in flight from another provider.
    pub(crate) may_wait: bool,
    /// Whether its ticket is open, which counts its awaited pages.
    pub(crate) has_ticket: bool,
    pub(crate) fates: Fates,
}

impl Batch {
    pub(crate) fn new(header: NamedHeader, named: NamedTables) -> Self {
        let NamedTables { pages, names, places, .. } = named;
        let fates = Fates::placed(pages.len());
        Self { header, pages, names, places, may_wait: false, has_ticket: false, fates }
    }

    /// One of its pages, as a waiter.
    pub(crate) fn waiting(&self, recipient: &Arc<Recipient>, nth: usize) -> Option<Page> {
        let NamedHeader { block, epoch, ticket, .. } = self.header;
        let page = self.pages[nth];
        let place = AwaitedPage { block, epoch, page, ticket, nth: u8::try_from(nth).ok()? };
        Some(Page { recipient: Arc::clone(recipient), place })
    }

    /// Answers the batch. Its source sends what is still this VM's to provide.
    pub(crate) fn answer(self, exchange: &Exchange, recipient: &Recipient, question: Question) {
        let Self { header, pages, names, fates, .. } = self;
        let NamedHeader { block, epoch, ticket, .. } = header;
        let later = fates.are(Fate::Later);
        if self.has_ticket {
            recipient.close_ticket(ticket, !later.is_empty());
        }
        let wanted = fates.are(Fate::Requested) | fates.are(Fate::Ours);
        let asked = wanted.of(&pages).zip(wanted.of(&names));
        let asked = asked.map(|(page, name)| (block, epoch, *page, *name));
        // Noted before the source can send them.
        exchange.wake_waiters(&recipient.asks(asked));
        question.answer(wanted | fates.are(Fate::NamedAgain), later);
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
    ours: PageSet,
    named_again: PageSet,
}

impl Unanswered {
    fn add(&self, batch: &Batch) {
        let Batch { header, pages, fates, .. } = batch;
        let (pages, ours) = (pages.clone(), fates.are(Fate::Ours));
        self.0.lock().push(Open { header: *header, pages, ours, named_again: PageSet::NONE });
    }

    /// A batch is named again, and lacks these of its pages. Returns those that wait here.
    fn name_again(&self, header: NamedHeader, pages: &[PageIndex], lacks: PageSet) -> PageSet {
        let mut waiting = PageSet::NONE;
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
    fn named_again(&self, ticket: u32) -> PageSet {
        let open = self.0.lock();
        let open = open.iter().find(|open| open.header.ticket == ticket);
        open.map_or(PageSet::NONE, |open| open.named_again)
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
    ask: Sender<(Batch, Question)>,
    _thread: Joined,
    unanswered: Arc<Unanswered>,
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
        Ok(Self { ask, _thread: thread.into(), unanswered })
    }

    /// Queries the rack for what this VM is still to provide, and then answers the batch.
    pub(crate) fn ask(&self, batch: Batch, question: Question) {
        self.unanswered.add(&batch);
        // The thread lives as long.
        let _ = self.ask.send((batch, question));
    }

    /// Which of a batch's pages, of those that it `lacks`, wait for an answer to the same batch on
    /// another lane. The caller requests them.
    pub(crate) fn name_again(&self, batch: &Batch, lacks: PageSet) -> PageSet {
        self.unanswered.name_again(batch.header, &batch.pages, lacks)
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
                .flat_map(|(batch, _)| batch.fates.are(Fate::Ours).of(&batch.names).copied())
                .collect();
            let mut hosts = self.hosts(&names).into_iter();
            for (mut batch, question) in batches {
                let ticket = batch.header.ticket;
                let named_again = self.unanswered.named_again(ticket);
                let ours = batch.fates.are(Fate::Ours);
                let elsewhere: Vec<(HostName, usize)> = ours
                    .iter()
                    .filter_map(|nth| Some((hosts.next().flatten()?, nth)))
                    .filter(|(_, nth)| !named_again.has(*nth))
                    .collect();
                batch.fates.set_all(named_again & ours, Fate::NamedAgain);
                // Other hosts of the rack get it from here now, in any case.
                if batch.may_wait {
                    let far = self.fetch(&batch, elsewhere);
                    batch.fates.set_all(far, Fate::Later);
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
        if !self.recipient.provides() {
            // Other hosts would wait for what can't be read here.
            let here = names.iter().zip(&hosts).filter(|(_, host)| host.is_none());
            self.rack.lacks(here.map(|(name, _)| *name).collect());
        }
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

    /// Has other hosts send what they have or get. Returns which pages come from there.
    fn fetch(&self, batch: &Batch, mut elsewhere: Vec<(HostName, usize)>) -> PageSet {
        let Self { exchange, rack, recipient, .. } = self;
        elsewhere.sort_unstable();
        let mut far = PageSet::NONE;
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
                    far.insert(*nth);
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
