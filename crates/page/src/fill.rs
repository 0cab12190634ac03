//! Tests whether a page is zero.
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
    let mut strides = bytes.chunks_exact(STRIDE_BYTES);
    for stride in &mut strides {
        let differing = stride.chunks_exact(8).fold(0, |differing, word| {
            differing | u64::from_ne_bytes(word.try_into().unwrap_or_default())
        });
        if differing != 0 {
            return false;
        }
    }
    strides.remainder().iter().all(|&byte| byte == 0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::PAGE_BYTES;

    #[test]
    fn one_odd_byte_anywhere_is_seen() {
        let mut page = vec![0; PAGE_BYTES];
        assert!(is_zero(&page));
        for at in 0..PAGE_BYTES {
            page[at] = 0x10;
            assert!(!is_zero(&page), "byte {at}");
            page[at] = 0;
        }
    }

    proptest! {
        #[test]
        fn agrees_with_looking_at_every_byte(
            bytes in 0..2_000_usize,
            odd in proptest::option::of((0..2_000_usize, any::<u8>())),
        ) {
            let mut page = vec![0; bytes];
            if let Some((at, other)) = odd && let Some(place) = page.get_mut(at) {
                *place = other;
            }
            prop_assert_eq!(is_zero(&page), page.iter().all(|&b| b == 0));
        }
    }
}
