//! A VM that another manager moves, such as libvirt: two agents carry it between QEMUs that neither
//! of them has started or commands.
//!
//! The incoming stream goes to the QEMU that waits here; its answers are passed back unchanged. The
//! agents decide nothing: QEMU's last answer is the commit, and closing all connections at once is
//! the only way to fail. So there is no journal.

mod back;
mod channels;
mod from_disks;
mod in_order;
mod split;

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use content::Domain;
use crossbeam_channel::{Receiver, never, select, unbounded};
use dedup::storage::Disks;
use managers::Onward;
use qemu::commanded::Commanded;
use qemu::ram_blocks::RamBlocks;
use wire::carry::{self, Carry};
use wire::{Cost, ToDestination, ToSource};

use super::audit::Auditing;
use super::connect::{Connected, hex};
use super::end::End;
use super::sharing::Shares;
use crate::caught::caught;
use crate::destination::connections::ConnectionSlot;
use crate::destination::nic_use::NicReports;
use crate::destination::postcopies::Relayed;
use crate::error::LinkError;
use crate::link::{CARRIED_DEAD_AFTER, Received};
use back::{Back, Closed};
use channels::Channels;
use in_order::{InOrder, Written};
use split::Split;

/// A QEMU that has loaded its VM closes its connection at once.
const LAST_WORD_MAX: Duration = Duration::from_secs(1);

/// A migration that is carried here.
struct Carried<'a> {
    connected: &'a Connected<'a>,
    onward: Onward,
    /// The QEMU that waits for the VM. None: it is not known, or may not be seen.
    whose: Option<Arc<Commanded>>,
    /// How the VM's content is shared. None: it is not.
    shares: Option<Shares>,
    /// Its disks that are read, with the secret that keys their names. None: no disk is.
    disks: Option<(Disks, String)>,
    /// The domain for sharing its content later, when it runs here. None: it will not be shared.
    domain: Option<Domain>,
    /// The connection to QEMU's main channel, or to whatever else listens there.
    socket: UnixStream,
    back: Back,
    audit: Auditing,
    /// None: the stream has no other connections, or they are not open yet.
    channels: Option<Channels>,
    incoming: Incoming,
    /// Watches what is relayed. Kept to the end: so long a VM in post-copy is waited for.
    relayed: Relayed,
    /// None: the receiver here has not closed its connection.
    closed: Option<Closed>,
}

/// What comes, as its first message shows.
enum Incoming {
    /// Nothing has come.
    New,
    /// Pages by lanes, and the rest of the stream here, from its head on.
    Split(Box<Split>),
    /// All of a connection by lanes.
    Relayed(ByLanes),
    /// All of a connection here. The source has sent everything once it has `ended`.
    Whole { ended: bool },
}

/// A connection that is relayed by lanes.
struct ByLanes {
    in_order: InOrder,
    written: Receiver<Written>,
    /// Everything is written.
    ended: bool,
    _nic_reports: NicReports,
}

/// The leading thread's next event.
enum Next {
    Received(Received<ToDestination>),
    Closed(Closed),
    Written(Written),
    Broken(String),
}

impl Connected<'_> {
    /// Carries the migration to the QEMU that waits here, until either end closes.
    pub(super) fn carry(&self, order: &Carry, slot: &mut ConnectionSlot) -> Result<(), End> {
        self.check_from(&order.from)?;
        self.link.set_dead_after(CARRIED_DEAD_AFTER).map_err(End::failed)?;
        let manager = self.shared.local.manager.as_ref().ok_or_else(|| {
            End::failed("the agent there does not carry migrations: add [carry] to its file")
        })?;
        let target = order.target.read().map_err(|why| {
            End::failed(format!(
                "the VM's target can't be read ({why}): run the same version of droveway on both \
                 hosts"
            ))
        })?;
        self.lanes.threads().set(&order.terms);
        let onward = manager.find(target).map_err(End::failed)?;
        let (socket, whose) = onward.meet().map_err(End::failed)?;
        self.arrives(slot)?;
        slot.is_of_host();
        let name = whose.as_ref().and_then(|whose| whose.name.clone());
        let vm = name.as_deref().unwrap_or("unnamed");
        let _in = self.is_about(&order.migration, vm);
        tracing::info!(from = order.from, "carrying");
        // Lanes may connect at once.
        self.shared.arrivals.lock().insert(self.token, Arc::clone(&self.lanes));
        let audit = Auditing::new(order.audit, &order.hashes);
        let agreed = order.sharing.as_ref().map(|wanted| self.agree(wanted)).unwrap_or_default();
        let carrying = carry::Carrying {
            token: hex(self.token),
            vm: name,
            uuid: whose.as_ref().and_then(|whose| whose.uuid.clone()),
            notes: agreed.note.into_iter().collect(),
            hash: audit.chosen(),
            sharing: agreed.shares.is_some(),
            sleeps: agreed.shares.as_ref().is_some_and(|shares| shares.sleeps),
            relays_by_lanes: true,
            deltas: true,
            names_with_bodies: agreed.shares.as_ref().is_some_and(Shares::names_with_bodies),
            waits: true,
        };
        let relayed = Relayed::new(&self.shared.postcopies);
        let back = self
            .send(&ToSource::Carrying(carrying))
            .and_then(|()| Back::start(&socket, &self.link, relayed.answers()).map_err(End::failed))
            .inspect_err(|_| self.end_lanes())?;
        let mut carried = Carried {
            connected: self,
            onward,
            whose: whose.map(Arc::new),
            shares: agreed.shares,
            disks: None,
            domain: agreed.domain,
            socket,
            back,
            audit,
            channels: None,
            incoming: Incoming::New,
            relayed,
            closed: None,
        };
        let ended = caught(|| carried.follow());
        if !matches!(ended.returned(), Some(Ok(()))) {
            // The source is to receive the reason, and not that QEMU has closed.
            carried.back.hush();
        }
        carried.close();
        ended.or_go_on()
    }
}

impl Carried<'_> {
    /// Follows the source's messages until the end.
    fn follow(&mut self) -> Result<(), End> {
        let mut announced = None;
        while !self.is_over() {
            match self.next()? {
                Next::Closed(closed) => self.closed_here(closed)?,
                Next::Broken(why) | Next::Written(Written::Failed(why)) => {
                    return Err(End::Failed(why));
                }
                Next::Written(Written::Room(batches)) => {
                    self.connected.send(&ToSource::DiskRoom { batches })?;
                }
                Next::Written(Written::All) => {
                    if let Incoming::Relayed(by_lanes) = &mut self.incoming {
                        by_lanes.ended = true;
                    }
                }
                Next::Received(received) => match received {
                    Received::Whole(piece) => self.relay(&piece)?,
                    Received::Message(ToDestination::RelayBegins) if self.is_new() => {
                        self.incoming = Incoming::Relayed(self.relay_by_lanes()?);
                    }
                    Received::Message(ToDestination::RelayEnds { bytes }) => {
                        let Incoming::Relayed(by_lanes) = &self.incoming else {
                            return Err(End::failed(
                                "the source ended a stream that it had not started",
                            ));
                        };
                        by_lanes.in_order.ends_at(bytes);
                    }
                    Received::Message(ToDestination::Storage(order)) if self.is_new() => {
                        self.read_disks(order)?;
                    }
                    Received::Message(ToDestination::Channels(order))
                        if self.channels.is_none() =>
                    {
                        self.channels = Some(Channels::open(&self.onward, &order)?);
                    }
                    Received::Message(ToDestination::Blocks { blocks, ram_section, footers }) => {
                        announced = Some((blocks, ram_section, footers));
                    }
                    Received::Head(head) => {
                        let blocks = announced.take();
                        let blocks = blocks.filter(|_| self.is_new());
                        let (blocks, ram_section, footers) = blocks.ok_or_else(|| {
                            End::failed("the head of the stream arrived out of turn")
                        })?;
                        self.split(blocks, (&head, ram_section, footers))?;
                    }
                    Received::Tail(piece) => self.tail(&piece)?,
                    Received::Message(ToDestination::Placed { audit }) => self.placed(&audit)?,
                    Received::Message(ToDestination::Spare { pages }) => {
                        if let Incoming::Split(split) = &self.incoming {
                            split.opened.spare(pages);
                        }
                    }
                    Received::Message(ToDestination::Terms(terms)) => {
                        self.connected.lanes.threads().set(&terms);
                    }
                    Received::Message(ToDestination::Abort { reason }) => {
                        return Err(End::Over(reason));
                    }
                    // QEMU here has loaded the VM: closing the rest is up to the source.
                    Received::Disconnected(_) if self.closed.is_some() => return Ok(()),
                    Received::Disconnected(error) => return self.source_disconnected(&error),
                    _ => return Err(End::failed("the source sent a message out of turn")),
                },
            }
        }
        Ok(())
    }

    /// Handles the loss of the source's connection. The source closes it after the last word of the
    /// QEMU here, which may not have been seen yet.
    fn source_disconnected(&mut self, error: &LinkError) -> Result<(), End> {
        let is_fed = matches!(&self.incoming, Incoming::Split(split) if split.is_fed());
        if is_fed && let Ok(closed) = self.back.closed.recv_timeout(LAST_WORD_MAX) {
            let ended = self.closed_here(closed);
            // The source doesn't miss what it doesn't receive any more.
            return if closed.shut == Some(0) { Ok(()) } else { ended };
        }
        Err(End::Over(format!("lost the connection to the source's agent: {error}")))
    }

    fn next(&self) -> Result<Next, End> {
        let closed: Receiver<Closed> =
            if self.closed.is_some() { never() } else { self.back.closed.clone() };
        let written = match &self.incoming {
            Incoming::Relayed(by_lanes) if !by_lanes.ended => by_lanes.written.clone(),
            _ => never(),
        };
        select! {
            recv(self.connected.inbox) -> received => received
                .map(Next::Received)
                .map_err(|_| End::Over("the source's connection has ended".to_owned())),
            recv(self.connected.broken) -> why => {
                Ok(Next::Broken(why.unwrap_or_else(|_| "a lane failed".to_owned())))
            }
            recv(closed) -> closed => Ok(Next::Closed(closed.unwrap_or(Closed { shut: None }))),
            recv(written) -> written => written
                .map(Next::Written)
                .map_err(|_| End::failed("a fault in the agent there: a thread has ended")),
        }
    }

    fn is_new(&self) -> bool {
        matches!(self.incoming, Incoming::New)
    }

    /// Relays the stream by lanes from now on.
    fn relay_by_lanes(&self) -> Result<ByLanes, End> {
        let Connected { lanes, link, .. } = self.connected;
        let (tell, written) = unbounded();
        let relayed = self.relayed.by_another();
        let started = InOrder::start(&self.socket, lanes.threads(), tell, relayed);
        let in_order = started.map_err(End::failed)?;
        lanes.with_disks(in_order.sink());
        let _nic_reports = NicReports::start(lanes, link).map_err(End::failed)?;
        Ok(ByLanes { in_order, written, ended: false, _nic_reports })
    }

    fn is_over(&self) -> bool {
        let ended = match &self.incoming {
            Incoming::New | Incoming::Split(_) => false,
            Incoming::Relayed(by_lanes) => by_lanes.ended,
            Incoming::Whole { ended } => *ended,
        };
        ended && self.closed.is_some()
    }

    /// The receiver here has closed its connection. For a QEMU that loads a split stream, this is
    /// regular only after its last word.
    fn closed_here(&mut self, closed: Closed) -> Result<(), End> {
        self.closed = Some(closed);
        let Incoming::Split(split) = &self.incoming else { return Ok(()) };
        match closed.shut {
            Some(0) => {
                self.watch(&split.ram);
                let lanes = &self.connected.lanes;
                self.connected.send(&ToSource::Cost(Cost {
                    cpu_s: lanes.cpu().as_secs_f64(),
                    pool_high_water_bytes: split.pools.high_water_bytes(),
                    ..split.opened.cost()
                }))
            }
            Some(error) => {
                Err(End::failed(format!("QEMU there could not load the VM (error {error})")))
            }
            None => Err(End::failed(
                "QEMU there closed its connection before it had loaded the VM; see its log",
            )),
        }
    }

    /// Makes the VM's content available to arriving VMs.
    fn watch(&self, ram: &RamBlocks) {
        let sharing = self.connected.shared.local.sharing.as_ref();
        let Some(((sharing, whose), domain)) =
            sharing.zip(self.whose.as_ref()).zip(self.domain.as_ref())
        else {
            return;
        };
        if let Err(error) = sharing.watch_ram(&whose.process, domain, || ram.clone()) {
            tracing::info!(%error, "the content of this VM can't be shared");
        }
    }

    /// Passes on a piece of a stream that is not split, or its end.
    fn relay(&mut self, piece: &[u8]) -> Result<(), End> {
        match self.incoming {
            Incoming::New => self.incoming = Incoming::Whole { ended: false },
            Incoming::Whole { .. } => {}
            Incoming::Split(_) | Incoming::Relayed(_) => {
                return Err(End::failed(
                    "the source sent data of a split stream on the control connection",
                ));
            }
        }
        if piece.is_empty() {
            self.incoming = Incoming::Whole { ended: true };
            // It may be closed already.
            let _ = self.socket.shutdown(Shutdown::Write);
            return Ok(());
        }
        self.relayed.pass(piece);
        let written = self.socket.write_all(piece);
        written.map_err(|error| {
            End::failed(format!("the program that waits for the VM accepts no data: {error}"))
        })
    }

    /// Closes all connections of the migration at once: QEMU here sees its stream end, and none of
    /// them stays open elsewhere.
    fn close(self) {
        let Self { connected, socket, back, channels, incoming, .. } = self;
        let _ = socket.shutdown(Shutdown::Both);
        drop(channels);
        connected.lanes.shut();
        connected.end_lanes();
        drop((incoming, back));
    }
}
