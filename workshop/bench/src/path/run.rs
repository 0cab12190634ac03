//! What a run carries, and what it took.

use std::time::Duration;

/// RAM that one run carries.
pub(super) const RAM_BYTES: u64 = 1 << 30;
/// The only RAM block.
pub(super) const BLOCK: &str = "pc.ram";
/// Agents have QEMU open as many.
pub(super) const CHANNELS: u8 = 4;

/// CPU time of threads, by stage.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stages {
    pub(super) generator: Duration,
    pub(super) tap: Duration,
    pub(super) lanes: Duration,
    pub(super) receivers: Duration,
}

impl Stages {
    pub(super) fn sum(&self) -> Duration {
        self.generator + self.tap + self.lanes + self.receivers
    }
}

/// One run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) took: Duration,
    pub(super) stages: Stages,
}
