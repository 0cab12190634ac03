//! Decides whether pages may be read from the disks of a VM that another program
//! commands. QEMU is not queried: its command line lists the VM's devices.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use api::ReadDisks;
use qemu::commanded::Commanded;
use qemu::guest_disks::GuestDisk;
use qemu::guest_port::NoPort;
use storage::{OpenError, Probe};
use wire::{ToDestination, ToSource};

use super::agents::Agents;
use super::process;
use crate::error::MigrationError;
use crate::link::Received;
use crate::report_builder::ReportBuilder;
use crate::resources::Pools;
use crate::source::from_disks::{FromDisks, QueriedVm, notes, readable};

/// Time for the destination to open images, or to report why not.
const ANSWER_MAX: Duration = Duration::from_secs(30);
/// Time to check the images that QEMU has open here.
const PROBE_MAX: Duration = Duration::from_secs(5);

/// The reading of disks at the destination.
pub(super) struct Reading {
    pub(super) from: FromDisks,
    /// Which disks are read, by number.
    pub(super) disks: Vec<bool>,
}

impl Agents {
    /// Starts queries to the guest's helper of the VM whose QEMU migrates on `main`, and makes the
    /// destination open the disks. None if that is impossible, with a note if the operator
    /// requested it.
    pub(super) fn read_disks(
        &self,
        main: &UnixStream,
        pools: &Pools,
        report_builder: &Arc<ReportBuilder>,
    ) -> Result<Option<Reading>, MigrationError> {
        let storage = &self.request.storage;
        if storage.read == ReadDisks::Off {
            return Ok(None);
        }
        let notes = notes(storage, report_builder);
        let begun = self.vm(main).and_then(|vm| vm.query(storage, pools, &notes));
        let from = match begun {
            Ok(from) => from,
            Err(why) => {
                notes.note(format!("no page is read from storage: {why}"));
                return Ok(None);
            }
        };
        self.send(&ToDestination::Storage(from.order.clone()))?;
        let (disks, more) = match self.inbox.recv_timeout(ANSWER_MAX) {
            Ok(Received::Message(ToSource::StorageRead { disks, notes })) => (disks, notes),
            Ok(Received::Back(bytes)) if bytes.is_empty() => return Err(self.closed_early()),
            Ok(other) => return Err(self.ended(other)),
            Err(_) => {
                let why = "it did not report in time which disks it reads".to_owned();
                return Err(self.lost(why));
            }
        };
        more.into_iter().for_each(|note| notes.note(note));
        Ok(from.if_read(&disks).map(|from| Reading { from, disks }))
    }

    /// The VM, if its guest can be queried.
    fn vm(&self, main: &UnixStream) -> Result<QueriedVm, String> {
        let qemu = process::of(main)?;
        let vm = Arc::new(Commanded::of_process(qemu.pid).map_err(|error| error.to_string())?);
        vm.guest_port().map_err(|why: NoPort| why.to_string())?;
        if !self.carrying.waits {
            return Err("the agent at the destination is older".to_owned());
        }
        let disks = disks_of(&vm)?;
        let blocks = vm.memory()?.blocks;
        Ok(QueriedVm { vm: vm as _, disks: readable(disks, &[])?, blocks })
    }
}

/// The disks that it has. Its images may be on storage that doesn't answer.
fn disks_of(vm: &Arc<Commanded>) -> Result<Vec<GuestDisk>, String> {
    let probed = Arc::clone(vm);
    let probe = Probe::start(PROBE_MAX, move || probed.disks());
    let probe = probe.map_err(|error| error.to_string())?;
    let stalled = || OpenError::Stalled { what: "its disks".to_owned(), patience: PROBE_MAX };
    let disks = probe.wait().ok_or_else(|| stalled().to_string())?;
    disks.map_err(|error| error.to_string())
}
