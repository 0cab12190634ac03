//! The parts of a stream that are the same for every domain of a kind: the receiver compares them
//! byte by byte.

use std::io::{self, Read};

use serde_json::Value;
use xen::{DomainKind, write};

use super::store::config;

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

/// All that precedes the pages: the configuration has its length before it, and a zero byte after
/// it.
pub(super) fn beginning(config: &Value, kind: DomainKind) -> io::Result<Vec<u8>> {
    let config = config.to_string();
    let length = u32::try_from(config.len() + 1).map_err(io::Error::other)?;
    let mut text = Vec::with_capacity(LENGTH_BYTES + config.len() + 1);
    text.extend_from_slice(&length.to_le_bytes());
    text.extend_from_slice(config.as_bytes());
    text.push(0);
    let mut out = Vec::new();
    write::xl_header(&mut out, &text);
    out.extend(before_pages(kind));
    Ok(out)
}

/// All that precedes the pages of a domain that does not exist.
///
/// # Panics
/// If its name is longer than 4 GiB.
#[must_use]
pub fn made_up(name: &str, kind: DomainKind, pages: u32) -> Vec<u8> {
    beginning(&config(name, kind, pages), kind).unwrap()
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
