//! Parses RAM sections, which contain the pages.

use page::{BlockId, PAGE_BYTES};

use super::{Halt, Position, Sink, Splitter, Step, StreamKind};
use crate::cursor::Cursor;
use crate::record::{FLAGS_MASK, WORD_BYTES, flag, kind};
use crate::{StreamError, Unsplittable};

/// Most bytes of a page that QEMU has compressed: twice those of the page.
const ENCODED_BYTES_MAX: usize = 2 * PAGE_BYTES;

impl Splitter {
    /// Parses all complete records of a RAM section. `at` moves past each consumed
    /// record.
    pub(super) fn pages<S: Sink>(
        &mut self,
        input: &[u8],
        end: bool,
        at: &mut usize,
        sink: &mut S,
    ) -> Result<(), Halt> {
        loop {
            let rest = input.get(*at..).unwrap_or_default();
            let word = *rest.first_chunk::<WORD_BYTES>().ok_or(Halt::Short(WORD_BYTES))?;
            let word = u64::from_be_bytes(word);
            let (offset, flags) = (word & !FLAGS_MASK, word & FLAGS_MASK);
            match flags & !flag::CONTINUE {
                flag::PAGE => {
                    let (block, body_at) = self.block_of(rest, flags)?;
                    let page = self.blocks.page(block, offset)?;
                    self.send_head()?;
                    let record_bytes = body_at + PAGE_BYTES;
                    if rest.len() < record_bytes {
                        return Err(Halt::Short(record_bytes));
                    }
                    if sink.body(block, page, *at + body_at).is_break() {
                        return Err(Halt::Paused);
                    }
                    *at += record_bytes;
                    self.block = Some(block);
                }
                flag::ZERO => {
                    let (block, byte_at) = self.block_of(rest, flags)?;
                    let page = self.blocks.page(block, offset)?;
                    self.send_head()?;
                    let Some(byte) = rest.get(byte_at) else {
                        return Err(Halt::Short(byte_at + 1));
                    };
                    if sink.fill(block, page, *byte).is_break() {
                        return Err(Halt::Paused);
                    }
                    *at += byte_at + 1;
                    self.block = Some(block);
                }
                flag::XBZRLE | flag::COMPRESS_PAGE if self.skips_encoded => {
                    let (block, name_end) = self.block_of(rest, flags)?;
                    self.send_head()?;
                    *at += encoded_end(rest, flags, name_end)?;
                    self.block = Some(block);
                }
                flag::XBZRLE | flag::COMPRESS_PAGE if self.is_answered && self.head_sent => {
                    let (block, name_end) = self.block_of(rest, flags)?;
                    *at += name_end;
                    return Err(self.encoded_by_qemu(offset | flags, block, end));
                }
                _ => {
                    self.mark(rest, flags, end, sink)?;
                    *at += WORD_BYTES;
                    match (flags, end) {
                        (flag::EOS, true) => return Err(self.ram_ends()),
                        (flag::EOS, false) => return Ok(()),
                        _ => {}
                    }
                }
            }
        }
    }

    /// Handles the first page that QEMU itself compresses, or sends as a difference to
    /// its previous version. The rest starts with a new section and names the page's
    /// block, because the record before it may have been taken out.
    fn encoded_by_qemu(&mut self, word: u64, block: BlockId, end: bool) -> Halt {
        if !end {
            self.tail.push(kind::PART);
            self.tail.extend_from_slice(&self.ram_section.unwrap_or_default().to_be_bytes());
        }
        self.tail.extend_from_slice(&(word & !flag::CONTINUE).to_be_bytes());
        let name = self.blocks.block(block).map_or("", |block| &block.name);
        // A block's name was read with a one-byte length.
        self.tail.push(u8::try_from(name.len()).unwrap_or_default());
        self.tail.extend_from_slice(name.as_bytes());
        Halt::Done(self.rest(unknown(word & FLAGS_MASK)))
    }

    /// A record's block, and the offset after its name.
    fn block_of(&self, rest: &[u8], flags: u64) -> Result<(BlockId, usize), Halt> {
        if flags & flag::CONTINUE != 0 {
            let block = self.block.ok_or(StreamError::ContinueWithoutBlock)?;
            return Ok((block, WORD_BYTES));
        }
        let mut cursor = Cursor::new(rest);
        cursor.u64()?;
        let name = cursor.name()?;
        let block = self.blocks.find(name).ok_or_else(|| StreamError::UnknownBlock {
            name: String::from_utf8_lossy(name).into_owned(),
        })?;
        Ok((block, cursor.at()))
    }

    /// Parses a record that is not a page.
    fn mark<S: Sink>(
        &mut self,
        rest: &[u8],
        flags: u64,
        end: bool,
        sink: &mut S,
    ) -> Result<(), Halt> {
        let record = rest.get(..WORD_BYTES).unwrap_or_default();
        match flags {
            flag::EOS => {
                self.send_head()?;
                if !self.epoch_by_flush {
                    self.next_epoch(sink)?;
                }
                if end {
                    self.tail.extend_from_slice(record);
                } else {
                    self.place = Position::Footer;
                }
                Ok(())
            }
            // QEMU 8.1 also marks streams without multifd, where the mark means
            // nothing.
            flag::MULTIFD_FLUSH if self.stream == StreamKind::Classic => {
                Ok(self.keep_whole(record)?)
            }
            flag::MULTIFD_FLUSH if self.epoch_by_flush => self.next_epoch(sink),
            flag::MULTIFD_FLUSH => Err(StreamError::StrayFlush.into()),
            _ => Err(unknown(flags).into()),
        }
    }

    fn ram_ends(&mut self) -> Halt {
        self.place = Position::Over;
        Halt::Done(Step::Tail(std::mem::take(&mut self.tail)))
    }
}

/// Where a record ends whose page QEMU has encoded. Its encoding follows the block's name.
fn encoded_end(rest: &[u8], flags: u64, name_end: usize) -> Result<usize, Halt> {
    let mut cursor = Cursor::new(rest);
    cursor.take(name_end)?;
    let bytes = if flags & flag::XBZRLE != 0 {
        // The kind of encoding, of which there is one.
        cursor.u8()?;
        usize::from(cursor.u16()?)
    } else {
        let bytes = usize::try_from(cursor.u32()?).unwrap_or(usize::MAX);
        if bytes > ENCODED_BYTES_MAX {
            return Err(unknown(flags).into());
        }
        bytes
    };
    cursor.take(bytes)?;
    Ok(cursor.at())
}

fn unknown(flags: u64) -> Unsplittable {
    match flags & !flag::CONTINUE {
        flag::XBZRLE => Unsplittable::Xbzrle,
        flag::COMPRESS_PAGE => Unsplittable::Compressed,
        flag::HOOK => Unsplittable::Hook,
        _ => Unsplittable::Flags { flags },
    }
}
