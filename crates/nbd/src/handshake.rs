//! The messages until an export is chosen: the greeting, options, and replies
//! to options.

use crate::read::Content;
use crate::{ExportFlags, ProtocolError};

const NBD_MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// The protocol's limit on any text, such as an export's name.
pub const TEXT_BYTES_MAX: usize = 4096;

/// The most content of an option or of a reply to one: a name, and far more
/// kinds of information than there are.
pub const OPTION_BYTES_MAX: usize = 4 * TEXT_BYTES_MAX;

/// The largest payload that is safe with any server or client.
pub const PAYLOAD_BYTES_MAX: u32 = 32 << 20;

/// The protocol's limit on an export's minimum block size.
const MINIMUM_MAX: u32 = 64 << 10;

/// The server replies to options that it doesn't know, and continues.
pub const FIXED_NEWSTYLE: u16 = 1;
/// The 124 zero bytes after EXPORT_NAME's answer are left out.
pub const NO_ZEROES: u16 = 1 << 1;

/// The server's first message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// What the server offers: [`FIXED_NEWSTYLE`], [`NO_ZEROES`].
    pub flags: u16,
}

impl Greeting {
    /// Its size.
    pub const BYTES: usize = 18;

    /// Parses one.
    ///
    /// # Errors
    /// If it is not valid.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, ProtocolError> {
        let mut content = Content::of("the greeting", bytes);
        expect("the greeting", content.u64()?, NBD_MAGIC)?;
        expect("the greeting's second half", content.u64()?, OPTION_MAGIC)?;
        Ok(Self { flags: content.u16()? })
    }

    /// As it is sent.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[..8].copy_from_slice(&NBD_MAGIC.to_be_bytes());
        out[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        out[16..].copy_from_slice(&self.flags.to_be_bytes());
        out
    }
}

/// The code of an option, a client's request in the negotiation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionCode(pub u32);

impl OptionCode {
    /// Chooses an export, the oldest way, without error replies. It is refused here.
    pub const EXPORT_NAME: Self = Self(1);
    /// Ends the negotiation.
    pub const ABORT: Self = Self(2);
    /// Requests the names of all exports.
    pub const LIST: Self = Self(3);
    /// Requests information about an export.
    pub const INFO: Self = Self(6);
    /// Chooses an export.
    pub const GO: Self = Self(7);
}

/// An option without its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHeader {
    /// Its code.
    pub option: OptionCode,
    /// How much content follows.
    pub bytes: u32,
}

impl OptionHeader {
    /// Its size.
    pub const BYTES: usize = 16;

    /// Parses one.
    ///
    /// # Errors
    /// If it is not valid, or announces more than [`OPTION_BYTES_MAX`].
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, ProtocolError> {
        let mut content = Content::of("an option", bytes);
        expect("an option", content.u64()?, OPTION_MAGIC)?;
        let header = Self { option: OptionCode(content.u32()?), bytes: content.u32()? };
        bounded("an option", header.bytes)?;
        Ok(header)
    }

    /// As it is sent.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[..8].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        out[8..12].copy_from_slice(&self.option.0.to_be_bytes());
        out[12..].copy_from_slice(&self.bytes.to_be_bytes());
        out
    }
}

/// The type of a reply to an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer(pub u32);

impl Answer {
    /// Done; nothing more follows.
    pub const ACK: Self = Self(1);
    /// The name of an export.
    pub const SERVER: Self = Self(2);
    /// A piece of information.
    pub const INFO: Self = Self(3);
    /// The server does not know this option.
    pub const UNSUPPORTED: Self = Self(1 << 31 | 1);
    /// The option is invalid.
    pub const INVALID: Self = Self(1 << 31 | 3);
    /// There is no such export.
    pub const UNKNOWN: Self = Self(1 << 31 | 6);

    /// Whether it is an error.
    #[must_use]
    pub fn is_error(self) -> bool {
        self.0 & 1 << 31 != 0
    }
}

/// A reply to an option without its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionReplyHeader {
    /// The option that it answers.
    pub option: OptionCode,
    /// Its type.
    pub answer: Answer,
    /// How much content follows.
    pub bytes: u32,
}

impl OptionReplyHeader {
    /// Its size.
    pub const BYTES: usize = 20;

    /// Parses one.
    ///
    /// # Errors
    /// If it is not valid, or announces more than [`OPTION_BYTES_MAX`].
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, ProtocolError> {
        let mut content = Content::of("a reply to an option", bytes);
        expect("a reply to an option", content.u64()?, OPTION_REPLY_MAGIC)?;
        let (option, answer) = (OptionCode(content.u32()?), Answer(content.u32()?));
        let header = Self { option, answer, bytes: content.u32()? };
        bounded("a reply to an option", header.bytes)?;
        Ok(header)
    }

    /// As it is sent.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[..8].copy_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
        out[8..12].copy_from_slice(&self.option.0.to_be_bytes());
        out[12..16].copy_from_slice(&self.answer.0.to_be_bytes());
        out[16..].copy_from_slice(&self.bytes.to_be_bytes());
        out
    }
}

/// The content of GO and INFO. It also lists the information that the client
/// requests; a server may send all it has anyway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Go<'a> {
    /// The export.
    pub name: &'a str,
}

impl<'a> Go<'a> {
    /// Parses it.
    ///
    /// # Errors
    /// If it is not valid.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, ProtocolError> {
        let mut content = Content::of("the choice of an export", bytes);
        let name_bytes = content.u32()?;
        let name = content.text(name_bytes)?;
        let wanted = content.u16()?;
        if name.len() > TEXT_BYTES_MAX || content.rest().len() != usize::from(wanted) * 2 {
            return Err(content.wrong_length());
        }
        Ok(Self { name })
    }

    /// Writes it as it is sent, with an empty list.
    ///
    /// # Errors
    /// If the name is too long for the protocol.
    pub fn write(self, out: &mut Vec<u8>) -> Result<(), ProtocolError> {
        write_text("an export's name", self.name, out)?;
        out.extend_from_slice(&0_u16.to_be_bytes());
        Ok(())
    }
}

/// Writes an entry of LIST's answer.
///
/// # Errors
/// If the name is too long for the protocol.
pub fn write_name(name: &str, out: &mut Vec<u8>) -> Result<(), ProtocolError> {
    write_text("an export's name", name, out)
}

/// The sizes that requests must keep to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    /// Offsets and lengths are multiples of it, a power of two.
    pub minimum: u32,
    /// Below it, requests are slow; a power of two.
    pub preferred: u32,
    /// No payload is longer.
    pub maximum: u32,
}

impl Default for BlockSizes {
    /// The sizes if the server sends none.
    fn default() -> Self {
        Self { minimum: 1, preferred: 4096, maximum: PAYLOAD_BYTES_MAX }
    }
}

/// A piece of information about an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Info {
    /// Its size and abilities; the only piece that must be sent.
    Export {
        /// Its size.
        bytes: u64,
        /// Its abilities.
        flags: ExportFlags,
    },
    /// Its block sizes.
    BlockSizes(BlockSizes),
    /// Something else.
    Other(u16),
}

impl Info {
    const EXPORT: u16 = 0;
    const BLOCK_SIZES: u16 = 3;
    /// The longest that [`Info::write`] writes.
    pub const BYTES_MAX: usize = 14;

    /// Parses one.
    ///
    /// # Errors
    /// If it is not valid, or if the sizes can't be kept to.
    pub fn parse(bytes: &[u8]) -> Result<Self, ProtocolError> {
        let mut content = Content::of("information about an export", bytes);
        let info = match content.u16()? {
            Self::EXPORT => {
                Self::Export { bytes: content.u64()?, flags: ExportFlags(content.u16()?) }
            }
            Self::BLOCK_SIZES => {
                let (minimum, preferred) = (content.u32()?, content.u32()?);
                let sizes = BlockSizes { minimum, preferred, maximum: content.u32()? };
                let sound = minimum.is_power_of_two() && minimum <= MINIMUM_MAX;
                if !sound || sizes.maximum < minimum {
                    let text = format!("invalid block sizes: {sizes:?}");
                    return Err(ProtocolError::Unexpected(text));
                }
                Self::BlockSizes(sizes)
            }
            other => return Ok(Self::Other(other)),
        };
        content.end()?;
        Ok(info)
    }

    /// Writes it as it is sent, [`Info::Other`] without content.
    pub fn write(self, out: &mut Vec<u8>) {
        match self {
            Self::Export { bytes, flags } => {
                out.extend_from_slice(&Self::EXPORT.to_be_bytes());
                out.extend_from_slice(&bytes.to_be_bytes());
                out.extend_from_slice(&flags.0.to_be_bytes());
            }
            Self::BlockSizes(BlockSizes { minimum, preferred, maximum }) => {
                out.extend_from_slice(&Self::BLOCK_SIZES.to_be_bytes());
                for size in [minimum, preferred, maximum] {
                    out.extend_from_slice(&size.to_be_bytes());
                }
            }
            Self::Other(kind) => out.extend_from_slice(&kind.to_be_bytes()),
        }
    }
}

fn expect(what: &'static str, found: u64, magic: u64) -> Result<(), ProtocolError> {
    if found == magic { Ok(()) } else { Err(ProtocolError::Magic { what, found }) }
}

fn bounded(what: &'static str, bytes: u32) -> Result<(), ProtocolError> {
    if bytes as usize > OPTION_BYTES_MAX {
        return Err(ProtocolError::Length { what, bytes: bytes.into() });
    }
    Ok(())
}

fn write_text(what: &'static str, text: &str, out: &mut Vec<u8>) -> Result<(), ProtocolError> {
    let bytes = match u32::try_from(text.len()) {
        Ok(bytes) if text.len() <= TEXT_BYTES_MAX => bytes,
        _ => return Err(ProtocolError::Length { what, bytes: text.len() as u64 }),
    };
    out.extend_from_slice(&bytes.to_be_bytes());
    out.extend_from_slice(text.as_bytes());
    Ok(())
}

#[cfg(test)]
mod tests;
