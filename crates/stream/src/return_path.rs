//! A destination's answers on the main channel, with the capability `return-path`:
//! messages of a be16 kind, a be16 length and that many bytes.

/// The destination is ready for the VM to stop. A source with the capability
/// `switchover-ack` (8.1 and newer) does not stop a running VM before this.
pub const SWITCHOVER_ACK: [u8; 4] = [0, 7, 0, 0];

/// The destination has no more answers, and succeeded. A source that listens does
/// not end its migration before this.
pub const SHUT: [u8; 8] = [0, 1, 0, 4, 0, 0, 0, 0];

const KIND_SHUT: u16 = 1;
/// Both kinds of a request for pages (REQ_PAGES_ID, REQ_PAGES).
const KINDS_REQ_PAGES: [u16; 2] = [3, 4];
const HEADER_BYTES: usize = 4;

/// Parses a destination's answers, in pieces of any size, for requests for pages and the
/// final SHUT.
#[derive(Debug, Default)]
pub struct Follower {
    /// The current message: its header and, for SHUT, its value.
    message: Vec<u8>,
    /// Bytes of its content still to come.
    left: usize,
    shut: Option<u32>,
    requests_pages: bool,
}

impl Follower {
    /// Parses the next bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.sift(bytes, &mut Vec::new());
    }

    /// Parses the next bytes and copies complete headers and content to `rest`,
    /// except each [`SWITCHOVER_ACK`]. Returns the number of those.
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

    /// The value of SHUT: 0 if the destination has loaded the VM.
    #[must_use]
    pub fn shut(&self) -> Option<u32> {
        self.shut
    }

    /// Whether it has requested pages: the migration has turned to post-copy.
    #[must_use]
    pub fn requests_pages(&self) -> bool {
        self.requests_pages
    }

    /// The kind of the current message, once its header has started.
    fn kind(&self) -> Option<u16> {
        self.message.first_chunk().map(|kind| u16::from_be_bytes(*kind))
    }

    fn is_shut(&self) -> bool {
        self.kind() == Some(KIND_SHUT)
    }

    fn end(&mut self) {
        if self.is_shut()
            && let Some(value) = self.message.get(HEADER_BYTES..).and_then(<[u8]>::first_chunk)
        {
            self.shut = Some(u32::from_be_bytes(*value));
        }
        self.requests_pages |= self.kind().is_some_and(|kind| KINDS_REQ_PAGES.contains(&kind));
        self.message.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shut_is_found_however_the_answers_are_cut() {
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
        // A SHUT without a value, or with a longer one, doesn't count.
        let mut follower = Follower::default();
        follower.push(&[0, 1, 0, 0, 0, 1, 0, 6, 0, 0, 0, 0, 0, 0]);
        assert_eq!(follower.shut(), None);
    }

    #[test]
    fn requests_for_pages_are_noticed() {
        let pong = [0, 2, 0, 4, 0, 0, 0, 3];
        let mut follower = Follower::default();
        follower.push(&[&pong[..], &SWITCHOVER_ACK, &SHUT].concat());
        assert!(!follower.requests_pages());
        for kind in [3, 4] {
            let request = [0, kind, 0, 2, 9, 9];
            let mut follower = Follower::default();
            follower.push(&[&pong[..], &request[..5]].concat());
            assert!(!follower.requests_pages());
            follower.push(&request[5..]);
            assert!(follower.requests_pages());
        }
    }

    #[test]
    fn acknowledgements_are_removed_however_the_answers_are_cut() {
        let pong = [0, 2, 0, 4, 0, 7, 0, 0];
        // Its content looks like an acknowledgement.
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
