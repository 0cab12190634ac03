//! Leads a domain's migration, from its order to its outcome.

use std::io::Read;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ::audit::Hash;
use api::{Outcome, Report, SendDomain};
use crossbeam_channel::{Receiver, bounded, never};
use dedup::source::{Naming, Plan, Waits};
use managers::xen::MovingDomain;
use switchover::MigrationId;
use switchover::journal::Opened;
use switchover::source::{Driver, Event};
use wire::carry::Carrying;
use wire::{ReceiveDomain, ToDestination, ToSource};
use xen::{Configuration, PageKind};

use super::following::{Next, of_peer};
use super::streaming::Streaming;
use crate::caught::caught;
use crate::error::MigrationError;
use crate::host::{Local, Peer};
use crate::link::{CARRIED_DEAD_AFTER, Link, Received};
use crate::report_builder::ReportBuilder;
use crate::source::bounds::sched_params;
use crate::source::context::{local as local_error, no_thread};
use crate::source::{audit, by_name, connection};
use crate::xen::{DepartingDomain, XlPipes, noted};

/// A domain whose migration has ended on this side.
#[derive(Debug)]
pub struct DepartedDomain {
    /// The report.
    pub report: Report,
    /// A switchover that is not over on this side.
    pub unsettled: Option<(Driver, DepartingDomain)>,
}

/// The leading thread's state.
pub(super) struct Leading<'m> {
    pub(super) local: &'m Local,
    pub(super) peer: &'m Peer,
    pub(super) request: &'m SendDomain,
    pub(super) report_builder: &'m Arc<ReportBuilder>,
    pub(super) link: Arc<Link<ToDestination>>,
    pub(super) inbox: Receiver<Received<ToSource>>,
    /// Receives once xl's transport has exited.
    pub(super) gone: Receiver<()>,
    pub(super) driver: Driver,
    pub(super) departing: DepartingDomain,
    /// `--timeout`.
    pub(super) deadline: Option<Instant>,
    /// Whether data threads run among others, whatever CPU floor was requested.
    pub(super) is_floor_over: bool,
    /// When xl suspended the domain.
    pub(super) suspended: Option<Instant>,
    /// The destination runs it.
    pub(super) runs_there: bool,
}

impl<'m> Leading<'m> {
    /// Connects to the destination's agent, and opens the journal.
    pub(super) fn open(
        local: &'m Local,
        peer: &'m Peer,
        request: &'m SendDomain,
        report_builder: &'m Arc<ReportBuilder>,
        domain: MovingDomain,
        pipes: &Arc<XlPipes>,
    ) -> Result<Self, MigrationError> {
        let xen = local.xen.as_ref();
        let xen = xen.ok_or_else(|| MigrationError::Xl("there is no [xen]".to_owned()))?;
        let (link, inbox, _) = connection::open(local, peer)?;
        let lost = |error: std::io::Error| MigrationError::lost(&peer.name, error);
        link.set_dead_after(CARRIED_DEAD_AFTER).map_err(lost)?;
        let gone = watch_transport(pipes)?;
        let migration =
            MigrationId::random().map_err(|error| local_error("making a random id", error))?;
        let opened = Opened {
            migration,
            vm: domain.name.clone(),
            peer: peer.name.clone(),
            peer_address: peer.address.to_string(),
            run: true,
            qemu: noted(&domain),
            listed: report_builder.listed(),
            handed_over: false,
        };
        let journal = xen.journals.create(opened).map_err(|error| {
            local_error("opening the domain's journal", std::io::Error::other(error))
        })?;
        let (pipes, release_max) = (Arc::clone(pipes), local.waits.complete);
        let departing = DepartingDomain::new(&xen.xl, domain, &peer.name, pipes, release_max);
        let timeout = request.timeout_s.map(Duration::from_secs);
        Ok(Self {
            local,
            peer,
            request,
            report_builder,
            link,
            inbox,
            gone,
            driver: Driver::new(journal),
            departing,
            deadline: timeout.and_then(|limit| Instant::now().checked_add(limit)),
            is_floor_over: false,
            suspended: None,
            runs_there: false,
        })
    }

    /// The switchover's id.
    pub(super) fn switchover(&self) -> &str {
        self.driver.journal().opened().migration.as_str()
    }

    /// Sends the domain, and waits until it is known whose it is.
    pub(super) fn send(
        mut self,
        pipes: Arc<XlPipes>,
        header: &[u8],
        configuration: &Configuration,
    ) -> DepartedDomain {
        let carried = self.carry(pipes, header, configuration);
        let error = carried.err().or_else(|| self.concluded().err());
        let in_doubt = self.departing.fate.is_none() && !self.runs_there;
        self.report_builder.update(|report| report.in_doubt = in_doubt);
        let outcome = match error {
            None => Outcome::Done,
            Some(MigrationError::Cancelled) if !in_doubt => Outcome::Cancelled,
            Some(error) => Outcome::Failed(self.with_doubt(&error)),
        };
        self.link.close();
        let report = self.report_builder.end(outcome);
        let Self { driver, departing, .. } = self;
        let is_over = driver.machine().has_ended();
        DepartedDomain { report, unsettled: (!is_over).then_some((driver, departing)) }
    }

    /// The error, and what is in doubt after it.
    fn with_doubt(&self, error: &MigrationError) -> String {
        let doubt = self.driver.machine().doubt().filter(|_| self.departing.fate.is_none());
        match (error, doubt) {
            // It has the advice already.
            (MigrationError::InDoubt(_), _) | (_, None) => error.to_string(),
            (error, Some(doubt)) => {
                let domain = &self.driver.journal().opened().vm;
                format!("{error}; but {}", doubt.advice_on_domain(domain, &self.peer.name))
            }
        }
    }

    fn carry(
        &mut self,
        pipes: Arc<XlPipes>,
        header: &[u8],
        configuration: &Configuration,
    ) -> Result<(), MigrationError> {
        let carrying = self.order(configuration);
        let streaming = carrying
            .and_then(|carrying| Streaming::start(self, &carrying, (pipes, header), configuration));
        let mut streaming = match streaming {
            Ok(streaming) => streaming,
            Err(error) => {
                self.keep(&error);
                return Err(error);
            }
        };
        let followed = caught(|| self.follow(&mut streaming));
        let is_done = matches!(followed.returned(), Some(Ok(())));
        if !is_done {
            streaming.break_off(self);
        }
        if let Some(Err(error)) = followed.returned() {
            self.keep(error);
        }
        streaming.end(self, is_done);
        followed.or_go_on()
    }

    /// Orders the destination to start a receiver.
    fn order(&self, configuration: &Configuration) -> Result<Carrying, MigrationError> {
        let progress = self.report_builder.watch().progress().1;
        let sharing = by_name::order(self.local, &self.request.sharing, self.sharing_domain());
        let sharing = sharing.unwrap_or_else(|note| {
            self.report_builder.note(note);
            None
        });
        let opened = self.driver.journal().opened();
        let order = ReceiveDomain {
            migration: progress.id,
            switchover: opened.migration.clone(),
            agent_port: self.local.agent_port,
            from: self.local.agent.clone(),
            domain: configuration.name.clone(),
            uuid: configuration.uuid.clone(),
            pages_max: configuration.pages_max(),
            terms: sched_params(&self.report_builder.watch().bounds(), false),
            audit: audit::ordered(self.request.audit),
            hashes: Hash::offered(),
            sharing,
        };
        self.send_message(&ToDestination::ReceiveDomain(Box::new(order)))?;
        let until = Instant::now() + self.local.waits.prepare;
        loop {
            match self.next(&never(), until)? {
                Next::Received(Received::Message(ToSource::Carrying(carrying))) => {
                    let prepare_s = self.report_builder.elapsed_s();
                    self.report_builder.update(|report| report.prepare_s = prepare_s);
                    for note in &carrying.notes {
                        self.report_builder.note(note.clone());
                    }
                    return Ok(carrying);
                }
                Next::Received(Received::Message(ToSource::Refused { reason })) => {
                    let (host, reason) = (self.peer.name.clone(), of_peer(reason));
                    return Err(MigrationError::Refused { host, reason });
                }
                Next::Received(received) => return Err(self.unexpected(received)),
                Next::Look => {
                    let why = "its receiver was not ready in time";
                    return Err(MigrationError::lost(&self.peer.name, why));
                }
                Next::Rebound | Next::Notice(_) => {}
            }
        }
    }

    /// The sharing domain: the cluster's own, unless the order names another.
    fn sharing_domain(&self) -> content::Domain {
        content::Domain(self.request.sharing.domain.clone().unwrap_or_default())
    }

    /// The naming of pages, if the destination takes names.
    pub(super) fn naming(&self, carrying: &Carrying) -> Option<Arc<Naming>> {
        let sharing = self.local.sharing.as_ref().filter(|_| carrying.sharing)?;
        Some(Arc::new(Naming::new(Plan {
            key: sharing.key(&self.sharing_domain()),
            // Its memory can't be read ahead of xl, or again: bodies are kept.
            before: None,
            cached: None,
            ram: Arc::default(),
            handed_over: Arc::default(),
            shares: true,
            names_with_bodies: false,
            // Page tables have the source's page numbers, in places that the receiver rewrites.
            only: Some(PageKind::Normal.block()),
            sleeps: false,
            is_fixed: false,
            waits: if carrying.waits { Waits::WhileBuffered } else { Waits::Never },
        })))
    }

    /// Keeps the domain after an error from before the commit.
    fn keep(&mut self, error: &MigrationError) {
        let reason = error.to_string();
        self.departing.stays_because(&reason);
        self.step(Event::GiveUp { reason: reason.into() });
    }

    /// Passes an event to the switchover, and sends what follows.
    pub(super) fn step(&mut self, event: Event) {
        self.driver.step(event, &mut self.departing);
        while let Some(said) = self.departing.outbox.pop_front() {
            // A lost message is repeated, or requested.
            if let Err(error) = self.link.send(&ToDestination::Switchover { said }) {
                tracing::info!(%error, "cannot send a switchover message");
            }
        }
    }

    pub(super) fn send_message(&self, message: &ToDestination) -> Result<(), MigrationError> {
        self.link.send(message).map_err(|error| MigrationError::lost(&self.peer.name, error))
    }

    pub(super) fn lost(&self, why: &str) -> MigrationError {
        MigrationError::lost(&self.peer.name, why)
    }
}

/// Receives once xl's transport has exited.
fn watch_transport(pipes: &XlPipes) -> Result<Receiver<()>, MigrationError> {
    let transport = pipes.transport();
    let mut transport =
        transport.map_err(|error| local_error("keeping the transport's connection", error))?;
    let (tell, gone) = bounded(1);
    // Ends with the transport, or once the pipes are closed.
    data_threads::spawn("xl-transport", move || {
        // It sends nothing more.
        loop {
            match transport.read(&mut [0; 64]) {
                Ok(0) => break,
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        let _ = tell.send(());
    })
    .map_err(no_thread)?;
    Ok(gone)
}
