//! Takes the pages out of a main stream.
//!
//! The splitter has no buffer for pages: it is shown the bytes that are in the
//! caller's buffer, reports where in it the bodies lie, and takes whole records
//! only. What it keeps is the head, until that is complete, and as long as no
//! page was taken out also everything else, so that a stream that turns out not
//! to be splittable can be passed on whole.

mod early;
mod pages;
mod setup;

use std::ops::ControlFlow;

use page::{BlockId, Epoch, PageIndex};

use crate::cursor::{Cursor, Short};
use crate::record::{RAM, SECTION_BYTES, command, kind};
use crate::{Block, Blocks, StreamError, Unsplittable};

/// Most bytes before the first page. The longest block list has 17 MB.
pub const HEAD_BYTES_MAX: usize = 32 << 20;

/// Whether QEMU has channels beside the main stream. It decides what an epoch
/// is, and when the head must be handed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamKind {
    /// All pages are in the main stream. An epoch ends with each RAM section.
    Classic,
    /// Pages travel on channels. An epoch ends where QEMU sends SYNC on all of
    /// them: with each RAM section (machine types to 8.0), or at a
    /// MULTIFD_FLUSH mark; which of the two shows in setup.
    ///
    /// QEMU sends pages on the channels before it flushes the first bytes after
    /// setup into the main stream, so the head is complete with setup's last
    /// word, and the footer after it has to be foretold.
    ///
    /// QEMU before 9.0 can send the last page of a full packet once more in the
    /// next packet, in the same epoch and perhaps on another channel: having
    /// filled the packet it asks it for its block, which the channel's thread may
    /// have cleared by then, and takes the page for one of another block. Either
    /// of the two may win: they differ only if the guest wrote the page after
    /// QEMU had marked it clean, and then it comes again in a later epoch.
    Multifd,
}

/// The stream up to the first page, and what it says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// What the destination's QEMU is fed first. No MULTIFD_FLUSH is in it, and
    /// nothing that asks for an answer, unless that comes from there
    /// ([`Splitter::answered`]): the source's is given here.
    pub bytes: Vec<u8>,
    /// The RAM blocks; a [`BlockId`] is a place in this list.
    pub blocks: Vec<Block>,
    /// The number of RAM's section, which every PART and the END repeat.
    pub ram_section: u32,
    /// Whether sections end with a footer.
    pub footers: bool,
    /// The migration may turn to postcopy. Then the destination's QEMU empties all
    /// of its RAM as it reads the head, and later asks for each page that it did not
    /// load itself or finds no memory behind. So pages may reach it only as records
    /// of its stream, never by its memory.
    pub may_turn_to_postcopy: bool,
}

/// Where pages go.
///
/// A sink that can't take a page now (its batch is full, or of another block)
/// breaks: the record stays unconsumed and [`Splitter::push`] returns
/// [`Step::Paused`].
pub trait Sink {
    /// A page whose bytes start at `at` in the slice given to `push`.
    fn body(&mut self, block: BlockId, page: PageIndex, at: usize) -> ControlFlow<()>;
    /// A page that is `byte` throughout.
    fn fill(&mut self, block: BlockId, page: PageIndex, byte: u8) -> ControlFlow<()>;
    /// The pages from here on belong to this epoch.
    fn epoch(&mut self, epoch: Epoch);
}

/// Why [`Splitter::push`] came back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The record at `consumed` needs at least `need` bytes.
    More {
        /// In all, counted from the record's start.
        need: usize,
    },
    /// The sink refused the record at `consumed`.
    Paused,
    /// The head is complete. Comes once, before the first page.
    Head(Head),
    /// RAM has ended. These bytes and everything after `consumed` are the tail;
    /// the splitter has no more to do.
    Tail(Vec<u8>),
    /// Only in a stream that is answered, and after the head: from here on it can't be split.
    /// These bytes and everything after `consumed` are to reach the destination's
    /// QEMU as they are, in order, and after every page that was taken is placed;
    /// the splitter has no more to do.
    Rest {
        /// What comes first.
        bytes: Vec<u8>,
        /// Why.
        reason: Unsplittable,
    },
    /// The stream can't be split. These bytes and everything after `consumed`
    /// are the whole stream; the splitter has no more to do. Comes only before
    /// the head.
    Whole {
        /// Everything consumed until now.
        bytes: Vec<u8>,
        /// Why.
        reason: Unsplittable,
    },
}

/// What [`Splitter::push`] did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes that are done with. The rest is to be shown again, with more.
    pub consumed: usize,
    /// Why it came back.
    pub step: Step,
}

/// Where in the stream's grammar the next byte stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
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

/// Why the inner parser stops; the same as [`Step`] and [`StreamError`], in
/// one type for `?`.
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
    place: Place,
    /// The head so far, as the destination gets it.
    head: Vec<u8>,
    /// The stream so far, as it came; only while it may have to be passed whole.
    whole: Vec<u8>,
    head_sent: bool,
    /// What asks for an answer is for the destination's QEMU too.
    is_answered: bool,
    configured: bool,
    footers: bool,
    /// Epochs end at MULTIFD_FLUSH marks, not with sections.
    epoch_by_flush: bool,
    blocks: Blocks,
    ram_section: Option<u32>,
    /// The section of disks' dirty bitmaps, once it has begun.
    bitmap_section: Option<u32>,
    /// The destination's QEMU is asked to answer.
    has_return_path: bool,
    /// The block list may say of blocks how large their pages are.
    may_turn_to_postcopy: bool,
    /// The block that a record with CONTINUE belongs to.
    block: Option<BlockId>,
    epoch: Epoch,
    /// The tail so far: commands between RAM sections wait here for the END.
    tail: Vec<u8>,
}

impl Splitter {
    /// A splitter at the first byte of a stream.
    #[must_use]
    pub fn new(stream: StreamKind) -> Self {
        Self {
            stream,
            place: Place::Start,
            head: Vec::new(),
            whole: Vec::new(),
            head_sent: false,
            is_answered: false,
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

    /// The same, of a stream whose questions the destination's QEMU answers: they
    /// stay in it. Somebody else commands both QEMUs, and may turn to postcopy at any
    /// time, or have pages sent as differences: that ends in [`Step::Rest`].
    #[must_use]
    pub fn answered(stream: StreamKind) -> Self {
        Self { is_answered: true, ..Self::new(stream) }
    }

    /// Whether the destination's QEMU says when it has loaded the VM; known from
    /// [`Step::Head`] on.
    #[must_use]
    pub fn has_return_path(&self) -> bool {
        self.has_return_path
    }

    /// Whether QEMU may turn to post-copy at any time, as far as was read.
    #[must_use]
    pub fn may_turn_to_postcopy(&self) -> bool {
        self.may_turn_to_postcopy
    }

    /// Whether each RAM section ends an epoch, and not a mark of its own; known from
    /// [`Step::Head`] on.
    #[must_use]
    pub fn epoch_by_section(&self) -> bool {
        !self.epoch_by_flush
    }

    /// Whether RAM's last section has begun: QEMU has stopped the VM.
    #[must_use]
    pub fn is_last_section(&self) -> bool {
        matches!(self.place, Place::Pages { end: true })
    }

    /// The block list, complete from [`Step::Head`] on.
    #[must_use]
    pub fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// The epoch that a page would have now.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Reads on, from where the last call stopped consuming.
    ///
    /// # Errors
    /// [`StreamError`]: the migration can't go on, and nothing more may be
    /// pushed.
    pub fn push<S: Sink>(&mut self, input: &[u8], sink: &mut S) -> Result<Progress, StreamError> {
        debug_assert!(self.place != Place::Over, "the rest of the stream is not for the splitter");
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

    /// Says whether the stream may end here.
    ///
    /// # Errors
    /// [`StreamError::EndedEarly`] if RAM was still to come.
    pub fn finish(&self) -> Result<(), StreamError> {
        let place = match self.place {
            Place::Over => return Ok(()),
            Place::Start => "before its first record",
            Place::Configuration | Place::ConfigurationParts => "in its configuration",
            Place::Between if self.ram_section.is_none() => "before RAM's setup",
            Place::RamSetup { .. } | Place::BlockList { .. } => "within RAM's setup",
            Place::SetupFooter | Place::Between | Place::Footer | Place::EarlyFooter { .. } => {
                "between two RAM sections"
            }
            Place::Pages { end: false } => "within a RAM section",
            Place::Pages { end: true } => "within RAM's last section",
        };
        Err(StreamError::EndedEarly { place })
    }

    /// One record, or in RAM sections as many as there are.
    fn advance<S: Sink>(&mut self, input: &[u8], at: &mut usize, sink: &mut S) -> Result<(), Halt> {
        let rest = input.get(*at..).unwrap_or_default();
        match self.place {
            Place::Start => *at += self.start(rest)?,
            Place::Configuration => *at += self.configuration(rest)?,
            Place::ConfigurationParts => *at += self.configuration_part(rest)?,
            Place::Between => *at += self.between(rest)?,
            Place::RamSetup { lists } => self.ram_setup(rest, lists, at, sink)?,
            Place::BlockList { bytes_left } => *at += self.block_list(rest, bytes_left)?,
            Place::SetupFooter => *at += self.setup_footer(rest)?,
            Place::Pages { end } => self.pages(input, end, at, sink)?,
            Place::Footer => *at += self.footer(rest)?,
            Place::EarlyFooter { section, is_dropped } => {
                *at += self.early_footer(rest, section, is_dropped)?;
            }
            Place::Over => return Err(Halt::Short(0)),
        }
        Ok(())
    }

    /// A record between sections.
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
                self.place = Place::Pages { end: kind == kind::END };
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
            // It may; it has not, and may never do so.
            command::POSTCOPY_ADVISE if !self.head_sent => self.may_turn_to_postcopy = true,
            command::POSTCOPY_ADVISE..=command::POSTCOPY_RESUME
            | command::PACKAGED
            | command::RECV_BITMAP => return Err(Unsplittable::Postcopy { command }.into()),
            command::ENABLE_COLO => return Err(capability("x-colo").into()),
            command => return Err(Unsplittable::Command { command }.into()),
        }
        let record = &rest[..cursor.at()];
        if asks && !self.is_answered {
            self.keep_whole(record)?;
        } else if self.head_sent {
            // Between RAM sections, as SWITCHOVER_START: the destination gets
            // it where the stream goes on, with the END.
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
        self.place = Place::RamSetup { lists: 0 };
        Ok(record.len())
    }

    /// The footer after a PART.
    fn footer(&mut self, rest: &[u8]) -> Result<usize, Halt> {
        self.place = Place::Between;
        if !self.footers {
            return Ok(0);
        }
        let taken = self.ram_footer(rest);
        if taken.is_err() {
            self.place = Place::Footer;
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

    /// Effects on the head, before anything that makes it impossible to pass the
    /// stream whole. The record at hand stays unconsumed.
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
        self.place = Place::Over;
        self.head = Vec::new();
        Ok(Step::Whole { bytes: std::mem::take(&mut self.whole), reason })
    }

    /// What waited for RAM's end comes first.
    fn rest(&mut self, reason: Unsplittable) -> Step {
        self.place = Place::Over;
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

    /// A multifd stream is never passed whole: its pages are elsewhere.
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
