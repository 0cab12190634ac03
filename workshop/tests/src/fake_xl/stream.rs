//! The parts of a stream that are the same for every domain of a kind: the receiver compares them
//! byte by byte.

use std::io::{self, Read};

use xen::{DomainKind, write};

/// Bytes of xl's header.
pub(super) const XL_BYTES: usize = 48;
/// Of these, the bytes before the configuration's length.
pub(super) const XL_FIXED_BYTES: usize = 44;
/// Bytes before the configuration's text: its length.
pub(super) const LENGTH_BYTES: usize = 4;

/// What stands between the configuration and the pages.
pub(super) fn before_pages(kind: DomainKind) -> Vec<u8> {
    let mut all = Vec::new();
    write::begin(&mut all, kind);
    let mut header = Vec::new();
    header.extend_from_slice(&all[XL_FIXED_BYTES..XL_BYTES]);
    let config_bytes = u32::from_le_bytes(header.try_into().expect("four bytes"));
    all.split_off(XL_BYTES + config_bytes as usize)
}

/// What follows the pages.
pub(super) fn after_pages(kind: DomainKind) -> Vec<u8> {
    let mut all = Vec::new();
    write::end(&mut all, kind);
    all
}

/// Reads bytes that have to be these.
pub(super) fn expect(input: &mut impl Read, expected: &[u8], what: &str) -> io::Result<()> {
    let mut read = vec![0; expected.len()];
    input.read_exact(&mut read)?;
    if read == expected {
        return Ok(());
    }
    let at = read.iter().zip(expected).take_while(|(one, other)| one == other).count();
    Err(io::Error::other(format!("{what} differs from its byte {at} on")))
}
