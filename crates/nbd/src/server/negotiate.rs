//! The server's negotiation, from the greeting to the chosen export.

use std::io::{Read, Write};

use super::Export;
use super::error::ServerError;
use crate::handshake::{
    Answer, BlockSizes, FIXED_NEWSTYLE, Go, Greeting, Info, NO_ZEROES, OptionCode, OptionHeader,
    OptionReplyHeader, PAYLOAD_BYTES_MAX, write_name,
};
use crate::{ExportFlags, ProtocolError};

const FLAGS: ExportFlags = ExportFlags(
    ExportFlags::HAS_FLAGS.0
        | ExportFlags::FLUSH.0
        | ExportFlags::TRIM.0
        | ExportFlags::WRITE_ZEROES.0,
);

const BLOCK_SIZES: BlockSizes =
    BlockSizes { minimum: 1, preferred: 64 << 10, maximum: PAYLOAD_BYTES_MAX };

/// Most options before the choice. Clients send a handful; one that never chooses must
/// not occupy a thread.
const OPTIONS_MAX: usize = 256;

/// Negotiates until the client has chosen an export (its index in the list) or
/// ended the negotiation.
pub(crate) fn choose(
    mut from: impl Read,
    to: impl Write,
    exports: &[Export],
) -> Result<Option<usize>, ServerError> {
    let mut talk = Talk { to, option: OptionCode(0), out: Vec::new(), exports };
    talk.out.extend_from_slice(&Greeting { flags: FIXED_NEWSTYLE | NO_ZEROES }.to_bytes());
    talk.send()?;
    let mut client_flags = [0; 4];
    from.read_exact(&mut client_flags).map_err(ServerError::reading)?;
    agree(u32::from_be_bytes(client_flags))?;

    let mut content = Vec::new();
    for _ in 0..OPTIONS_MAX {
        let mut header = [0; OptionHeader::BYTES];
        from.read_exact(&mut header).map_err(ServerError::reading)?;
        let header = OptionHeader::parse(&header)?;
        content.resize(header.bytes as usize, 0);
        from.read_exact(&mut content).map_err(ServerError::reading)?;
        talk.option = header.option;
        let turn = talk.answer(&content)?;
        talk.send()?;
        match turn {
            Turn::Next => {}
            Turn::Chosen(export) => return Ok(Some(export)),
            Turn::Goodbye => return Ok(None),
        }
    }
    Err(ProtocolError::Unexpected(format!("no export chosen after {OPTIONS_MAX} options")).into())
}

/// Checks the flags that a client sets. All of them are known, and change nothing here.
fn agree(flags: u32) -> Result<(), ServerError> {
    let known = u32::from(FIXED_NEWSTYLE | NO_ZEROES);
    if flags & !known != 0 {
        let text = format!("it sets unknown flags in the handshake: {flags:#x}");
        return Err(ProtocolError::Unexpected(text).into());
    }
    Ok(())
}

enum Turn {
    Next,
    Chosen(usize),
    Goodbye,
}

struct Talk<'a, W> {
    to: W,
    option: OptionCode,
    /// The answer to one option, sent in one piece.
    out: Vec<u8>,
    exports: &'a [Export],
}

impl<W: Write> Talk<'_, W> {
    fn answer(&mut self, content: &[u8]) -> Result<Turn, ServerError> {
        match self.option {
            OptionCode::GO | OptionCode::INFO => Ok(self.inform(content)),
            OptionCode::EXPORT_NAME => {
                let text = "it chooses an export in a way that is older than GO";
                Err(ProtocolError::Unexpected(text.to_owned()).into())
            }
            OptionCode::LIST => self.list(content),
            OptionCode::ABORT => {
                self.reply(Answer::ACK, &[]);
                Ok(Turn::Goodbye)
            }
            _ => {
                self.reply(Answer::UNSUPPORTED, b"not offered here");
                Ok(Turn::Next)
            }
        }
    }

    fn inform(&mut self, content: &[u8]) -> Turn {
        let Ok(Go { name }) = Go::parse(content) else {
            self.reply(Answer::INVALID, b"the option is invalid");
            return Turn::Next;
        };
        let Some(chosen) = self.find(name) else {
            self.reply(Answer::UNKNOWN, format!("no export is called '{name}'").as_bytes());
            return Turn::Next;
        };
        let mut info = Vec::with_capacity(Info::BYTES_MAX);
        for piece in [self.export_info(chosen), Info::BlockSizes(BLOCK_SIZES)] {
            info.clear();
            piece.write(&mut info);
            self.reply(Answer::INFO, &info);
        }
        self.reply(Answer::ACK, &[]);
        if self.option == OptionCode::GO { Turn::Chosen(chosen) } else { Turn::Next }
    }

    fn list(&mut self, content: &[u8]) -> Result<Turn, ServerError> {
        if !content.is_empty() {
            self.reply(Answer::INVALID, b"a list takes no content");
            return Ok(Turn::Next);
        }
        let mut name = Vec::new();
        for export in self.exports {
            name.clear();
            write_name(&export.name, &mut name)?;
            self.reply(Answer::SERVER, &name);
        }
        self.reply(Answer::ACK, &[]);
        Ok(Turn::Next)
    }

    fn find(&self, name: &str) -> Option<usize> {
        self.exports.iter().position(|export| export.name == name)
    }

    fn export_info(&self, export: usize) -> Info {
        let bytes = self.exports.get(export).map_or(0, |export| export.bytes);
        Info::Export { bytes, flags: FLAGS }
    }

    fn reply(&mut self, answer: Answer, content: &[u8]) {
        let bytes = u32::try_from(content.len()).expect("names are short");
        let header = OptionReplyHeader { option: self.option, answer, bytes };
        self.out.extend_from_slice(&header.to_bytes());
        self.out.extend_from_slice(content);
    }

    fn send(&mut self) -> Result<(), ServerError> {
        self.to.write_all(&self.out).map_err(ServerError::writing)?;
        self.out.clear();
        Ok(())
    }
}
