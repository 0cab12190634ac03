//! A fingerprint of a page's content.

/// Two different pages have the same fingerprint with a probability of 2^-40.
pub(crate) const BITS: u32 = 40;

/// A fingerprint of a page's content, made by a [`Hash`](crate::Hash). 0 stands for none, so no
/// page has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fingerprint(pub(crate) u64);

impl Fingerprint {
    /// The upper bits of a hash.
    pub(crate) fn of_hash(hash: u64) -> Self {
        Self((hash >> (u64::BITS - BITS)).max(1))
    }

    /// What a page with this content adds to its range's digest.
    pub(crate) fn mixed(self, page: u32) -> u64 {
        if self.0 == 0 {
            return 0;
        }
        // The finalizer of MurmurHash3, after mixing in the page's index.
        let mut mixed = self.0 ^ u64::from(page).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ mixed >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
        mixed = (mixed ^ mixed >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
        mixed ^ mixed >> 33
    }
}
