//! Splits ranges above the server's maximum size into pieces.

/// The pieces of a range, in order, none longer than `max`.
pub(super) fn pieces(offset: u64, bytes: u64, max: u32) -> impl Iterator<Item = Piece> {
    let max = u64::from(max.max(1));
    let end = offset + bytes;
    (0..bytes.div_ceil(max)).map(move |number| {
        let from = offset + number * max;
        let bytes = u32::try_from(max.min(end - from)).expect("at most max");
        Piece { offset: from, bytes, last: from + u64::from(bytes) == end }
    })
}

/// A piece of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) offset: u64,
    pub(super) bytes: u32,
    pub(super) last: bool,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pieces_make_the_range(offset in 0..1_u64 << 60, bytes in 1..100_000_u64, max in 100..u32::MAX) {
            let (mut at, mut ended) = (offset, false);
            for piece in pieces(offset, bytes, max) {
                prop_assert!(!ended && piece.offset == at && piece.bytes > 0 && piece.bytes <= max);
                at += u64::from(piece.bytes);
                ended = piece.last;
            }
            prop_assert!(ended && at == offset + bytes);
        }
    }

    #[test]
    fn nothing_has_no_pieces() {
        assert_eq!(pieces(7, 0, 4096).next(), None);
    }
}
