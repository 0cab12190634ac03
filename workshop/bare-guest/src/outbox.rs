//! Output of the guest that the port hasn't taken yet.

use core::fmt;

const BYTES: usize = 2048;

/// The longest line: an answer with the longest id and a wrong page.
const LINE_MAX: usize = 512;

/// Bytes in the order in which they were written.
pub(crate) struct Outbox {
    bytes: [u8; BYTES],
    first: usize,
    len: usize,
}

impl Outbox {
    pub(crate) const EMPTY: Self = Self { bytes: [0; BYTES], first: 0, len: 0 };

    /// Whether any line still fits.
    pub(crate) fn has_room(&self) -> bool {
        BYTES - self.len >= LINE_MAX
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Passes the next bytes to `take`, which returns how many it takes, until it takes none.
    pub(crate) fn drain(&mut self, mut take: impl FnMut(&[u8]) -> usize) {
        while self.len > 0 {
            let end = BYTES.min(self.first + self.len);
            let taken = take(&self.bytes[self.first..end]).min(end - self.first);
            if taken == 0 {
                return;
            }
            self.first = (self.first + taken) % BYTES;
            self.len -= taken;
        }
    }
}

impl fmt::Write for Outbox {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            if self.len == BYTES {
                return Err(fmt::Error);
            }
            self.bytes[(self.first + self.len) % BYTES] = byte;
            self.len += 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use super::*;

    #[test]
    fn all_comes_out_in_order_whatever_is_taken() {
        let (mut outbox, mut said, mut taken) = (Outbox::EMPTY, String::new(), String::new());
        for round in 0..500 {
            let line = format!("line {round}\n");
            outbox.write_str(&line).unwrap();
            said += &line;
            let mut left = round % 21;
            outbox.drain(|bytes| {
                let count = bytes.len().min(left).min(7);
                left -= count;
                taken += str::from_utf8(&bytes[..count]).unwrap();
                count
            });
            assert!(outbox.has_room(), "{round}");
        }
        outbox.drain(|bytes| {
            taken += str::from_utf8(bytes).unwrap();
            bytes.len()
        });
        assert!(outbox.is_empty());
        assert_eq!(taken, said);
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let mut outbox = Outbox::EMPTY;
        outbox.write_str(&"x".repeat(BYTES - LINE_MAX + 1)).unwrap();
        assert!(!outbox.has_room());
        assert!(outbox.write_str(&"x".repeat(LINE_MAX)).is_err());
    }
}
