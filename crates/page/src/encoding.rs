//! How the bodies of a batch are encoded on a lane: raw or compressed.
//!
//! A batch is compressed as one piece: neighbours in guest RAM resemble each other,
//! and one call for 128 pages costs less than 128 calls. A batch that does not shrink
//! by [`SHRINK_WORTH`] is sent raw, because only raw bodies can be read from the
//! socket straight into guest RAM. After many batches that did not shrink, a few
//! pages of each batch are tried first.

use zstd::bulk::{Compressor, Decompressor};

use crate::doubt::{Doubt, probed};
use crate::{BATCH_PAGES, BLOCK_BYTES_MAX, Batch, BlockBatch, Buffer, Deltas, PAGE_BYTES};

#[cfg(test)]
mod tests;

/// Most bytes that the bodies of one batch have.
const BODIES_BYTES_MAX: usize = BATCH_PAGES * PAGE_BYTES;
const _: () = assert!(BLOCK_BYTES_MAX <= BODIES_BYTES_MAX);

/// Compressed bodies are sent only if they save this fraction (1/32): a smaller
/// saving doesn't pay for the extra copy at the destination.
pub const SHRINK_WORTH: usize = 32;

/// zstd's fastest regular level: it saves more than lz4, at a cost that a lane of 1
/// Gbit/s still hides.
const ZSTD_LEVEL: i32 = 1;

/// The encoding of a batch's bodies on a lane. The numbers are the protocol's.
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

/// The peer's data don't match its frame. The peer is to blame, and its lane can't be
/// trusted any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// An unknown encoding.
    #[error("the peer sent encoding {code}, which this version does not know")]
    UnknownEncoding {
        /// The code as received.
        code: u8,
    },
    /// More bodies than a batch holds.
    #[error("the peer announced {bodies} page bodies in one batch; {BATCH_PAGES} are the most")]
    TooManyBodies {
        /// The count as received.
        bodies: usize,
    },
    /// Encoded bodies that are longer than raw ones.
    #[error("the peer sent {bytes} bytes for {bodies} page bodies, more than they have raw")]
    TooLong {
        /// Bytes received.
        bytes: usize,
        /// Bodies that were announced.
        bodies: usize,
    },
    /// The bytes are not valid in that encoding.
    #[error("the peer sent {bodies} page bodies as {encoding:?} that can't be decoded")]
    Corrupt {
        /// The encoding as the peer named it.
        encoding: Encoding,
        /// Bodies that were announced.
        bodies: usize,
    },
    /// The bytes decode to fewer bodies than announced.
    #[error("the peer announced {bodies} page bodies but sent {bytes} bytes of them")]
    WrongLength {
        /// Bytes after decoding.
        bytes: usize,
        /// Bodies that were announced.
        bodies: usize,
    },
    /// Bytes that are not the deltas of the announced pages.
    #[error("the peer sent {bytes} bytes as deltas of {pages} pages, which they are not")]
    Deltas {
        /// Bytes after decoding.
        bytes: usize,
        /// Pages that were announced.
        pages: usize,
    },
    /// Disk blocks that don't match their frame.
    #[error("the peer sent disk blocks as {encoding:?} that can't be decoded to {bytes} bytes")]
    Blocks {
        /// The encoding as the peer named it.
        encoding: Encoding,
        /// Bytes that were announced.
        bytes: usize,
    },
}

/// The most bytes that `bodies` page bodies take in any encoding.
///
/// # Errors
/// [`DecodeError::TooManyBodies`] if a batch can't hold that many.
pub fn encoded_bytes_max(bodies: usize) -> Result<usize, DecodeError> {
    if bodies > BATCH_PAGES {
        return Err(DecodeError::TooManyBodies { bodies });
    }
    Ok(bodies * PAGE_BYTES)
}

/// The bodies of a batch, ready to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoded<'a> {
    /// The encoding that was used.
    pub encoding: Encoding,
    /// The bytes to send. Empty for [`Encoding::Raw`], whose bytes are sent
    /// from the batch itself.
    pub bytes: &'a [u8],
}

impl Encoded<'_> {
    const RAW: Self = Encoded { encoding: Encoding::Raw, bytes: &[] };
}

/// Encodes batches, one per lane's sender; owns its buffers, so that no batch
/// allocates.
///
/// RAM and disk blocks compress differently, so it judges each by its own history.
#[derive(Default)]
pub struct Encoder {
    gathered: Buffer,
    packer: Packer,
    pages: Doubt,
    blocks: Doubt,
}

impl Encoder {
    /// Creates an encoder. An encoding's buffers are allocated at its first use.
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
            None => lay_out(batch.bodies().iter().map(|body| batch.bytes_of(*body)), gathered),
        })
    }

    /// Encodes contiguous page bodies, at most a batch's, as [`Encoder::encode`].
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

/// Compresses bytes into its own buffer.
#[derive(Default)]
struct Packer {
    zstd: Option<Compressor<'static>>,
    packed: Buffer,
    probe: Buffer,
}

impl Packer {
    /// Compresses contiguous data.
    fn pack_data(&mut self, wanted: Encoding, doubt: &mut Doubt, data: &[u8]) -> Encoded<'_> {
        let pages = data.len() / PAGE_BYTES;
        let parts = probed(pages).map(|nth| &data[nth * PAGE_BYTES..][..PAGE_BYTES]);
        self.pack_if_worth(wanted, doubt, pages, parts, || data)
    }

    /// Compresses `whole`, unless a probe of the `parts` of its pages is due and does
    /// not shrink.
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
        let probed = lay_out(parts, &mut probe);
        let shrinks = self.pack(wanted, probed).encoding != Encoding::Raw;
        self.probe = probe;
        shrinks
    }

    fn pack(&mut self, wanted: Encoding, bytes: &[u8]) -> Encoded<'_> {
        if bytes.is_empty() {
            return Encoded::RAW;
        }
        let worth = bytes.len() - bytes.len() / SHRINK_WORTH;
        // lz4_flex wants room for the worst case before it starts.
        let room = lz4_flex::block::get_maximum_output_size(BODIES_BYTES_MAX);
        let room = self.packed.room(room);
        let packed_bytes = match wanted {
            Encoding::Raw => None,
            Encoding::Lz4 => lz4_flex::block::compress_into(bytes, room).ok(),
            Encoding::Zstd => {
                // With only the room that is worth using, zstd gives up early.
                self.zstd
                    .get_or_insert_with(|| {
                        Compressor::new(ZSTD_LEVEL).expect("zstd has this level")
                    })
                    .compress_to_buffer(bytes, &mut room[..worth])
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

/// Copies pages that are apart from each other (a classic stream has records between its
/// bodies) one after the other.
fn lay_out<'a, 'b>(pages: impl Iterator<Item = &'b [u8]>, into: &'a mut Buffer) -> &'a [u8] {
    let into = into.room(BODIES_BYTES_MAX);
    let mut filled = 0;
    for page in pages {
        into[filled..][..page.len()].copy_from_slice(page);
        filled += page.len();
    }
    &into[..filled]
}

/// Decodes a peer's data; one per lane's receiver. An encoding's buffers are allocated at its first
/// use.
#[derive(Default)]
pub struct Decoder {
    zstd: Option<Decompressor<'static>>,
    bodies: Buffer,
}

impl Decoder {
    /// Decodes `input` to exactly `bodies` page bodies, one after the other.
    ///
    /// # Errors
    /// If the input decodes to anything else. Whatever the input says, this allocates
    /// no more than one batch has.
    pub fn decode<'a>(
        &'a mut self,
        encoding: Encoding,
        input: &'a [u8],
        bodies: usize,
    ) -> Result<&'a [u8], DecodeError> {
        let wanted_bytes = encoded_bytes_max(bodies)?;
        let bytes = self.decode_up_to(encoding, input, bodies)?;
        if bytes.len() != wanted_bytes {
            return Err(DecodeError::WrongLength { bytes: bytes.len(), bodies });
        }
        Ok(bytes)
    }

    /// Decodes the deltas of `pages` pages.
    ///
    /// # Errors
    /// As [`Decoder::decode`].
    pub fn decode_deltas<'a>(
        &'a mut self,
        encoding: Encoding,
        input: &'a [u8],
        pages: usize,
    ) -> Result<Deltas<'a>, DecodeError> {
        Deltas::parse(pages, self.decode_up_to(encoding, input, pages)?)
    }

    /// Decodes to at most as many bytes as `bodies` page bodies have.
    fn decode_up_to<'a>(
        &'a mut self,
        encoding: Encoding,
        input: &'a [u8],
        bodies: usize,
    ) -> Result<&'a [u8], DecodeError> {
        let bytes_max = encoded_bytes_max(bodies)?;
        if input.len() > bytes_max {
            return Err(DecodeError::TooLong { bytes: input.len(), bodies });
        }
        match encoding {
            Encoding::Raw => Ok(input),
            Encoding::Lz4 | Encoding::Zstd if bytes_max == 0 => Ok(input),
            Encoding::Lz4 | Encoding::Zstd => {
                let room = &mut self.bodies.room(BODIES_BYTES_MAX)[..bytes_max];
                let bytes = unpack(&mut self.zstd, encoding, input, room);
                let bytes = bytes.ok_or(DecodeError::Corrupt { encoding, bodies })?;
                Ok(&self.bodies[..bytes])
            }
        }
    }

    /// Decodes the data of a block batch into all of `data`.
    ///
    /// # Errors
    /// If the input decodes to any other length.
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

/// Decompresses `input` into `room`; returns the number of bytes.
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
