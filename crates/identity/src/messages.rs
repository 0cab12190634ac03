//! Handshake messages after the handshake: tickets and new keys.

use crate::keys::Keys;
use crate::record::{RecordError, TrafficKey};

/// A ticket carries the certificates of the end that receives it: some KiB.
const MESSAGE_BYTES_MAX: usize = 16 << 10;
/// Kind and length before each.
const HEADER_BYTES: usize = 4;
const NEW_SESSION_TICKET: u8 = 4;
const KEY_UPDATE: u8 = 24;

/// The message after which the sender uses a new key.
pub(crate) const KEY_UPDATE_MESSAGE: [u8; 5] = [KEY_UPDATE, 0, 0, 1, 0];

/// The received part of a message that is not complete yet.
#[derive(Debug, Default)]
pub(crate) struct Messages {
    begun: Vec<u8>,
}

impl Messages {
    /// Whether a message has started and not ended: no other kind of record may interrupt it.
    pub(crate) fn is_within(&self) -> bool {
        !self.begun.is_empty()
    }

    /// Processes a record's content. A new key is stored in `key`.
    pub(crate) fn take(
        &mut self,
        content: &[u8],
        keys: &Keys,
        key: &mut TrafficKey,
    ) -> Result<(), RecordError> {
        // The size of a record bounds what is added; this bounds what was there before.
        if self.begun.len() > HEADER_BYTES + MESSAGE_BYTES_MAX {
            return Err(RecordError::Message);
        }
        self.begun.extend_from_slice(content);
        let mut rest = &self.begun[..];
        while let Some(([kind, length @ ..], after)) = rest.split_first_chunk::<HEADER_BYTES>() {
            let [high, middle, low] = *length;
            let bytes = u32::from_be_bytes([0, high, middle, low]) as usize;
            if bytes > MESSAGE_BYTES_MAX {
                return Err(RecordError::Message);
            }
            let Some((body, after)) = after.split_at_checked(bytes) else { break };
            match (*kind, body) {
                (NEW_SESSION_TICKET, ticket) => keys.schedule().ticket(ticket)?,
                (KEY_UPDATE, [asked @ (0 | 1)]) => {
                    // Nothing may follow in this record, which has the old key.
                    if !after.is_empty() {
                        return Err(RecordError::Message);
                    }
                    *key = keys.schedule().next_to_open()?;
                    if *asked == 1 {
                        keys.ask_update();
                    }
                }
                _ => return Err(RecordError::Message),
            }
            rest = after;
        }
        let taken = self.begun.len() - rest.len();
        self.begun.drain(..taken);
        Ok(())
    }
}
