//! Pages by name whose content another provider had. The threads that find it serve other VMs too,
//! so they don't wait for xl's receiver: a lane, or the leading thread, writes these pages before
//! its own.

use std::collections::VecDeque;

use audit::Delivery;
use page::{BlockId, Epoch, PageIndex};

/// Most bytes that wait to be written. The source sends what finds no room.
const WAITING_BYTES_MAX: usize = 4 << 20;

/// Pages of one block and epoch.
#[derive(Debug)]
pub(super) struct LatePages {
    pub(super) block: BlockId,
    pub(super) epoch: Epoch,
    pub(super) pages: Vec<PageIndex>,
    /// Their bodies, one after the other.
    pub(super) bytes: Vec<u8>,
    pub(super) delivery: Delivery,
}

/// Those that wait.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    all: VecDeque<LatePages>,
    bytes: usize,
}

impl Waiting {
    /// False if there is no room.
    pub(super) fn add(&mut self, late: LatePages) -> bool {
        let bytes = self.bytes + late.bytes.len();
        if bytes > WAITING_BYTES_MAX {
            return false;
        }
        self.bytes = bytes;
        self.all.push_back(late);
        true
    }

    pub(super) fn take(&mut self) -> Option<LatePages> {
        let late = self.all.pop_front()?;
        self.bytes -= late.bytes.len();
        Some(late)
    }
}

#[cfg(test)]
mod tests {
    use page::PAGE_BYTES;

    use super::*;

    #[test]
    fn pages_wait_in_order_and_within_bounds() {
        let mut waiting = Waiting::default();
        let late = |page: u32| LatePages {
            block: BlockId(0),
            epoch: Epoch(1),
            pages: vec![PageIndex(page)],
            bytes: vec![0; PAGE_BYTES],
            delivery: Delivery::SameHost,
        };
        assert!(waiting.take().is_none());
        let room = (0..).take_while(|page| waiting.add(late(*page))).count();
        assert_eq!(room, WAITING_BYTES_MAX / PAGE_BYTES);
        assert_eq!(waiting.take().unwrap().pages, [PageIndex(0)]);
        assert!(waiting.add(late(7)) && !waiting.add(late(8)));
        assert_eq!(waiting.take().unwrap().pages, [PageIndex(1)]);
    }
}
