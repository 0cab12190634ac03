//! Which epochs belong to QEMU's first pass. Its last batches wait in the pool when the next pass
//! begins: nearly all of them if the VM is not larger than the pool.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use page::Epoch;

/// The last epoch of a pass that is not over.
const NOT_OVER: u32 = u32::MAX;

/// The epochs of QEMU's first pass.
#[derive(Debug)]
pub(super) struct FirstPass {
    /// Epochs are RAM sections, of which a pass may have many.
    by_section: AtomicBool,
    /// The first and the newest epoch of which QEMU has handed over a batch.
    first: AtomicU32,
    newest: AtomicU32,
    last: AtomicU32,
}

impl Default for FirstPass {
    fn default() -> Self {
        Self {
            by_section: AtomicBool::new(false),
            first: AtomicU32::new(u32::MAX),
            newest: AtomicU32::new(0),
            last: AtomicU32::new(NOT_OVER),
        }
    }
}

impl FirstPass {
    /// Sets whether epochs are RAM sections, as the stream's head says.
    pub(super) fn announce(&self, by_section: bool) {
        self.by_section.store(by_section, Relaxed);
    }

    /// QEMU has handed over a batch of this epoch.
    pub(super) fn took(&self, epoch: Epoch) {
        self.first.fetch_min(epoch.0, Relaxed);
        self.newest.fetch_max(epoch.0, Relaxed);
    }

    /// QEMU's next pass has started, and some of it may be here already.
    pub(super) fn end(&self) {
        let newest = self.newest.load(Relaxed);
        let is_by_section = self.by_section.load(Relaxed);
        let last = if is_by_section { newest } else { newest.min(self.first.load(Relaxed)) };
        // A second call comes in a later pass.
        let _ = self.last.compare_exchange(NOT_OVER, last, Relaxed, Relaxed);
    }

    pub(super) fn is_over(&self) -> bool {
        self.last.load(Relaxed) != NOT_OVER
    }

    /// Whether batches of this epoch belong to the pass. All do until it has ended.
    pub(super) fn has(&self, epoch: Epoch) -> bool {
        epoch.0 <= self.last.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of epochs 0 to 9, those of a first pass that has ended after these were handed over.
    fn of(by_section: bool, taken: &[u32]) -> Vec<u32> {
        let pass = FirstPass::default();
        pass.announce(by_section);
        for epoch in taken {
            pass.took(Epoch(*epoch));
        }
        assert!(!pass.is_over() && (0..10).all(|epoch| pass.has(Epoch(epoch))));
        pass.end();
        assert!(pass.is_over());
        pass.took(Epoch(9));
        // RAM has ended.
        pass.end();
        (0..10).filter(|epoch| pass.has(Epoch(*epoch))).collect()
    }

    #[test]
    fn a_pass_is_one_epoch_or_several_sections() {
        // The stream begins with an empty epoch, and channels are not in step.
        assert_eq!(of(false, &[2, 2]), [0, 1, 2]);
        assert_eq!(of(false, &[3, 2, 2, 3]), [0, 1, 2]);
        assert_eq!(of(true, &[2, 4, 3]), [0, 1, 2, 3, 4]);
        assert_eq!(of(true, &[]), [0]);
        assert_eq!(of(false, &[]), [0]);
    }
}
