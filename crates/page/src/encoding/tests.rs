//! Encoded content decodes to itself, and malformed input is refused.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::{PageIndex, Pool, SLOT_BYTES};

const PACKED: [Encoding; 2] = [Encoding::Lz4, Encoding::Zstd];

/// Words that repeat with small changes, which shrink, but not to nothing.
fn text(pages: usize) -> Vec<u8> {
    (0..pages * PAGE_BYTES / 16).flat_map(|n| format!("{:015x} ", n * 7).into_bytes()).collect()
}

fn noise(pages: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let words = pages * PAGE_BYTES / 8;
    (0..words)
        .flat_map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        })
        .collect()
}

fn batch_of(pool: &Arc<Pool>, content: &[u8], gap_bytes: usize) -> Batch {
    let mut batch = pool.take().unwrap();
    for (nth, bytes) in content.chunks_exact(PAGE_BYTES).enumerate() {
        let at = nth * (PAGE_BYTES + gap_bytes);
        batch.buffer_mut()[at..at + PAGE_BYTES].copy_from_slice(bytes);
        batch.push_body(PageIndex(u32::try_from(nth).unwrap()), at);
    }
    batch
}

#[test]
fn content_that_shrinks_round_trips_contiguous_or_not() {
    let pool = Pool::new(SLOT_BYTES);
    let (mut encoder, mut decoder) = (Encoder::new(), Decoder::default());
    for pages in [1, 3, BATCH_PAGES] {
        for gap_bytes in [0, 9] {
            let content = text(pages);
            let batch = batch_of(&pool, &content, gap_bytes);
            for wanted in PACKED {
                let encoded = encoder.encode(wanted, &batch);
                assert_eq!(encoded.encoding, wanted);
                assert!(encoded.bytes.len() <= content.len() - content.len() / SHRINK_WORTH);
                let decoded = decoder.decode(wanted, encoded.bytes, pages).unwrap();
                assert!(decoded == content);
            }
        }
    }
}

#[test]
fn noise_and_nothing_go_raw() {
    let pool = Pool::new(SLOT_BYTES);
    let mut encoder = Encoder::new();
    for pages in [0, 1, BATCH_PAGES] {
        let batch = batch_of(&pool, &noise(pages), 0);
        for wanted in PACKED {
            assert_eq!(encoder.encode(wanted, &batch), Encoded::RAW);
        }
    }
    let batch = batch_of(&pool, &text(1), 0);
    assert_eq!(encoder.encode(Encoding::Raw, &batch), Encoded::RAW);
}

#[test]
fn content_that_shrinks_is_found_at_once_after_noise() {
    let pool = Pool::new(2 * SLOT_BYTES);
    for wanted in PACKED {
        let mut encoder = Encoder::new();
        let mut is_packed = |content: &[u8], gap_bytes| {
            let batch = batch_of(&pool, content, gap_bytes);
            let in_one = encoder.encode_bodies(wanted, content).encoding;
            assert_eq!(encoder.encode(wanted, &batch).encoding, in_one);
            in_one == wanted
        };
        for gap_bytes in [0, 9] {
            for _ in 0..20 {
                assert!(!is_packed(&noise(BATCH_PAGES), gap_bytes));
            }
            // A quarter of it shrinks, in the middle.
            let mixed = [noise(40), text(32), noise(BATCH_PAGES - 72)].concat();
            assert!(is_packed(&mixed, gap_bytes));
        }
    }
}

/// The content that shrinks lies where four probes would miss it.
#[test]
fn a_little_that_shrinks_among_noise_is_found() {
    let pool = Pool::new(2 * SLOT_BYTES);
    let mut encoder = Encoder::new();
    for _ in 0..10 {
        let noise_alone = batch_of(&pool, &noise(BATCH_PAGES), 0);
        assert_eq!(encoder.encode(Encoding::Zstd, &noise_alone), Encoded::RAW);
        let mixed = [text(10), noise(BATCH_PAGES - 10)].concat();
        let encoded = encoder.encode(Encoding::Zstd, &batch_of(&pool, &mixed, 0));
        assert_eq!(encoded.encoding, Encoding::Zstd);
    }
}

#[test]
fn noise_that_repeats_is_found_in_the_end() {
    let pool = Pool::new(SLOT_BYTES);
    let twins: Vec<u8> =
        noise(BATCH_PAGES / 2).chunks_exact(PAGE_BYTES).flat_map(|page| page.repeat(2)).collect();
    let batch = batch_of(&pool, &twins, 0);
    let mut encoder = Encoder::new();
    for _ in 0..20 {
        encoder.encode_bodies(Encoding::Zstd, &noise(BATCH_PAGES));
    }
    let mut tries = (0..20).map(|_| encoder.encode(Encoding::Zstd, &batch).encoding);
    assert!(tries.any(|encoding| encoding == Encoding::Zstd));
}

#[test]
fn raw_is_handed_through_and_checked() {
    let mut decoder = Decoder::default();
    let content = noise(2);
    assert_eq!(decoder.decode(Encoding::Raw, &content, 2).unwrap(), content);
    assert_eq!(
        decoder.decode(Encoding::Raw, &content, 1),
        Err(DecodeError::TooLong { bytes: 8192, bodies: 1 })
    );
    assert_eq!(
        decoder.decode(Encoding::Raw, &content[1..], 2),
        Err(DecodeError::WrongLength { bytes: 8191, bodies: 2 })
    );
}

#[test]
fn blocks_come_back_in_every_encoding_and_nothing_else_does() {
    let pool = Pool::new(SLOT_BYTES);
    let mut batch = pool.take_blocks().unwrap();
    let content = text(3);
    batch.room_mut()[..content.len()].copy_from_slice(&content);
    batch.push_data(content.len());
    let (mut encoder, mut decoder) = (Encoder::new(), Decoder::default());
    assert_eq!(encoder.encode_blocks(Encoding::Raw, &batch), Encoded::RAW);
    for wanted in PACKED {
        let encoded = encoder.encode_blocks(wanted, &batch);
        assert_eq!(encoded.encoding, wanted);
        let mut data = vec![0; content.len()];
        decoder.decode_blocks(wanted, encoded.bytes, &mut data).unwrap();
        assert!(data == content);
        for wrong in [content.len() - 512, content.len() + 512] {
            let refused = decoder.decode_blocks(wanted, encoded.bytes, &mut vec![0; wrong]);
            assert_eq!(refused, Err(DecodeError::Blocks { encoding: wanted, bytes: wrong }));
        }
    }
    let mut data = vec![0; 512];
    assert!(decoder.decode_blocks(Encoding::Raw, &content[..512], &mut data).is_ok());
    assert!(decoder.decode_blocks(Encoding::Raw, &content[..511], &mut data).is_err());
}

#[test]
fn counts_and_codes_beyond_the_protocol_are_refused() {
    let mut decoder = Decoder::default();
    for encoding in [Encoding::Raw, Encoding::Lz4, Encoding::Zstd] {
        assert_eq!(
            decoder.decode(encoding, &[], BATCH_PAGES + 1),
            Err(DecodeError::TooManyBodies { bodies: BATCH_PAGES + 1 })
        );
        assert!(decoder.decode(encoding, &[], usize::MAX).is_err());
        assert_eq!(decoder.decode(encoding, &[], 0), Ok(&[][..]));
        assert_eq!(Encoding::try_from(u8::from(encoding)), Ok(encoding));
    }
    assert_eq!(Encoding::try_from(3), Err(DecodeError::UnknownEncoding { code: 3 }));
}

#[test]
fn content_that_unpacks_to_another_count_is_refused() {
    let pool = Pool::new(SLOT_BYTES);
    let (mut encoder, mut decoder) = (Encoder::new(), Decoder::default());
    // Zeros: a small input grows to the most.
    let batch = batch_of(&pool, &vec![0; BODIES_BYTES_MAX], 0);
    for wanted in PACKED {
        let packed = encoder.encode(wanted, &batch).bytes.to_vec();
        for bodies in [1, BATCH_PAGES - 1] {
            assert_eq!(
                decoder.decode(wanted, &packed, bodies),
                Err(match packed.len() > bodies * PAGE_BYTES {
                    true => DecodeError::TooLong { bytes: packed.len(), bodies },
                    false => DecodeError::Corrupt { encoding: wanted, bodies },
                })
            );
        }
        let one = batch_of(&Pool::new(SLOT_BYTES), &text(1), 0);
        let packed = encoder.encode(wanted, &one).bytes.to_vec();
        assert_eq!(
            decoder.decode(wanted, &packed, 2),
            Err(DecodeError::WrongLength { bytes: PAGE_BYTES, bodies: 2 })
        );
    }
}

proptest! {
    #[test]
    fn any_input_gives_all_the_bodies_or_an_error(
        code in 0..3_u8,
        input in proptest::collection::vec(any::<u8>(), 0..512),
        bodies in 0..BATCH_PAGES + 2,
    ) {
        let encoding = Encoding::try_from(code).unwrap();
        if let Ok(decoded) = Decoder::default().decode(encoding, &input, bodies) {
            prop_assert_eq!(decoded.len(), bodies * PAGE_BYTES);
        }
    }

    #[test]
    fn damaged_input_gives_all_the_bodies_or_an_error(
        code in 1..3_u8,
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let encoding = Encoding::try_from(code).unwrap();
        let batch = batch_of(&Pool::new(SLOT_BYTES), &text(4), 0);
        let mut encoder = Encoder::new();
        let mut packed = encoder.encode(encoding, &batch).bytes.to_vec();
        for (at, value) in damage {
            let at = at.index(packed.len());
            packed[at] = value;
        }
        if let Some(cut) = cut {
            packed.truncate(cut.index(packed.len()));
        }
        if let Ok(decoded) = Decoder::default().decode(encoding, &packed, 4) {
            prop_assert_eq!(decoded.len(), 4 * PAGE_BYTES);
        }
    }
}
