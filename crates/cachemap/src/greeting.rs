//! The beginning of a helper's answer.

use crate::code::{at, checksum, cleaned, printable};

const MAGIC: &[u8; 8] = b"DROVEMAP";
const PROGRAM_BYTES: usize = 16;

/// Introduces the helper. Its layout is the same in all versions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// The version of the protocol.
    pub version: u16,
    /// The query's nonce.
    pub nonce: u64,
    /// The helper's own version, for display.
    pub program: String,
    /// Whether its kernel clears pages.
    pub clears: Clears,
}

/// Whether the guest's kernel clears each page that it allocates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Clears {
    /// Unknown, or the helper is of a version that does not check.
    #[default]
    Unknown,
    /// It doesn't.
    No,
    /// It does.
    Yes,
}

impl Clears {
    fn of(byte: u8) -> Self {
        match byte {
            1 => Self::No,
            2 => Self::Yes,
            _ => Self::Unknown,
        }
    }
}

impl Greeting {
    /// Its size.
    pub const BYTES: usize = 48;
    const SUMMED: usize = 40;

    /// Its bytes on the wire.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut program = cleaned(&self.program, PROGRAM_BYTES).into_bytes();
        program.resize(PROGRAM_BYTES, 0);
        let mut bytes = Vec::with_capacity(Self::BYTES);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&self.version.to_le_bytes());
        bytes.extend_from_slice(&[self.clears as u8, 0, 0, 0, 0, 0]);
        bytes.extend_from_slice(&self.nonce.to_le_bytes());
        bytes.extend_from_slice(&program);
        let sum = checksum(&[&bytes]);
        bytes.extend_from_slice(&sum.to_le_bytes());
        at(&bytes, 0)
    }

    /// Parses a greeting that answers the query with this nonce.
    #[must_use]
    pub fn parse(bytes: &[u8; Self::BYTES], nonce: u64) -> Option<Self> {
        let (summed, sum) = bytes.split_at(Self::SUMMED);
        let is_ours = bytes.starts_with(MAGIC) && u64::from_le_bytes(at(bytes, 16)) == nonce;
        if !is_ours || checksum(&[summed]).to_le_bytes() != sum {
            return None;
        }
        let program: [u8; PROGRAM_BYTES] = at(bytes, 24);
        let end = program.iter().position(|byte| *byte == 0).unwrap_or(PROGRAM_BYTES);
        let program = program.get(..end).and_then(printable)?.to_owned();
        let clears = Clears::of(bytes[10]);
        Some(Self { version: u16::from_le_bytes(at(bytes, 8)), nonce, program, clears })
    }

    /// The first greeting in these bytes, and where it ends.
    pub(crate) fn find(bytes: &[u8], nonce: u64) -> Option<(Self, usize)> {
        let mut windows = bytes.windows(Self::BYTES).enumerate();
        windows.find_map(|(start, window)| {
            if !window.starts_with(MAGIC) {
                return None;
            }
            let greeting = Self::parse(window.first_chunk()?, nonce)?;
            Some((greeting, start + Self::BYTES))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_greeting_is_found_if_it_is_ours_and_whole() {
        let program = "0.1.0 \u{7}(x)".to_owned();
        let greeting = Greeting { version: 3, nonce: 5, program, clears: Clears::Yes };
        let expected = Greeting { program: "0.1.0 (x)".to_owned(), ..greeting.clone() };
        let bytes = [&b"DROVEMAPDROV"[..], &greeting.to_bytes()].concat();
        assert_eq!(Greeting::find(&bytes, 5), Some((expected, 12 + Greeting::BYTES)));
        assert_eq!(Greeting::find(&bytes, 6), None);
        for at in 0..Greeting::BYTES {
            let mut changed = bytes.clone();
            changed[12 + at] ^= 1;
            assert_eq!(Greeting::find(&changed, 5), None, "byte {at}");
        }
    }
}
