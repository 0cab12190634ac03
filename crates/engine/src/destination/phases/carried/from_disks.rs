//! Pages of a carried VM that are read from its disks.

use std::sync::Arc;
use std::time::Duration;

use ::storage::{OpenError, Probe};
use qemu::process::ProcessError;
use wire::{StorageOrder, ToSource};

use super::Carried;
use crate::destination::phases::connect::Connected;
use crate::destination::phases::end::End;
use crate::destination::phases::storage::{self, Waiting};

/// Time to check the images that QEMU has open. With the time for opening them here, this is less
/// than a source waits for the answer.
const PROBE_MAX: Duration = Duration::from_secs(5);

impl Carried<'_> {
    /// Starts reading its disks, as far as the QEMU that waits here has them.
    pub(super) fn read_disks(&mut self, order: StorageOrder) -> Result<(), End> {
        let Connected { shared, lanes, .. } = self.connected;
        let unknown = |why| Waiting { disks: Err(why), user: None };
        let waiting = self.waiting().unwrap_or_else(unknown);
        let (disks, notes) = storage::open(waiting, &order, &shared.local, lanes.threads());
        let read = disks.opened.iter().map(Option::is_some).collect();
        self.disks = Some((disks, order.secret));
        self.connected.send(&ToSource::StorageRead { disks: read, notes })
    }

    /// What the waiting QEMU has. Its images may be on storage that doesn't answer.
    fn waiting(&self) -> Result<Waiting, String> {
        let whose = self.whose.as_ref().ok_or("which process waits for the VM is not known")?;
        let whose = Arc::clone(whose);
        let look = move || -> Result<Waiting, ProcessError> {
            Ok(Waiting { disks: Ok(whose.disks()?), user: Some(whose.user()?) })
        };
        let probe = Probe::start(PROBE_MAX, look).map_err(|error| error.to_string())?;
        let stalled = || OpenError::Stalled { what: "its disks".to_owned(), patience: PROBE_MAX };
        let waiting = probe.wait().ok_or_else(|| stalled().to_string())?;
        waiting.map_err(|error| error.to_string())
    }
}
