//! Which epochs all readers have finished.

use page::Epoch;
use parking_lot::Mutex;

use crate::output::Output;

/// The current epoch of each reader, which has finished those before it.
#[derive(Debug)]
pub(crate) struct Epochs {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    each: Vec<Epoch>,
    /// The epoch count of the main channel at RAM's end; none until then, and once
    /// reported.
    end: Option<Epoch>,
}

impl State {
    fn lowest(&self) -> Option<Epoch> {
        self.each.iter().min().copied()
    }

    /// Whether all readers have finished; true once.
    fn is_over(&mut self) -> bool {
        let lowest = self.lowest();
        self.end.take_if(|end| lowest.is_some_and(|lowest| lowest >= *end)).is_some()
    }
}

impl Epochs {
    pub(crate) fn new(readers: usize) -> Self {
        Self { state: Mutex::new(State { each: vec![Epoch(0); readers], end: None }) }
    }

    /// A reader has handed on every batch of the epochs before this one. Notifies
    /// `output` once all readers have.
    pub(crate) fn begin(&self, reader: usize, epoch: Epoch, output: &dyn Output) {
        let mut state = self.state.lock();
        let before = state.lowest();
        let Some(its) = state.each.get_mut(reader) else { return };
        *its = epoch.max(*its);
        let now = state.lowest();
        let is_over = state.is_over();
        drop(state);
        if let Some(now) = now.filter(|_| now > before) {
            output.all_before(now);
        }
        if is_over {
            output.ram_over();
        }
    }

    /// The main channel, this reader, has reached RAM's end after `epoch` epochs.
    /// Notifies `output` once all other readers have ended as many.
    pub(crate) fn end(&self, reader: usize, epoch: Epoch, output: &dyn Output) {
        let mut state = self.state.lock();
        state.end = Some(epoch);
        if let Some(its) = state.each.get_mut(reader) {
            *its = epoch.max(*its);
        }
        let is_over = state.is_over();
        drop(state);
        if is_over {
            output.ram_over();
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
    struct Said(AtomicU32, AtomicU32);

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
        fn ram_over(&self) {
            self.1.fetch_add(1, Relaxed);
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

    #[test]
    fn ram_is_over_once_the_last_channel_has_ended_as_many_epochs_as_the_main_one() {
        let (epochs, said) = (Epochs::new(3), Said::default());
        let over = || said.1.load(Relaxed);
        epochs.begin(0, Epoch(2), &said);
        epochs.begin(1, Epoch(3), &said);
        epochs.end(0, Epoch(3), &said);
        assert_eq!(over(), 0);
        epochs.begin(2, Epoch(2), &said);
        assert_eq!(over(), 0);
        epochs.begin(2, Epoch(3), &said);
        assert_eq!(over(), 1);
        epochs.begin(1, Epoch(4), &said);
        assert_eq!(over(), 1);
        let (alone, said) = (Epochs::new(1), Said::default());
        alone.end(0, Epoch(7), &said);
        assert_eq!(said.1.load(Relaxed), 1);
    }
}
