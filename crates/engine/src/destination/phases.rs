//! One VM that arrives.
//!
//! [`run`] is the ordered list of phases, the mirror of the source's. Until the
//! VM is loaded, whatever goes wrong ends its QEMU; the source, which has the
//! VM, hears why if it can be told. From then on `switchover::destination`
//! decides alone, and keeps a journal; its hands are in `hands`.

mod audit;
mod effects;
mod load;
mod order;
mod receive;
mod sharing;
mod storage;

use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, after, bounded, select};
use identity::Connection;
use switchover::Wait;
use switchover::destination::{Driver, Event as Step};
use switchover::journal::Opened;
use wire::{Prepare, ToDestination, ToSource, Token};

use self::effects::Keeper;
use super::Shared;
use super::connections::Place;
use super::lanes::ArrivingLanes;
use crate::host::Unsettled;
use crate::link::{Heard, Link};
use crate::resources::Pools;
use crate::waits::Pulse;
use sharing::Wanted;

/// For the source's next word, as long as there is a connection: it has QEMU
/// say first how its migration ended, or end.
const WORD_MAX: Duration = Duration::from_secs(5);
/// What went wrong just now is tried again after this.
const RETRY: Duration = Duration::from_secs(1);
/// What a source that reads has taken by then.
const SAID_MAX: Duration = Duration::from_millis(100);
/// Lanes whose connections were closed end at once, unless one of them writes to
/// memory that is not there.
const LANES_END_MAX: Duration = Duration::from_secs(5);
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
    place: &mut Place,
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
    let sharing = shared.local.sharing.as_ref();
    let _until_it_is_over = sharing.and_then(|sharing| sharing.give_way());
    match arrival.admit(place) {
        Ok(()) => {}
        Err(End::Failed(reason)) => {
            tracing::warn!(reason, "the VM does not arrive");
            let _ = arrival.link.say(&ToSource::Refused { reason });
        }
        Err(End::Over(why)) => tracing::warn!(why, "the VM does not arrive"),
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
    fn admit(&self, place: &mut Place) -> Result<(), End> {
        let Some(order) = self.hear_order()? else { return Ok(()) };
        self.check_name(&order)?;
        tracing::info!(vm = order.vm, from = order.from, migration = order.migration, "arriving");
        self.lanes.threads().set(&order.terms);
        let with_disks = order.moving.read().is_ok_and(|moving| !moving.is_empty());
        let pools = self.shared.local.resources.coming(with_disks).map_err(End::failed)?;
        place.is_known();
        let arriving = self.shared.host.receive(&order).map_err(End::failed)?;
        place.is_of_host();
        let mut keeper = Keeper::new(arriving, Arc::clone(&self.link), Arc::clone(&self.lanes));
        let mut driver = self.open_journal(&order, &keeper)?;
        let wanted = Wanted {
            sharing: order.sharing.as_ref().map(|wanted| self.agree(wanted)).unwrap_or_default(),
            storage: order.storage.clone(),
            audit: order.audit,
        };
        let through =
            AssertUnwindSafe(|| self.go_through(&pools, wanted, &mut driver, &mut keeper));
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
    fn go_through(&self, pools: &Pools, wanted: Wanted, driver: &mut Driver, keeper: &mut Keeper) {
        let machine = keeper.shared_machine();
        let disks = self.open_disks(&machine, keeper.images(), pools);
        self.shared.arrivals.lock().insert(self.token, Arc::clone(&self.lanes));
        let loaded = disks.and_then(|disks| {
            let disks = disks.map(Arc::new);
            let loaded = self.receive(keeper, &machine, disks.as_ref(), pools, wanted);
            // Lanes that wait for a disk end by it.
            if let Some(disks) = disks {
                disks.shut();
            }
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
        if !self.lanes.end_within(LANES_END_MAX) {
            tracing::error!("lanes still write to the VM's memory, and stay until they have");
        }
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
        self.shared.local.journals.create(opened).map(Driver::new).map_err(End::failed)
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
                    let why = format!("nothing of the VM has arrived for {seconds} s");
                    return Err(End::failed(why));
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
                Heard::Message(ToDestination::Terms(terms)) => self.lanes.threads().set(&terms),
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
        _ => End::failed("the source sent a message out of turn"),
    }
}

fn hex(token: Token) -> String {
    format!("{:032x}", u128::from_be_bytes(token.0))
}
