//! Pages of a carried VM that are read from its disks.

use qemu::process::ProcessError;
use wire::{StorageOrder, ToSource};

use super::Carried;
use crate::destination::phases::End;
use crate::destination::phases::connect::Connected;
use crate::destination::phases::storage::{self, Waiting};

impl Carried<'_> {
    /// Starts reading its disks, as far as the QEMU that waits here has them.
    pub(super) fn read_disks(&mut self, order: StorageOrder) -> Result<(), End> {
        let Connected { shared, lanes, .. } = self.connected;
        let whose = self.whose.as_ref().ok_or("which process waits for the VM is not known");
        let whose = whose.map_err(str::to_owned);
        let said = |error: ProcessError| error.to_string();
        let waiting = whose.and_then(|whose| Ok((whose, whose.user().map_err(said)?)));
        let waiting = match waiting {
            Ok((whose, user)) => Waiting { disks: whose.disks().map_err(said), user: Some(user) },
            Err(why) => Waiting { disks: Err(why), user: None },
        };
        let (disks, notes) = storage::open(waiting, &order, &shared.local, lanes.threads());
        let read = disks.opened.iter().map(Option::is_some).collect();
        self.disks = Some((disks, order.secret));
        self.connected.say(&ToSource::StorageRead { disks: read, notes })
    }

    /// The source could send this many of the pages for which disks are read.
    pub(super) fn spare(&self, pages: u64) {
        let by_name = self.split.as_ref().and_then(|split| split.opened.by_name.as_ref());
        if let Some(by_name) = by_name {
            by_name.spare(pages);
        }
    }
}
