//! How far all readers have come.

use page::Epoch;
use parking_lot::Mutex;

use crate::output::Output;

/// The epoch of which each reader hands on pages; those before it are over for that
/// reader.
#[derive(Debug)]
pub(crate) struct Epochs {
    each: Mutex<Vec<Epoch>>,
}

impl Epochs {
    pub(crate) fn new(readers: usize) -> Self {
        Self { each: Mutex::new(vec![Epoch(0); readers]) }
    }

    /// A reader has handed on all that comes before this epoch. Told to `output` once
    /// all have.
    pub(crate) fn begin(&self, reader: usize, epoch: Epoch, output: &dyn Output) {
        let mut each = self.each.lock();
        let lowest = |each: &[Epoch]| each.iter().min().copied();
        let before = lowest(&each);
        let Some(its) = each.get_mut(reader) else { return };
        *its = epoch.max(*its);
        let now = lowest(&each);
        drop(each);
        if let Some(now) = now.filter(|_| now > before) {
            output.all_before(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    use page::Batch;

    use super::*;
    use crate::output::{Head, Stopped};

    #[derive(Default)]
    struct Said(AtomicU32);

    impl Output for Said {
        fn head(&self, _: Head) -> Result<(), Stopped> {
            Ok(())
        }
        fn batch(&self, _: Batch) -> Result<(), Stopped> {
            Ok(())
        }
        fn tail(&self, _: &[u8]) -> Result<(), Stopped> {
            Ok(())
        }
        fn whole(&self, _: &[u8], _: Option<&str>) -> Result<(), Stopped> {
            Ok(())
        }
        fn all_before(&self, epoch: Epoch) {
            self.0.fetch_max(epoch.0, Relaxed);
        }
    }

    #[test]
    fn an_epoch_is_over_once_it_is_for_the_last_reader() {
        let (epochs, said) = (Epochs::new(3), Said::default());
        for (reader, epoch, expected) in
            [(0, 4, 0), (2, 2, 0), (1, 1, 1), (1, 3, 2), (2, 9, 3), (2, 1, 3), (7, 9, 3), (1, 9, 4)]
        {
            epochs.begin(reader, Epoch(epoch), &said);
            assert_eq!(said.0.load(Relaxed), expected, "{reader} {epoch}");
        }
    }
}
