//! How the bodies of a batch look on a lane: as they are, or compressed.
//!
//! A batch is compressed as a whole, all its bodies as one piece: neighbours in
//! guest RAM resemble each other, and one call for 128 pages costs less than
//! 128 calls. What does not shrink by [`SHRINK_WORTH`] goes raw, because only
//! raw bodies can be read from the socket straight into guest RAM. After content
//! that did not shrink a few pages of each batch are tried first.

use zstd::bulk::{Compressor, Decompressor};

use crate::doubt::{Doubt, probed};
use crate::{BATCH_PAGES, BLOCK_BYTES_MAX, Batch, BlockBatch, PAGE_BYTES};

/// Most bytes the bodies of one batch have.
const BODIES_BYTES_MAX: usize = BATCH_PAGES * PAGE_BYTES;
const _: () = assert!(BLOCK_BYTES_MAX <= BODIES_BYTES_MAX);

/// Compressed bodies are sent only if this part of them (1/32) is saved: less
/// doesn't pay for the copy that the destination has to make.
pub const SHRINK_WORTH: usize = 32;

/// zstd's fastest regular level: what it saves over lz4 at a price that a lane
/// of 1 Gbit/s still doesn't notice.
const ZSTD_LEVEL: i32 = 1;

/// The form of a batch's bodies on a lane. The numbers are the protocol's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Encoding {
    /// The bytes as they are.
    #[default]
    Raw = 0,
    /// One lz4 block.
    Lz4 = 1,
    /// One zstd frame.
    Zstd = 2,
}

impl From<Encoding> for u8 {
    fn from(encoding: Encoding) -> Self {
        encoding as u8
    }
}

impl TryFrom<u8> for Encoding {
    type Error = DecodeError;

    fn try_from(code: u8) -> Result<Self, DecodeError> {
        match code {
            0 => Ok(Self::Raw),
            1 => Ok(Self::Lz4),
            2 => Ok(Self::Zstd),
            code => Err(DecodeError::UnknownEncoding { code }),
        }
    }
}

/// What the peer sent is not what its frame said. The peer is to blame, and its
/// lane can't be trusted any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// A code that stands for no encoding.
    #[error("the peer sent encoding {code}, which this version does not know")]
    UnknownEncoding {
        /// The code as it came.
        code: u8,
    },
    /// More bodies than a batch holds.
    #[error("the peer announced {bodies} page bodies in one batch; {BATCH_PAGES} are the most")]
    TooManyBodies {
        /// The count as it came.
        bodies: usize,
    },
    /// Encoded bodies that are longer than raw ones.
    #[error("the peer sent {bytes} bytes for {bodies} page bodies, more than they have raw")]
    TooLong {
        /// Bytes that came.
        bytes: usize,
        /// Bodies they stand for.
        bodies: usize,
    },
    /// The bytes are not of that encoding.
    #[error("the peer sent {bodies} page bodies as {encoding:?} that can't be decoded")]
    Corrupt {
        /// The encoding as the peer named it.
        encoding: Encoding,
        /// Bodies they stand for.
        bodies: usize,
    },
    /// The bytes decode to fewer bodies than announced.
    #[error("the peer announced {bodies} page bodies but sent {bytes} bytes of them")]
    WrongLength {
        /// Bytes they turned out to be.
        bytes: usize,
        /// Bodies they should have been.
        bodies: usize,
    },
    /// Disk blocks that are not what their frame said.
    #[error("the peer sent disk blocks as {encoding:?} that can't be decoded to {bytes} bytes")]
    Blocks {
        /// The encoding as the peer named it.
        encoding: Encoding,
        /// Bytes they stand for.
        bytes: usize,
    },
}

/// The most bytes that `bodies` page bodies have in any encoding.
///
/// # Errors
/// [`DecodeError::TooManyBodies`] if no batch holds as many.
pub fn encoded_bytes_max(bodies: usize) -> Result<usize, DecodeError> {
    if bodies > BATCH_PAGES {
        return Err(DecodeError::TooManyBodies { bodies });
    }
    Ok(bodies * PAGE_BYTES)
}

/// The bodies of a batch, ready to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoded<'a> {
    /// The encoding really used.
    pub encoding: Encoding,
    /// The bytes to send. Empty for [`Encoding::Raw`], whose bytes are sent
    /// from the batch itself.
    pub bytes: &'a [u8],
}

impl Encoded<'_> {
    const RAW: Self = Encoded { encoding: Encoding::Raw, bytes: &[] };
}

/// Encodes batches; owns what that needs, so that nothing is allocated for a
/// batch. One for each lane's sender. RAM and disk differ in how they shrink, so it
/// doubts each by itself.
#[derive(Default)]
pub struct Encoder {
    gathered: Vec<u8>,
    packer: Packer,
    pages: Doubt,
    blocks: Doubt,
}

impl Encoder {
    /// An encoder. What an encoding needs is allocated when it is first used.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The bodies of `batch` in the `wanted` encoding, or raw if they don't
    /// shrink.
    pub fn encode(&mut self, wanted: Encoding, batch: &Batch) -> Encoded<'_> {
        let Self { gathered, packer, pages, .. } = self;
        let bodies = batch.bodies();
        let parts = probed(bodies.len()).map(|nth| batch.bytes_of(bodies[nth]));
        packer.pack_if_worth(wanted, pages, bodies.len(), parts, || match batch.contiguous() {
            Some(bodies) => bodies,
            None => gather(batch, gathered),
        })
    }

    /// Page bodies that lie one after the other, as [`Encoder::encode`]; at most a
    /// batch's.
    pub fn encode_bodies(&mut self, wanted: Encoding, bodies: &[u8]) -> Encoded<'_> {
        if bodies.len() > BODIES_BYTES_MAX {
            return Encoded::RAW;
        }
        self.packer.pack_data(wanted, &mut self.pages, bodies)
    }

    /// The data of `batch` in the `wanted` encoding, or raw if it doesn't
    /// shrink.
    pub fn encode_blocks(&mut self, wanted: Encoding, batch: &BlockBatch) -> Encoded<'_> {
        self.packer.pack_data(wanted, &mut self.blocks, batch.data())
    }
}

/// Packs bytes into a buffer of its own.
#[derive(Default)]
struct Packer {
    zstd: Option<Compressor<'static>>,
    packed: Vec<u8>,
    probe: Vec<u8>,
}

impl Packer {
    /// Packs what lies in one piece.
    fn pack_data(&mut self, wanted: Encoding, doubt: &mut Doubt, data: &[u8]) -> Encoded<'_> {
        let pages = data.len() / PAGE_BYTES;
        let parts = probed(pages).map(|nth| &data[nth * PAGE_BYTES..][..PAGE_BYTES]);
        self.pack_if_worth(wanted, doubt, pages, parts, || data)
    }

    /// Packs `whole` unless there is doubt, and the `parts` of its pages don't shrink
    /// either.
    fn pack_if_worth<'p, 'b>(
        &'p mut self,
        wanted: Encoding,
        doubt: &mut Doubt,
        pages: usize,
        parts: impl Iterator<Item = &'b [u8]>,
        whole: impl FnOnce() -> &'b [u8],
    ) -> Encoded<'p> {
        if wanted == Encoding::Raw {
            return Encoded::RAW;
        }
        if doubt.probes(pages) && !self.shrink(wanted, parts) {
            doubt.learn(false);
            return Encoded::RAW;
        }
        let encoded = self.pack(wanted, whole());
        doubt.learn(encoded.encoding != Encoding::Raw);
        encoded
    }

    fn shrink<'b>(&mut self, wanted: Encoding, parts: impl Iterator<Item = &'b [u8]>) -> bool {
        let mut probe = std::mem::take(&mut self.probe);
        probe.clear();
        parts.for_each(|part| probe.extend_from_slice(part));
        let shrinks = self.pack(wanted, &probe).encoding != Encoding::Raw;
        self.probe = probe;
        shrinks
    }

    fn pack(&mut self, wanted: Encoding, bytes: &[u8]) -> Encoded<'_> {
        if bytes.is_empty() {
            return Encoded::RAW;
        }
        let worth = bytes.len() - bytes.len() / SHRINK_WORTH;
        // lz4_flex wants room for the worst case before it begins.
        let room = lz4_flex::block::get_maximum_output_size(BODIES_BYTES_MAX);
        self.packed.resize(room, 0);
        let packed_bytes = match wanted {
            Encoding::Raw => None,
            Encoding::Lz4 => lz4_flex::block::compress_into(bytes, &mut self.packed).ok(),
            Encoding::Zstd => {
                // With no more room than is worth using, zstd gives up early.
                let packed = &mut self.packed[..worth];
                self.zstd
                    .get_or_insert_with(|| {
                        Compressor::new(ZSTD_LEVEL).expect("zstd has this level")
                    })
                    .compress_to_buffer(bytes, packed)
                    .ok()
            }
        };
        match packed_bytes {
            Some(bytes) if bytes <= worth => {
                Encoded { encoding: wanted, bytes: &self.packed[..bytes] }
            }
            _ => Encoded::RAW,
        }
    }
}

/// Copies bodies that lie apart (a classic stream has records between them)
/// one after the other.
fn gather<'a>(batch: &Batch, gathered: &'a mut Vec<u8>) -> &'a [u8] {
    gathered.clear();
    gathered.reserve_exact(BODIES_BYTES_MAX);
    for &body in batch.bodies() {
        gathered.extend_from_slice(batch.bytes_of(body));
    }
    gathered
}

/// Decodes what a peer sent. One for each lane's receiver.
#[derive(Default)]
pub struct Decoder {
    zstd: Option<Decompressor<'static>>,
    bodies: Vec<u8>,
}

impl Decoder {
    /// A decoder. What an encoding needs is allocated when it is first used.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The `bodies` page bodies that `input` stands for, one after the other:
    /// exactly `bodies` times [`PAGE_BYTES`] bytes.
    ///
    /// # Errors
    /// If the input is anything else. Nothing that the input says makes this
    /// allocate more than one batch has.
    pub fn decode<'a>(
        &'a mut self,
        encoding: Encoding,
        input: &'a [u8],
        bodies: usize,
    ) -> Result<&'a [u8], DecodeError> {
        let wanted_bytes = encoded_bytes_max(bodies)?;
        if input.len() > wanted_bytes {
            return Err(DecodeError::TooLong { bytes: input.len(), bodies });
        }
        let bytes = match encoding {
            Encoding::Raw => input,
            Encoding::Lz4 | Encoding::Zstd if wanted_bytes == 0 => input,
            Encoding::Lz4 | Encoding::Zstd => {
                self.bodies.resize(BODIES_BYTES_MAX, 0);
                let room = &mut self.bodies[..wanted_bytes];
                let bytes = unpack(&mut self.zstd, encoding, input, room);
                let bytes = bytes.ok_or(DecodeError::Corrupt { encoding, bodies })?;
                &self.bodies[..bytes]
            }
        };
        if bytes.len() != wanted_bytes {
            return Err(DecodeError::WrongLength { bytes: bytes.len(), bodies });
        }
        Ok(bytes)
    }

    /// Decodes the data of a block batch into all of `data`.
    ///
    /// # Errors
    /// If the input is anything else than that.
    pub fn decode_blocks(
        &mut self,
        encoding: Encoding,
        input: &[u8],
        data: &mut [u8],
    ) -> Result<(), DecodeError> {
        let bytes = data.len();
        let decoded = match encoding {
            Encoding::Raw if input.len() == bytes => {
                data.copy_from_slice(input);
                Some(bytes)
            }
            Encoding::Raw => None,
            Encoding::Lz4 | Encoding::Zstd => unpack(&mut self.zstd, encoding, input, data),
        };
        if decoded != Some(bytes) {
            return Err(DecodeError::Blocks { encoding, bytes });
        }
        Ok(())
    }
}

/// Unpacks `input` into `room`; returns how many bytes it turned out to be.
fn unpack(
    zstd: &mut Option<Decompressor<'static>>,
    encoding: Encoding,
    input: &[u8],
    room: &mut [u8],
) -> Option<usize> {
    if encoding == Encoding::Lz4 {
        return lz4_flex::block::decompress_into(input, room).ok();
    }
    zstd.get_or_insert_with(|| Decompressor::new().expect("zstd needs nothing"))
        .decompress_to_buffer(input, room)
        .ok()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::{PageIndex, Pool, SLOT_BYTES};

    const PACKED: [Encoding; 2] = [Encoding::Lz4, Encoding::Zstd];

    /// Words that repeat with small changes: shrinks, but not to nothing.
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
    fn what_shrinks_comes_back_whole_contiguous_or_not() {
        let pool = Pool::new(SLOT_BYTES);
        let (mut encoder, mut decoder) = (Encoder::new(), Decoder::new());
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
    fn after_noise_what_shrinks_is_found_at_once() {
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
                for _ in 0..5 {
                    assert!(!is_packed(&noise(BATCH_PAGES), gap_bytes));
                }
                // A quarter of it, in the middle.
                let mixed = [noise(40), text(32), noise(BATCH_PAGES - 72)].concat();
                assert!(is_packed(&mixed, gap_bytes));
            }
        }
    }

    #[test]
    fn noise_that_repeats_is_found_in_the_end() {
        let pool = Pool::new(SLOT_BYTES);
        let twins: Vec<u8> = noise(BATCH_PAGES / 2)
            .chunks_exact(PAGE_BYTES)
            .flat_map(|page| page.repeat(2))
            .collect();
        let batch = batch_of(&pool, &twins, 0);
        let mut encoder = Encoder::new();
        for _ in 0..3 {
            encoder.encode_bodies(Encoding::Zstd, &noise(BATCH_PAGES));
        }
        let mut tries = (0..20).map(|_| encoder.encode(Encoding::Zstd, &batch).encoding);
        assert!(tries.any(|encoding| encoding == Encoding::Zstd));
    }

    #[test]
    fn raw_is_handed_through_and_checked() {
        let mut decoder = Decoder::new();
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
        let (mut encoder, mut decoder) = (Encoder::new(), Decoder::new());
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
        let mut decoder = Decoder::new();
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
        let (mut encoder, mut decoder) = (Encoder::new(), Decoder::new());
        // Zeros: the most that a small input can grow to.
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
            if let Ok(decoded) = Decoder::new().decode(encoding, &input, bodies) {
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
            if let Ok(decoded) = Decoder::new().decode(encoding, &packed, 4) {
                prop_assert_eq!(decoded.len(), 4 * PAGE_BYTES);
            }
        }
    }
}
