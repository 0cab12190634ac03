//! One VM that arrives, phase by phase: the mirror of the source's.
//!
//! [`Connected::receive`] is the ordered list of phases until the VM is loaded. Each is a type that
//! owns what an arrival has by then, and becomes the next one. Until then, any failure ends the
//! VM's QEMU; the source, which has the VM, gets the reason if it can be reached. From then on only
//! `switchover::destination` decides, and keeps a journal; `phases/effects.rs` carries out its
//! decisions.

mod audit;
mod carried;
mod connect;
mod domain;
mod effects;
mod end;
mod load;
mod order;
mod prepare;
mod prove;
mod receive;
mod sharing;
mod storage;
mod switchover;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use ::switchover::destination::{Driver, Event as Step};
use identity::Connection;
use qemu::machine::Machine;
use tracing::span::EnteredSpan;
use wire::ToSource;

use self::audit::Auditing;
use self::connect::Connected;
use self::effects::{Keeper, Loaded};
use self::end::End;
use self::order::Order;
use self::sharing::PagesOrder;
use super::connections::ConnectionSlot;
use super::disks::ArrivingDisks;
use super::shared::Shared;
use crate::host::Unsettled;
use crate::resources::Pools;

/// Lanes whose connections are closed end at once, unless one of them is blocked in a write to the
/// VM's memory.
const LANES_END_MAX: Duration = Duration::from_secs(5);

/// Serves a control connection to its end.
pub(super) fn run(
    shared: &Shared,
    connection: Connection,
    number: u64,
    slot: &mut ConnectionSlot,
) -> std::io::Result<()> {
    let connected = Connected::new(shared, connection, number)?;
    let sharing = shared.local.sharing.as_ref();
    let _until_it_is_over = sharing.and_then(|sharing| sharing.give_way());
    match connected.admit(slot) {
        Ok(()) => {}
        Err(End::Failed(reason)) => {
            tracing::warn!(reason, "the VM does not arrive");
            let _ = connected.link.send(&ToSource::Refused { reason });
        }
        Err(End::Over(why)) => tracing::warn!(why, "the VM does not arrive"),
    }
    connected.link.close();
    Ok(())
}

impl Connected<'_> {
    /// Assigns log lines to the migration's span: those of this thread until the result is dropped,
    /// and those of data threads.
    fn is_about(&self, migration: &str, vm: &str) -> EnteredSpan {
        let span = data_threads::migration_span(migration, vm);
        self.lanes.threads().are_about(span.clone());
        span.entered()
    }

    /// Serves an order. An error is from before there was a journal.
    fn admit(&self, slot: &mut ConnectionSlot) -> Result<(), End> {
        let order = match self.receive_order()? {
            Some(Order::Prepare(order)) => order,
            Some(Order::Carry(order)) => return self.carry(&order, slot),
            Some(Order::Domain(order)) => return self.receive_domain(&order, slot),
            None => return Ok(()),
        };
        self.check_from(&order.from)?;
        if self.shared.leaving.load(SeqCst) {
            return Err(End::failed("its agent is stopping"));
        }
        let _in = self.is_about(&order.migration, &order.vm);
        tracing::info!(from = order.from, "arriving");
        self.lanes.threads().set(&order.terms);
        let with_disks = order.moving.read().is_ok_and(|moving| !moving.is_empty());
        let pools = self.shared.local.resources.coming(with_disks).map_err(End::failed)?;
        self.arrives(slot)?;
        let goes_on = || self.is_awaited();
        let arriving = self.shared.host.receive(&order, &goes_on).map_err(End::failed)?;
        slot.is_of_host();
        let (notes, maps_ram) = (arriving.notes().to_vec(), arriving.maps_ram());
        let ends_former = arriving.ends_former();
        let mut keeper = Keeper::new(arriving, Arc::clone(&self.link), Arc::clone(&self.lanes));
        let mut driver = self.open_journal(&order, &keeper, ends_former)?;
        let wanted = PagesOrder {
            sharing: order.sharing.as_ref().map(|wanted| self.agree(wanted)).unwrap_or_default(),
            storage: order.storage.clone(),
            audit: Auditing::new(order.audit, &order.hashes),
            notes,
            maps_ram,
        };
        let through =
            AssertUnwindSafe(|| self.go_through(&pools, wanted, &mut driver, &mut keeper));
        if catch_unwind(through).is_err() {
            tracing::error!("a fault in the agent; its journal decides which host has the VM");
            self.end_lanes();
            drop(driver);
            if self.shared.host.take_up(&order.vm, &order.switchover) {
                keeper.leave();
            }
            return Ok(());
        }
        if !driver.machine().has_ended() {
            let machine = keeper.shared_machine();
            let (incoming, arriving) = keeper.undecided();
            self.shared.host.settle(Unsettled { driver, machine, incoming, arriving });
        }
        Ok(())
    }

    /// Counts it among the VMs that arrive.
    fn arrives(&self, slot: &mut ConnectionSlot) -> Result<(), End> {
        if slot.arrives(self.certified.as_deref()) {
            return Ok(());
        }
        let why = "too many VMs already arrive there, of this host or in all: move it when one of \
                   them has arrived";
        Err(End::failed(why))
    }

    /// Runs everything from the journal on.
    fn go_through(
        &self,
        pools: &Pools,
        wanted: PagesOrder,
        driver: &mut Driver,
        keeper: &mut Keeper,
    ) {
        let machine = keeper.shared_machine();
        let disks = self.open_disks(&machine, keeper.images(), pools);
        self.shared.arrivals.lock().insert(self.token, Arc::clone(&self.lanes));
        let loaded = disks.and_then(|disks| {
            let disks = disks.map(Arc::new);
            let loaded = self.receive(&machine, disks.as_ref(), pools, wanted);
            // This ends lanes that wait for a disk.
            if let Some(disks) = disks {
                disks.shut();
            }
            loaded
        });
        self.end_lanes();
        let event = match loaded {
            Ok(loaded) => {
                keeper.loaded(loaded, pools.high_water_bytes());
                Step::Loaded
            }
            Err(End::Failed(why)) => Step::GiveUp { reason: why.into() },
            Err(End::Over(why)) => Step::ConnectionLost { reason: why.into() },
        };
        driver.step(event, keeper);
        self.see_it_through(driver, keeper);
    }

    /// Receives everything of the VM, until its QEMU has loaded it.
    fn receive(
        &self,
        machine: &Machine,
        disks: Option<&Arc<ArrivingDisks>>,
        pools: &Pools,
        wanted: PagesOrder,
    ) -> Result<Loaded, End> {
        let prepared = self.prepare(machine, disks, pools, wanted)?;
        let delivered = prepared.take_stream()?;
        let proved = delivered.prove()?;
        proved.load()
    }

    /// Ends the lanes, so that they deliver nothing any more.
    fn end_lanes(&self) {
        self.shared.arrivals.lock().remove(&self.token);
        if !self.lanes.end_within(LANES_END_MAX) {
            tracing::error!("lanes still write to the VM's memory, and stay until they have");
        }
    }
}
