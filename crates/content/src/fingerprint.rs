//! Keyed fingerprints: whether a page still has the content that it had when it was named.
//!
//! A fingerprint is a universal hash, so what a guest can do against it is proved: of two different
//! pages that were chosen without the key, both have the same fingerprint with a probability of at
//! most 2^-63. That supposes a random key; it is expanded from 32 random bytes by BLAKE3, on which
//! names rely as well.
//!
//! ```text
//! sum    = (w 0 + k 0) * (w 1 + k 1) + (w 2 + k 2) * (w 3 + k 3) + ...     mod 2^128 (NH)
//! print  = (a * high half of sum + b * low half of sum + c) mod 2^128      its upper 64 bits
//! ```
//!
//! The first line has equal sums for different pages once in 2^64 keys (Black and others, *UMAC*,
//! 1999; words have 64 bits, and their sums are modulo 2^64). The second one has equal prints for
//! different sums as rarely (Thorup, *High Speed Hashing for Integers and Strings*, 2015).

use std::io;

use page::PAGE_BYTES;
use rustix::rand::{GetRandomFlags, getrandom};

const BLOCK_BYTES: usize = 2 * size_of::<u64>();
const BLOCKS: usize = PAGE_BYTES / BLOCK_BYTES;
const _: () = assert!(BLOCKS * BLOCK_BYTES == PAGE_BYTES);

pub(crate) const FINGERPRINT_BYTES: usize = size_of::<u64>();

const LOW_HALF: u128 = (1 << 64) - 1;

/// Separates this use of the random seed from all others.
const PURPOSE: &str = "droveway 2026-11 fingerprints of pages that have names";

/// A page's fingerprint. It tells much about the key, so it never leaves the agent.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fingerprint(pub(crate) [u8; FINGERPRINT_BYTES]);

/// The key of fingerprints. Each agent draws one when it starts, and keeps it to itself. It does
/// not follow from the cluster's secret: there is none without certificates, and guests would know
/// the key.
pub(crate) struct FingerprintKey {
    words: [[u64; 2]; BLOCKS],
    factors: [u128; 2],
    offset: u128,
}

impl FingerprintKey {
    /// A new one.
    ///
    /// # Errors
    /// If the system has no random bytes.
    pub(crate) fn draw() -> io::Result<Box<Self>> {
        let mut seed = [0_u8; 32];
        let filled = getrandom(&mut seed[..], GetRandomFlags::empty())?;
        if filled < seed.len() {
            return Err(io::Error::other("the system has no random bytes"));
        }
        Ok(Self::of_seed(&seed))
    }

    pub(crate) fn of_seed(seed: &[u8; 32]) -> Box<Self> {
        let mut hasher = blake3::Hasher::new_derive_key(PURPOSE);
        hasher.update(seed);
        let mut bytes = hasher.finalize_xof();
        let mut word = || {
            let mut word = [0; 8];
            bytes.fill(&mut word);
            u64::from_le_bytes(word)
        };
        let mut key = Box::new(Self { words: [[0; 2]; BLOCKS], factors: [0; 2], offset: 0 });
        for pair in &mut key.words {
            *pair = [word(), word()];
        }
        let mut wide = || u128::from(word()) << 64 | u128::from(word());
        key.factors = [wide(), wide()];
        key.offset = wide();
        key
    }

    /// The fingerprint of a page with these bytes.
    ///
    /// # Panics
    /// If they are not one page: bytes beyond it would not count.
    pub(crate) fn of(&self, page: &[u8]) -> Fingerprint {
        assert_eq!(page.len(), PAGE_BYTES, "a page");
        let (blocks, _) = page.as_chunks::<BLOCK_BYTES>();
        let mut sum = 0_u128;
        for (block, [first_key, second_key]) in blocks.iter().zip(&self.words) {
            let [first, second] = words(block);
            let first = u128::from(first.wrapping_add(*first_key));
            let second = u128::from(second.wrapping_add(*second_key));
            sum = sum.wrapping_add(first * second);
        }
        let [high, low] = [sum >> 64, sum & LOW_HALF];
        let [of_high, of_low] = self.factors;
        let all = of_high.wrapping_mul(high).wrapping_add(of_low.wrapping_mul(low));
        Fingerprint(((all.wrapping_add(self.offset) >> 64) as u64).to_le_bytes())
    }

    /// Two pages with one fingerprint, which only the key's owner can make: they differ in a word
    /// whose partner becomes 0.
    #[cfg(test)]
    pub(crate) fn collision(&self) -> [[u8; PAGE_BYTES]; 2] {
        let mut page = [7; PAGE_BYTES];
        page[8..BLOCK_BYTES].copy_from_slice(&self.words[0][1].wrapping_neg().to_le_bytes());
        let mut other = page;
        other[0] ^= 1;
        [page, other]
    }
}

fn words(block: &[u8; BLOCK_BYTES]) -> [u64; 2] {
    [0, 8].map(|at| u64::from_le_bytes(std::array::from_fn(|nth| block[at + nth])))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(seed: u8) -> Box<FingerprintKey> {
        FingerprintKey::of_seed(&[seed; 32])
    }

    /// The definition, word by word.
    fn defined(key: &FingerprintKey, page: &[u8; PAGE_BYTES]) -> [u8; 8] {
        let mut sum = 0_u128;
        for (nth, keys) in key.words.iter().enumerate() {
            let word = |at: usize| {
                let bytes = page[nth * 16 + at..][..8].iter().rev();
                bytes.fold(0_u64, |word, byte| word << 8 | u64::from(*byte))
            };
            let [first, second] = [0, 1].map(|at| u128::from(word(at * 8).wrapping_add(keys[at])));
            sum = sum.wrapping_add(first.wrapping_mul(second));
        }
        let low = sum % (1 << 64);
        let all = key.factors[0].wrapping_mul(sum / (1 << 64));
        let all = all.wrapping_add(key.factors[1].wrapping_mul(low)).wrapping_add(key.offset);
        u64::try_from(all / (1 << 64)).unwrap().to_le_bytes()
    }

    #[test]
    fn each_flipped_bit_changes_it() {
        let key = FingerprintKey::draw().unwrap();
        for mut page in [[0; PAGE_BYTES], [0x5a; PAGE_BYTES]] {
            let before = key.of(&page);
            for bit in 0..PAGE_BYTES * 8 {
                page[bit / 8] ^= 1 << (bit % 8);
                assert!(key.of(&page) != before, "bit {bit}");
                page[bit / 8] ^= 1 << (bit % 8);
            }
            assert!(key.of(&page) == before);
        }
    }

    #[test]
    #[should_panic(expected = "a page")]
    fn anything_but_a_page_has_none() {
        key(1).of(&[0; 2 * PAGE_BYTES]);
    }

    /// With any other key the same two pages differ.
    #[test]
    fn what_is_forged_for_one_key_is_noticed_by_others() {
        let [page, forged] = key(1).collision();
        assert!(page != forged && key(1).of(&page) == key(1).of(&forged));
        for seed in 2..200 {
            assert!(key(seed).of(&page) != key(seed).of(&forged), "{seed}");
        }
        let drawn = [(); 2].map(|()| FingerprintKey::draw().unwrap());
        for drawn in &drawn {
            assert!(drawn.of(&page) != drawn.of(&forged));
        }
        assert!(drawn[0].of(&page) != drawn[1].of(&page), "each agent has its own key");
    }

    proptest! {
        #[test]
        fn it_is_as_defined(seed: u8, page in prop::collection::vec(any::<u8>(), PAGE_BYTES)) {
            let page: [u8; PAGE_BYTES] = page.try_into().unwrap();
            prop_assert_eq!(key(seed).of(&page).0, defined(&key(seed), &page));
        }

        /// Also by changes that make up for each other in sums, or in place.
        #[test]
        fn pages_that_differ_in_some_words_have_different_ones(
            seed: u8,
            changes in prop::collection::vec((0..PAGE_BYTES / 8, 1..=u64::MAX), 1..4),
        ) {
            let (page, mut changed) = ([0x33; PAGE_BYTES], [0x33; PAGE_BYTES]);
            for (word, by) in changes {
                let word = &mut changed[word * 8..][..8];
                let now = word.iter().zip(by.to_le_bytes()).map(|(byte, by)| byte ^ by);
                let now: Vec<u8> = now.collect();
                word.copy_from_slice(&now);
            }
            prop_assume!(page != changed);
            prop_assert!(key(seed).of(&page) != key(seed).of(&changed));
        }
    }
}
