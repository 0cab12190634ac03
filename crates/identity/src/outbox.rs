//! Records to the peer: bytes in, sealed records out. No I/O.

use std::io::IoSlice;
use std::sync::Arc;

use rustls::AlertDescription;

use crate::keys::Keys;
use crate::messages::KEY_UPDATE_MESSAGE;
use crate::record::{CONTENT_BYTES_MAX, Gather, Kind, OVERHEAD_BYTES, RecordError, TrafficKey};

/// Most records per system call: a lane's batch with its head has 33, and should
/// wake its reader once.
const RECORDS: usize = 40;
/// Most bytes sealed at once.
pub(crate) const BATCH_BYTES_MAX: usize = RECORDS * CONTENT_BYTES_MAX;
/// Most records with one key, 128 GiB: half of what AES-GCM allows (RFC 8446,
/// section 5.5).
const KEY_RECORDS_MAX: u64 = 1 << 23;

/// The sealing half of a connection.
pub(crate) struct Outbox {
    key: TrafficKey,
    keys: Arc<Keys>,
    key_records_max: u64,
    buffer: Vec<u8>,
}

impl Outbox {
    pub(crate) fn new(key: TrafficKey, keys: Arc<Keys>) -> Self {
        Self { key, keys, key_records_max: KEY_RECORDS_MAX, buffer: Vec::new() }
    }

    /// Seals the first bytes of `slices`, at most a batch. Returns how many,
    /// and the records.
    pub(crate) fn seal(&mut self, slices: &[IoSlice<'_>]) -> Result<(usize, &[u8]), RecordError> {
        let wanted = slices.iter().fold(0, |sum: usize, slice| sum.saturating_add(slice.len()));
        let taken = wanted.min(BATCH_BYTES_MAX);
        let records = taken.div_ceil(CONTENT_BYTES_MAX);
        self.grow(taken + (records + 1) * OVERHEAD_BYTES + KEY_UPDATE_MESSAGE.len());
        let mut content = Gather::new(slices);
        let (mut filled, mut left) = (self.change_key()?, taken);
        while left > 0 {
            let bytes = left.min(CONTENT_BYTES_MAX);
            let into = &mut self.buffer[filled..];
            filled += self.key.seal(Kind::Data, &mut content, bytes, into)?;
            left -= bytes;
        }
        Ok((taken, &self.buffer[..filled]))
    }

    /// Seals the last record, which says why the connection ends.
    pub(crate) fn seal_end(&mut self, why: AlertDescription) -> Result<&[u8], RecordError> {
        // The first byte is a level, which TLS 1.3 ignores.
        let alert = [2, u8::from(why)];
        self.grow(alert.len() + OVERHEAD_BYTES);
        let content = &mut Gather::one(&alert);
        let bytes = self.key.seal(Kind::Alert, content, alert.len(), &mut self.buffer)?;
        Ok(&self.buffer[..bytes])
    }

    /// Grows the buffer to the largest size that was needed so far.
    fn grow(&mut self, bytes: usize) {
        if self.buffer.len() < bytes {
            self.buffer.resize(bytes, 0);
        }
    }

    /// Changes to a new key if it is due, or if the peer has asked for it. Returns the
    /// length of the record that says so.
    fn change_key(&mut self) -> Result<usize, RecordError> {
        if self.key.used() < self.key_records_max && !self.keys.is_update_asked() {
            return Ok(0);
        }
        let content = &mut Gather::one(&KEY_UPDATE_MESSAGE);
        let bytes = KEY_UPDATE_MESSAGE.len();
        let sealed = self.key.seal(Kind::Handshake, content, bytes, &mut self.buffer)?;
        self.key = self.keys.schedule().next_to_seal()?;
        Ok(sealed)
    }
}

#[cfg(test)]
impl Outbox {
    /// Changes the key after that many records.
    pub(crate) fn change_key_after(&mut self, records: u64) {
        self.key_records_max = records;
    }

    /// The record that changes this end's key and asks the peer to change its own.
    pub(crate) fn seal_key_update_asking(&mut self) -> Vec<u8> {
        let mut message = KEY_UPDATE_MESSAGE;
        message[4] = 1;
        self.grow(message.len() + OVERHEAD_BYTES);
        let content = &mut Gather::one(&message);
        let sealed = self.key.seal(Kind::Handshake, content, message.len(), &mut self.buffer);
        self.key = self.keys.schedule().next_to_seal().unwrap();
        self.buffer[..sealed.unwrap()].to_vec()
    }
}
