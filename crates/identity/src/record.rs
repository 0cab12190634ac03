//! TLS 1.3 records (RFC 8446, section 5): sealing and opening them, without I/O.
//!
//! ```text
//! 0  23   1  3 3   3 length u16   5 sealed: content, its kind, zeros   then tag [16]
//! ```
//!
//! The tag also covers the header, and the nonce is made from the record's number in
//! its direction, so a record that is changed, left out, repeated or moved does not
//! open.

use std::io::IoSlice;

use aws_lc_rs::aead::{AES_128_GCM, AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use rustls::ConnectionTrafficSecrets;

/// The header, before the sealed bytes.
pub(crate) const HEADER_BYTES: usize = 5;
/// The most content in a record.
pub(crate) const CONTENT_BYTES_MAX: usize = 1 << 14;
/// The tag, at the end of the sealed bytes.
const TAG_BYTES: usize = 16;
/// How much longer a record is than its content.
pub(crate) const OVERHEAD_BYTES: usize = HEADER_BYTES + 1 + TAG_BYTES;
/// Most sealed bytes: content, its kind and padding, tag. The standard allows
/// 256 bytes besides the content.
const SEALED_BYTES_MAX: usize = CONTENT_BYTES_MAX + 256;
/// The longest record.
pub(crate) const RECORD_BYTES_MAX: usize = HEADER_BYTES + SEALED_BYTES_MAX;

/// What a record carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Alert,
    Handshake,
    Data,
}

impl Kind {
    pub(crate) const fn code(self) -> u8 {
        match self {
            Self::Alert => 21,
            Self::Handshake => 22,
            Self::Data => 23,
        }
    }

    fn from_code(code: u8) -> Result<Self, RecordError> {
        match code {
            21 => Ok(Self::Alert),
            22 => Ok(Self::Handshake),
            23 => Ok(Self::Data),
            code => Err(RecordError::Kind(code)),
        }
    }
}

/// Why a record can't be opened or sealed. The connection can't be used afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The header is not a record's.
    #[error(
        "the data received is not a TLS record: the connection is damaged, or another program \
         writes to it"
    )]
    Header,
    /// Longer than a record may be.
    #[error("the peer sent a TLS record of {0} bytes, more than there may be")]
    TooLong(usize),
    /// It doesn't open: not what the peer wrote.
    #[error("a TLS record was changed in transit, or was not written by the peer")]
    Forged,
    /// Nothing but padding.
    #[error("the peer sent a TLS record without content")]
    Empty,
    /// Content of a kind that is not allowed now.
    #[error("the peer sent a TLS record of the unexpected kind {0}")]
    Kind(u8),
    /// A handshake message that is not allowed now, or not valid.
    #[error("the peer sent an unexpected TLS message")]
    Message,
    /// Too many records without data in a row.
    #[error("the peer keeps sending TLS records that carry nothing")]
    Idle,
    /// The record numbers of a key are used up.
    #[error("the TLS key is used up")]
    UsedUp,
    /// A cipher that is not allowed, or no new key.
    #[error("no TLS key: {0}")]
    Key(&'static str),
    /// The peer ended with an error.
    #[error(transparent)]
    Refused(#[from] crate::refusal::Refusal),
}

/// A key in one direction, and how often it was used.
pub(crate) struct TrafficKey {
    key: LessSafeKey,
    iv: [u8; 12],
    number: u64,
}

impl std::fmt::Debug for TrafficKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TrafficKey").field("number", &self.number).finish_non_exhaustive()
    }
}

impl TrafficKey {
    /// Takes the secrets that rustls agreed on with the peer; `number` is the next record's.
    pub(crate) fn new(
        (number, secrets): (u64, ConnectionTrafficSecrets),
    ) -> Result<Self, RecordError> {
        let (algorithm, key, iv) = match &secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv } => (&AES_128_GCM, key, iv),
            ConnectionTrafficSecrets::Aes256Gcm { key, iv } => (&AES_256_GCM, key, iv),
            _ => return Err(RecordError::Key("its cipher is not one of ours")),
        };
        let key = UnboundKey::new(algorithm, key.as_ref())
            .map_err(|_| RecordError::Key("its length is another"))?;
        let iv = iv.as_ref().try_into().map_err(|_| RecordError::Key("its length is another"))?;
        Ok(Self { key: LessSafeKey::new(key), iv, number })
    }

    /// How many records it has sealed or opened.
    pub(crate) fn used(&self) -> u64 {
        self.number
    }

    /// The next nonce. Each is used once: the number only rises, and never wraps.
    fn nonce(&mut self) -> Result<Nonce, RecordError> {
        let mut nonce = self.iv;
        for (byte, number) in nonce[4..].iter_mut().zip(self.number.to_be_bytes()) {
            *byte ^= number;
        }
        self.number = self.number.checked_add(1).ok_or(RecordError::UsedUp)?;
        Ok(Nonce::assume_unique_for_key(nonce))
    }

    /// Seals the next `bytes` of `content` as a record at the beginning of
    /// `into`, and returns its length. Both must be long enough, and `bytes` at most
    /// what a record holds.
    pub(crate) fn seal(
        &mut self,
        kind: Kind,
        content: &mut Gather<'_>,
        bytes: usize,
        into: &mut [u8],
    ) -> Result<usize, RecordError> {
        let header = header(bytes + 1 + TAG_BYTES);
        let (front, rest) = into.split_at_mut(HEADER_BYTES);
        front.copy_from_slice(&header);
        let (sealed, rest) = rest.split_at_mut(bytes);
        let (end, _) = rest.split_at_mut(1 + TAG_BYTES);
        let (nonce, aad, kind) = (self.nonce()?, Aad::from(header), [kind.code()]);
        let outcome = if let Some(content) = content.contiguous(bytes) {
            self.key.seal_out_of_place_scatter(nonce, aad, content, sealed, &kind, end)
        } else {
            content.copy_to(sealed);
            self.key.seal_in_place_scatter(nonce, aad, sealed, &kind, end)
        };
        outcome.map_err(|_| RecordError::Key("it can't seal"))?;
        Ok(bytes + OVERHEAD_BYTES)
    }

    /// Opens a record into `into`, whose length must be [`inner_bytes`] of the record.
    /// Returns how much of `into` is content, and of which kind. After an error, `into`
    /// holds nothing meaningful.
    pub(crate) fn open(
        &mut self,
        header: [u8; HEADER_BYTES],
        sealed: &[u8],
        into: &mut [u8],
    ) -> Result<(Kind, usize), RecordError> {
        let (nonce, aad) = (self.nonce()?, Aad::from(header));
        let (text, tag) = split_tag(sealed)?;
        self.key
            .open_separate_gather(nonce, aad, text, tag, into)
            .map_err(|_| RecordError::Forged)?;
        content_of(into)
    }

    /// Opens a record in place.
    pub(crate) fn open_in_place(
        &mut self,
        header: [u8; HEADER_BYTES],
        sealed: &mut [u8],
    ) -> Result<(Kind, usize), RecordError> {
        let (nonce, aad) = (self.nonce()?, Aad::from(header));
        let inner = self.key.open_in_place(nonce, aad, sealed).map_err(|_| RecordError::Forged)?;
        content_of(inner)
    }
}

fn split_tag(sealed: &[u8]) -> Result<(&[u8], &[u8]), RecordError> {
    sealed.split_at_checked(sealed.len().wrapping_sub(TAG_BYTES)).ok_or(RecordError::Empty)
}

/// The last byte that isn't zero is the kind; before it is the content.
fn content_of(inner: &[u8]) -> Result<(Kind, usize), RecordError> {
    let at = inner.iter().rposition(|byte| *byte != 0).ok_or(RecordError::Empty)?;
    if at > CONTENT_BYTES_MAX {
        return Err(RecordError::TooLong(at));
    }
    Ok((Kind::from_code(inner[at])?, at))
}

/// The header of every record between agents.
fn header(sealed_bytes: usize) -> [u8; HEADER_BYTES] {
    let [.., high, low] = sealed_bytes.to_be_bytes();
    [Kind::Data.code(), 3, 3, high, low]
}

/// The number of sealed bytes that a record's header gives.
pub(crate) fn sealed_bytes(header: [u8; HEADER_BYTES]) -> Result<usize, RecordError> {
    let [kind, major, minor, high, low] = header;
    if (kind, major, minor) != (Kind::Data.code(), 3, 3) {
        return Err(RecordError::Header);
    }
    match usize::from(u16::from_be_bytes([high, low])) {
        bytes if bytes > SEALED_BYTES_MAX => Err(RecordError::TooLong(bytes)),
        bytes if bytes <= TAG_BYTES => Err(RecordError::Empty),
        bytes => Ok(bytes),
    }
}

/// The length of content, kind and padding of a record with `sealed_bytes`.
pub(crate) fn inner_bytes(sealed_bytes: usize) -> usize {
    sealed_bytes.saturating_sub(TAG_BYTES)
}

/// Bytes of several slices, taken one after the other.
pub(crate) struct Gather<'s> {
    slices: std::slice::Iter<'s, IoSlice<'s>>,
    front: &'s [u8],
}

impl<'s> Gather<'s> {
    pub(crate) fn new(slices: &'s [IoSlice<'s>]) -> Self {
        Self { slices: slices.iter(), front: &[] }
    }

    pub(crate) fn one(bytes: &'s [u8]) -> Self {
        Self { slices: [].iter(), front: bytes }
    }

    /// The next `bytes`, if one slice holds them all.
    fn contiguous(&mut self, bytes: usize) -> Option<&'s [u8]> {
        self.advance();
        let (taken, rest) = self.front.split_at_checked(bytes)?;
        self.front = rest;
        Some(taken)
    }

    /// Copies the next bytes, as many as fit.
    fn copy_to(&mut self, mut into: &mut [u8]) {
        while !into.is_empty() {
            self.advance();
            let count = self.front.len().min(into.len());
            if count == 0 {
                return;
            }
            let (now, after) = into.split_at_mut(count);
            let (taken, rest) = self.front.split_at(count);
            now.copy_from_slice(taken);
            (into, self.front) = (after, rest);
        }
    }

    /// Moves on to a slice with bytes, if there is one.
    fn advance(&mut self) {
        while self.front.is_empty()
            && let Some(slice) = self.slices.next()
        {
            self.front = slice;
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;
    use rustls::crypto::cipher::{AeadKey, Iv};

    use super::*;

    pub(crate) fn key() -> TrafficKey {
        let secrets = ConnectionTrafficSecrets::Aes256Gcm {
            key: AeadKey::from([7; 32]),
            iv: Iv::from([9; 12]),
        };
        TrafficKey::new((0, secrets)).unwrap()
    }

    fn sealed(key: &mut TrafficKey, kind: Kind, content: &[u8]) -> Vec<u8> {
        let mut record = vec![0; content.len() + OVERHEAD_BYTES];
        let length = key.seal(kind, &mut Gather::one(content), content.len(), &mut record).unwrap();
        assert_eq!(length, record.len());
        record
    }

    fn opened(key: &mut TrafficKey, record: &[u8]) -> Result<(Kind, Vec<u8>), RecordError> {
        let header = *record.first_chunk().unwrap();
        let sealed = &record[HEADER_BYTES..];
        assert_eq!(sealed_bytes(header)?, sealed.len());
        let mut inner = vec![0xaa; inner_bytes(sealed.len())];
        let (kind, bytes) = key.open(header, sealed, &mut inner)?;
        Ok((kind, inner[..bytes].to_vec()))
    }

    proptest! {
        #[test]
        fn sealed_content_opens_however_it_was_sliced(
            content in proptest::collection::vec(any::<u8>(), 0..5000),
            cuts in proptest::collection::vec(0..5000_usize, 0..6),
            in_place: bool,
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(content.len())).collect();
            cuts.extend([0, content.len()]);
            cuts.sort_unstable();
            let slices: Vec<_> =
                cuts.windows(2).map(|two| IoSlice::new(&content[two[0]..two[1]])).collect();
            let mut record = vec![0; content.len() + OVERHEAD_BYTES];
            let (mut ours, mut theirs) = (key(), key());
            ours.seal(Kind::Data, &mut Gather::new(&slices), content.len(), &mut record).unwrap();
            if in_place {
                let header = *record.first_chunk().unwrap();
                let sealed = &mut record[HEADER_BYTES..];
                let found = theirs.open_in_place(header, sealed).unwrap();
                prop_assert_eq!(found, (Kind::Data, content.len()));
                prop_assert!(sealed[..content.len()] == content);
            } else {
                prop_assert_eq!(opened(&mut theirs, &record), Ok((Kind::Data, content)));
            }
        }

        #[test]
        fn one_changed_bit_does_not_open(at in 0..50_usize, bit in 0..8_u32) {
            let mut record = sealed(&mut key(), Kind::Data, &[5; 28]);
            record[at] ^= 1 << bit;
            // A changed length is noticed before the record is opened.
            let length_is_kept = sealed_bytes(*record.first_chunk().unwrap()) == Ok(28 + 17);
            if length_is_kept {
                prop_assert_eq!(opened(&mut key(), &record), Err(RecordError::Forged));
            }
        }
    }

    #[test]
    fn a_record_left_out_or_repeated_does_not_open() {
        let mut ours = key();
        let first = sealed(&mut ours, Kind::Data, b"first");
        let second = sealed(&mut ours, Kind::Data, b"second");
        assert_eq!(opened(&mut key(), &second), Err(RecordError::Forged));
        let mut theirs = key();
        assert!(opened(&mut theirs, &first).is_ok());
        assert_eq!(opened(&mut theirs, &first), Err(RecordError::Forged));
    }

    #[test]
    fn padding_is_removed_and_padding_alone_is_refused() {
        let inner = [b"abc".as_slice(), &[23], &[0; 200]].concat();
        assert_eq!(content_of(&inner), Ok((Kind::Data, 3)));
        assert_eq!(content_of(&[0; 9]), Err(RecordError::Empty));
        assert_eq!(content_of(&[]), Err(RecordError::Empty));
        assert_eq!(content_of(&[1, 20]), Err(RecordError::Kind(20)));
        let long = [vec![1; CONTENT_BYTES_MAX + 1], vec![23]].concat();
        assert_eq!(content_of(&long), Err(RecordError::TooLong(CONTENT_BYTES_MAX + 1)));
    }

    #[test]
    fn invalid_headers_are_refused() {
        for (header, error) in [
            (*b"DROVE", RecordError::Header),
            ([22, 3, 3, 0, 100], RecordError::Header),
            ([23, 3, 1, 0, 100], RecordError::Header),
            ([23, 3, 3, 0xff, 0xff], RecordError::TooLong(0xffff)),
            ([23, 3, 3, 0, 16], RecordError::Empty),
        ] {
            assert_eq!(sealed_bytes(header), Err(error));
        }
        assert_eq!(sealed_bytes(header(SEALED_BYTES_MAX)), Ok(SEALED_BYTES_MAX));
    }

    #[test]
    fn a_key_is_not_used_beyond_its_last_number() {
        let mut key = key();
        key.number = u64::MAX;
        let outcome = key.seal(Kind::Data, &mut Gather::one(b""), 0, &mut [0; OVERHEAD_BYTES]);
        assert_eq!(outcome, Err(RecordError::UsedUp));
    }
}
