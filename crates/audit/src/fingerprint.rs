//! What stands for a page's content.

use std::sync::LazyLock;

use page::PAGE_BYTES;
use twox_hash::XxHash3_64;

/// Two pages that differ have the same one with a probability of 2^-40.
pub(crate) const BITS: u32 = 40;

/// Of a page that is one byte repeated, by that byte.
static OF_FILLS: LazyLock<[Fingerprint; 256]> = LazyLock::new(|| {
    let mut byte = 0_u8;
    [(); 256].map(|()| {
        let fingerprint = Fingerprint::of(&[byte; PAGE_BYTES]);
        byte = byte.wrapping_add(1);
        fingerprint
    })
});

/// What stands for a page's content. Never 0, which stands for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fingerprint(pub(crate) u64);

impl Fingerprint {
    /// Of these bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self((XxHash3_64::oneshot(bytes) >> (u64::BITS - BITS)).max(1))
    }

    /// Of a page that is `byte` repeated: the same as of its bytes.
    #[must_use]
    pub fn of_fill(byte: u8) -> Self {
        OF_FILLS[usize::from(byte)]
    }

    /// What a page with this content adds to its range's digest.
    pub(crate) fn mixed(self, page: u32) -> u64 {
        if self.0 == 0 {
            return 0;
        }
        // The finalizer of MurmurHash3, after the page's place is in.
        let mut mixed = self.0 ^ u64::from(page).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ mixed >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
        mixed = (mixed ^ mixed >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
        mixed ^ mixed >> 33
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fill_is_what_its_bytes_are() {
        for byte in [0, 1, 7, 255] {
            assert_eq!(Fingerprint::of_fill(byte), Fingerprint::of(&[byte; PAGE_BYTES]));
        }
        assert_ne!(Fingerprint::of_fill(0), Fingerprint::of_fill(1));
    }

    #[test]
    fn one_bit_makes_another_one() {
        let mut page = [0x5a; PAGE_BYTES];
        let before = Fingerprint::of(&page);
        for bit in 0..PAGE_BYTES * 8 {
            page[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(Fingerprint::of(&page), before, "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
    }
}
