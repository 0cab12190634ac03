//! Pages as the engine's batches, parsed in the buffer into which the stream was read.
//!
//! A page's type is the block of its batch, so a batch ends where another type follows. Zero pages
//! and pages of types without a body are fill runs.

use std::ops::ControlFlow;

use page::{Batch, Epoch, PAGE_BYTES, PageIndex, PagesMut, is_zero};

use crate::{PageWord, Progress, Sink, Splitter, StreamError};

/// Fill runs after which a batch is handed on.
const FILL_RUNS_MAX: usize = 1024;

/// Parses bytes `start..filled` of a batch's buffer, and enters their pages into its tables.
///
/// Bytes of the non-RAM stream go to `non_ram`, as long as the batch is empty.
/// [`Step::Paused`](crate::Step::Paused) means that the batch has to be handed on: what follows at
/// `consumed` is of another type or epoch, does not fit, or is not of a page.
///
/// # Errors
/// As [`Splitter::push`].
///
/// # Panics
/// If the range is not inside the buffer.
pub fn fill_batch(
    splitter: &mut Splitter,
    batch: &mut Batch,
    start: usize,
    filled: usize,
    mut non_ram: impl FnMut(&[u8]),
) -> Result<Progress, StreamError> {
    let epoch = splitter.epoch();
    let (bytes, pages) = batch.parse_in_place();
    let input = &bytes[start..filled];
    let mut sink = InPlace { input, base: start, pages, epoch, non_ram: &mut non_ram };
    splitter.push(input, &mut sink)
}

struct InPlace<'b, F> {
    input: &'b [u8],
    /// The buffer offset where the splitter started.
    base: usize,
    pages: PagesMut<'b>,
    epoch: Epoch,
    non_ram: &'b mut F,
}

impl<F> InPlace<'_, F> {
    fn body(&mut self, page: PageIndex, at: usize) -> ControlFlow<()> {
        if self.pages.room() == 0 {
            return ControlFlow::Break(());
        }
        self.pages.push_body(page, self.base + at);
        ControlFlow::Continue(())
    }

    fn fill(&mut self, page: PageIndex) -> ControlFlow<()> {
        if self.pages.fill_runs() >= FILL_RUNS_MAX {
            return ControlFlow::Break(());
        }
        self.pages.push_fill(page, 0);
        ControlFlow::Continue(())
    }
}

impl<F: FnMut(&[u8])> Sink for InPlace<'_, F> {
    fn non_ram(&mut self, bytes: &[u8]) -> ControlFlow<()> {
        if !self.pages.is_empty() {
            return ControlFlow::Break(());
        }
        (self.non_ram)(bytes);
        ControlFlow::Continue(())
    }

    fn epoch(&mut self, epoch: Epoch, _position: u64) {
        self.epoch = epoch;
    }

    fn page(&mut self, word: PageWord, at: Option<usize>) -> ControlFlow<()> {
        self.pages.takes(word.kind.block(), self.epoch)?;
        match at {
            Some(at) if !is_zero(&self.input[at..at + PAGE_BYTES]) => self.body(word.page, at),
            _ => self.fill(word.page),
        }
    }
}

#[cfg(test)]
mod tests {
    use page::{BlockId, Pool};

    use super::*;
    use crate::fuzzing::{carry, stream};
    use crate::write::{self, page_data, record};
    use crate::{DomainKind, JoinError, Joined, Joiner, PageKind, Record, libxc};

    fn word(page: u32, kind: PageKind) -> PageWord {
        PageWord { page: PageIndex(page), kind }
    }

    #[test]
    fn a_batch_ends_with_its_type_its_epoch_or_its_pages() {
        use PageKind::{Invalid, L1, Normal};
        let mut data = Vec::new();
        write::begin(&mut data, DomainKind::Pv);
        let pages = [1, 2, 3].map(|page| (word(page, Normal), 7));
        page_data(&mut data, &pages);
        page_data(&mut data, &[4, 5].map(|page| (word(page, Normal), 0)));
        page_data(&mut data, &[(word(6, L1), 8), (word(7, Invalid), 0), (word(8, Invalid), 0)]);
        page_data(&mut data, &[(word(2, Normal), 9)]);
        record(&mut data, libxc::VERIFY, &[]);
        page_data(&mut data, &pages[..1]);
        write::end(&mut data, DomainKind::Pv);

        let batches = carry(&data, 100_000).unwrap().1;
        let expected = [
            (Normal.block(), Epoch(1), 3, 1),
            (L1.block(), Epoch(1), 1, 0),
            (Invalid.block(), Epoch(1), 0, 1),
            (Normal.block(), Epoch(2), 1, 0),
            (Normal.block(), Epoch(3), 1, 0),
        ];
        assert_eq!(batches, expected);
        // Split, joined and carried again, it is the same domain.
        stream(&[&[0], &data[..]].concat());
    }

    #[test]
    fn hostile_batches_are_refused() {
        let pool = Pool::new(1 << 20);
        let mut joiner = Joiner::new(1000);
        joiner.epoch(Epoch(1), 0).unwrap();
        let mut join = |block, first, count: u32, byte| {
            let mut batch = pool.take().unwrap();
            (batch.block, batch.epoch) = (block, Epoch(1));
            for page in first..first + count {
                batch.push_fill(PageIndex(page), byte);
            }
            let mut bytes = 0;
            let joined = joiner.batch(&batch, &mut Record::default(), |part| bytes += part.len());
            joined.map(|joined| (joined, bytes))
        };
        let normal = PageKind::Normal.block();
        let block = BlockId(5);
        assert_eq!(join(block, 0, 1, 0), Err(JoinError::Block { block }));
        let first = PageIndex(7);
        assert_eq!(join(normal, 7, 1, 3), Err(JoinError::Fill { first, byte: 3 }));
        let error = JoinError::OutsideDomain { page: PageIndex(900), pages_max: 1000 };
        assert_eq!(join(normal, 900, 101, 0), Err(error));
        let bytes = 16 + 100 * (8 + PAGE_BYTES);
        assert_eq!(join(normal, 900, 100, 0), Ok((Joined::Record, bytes)));
        assert_eq!(join(normal, 900, 100, 0), Ok((Joined::Stale, 0)));
    }
}
