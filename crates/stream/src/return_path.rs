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
    pub fn push(&mut self, bytes: &[u8]) {
        self.sift(bytes, &mut Vec::new());
    }

    /// These were, of which all that is whole goes to `rest`, but for each
    /// [`SWITCHOVER_ACK`]. Says how many those are.
    pub fn sift(&mut self, mut bytes: &[u8], rest: &mut Vec<u8>) -> usize {
        let mut acks = 0;
        while !bytes.is_empty() {
            if self.left > 0 {
                let (content, after) = bytes.split_at(self.left.min(bytes.len()));
                if self.is_shut() && self.message.len() + content.len() <= SHUT.len() {
                    self.message.extend_from_slice(content);
                }
                self.left -= content.len();
                rest.extend_from_slice(content);
                bytes = after;
            } else {
                let missing = HEADER_BYTES - self.message.len();
                let (header, after) = bytes.split_at(missing.min(bytes.len()));
                self.message.extend_from_slice(header);
                bytes = after;
                if let [_, _, high, low] = self.message[..] {
                    self.left = usize::from(u16::from_be_bytes([high, low]));
                    if self.message == SWITCHOVER_ACK {
                        acks += 1;
                    } else {
                        rest.extend_from_slice(&self.message);
                    }
                }
            }
            if self.message.len() >= HEADER_BYTES && self.left == 0 {
                self.end();
            }
        }
        acks
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

    #[test]
    fn acknowledgements_are_taken_out_however_it_is_cut() {
        let pong = [0, 2, 0, 4, 0, 7, 0, 0];
        // Its content looks like one.
        let request = [0, 3, 0, 8, 0, 7, 0, 0, 0, 7, 0, 0];
        let said = [&SWITCHOVER_ACK[..], &pong, &SWITCHOVER_ACK, &request, &SWITCHOVER_ACK, &SHUT]
            .concat();
        for cut in 1..said.len() {
            let (mut follower, mut rest, mut acks) = (Follower::default(), Vec::new(), 0);
            for piece in said.chunks(cut) {
                acks += follower.sift(piece, &mut rest);
            }
            assert_eq!(rest, [&pong[..], &request, &SHUT].concat(), "{cut}");
            assert_eq!((acks, follower.shut()), (3, Some(0)), "{cut}");
        }
    }
}
