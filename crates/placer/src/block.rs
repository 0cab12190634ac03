//! The RAM blocks of the arriving VM.

use std::ops::Range;
use std::sync::Arc;

use page::{BATCH_PAGES, Fill, PAGE_BYTES, PageIndex};
use ram::{DataRanges, Mapping};
use rangelock::RangeLock;

use crate::PlaceError;
use crate::versions::Versions;

/// How the pages of a block get to its VM.
#[derive(Clone, Debug)]
pub enum Placement {
    /// Straight into its RAM.
    Mapped(Arc<Mapping>),
    /// As records in the stream that QEMU loads.
    Inline,
}

/// One block of the source's block list, and how it is placed here.
#[derive(Clone, Debug)]
pub struct BlockPlan {
    /// The block's name in QEMU's stream.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// How its pages are placed.
    pub placement: Placement,
}

#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) name: String,
    pub(crate) pages: u64,
    pub(crate) placement: Placement,
    pub(crate) versions: Versions,
    pub(crate) lock: RangeLock,
}

impl Block {
    pub(crate) fn new(plan: BlockPlan) -> Result<Self, PlaceError> {
        let BlockPlan { name, bytes, placement } = plan;
        let pages = bytes / PAGE_BYTES as u64;
        let table = usize::try_from(pages).ok().filter(|_| {
            bytes % PAGE_BYTES as u64 == 0
                && pages <= u64::from(u32::MAX)
                && (1..=255).contains(&name.len())
        });
        let Some(table) = table else { return Err(PlaceError::BadBlock { name, bytes }) };
        let versions = match &placement {
            // What QEMU itself has put there (firmware, option ROMs) is unknown, so the first
            // fill with zeros is fed, whatever it replaces.
            Placement::Inline => Versions::new(table, false),
            Placement::Mapped(mapping) if mapping.bytes() != bytes => {
                let here_bytes = mapping.bytes();
                return Err(PlaceError::OtherSize { name, bytes, here_bytes });
            }
            Placement::Mapped(mapping) => match versions_of(mapping, table) {
                Ok(versions) => versions,
                Err(source) => return Err(PlaceError::Ram { name, source }),
            },
        };
        let Some(versions) = versions else { return Err(PlaceError::NoTable { name }) };
        Ok(Self { name, pages, placement, versions, lock: RangeLock::new() })
    }

    /// The range from the first to the last of `pages`, after checking that they are inside, that
    /// none is there twice, and that they fit a batch.
    pub(crate) fn span_of_pages(&self, pages: &[PageIndex]) -> Result<Range<u64>, PlaceError> {
        if pages.len() > BATCH_PAGES {
            return Err(PlaceError::TooManyPages { pages: pages.len() });
        }
        let span = span(pages.iter().map(|page| u64::from(page.0)..u64::from(page.0) + 1));
        if span.end > self.pages {
            let first = pages.iter().copied().max().unwrap_or_default();
            return Err(self.outside(first, 1));
        }
        let is_ascending = pages.is_sorted_by(|one, next| one < next);
        if !is_ascending && has_duplicates(pages) {
            return Err(PlaceError::Twice { name: self.name.clone() });
        }
        Ok(span)
    }

    /// The range from the first to the last page of `fills`, after checking
    /// that they are inside.
    pub(crate) fn span_of_fills(&self, fills: &[Fill]) -> Result<Range<u64>, PlaceError> {
        let mut total = 0;
        for fill in fills {
            if run(fill).end > self.pages {
                return Err(self.outside(fill.first, fill.count));
            }
            total += u64::from(fill.count);
        }
        if total > self.pages {
            return Err(PlaceError::Twice { name: self.name.clone() });
        }
        Ok(span(fills.iter().map(run).filter(|run| !run.is_empty())))
    }

    fn outside(&self, first: PageIndex, count: u32) -> PlaceError {
        PlaceError::Outside { name: self.name.clone(), first, count, pages: self.pages }
    }
}

/// What RAM holds already, as far as is known without reading it. None if there is no memory for
/// that.
fn versions_of(mapping: &Mapping, pages: usize) -> Result<Option<Versions>, ram::RamError> {
    let ranges = match mapping.data_ranges()? {
        DataRanges::Unknown => return Ok(Versions::new(pages, false)),
        DataRanges::Known(ranges) => ranges,
    };
    let Some(versions) = Versions::new(pages, true) else { return Ok(None) };
    for range in ranges {
        let first = range.start / PAGE_BYTES as u64;
        let end = range.end.div_ceil(PAGE_BYTES as u64).min(pages as u64);
        let page = |number: u64| u32::try_from(number).expect("a block has fewer pages");
        (page(first)..page(end)).for_each(|page| versions.set_nonzero(PageIndex(page)));
    }
    Ok(Some(versions))
}

fn run(fill: &Fill) -> Range<u64> {
    let first = u64::from(fill.first.0);
    first..first + u64::from(fill.count)
}

/// From the first start to the last end; an empty range if there is none.
fn span(ranges: impl Iterator<Item = Range<u64>>) -> Range<u64> {
    ranges
        .reduce(|all, range| all.start.min(range.start)..all.end.max(range.end))
        .unwrap_or_default()
}

/// For at most [`BATCH_PAGES`] pages. Does not allocate.
fn has_duplicates(pages: &[PageIndex]) -> bool {
    let mut sorted = [PageIndex::default(); BATCH_PAGES];
    let sorted = &mut sorted[..pages.len()];
    sorted.copy_from_slice(pages);
    sorted.sort_unstable();
    sorted.windows(2).any(|pair| pair[0] == pair[1])
}
