//! Reads numbers and names from the front of a slice, and reports how many
//! bytes of an incomplete record are missing.

/// The record needs at least this many bytes, counted from its start; once
/// those are available it may turn out to need more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Short(pub(crate) usize);

#[derive(Clone, Debug)]
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Bytes taken so far.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    pub(crate) fn take(&mut self, count: usize) -> Result<&'a [u8], Short> {
        let end = self.at.saturating_add(count);
        let taken = self.bytes.get(self.at..end).ok_or(Short(end))?;
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Short> {
        let end = self.at.saturating_add(N);
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let array = rest.first_chunk::<N>().ok_or(Short(end))?;
        self.at = end;
        Ok(*array)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Short> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Short> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Short> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Short> {
        self.array().map(u64::from_be_bytes)
    }

    /// A name, preceded by its length in one byte.
    pub(crate) fn name(&mut self) -> Result<&'a [u8], Short> {
        let length = self.u8()?;
        self.take(usize::from(length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_how_much_is_missing() {
        let mut cursor = Cursor::new(&[0, 2, 3, b'a', b'b']);
        assert_eq!(cursor.u16(), Ok(2));
        assert_eq!(cursor.name(), Err(Short(6)));
        let mut cursor = Cursor::new(&[0, 2, 2, b'a', b'b']);
        assert_eq!((cursor.u16(), cursor.name()), (Ok(2), Ok(&b"ab"[..])));
        assert_eq!(cursor.u64(), Err(Short(13)));
        assert_eq!(cursor.at(), 5);
    }
}
