//! Entry points for the fuzzers and for the seeded runs in this crate's tests.
//! Everything asserted here is a guarantee of the splitter that its callers
//! rely on for indexing.

use std::ops::ControlFlow;

use page::{BlockId, Epoch, PAGE_BYTES, PageIndex};

use crate::multifd::{HEAD_BYTES, INIT_BYTES, Init, Packet, write_head};
use crate::{
    Block, Blocks, Head, PartSection, RECORD_BYTES_MAX, Sink, Splitter, Step, StreamError,
    StreamKind, write,
};

/// A page that was taken out of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TakenPage {
    /// Its block.
    pub block: BlockId,
    /// Its number.
    pub page: PageIndex,
    /// Its epoch.
    pub epoch: Epoch,
    /// Its first byte.
    pub first: u8,
    /// Whether it had a body.
    pub body: bool,
}

/// The result of splitting a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// The head, if it was complete.
    pub head: Option<Head>,
    /// The pages in order.
    pub pages: Vec<TakenPage>,
    /// The tail, if RAM ended.
    pub tail: Option<Vec<u8>>,
    /// The rest of an answered stream that can't be split any more.
    pub rest: Option<Vec<u8>>,
    /// The whole stream, if it can't be split.
    pub whole: Option<Vec<u8>>,
}

struct Collect<'a> {
    input: &'a [u8],
    taken: &'a mut Vec<TakenPage>,
    epoch: &'a mut Epoch,
    /// Refuse a page after this many were taken, as a full batch does.
    pause_after: usize,
    room: usize,
    head_seen: bool,
}

impl Collect<'_> {
    fn take(&mut self, block: BlockId, page: PageIndex, first: u8, body: bool) -> ControlFlow<()> {
        assert!(self.head_seen, "the head comes before the first page");
        if self.room == 0 {
            return ControlFlow::Break(());
        }
        self.room -= 1;
        self.taken.push(TakenPage { block, page, epoch: *self.epoch, first, body });
        ControlFlow::Continue(())
    }
}

impl Sink for Collect<'_> {
    fn body(&mut self, block: BlockId, page: PageIndex, at: usize) -> ControlFlow<()> {
        assert!(at + PAGE_BYTES <= self.input.len(), "a body lies in the input");
        self.take(block, page, self.input[at], true)
    }

    fn fill(&mut self, block: BlockId, page: PageIndex, byte: u8) -> ControlFlow<()> {
        self.take(block, page, byte, false)
    }

    fn epoch(&mut self, epoch: Epoch) {
        assert_eq!(epoch.0, self.epoch.0 + 1);
        *self.epoch = epoch;
        self.room = self.pause_after;
    }
}

/// Splits a stream that arrives in pieces of `piece_bytes`, with a sink that
/// refuses a page after every `pause_after` pages.
///
/// # Errors
/// The splitter's error, also for the stream's end.
pub fn split(
    stream: StreamKind,
    data: &[u8],
    piece_bytes: usize,
    pause_after: usize,
) -> Result<Taken, Box<(Taken, StreamError)>> {
    split_by(Splitter::new(stream), data, piece_bytes, pause_after)
}

/// The same with the given splitter, which must be new.
///
/// # Errors
/// As [`split`].
pub fn split_by(
    mut splitter: Splitter,
    data: &[u8],
    piece_bytes: usize,
    pause_after: usize,
) -> Result<Taken, Box<(Taken, StreamError)>> {
    let mut taken = Taken::default();
    let mut epoch = Epoch::default();
    let (mut from, mut to) = (0, 0);
    loop {
        let input = &data[from..to];
        let mut pages = std::mem::take(&mut taken.pages);
        let mut sink = Collect {
            input,
            taken: &mut pages,
            epoch: &mut epoch,
            pause_after: pause_after.max(1),
            room: pause_after.max(1),
            head_seen: taken.head.is_some(),
        };
        let result = splitter.push(input, &mut sink);
        taken.pages = pages;
        let progress = match result {
            Ok(progress) => progress,
            Err(error) => return Err(Box::new((taken, error))),
        };
        assert!(progress.consumed <= input.len());
        from += progress.consumed;
        match progress.step {
            Step::More { need } => {
                assert!(need > to - from, "it asks for more than there is");
                if to == data.len() {
                    return match splitter.finish() {
                        Ok(()) => Ok(taken),
                        Err(error) => Err(Box::new((taken, error))),
                    };
                }
                to = (to + piece_bytes.max(1)).min(data.len());
                assert!(need <= RECORD_BYTES_MAX);
            }
            Step::Paused => assert!(progress.consumed > 0, "a sink with room is not refused"),
            Step::Head(head) => assert!(taken.head.replace(head).is_none(), "one head"),
            Step::Tail(mut bytes) => {
                bytes.extend_from_slice(&data[from..]);
                taken.tail = Some(bytes);
                return Ok(taken);
            }
            Step::Rest { mut bytes, .. } => {
                assert!(taken.head.is_some(), "before the head it is the whole stream");
                bytes.extend_from_slice(&data[from..]);
                taken.rest = Some(bytes);
                return Ok(taken);
            }
            Step::Whole { mut bytes, .. } => {
                assert!(taken.pages.is_empty() && taken.head.is_none());
                bytes.extend_from_slice(&data[from..]);
                assert_eq!(bytes, data, "the whole stream is the whole stream");
                taken.whole = Some(bytes);
                return Ok(taken);
            }
        }
    }
}

/// Splits any bytes as a main stream. The first byte selects how they arrive.
pub fn main_stream(data: &[u8]) {
    let Some((&how, data)) = data.split_first() else { return };
    let stream = if how & 1 == 0 { StreamKind::Classic } else { StreamKind::Multifd };
    let piece_bytes = [1 << 20, 4096, 517, 1][usize::from(how >> 1 & 3)];
    let pause_after = [1 << 20, 7, 2, 1][usize::from(how >> 3 & 3)];
    let new = if how >> 5 & 1 == 0 { Splitter::new } else { Splitter::answered };
    let whole = split_by(new(stream), data, usize::MAX >> 1, usize::MAX);
    let pieces = split_by(new(stream), data, piece_bytes, pause_after);
    assert_eq!(whole, pieces, "how a stream arrives makes no difference");
}

/// Parses any bytes as a multifd channel.
pub fn multifd_channel(data: &[u8]) {
    let Some((init, mut rest)) = data.split_first_chunk::<INIT_BYTES>() else { return };
    if Init::parse(init).is_err() {
        return;
    }
    let Ok(blocks) = Blocks::new(seed_blocks()) else { return };
    while let Some((head, bodies)) = rest.split_first_chunk::<HEAD_BYTES>() {
        let Ok(packet) = Packet::parse(head) else { return };
        let Ok(pages) = packet.pages(&blocks) else { return };
        if let Some(pages) = pages {
            assert_eq!(pages.normal().len(), packet.normal());
            let bytes = blocks.list()[usize::from(pages.block.0)].bytes;
            assert!(pages.normal().chain(pages.zero()).all(|page| page.offset() < bytes));
        }
        rest = bodies.get(packet.normal() * PAGE_BYTES..).unwrap_or_default();
    }
}

/// The RAM blocks of the seeds.
#[must_use]
pub fn seed_blocks() -> Vec<Block> {
    let block = |name: &str, bytes| Block { name: name.to_owned(), bytes };
    vec![block("pc.ram", 1 << 20), block("vga.vram", 1 << 16), block("/rom@etc/acpi/tables", 4096)]
}

/// A small valid main stream, for mutation. The byte before it selects how
/// [`main_stream`] feeds it.
#[must_use]
pub fn seed_main(how: u8) -> Vec<u8> {
    let multifd = how & 1 == 1;
    let mut out = vec![how];
    write::header(&mut out, Some("pc-i440fx-7.2"));
    write::open_return_path(&mut out);
    write::ping(&mut out, 1);
    if how >> 6 & 1 == 1 {
        write::postcopy_advise(&mut out);
    }
    write::ram_setup(&mut out, 2, &seed_blocks(), true, multifd);
    let section = |part: &mut PartSection<'_>, from: u32| {
        for page in from..from + 6 {
            let byte = page.to_le_bytes()[0];
            let done = match page % 3 {
                0 => part.body("pc.ram", PageIndex(page), &[byte; PAGE_BYTES]),
                1 => part.fill("pc.ram", PageIndex(page), 0),
                _ => part.fill("vga.vram", PageIndex(page % 16), byte),
            };
            done.unwrap_or(());
        }
        if multifd {
            part.multifd_flush();
        }
    };
    for from in [0, 4] {
        let mut part = PartSection::begin(&mut out, 2, true);
        section(&mut part, from);
        part.finish();
    }
    match how >> 5 & 3 {
        0 | 2 => {}
        1 => {
            let mut part = PartSection::begin(&mut out, 2, true);
            for page in [PageIndex(8), PageIndex(9)] {
                part.difference("pc.ram", page, &[0, 1, 7]).unwrap_or(());
            }
            part.finish();
        }
        _ => write::postcopy_discard(&mut out, "pc.ram", PageIndex(4)),
    }
    write::switchover_start(&mut out);
    write::ping(&mut out, 3);
    let mut end = PartSection::begin_end(&mut out, 2, true);
    section(&mut end, 8);
    end.finish();
    write::section_header(&mut out, true, 3, "timer", 2);
    out.extend_from_slice(b"state of devices\x00");
    out
}

/// A small valid multifd channel, for mutation.
#[must_use]
pub fn seed_multifd() -> Vec<u8> {
    let mut out = Vec::new();
    Init { uuid: [0; 16], id: 1 }.write(&mut out);
    write_head(&mut out, "", &[], &[], true);
    write_head(&mut out, "pc.ram", &[PageIndex(1), PageIndex(9)], &[PageIndex(4)], false);
    out.extend_from_slice(&[7; 2 * PAGE_BYTES]);
    write_head(&mut out, "vga.vram", &[], &[PageIndex(0), PageIndex(1)], true);
    out
}
