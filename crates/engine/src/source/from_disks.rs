//! Decides whether the destination may read pages from the VM's disks, and which.

use std::path::Path;
use std::sync::Arc;

use api::{BitRate, FromStorage, HelperBudget, ReadDisks};
use cachemap::Budget;
use content::Key;
use dedup::source::{GuestPageCache, GuestQuery, Room, StorageNotes};
use qemu::disks::Disk;
use qemu::guest_disks::{self, GuestDisk, Reading};
use qemu::guest_port::HasGuest;
use qemu::ram_blocks::RamBlocks;
use wire::StorageOrder;

use super::phases::connect::Connected;
use crate::report_builder::ReportBuilder;
use crate::resources::Pools;

/// Pages that the destination may read from the VM's disks.
pub(crate) struct FromDisks {
    pub(crate) cached: Arc<GuestPageCache>,
    query: GuestQuery,
    pub(crate) order: StorageOrder,
    pub(crate) notes: Arc<StorageNotes>,
}

impl FromDisks {
    /// The key for names if content is not shared.
    pub(crate) fn key(&self) -> Key {
        dedup::storage::key(&self.order.secret)
    }

    /// Itself, if the destination reads any of the disks. Otherwise the guest is not kept busy.
    pub(crate) fn if_read(self, disks: &[bool]) -> Option<Self> {
        if disks.contains(&true) {
            return Some(self);
        }
        self.query.cancel();
        None
    }
}

impl Connected<'_> {
    /// Starts queries to the guest's helper, if pages are to be read from disks. None,
    /// with a note, if that is impossible.
    pub(crate) fn query_guest(&self, ram: &RamBlocks, moving: &[Disk]) -> Option<FromDisks> {
        if self.context.request.storage.read == ReadDisks::Off {
            return None;
        }
        let notes = notes(&self.context.request.storage, &self.context.report_builder);
        let begun = self.try_to_query(ram, moving, &notes);
        begun.map_err(|why| notes.note(format!("no page is read from storage: {why}"))).ok()
    }

    fn try_to_query(
        &self,
        ram: &RamBlocks,
        moving: &[Disk],
        notes: &Arc<StorageNotes>,
    ) -> Result<FromDisks, String> {
        if ram.reached.is_empty() {
            // Pages are read there to be named.
            let why = ram.notes.first().map_or("it has none that is large", String::as_str);
            return Err(format!("the VM's memory can't be read by this agent: {why}"));
        }
        let machine = &self.context.vm.machine;
        let all = guest_disks::disks(&machine.qmp, Path::new(&self.context.vm.cwd));
        let all = all.map_err(|error| error.to_string())?;
        let vm = QueriedVm {
            vm: Arc::clone(machine) as _,
            disks: readable(all, moving)?,
            blocks: ram.reached.iter().map(|block| (block.name.clone(), block.bytes)).collect(),
        };
        vm.query(&self.context.request.storage, &self.pools, notes)
    }
}

/// Notes about pages that are not read, shown if the operator requested reading.
pub(super) fn notes(
    storage: &FromStorage,
    report_builder: &Arc<ReportBuilder>,
) -> Arc<StorageNotes> {
    let report_builder = Arc::clone(report_builder);
    let report = move |note| report_builder.note(note);
    Arc::new(StorageNotes::new(storage.read == ReadDisks::On, report))
}

/// The VM's readable disks, without those that move; or why there are none.
pub(super) fn readable(
    mut disks: Vec<GuestDisk>,
    moving: &[Disk],
) -> Result<Vec<GuestDisk>, String> {
    let mut whys = Vec::new();
    disks.retain(|disk| match unusable(disk, moving) {
        None => true,
        Some(why) => {
            whys.push(format!("{}: {why}", disk.file));
            false
        }
    });
    match (disks.is_empty(), whys.is_empty()) {
        (false, _) => Ok(disks),
        (true, true) => Err("it has no virtio disk".to_owned()),
        (true, false) => Err(whys.join("; ")),
    }
}

/// A VM whose guest is queried.
pub(super) struct QueriedVm {
    pub(super) vm: Arc<dyn HasGuest>,
    pub(super) disks: Vec<GuestDisk>,
    /// The RAM blocks that matter.
    pub(super) blocks: Vec<(String, u64)>,
}

impl QueriedVm {
    /// Starts the queries.
    pub(super) fn query(
        self,
        storage: &FromStorage,
        pools: &Pools,
        notes: &Arc<StorageNotes>,
    ) -> Result<FromDisks, String> {
        let Self { vm, disks, blocks } = self;
        let order = StorageOrder {
            devices: disks.iter().map(|disk| disk.device.clone()).collect(),
            secret: secret().map_err(|error| error.to_string())?,
            bytes_per_s: storage.limit.map(BitRate::bytes_per_s),
        };
        let bounds = (budget(storage.helper), Room::next_to(pools.bound_bytes));
        let (query, cached) = GuestQuery::start(vm, disks, blocks, bounds, storage.share, notes)
            .map_err(|error| error.to_string())?;
        Ok(FromDisks { cached, query, order, notes: Arc::clone(notes) })
    }
}

/// The operator's budget, as the helper's type.
fn budget(HelperBudget { cpu_percent, time_ms, memory_bytes }: HelperBudget) -> Budget {
    Budget { cpu_percent, time_ms, memory_bytes }.bounded()
}

/// Why the destination can't read the guest's cached content of a disk.
fn unusable(disk: &GuestDisk, moving: &[Disk]) -> Option<String> {
    if moving.iter().any(|moving| moving.node == disk.node) {
        return Some("it moves with the VM".to_owned());
    }
    match &disk.reading {
        Reading::No { reason } => Some(reason.clone()),
        _ => None,
    }
}

/// A secret for one migration.
fn secret() -> std::io::Result<String> {
    let mut bytes = [0_u8; 32];
    let filled = rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty())?;
    if filled < bytes.len() {
        return Err(std::io::Error::other("the system has no random bytes"));
    }
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_budget_is_the_helpers_own() {
        assert_eq!(budget(HelperBudget::default()), Budget::default());
        let nothing = HelperBudget { cpu_percent: 0, time_ms: 0, memory_bytes: 0 };
        assert_eq!(budget(nothing).cpu_percent, 1);
    }
}
