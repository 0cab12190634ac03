//! Entry points for the fuzzer and for this crate's tests. Everything asserted here is a guarantee
//! that callers rely on.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use page::{BlockId, Epoch, PAGE_BYTES, PageIndex, Pool, SLOT_BYTES};

use crate::write::{self, page_data, record};
use crate::{
    DomainKind, JoinError, Joined, Joiner, PageKind, PageWord, RECORD_PAGES_MAX, Record, Sink,
    Splitter, Step, StreamError, fill_batch, libxc, libxl,
};

/// More pages than the seeds' domains have: a table of 4 MiB.
const PAGES_MAX: u32 = 1 << 20;

/// A page that was taken out of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TakenPage {
    /// Its number and type.
    pub word: PageWord,
    /// Its epoch.
    pub epoch: Epoch,
    /// Its bytes; empty if its type has none.
    pub body: Vec<u8>,
}

/// The parts of a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// The non-RAM stream.
    pub non_ram: Vec<u8>,
    /// The position of each epoch in it, from epoch 1.
    pub positions: Vec<u64>,
    /// The pages in order.
    pub pages: Vec<TakenPage>,
    /// What follows the stream.
    pub rest: Vec<u8>,
}

struct Collect<'a> {
    input: &'a [u8],
    parts: &'a mut Parts,
    /// Pages and pieces of the non-RAM stream to take before the next is refused.
    room: usize,
}

impl Collect<'_> {
    fn has_room(&mut self) -> ControlFlow<()> {
        match self.room.checked_sub(1) {
            Some(left) => self.room = left,
            None => return ControlFlow::Break(()),
        }
        ControlFlow::Continue(())
    }
}

impl Sink for Collect<'_> {
    fn non_ram(&mut self, bytes: &[u8]) -> ControlFlow<()> {
        self.has_room()?;
        self.parts.non_ram.extend_from_slice(bytes);
        ControlFlow::Continue(())
    }

    fn epoch(&mut self, epoch: Epoch, position: u64) {
        self.parts.positions.push(position);
        assert_eq!(epoch.0 as usize, self.parts.positions.len());
        assert_eq!(position, self.parts.non_ram.len() as u64);
    }

    fn page(&mut self, word: PageWord, at: Option<usize>) -> ControlFlow<()> {
        assert_eq!(at.is_some(), word.kind.has_body());
        self.has_room()?;
        let epoch = Epoch(u32::try_from(self.parts.positions.len()).expect("epochs are counted"));
        assert!(epoch.0 > 0, "an epoch starts before its first page");
        if let Some(last) = self.parts.pages.last().filter(|last| last.epoch == epoch) {
            assert!(last.word.page < word.page, "page numbers ascend within an epoch");
        }
        let body = at.map_or(&[][..], |at| &self.input[at..at + PAGE_BYTES]).to_vec();
        self.parts.pages.push(TakenPage { word, epoch, body });
        ControlFlow::Continue(())
    }
}

/// Splits a stream that arrives in pieces of `piece_bytes`, with a sink that pauses after every
/// `pause_after` pages and pieces of the non-RAM stream.
///
/// # Errors
/// The splitter's error, also for the stream's end, and the parts before it.
pub fn split(
    data: &[u8],
    piece_bytes: usize,
    pause_after: usize,
) -> Result<Parts, Box<(Parts, StreamError)>> {
    let mut splitter = Splitter::default();
    let mut parts = Parts::default();
    let (mut from, mut to) = (0, 0);
    loop {
        let input = &data[from..to];
        let mut sink = Collect { input, parts: &mut parts, room: pause_after.max(1) };
        let progress = match splitter.push(input, &mut sink) {
            Ok(progress) => progress,
            Err(error) => return Err(Box::new((parts, error))),
        };
        assert!(progress.consumed <= input.len());
        from += progress.consumed;
        match progress.step {
            Step::More { need } => {
                assert!(need > to - from, "it requests more than there is");
                assert!(need <= PAGE_BYTES);
                if to == data.len() {
                    let error = splitter.finish().expect_err("the stream is not complete");
                    return Err(Box::new((parts, error)));
                }
                to = to.saturating_add(piece_bytes.max(1)).min(data.len());
            }
            Step::Paused => {}
            Step::Ended => {
                assert_eq!(splitter.finish(), Ok(()));
                parts.rest = data[from..].to_vec();
                return Ok(parts);
            }
        }
    }
}

/// Joins the parts of a stream. Pages come in batches of up to `batch_pages` of one epoch; `order`
/// may change the order of those that stand at the same position of the non-RAM stream.
///
/// # Errors
/// The joiner's error.
pub fn join(
    parts: &Parts,
    batch_pages: usize,
    mut order: impl FnMut(&mut Vec<&[TakenPage]>),
) -> Result<Vec<u8>, JoinError> {
    let mut joiner = Joiner::new(PAGES_MAX);
    let mut out = Vec::new();
    let (mut non_ram, mut pages) = (&parts.non_ram[..], &parts.pages[..]);
    let mut epoch = Epoch(0);
    for here in parts.positions.chunk_by(|position, next| position == next) {
        let written = parts.non_ram.len() - non_ram.len();
        let position = usize::try_from(here[0]).expect("a position in a slice");
        let (before, after) = non_ram.split_at(position - written);
        joiner.non_ram(before);
        out.extend_from_slice(before);
        non_ram = after;
        for position in here {
            epoch.0 += 1;
            joiner.epoch(epoch, *position)?;
        }
        let (taken, later) = pages.split_at(pages.partition_point(|page| page.epoch <= epoch));
        pages = later;
        let batches = taken.chunk_by(|page, next| page.epoch == next.epoch);
        let mut batches: Vec<&[TakenPage]> =
            batches.flat_map(|it| it.chunks(batch_pages.clamp(1, RECORD_PAGES_MAX))).collect();
        order(&mut batches);
        for batch in batches {
            join_batch(&mut joiner, batch, &mut out)?;
        }
    }
    out.extend_from_slice(non_ram);
    out.extend_from_slice(&parts.rest);
    Ok(out)
}

fn join_batch(
    joiner: &mut Joiner,
    batch: &[TakenPage],
    out: &mut Vec<u8>,
) -> Result<(), JoinError> {
    let words: Vec<PageWord> = batch.iter().map(|page| page.word).collect();
    let mut record = Record::default();
    match joiner.page_data(batch[0].epoch, &words, &mut record)? {
        Joined::Record => {
            out.extend_from_slice(record.head());
            for nth in record.bodies() {
                out.extend_from_slice(&batch[*nth].body);
            }
        }
        Joined::Stale => {}
        Joined::Early => panic!("its epoch has started"),
    }
    Ok(())
}

/// A batch that was handed on: its block and epoch, and how many bodies and fill runs it has.
type HandedOn = (BlockId, Epoch, usize, usize);

/// Carries a complete stream as agents do: in batches, into each of which at most `read_bytes` are
/// read, at least a page. Returns what the receiver gets, and the batches.
///
/// # Errors
/// The joiner's error.
pub fn carry(data: &[u8], read_bytes: usize) -> Result<(Vec<u8>, Vec<HandedOn>), JoinError> {
    let pool = Pool::new(SLOT_BYTES);
    let mut splitter = Splitter::default();
    let (mut joiner, mut record) = (Joiner::new(PAGES_MAX), Record::default());
    let (mut out, mut batches) = (Vec::new(), Vec::new());
    let (mut rest, mut epoch) = (data, Epoch(0));
    loop {
        let mut batch = pool.take().expect("the batch before it is dropped");
        let filled = read_bytes.max(PAGE_BYTES).min(rest.len());
        batch.buffer_mut()[..filled].copy_from_slice(&rest[..filled]);
        let before = out.len();
        let pass = |bytes: &[u8]| out.extend_from_slice(bytes);
        let progress = fill_batch(&mut splitter, &mut batch, 0, filled, pass);
        let progress = progress.expect("a stream without errors");
        joiner.non_ram(&out[before..]);
        if !batch.is_empty() {
            if batch.epoch != epoch {
                epoch = batch.epoch;
                joiner.epoch(epoch, joiner.written())?;
            }
            batches.push((batch.block, epoch, batch.bodies().len(), batch.fills().len()));
            joiner.batch(&batch, &mut record, |bytes| out.extend_from_slice(bytes))?;
        }
        if progress.step == Step::Ended {
            return Ok((out, batches));
        }
        assert!(progress.consumed > 0 || !batch.is_empty(), "there is something to take");
        rest = &rest[progress.consumed..];
    }
}

/// What pages between two other records do to a domain's memory.
type Changes<'a> = BTreeMap<PageIndex, (PageKind, &'a [u8])>;

/// The changes at each position of the non-RAM stream that has pages: the last version counts.
#[must_use]
pub fn changes(parts: &Parts) -> Vec<(u64, Changes<'_>)> {
    let mut changes: Vec<(u64, Changes<'_>)> = Vec::new();
    for page in &parts.pages {
        let position = parts.positions[page.epoch.0 as usize - 1];
        if changes.last().is_none_or(|(last, _)| *last != position) {
            changes.push((position, Changes::new()));
        }
        if let Some((_, here)) = changes.last_mut() {
            here.insert(page.word.page, (page.word.kind, &page.body[..]));
        }
    }
    changes
}

/// Splits any bytes as a stream, and joins its parts. The first byte selects how they arrive.
pub fn stream(data: &[u8]) {
    let Some((&how, data)) = data.split_first() else { return };
    let piece_bytes = [1 << 20, 4096, 517, 1][usize::from(how & 3)];
    let pause_after = [1 << 20, 7, 2, 1][usize::from(how >> 2 & 3)];
    let whole = split(data, usize::MAX, usize::MAX);
    let pieces = split(data, piece_bytes, pause_after);
    assert_eq!(whole, pieces, "how a stream arrives makes no difference");
    let Ok(parts) = whole else { return };
    let batch_pages = [1 << 20, 128, 3, 1][usize::from(how >> 4 & 3)];
    let joined = match join(&parts, batch_pages, |_| {}) {
        Ok(joined) => joined,
        Err(error) => {
            assert!(matches!(error, JoinError::OutsideDomain { .. }), "{error}");
            return;
        }
    };
    let again = split(&joined, usize::MAX, usize::MAX);
    assert_eq!(again.as_ref(), Ok(&parts), "in order, nothing changes");
    let reversed = join(&parts, batch_pages, |batches| batches.reverse());
    let read_bytes = [100_000, 16_000, 5000, PAGE_BYTES][usize::from(how >> 6)];
    let carried = carry(data, read_bytes).map(|(carried, _)| carried);
    for other in [reversed, carried] {
        let again = split(&other.expect("the same pages"), usize::MAX, usize::MAX);
        let again = again.expect("a joined stream can be split");
        assert_eq!(again.non_ram, parts.non_ram);
        assert_eq!(changes(&again), changes(&parts), "in any order, memory is the same");
    }
}

/// Small valid streams, for mutation. The byte before each selects how [`stream`] takes it.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    (0..64).map(seed).collect()
}

fn seed(how: u8) -> Vec<u8> {
    let domain = if how & 1 == 0 { DomainKind::Pv } else { DomainKind::Hvm };
    let pass = |out: &mut Vec<u8>, from: u32| {
        let kinds = [PageKind::Normal, PageKind::L4Pinned, PageKind::Invalid];
        let pages = kinds.into_iter().zip(from..);
        let pages: Vec<_> = pages
            .map(|(kind, page)| (PageWord { page: PageIndex(page), kind }, page.to_le_bytes()[0]))
            .collect();
        page_data(out, &pages[..1]);
        page_data(out, &pages[1..]);
    };
    let mut out = vec![how];
    write::begin(&mut out, domain);
    pass(&mut out, 0);
    if how & 2 != 0 {
        pass(&mut out, 1);
    }
    if how & 4 != 0 {
        record(&mut out, 0x8000_0001, &[1, 2, 3]);
    }
    if how & 8 != 0 {
        record(&mut out, libxc::CHECKPOINT, &[]);
        record(&mut out, libxl::CHECKPOINT_STATE, &[0; 4]);
        record(&mut out, libxl::CHECKPOINT_END, &[]);
    }
    if how & 16 != 0 {
        record(&mut out, libxc::VERIFY, &[]);
        pass(&mut out, 0);
    }
    write::end(&mut out, domain);
    if how & 32 != 0 {
        out.extend_from_slice(b"domain is yours");
    }
    out
}
