//! Entry points for the fuzzers (`workshop/fuzz/`), and for the seeded runs in this
//! crate's tests: any bytes from the network, and anything that an authenticated
//! peer sends, are read or refused.

use rustls::ConnectionTrafficSecrets;
use rustls::crypto::cipher::{AeadKey, Iv};

use crate::inbox::{Inbox, Taken};
use crate::keys::{Keys, Schedule};
use crate::record::{CONTENT_BYTES_MAX, Gather, Kind, OVERHEAD_BYTES, RecordError, TrafficKey};

/// A schedule with one fixed key, since a fuzzer can't guess keys.
struct Same;

fn key() -> Result<TrafficKey, RecordError> {
    let (key, iv) = (AeadKey::from([7; 32]), Iv::from([9; 12]));
    TrafficKey::new((0, ConnectionTrafficSecrets::Aes256Gcm { key, iv }))
}

impl Schedule for Same {
    fn next_to_seal(&mut self) -> Result<TrafficKey, RecordError> {
        key()
    }

    fn next_to_open(&mut self) -> Result<TrafficKey, RecordError> {
        key()
    }

    fn ticket(&mut self, _: &[u8]) -> Result<(), RecordError> {
        Ok(())
    }
}

/// Reads what anybody can write into a connection: bytes not sealed with its key.
pub fn stranger(bytes: &[u8]) {
    let Ok(key) = key() else { return };
    let mut inbox = Inbox::new(key, &[]);
    read_all(&mut inbox, bytes);
}

/// Reads what only the peer can send: properly sealed records of any content. For
/// each, `bytes` has a byte for its kind, two for its length, and its content.
pub fn peer(mut bytes: &[u8]) {
    let (Ok(mut ours), Ok(theirs)) = (key(), key()) else { return };
    let mut inbox = Inbox::new(theirs, &[]);
    while let Some(([kind, high, low], rest)) = bytes.split_first_chunk() {
        let kind = match kind % 3 {
            0 => Kind::Data,
            1 => Kind::Handshake,
            _ => Kind::Alert,
        };
        let wanted = usize::from(u16::from_be_bytes([*high, *low])).min(CONTENT_BYTES_MAX);
        let (content, after) = rest.split_at(wanted.min(rest.len()));
        let mut record = vec![0; content.len() + OVERHEAD_BYTES];
        let sealed = ours.seal(kind, &mut Gather::one(content), content.len(), &mut record);
        let Ok(sealed) = sealed else { return };
        read_all(&mut inbox, &record[..sealed]);
        bytes = after;
    }
}

/// Feeds bytes in pieces of many lengths, and takes the output likewise.
fn read_all(inbox: &mut Inbox, mut bytes: &[u8]) {
    let keys = Keys::new(Box::new(Same));
    let mut into = [0; 4096];
    let mut length = 1;
    while !bytes.is_empty() {
        length = length * 7 % 4093 + 1;
        let room = inbox.room();
        let count = room.len().min(bytes.len()).min(length);
        assert!(count > 0, "there is always room");
        let (now, after) = bytes.split_at(count);
        room[..count].copy_from_slice(now);
        inbox.came(count);
        bytes = after;
        loop {
            match inbox.take(&mut into[..length], &keys) {
                Ok(Taken::Bytes(taken)) => assert!(taken > 0 && taken <= length),
                Ok(Taken::Nothing) => break,
                Ok(Taken::Ended) | Err(_) => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..40_000)) {
            stranger(&bytes);
            peer(&bytes);
        }

        #[test]
        fn messages_after_the_handshake_are_read_or_refused(
            bodies in proptest::collection::vec((0..30_u8, 0..3000_usize, any::<u8>()), 0..20),
        ) {
            let mut bytes = Vec::new();
            for (kind, length, content) in bodies {
                let [_, _, high, low] = u32::try_from(length).unwrap().to_be_bytes();
                let message =
                    [vec![if kind < 15 { 4 } else { kind }, 0, high, low], vec![content; length]]
                        .concat();
                let bytes_now = u16::try_from(message.len()).unwrap();
                bytes.push(1);
                bytes.extend(bytes_now.to_be_bytes());
                bytes.extend(message);
            }
            peer(&bytes);
        }
    }
}
