//! How a lane makes deltas of a batch whose pages the destination has in older versions.

use std::sync::atomic::Ordering::Relaxed;

use page::{Batch, BlockId, DeltaWriter, Epoch, PAGE_BYTES, PageIndex};

use super::{Deltas, Fingerprints};

/// The destination's versions of the pages of one batch.
#[derive(Debug, Default)]
pub(super) struct Bases {
    of: Option<(BlockId, Epoch)>,
    /// The bodies that have a base, in order.
    pages: Vec<(PageIndex, Epoch)>,
    fingerprints: Vec<Fingerprints>,
}

impl Bases {
    pub(super) fn begin(&mut self, batch: &Batch) {
        self.of = Some((batch.block, batch.epoch));
        self.pages.clear();
        self.fingerprints.clear();
    }

    pub(super) fn add(&mut self, page: PageIndex, epoch: Epoch, fingerprints: &Fingerprints) {
        self.pages.push((page, epoch));
        self.fingerprints.push(*fingerprints);
    }

    /// Whether these are the bases of `batch`, from which pages may have been removed
    /// since.
    fn are_of(&self, batch: &Batch) -> bool {
        !self.pages.is_empty() && self.of == Some((batch.block, batch.epoch))
    }

    /// The base of a page, and the parts that differ from it. Pages must be passed in
    /// their batch's order; `next` is where the search continues.
    fn changed(
        &self,
        next: &mut usize,
        page: PageIndex,
        now: &Fingerprints,
    ) -> Option<(Epoch, u32)> {
        let found = self.pages[*next..].iter().position(|(known, _)| *known == page)?;
        let nth = *next + found;
        *next = nth + 1;
        let parts = self.fingerprints[nth].iter().zip(now).enumerate();
        let changed =
            parts.fold(0, |bits, (part, (before, now))| bits | u32::from(before != now) << part);
        Some((self.pages[nth].1, changed))
    }
}

/// One lane's comparison, with reused buffers.
#[derive(Debug, Default)]
pub(crate) struct Comparing {
    bases: Bases,
    now: Vec<Fingerprints>,
    writer: DeltaWriter,
}

impl Comparing {
    /// See [`Deltas::leave`].
    pub(crate) fn leave(&mut self, deltas: &Deltas, batch: &mut Batch) -> usize {
        deltas.leave(batch, &mut self.bases)
    }

    /// Notes the content of a batch's bodies, which are about to be sent. Returns the
    /// batch's deltas, if they are worthwhile.
    pub(crate) fn compare(&mut self, deltas: &Deltas, batch: &Batch) -> Option<&[u8]> {
        let Self { bases, now, writer } = self;
        let bodies = batch.bodies();
        let has_bases = bases.are_of(batch);
        if bodies.is_empty() || !has_bases && !deltas.notes.load(Relaxed) {
            return None;
        }
        now.clear();
        now.extend(bodies.iter().map(|body| deltas.fingerprints(batch.bytes_of(*body))));
        deltas.note(batch, now);
        if !has_bases {
            return None;
        }
        writer.begin(bodies.len());
        let (mut next, mut count) = (0, 0);
        for (body, now) in bodies.iter().zip(&*now) {
            let base = bases.changed(&mut next, body.page, now);
            count += u64::from(base.is_some());
            writer.push(batch.bytes_of(*body), base);
        }
        let is_worthwhile =
            writer.bytes().len() as f64 <= (bodies.len() * PAGE_BYTES) as f64 * Deltas::WORTH;
        deltas.pages.fetch_add(if is_worthwhile { count } else { 0 }, Relaxed);
        is_worthwhile.then(|| writer.bytes())
    }
}
