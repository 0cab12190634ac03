//! Numbers in network order, from a slice that may be too short.

use crate::ProtocolError;

/// What is left of a message's content.
pub(crate) struct Content<'a> {
    what: &'static str,
    all: usize,
    rest: &'a [u8],
}

impl<'a> Content<'a> {
    pub(crate) fn of(what: &'static str, bytes: &'a [u8]) -> Self {
        Self { what, all: bytes.len(), rest: bytes }
    }

    pub(crate) fn wrong_length(&self) -> ProtocolError {
        ProtocolError::Length { what: self.what, bytes: self.all as u64 }
    }

    pub(crate) fn u16(&mut self) -> Result<u16, ProtocolError> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, ProtocolError> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, ProtocolError> {
        self.array().map(u64::from_be_bytes)
    }

    /// A text whose length was given.
    pub(crate) fn text(&mut self, bytes: u32) -> Result<&'a str, ProtocolError> {
        let split = usize::try_from(bytes).ok().and_then(|at| self.rest.split_at_checked(at));
        let (text, rest) = split.ok_or_else(|| self.wrong_length())?;
        self.rest = rest;
        str::from_utf8(text).map_err(|_| ProtocolError::Text { what: self.what })
    }

    /// All that is left.
    pub(crate) fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// Checks that nothing is left.
    pub(crate) fn end(&self) -> Result<(), ProtocolError> {
        if self.rest.is_empty() { Ok(()) } else { Err(self.wrong_length()) }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], ProtocolError> {
        let (array, rest) = self.rest.split_first_chunk().ok_or_else(|| self.wrong_length())?;
        self.rest = rest;
        Ok(*array)
    }
}
