//! Whether pages may be read from the VM's disks at the destination.

use std::path::Path;
use std::sync::Arc;

use api::{BitRate, HelperBudget, ReadDisks};
use cachemap::Budget;
use content::Key;
use dedup::source::{Asking, GuestPageCache, Room, StorageNotes};
use qemu::disks::Disk;
use qemu::guest_disks::{self, GuestDisk, Reading};
use qemu::ram_blocks::RamBlocks;
use wire::StorageOrder;

use super::phases::connect::Connected;

/// Pages that the destination may read from the VM's disks.
pub(crate) struct FromDisks {
    pub(crate) cached: Arc<GuestPageCache>,
    _asking: Asking,
    pub(crate) order: StorageOrder,
    pub(crate) notes: Arc<StorageNotes>,
}

impl FromDisks {
    /// What names are made with if content is not shared.
    pub(crate) fn key(&self) -> Key {
        dedup::storage::key(&self.order.secret)
    }
}

impl Connected<'_> {
    /// Has the helper in the guest asked, if pages are to be read from disks. None,
    /// and a note, if that can't be.
    pub(crate) fn ask_guest(&self, ram: &RamBlocks, moving: &[Disk]) -> Option<FromDisks> {
        if self.context.request.storage.read == ReadDisks::Off {
            return None;
        }
        let report_builder = Arc::clone(&self.context.report_builder);
        let report = move |note| report_builder.note(note);
        let notes =
            Arc::new(StorageNotes::new(self.context.request.storage.read == ReadDisks::On, report));
        let begun = self.try_to_ask(ram, moving, &notes);
        begun.map_err(|why| notes.note(format!("no page is read from storage: {why}"))).ok()
    }

    fn try_to_ask(
        &self,
        ram: &RamBlocks,
        moving: &[Disk],
        notes: &Arc<StorageNotes>,
    ) -> Result<FromDisks, String> {
        if ram.reached.is_empty() {
            // What is named is read there.
            let why = ram.notes.first().map_or("it has none that is large", String::as_str);
            return Err(format!("the VM's memory can't be read by this agent: {why}"));
        }
        let machine = &self.context.vm.machine;
        let all = guest_disks::disks(&machine.qmp, Path::new(&self.context.vm.cwd));
        let mut disks = all.map_err(|error| error.to_string())?;
        let mut whys = Vec::new();
        disks.retain(|disk| match unusable(disk, moving) {
            None => true,
            Some(why) => {
                whys.push(format!("{}: {why}", disk.file));
                false
            }
        });
        if disks.is_empty() {
            let why =
                if whys.is_empty() { "it has no virtio disk".to_owned() } else { whys.join("; ") };
            return Err(why);
        }
        let order = StorageOrder {
            devices: disks.iter().map(|disk| disk.device.clone()).collect(),
            secret: secret().map_err(|error| error.to_string())?,
            bytes_per_s: self.context.request.storage.limit.map(BitRate::bytes_per_s),
        };
        let (budget, share) =
            (budget(self.context.request.storage.helper), self.context.request.storage.share);
        let bounds = (budget, Room::beside(self.pools.bound_bytes));
        let (asking, cached) = Asking::start(machine, disks, ram, bounds, share, notes)
            .map_err(|error| error.to_string())?;
        Ok(FromDisks { cached, _asking: asking, order, notes: Arc::clone(notes) })
    }
}

/// The operator's budget, as the helper takes it.
fn budget(HelperBudget { cpu_percent, time_ms, memory_bytes }: HelperBudget) -> Budget {
    Budget { cpu_percent, time_ms, memory_bytes }.bounded()
}

/// Why the destination can't read what the guest has cached of a disk.
fn unusable(disk: &GuestDisk, moving: &[Disk]) -> Option<String> {
    if moving.iter().any(|moving| moving.node == disk.node) {
        return Some("it moves with the VM".to_owned());
    }
    match &disk.reading {
        Reading::No { reason } => Some(reason.clone()),
        _ => None,
    }
}

/// For one migration.
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
