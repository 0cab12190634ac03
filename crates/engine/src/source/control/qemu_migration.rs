//! The sampler's interface to QEMU's migration.

use crossbeam_channel::Receiver;
use qemu::outgoing::{Outgoing, Progress};
use qemu::qmp::{Event, QmpError};

/// QEMU's migration, as far as the sampler follows it. Another program may command it.
pub(crate) trait QemuMigration: Send + Sync {
    /// QEMU's progress. An error if QEMU doesn't answer, such as while it stops the
    /// VM.
    fn progress(&self) -> Result<Progress, QmpError>;
    /// See [`Outgoing::passes`].
    fn passes(&self) -> Receiver<Event>;
    /// See [`Outgoing::is_held`].
    fn is_held(&self) -> bool;
    /// See [`Outgoing::takes_bandwidth`].
    fn takes_bandwidth(&self) -> bool;
    /// See [`Outgoing::allow`].
    fn allow(&self, bytes_per_s: u64, downtime_ms: u64) -> Result<(), QmpError>;
}

impl QemuMigration for Outgoing {
    fn progress(&self) -> Result<Progress, QmpError> {
        self.progress()
    }

    fn passes(&self) -> Receiver<Event> {
        self.passes()
    }

    fn is_held(&self) -> bool {
        self.is_held()
    }

    fn takes_bandwidth(&self) -> bool {
        self.takes_bandwidth()
    }

    fn allow(&self, bytes_per_s: u64, downtime_ms: u64) -> Result<(), QmpError> {
        self.allow(bytes_per_s, downtime_ms)
    }
}
