//! Tests whether a page is one byte repeated.
//!
//! The test runs on every page of a classic stream, so it has to be as fast as
//! memory: the loops below are written so that the compiler vectorizes them.

/// Bytes compared before the next early exit: enough for a few vector registers
/// at once, and few enough that the loop leaves a page soon after the first
/// difference.
const STRIDE_BYTES: usize = 256;

/// Whether all of `bytes` are zero.
#[must_use]
pub fn is_zero(bytes: &[u8]) -> bool {
    is_filled(bytes, 0)
}

/// The byte that all of `bytes` equal; none if they differ or there are none.
#[must_use]
pub fn filled_with(bytes: &[u8]) -> Option<u8> {
    let (&first, &last) = (bytes.first()?, bytes.last()?);
    // Most pages with content differ here already.
    if first != last || bytes[bytes.len() / 2] != first {
        return None;
    }
    is_filled(bytes, first).then_some(first)
}

fn is_filled(bytes: &[u8], byte: u8) -> bool {
    let wanted = u64::from_ne_bytes([byte; 8]);
    let mut strides = bytes.chunks_exact(STRIDE_BYTES);
    for stride in &mut strides {
        let differing = stride.chunks_exact(8).fold(0, |differing, word| {
            let word = u64::from_ne_bytes(word.try_into().unwrap_or_default());
            differing | (word ^ wanted)
        });
        if differing != 0 {
            return false;
        }
    }
    strides.remainder().iter().all(|&other| other == byte)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::PAGE_BYTES;

    #[test]
    fn one_odd_byte_anywhere_is_seen() {
        for byte in [0, 1, 0x80, 0xff] {
            let mut page = vec![byte; PAGE_BYTES];
            assert_eq!(filled_with(&page), Some(byte));
            assert_eq!(is_zero(&page), byte == 0);
            for at in 0..PAGE_BYTES {
                page[at] ^= 0x10;
                assert_eq!(filled_with(&page), None, "byte {at}");
                assert!(byte != 0 || !is_zero(&page), "byte {at}");
                page[at] ^= 0x10;
            }
        }
        assert_eq!(filled_with(&[]), None);
    }

    proptest! {
        #[test]
        fn agrees_with_looking_at_every_byte(
            byte: u8,
            bytes in 0..2_000_usize,
            odd in proptest::option::of((0..2_000_usize, any::<u8>())),
        ) {
            let mut page = vec![byte; bytes];
            if let Some((at, other)) = odd && let Some(place) = page.get_mut(at) {
                *place = other;
            }
            let naive = page.first().copied().filter(|first| page.iter().all(|b| b == first));
            prop_assert_eq!(filled_with(&page), naive);
            prop_assert_eq!(is_zero(&page), page.iter().all(|&b| b == 0));
        }
    }
}
