//! A second VM on the host that the first one leaves: its memcached is used by clients on a third
//! host.

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use lab_guest::orders::Orders;

use super::visitors::{KEPT_BYTES, Visitors};
use lab::error::{LabError, Result, SystemContext};
use lab::guest::{Guest, GuestSpec};
use lab::hosts::{Hosts, Outside};
use lab::setup::{self, Kit};

/// Longest time until a guest that runs reports.
const HEARD_MAX: Duration = Duration::from_secs(20);

/// The VM at work. Dropping it ends it.
pub(super) struct SecondVm {
    qemu: Child,
    guest: Guest,
    /// Dropped before the host that they run on.
    visitors: Visitors,
    _outside: Outside,
}

impl SecondVm {
    /// Starts the VM, and its clients, once its server has all their values.
    pub(super) fn start(kit: &Kit, hosts: &Hosts) -> Result<Self> {
        let outside = Outside::join(hosts)?;
        let orders = Orders { serve_bytes: KEPT_BYTES * 2, seed: 11, ..Orders::default() };
        let mut spec = GuestSpec::new("second", "512M", orders);
        spec.initrd = Some(setup::server_initrd(kit)?);
        spec.extra.extend(Outside::arguments());
        let argv = spec.argv(kit, &kit.qemu);
        let mut command = hosts.a.command(&argv[0]);
        command.args(&argv[1..]).stdin(Stdio::null()).stdout(Stdio::null());
        let qemu = command.spawn().doing("start QEMU")?;
        let guest = Guest::meet(spec, &hosts.a)?;
        let visitors = Visitors::start(&outside)?;
        Ok(Self { qemu, guest, visitors, _outside: outside })
    }

    /// The number of its QEMU's process.
    pub(super) fn pid(&self) -> u32 {
        self.qemu.id()
    }

    /// Answers of its server between two instants.
    pub(super) fn answered(&self, from: Instant, to: Instant) -> f64 {
        self.visitors.answered(from, to)
    }

    /// Checks its memory, and what its clients have read.
    pub(super) fn check(&self) -> Result<()> {
        self.guest.wait_beat(HEARD_MAX)?;
        let (checked, wrong) = (self.guest.check()?, self.visitors.wrong());
        if checked.wrong == 0 && wrong == 0 {
            return Ok(());
        }
        let reason = format!("{checked:?}, {wrong} answers wrong");
        Err(LabError::Migration { contender: "the second VM".to_owned(), reason })
    }
}

impl Drop for SecondVm {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}
