//! Separates the pages from the rest of a main stream.
//!
//! The splitter has no buffer for pages: it parses the caller's buffer, reports where the
//! bodies are in it, and consumes only whole records. It keeps a copy of the head until that
//! is complete. Until the first page is taken out it also keeps everything else, so that a
//! stream that can't be split can be passed on whole.

mod early;
mod pages;
mod setup;

use std::ops::ControlFlow;

use page::{BlockId, Epoch, PageIndex};

use crate::cursor::{Cursor, Short};
use crate::record::{RAM, SECTION_BYTES, command, kind};
use crate::{Block, Blocks, StreamError, Unsplittable};

/// Most bytes before the first page. The longest possible block list has 17 MB.
pub const HEAD_BYTES_MAX: usize = 32 << 20;

/// Whether QEMU uses multifd channels next to the main stream. This decides where epochs end,
/// and when the head must be handed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamKind {
    /// All pages are in the main stream. An epoch ends with each RAM section.
    Classic,
    /// Pages are on channels. An epoch ends where QEMU sends SYNC on all of them: with each
    /// RAM section (machine types up to 8.0), or at a MULTIFD_FLUSH mark. RAM's setup shows
    /// which.
    ///
    /// QEMU sends pages on the channels before it flushes the bytes after setup into the main
    /// stream, so the head is complete with the last word of setup, and the footer that
    /// follows must be predicted.
    ///
    /// QEMU before 9.0 can send the last page of a full packet again in the next packet, in
    /// the same epoch and perhaps on another channel: after filling the packet it reads the
    /// packet's block, which the channel's thread may have cleared by then, and takes the
    /// page for one of another block. Either copy may win: they differ only if the guest
    /// wrote the page after QEMU had marked it clean, and then a later epoch carries it
    /// again.
    Multifd,
}

/// The stream up to the first page, and its parsed content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// The first bytes to feed to the destination's QEMU. They contain no MULTIFD_FLUSH, and
    /// no command that requests an answer, because this side answers the source's QEMU. With
    /// [`Splitter::answered`] the destination answers, and those commands stay.
    pub bytes: Vec<u8>,
    /// The RAM blocks; a [`BlockId`] is an index into this list.
    pub blocks: Vec<Block>,
    /// The number of RAM's section, which every PART and the END repeat.
    pub ram_section: u32,
    /// Whether sections end with a footer.
    pub footers: bool,
    /// Whether epochs are RAM sections, which QEMU ends after 50 ms, rather than passes.
    pub epoch_by_section: bool,
    /// Whether the migration may switch to postcopy. Then the destination's QEMU discards all
    /// of its RAM as it reads the head, and later requests each page that it did not load
    /// itself or that has no memory behind it. So pages may reach it only as records of its
    /// stream, never by writes to its memory.
    pub may_turn_to_postcopy: bool,
}

/// The receiver of pages.
///
/// A sink that can't take a page now (its batch is full, or has another block) breaks: the
/// record stays unconsumed and [`Splitter::push`] returns [`Step::Paused`].
pub trait Sink {
    /// Takes a page whose bytes start at `at` in the slice given to `push`.
    fn body(&mut self, block: BlockId, page: PageIndex, at: usize) -> ControlFlow<()>;
    /// Takes a page that is `byte` throughout.
    fn fill(&mut self, block: BlockId, page: PageIndex, byte: u8) -> ControlFlow<()>;
    /// Starts an epoch: the following pages belong to it.
    fn epoch(&mut self, epoch: Epoch);
}

/// Why [`Splitter::push`] returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The record at `consumed` needs at least `need` bytes.
    More {
        /// In total, counted from the record's start.
        need: usize,
    },
    /// The sink refused the record at `consumed`.
    Paused,
    /// The head is complete. Returned once, before the first page.
    Head(Head),
    /// RAM has ended. These bytes and everything after `consumed` are the tail; the splitter
    /// is done.
    Tail(Vec<u8>),
    /// The stream can't be split any more. Returned only for an answered stream, after the
    /// head.
    ///
    /// These bytes and everything after `consumed` must reach the destination's QEMU
    /// unchanged, in order, and after every page that was taken is placed; the splitter is
    /// done.
    Rest {
        /// The first bytes to pass on.
        bytes: Vec<u8>,
        /// Why.
        reason: Unsplittable,
    },
    /// The stream can't be split. Returned only before the head.
    ///
    /// These bytes and everything after `consumed` are the whole stream; the splitter is
    /// done.
    Whole {
        /// Everything consumed so far.
        bytes: Vec<u8>,
        /// Why.
        reason: Unsplittable,
    },
}

/// The result of [`Splitter::push`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes consumed. The rest must be passed again, with more.
    pub consumed: usize,
    /// Why it returned.
    pub step: Step,
}

/// The position in the stream's grammar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Position {
    Start,
    Configuration,
    ConfigurationParts,
    Between,
    RamSetup { lists: u32 },
    BlockList { bytes_left: u64 },
    SetupFooter,
    Pages { end: bool },
    Footer,
    EarlyFooter { section: u32, is_dropped: bool },
    Over,
}

/// Why the inner parser stops: [`Step`] and [`StreamError`] in one type, for `?`.
enum Halt {
    Short(usize),
    Paused,
    Done(Step),
    Refuse(Unsplittable),
    Wrong(StreamError),
}

impl From<Short> for Halt {
    fn from(Short(need): Short) -> Self {
        Self::Short(need)
    }
}

impl From<StreamError> for Halt {
    fn from(error: StreamError) -> Self {
        Self::Wrong(error)
    }
}

impl From<Unsplittable> for Halt {
    fn from(reason: Unsplittable) -> Self {
        Self::Refuse(reason)
    }
}

/// The incremental parser of a main stream.
#[derive(Debug)]
pub struct Splitter {
    stream: StreamKind,
    place: Position,
    /// The head so far, as the destination receives it.
    head: Vec<u8>,
    /// The unmodified stream so far; kept only while it may have to be passed on whole.
    whole: Vec<u8>,
    head_sent: bool,
    /// Commands that request an answer also go to the destination's QEMU.
    is_answered: bool,
    /// Pages that QEMU has encoded are skipped.
    skips_encoded: bool,
    configured: bool,
    footers: bool,
    /// Epochs end at MULTIFD_FLUSH marks, not with sections.
    epoch_by_flush: bool,
    blocks: Blocks,
    ram_section: Option<u32>,
    /// The section of disks' dirty bitmaps, once it has started.
    bitmap_section: Option<u32>,
    /// The stream opens a return path.
    has_return_path: bool,
    /// The migration may switch to postcopy, so the block list may contain page sizes.
    may_turn_to_postcopy: bool,
    /// The block that a record with CONTINUE belongs to.
    block: Option<BlockId>,
    epoch: Epoch,
    /// The tail so far: commands between RAM sections are kept for the END section.
    tail: Vec<u8>,
}

impl Splitter {
    /// A splitter at the first byte of a stream.
    #[must_use]
    pub fn new(stream: StreamKind) -> Self {
        Self {
            stream,
            place: Position::Start,
            head: Vec::new(),
            whole: Vec::new(),
            head_sent: false,
            is_answered: false,
            skips_encoded: false,
            configured: false,
            footers: false,
            epoch_by_flush: false,
            blocks: Blocks::default(),
            ram_section: None,
            bitmap_section: None,
            has_return_path: false,
            may_turn_to_postcopy: false,
            block: None,
            epoch: Epoch::default(),
            tail: Vec::new(),
        }
    }

    /// A splitter for a stream whose requests for answers the destination's QEMU answers, so
    /// they stay in the stream.
    ///
    /// Another program commands both QEMUs, and may switch to postcopy at any time or enable
    /// XBZRLE or compression; each of them ends in [`Step::Rest`].
    #[must_use]
    pub fn answered(stream: StreamKind) -> Self {
        Self { is_answered: true, ..Self::new(stream) }
    }

    /// A splitter for a stream that is passed on as it is, whose pages nobody needs: those that
    /// QEMU has compressed, or sends as differences, are skipped.
    pub(crate) fn watching() -> Self {
        Self { skips_encoded: true, ..Self::answered(StreamKind::Classic) }
    }

    /// Whether the destination's QEMU reports when it has loaded the VM; known from
    /// [`Step::Head`] on.
    #[must_use]
    pub fn has_return_path(&self) -> bool {
        self.has_return_path
    }

    /// Whether QEMU may switch to postcopy at any time, as far as the stream was read.
    #[must_use]
    pub fn may_turn_to_postcopy(&self) -> bool {
        self.may_turn_to_postcopy
    }

    /// Whether epochs end with RAM sections rather than at MULTIFD_FLUSH marks; known from
    /// [`Step::Head`] on.
    #[must_use]
    pub fn epoch_by_section(&self) -> bool {
        !self.epoch_by_flush
    }

    /// Whether RAM's last section has started: QEMU has stopped the VM.
    #[must_use]
    pub fn is_last_section(&self) -> bool {
        matches!(self.place, Position::Pages { end: true })
    }

    /// The block list, complete from [`Step::Head`] on.
    #[must_use]
    pub fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// The epoch of the next page.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Continues where the last call stopped consuming.
    ///
    /// # Errors
    /// [`StreamError`]: the migration can't continue, and nothing more may be pushed.
    pub fn push<S: Sink>(&mut self, input: &[u8], sink: &mut S) -> Result<Progress, StreamError> {
        debug_assert!(
            self.place != Position::Over,
            "the rest of the stream is not for the splitter"
        );
        let mut at = 0;
        let halt = loop {
            if let Err(halt) = self.advance(input, &mut at, sink) {
                break halt;
            }
        };
        let step = match halt {
            Halt::Short(need) => Step::More { need },
            Halt::Paused => Step::Paused,
            Halt::Done(step) => step,
            Halt::Refuse(reason) => self.refuse(reason)?,
            Halt::Wrong(error) => return Err(error),
        };
        Ok(Progress { consumed: at, step })
    }

    /// Checks whether the stream may end here.
    ///
    /// # Errors
    /// [`StreamError::EndedEarly`] if RAM has not ended.
    pub fn finish(&self) -> Result<(), StreamError> {
        let place = match self.place {
            Position::Over => return Ok(()),
            Position::Start => "before its first record",
            Position::Configuration | Position::ConfigurationParts => "in its configuration",
            Position::Between if self.ram_section.is_none() => "before RAM's setup",
            Position::RamSetup { .. } | Position::BlockList { .. } => "within RAM's setup",
            Position::SetupFooter
            | Position::Between
            | Position::Footer
            | Position::EarlyFooter { .. } => "between two RAM sections",
            Position::Pages { end: false } => "within a RAM section",
            Position::Pages { end: true } => "within RAM's last section",
        };
        Err(StreamError::EndedEarly { place })
    }

    /// Parses one record, or all complete records of a RAM section.
    fn advance<S: Sink>(&mut self, input: &[u8], at: &mut usize, sink: &mut S) -> Result<(), Halt> {
        let rest = input.get(*at..).unwrap_or_default();
        match self.place {
            Position::Start => *at += self.start(rest)?,
            Position::Configuration => *at += self.configuration(rest)?,
            Position::ConfigurationParts => *at += self.configuration_part(rest)?,
            Position::Between => *at += self.between(rest)?,
            Position::RamSetup { lists } => self.ram_setup(rest, lists, at, sink)?,
            Position::BlockList { bytes_left } => *at += self.block_list(rest, bytes_left)?,
            Position::SetupFooter => *at += self.setup_footer(rest)?,
            Position::Pages { end } => self.pages(input, end, at, sink)?,
            Position::Footer => *at += self.footer(rest)?,
            Position::EarlyFooter { section, is_dropped } => {
                *at += self.early_footer(rest, section, is_dropped)?;
            }
            Position::Over => return Err(Halt::Short(0)),
        }
        Ok(())
    }

    /// Parses a record between sections.
    fn between(&mut self, rest: &[u8]) -> Result<usize, Halt> {
        let mut cursor = Cursor::new(rest);
        let kind = cursor.u8()?;
        match kind {
            kind::COMMAND => self.command(rest),
            kind::START | kind::FULL => self.section_start(rest),
            kind::PART | kind::END => {
                let section = cursor.u32()?;
                if kind == kind::PART && Some(section) == self.bitmap_section {
                    return self.bitmap_part(rest, section);
                }
                if Some(section) != self.ram_section {
                    return Err(Unsplittable::SectionId { section }.into());
                }
                if kind == kind::PART {
                    self.keep_whole(&rest[..SECTION_BYTES])?;
                } else {
                    self.send_head()?;
                    self.tail.extend_from_slice(&rest[..SECTION_BYTES]);
                }
                self.place = Position::Pages { end: kind == kind::END };
                Ok(SECTION_BYTES)
            }
            kind::EOF if self.ram_section.is_none() => Err(Unsplittable::NoRam.into()),
            kind::EOF | kind::CONFIGURATION | kind::SUBSECTION | kind::FOOTER => {
                Err(StreamError::OutOfPlace { kind }.into())
            }
            _ => Err(StreamError::UnknownRecord { kind }.into()),
        }
    }

    fn command(&mut self, rest: &[u8]) -> Result<usize, Halt> {
        let mut cursor = Cursor::new(rest);
        cursor.u8()?;
        let command = cursor.u16()?;
        let length = cursor.u16()?;
        cursor.take(usize::from(length))?;
        let capability = |name: &str| Unsplittable::Capability { name: name.to_owned() };
        let asks = matches!(command, command::OPEN_RETURN_PATH | command::PING);
        self.has_return_path |= command == command::OPEN_RETURN_PATH;
        match command {
            command::SWITCHOVER_START => {}
            _ if asks => {}
            // It may switch; it has not yet, and may never do so. An empty one concerns only dirty
            // bitmaps: RAM is sent as usual.
            command::POSTCOPY_ADVISE if !self.head_sent => self.may_turn_to_postcopy |= length > 0,
            command::POSTCOPY_ADVISE..=command::PACKAGED
            | command::POSTCOPY_RESUME
            | command::RECV_BITMAP => return Err(Unsplittable::Postcopy { command }.into()),
            command::ENABLE_COLO => return Err(capability("x-colo").into()),
            command => return Err(Unsplittable::Command { command }.into()),
        }
        let record = &rest[..cursor.at()];
        if asks && !self.is_answered {
            self.keep_whole(record)?;
        } else if self.head_sent {
            // A command between RAM sections, such as SWITCHOVER_START, is sent to the
            // destination with the END section, where the stream continues.
            if self.tail.len() + record.len() > HEAD_BYTES_MAX {
                return Err(StreamError::HeadTooLong.into());
            }
            self.tail.extend_from_slice(record);
        } else {
            self.keep_whole(record)?;
            self.keep_head(record)?;
        }
        Ok(record.len())
    }

    fn section_start(&mut self, rest: &[u8]) -> Result<usize, Halt> {
        let mut cursor = Cursor::new(rest);
        let kind = cursor.u8()?;
        let section = cursor.u32()?;
        let name = cursor.name()?;
        if kind != kind::START || name != RAM {
            return self.early_section(rest);
        }
        cursor.take(8)?;
        if self.ram_section.is_some() {
            return Err(StreamError::OutOfPlace { kind }.into());
        }
        let record = &rest[..cursor.at()];
        self.keep_whole(record)?;
        self.keep_head(record)?;
        self.ram_section = Some(section);
        self.place = Position::RamSetup { lists: 0 };
        Ok(record.len())
    }

    /// Parses the footer after a PART section.
    fn footer(&mut self, rest: &[u8]) -> Result<usize, Halt> {
        self.place = Position::Between;
        if !self.footers {
            return Ok(0);
        }
        let taken = self.ram_footer(rest);
        if taken.is_err() {
            self.place = Position::Footer;
        }
        taken
    }

    fn ram_footer(&self, rest: &[u8]) -> Result<usize, Halt> {
        let mut cursor = Cursor::new(rest);
        let kind = cursor.u8()?;
        let section = self.ram_section.unwrap_or_default();
        if kind != kind::FOOTER || cursor.u32()? != section {
            return Err(StreamError::Footer { section }.into());
        }
        Ok(SECTION_BYTES)
    }

    /// Hands on the head before the first action after which the stream can't be passed on
    /// whole. The current record stays unconsumed.
    fn send_head(&mut self) -> Result<(), Halt> {
        if self.head_sent {
            return Ok(());
        }
        self.head_sent = true;
        self.whole = Vec::new();
        Err(Halt::Done(Step::Head(Head {
            bytes: std::mem::take(&mut self.head),
            blocks: self.blocks.list().to_vec(),
            ram_section: self.ram_section.unwrap_or_default(),
            footers: self.footers,
            epoch_by_section: self.epoch_by_section(),
            may_turn_to_postcopy: self.may_turn_to_postcopy,
        })))
    }

    fn refuse(&mut self, reason: Unsplittable) -> Result<Step, StreamError> {
        if self.is_answered && self.head_sent && matches!(reason, Unsplittable::Postcopy { .. }) {
            return Ok(self.rest(reason));
        }
        if self.stream == StreamKind::Multifd || self.head_sent {
            return Err(StreamError::Late(reason));
        }
        self.place = Position::Over;
        self.head = Vec::new();
        Ok(Step::Whole { bytes: std::mem::take(&mut self.whole), reason })
    }

    /// Passes on the bytes that were kept for RAM's end first.
    fn rest(&mut self, reason: Unsplittable) -> Step {
        self.place = Position::Over;
        Step::Rest { bytes: std::mem::take(&mut self.tail), reason }
    }

    fn next_epoch<S: Sink>(&mut self, sink: &mut S) -> Result<(), Halt> {
        let next = self.epoch.0.checked_add(1).ok_or(StreamError::TooManyRounds)?;
        self.epoch = Epoch(next);
        sink.epoch(self.epoch);
        Ok(())
    }

    fn keep_head(&mut self, record: &[u8]) -> Result<(), StreamError> {
        keep(&mut self.head, record)
    }

    /// A multifd stream is never passed on whole: its pages are on the channels.
    fn keep_whole(&mut self, record: &[u8]) -> Result<(), StreamError> {
        if self.head_sent || self.stream == StreamKind::Multifd {
            return Ok(());
        }
        keep(&mut self.whole, record)
    }
}

fn keep(kept: &mut Vec<u8>, record: &[u8]) -> Result<(), StreamError> {
    if kept.len() + record.len() > HEAD_BYTES_MAX {
        return Err(StreamError::HeadTooLong);
    }
    kept.extend_from_slice(record);
    Ok(())
}

#[cfg(test)]
mod tests;
