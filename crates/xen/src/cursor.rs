//! Reads the numbers of a header from the front of a slice.

/// The header needs at least this many bytes, counted from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Short(pub(crate) usize);

#[derive(Clone, Debug)]
pub(crate) struct Cursor<'a> {
    rest: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    /// A cursor over a header of `count` bytes, all of which must be available.
    pub(crate) fn over(bytes: &'a [u8], count: usize) -> Result<Self, Short> {
        Ok(Self { rest: bytes.get(..count).ok_or(Short(count))?, at: 0 })
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Short> {
        let end = self.at + N;
        let (array, rest) = self.rest.split_first_chunk::<N>().ok_or(Short(end))?;
        (self.rest, self.at) = (rest, end);
        Ok(*array)
    }

    pub(crate) fn le_u16(&mut self) -> Result<u16, Short> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn le_u32(&mut self) -> Result<u32, Short> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn be_u16(&mut self) -> Result<u16, Short> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn be_u32(&mut self) -> Result<u32, Short> {
        self.array().map(u32::from_be_bytes)
    }
}
