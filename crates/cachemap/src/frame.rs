//! The frames after a greeting: `magic d7e1 u16, kind u8, 0 u8, sequence u32, bytes u32, unpacked
//! bytes u32, checksum u64`, then the content. The content is an lz4 block if that is shorter.

use crate::Fault;
use crate::code::{at, checksum};

const MAGIC: u16 = 0xd7e1;

/// The largest unpacked content of a frame.
pub(crate) const CONTENT_BYTES_MAX: usize = 64 << 10;

/// The kinds of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A disk; disks are numbered in the order of their frames.
    Device,
    /// Some runs.
    Runs,
    /// The end of a map.
    Summary,
    /// The end of an answer without a map.
    Refusal,
}

impl Kind {
    fn number(self) -> u8 {
        match self {
            Self::Device => 1,
            Self::Runs => 2,
            Self::Summary => 3,
            Self::Refusal => 4,
        }
    }

    fn from_number(kind: u8) -> Result<Self, Fault> {
        match kind {
            1 => Ok(Self::Device),
            2 => Ok(Self::Runs),
            3 => Ok(Self::Summary),
            4 => Ok(Self::Refusal),
            _ => Err(Fault::Kind { kind }),
        }
    }
}

/// A frame's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    sequence: u32,
    pub(crate) bytes: usize,
    unpacked: usize,
    checksum: u64,
}

impl Header {
    pub(crate) const BYTES: usize = 24;
    const SUMMED: usize = 16;

    pub(crate) fn parse(bytes: &[u8; Self::BYTES], expected: u32) -> Result<Self, Fault> {
        if u16::from_le_bytes(at(bytes, 0)) != MAGIC || at(bytes, 3) != [0] {
            return Err(Fault::NoFrame);
        }
        let [kind] = at(bytes, 2);
        let kind = Kind::from_number(kind)?;
        let sequence = u32::from_le_bytes(at(bytes, 4));
        if sequence != expected {
            return Err(Fault::Sequence { expected, found: sequence });
        }
        let length = u32::from_le_bytes(at(bytes, 8));
        let unpacked = u32::from_le_bytes(at(bytes, 12));
        let too_long = Fault::Length { bytes: length, unpacked };
        let (Ok(bytes_long), Ok(unpacked)) = (usize::try_from(length), usize::try_from(unpacked))
        else {
            return Err(too_long);
        };
        if bytes_long > unpacked || unpacked > CONTENT_BYTES_MAX {
            return Err(too_long);
        }
        let checksum = u64::from_le_bytes(at(bytes, 16));
        Ok(Self { kind, sequence, bytes: bytes_long, unpacked, checksum })
    }

    /// The unpacked content. A packed one is unpacked `into` the buffer.
    pub(crate) fn unpack<'a>(
        &self,
        nonce: u64,
        head: &[u8; Self::BYTES],
        content: &'a [u8],
        into: &'a mut Vec<u8>,
    ) -> Result<&'a [u8], Fault> {
        let (summed, _) = head.split_at(Self::SUMMED);
        if checksum(&[&nonce.to_le_bytes(), summed, content]) != self.checksum {
            return Err(Fault::Checksum);
        }
        if self.bytes == self.unpacked {
            return Ok(content);
        }
        into.clear();
        into.resize(self.unpacked, 0);
        match lz4_flex::block::decompress_into(content, into) {
            Ok(bytes) if bytes == self.unpacked => Ok(into),
            _ => Err(Fault::Packed),
        }
    }
}

/// Appends a frame. `content` is at most [`CONTENT_BYTES_MAX`] long.
pub(crate) fn write(kind: Kind, sequence: u32, nonce: u64, content: &[u8], out: &mut Vec<u8>) {
    debug_assert!(content.len() <= CONTENT_BYTES_MAX, "frames are cut before");
    let packed = lz4_flex::block::compress(content);
    let shorter = if packed.len() < content.len() { &packed } else { content };
    let mut head = Vec::with_capacity(Header::BYTES);
    head.extend_from_slice(&MAGIC.to_le_bytes());
    head.extend_from_slice(&[kind.number(), 0]);
    head.extend_from_slice(&sequence.to_le_bytes());
    for bytes in [shorter.len(), content.len()] {
        head.extend_from_slice(&u32::try_from(bytes).unwrap_or(u32::MAX).to_le_bytes());
    }
    let sum = checksum(&[&nonce.to_le_bytes(), &head, shorter]);
    out.extend_from_slice(&head);
    out.extend_from_slice(&sum.to_le_bytes());
    out.extend_from_slice(shorter);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_come_back_packed_or_not_and_never_changed() {
        for content in [&[][..], b"a", &[7; 5000], b"0123456789abcdefghij"] {
            let mut bytes = Vec::new();
            write(Kind::Runs, 5, 99, content, &mut bytes);
            assert!(bytes.len() <= Header::BYTES + content.len());
            let read = |bytes: &[u8]| {
                let head = bytes.first_chunk().expect("a header");
                let header = Header::parse(head, 5)?;
                let mut room = Vec::new();
                let content = bytes.get(Header::BYTES..).unwrap_or_default();
                if content.len() != header.bytes {
                    return Err(Fault::CutShort);
                }
                header.unpack(99, head, content, &mut room).map(<[u8]>::to_vec)
            };
            assert_eq!(read(&bytes).as_deref(), Ok(content));
            for at in 0..bytes.len() {
                let mut changed = bytes.clone();
                changed[at] ^= 0x40;
                assert!(read(&changed).is_err(), "byte {at}");
            }
        }
    }

    #[test]
    fn lengths_are_capped_before_anything_is_allocated() {
        let mut bytes = Vec::new();
        write(Kind::Runs, 0, 1, &[7; 900], &mut bytes);
        for (length, unpacked) in [(u32::MAX, u32::MAX), (1, 64 * 1024 + 1), (901, 900)] {
            bytes[8..12].copy_from_slice(&length.to_le_bytes());
            bytes[12..16].copy_from_slice(&unpacked.to_le_bytes());
            let head = bytes.first_chunk().expect("a header");
            let expected = Fault::Length { bytes: length, unpacked };
            assert_eq!(Header::parse(head, 0), Err(expected));
        }
    }
}
