//! One VM that arrives.
//!
//! [`run`] is the ordered list of phases, the mirror of the source's. Until
//! `go` is heard nothing here runs the VM, and whatever goes wrong ends its
//! QEMU; the source, which has the VM, hears why if it can be told.

use std::net::TcpStream;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, bounded, select};
use placer::{BlockPlan, Feeder, Placement, Placer};
use qemu::disks::PreparedImage;
use qemu::incoming::Incoming;
use qemu::machine::Machine;
use qemu::ram_blocks::{RamBlocks, Reached};
use wire::{Announced, Prepare, Prepared, ToDestination, ToSource, Token};

use super::Shared;
use super::disks::ArrivingDisks;
use super::lanes::ArrivingLanes;
use super::nic_use::Telling;
use crate::host::Arriving;
use crate::link::{Heard, Link};
use crate::resources::Pools;

/// Most residue after RAM: what the devices of a large VM without VFIO make is
/// some MiB.
const TAIL_BYTES_MAX: usize = 256 << 20;
/// Between connecting and the order.
const ORDER_MAX: Duration = Duration::from_secs(10);
/// QEMU's load of the residue.
const LOAD_MAX: Duration = Duration::from_secs(60);

/// Why an arrival ended.
enum End {
    /// For the source to hear.
    Tell(ToSource),
    /// The source ended it, or is gone.
    Over(String),
}

impl End {
    fn failed(why: impl std::fmt::Display) -> Self {
        Self::Tell(ToSource::Failed { reason: why.to_string() })
    }
}

fn refused(why: impl std::fmt::Display) -> End {
    End::Tell(ToSource::Refused { reason: why.to_string() })
}

struct Arrival<'s> {
    shared: &'s Shared,
    link: Arc<Link<ToSource>>,
    hear: Receiver<Heard<ToDestination>>,
    token: Token,
    lanes: Arc<ArrivingLanes>,
    broken: Receiver<String>,
}

/// Serves a control connection to its end.
pub(super) fn run(shared: &Shared, stream: TcpStream, number: u64) -> std::io::Result<()> {
    let (link, hear) = Link::start(stream, &format!("source-{number}"))?;
    let (tell_broken, broken) = bounded(1);
    let arrival = Arrival {
        shared,
        link: Arc::new(link),
        hear,
        token: new_token()?,
        lanes: Arc::new(ArrivingLanes::new(tell_broken, &shared.local.resources.network)),
        broken,
    };
    match arrival.take_in() {
        Ok(vm) => tracing::info!(vm, "arrived"),
        Err(End::Tell(said)) => {
            tracing::warn!(?said, "the VM does not come");
            let _ = arrival.link.say(&said);
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

/// A VM that is dropped on the way is discarded.
struct Guard(Option<Box<dyn Arriving>>);

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(arriving) = self.0.take() {
            arriving.discard();
        }
    }
}

impl Arrival<'_> {
    fn take_in(&self) -> Result<String, End> {
        let order = self.hear_order()?;
        tracing::info!(vm = order.vm, from = order.from, migration = order.migration, "arriving");
        self.lanes.crew().set(&order.terms);
        let with_disks = order.moving.as_array().is_some_and(|moving| !moving.is_empty());
        let pools = self.shared.local.resources.coming(with_disks).map_err(refused)?;
        let arriving = self.shared.host.receive(&order).map_err(refused)?;
        let machine = arriving.machine();
        let disks = self.open_disks(&machine, arriving.images(), &pools);
        let mut guard = Guard(Some(arriving));
        self.shared.arrivals.lock().insert(self.token, Arc::clone(&self.lanes));
        let outcome = disks.and_then(|disks| {
            let outcome = self.load_and_run(&mut guard, &machine, disks.as_ref(), &pools);
            // Lanes that wait for a disk end by it.
            drop(disks);
            outcome
        });
        self.shared.arrivals.lock().remove(&self.token);
        self.lanes.end();
        outcome.map(|()| order.vm)
    }

    fn hear_order(&self) -> Result<Box<Prepare>, End> {
        match self.hear.recv_timeout(ORDER_MAX) {
            Ok(Heard::Message(ToDestination::Prepare(order))) => Ok(order),
            Ok(Heard::Gone(error)) => Err(End::Over(error.to_string())),
            Ok(_) => Err(End::failed("an order to prepare was expected first")),
            Err(_) => Err(End::Over("no order came".to_owned())),
        }
    }

    fn load_and_run(
        &self,
        guard: &mut Guard,
        machine: &Machine,
        disks: Option<&ArrivingDisks>,
        pools: &Pools,
    ) -> Result<(), End> {
        let incoming = Incoming::of(machine).map_err(End::failed)?;
        let stream = incoming.open().map_err(End::failed)?;
        let feeder = Feeder::start_within(stream, Arc::clone(&pools.pages)).map_err(End::failed)?;
        let ram = RamBlocks::of(machine);
        let prepared = Prepared {
            token: hex(self.token),
            qemu: machine.version.clone(),
            notes: ram.notes.clone(),
        };
        self.say(&ToSource::Prepared(prepared))?;

        let network = Arc::clone(&self.shared.local.resources.network);
        let telling = Telling::start(Arc::clone(&self.lanes), network, Arc::clone(&self.link));
        let telling = telling.map_err(End::failed)?;
        let tail = self.take_stream(&ram.reached, &feeder, disks)?;
        drop(telling);
        if let Some(disks) = disks {
            disks.finish().map_err(End::failed)?;
        }
        self.load(machine, &incoming, &feeder, &tail)?;
        self.say(&ToSource::Loaded)?;
        let run = self.hear_verdict()?;
        self.commit(guard, &incoming, run, pools.high_water_bytes())
    }

    /// Pages come by the lanes, residue comes here, until the source says that
    /// it is complete. Returns the tail.
    fn take_stream(
        &self,
        ram: &[Reached],
        feeder: &Feeder,
        disks: Option<&ArrivingDisks>,
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
                    self.open_lanes(ram, feeder, blocks)?;
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
                Heard::Message(ToDestination::FlushDisk { ticket, disk }) => match disks {
                    Some(disks) => disks.flush(ticket, disk),
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
        let disks = ArrivingDisks::open(machine, &socket, images, pool, link, &self.lanes)
            .map_err(End::failed)?;
        self.lanes.with_disks(disks.sink());
        Ok(Some(disks))
    }

    fn open_lanes(
        &self,
        ram: &[Reached],
        feeder: &Feeder,
        blocks: Vec<Announced>,
    ) -> Result<(), End> {
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
        let placer = Placer::new(plans, feeder.handle()).map_err(End::failed)?;
        self.lanes.open(Arc::new(placer));
        self.say(&said)
    }

    /// Has QEMU load the VM. Nothing but the source's end of the migration can
    /// be heard meanwhile: it ends a QEMU that hangs in its load, too.
    fn load(
        &self,
        machine: &Machine,
        incoming: &Incoming,
        feeder: &Feeder,
        tail: &[u8],
    ) -> Result<(), End> {
        self.lanes.end();
        let (done, over) = bounded::<()>(0);
        thread::scope(|scope| {
            let watch = || {
                let heard = loop {
                    let heard = select! {
                        recv(self.hear) -> heard => heard,
                        recv(over) -> _ => return None,
                    };
                    match heard {
                        // Nobody is left here to whom they matter.
                        Ok(Heard::Message(ToDestination::Terms(_))) => {}
                        heard => break heard,
                    }
                };
                feeder.stop();
                if let Err(error) = machine.quit() {
                    tracing::warn!(%error, "the QEMU that loads the VM can't be ended");
                }
                let gone = || End::Over("the source's connection has ended".to_owned());
                Some(heard.map_or_else(|_| gone(), ended))
            };
            let watching = thread::Builder::new().name("load-watch".to_owned());
            let watching = watching.spawn_scoped(scope, watch).map_err(End::failed)?;
            let loaded = feed_tail(incoming, feeder, tail);
            drop(done);
            match watching.join() {
                Ok(None) => loaded,
                Ok(Some(end)) => Err(end),
                Err(fault) => std::panic::resume_unwind(fault),
            }
        })
    }

    /// Whether to run it (and not keep it paused); or it stays at the source.
    fn hear_verdict(&self) -> Result<bool, End> {
        match self.next()? {
            Heard::Message(ToDestination::Go { run }) => Ok(run),
            other => Err(ended(other)),
        }
    }

    fn commit(
        &self,
        guard: &mut Guard,
        incoming: &Incoming,
        run: bool,
        pool_high_water_bytes: u64,
    ) -> Result<(), End> {
        if run {
            let cannot = |error: qemu::qmp::QmpError| {
                End::Tell(ToSource::CannotRun { reason: error.to_string() })
            };
            incoming.cont().map_err(cannot)?;
        }
        // From here it is ours, whatever else fails. One that stays paused looks
        // like one that never arrived: it is noted down before the source drops
        // it. One that runs is known by that, and its source waits for the word.
        let mut arriving = guard.0.take();
        if !run {
            adopt(&mut arriving);
        }
        let cpu_s = self.lanes.cpu().as_secs_f64();
        let said = self.link.say(&ToSource::Running { cpu_s, pool_high_water_bytes });
        if let Err(error) = said {
            tracing::warn!(%error, "the VM is here, but its source could not be told");
        }
        if run {
            incoming.announce();
        } else {
            incoming.restore();
        }
        adopt(&mut arriving);
        Ok(())
    }

    fn next(&self) -> Result<Heard<ToDestination>, End> {
        loop {
            let heard = select! {
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

fn feed_tail(incoming: &Incoming, feeder: &Feeder, tail: &[u8]) -> Result<(), End> {
    feeder.tail(tail).map_err(|error| End::failed(incoming.explain(&error)))?;
    feeder.finish().map_err(|error| End::failed(incoming.explain(&error)))?;
    incoming.wait_loaded(LOAD_MAX).map_err(End::failed)
}

fn adopt(arriving: &mut Option<Box<dyn Arriving>>) {
    if let Some(Err(error)) = arriving.take().map(Arriving::adopt) {
        tracing::error!(error, "the VM is here, but that could not be noted down");
    }
}

/// What something that was not expected means.
fn ended(heard: Heard<ToDestination>) -> End {
    match heard {
        Heard::Message(ToDestination::Abort { reason }) => {
            End::Over(format!("the source ended the migration: {reason}"))
        }
        Heard::Gone(error) => End::Over(format!("the source is gone: {error}")),
        _ => End::failed("the source said something out of turn"),
    }
}

fn hex(token: Token) -> String {
    format!("{:032x}", u128::from_be_bytes(token.0))
}
