//! Encodes and decodes numbers and texts.

use crate::Fault;

/// The most bytes of a 64-bit number, with seven bits in each.
pub(crate) const VARINT_BYTES_MAX: usize = 10;

/// Writes a number as a varint: seven bits a byte, the lowest first, and a bit that says whether
/// more bytes follow.
pub(crate) fn put(mut number: u64, out: &mut Vec<u8>) {
    loop {
        let low = number.to_le_bytes()[0] & 0x7f;
        number >>= 7;
        if number == 0 {
            out.push(low);
            return;
        }
        out.push(low | 0x80);
    }
}

/// Writes a signed number that is close to 0, in few bytes.
pub(crate) fn put_signed(number: i64, out: &mut Vec<u8>) {
    put(((number << 1) ^ (number >> 63)).cast_unsigned(), out);
}

/// Writes a text, after its length.
pub(crate) fn put_text(text: &str, out: &mut Vec<u8>) {
    put(text.len() as u64, out);
    out.extend_from_slice(text.as_bytes());
}

/// The unread rest of a frame's content.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cursor<'a>(pub(crate) &'a [u8]);

impl<'a> Cursor<'a> {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn byte(&mut self) -> Result<u8, Fault> {
        let (first, rest) = self.0.split_first().ok_or(Fault::CutShort)?;
        self.0 = rest;
        Ok(*first)
    }

    pub(crate) fn number(&mut self) -> Result<u64, Fault> {
        let mut number = 0_u64;
        for nth in 0..VARINT_BYTES_MAX {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            // Only one bit of the last byte fits.
            if nth == VARINT_BYTES_MAX - 1 && bits > 1 {
                break;
            }
            number |= bits << (7 * nth);
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(Fault::Number)
    }

    pub(crate) fn signed(&mut self) -> Result<i64, Fault> {
        let number = self.number()?;
        Ok((number >> 1).cast_signed() ^ -(number & 1).cast_signed())
    }

    /// A text of at most `bytes_max` bytes of printable ASCII, because it gets into logs.
    pub(crate) fn text(&mut self, bytes_max: usize) -> Result<&'a str, Fault> {
        let bytes = usize::try_from(self.number()?).unwrap_or(usize::MAX);
        if bytes > bytes_max {
            return Err(Fault::Text);
        }
        let (text, rest) = self.0.split_at_checked(bytes).ok_or(Fault::CutShort)?;
        self.0 = rest;
        printable(text).ok_or(Fault::Text)
    }

    pub(crate) fn end(&self) -> Result<(), Fault> {
        if self.is_empty() { Ok(()) } else { Err(Fault::TooMuch) }
    }
}

/// The bytes as a text, if all are printable ASCII.
pub(crate) fn printable(bytes: &[u8]) -> Option<&str> {
    let is_text = bytes.iter().all(|byte| matches!(byte, b' '..=b'~'));
    std::str::from_utf8(bytes).ok().filter(|_| is_text)
}

/// The text without characters that are not printable ASCII, and cut short.
pub(crate) fn cleaned(text: &str, bytes_max: usize) -> String {
    text.chars().filter(|letter| matches!(letter, ' '..='~')).take(bytes_max).collect()
}

/// A checksum over sent bytes: it finds damage, not malice.
pub(crate) fn checksum(parts: &[&[u8]]) -> u64 {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(part);
    }
    let mut first = [0; 8];
    for (to, from) in first.iter_mut().zip(hasher.finalize().as_bytes()) {
        *to = *from;
    }
    u64::from_le_bytes(first)
}

/// The `BYTES` bytes at `at`. Zeros beyond the end, which no caller requests.
pub(crate) fn at<const BYTES: usize>(bytes: &[u8], at: usize) -> [u8; BYTES] {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; BYTES])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn numbers_come_back(number in any::<u64>(), shift in 0..64_u32, signed in any::<i64>()) {
            let mut bytes = Vec::new();
            put(number >> shift, &mut bytes);
            put_signed(signed >> shift, &mut bytes);
            put_text("a text", &mut bytes);
            let mut cursor = Cursor(&bytes);
            prop_assert_eq!(cursor.number(), Ok(number >> shift));
            prop_assert_eq!(cursor.signed(), Ok(signed >> shift));
            prop_assert_eq!(cursor.text(6), Ok("a text"));
            prop_assert_eq!(cursor.end(), Ok(()));
        }
    }

    #[test]
    fn what_is_no_number_and_no_text_is_refused() {
        assert_eq!(Cursor(&[0x80]).number(), Err(Fault::CutShort));
        assert_eq!(Cursor(&[0xff; 10]).number(), Err(Fault::Number));
        assert_eq!(Cursor(&[0xff; 11]).number(), Err(Fault::Number));
        assert_eq!(Cursor(&[5, b'a', b'b']).text(9), Err(Fault::CutShort));
        assert_eq!(Cursor(&[2, b'a', b'b']).text(1), Err(Fault::Text));
        assert_eq!(Cursor(&[2, b'a', 7]).text(9), Err(Fault::Text));
        assert_eq!(Cursor(&[1]).end(), Err(Fault::TooMuch));
        assert_eq!(cleaned("a\n\u{1b}[1mb\u{e4}c", 6), "a[1mbc");
    }
}
