//! The client's negotiation, from the greeting to the chosen export.

use std::io::{Read, Write};

use super::error::ClientError;
use crate::handshake::{
    Answer, BlockSizes, FIXED_NEWSTYLE, Go, Greeting, Info, NO_ZEROES, OPTION_BYTES_MAX,
    OptionCode, OptionHeader, OptionReplyHeader,
};
use crate::{ExportFlags, ProtocolError};

/// Most pieces of information about an export; servers know fewer than ten kinds.
const INFO_MAX: usize = 64;

/// What the server reports about its export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// Its size.
    pub bytes: u64,
    /// Its abilities.
    pub flags: ExportFlags,
    /// The sizes that requests must keep to.
    pub sizes: BlockSizes,
}

/// Chooses an export to write to.
pub(crate) fn negotiate(
    from: impl Read,
    to: impl Write,
    name: &str,
) -> Result<ExportInfo, ClientError> {
    fit(choose(from, to, name)?, name)
}

/// Chooses an export, which may be read-only.
pub(crate) fn choose(
    mut from: impl Read,
    mut to: impl Write,
    name: &str,
) -> Result<ExportInfo, ClientError> {
    let mut greeting = [0; Greeting::BYTES];
    from.read_exact(&mut greeting).map_err(ClientError::Handshake)?;
    let Greeting { flags } = Greeting::parse(&greeting)?;
    if flags & FIXED_NEWSTYLE == 0 {
        let text = "it knows only an NBD older than fixed newstyle";
        return Err(ProtocolError::Unexpected(text.to_owned()).into());
    }
    let mut content = Vec::new();
    Go { name }.write(&mut content)?;
    let bytes = u32::try_from(content.len()).unwrap_or(u32::MAX);
    let mut out = u32::from(flags & (FIXED_NEWSTYLE | NO_ZEROES)).to_be_bytes().to_vec();
    out.extend_from_slice(&OptionHeader { option: OptionCode::GO, bytes }.to_bytes());
    out.extend_from_slice(&content);
    to.write_all(&out).map_err(ClientError::Handshake)?;
    hear_answer(&mut from, name)
}

fn hear_answer(from: &mut impl Read, name: &str) -> Result<ExportInfo, ClientError> {
    let mut content = Vec::with_capacity(OPTION_BYTES_MAX);
    let (mut export, mut sizes) = (None, BlockSizes::default());
    for _ in 0..INFO_MAX {
        let mut header = [0; OptionReplyHeader::BYTES];
        from.read_exact(&mut header).map_err(ClientError::Handshake)?;
        let header = OptionReplyHeader::parse(&header)?;
        content.resize(header.bytes as usize, 0);
        from.read_exact(&mut content).map_err(ClientError::Handshake)?;
        if header.option != OptionCode::GO {
            let text = format!("it replied to an option that was not sent: {}", header.option.0);
            return Err(ProtocolError::Unexpected(text).into());
        }
        match header.answer {
            Answer::INFO => match Info::parse(&content)? {
                Info::Export { bytes, flags } => export = Some((bytes, flags)),
                Info::BlockSizes(told) => sizes = told,
                Info::Other(_) => {}
            },
            Answer::ACK => {
                let untold = || ProtocolError::Unexpected("an export without a size".to_owned());
                let (bytes, flags) = export.ok_or_else(untold)?;
                return Ok(ExportInfo { bytes, flags, sizes });
            }
            error if error.is_error() => {
                return Err(ClientError::Refused {
                    name: name.to_owned(),
                    reason: reason(error, &content),
                });
            }
            other => {
                let text = format!("an unknown answer to GO: {:#x}", other.0);
                return Err(ProtocolError::Unexpected(text).into());
            }
        }
    }
    let text = format!("more than {INFO_MAX} pieces of information");
    Err(ProtocolError::Unexpected(text).into())
}

fn reason(error: Answer, text: &[u8]) -> String {
    match (error, String::from_utf8_lossy(text)) {
        (_, text) if !text.is_empty() => text.into_owned(),
        (Answer::UNKNOWN, _) => "it has no export of this name".to_owned(),
        (Answer::UNSUPPORTED, _) => "it is too old to negotiate one".to_owned(),
        (other, _) => format!("answer {:#x}", other.0),
    }
}

/// Refuses an export that can't be written or flushed now, and not at the end of
/// a migration.
fn fit(info: ExportInfo, name: &str) -> Result<ExportInfo, ClientError> {
    let unfit = |lack| Err(ClientError::Unfit { name: name.to_owned(), lack });
    if info.flags.contains(ExportFlags::READ_ONLY) {
        return unfit("is read-only");
    }
    if !info.flags.contains(ExportFlags::HAS_FLAGS | ExportFlags::FLUSH) {
        return unfit("can't be flushed");
    }
    Ok(info)
}
