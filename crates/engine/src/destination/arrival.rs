//! One VM that arrives.
//!
//! [`run`] is the ordered list of phases, the mirror of the source's. Until the
//! VM is loaded, whatever goes wrong ends its QEMU; the source, which has the
//! VM, hears why if it can be told. From then on `switchover::destination`
//! decides alone, and keeps a journal; its hands are in `hands`.

mod load;
mod order;
mod storage;

use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use content::Domain;
use crossbeam_channel::{Receiver, RecvTimeoutError, after, bounded, select};
use identity::Connection;
use placer::{BlockPlan, Feeder, Placement, Placer};
use qemu::disks::PreparedImage;
use qemu::incoming::Incoming;
use qemu::machine::Machine;
use qemu::ram_blocks::{RamBlocks, Reached};
use switchover::Wait;
use switchover::destination::{Driver, Event as Step};
use switchover::journal::Opened;
use wire::{
    Announced, Prepare, Prepared, SharingOrder, StorageOrder, ToDestination, ToSource, Token,
};

use super::Shared;
use super::connections::Place;
use super::disks::ArrivingDisks;
use super::hands::Keeper;
use super::lanes::ArrivingLanes;
use super::nic_use::Telling;
use crate::host::Unsettled;
use crate::link::{Heard, Link};
use crate::resources::Pools;
use crate::sharing::{Blocks, Disks, Resolving, Sharing};
use crate::waits::Pulse;

/// Most residue after RAM: what the devices of a large VM without VFIO make is
/// some MiB.
const TAIL_BYTES_MAX: usize = 256 << 20;
/// For the source's next word, as long as there is a connection: it has QEMU
/// say first how its migration ended, or end.
const WORD_MAX: Duration = Duration::from_secs(5);
/// What went wrong just now is tried again after this.
const RETRY: Duration = Duration::from_secs(1);
/// How often it is looked whether anything comes.
const LOOK: Duration = Duration::from_secs(1);
/// So many times as long as a source waits before it gives up a migration that
/// makes no progress: one that does not is none.
const SILENCE: u32 = 2;

/// Why an arrival ended before the VM was loaded.
enum End {
    /// For the source to hear.
    Failed(String),
    /// The source ended it, or is gone.
    Over(String),
}

impl End {
    fn failed(why: impl std::fmt::Display) -> Self {
        Self::Failed(why.to_string())
    }
}

/// What pages that come by name are found by.
struct Shares {
    sharing: Arc<Sharing>,
    domain: Domain,
    /// Whether other hosts of the rack are asked.
    rack: bool,
    /// Whether others find content of this VM.
    keeps: bool,
    /// The VM's disks that are read.
    disks: Option<Disks>,
}

impl Shares {
    /// Of a VM whose content is not shared.
    fn alone(order: &StorageOrder) -> std::io::Result<Self> {
        let sharing = Sharing::start(order.secret.clone().into_bytes(), None)?;
        let domain = Domain::default();
        Ok(Self { sharing, domain, rack: false, keeps: false, disks: None })
    }
}

/// That, or why none may; and what is not used of it.
type Agreed = Result<(Shares, Option<&'static str>), &'static str>;

/// How content is to be shared, and which disks are to be read.
type Wanted = (Option<Agreed>, Option<StorageOrder>);

struct Arrival<'s> {
    shared: &'s Shared,
    link: Arc<Link<ToSource>>,
    hear: Receiver<Heard<ToDestination>>,
    token: Token,
    lanes: Arc<ArrivingLanes>,
    broken: Receiver<String>,
    peer: SocketAddr,
    /// The host at the other end, if its certificate says so.
    certified: Option<String>,
}

/// Serves a control connection to its end.
pub(super) fn run(
    shared: &Shared,
    connection: Connection,
    number: u64,
    place: Place,
) -> std::io::Result<()> {
    let peer = connection.peer_address()?;
    let certified = connection.peer().map(str::to_owned);
    let (link, hear) = Link::start(connection, &format!("source-{number}"))?;
    let (tell_broken, broken) = bounded(1);
    let network = &shared.local.resources.network;
    let lanes = Arc::new(ArrivingLanes::new(tell_broken, network, certified.clone()));
    let arrival = Arrival {
        shared,
        link: Arc::new(link),
        hear,
        token: new_token()?,
        lanes,
        broken,
        peer,
        certified,
    };
    match arrival.take_in(place) {
        Ok(()) => {}
        Err(End::Failed(reason)) => {
            tracing::warn!(reason, "the VM does not come");
            let _ = arrival.link.say(&ToSource::Refused { reason });
        }
        Err(End::Over(why)) => tracing::warn!(why, "the VM does not come"),
    }
    arrival.link.close();
    Ok(())
}

fn new_token() -> std::io::Result<Token> {
    let mut token = [0; 16];
    let mut filled = 0;
    while filled < token.len() {
        filled +=
            rustix::rand::getrandom(&mut token[filled..], rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(Token(token))
}

impl Arrival<'_> {
    /// An error is one from before there was a journal.
    fn take_in(&self, mut place: Place) -> Result<(), End> {
        let Some(order) = self.hear_order()? else { return Ok(()) };
        self.check_name(&order)?;
        tracing::info!(vm = order.vm, from = order.from, migration = order.migration, "arriving");
        self.lanes.crew().set(&order.terms);
        let with_disks = order.moving.as_array().is_some_and(|moving| !moving.is_empty());
        let pools = self.shared.local.resources.coming(with_disks).map_err(End::failed)?;
        place.is_known();
        let arriving = self.shared.host.receive(&order).map_err(End::failed)?;
        let mut keeper = Keeper::new(arriving, Arc::clone(&self.link), Arc::clone(&self.lanes));
        let mut driver = self.open_journal(&order, &keeper)?;
        let sharing =
            (order.sharing.as_ref().map(|wanted| self.agree(wanted)), order.storage.clone());
        let through =
            AssertUnwindSafe(|| self.go_through(&pools, sharing, &mut driver, &mut keeper));
        if catch_unwind(through).is_err() {
            tracing::error!(vm = order.vm, "a fault in the agent; its journal says whose it is");
            self.end_lanes();
            drop(driver);
            if self.shared.host.take_up(&order.vm, &order.switchover) {
                keeper.leave();
            }
            return Ok(());
        }
        if !driver.machine().is_over() {
            let machine = keeper.shared_machine();
            let (incoming, arriving) = keeper.undecided();
            self.shared.host.settle(Unsettled { driver, machine, incoming, arriving });
        }
        Ok(())
    }

    /// All that follows from the journal on.
    fn go_through(&self, pools: &Pools, sharing: Wanted, driver: &mut Driver, keeper: &mut Keeper) {
        let machine = keeper.shared_machine();
        let disks = self.open_disks(&machine, keeper.images(), pools);
        self.shared.arrivals.lock().insert(self.token, Arc::clone(&self.lanes));
        let loaded = disks.and_then(|disks| {
            let loaded = self.receive(keeper, &machine, disks.as_ref(), pools, sharing);
            // Lanes that wait for a disk end by it.
            drop(disks);
            loaded
        });
        self.end_lanes();
        keeper.pool_high_water_bytes = pools.high_water_bytes();
        let event = match loaded {
            Ok(()) => Step::Loaded,
            Err(End::Failed(why)) => Step::GiveUp { reason: why.into() },
            Err(End::Over(why)) => Step::ConnectionLost { reason: why.into() },
        };
        driver.step(event, keeper);
        self.see_it_through(driver, keeper);
    }

    /// No lane brings anything any more.
    fn end_lanes(&self) {
        self.shared.arrivals.lock().remove(&self.token);
        self.lanes.end();
    }

    /// From here on a restart of the agent knows of the migration.
    fn open_journal(&self, order: &Prepare, keeper: &Keeper) -> Result<Driver, End> {
        let qemu = serde_json::to_value(keeper.machine().record()).map_err(End::failed)?;
        let seen = self.peer.ip();
        let peer_address = keeper
            .source_address()
            .unwrap_or_else(|| SocketAddr::new(seen, order.agent_port))
            .to_string();
        let opened = Opened {
            migration: order.switchover.clone(),
            vm: order.vm.clone(),
            peer: order.from.clone(),
            peer_address,
            run: false,
            qemu,
        };
        self.shared.local.shelf.create(opened).map(Driver::new).map_err(End::failed)
    }

    /// Hears the source until the switchover is over on this side, or there is
    /// no connection to hear it by.
    fn see_it_through(&self, driver: &mut Driver, keeper: &mut Keeper) {
        while let Some(wait) = driver.machine().wait() {
            let limit = if wait == Wait::Retry { RETRY } else { WORD_MAX };
            let event = match self.hear.recv_timeout(limit) {
                Ok(Heard::Message(ToDestination::Switchover { said })) => Step::Heard(said),
                Ok(Heard::Gone(error)) => Step::ConnectionLost { reason: error.to_string().into() },
                Ok(_) => continue,
                Err(RecvTimeoutError::Timeout) if keeper.machine().process.is_alive() => {
                    Step::Timeout
                }
                Err(RecvTimeoutError::Timeout) => Step::QemuGone,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            driver.step(event, keeper);
        }
    }

    /// Everything of the VM, until its QEMU has loaded it.
    fn receive(
        &self,
        keeper: &mut Keeper,
        machine: &Machine,
        disks: Option<&ArrivingDisks>,
        pools: &Pools,
        (sharing, from_disks): Wanted,
    ) -> Result<(), End> {
        let incoming = Arc::new(Incoming::of(machine).map_err(End::failed)?);
        keeper.incoming = Some(Arc::clone(&incoming));
        let stream = incoming.open().map_err(End::failed)?;
        let feeder = Feeder::start_within(stream, Arc::clone(&pools.pages)).map_err(End::failed)?;
        let ram = RamBlocks::of(machine);
        let mut notes = ram.notes.clone();
        let mut sharing = match sharing {
            None => None,
            Some(Ok((shares, alone))) => {
                let text = |why| format!("content is shared with this host's VMs only: {why}");
                notes.extend(alone.map(text));
                Some(shares)
            }
            Some(Err(why)) => {
                notes.push(format!("content is not shared: {why}"));
                None
            }
        };
        let shares = sharing.is_some();
        let mut storage = Vec::new();
        if let Some(wanted) = &from_disks {
            let (disks, why) =
                storage::open(machine, wanted, &self.shared.local.scratch, self.lanes.crew());
            notes.extend(why);
            storage = disks.opened.iter().map(Option::is_some).collect();
            let shares = match sharing {
                Some(shares) => shares,
                None => Shares::alone(wanted).map_err(End::failed)?,
            };
            sharing = Some(Shares { disks: Some(disks), ..shares });
        }
        let prepared = Prepared {
            token: hex(self.token),
            qemu: machine.version.clone(),
            notes,
            sharing: shares,
            storage,
        };
        self.say(&ToSource::Prepared(prepared))?;

        let network = Arc::clone(&self.shared.local.resources.network);
        let telling = Telling::start(Arc::clone(&self.lanes), network, Arc::clone(&self.link));
        let telling = telling.map_err(End::failed)?;
        let mut resolving = None;
        let kept = sharing.as_ref().filter(|shares| shares.keeps);
        let kept = kept.map(|shares| Arc::clone(&shares.sharing));
        let tail = self.take_stream(&ram.reached, &feeder, disks, sharing, &mut resolving)?;
        if let Some(resolving) = &resolving {
            if let Some(sharing) = kept {
                sharing.keep(resolving);
            }
            keeper.fetched_bytes = resolving.fetched_bytes();
            keeper.again_bytes = resolving.again_bytes();
            keeper.stored = resolving.stored();
        }
        drop(resolving);
        drop(telling);
        if let Some(disks) = disks {
            disks.finish().map_err(End::failed)?;
        }
        self.load(machine, &incoming, &feeder, &tail)
    }

    /// Pages come by the lanes, residue comes here, until the source says that
    /// it is complete. Returns the tail.
    fn take_stream(
        &self,
        ram: &[Reached],
        feeder: &Feeder,
        disks: Option<&ArrivingDisks>,
        mut sharing: Option<Shares>,
        resolving: &mut Option<Arc<Resolving>>,
    ) -> Result<Vec<u8>, End> {
        let mut tail = Vec::new();
        let mut whole_bytes = 0;
        let mut announced = None;
        loop {
            match self.next()? {
                Heard::Message(ToDestination::Blocks { blocks, ram_section, footers }) => {
                    announced = Some((blocks, ram_section, footers));
                }
                Heard::Head(head) => {
                    let (blocks, ram_section, footers) = announced
                        .take()
                        .ok_or_else(|| End::failed("a head came without its block list"))?;
                    feeder.head(&head, ram_section, footers).map_err(End::failed)?;
                    *resolving = self.open_lanes(ram, feeder, blocks, sharing.take())?;
                }
                Heard::Tail(piece) => {
                    if tail.len() + piece.len() > TAIL_BYTES_MAX {
                        return Err(End::failed(format!(
                            "the VM's device state is larger than {} MiB",
                            TAIL_BYTES_MAX >> 20
                        )));
                    }
                    tail.extend_from_slice(&piece);
                }
                Heard::Whole(piece) => {
                    whole_bytes += piece.len() as u64;
                    feeder.whole(&piece).map_err(End::failed)?;
                }
                Heard::Message(ToDestination::Spare { pages }) => {
                    if let Some(resolving) = resolving {
                        resolving.spare(pages);
                    }
                }
                Heard::Message(ToDestination::FlushDisk { ticket, disk }) => match disks {
                    Some(disks) => disks.flush(ticket, disk).map_err(End::failed)?,
                    None => return Err(End::failed("a disk was to be flushed, and none comes")),
                },
                Heard::Message(ToDestination::Complete { residue_bytes }) => {
                    let came = tail.len() as u64 + whole_bytes;
                    if residue_bytes != came {
                        return Err(End::failed(format!(
                            "{came} bytes of residue came, {residue_bytes} were sent"
                        )));
                    }
                    return Ok(tail);
                }
                other => return Err(ended(other)),
            }
        }
    }

    /// Has the waiting QEMU take the disks that come with the VM.
    fn open_disks(
        &self,
        machine: &Machine,
        images: &[PreparedImage],
        pools: &Pools,
    ) -> Result<Option<ArrivingDisks>, End> {
        if images.is_empty() {
            return Ok(None);
        }
        let Some(pool) = &pools.blocks else {
            return Err(End::failed("images were prepared for a VM that brings no disks"));
        };
        let local = &self.shared.local;
        let socket = local.scratch.join(format!("disks-{}.sock", hex(self.token)));
        let link = Arc::clone(&self.link);
        let room = (pool, pools.block_room());
        let disks = ArrivingDisks::open(machine, &socket, images, room, link, &self.lanes)
            .map_err(End::failed)?;
        self.lanes.with_disks(disks.sink());
        Ok(Some(disks))
    }

    fn open_lanes(
        &self,
        ram: &[Reached],
        feeder: &Feeder,
        blocks: Vec<Announced>,
        sharing: Option<Shares>,
    ) -> Result<Option<Arc<Resolving>>, End> {
        let mut plans = Vec::with_capacity(blocks.len());
        for Announced { name, bytes } in blocks {
            let reached = ram.iter().find(|ram| ram.name == name);
            let placement = match reached {
                Some(ram) if ram.bytes == bytes => Placement::Mapped(Arc::clone(&ram.mapping)),
                Some(ram) => {
                    return Err(End::failed(format!(
                        "RAM {name} has {bytes} bytes at the source and {} here; start both with \
                         the same -m and memory backends",
                        ram.bytes
                    )));
                }
                None => Placement::Inline,
            };
            plans.push(BlockPlan { name, bytes, placement });
        }
        let names = |mapped: bool| {
            let is = |plan: &&BlockPlan| matches!(plan.placement, Placement::Mapped(_)) == mapped;
            plans.iter().filter(is).map(|plan| plan.name.clone()).collect()
        };
        let said = ToSource::Placement { mapped: names(true), inline: names(false) };
        let mut held = Blocks::default();
        for plan in &plans {
            let mapping = match &plan.placement {
                Placement::Mapped(mapping) => Some(Arc::clone(mapping)),
                Placement::Inline => None,
            };
            held.push(plan.bytes, mapping);
        }
        let placer = Arc::new(Placer::new(plans, feeder.handle()).map_err(End::failed)?);
        let resolving = match sharing {
            None => None,
            Some(Shares { sharing, domain, rack, disks, .. }) => {
                let link = Arc::clone(&self.link);
                let placer = Arc::clone(&placer);
                let resolving = sharing.take_in((&domain, rack), placer, held, disks, link);
                Some(Arc::new(resolving.map_err(End::failed)?))
            }
        };
        self.lanes.open(placer, resolving.clone());
        self.say(&said)?;
        Ok(resolving)
    }

    /// Whether pages may come by name, as the source wants; or why not.
    fn agree(&self, wanted: &SharingOrder) -> Agreed {
        let Some(sharing) = &self.shared.local.sharing else {
            return Err("the agent at the destination is told not to");
        };
        if sharing.key(&wanted.domain).print().to_string() != wanted.print {
            return Err("both hosts' content.key differ");
        }
        let alone = (wanted.rack && sharing.rack().is_none())
            .then_some("the agent at the destination knows of no rack, or of no directory");
        let rack = wanted.rack && alone.is_none();
        let (sharing, domain) = (Arc::clone(sharing), wanted.domain.clone());
        Ok((Shares { sharing, domain, rack, keeps: true, disks: None }, alone))
    }

    fn next(&self) -> Result<Heard<ToDestination>, End> {
        let silent_max = SILENCE * self.shared.local.waits.stall;
        let mut pulse = Pulse::new();
        loop {
            let heard = select! {
                recv(after(LOOK)) -> _ => {
                    if pulse.beat(self.lanes.came_bytes(), LOOK) < silent_max {
                        continue;
                    }
                    let seconds = silent_max.as_secs();
                    return Err(End::failed(format!("nothing of the VM has come for {seconds} s")));
                }
                recv(self.hear) -> heard => {
                    heard.map_err(|_| End::Over("the source's connection has ended".to_owned()))?
                }
                recv(self.broken) -> why => {
                    return Err(End::failed(why.unwrap_or_else(|_| "a lane failed".to_owned())));
                }
            };
            match heard {
                // In whatever phase, they hold from now on.
                Heard::Message(ToDestination::Terms(terms)) => self.lanes.crew().set(&terms),
                heard => return Ok(heard),
            }
        }
    }

    fn say(&self, message: &ToSource) -> Result<(), End> {
        self.link.say(message).map_err(|error| End::Over(error.to_string()))
    }
}

/// What something that was not expected means.
fn ended(heard: Heard<ToDestination>) -> End {
    match heard {
        Heard::Message(ToDestination::Abort { reason }) => {
            End::Over(format!("the source ended the migration: {reason}"))
        }
        Heard::Message(ToDestination::Switchover { said }) => match said.message {
            switchover::ToDestination::Aborted { reason } => {
                End::Over(format!("the source ended the migration: {reason}"))
            }
            switchover::ToDestination::Unknown => {
                End::Over("the VM ended at its source".to_owned())
            }
            switchover::ToDestination::Go { .. } => {
                End::failed("the source gave up a VM that is not loaded")
            }
        },
        Heard::Gone(error) => End::Over(format!("the source is gone: {error}")),
        _ => End::failed("the source said something out of turn"),
    }
}

fn hex(token: Token) -> String {
    format!("{:032x}", u128::from_be_bytes(token.0))
}
