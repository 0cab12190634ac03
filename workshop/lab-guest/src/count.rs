//! The number of beats, which a moved guest must not forget.

use std::io;
use std::thread;

use memmap2::MmapMut;

const BYTES: usize = size_of::<u64>();

/// A count in a page of its own.
///
/// QEMU's TCG can lose the mark of a page that was just written, and then sees no write to it until
/// the page leaves its TLB. So that a moved guest does not go back to an earlier count, the page
/// leaves the TLB after each step, and is marked once more (docs/TESTING-RESULTS.md, "Wrong pages").
/// Not with several CPUs: each would have to answer, and one that is throttled would hold up all.
#[derive(Debug)]
pub struct Count {
    page: Option<MmapMut>,
    leaves_tlb: bool,
}

impl Count {
    /// From zero on.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn new() -> io::Result<Self> {
        let leaves_tlb = thread::available_parallelism().is_ok_and(|cpus| cpus.get() == 1);
        Ok(Self { page: Some(MmapMut::map_anon(BYTES)?), leaves_tlb })
    }

    /// Counts, and returns the new number.
    ///
    /// # Errors
    /// If the kernel refuses to change the page's protection; the count is unusable then.
    pub fn step(&mut self) -> io::Result<u64> {
        let mut page = self.page.take().ok_or(io::ErrorKind::Other)?;
        let mut bytes = [0; BYTES];
        bytes.copy_from_slice(&page[..BYTES]);
        let next = u64::from_ne_bytes(bytes) + 1;
        put(&mut page, next);
        if self.leaves_tlb {
            page = page.make_read_only()?.make_mut()?;
            put(&mut page, next);
        }
        self.page = Some(page);
        Ok(next)
    }
}

fn put(page: &mut MmapMut, count: u64) {
    page[..BYTES].copy_from_slice(&count.to_ne_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_is_one_more() {
        for leaves_tlb in [false, true] {
            let mut count = Count { leaves_tlb, ..Count::new().unwrap() };
            let steps: Vec<u64> = (0..3).map(|_| count.step().unwrap()).collect();
            assert_eq!(steps, [1, 2, 3]);
        }
    }
}
