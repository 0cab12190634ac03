//! Requests for content between hosts of a rack, and the answers.
//!
//! ```text
//! wants    0 magic u16   2 domain bytes u8  3 zero u8   4 names u16    6 zero u16
//!          domain, then names x [20]
//! has      0 magic u16   2 encoding u8      3 zero u8   4 here u16     6 not here u16
//!          8 payload bytes u32
//!          here x name [20], then not here x name [20], then the payload
//! ```
//! All fields are little-endian. Each name of a `wants` is eventually in one `has`, in any order;
//! content that is still arriving at the peer is sent once it has arrived. The payload is the
//! content of the names that are here, one page after the other, encoded as one piece.

use content::{Domain, NAME_BYTES, Name};
use page::{BATCH_PAGES, PAGE_BYTES};

use crate::error::WireError;
use crate::read::{le16, le32};

const WANTS_MAGIC: u16 = 0xd7b5;
const HAS_MAGIC: u16 = 0xd7b6;
/// The longest domain.
const DOMAIN_BYTES_MAX: usize = 64;

/// A host's request for content of another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContentRequest {
    /// The domain in which the names are made.
    pub domain: Domain,
    /// The requested names, at most as many as a batch has.
    pub names: Vec<Name>,
}

impl ContentRequest {
    /// The length of its head.
    pub const HEAD_BYTES: usize = 8;

    /// The length of the rest, according to the head.
    ///
    /// # Errors
    /// If it is not the head of a request, or too much is requested.
    pub fn rest_bytes(head: &[u8; Self::HEAD_BYTES]) -> Result<usize, WireError> {
        check_magic(head, WANTS_MAGIC, "question for content")?;
        let domain = usize::from(head[2]);
        cap("a domain's length", domain, DOMAIN_BYTES_MAX)?;
        Ok(domain + names_bytes("a number of wanted names", le16(head, 4))?)
    }

    /// Parses a peer's bytes; the rest is as long as announced.
    ///
    /// # Errors
    /// If the domain is not text, or the length is wrong.
    pub fn parse(head: &[u8; Self::HEAD_BYTES], rest: &[u8]) -> Result<Self, WireError> {
        if rest.len() != Self::rest_bytes(head)? {
            return Err(WireError::Contradiction("a question of another length than announced"));
        }
        let (domain, names) = rest.split_at(usize::from(head[2]));
        let domain = str::from_utf8(domain)
            .map_err(|_| WireError::Contradiction("a domain that is not text"))?;
        Ok(Self { domain: Domain(domain.to_owned()), names: read_names(names) })
    }

    /// Writes it after what `out` holds.
    ///
    /// # Panics
    /// If there are more names than a batch has, or the domain is too long: our own error.
    pub fn write(&self, out: &mut Vec<u8>) {
        assert!(self.names.len() <= BATCH_PAGES && self.domain.0.len() <= DOMAIN_BYTES_MAX);
        out.extend_from_slice(&WANTS_MAGIC.to_le_bytes());
        out.extend_from_slice(&[u8::try_from(self.domain.0.len()).expect("capped"), 0]);
        out.extend_from_slice(&count(&self.names));
        out.extend_from_slice(&[0, 0]);
        out.extend_from_slice(self.domain.0.as_bytes());
        write_names(&self.names, out);
    }
}

/// The header before an answer's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HasHeader {
    /// How the payload is encoded.
    pub encoding: u8,
    /// The number of names whose content is in the payload.
    pub here: u16,
    /// The number of names whose content the peer doesn't have.
    pub not_here: u16,
    /// The payload's length.
    pub payload_bytes: u32,
}

impl HasHeader {
    /// Its length.
    pub const BYTES: usize = 12;

    /// Parses a peer's bytes.
    ///
    /// # Errors
    /// If it is not a header, or a count is above its cap.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, WireError> {
        check_magic(bytes, HAS_MAGIC, "answer with content")?;
        let (here, not_here) = (le16(bytes, 4), le16(bytes, 6));
        names_bytes("a number of contents", here)?;
        names_bytes("a number of contents that are not here", not_here)?;
        let payload_bytes = le32(bytes, 8);
        cap("a payload", payload_bytes as usize, usize::from(here) * PAGE_BYTES)?;
        Ok(Self { encoding: bytes[2], here, not_here, payload_bytes })
    }

    /// Bytes of the names that follow.
    #[must_use]
    pub fn names_bytes(self) -> usize {
        (usize::from(self.here) + usize::from(self.not_here)) * NAME_BYTES
    }

    /// The names that follow: those with content in the payload, and those without.
    ///
    /// # Errors
    /// If `bytes` has another length than [`HasHeader::names_bytes`].
    pub fn names(self, bytes: &[u8]) -> Result<(Vec<Name>, Vec<Name>), WireError> {
        if bytes.len() != self.names_bytes() {
            return Err(WireError::Contradiction("names of another length than announced"));
        }
        let (here, not_here) = bytes.split_at(usize::from(self.here) * NAME_BYTES);
        Ok((read_names(here), read_names(not_here)))
    }

    /// Writes a header and the names after what `out` holds; the payload follows.
    ///
    /// # Panics
    /// If there are more names than a batch has, or the payload is longer than the raw content: our
    /// own error.
    pub fn write_for(
        here: &[Name],
        not_here: &[Name],
        encoding: u8,
        payload_bytes: usize,
        out: &mut Vec<u8>,
    ) {
        assert!(here.len() <= BATCH_PAGES && not_here.len() <= BATCH_PAGES);
        assert!(payload_bytes <= here.len() * PAGE_BYTES);
        out.extend_from_slice(&HAS_MAGIC.to_le_bytes());
        out.extend_from_slice(&[encoding, 0]);
        out.extend_from_slice(&count(here));
        out.extend_from_slice(&count(not_here));
        let payload_bytes = u32::try_from(payload_bytes).expect("a batch's worth");
        out.extend_from_slice(&payload_bytes.to_le_bytes());
        write_names(here, out);
        write_names(not_here, out);
    }
}

fn check_magic(bytes: &[u8], magic: u16, what: &'static str) -> Result<(), WireError> {
    match le16(bytes, 0) {
        found if found == magic => Ok(()),
        found => Err(WireError::Unknown { what, value: u64::from(found) }),
    }
}

fn cap(what: &'static str, value: usize, max: usize) -> Result<(), WireError> {
    let (value, max) = (value as u64, max as u64);
    if value > max { Err(WireError::TooLarge { what, value, max }) } else { Ok(()) }
}

fn names_bytes(what: &'static str, names: u16) -> Result<usize, WireError> {
    cap(what, usize::from(names), BATCH_PAGES)?;
    Ok(usize::from(names) * NAME_BYTES)
}

fn read_names(bytes: &[u8]) -> Vec<Name> {
    bytes.as_chunks().0.iter().map(|name| Name(*name)).collect()
}

fn write_names(names: &[Name], out: &mut Vec<u8>) {
    names.iter().for_each(|name| out.extend_from_slice(&name.0));
}

fn count(names: &[Name]) -> [u8; 2] {
    u16::try_from(names.len()).expect("capped").to_le_bytes()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn names(max: usize) -> impl Strategy<Value = Vec<Name>> {
        prop::collection::vec(any::<[u8; NAME_BYTES]>().prop_map(Name), 0..=max)
    }

    proptest! {
        #[test]
        fn a_request_round_trips(names in names(BATCH_PAGES), domain in "[a-z]{0,64}") {
            let wants = ContentRequest { domain: Domain(domain), names };
            let mut bytes = Vec::new();
            wants.write(&mut bytes);
            let (head, rest) = bytes.split_first_chunk().unwrap();
            prop_assert_eq!(ContentRequest::rest_bytes(head).unwrap(), rest.len());
            prop_assert_eq!(ContentRequest::parse(head, rest).unwrap(), wants);
            prop_assert!(rest.is_empty() || ContentRequest::parse(head, &rest[1..]).is_err());
        }

        #[test]
        fn an_answer_comes_back_as_it_went(
            here in names(BATCH_PAGES), not_here in names(BATCH_PAGES), encoding: u8, less: u16,
        ) {
            let payload = (here.len() * PAGE_BYTES).saturating_sub(usize::from(less));
            let mut bytes = Vec::new();
            HasHeader::write_for(&here, &not_here, encoding, payload, &mut bytes);
            let (head, rest) = bytes.split_first_chunk().unwrap();
            let header = HasHeader::parse(head).unwrap();
            prop_assert_eq!((header.encoding, header.payload_bytes as usize), (encoding, payload));
            prop_assert_eq!(header.names(rest).unwrap(), (here, not_here));
        }
    }

    #[test]
    fn too_much_is_refused_before_memory_is_allocated_for_it() {
        let mut head = [0; ContentRequest::HEAD_BYTES];
        assert!(ContentRequest::rest_bytes(&head).is_err());
        head[..2].copy_from_slice(&WANTS_MAGIC.to_le_bytes());
        assert_eq!(ContentRequest::rest_bytes(&head).unwrap(), 0);
        head[2] = 65;
        assert!(ContentRequest::rest_bytes(&head).is_err());
        head[2] = 1;
        assert!(ContentRequest::parse(&head, &[0xff]).is_err(), "no text");
        head[4..6].copy_from_slice(&129_u16.to_le_bytes());
        assert!(ContentRequest::rest_bytes(&head).is_err());
        let mut answer = Vec::new();
        HasHeader::write_for(&[Name([1; NAME_BYTES])], &[], 0, PAGE_BYTES, &mut answer);
        let mut head: [u8; HasHeader::BYTES] = *answer.first_chunk().unwrap();
        assert!(HasHeader::parse(&head).is_ok());
        head[8..].copy_from_slice(&5000_u32.to_le_bytes());
        assert!(HasHeader::parse(&head).is_err());
        head[4..6].copy_from_slice(&1000_u16.to_le_bytes());
        assert!(HasHeader::parse(&head).is_err());
    }
}
