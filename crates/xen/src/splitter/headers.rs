//! The headers of xl, libxl and libxc.

use super::Halt;
use crate::cursor::Cursor;
use crate::record::OPTIONAL_BYTES_MAX;
use crate::{Layer, StreamError};

/// `save_file_header` of xl: its first bytes, and a number whose order shows the machine's.
const XL_MAGIC: [u8; 32] = *b"Xen saved domain, xl format\n \0 \r";
const XL_BYTE_ORDER: u32 = 0x0102_0304;
/// The optional data is JSON, which is passed on, and libxl's stream has a header of its own.
const XL_JSON: u32 = 1;
const XL_STREAM_V2: u32 = 2;

const LIBXL_IDENT: [u8; 8] = *b"LibxlFmt";
const LIBXL_VERSION: u32 = 2;
const LIBXL_BIG_ENDIAN: u32 = 1;

const LIBXC_MARKER: [u8; 8] = [0xff; 8];
const LIBXC_IDENT: [u8; 4] = *b"XENF";
const LIBXC_BIG_ENDIAN: u16 = 1;
/// x86's pages.
const PAGE_BITS: u16 = 12;

/// Bytes of xl's header, before the domain's configuration.
pub const XL_HEADER_BYTES: usize = 48;
pub(super) const LIBXL_BYTES: usize = 16;
/// The image header and the domain header.
pub(super) const LIBXC_BYTES: usize = 24 + 16;

/// The kind of a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DomainKind {
    /// It manages its own page tables.
    Pv,
    /// It has virtual hardware: HVM or PVH.
    Hvm,
}

/// The length of the domain's configuration, which follows xl's header.
///
/// # Errors
/// [`StreamError`] if it is no such header.
pub fn configuration_bytes(header: &[u8; XL_HEADER_BYTES]) -> Result<usize, StreamError> {
    match xl(header) {
        Ok(bytes) => Ok(bytes as usize),
        Err(Halt::Wrong(error)) => Err(error),
        Err(_) => Err(StreamError::Header { layer: Layer::Xl }),
    }
}

/// Returns the length of the optional data that follows.
pub(super) fn xl(rest: &[u8]) -> Result<u32, Halt> {
    let mut cursor = Cursor::over(rest, XL_HEADER_BYTES)?;
    let layer = Layer::Xl;
    if cursor.array::<32>()? != XL_MAGIC {
        return Err(StreamError::Header { layer }.into());
    }
    match cursor.le_u32()? {
        XL_BYTE_ORDER => {}
        order if order == XL_BYTE_ORDER.swap_bytes() => {
            return Err(StreamError::BigEndian { layer }.into());
        }
        _ => return Err(StreamError::Header { layer }.into()),
    }
    let (flags, _optional_flags) = (cursor.le_u32()?, cursor.le_u32()?);
    if flags & !(XL_JSON | XL_STREAM_V2) != 0 {
        return Err(StreamError::Flags { flags }.into());
    }
    if flags & XL_STREAM_V2 == 0 {
        return Err(StreamError::Legacy.into());
    }
    let bytes = cursor.le_u32()?;
    if bytes > OPTIONAL_BYTES_MAX {
        return Err(StreamError::OptionalBytes { bytes }.into());
    }
    Ok(bytes)
}

pub(super) fn libxl(rest: &[u8]) -> Result<(), Halt> {
    let mut cursor = Cursor::over(rest, LIBXL_BYTES)?;
    let layer = Layer::Libxl;
    if cursor.array::<8>()? != LIBXL_IDENT {
        return Err(StreamError::Header { layer }.into());
    }
    let (version, options) = (cursor.be_u32()?, cursor.be_u32()?);
    if version != LIBXL_VERSION {
        return Err(StreamError::Version { layer, version }.into());
    }
    if options & LIBXL_BIG_ENDIAN != 0 {
        return Err(StreamError::BigEndian { layer }.into());
    }
    Ok(())
}

pub(super) fn libxc(rest: &[u8]) -> Result<(), Halt> {
    let mut cursor = Cursor::over(rest, LIBXC_BYTES)?;
    let layer = Layer::Libxc;
    if (cursor.array::<8>()?, cursor.array::<4>()?) != (LIBXC_MARKER, LIBXC_IDENT) {
        return Err(StreamError::Header { layer }.into());
    }
    let (format, options) = (cursor.be_u32()?, cursor.be_u16()?);
    if !(2..=3).contains(&format) {
        return Err(StreamError::Version { layer, version: format }.into());
    }
    if options & LIBXC_BIG_ENDIAN != 0 {
        return Err(StreamError::BigEndian { layer }.into());
    }
    let _reserved = cursor.array::<6>()?;
    let (kind, bits) = (cursor.le_u32()?, cursor.le_u16()?);
    // PV, and HVM or PVH.
    if !(1..=2).contains(&kind) {
        return Err(StreamError::DomainKind { kind }.into());
    }
    if bits != PAGE_BITS {
        return Err(StreamError::PageBits { bits }.into());
    }
    Ok(())
}
