//! Hashes that turn a page into a fingerprint. Both ends of a migration use the same one: the
//! source offers what its processor supports, and the destination takes the fastest that its own
//! supports too.

#[cfg(target_arch = "x86_64")]
mod aes;
#[cfg(not(target_arch = "x86_64"))]
#[path = "hash/no_aes.rs"]
mod aes;

use std::sync::LazyLock;

use page::PAGE_BYTES;
use twox_hash::XxHash3_64;

use crate::Fingerprint;
use aes::Aes;

const XXH3: &str = "xxh3";
const AES: &str = "aes";

/// Fingerprints of pages that are one byte repeated, indexed by that byte.
type OfFills = [Fingerprint; 256];

/// A hash of a page's content. None is cryptographic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hash(Kind);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Kind {
    /// All agents support it.
    #[default]
    Xxh3,
    /// At least twice as fast, but it needs a processor with AES.
    Aes(Aes),
}

impl Hash {
    /// The fastest that this processor supports.
    #[must_use]
    pub fn fastest() -> Self {
        Aes::detect().map_or_else(Self::default, |aes| Self(Kind::Aes(aes)))
    }

    /// Names of the hashes that this processor supports, without the one that all agents support.
    #[must_use]
    pub fn offered() -> Vec<String> {
        let fastest = Self::fastest();
        if fastest == Self::default() { Vec::new() } else { vec![fastest.name().to_owned()] }
    }

    /// The fastest offered hash that this processor supports too. Unknown names are ignored.
    #[must_use]
    pub fn choose(offered: &[String]) -> Self {
        let known = offered.iter().filter_map(|name| Self::named(name));
        known.max_by_key(|hash| *hash == Self::fastest()).unwrap_or_default()
    }

    /// The hash of this name; none if it is unknown or this processor doesn't support it.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        [Self::default(), Self::fastest()].into_iter().find(|hash| hash.name() == name)
    }

    /// The name by which both ends know it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self.0 {
            Kind::Xxh3 => XXH3,
            Kind::Aes(_) => AES,
        }
    }

    /// The fingerprint of these bytes.
    #[must_use]
    pub fn of(self, bytes: &[u8]) -> Fingerprint {
        Fingerprint::of_hash(match self.0 {
            Kind::Xxh3 => XxHash3_64::oneshot(bytes),
            Kind::Aes(aes) => aes.hash(bytes),
        })
    }

    /// The fingerprint of a page that is `byte` repeated, the same as that of its bytes.
    #[must_use]
    pub fn of_fill(self, byte: u8) -> Fingerprint {
        static XXH3: LazyLock<OfFills> = LazyLock::new(|| of_fills(Hash(Kind::Xxh3)));
        static FASTEST: LazyLock<OfFills> = LazyLock::new(|| of_fills(Hash::fastest()));
        let fills = match self.0 {
            Kind::Xxh3 => &XXH3,
            Kind::Aes(_) => &FASTEST,
        };
        fills[usize::from(byte)]
    }
}

fn of_fills(hash: Hash) -> OfFills {
    let mut byte = 0_u8;
    [(); 256].map(|()| {
        let fingerprint = hash.of(&[byte; PAGE_BYTES]);
        byte = byte.wrapping_add(1);
        fingerprint
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn all() -> [Hash; 2] {
        [Hash::default(), Hash::fastest()]
    }

    /// A page of pseudorandom bytes.
    fn page() -> [u8; PAGE_BYTES] {
        let mut state = 0x9e37_79b9_u32;
        [(); PAGE_BYTES].map(|()| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state.to_le_bytes()[1]
        })
    }

    #[test]
    fn a_fill_is_what_its_bytes_are() {
        for hash in all() {
            let fills = (0..=255).map(|byte| {
                let fingerprint = hash.of_fill(byte);
                assert_eq!(fingerprint, hash.of(&[byte; PAGE_BYTES]), "{hash:?}");
                fingerprint.0
            });
            assert_eq!(fills.collect::<HashSet<_>>().len(), 256, "{hash:?}");
        }
    }

    #[test]
    fn each_flipped_bit_gives_a_distinct_fingerprint() {
        for hash in all() {
            for mut page in [[0; PAGE_BYTES], [0x5a; PAGE_BYTES], page()] {
                let mut seen = HashSet::from([hash.of(&page).0]);
                for bit in 0..PAGE_BYTES * 8 {
                    page[bit / 8] ^= 1 << (bit % 8);
                    assert!(seen.insert(hash.of(&page).0), "{hash:?}, bit {bit}");
                    page[bit / 8] ^= 1 << (bit % 8);
                }
            }
        }
    }

    /// A hash that processes a page in parts could miss this.
    #[test]
    fn swapped_parts_of_a_page_change_its_fingerprint() {
        for hash in all() {
            for bytes in [1, 8, 16, 64, 128, 512, 2048] {
                let mut page = page();
                let before = hash.of(&page);
                for first in (0..PAGE_BYTES - bytes).step_by(bytes) {
                    let (left, right) = page.split_at_mut(first + bytes);
                    left[first..].swap_with_slice(&mut right[..bytes]);
                    let is_same = left[first..] == right[..bytes];
                    assert!(is_same || hash.of(&page) != before, "{hash:?}, {bytes} at {first}");
                    let (left, right) = page.split_at_mut(first + bytes);
                    left[first..].swap_with_slice(&mut right[..bytes]);
                }
            }
        }
    }

    /// Each change flips half of the fingerprint's bits, and no pair of small changes cancels out.
    #[test]
    fn small_changes_spread_and_do_not_undo_each_other() {
        for hash in all() {
            let (before, places) = (page(), [0, 15, 16, 127, 128, 144, 256, 2048, 4080, 4095]);
            let (mut flipped, mut looked_at) = (0, 0);
            let mut seen = HashSet::from([hash.of(&before).0]);
            for (nth, &first) in places.iter().enumerate() {
                for &second in &places[nth + 1..] {
                    for (one, other) in [(1, 1), (1, 2), (0x80, 3), (0xff, 0xff), (7, 0xf9)] {
                        let mut page = before;
                        page[first] ^= one;
                        page[second] ^= other;
                        let now = hash.of(&page).0;
                        assert!(
                            seen.insert(now),
                            "{hash:?}: {one} at {first}, {other} at {second}"
                        );
                        flipped += (now ^ hash.of(&before).0).count_ones();
                        looked_at += crate::fingerprint::BITS;
                    }
                }
            }
            let share = f64::from(flipped) / f64::from(looked_at);
            assert!((0.45..0.55).contains(&share), "{hash:?}: {share}");
        }
    }

    #[test]
    fn both_ends_take_the_fastest_that_both_can() {
        let fastest = Hash::fastest();
        assert_eq!(Hash::choose(&Hash::offered()), fastest);
        assert_eq!(Hash::choose(&[]), Hash::default());
        assert_eq!(Hash::choose(&["of tomorrow".to_owned()]), Hash::default());
        let offered = ["xxh3", "of tomorrow", fastest.name()].map(str::to_owned);
        assert_eq!(Hash::choose(&offered), fastest);
        for hash in all() {
            assert_eq!(Hash::named(hash.name()), Some(hash));
        }
        assert_eq!(Hash::named("of tomorrow"), None);
    }

    /// Other agents compute the same fingerprints, so these values must never change.
    #[test]
    fn fingerprints_stay_the_same_across_versions() {
        let of = |name: &str| Hash::named(name).map(|hash| hash.of(&page()).0);
        assert_eq!(of(XXH3), Some(828_194_185_483));
        assert!([None, Some(267_981_141_490)].contains(&of(AES)));
    }
}
