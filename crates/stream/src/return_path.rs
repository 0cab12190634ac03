//! What a destination answers on the main channel, with the capability
//! `return-path`: messages of a be16 kind, a be16 length and that many bytes.

/// The destination is ready for the VM to stop. A source with the capability
/// `switchover-ack` (8.1 and newer) does not stop a running VM before.
pub const SWITCHOVER_ACK: [u8; 4] = [0, 7, 0, 0];

/// The destination has no more to say, and nothing went wrong. A source that
/// listens does not end its migration before.
pub const SHUT: [u8; 8] = [0, 1, 0, 4, 0, 0, 0, 0];

const KIND_SHUT: u16 = 1;
const HEADER_BYTES: usize = 4;

/// Reads along what a destination answers, however it is cut, to see its last word.
#[derive(Debug, Default)]
pub struct Follower {
    /// Of the message at hand: its header and, of SHUT, its value.
    message: Vec<u8>,
    /// Of its content, what is still to come.
    left: usize,
    shut: Option<u32>,
}

impl Follower {
    /// These bytes were answered next.
    pub fn push(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.left > 0 {
                let (content, rest) = bytes.split_at(self.left.min(bytes.len()));
                if self.is_shut() && self.message.len() + content.len() <= SHUT.len() {
                    self.message.extend_from_slice(content);
                }
                self.left -= content.len();
                bytes = rest;
            } else {
                let missing = HEADER_BYTES - self.message.len();
                let (header, rest) = bytes.split_at(missing.min(bytes.len()));
                self.message.extend_from_slice(header);
                bytes = rest;
                if let [_, _, high, low] = self.message[..] {
                    self.left = usize::from(u16::from_be_bytes([high, low]));
                }
            }
            if self.message.len() >= HEADER_BYTES && self.left == 0 {
                self.end();
            }
        }
    }

    /// What the destination said last: 0 if it has loaded the VM.
    #[must_use]
    pub fn shut(&self) -> Option<u32> {
        self.shut
    }

    fn is_shut(&self) -> bool {
        self.message.first_chunk::<2>() == Some(&KIND_SHUT.to_be_bytes())
    }

    fn end(&mut self) {
        if self.is_shut()
            && let Some(value) = self.message.get(HEADER_BYTES..).and_then(<[u8]>::first_chunk)
        {
            self.shut = Some(u32::from_be_bytes(*value));
        }
        self.message.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_word_is_found_however_it_is_cut() {
        let pong = [0, 2, 0, 4, 0, 0, 0, 1];
        let request = [0, 3, 0, 13, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 0, 4, 0];
        let said = [&pong[..], &SWITCHOVER_ACK, &request, &SHUT].concat();
        for cut in 1..said.len() {
            let mut follower = Follower::default();
            for piece in said.chunks(cut) {
                assert_eq!(follower.shut(), None);
                follower.push(piece);
            }
            assert_eq!(follower.shut(), Some(0), "{cut}");
        }
        let mut follower = Follower::default();
        follower.push(&[0, 1, 0, 4, 0, 0, 0, 5]);
        assert_eq!(follower.shut(), Some(5));
        // One without a value, and a longer one, are none.
        let mut follower = Follower::default();
        follower.push(&[0, 1, 0, 0, 0, 1, 0, 6, 0, 0, 0, 0, 0, 0]);
        assert_eq!(follower.shut(), None);
    }
}
