//! Separates the pages from the rest of a stream.
//!
//! The splitter parses the caller's buffer and reports where the bodies of pages are in it. It
//! keeps nothing but the page words of the record that it is in: other records have any length, and
//! pass in the pieces in which they arrive.

mod headers;
mod pages;

use std::ops::ControlFlow;

use page::Epoch;

use crate::cursor::{Cursor, Short};
use crate::record::{OPTIONAL, RECORD_HEAD_BYTES, libxc, libxl, padded};
use crate::{Layer, PageWord, RECORD_BYTES_MAX, StreamError};

pub use headers::{DomainKind, XL_HEADER_BYTES, configuration_bytes};

/// The receiver of a stream's parts, in their order.
pub trait Sink {
    /// Takes the next bytes of the non-RAM stream. All pages before them must be with the receiver
    /// before these are.
    ///
    /// A sink that can't take them now breaks, as for a page.
    fn non_ram(&mut self, bytes: &[u8]) -> ControlFlow<()>;
    /// Starts an epoch: the following pages belong to it. `position` is the number of bytes of the
    /// non-RAM stream before them.
    ///
    /// Within an epoch page numbers ascend, so each page is in it at most once. Nothing in the
    /// stream marks a pass: an epoch ends where page numbers fall back, or at another record. Two
    /// passes without a page in common may be one epoch.
    fn epoch(&mut self, epoch: Epoch, position: u64);
    /// Takes a page. Its bytes, if its kind has any, start at `at` in the slice given to `push`.
    ///
    /// A sink that can't take it now breaks: the page stays unconsumed, and [`Splitter::push`]
    /// returns [`Step::Paused`].
    fn page(&mut self, word: PageWord, at: Option<usize>) -> ControlFlow<()>;
}

/// Why [`Splitter::push`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// What is at `consumed` needs at least `need` bytes, at most [`PAGE_BYTES`](page::PAGE_BYTES).
    More {
        /// In total, counted from `consumed`.
        need: usize,
    },
    /// The sink refused what is at `consumed`.
    Paused,
    /// The stream is complete. What follows belongs to xl's handshake.
    Ended,
}

/// The result of [`Splitter::push`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes consumed. The rest must be passed again, with more.
    pub consumed: usize,
    /// Why it returned.
    pub step: Step,
}

/// What comes next in the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    XlHeader,
    LibxlHeader,
    LibxlRecord,
    LibxcHeaders,
    LibxcRecord,
    Nothing,
}

/// The position in the stream's grammar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Position {
    Before(Part),
    /// Within bytes of the non-RAM stream.
    Passing {
        bytes_left: u64,
        then: Part,
    },
    /// Within the page words of a record of `count` pages, whose length has room for `bodies`.
    Words {
        count: u32,
        bodies: usize,
    },
    /// Before the page of this word.
    Pages {
        nth: usize,
    },
}

/// Where libxc's image is in libxl's stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Image {
    Ahead,
    /// Its headers were read; it continues after a checkpoint.
    Open,
    Ended,
}

/// Why the inner parser stops: [`Step`] and [`StreamError`] in one type, for `?`.
enum Halt {
    Short(usize),
    Paused,
    Ended,
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

/// The incremental parser of a stream.
#[derive(Debug)]
pub struct Splitter {
    position: Position,
    image: Image,
    /// The page words of the current record.
    words: Vec<PageWord>,
    epoch: Epoch,
    /// A page below this number starts an epoch.
    floor: u64,
    /// Bytes of the non-RAM stream so far.
    non_ram_bytes: u64,
}

impl Default for Splitter {
    fn default() -> Self {
        Self {
            position: Position::Before(Part::XlHeader),
            image: Image::Ahead,
            words: Vec::new(),
            epoch: Epoch::default(),
            floor: u64::MAX,
            non_ram_bytes: 0,
        }
    }
}

impl Splitter {
    /// The epoch of the last page, or of the one that was refused.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Continues where the last call stopped consuming.
    ///
    /// # Errors
    /// [`StreamError`]: the migration can't continue, and nothing more may be pushed.
    pub fn push<S: Sink>(&mut self, input: &[u8], sink: &mut S) -> Result<Progress, StreamError> {
        let mut at = 0;
        let step = loop {
            match self.advance(input, &mut at, sink) {
                Ok(()) => {}
                Err(Halt::Short(need)) => break Step::More { need },
                Err(Halt::Paused) => break Step::Paused,
                Err(Halt::Ended) => break Step::Ended,
                Err(Halt::Wrong(error)) => return Err(error),
            }
        };
        Ok(Progress { consumed: at, step })
    }

    /// Checks whether the stream may end here.
    ///
    /// # Errors
    /// [`StreamError::EndedEarly`] if it is not complete.
    pub fn finish(&self) -> Result<(), StreamError> {
        use Position::{Before, Pages, Passing, Words};
        let place = match self.position {
            Before(Part::Nothing) | Passing { bytes_left: 0, then: Part::Nothing } => return Ok(()),
            Before(Part::XlHeader) => "in the header of xl",
            Before(Part::LibxlHeader) | Passing { then: Part::LibxlHeader, .. } => {
                "before the header of libxl"
            }
            Before(Part::LibxcHeaders) | Passing { then: Part::LibxcHeaders, .. } => {
                "before the headers of libxc"
            }
            Words { .. } | Pages { .. } => "within a PAGE_DATA record",
            _ if self.image == Image::Ended => "after the image of libxc",
            _ if self.image == Image::Open => "within the image of libxc",
            _ => "before the image of libxc",
        };
        Err(StreamError::EndedEarly { place })
    }

    /// Takes one header, the rest of the input that passes, or all pages of a record that are in
    /// the input.
    fn advance<S: Sink>(&mut self, input: &[u8], at: &mut usize, sink: &mut S) -> Result<(), Halt> {
        let rest = input.get(*at..).unwrap_or_default();
        match self.position {
            Position::Before(part) => *at += self.before(part, rest, sink)?,
            Position::Passing { bytes_left: 0, then } => self.position = Position::Before(then),
            Position::Passing { .. } if rest.is_empty() => return Err(Halt::Short(1)),
            Position::Passing { bytes_left, then } => {
                let count = usize::try_from(bytes_left).map_or(rest.len(), |it| it.min(rest.len()));
                *at += self.pass(rest, count, sink)?;
                self.position = Position::Passing { bytes_left: bytes_left - count as u64, then };
            }
            Position::Words { count, bodies } => self.take_words(rest, at, count, bodies)?,
            Position::Pages { nth } => self.take_pages(nth, input, at, sink)?,
        }
        Ok(())
    }

    /// Takes a header, of which all bytes must be in the input, and returns its length.
    fn before<S: Sink>(&mut self, part: Part, rest: &[u8], sink: &mut S) -> Result<usize, Halt> {
        let (head_bytes, bytes_left, then) = match part {
            Part::XlHeader => (XL_HEADER_BYTES, u64::from(headers::xl(rest)?), Part::LibxlHeader),
            Part::LibxlHeader => {
                headers::libxl(rest)?;
                (headers::LIBXL_BYTES, 0, Part::LibxlRecord)
            }
            Part::LibxlRecord => {
                let (then, bytes) = self.libxl_record(rest)?;
                (RECORD_HEAD_BYTES, padded(bytes), then)
            }
            Part::LibxcHeaders => {
                headers::libxc(rest)?;
                self.image = Image::Open;
                (headers::LIBXC_BYTES, 0, Part::LibxcRecord)
            }
            Part::LibxcRecord => {
                let (kind, bytes) = record_head(Layer::Libxc, rest)?;
                if kind == libxc::PAGE_DATA {
                    return self.page_data(rest);
                }
                (RECORD_HEAD_BYTES, padded(bytes), self.libxc_record(kind, bytes)?)
            }
            Part::Nothing => return Err(Halt::Ended),
        };
        let passed = self.pass(rest, head_bytes, sink)?;
        self.position = Position::Passing { bytes_left, then };
        Ok(passed)
    }

    /// Returns what follows the record, and its length.
    fn libxl_record(&self, rest: &[u8]) -> Result<(Part, u32), Halt> {
        let layer = Layer::Libxl;
        let (kind, bytes) = record_head(layer, rest)?;
        let then = match (kind, self.image) {
            (libxl::LIBXC_CONTEXT, Image::Ahead) => Part::LibxcHeaders,
            (libxl::CHECKPOINT_END, Image::Open) => Part::LibxcRecord,
            (libxl::END, Image::Ended) => Part::Nothing,
            (libxl::LIBXC_CONTEXT | libxl::CHECKPOINT_END | libxl::END, _) => {
                return Err(StreamError::OutOfPlace { layer, kind }.into());
            }
            (
                libxl::EMULATOR_XENSTORE_DATA
                | libxl::EMULATOR_CONTEXT
                | libxl::CHECKPOINT_STATE
                | OPTIONAL..=u32::MAX,
                _,
            ) => return Ok((Part::LibxlRecord, bytes)),
            _ => return Err(StreamError::UnknownRecord { layer, kind }.into()),
        };
        if bytes > 0 {
            return Err(StreamError::NotEmpty { layer, kind, bytes }.into());
        }
        Ok((then, bytes))
    }

    /// Returns what follows the record, which has no pages.
    fn libxc_record(&mut self, kind: u32, bytes: u32) -> Result<Part, StreamError> {
        let layer = Layer::Libxc;
        let image = match kind {
            libxc::END => Image::Ended,
            libxc::CHECKPOINT => Image::Open,
            libxc::X86_PV_INFO..=libxc::VERIFY
            | libxc::STATIC_DATA_END..=libxc::X86_MSR_POLICY
            | OPTIONAL..=u32::MAX => return Ok(Part::LibxcRecord),
            libxc::CHECKPOINT_DIRTY_PFN_LIST => {
                return Err(StreamError::OutOfPlace { layer, kind });
            }
            _ => return Err(StreamError::UnknownRecord { layer, kind }),
        };
        if bytes > 0 {
            return Err(StreamError::NotEmpty { layer, kind, bytes });
        }
        self.image = image;
        Ok(Part::LibxlRecord)
    }

    /// Passes the first `count` bytes. Pages after them are of another epoch.
    fn pass<S: Sink>(&mut self, rest: &[u8], count: usize, sink: &mut S) -> Result<usize, Halt> {
        let bytes = rest.get(..count).unwrap_or(rest);
        if sink.non_ram(bytes).is_break() {
            return Err(Halt::Paused);
        }
        self.non_ram_bytes += bytes.len() as u64;
        self.floor = u64::MAX;
        Ok(bytes.len())
    }
}

/// Reads a record's type and length.
fn record_head(layer: Layer, rest: &[u8]) -> Result<(u32, u32), Halt> {
    let mut cursor = Cursor::over(rest, RECORD_HEAD_BYTES)?;
    let (kind, bytes) = (cursor.le_u32()?, cursor.le_u32()?);
    if bytes > RECORD_BYTES_MAX {
        return Err(StreamError::RecordBytes { layer, kind, bytes }.into());
    }
    Ok((kind, bytes))
}

#[cfg(test)]
mod tests;
