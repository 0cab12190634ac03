//! The stream up to the end of RAM's setup: configuration and block list.

use super::{Halt, Position, Sink, Splitter, StreamKind};
use crate::cursor::Cursor;
use crate::record::{FLAGS_MASK, MAGIC, SECTION_BYTES, VERSION, WORD_BYTES, flag, kind};
use crate::{StreamError, Unsplittable};

/// Longest machine name; QEMU's have about 20 bytes.
const MACHINE_BYTES_MAX: u32 = 1024;
/// Most capabilities that a configuration may list; QEMU 10 has 30 in all.
const CAPABILITIES_MAX: u32 = 1024;
/// x86's page size.
const PAGE_BITS: u32 = page::PAGE_BYTES.trailing_zeros();

impl Splitter {
    pub(super) fn start(&mut self, rest: &[u8]) -> Result<usize, Halt> {
        let mut cursor = Cursor::new(rest);
        let (magic, version) = (cursor.u32()?, cursor.u32()?);
        if (magic, version) != (MAGIC, VERSION) {
            return Err(StreamError::NotAStream { magic, version }.into());
        }
        self.keep_both(&rest[..cursor.at()])?;
        self.place = Position::Configuration;
        Ok(cursor.at())
    }

    /// Parses the machine's name, which streams of machine types before 2.4 lack.
    pub(super) fn configuration(&mut self, rest: &[u8]) -> Result<usize, Halt> {
        let mut cursor = Cursor::new(rest);
        if cursor.u8()? != kind::CONFIGURATION {
            self.place = Position::Between;
            return Ok(0);
        }
        let bytes = cursor.u32()?;
        if bytes > MACHINE_BYTES_MAX {
            return Err(StreamError::MachineName { bytes }.into());
        }
        cursor.take(bytes as usize)?;
        self.keep_both(&rest[..cursor.at()])?;
        self.configured = true;
        self.place = Position::ConfigurationParts;
        Ok(cursor.at())
    }

    pub(super) fn configuration_part(&mut self, rest: &[u8]) -> Result<usize, Halt> {
        let mut cursor = Cursor::new(rest);
        if cursor.u8()? != kind::SUBSECTION {
            self.place = Position::Between;
            return Ok(0);
        }
        let name = cursor.name()?;
        cursor.u32()?;
        match name {
            b"configuration/target-page-bits" => {
                let bits = cursor.u32()?;
                if bits != PAGE_BITS {
                    return Err(Unsplittable::PageBits { bits }.into());
                }
            }
            b"configuration/capabilities" => no_capabilities(&mut cursor)?,
            b"configuration/uuid" => {
                cursor.take(16)?;
            }
            name => {
                let name = String::from_utf8_lossy(name).into_owned();
                return Err(Unsplittable::Configuration { name }.into());
            }
        }
        self.keep_both(&rest[..cursor.at()])?;
        Ok(cursor.at())
    }

    /// Parses a word of RAM's START section. Moves `at` itself: the head may be due
    /// right after the word that ends the section.
    pub(super) fn ram_setup<S: Sink>(
        &mut self,
        rest: &[u8],
        lists: u32,
        at: &mut usize,
        sink: &mut S,
    ) -> Result<(), Halt> {
        let word = Cursor::new(rest).u64()?;
        let record = &rest[..WORD_BYTES];
        match word & FLAGS_MASK {
            flag::MEM_SIZE => {
                if lists != 0 {
                    return Err(StreamError::BlockLists { count: lists + 1 }.into());
                }
                self.keep_both(record)?;
                self.set_block_list(word & !FLAGS_MASK);
            }
            flag::MULTIFD_FLUSH => {
                // The head omits it: a destination without multifd would wait for
                // channels.
                self.keep_whole(record)?;
                if self.stream == StreamKind::Multifd {
                    self.epoch_by_flush = true;
                    self.next_epoch(sink)?;
                }
            }
            flag::EOS => {
                if lists != 1 {
                    return Err(StreamError::BlockLists { count: lists }.into());
                }
                self.keep_both(record)?;
                if !self.epoch_by_flush {
                    self.next_epoch(sink)?;
                }
                self.place = Position::SetupFooter;
                *at += WORD_BYTES;
                return self.foretell_footer();
            }
            flag::HOOK => return Err(Unsplittable::Hook.into()),
            flags => return Err(Unsplittable::Flags { flags }.into()),
        }
        *at += WORD_BYTES;
        Ok(())
    }

    pub(super) fn block_list(&mut self, rest: &[u8], bytes_left: u64) -> Result<usize, Halt> {
        let mut cursor = Cursor::new(rest);
        let name = cursor.name()?;
        let bytes = cursor.u64()?;
        if self.may_turn_to_postcopy {
            page_size(&mut cursor)?;
        }
        self.blocks.push(name, bytes)?;
        let Some(left) = bytes_left.checked_sub(bytes) else {
            return Err(StreamError::Total { excess_bytes: bytes - bytes_left }.into());
        };
        self.keep_both(&rest[..cursor.at()])?;
        self.set_block_list(left);
        Ok(cursor.at())
    }

    fn set_block_list(&mut self, bytes_left: u64) {
        self.place = match bytes_left {
            0 => Position::RamSetup { lists: 1 },
            bytes_left => Position::BlockList { bytes_left },
        };
    }

    /// Multifd: hands on the head with a predicted footer. Footers and the
    /// configuration record were introduced with the same machine type, 2.4.
    fn foretell_footer(&mut self) -> Result<(), Halt> {
        if self.stream == StreamKind::Classic {
            return Ok(());
        }
        self.footers = self.configured;
        if self.footers {
            let mut footer = [kind::FOOTER; SECTION_BYTES];
            footer[1..].copy_from_slice(&self.ram_section.unwrap_or_default().to_be_bytes());
            self.keep_head(&footer)?;
        }
        self.send_head()
    }

    /// Parses the footer after RAM's START, whose presence shows whether the stream
    /// has footers.
    pub(super) fn setup_footer(&mut self, rest: &[u8]) -> Result<usize, Halt> {
        let sent = Cursor::new(rest).u8()? == kind::FOOTER;
        if self.head_sent && sent != self.footers {
            return Err(StreamError::Footers { sent }.into());
        }
        let taken = if sent { self.ram_footer(rest)? } else { 0 };
        if !self.head_sent {
            self.keep_both(&rest[..taken])?;
        }
        self.footers = sent;
        self.place = Position::Between;
        Ok(taken)
    }

    fn keep_both(&mut self, record: &[u8]) -> Result<(), StreamError> {
        self.keep_whole(record)?;
        self.keep_head(record)
    }
}

/// Parses the size of a block's pages, which is present only if it isn't the default.
/// The alternatives are a block's name, which is never empty, and the word that ends
/// the section, which has flags.
fn page_size(cursor: &mut Cursor<'_>) -> Result<(), Halt> {
    let mut ahead = cursor.clone();
    let is_size = ahead.u64().map(|word| word.is_power_of_two() && word & FLAGS_MASK == 0)?;
    if is_size {
        *cursor = ahead;
    }
    Ok(())
}

/// Refuses a non-empty list. It names only capabilities that both ends must have, so
/// far ignore-shared and mapped-ram, and each changes the stream.
fn no_capabilities(cursor: &mut Cursor<'_>) -> Result<(), Halt> {
    let count = cursor.u32()?;
    if count > CAPABILITIES_MAX {
        return Err(StreamError::CapabilityCount { count }.into());
    }
    if count == 0 {
        return Ok(());
    }
    let name = String::from_utf8_lossy(cursor.name()?).into_owned();
    Err(Unsplittable::Capability { name }.into())
}
