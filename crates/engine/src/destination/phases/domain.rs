//! A domain of Xen that `xl migrate` sends: from its order to its fate.
//!
//! xl's receiver gets the non-RAM stream as it comes, and pages as lanes bring them. Once it has the
//! domain, and the audit has succeeded, the switchover decides as for other VMs.

mod left_over;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::{after, never, select};
use dedup::destination::{Blocks, PagePlacer};
use managers::xen::MovingDomain;
use page::{Epoch, PAGE_BYTES};
use switchover::MigrationId;
use switchover::destination::{Driver, Event as Step};
use switchover::journal::{Listed, Opened};
use wire::carry::Carrying;
use wire::{AuditOrder, Cost, ReceiveDomain, ToDestination, ToSource};
use xen::handshake::Answer;

use super::audit::Auditing;
use super::connect::{Connected, SILENCE, hex};
use super::end::{End, ended};
use super::sharing::{Agreed, ContentSources};
use crate::caught::caught;
use crate::destination::by_name::ByName;
use crate::destination::connections::ConnectionSlot;
use crate::destination::domain::DomainWriter;
use crate::destination::lanes::Memory;
use crate::destination::nic_use::NicReports;
use crate::host::UnsettledDomain;
use crate::link::{CARRIED_DEAD_AFTER, Received};
use crate::waits::{LOOK, Silence};
use crate::xen::{ArrivingDomain, Heard, Receiver, XenHost, noted};

/// The part of the source's time to prepare that is left for its answer.
const ANSWER_SHARE: u32 = 8;
/// The part of it in which what an earlier migration has left may be destroyed.
const LEFT_OVER_SHARE: u32 = 2;

/// What takes a domain's pages.
struct Pages {
    writer: Arc<DomainWriter>,
    /// None: no pages are sent by name.
    by_name: Option<Arc<ByName>>,
    audit: Auditing,
    /// For the source's report: why content is not shared.
    note: Option<String>,
}

impl Pages {
    /// The cost of pages sent by name.
    fn cost(&self) -> Cost {
        self.by_name.as_ref().map(|by_name| by_name.cost()).unwrap_or_default()
    }
}

/// How far an arrival is.
#[derive(Default)]
struct Progress {
    /// Everything was sent, and compared.
    placed: Option<Instant>,
    /// The receiver has the domain.
    is_ready: bool,
}

/// The leading thread's next event.
enum Next {
    Received(Received<ToDestination>),
    Heard(Heard),
    Nothing,
}

impl Connected<'_> {
    /// Receives a domain.
    pub(super) fn receive_domain(
        &self,
        order: &ReceiveDomain,
        slot: &mut ConnectionSlot,
    ) -> Result<(), End> {
        self.check_from(&order.from)?;
        let (xen, domain) = self.admit_domain(order)?;
        let _in = self.is_about(&order.migration, &order.domain);
        tracing::info!(from = order.from, uuid = order.uuid, "arriving");
        self.link.set_dead_after(CARRIED_DEAD_AFTER).map_err(End::failed)?;
        self.lanes.threads().set(&order.terms);
        self.arrives(slot)?;
        slot.is_of_host();
        let waits = &self.shared.local.waits;
        let until = Instant::now() + (waits.prepare - waits.prepare / ANSWER_SHARE);
        let pause = || self.pause_before_carrying();
        left_over::wait_destroyed(&xen.xl, &domain, waits.prepare / LEFT_OVER_SHARE, pause)?;
        // Once the copy has its name, nothing would distinguish them.
        if xen.xl.has_arrived(&domain).map_err(End::failed)? {
            return Err(End::failed(format!(
                "{here} has a domain with the name and the UUID of {name} already, which may have \
                 crashed: `xl list -v` there shows it",
                here = self.shared.local.agent,
                name = domain.name
            )));
        }
        let receiver = Receiver::start(&xen.xl).map_err(End::failed)?;
        let left = until.saturating_duration_since(Instant::now());
        receiver.wait_banner(left).map_err(End::failed)?;
        let audit = Auditing::new(order.audit, &order.hashes);
        let hash = (order.audit != AuditOrder::Off).then(|| audit.hash());
        let input = receiver.input().map_err(End::failed)?;
        let unread_max = SILENCE * waits.stall;
        let writer = DomainWriter::new(input, order.pages_max, hash, unread_max);
        let writer = Arc::new(writer.map_err(End::failed)?);
        let pages = self.domain_pages(order, writer, audit)?;
        let mut driver = self.open_domain_journal(order, xen, &domain)?;
        let mut arriving = ArrivingDomain::new(&xen.xl, domain, receiver, waits.run);
        self.lanes.open(Memory::Domain(Arc::clone(&pages.writer)), pages.by_name.clone());
        self.shared.arrivals.lock().insert(self.token, Arc::clone(&self.lanes));
        // The journal is not touched meanwhile, so a fault is a failure like others.
        let followed = caught(|| self.follow_domain(&arriving, &pages));
        let fault = Err(End::failed("a fault in the agent there; see its log"));
        let followed = followed.into_returned().unwrap_or(fault);
        match followed {
            // A lane may still hold pages for which the source never starts the epoch.
            Ok(()) => pages.writer.stop(),
            Err(_) => pages.writer.end(),
        }
        let cost = pages.cost();
        // With the lanes ends what finds pages by name, whose threads may write to the source.
        drop(pages);
        self.end_lanes();
        let event = match followed {
            Ok(()) => Step::Loaded,
            Err(End::Failed(why)) => Step::GiveUp { reason: why.into() },
            Err(End::Over(why)) => Step::ConnectionLost { reason: why.into() },
        };
        let settled = caught(|| {
            self.step_domain(event, &mut driver, &mut arriving, &cost);
            self.settle_with_source(&mut driver, &mut arriving, &cost);
        });
        if settled.returned().is_none() {
            // Only the journal tells whose domain it is. This ends the receiver.
            drop((driver, arriving));
            self.shared.host.take_up_domain(&order.switchover);
            return Ok(());
        }
        if !driver.machine().has_ended() {
            self.shared.host.settle_domain(UnsettledDomain { driver, arriving });
        }
        Ok(())
    }

    /// Waits a moment. The source sends nothing before it has the answer to its order, unless it
    /// ends the migration.
    fn pause_before_carrying(&self) -> Result<(), End> {
        match self.next_of_domain(&never())? {
            Next::Received(Received::Message(ToDestination::Terms(terms))) => {
                self.lanes.threads().set(&terms);
                Ok(())
            }
            Next::Received(other) => Err(ended(other)),
            Next::Heard(_) | Next::Nothing => Ok(()),
        }
    }

    /// Whether the domain may arrive here.
    fn admit_domain(&self, order: &ReceiveDomain) -> Result<(&XenHost, MovingDomain), End> {
        let here = &self.shared.local.agent;
        let Some(xen) = &self.shared.local.xen else {
            return Err(End::failed(format!(
                "the agent of {here} accepts no domains of Xen: add [xen] to its file"
            )));
        };
        if !xen.accept_from.contains(&order.from) {
            return Err(End::failed(format!(
                "{here} accepts no domains from {from}: add it to `accept-from` under [xen] in its \
                 agent's file",
                from = order.from
            )));
        }
        if self.shared.leaving.load(std::sync::atomic::Ordering::SeqCst) {
            return Err(End::failed("its agent is stopping"));
        }
        let ReceiveDomain { domain, uuid, pages_max, .. } = order;
        let sound = xen::is_name(domain) && xen::is_uuid(uuid);
        if !sound || *pages_max > xen::DOMAIN_PAGES_MAX {
            return Err(End::failed("the source sent an order for a domain that can't exist"));
        }
        Ok((&**xen, MovingDomain { name: domain.clone(), uuid: uuid.to_lowercase() }))
    }

    /// Agrees to pages by name as ordered, and prepares to find them.
    fn domain_pages(
        &self,
        order: &ReceiveDomain,
        writer: Arc<DomainWriter>,
        audit: Auditing,
    ) -> Result<Pages, End> {
        let agreed = order.sharing.as_ref().map(|wanted| self.agree(wanted)).unwrap_or_default();
        let Agreed { shares, note, .. } = agreed;
        // It can't be read here: it has nothing for others.
        let mut blocks = Blocks::default();
        blocks.push(order.domain.clone(), u64::from(order.pages_max) * PAGE_BYTES as u64, None);
        let (threads, memory) = (self.lanes.threads(), &self.shared.local.resources.named);
        let placer = Arc::clone(&writer) as Arc<dyn PagePlacer>;
        let admitted = ContentSources::of(shares, None).admit(placer, blocks, threads, memory);
        let admitted = admitted.map_err(End::failed)?;
        let start = |stage| ByName::start(stage, Arc::clone(&self.link), threads).map(Arc::new);
        let by_name = admitted.map(start).transpose().map_err(End::failed)?;
        Ok(Pages { writer, by_name, audit, note })
    }

    fn open_domain_journal(
        &self,
        order: &ReceiveDomain,
        xen: &XenHost,
        domain: &MovingDomain,
    ) -> Result<Driver, End> {
        let opened = Opened {
            migration: order.switchover.clone(),
            vm: order.domain.clone(),
            peer: order.from.clone(),
            peer_address: SocketAddr::new(self.peer.ip(), order.agent_port).to_string(),
            run: true,
            qemu: noted(domain),
            listed: MigrationId::new(&order.migration).ok().map(Listed::now),
            handed_over: false,
        };
        xen.journals.create(opened).map(Driver::new).map_err(End::failed)
    }

    /// Follows the source and the receiver until that has the domain.
    fn follow_domain(&self, arriving: &ArrivingDomain, pages: &Pages) -> Result<(), End> {
        let receiver = arriving.receiver().ok_or_else(|| End::failed("it has no receiver"))?;
        self.send(&ToSource::Carrying(Carrying {
            token: hex(self.token),
            hash: pages.audit.chosen(),
            sharing: pages.by_name.is_some(),
            waits: true,
            notes: pages.note.iter().cloned().collect(),
            ..Carrying::default()
        }))?;
        let _nic_reports = NicReports::start(&self.lanes, &self.link).map_err(End::failed)?;
        let (mut progress, mut silence) = (Progress::default(), Silence::new());
        while progress.placed.is_none() || !progress.is_ready {
            match self.next_of_domain(&receiver.heard)? {
                Next::Received(received) => {
                    self.receive_of_domain(received, pages, &mut progress)?;
                }
                Next::Heard(Heard::Answer(Answer::Ready)) => progress.is_ready = true,
                Next::Heard(Heard::Answer(answer)) => {
                    return Err(End::failed(format!(
                        "xl's receiver there has failed: it wrote {answer:?} before it had the \
                         domain; its messages are in the agent's log"
                    )));
                }
                Next::Heard(Heard::Ended(why)) => return Err(End::Failed(why)),
                Next::Nothing => {}
            }
            self.check_time(&pages.writer, &progress, &mut silence)?;
        }
        Ok(())
    }

    fn next_of_domain(&self, heard: &crossbeam_channel::Receiver<Heard>) -> Result<Next, End> {
        select! {
            recv(self.inbox) -> received => received
                .map(Next::Received)
                .map_err(|_| End::Over("the source's connection has ended".to_owned())),
            recv(self.broken) -> why => {
                Err(End::failed(why.unwrap_or_else(|_| "a lane failed".to_owned())))
            }
            recv(heard) -> heard => heard
                .map(Next::Heard)
                .map_err(|_| End::failed("a fault in the agent there: a thread has ended")),
            recv(after(LOOK)) -> _ => Ok(Next::Nothing),
        }
    }

    fn receive_of_domain(
        &self,
        received: Received<ToDestination>,
        pages: &Pages,
        progress: &mut Progress,
    ) -> Result<(), End> {
        let writer = &pages.writer;
        match received {
            Received::Tail(piece) => writer.non_ram(&piece).map_err(End::Failed),
            Received::Message(ToDestination::Epoch { epoch, position }) => {
                writer.epoch(Epoch(epoch), position).map_err(End::Failed)
            }
            Received::Message(ToDestination::Placed { audit: totals })
                if progress.placed.is_none() =>
            {
                if let Some(ledger) = writer.ledger() {
                    self.audit(ledger, &[], &totals, pages.audit)?;
                }
                progress.placed = Some(Instant::now());
                Ok(())
            }
            Received::Message(ToDestination::Terms(terms)) => {
                self.lanes.threads().set(&terms);
                Ok(())
            }
            other => Err(ended(other)),
        }
    }

    /// Ends an arrival in which nothing happens: no data comes, or the receiver does not load what
    /// it has.
    fn check_time(
        &self,
        writer: &DomainWriter,
        progress: &Progress,
        silence: &mut Silence,
    ) -> Result<(), End> {
        let waits = &self.shared.local.waits;
        if let Some(placed) = progress.placed {
            return if placed.elapsed() < SILENCE * waits.load {
                Ok(())
            } else {
                Err(End::failed("xl there does not load the domain"))
            };
        }
        let arrived = self.lanes.came_bytes().saturating_add(writer.written_bytes());
        let silent_max = SILENCE * waits.stall;
        if silence.look(arrived, Instant::now()) < silent_max {
            return Ok(());
        }
        let seconds = silent_max.as_secs();
        Err(End::failed(format!("nothing of the domain has arrived for {seconds} s")))
    }

    /// Follows the source until the switchover has ended on this side, or the connection is lost.
    fn settle_with_source(&self, driver: &mut Driver, arriving: &mut ArrivingDomain, cost: &Cost) {
        while let Some(wait) = driver.machine().wait()
            && let Some(event) = self.next_step(wait)
        {
            self.step_domain(event, driver, arriving, cost);
        }
    }

    /// Passes an event to the switchover, and sends what follows: once the domain runs, the `cost`
    /// of pages by name with the other costs.
    fn step_domain(
        &self,
        event: Step,
        driver: &mut Driver,
        arriving: &mut ArrivingDomain,
        cost: &Cost,
    ) {
        driver.step(event, arriving);
        while let Some(said) = arriving.outbox.pop_front() {
            let runs = said.message == switchover::ToSource::Running;
            // A lost message is repeated, or requested.
            if let Err(error) = self.send(&ToSource::Switchover { said }) {
                tracing::info!(?error, "cannot send a switchover message");
            }
            if runs {
                let (cpu_s, ran_ms) = (self.lanes.cpu().as_secs_f64(), arriving.ran_ms());
                let _ = self.send(&ToSource::Cost(Cost { cpu_s, ran_ms, ..*cost }));
            }
        }
    }
}
