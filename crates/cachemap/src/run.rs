//! Runs: consecutive pages that are also consecutive on a disk.

use crate::code::{Cursor, VARINT_BYTES_MAX, put, put_signed};
use crate::{Fault, PAGE_SECTORS};

/// The most bytes of a run in a frame: four numbers.
pub(crate) const RUN_BYTES_MAX: usize = 4 * VARINT_BYTES_MAX;

/// Consecutive pages of the guest's memory with the content of consecutive sectors of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Run {
    /// The first page: its guest physical address divided by 4,096.
    pub page: u64,
    /// The disk's first sector, of 512 bytes.
    pub sector: u64,
    /// How many pages.
    pub pages: u32,
    /// The disk, by its index in the map's list.
    pub device: u16,
}

impl Run {
    /// The first page behind it, saturating if a hostile run would overflow.
    #[must_use]
    pub fn end_page(&self) -> u64 {
        self.page.saturating_add(self.pages.into())
    }

    /// The first sector behind it.
    #[must_use]
    pub fn end_sector(&self) -> u64 {
        self.sector.saturating_add(u64::from(self.pages) * PAGE_SECTORS)
    }

    /// Whether `next` starts where this ends.
    #[must_use]
    pub fn is_followed_by(&self, next: &Self) -> bool {
        self.device == next.device
            && self.end_page() == next.page
            && self.end_sector() == next.sector
    }
}

/// Where the last run of a frame ended: the next one is encoded by its distance. Each frame
/// starts at zero, so it can be read without the others.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Last {
    page: u64,
    sector: u64,
}

impl Last {
    pub(crate) fn write(&mut self, run: &Run, out: &mut Vec<u8>) {
        put(run.device.into(), out);
        put_signed(run.page.wrapping_sub(self.page).cast_signed(), out);
        put_signed(run.sector.wrapping_sub(self.sector).cast_signed(), out);
        put(run.pages.into(), out);
        *self = Self { page: run.end_page(), sector: run.end_sector() };
    }

    pub(crate) fn read(&mut self, cursor: &mut Cursor<'_>) -> Result<Run, Fault> {
        let device = cursor.number()?;
        let page = self.page.wrapping_add(cursor.signed()?.cast_unsigned());
        let sector = self.sector.wrapping_add(cursor.signed()?.cast_unsigned());
        let pages = cursor.number()?;
        let device = u16::try_from(device).map_err(|_| Fault::Device { device })?;
        let pages = u32::try_from(pages).map_err(|_| Fault::OutsideRam { page, pages })?;
        let run = Run { page, sector, pages, device };
        *self = Self { page: run.end_page(), sector: run.end_sector() };
        Ok(run)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn runs_come_back(
            fields in prop::collection::vec(any::<(u64, u64, u32, u16)>(), 0..50),
            shift in 0..64_u32,
        ) {
            let runs: Vec<Run> = fields
                .into_iter()
                .map(|(page, sector, pages, device)| {
                    Run { page: page >> shift, sector: sector >> shift, pages, device }
                })
                .collect();
            let (mut bytes, mut last) = (Vec::new(), Last::default());
            for run in &runs {
                let before = bytes.len();
                last.write(run, &mut bytes);
                prop_assert!(bytes.len() - before <= RUN_BYTES_MAX);
            }
            let (mut cursor, mut last) = (Cursor(&bytes), Last::default());
            for run in &runs {
                prop_assert_eq!(last.read(&mut cursor), Ok(*run));
            }
            prop_assert!(cursor.is_empty());
        }
    }
}
