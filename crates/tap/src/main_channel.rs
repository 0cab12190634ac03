//! The main channel: pages of a classic stream, in place in the batch's own
//! buffer; and the residue, which needs no buffer of the pool.

use std::ops::ControlFlow;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use page::{BATCH_PAGES, Batch, BlockId, Epoch, PAGE_BYTES, PageIndex, PagesMut};
use stream::{Progress, RECORD_BYTES_MAX, Sink, Splitter, Step, StreamKind};

use crate::error::TapError;
use crate::filling::Filling;
use crate::output::Head;
use crate::shared::{Channels, Shared};
use crate::socket::{Found, read_some, read_soon, wait};

/// Bytes read for one batch: its bodies with their records, and once a name. A
/// batch is full when they are parsed, and little is left over to carry.
const BATCH_READ_BYTES: usize = BATCH_PAGES * (8 + PAGE_BYTES) + 256;
/// Bytes read at a time where no bodies are.
const RESIDUE_READ_BYTES: usize = 256 << 10;
const _: () = assert!(RECORD_BYTES_MAX <= BATCH_READ_BYTES);
/// A QEMU that is held with nothing to send searches for dirty pages thousands
/// of times a second, which takes most of a core and its big lock; then QMP
/// takes 0.1 s and the guest is slower. After this many empty searches its main
/// channel is not read for a while, and it blocks once its socket is full of
/// their marks, some hundreds later.
const IDLE_EPOCHS: u32 = 32;
const IDLE_PAUSE: Duration = Duration::from_millis(250);
/// Fill runs in a batch; then it goes on.
const FILL_RUNS_MAX: usize = 1024;

/// Most bytes of the main channel that may have been read before the tap.
pub(crate) const READ_BEFORE_BYTES_MAX: usize = RESIDUE_READ_BYTES;

/// Reads the main channel, of which `before` was read already, to its end. Returns how
/// many epochs it counted, if it was split.
pub(crate) fn run(
    shared: &Shared,
    socket: &UnixStream,
    number: usize,
    before: Vec<u8>,
) -> Result<Option<Epoch>, TapError> {
    shared.counters.stream_bytes.fetch_add(before.len() as u64, Relaxed);
    let mut reader = Reader {
        shared,
        socket,
        number,
        fill_pages: 0,
        idling: Idling::default(),
        told_last: false,
    };
    match shared.channels {
        Channels::Classic => reader.classic(before),
        Channels::Multifd(_) => reader.beside_channels(&before),
    }
}

/// What to do after a step of the splitter.
enum Next {
    /// Parse on, perhaps with a fresh batch.
    Parse,
    /// Everything from here on is passed on.
    Residue(Residue),
}

/// What a stream is where it is not split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Residue {
    /// From its beginning.
    Whole,
    /// From where it can't be split any more.
    Rest,
    /// After RAM.
    Tail,
}

struct Reader<'t> {
    shared: &'t Shared,
    socket: &'t UnixStream,
    /// Among the readers of all channels.
    number: usize,
    fill_pages: u64,
    idling: Idling,
    /// RAM's last section was told.
    told_last: bool,
}

/// Epochs without a page, in a row.
#[derive(Debug, Default)]
struct Idling {
    epochs: u32,
    /// Before them.
    epoch: Epoch,
    pages: u64,
}

impl Reader<'_> {
    /// A stream with its pages in it.
    fn classic(&mut self, before: Vec<u8>) -> Result<Option<Epoch>, TapError> {
        let mut splitter = self.shared.splitter(StreamKind::Classic);
        let mut idle = before.is_empty();
        // What is left of a record when a batch goes on, for the next.
        let mut carry = before;
        loop {
            // Between a batch that has gone on and the next there is no buffer
            // to be held while QEMU has nothing to say.
            if idle {
                wait(self.socket, None)?;
            }
            let mut batch = self.shared.pool.take()?;
            let mut filled = carry.len();
            batch.buffer_mut()[..filled].copy_from_slice(&carry);
            carry.clear();
            let mut start = 0;
            let mut ended = false;
            idle = false;
            let step = loop {
                let bodies = batch.bodies().len();
                let progress = self.parse(&mut splitter, &mut batch, start, filled)?;
                self.tell_last(&splitter);
                self.shared.output.arrived(&batch, bodies);
                start += progress.consumed;
                let Step::More { need } = progress.step else { break progress.step };
                if batch.is_empty() {
                    let Shared { epochs, output, .. } = self.shared;
                    epochs.begin(self.number, splitter.epoch(), &**output);
                    self.pace(splitter.epoch());
                }
                if batch.bodies().is_empty() {
                    batch.buffer_mut().copy_within(start..filled, 0);
                    (start, filled) = (0, filled - start);
                }
                if start + need > BATCH_READ_BYTES {
                    break progress.step;
                }
                let room = &mut batch.buffer_mut()[filled..BATCH_READ_BYTES];
                match read_soon(self.socket, room)? {
                    Found::Bytes(count) => {
                        self.shared.counters.stream_bytes.fetch_add(count as u64, Relaxed);
                        filled += count;
                        continue;
                    }
                    Found::Nothing => idle = true,
                    Found::End => ended = true,
                }
                break progress.step;
            };
            carry.extend_from_slice(&batch.buffer()[start..filled]);
            self.hand_on(batch)?;
            if ended {
                splitter.finish()?;
            }
            if let Next::Residue(residue) = self.follow(step, &splitter)? {
                self.residue(residue, carry)?;
                return Ok((residue == Residue::Tail).then(|| splitter.epoch()));
            }
        }
    }

    fn tell_last(&mut self, splitter: &Splitter) {
        if splitter.is_last_section() && !std::mem::replace(&mut self.told_last, true) {
            self.shared.output.last_section();
        }
    }

    /// Lets a QEMU that is held and has nothing to send wait.
    fn pace(&mut self, epoch: Epoch) {
        let counters = &self.shared.counters;
        let pages = counters.body_pages.load(Relaxed) + counters.fill_pages.load(Relaxed);
        let idling = &mut self.idling;
        if pages != idling.pages {
            *idling = Idling { epochs: 0, epoch, pages };
        }
        idling.epochs += epoch.0 - idling.epoch.0;
        idling.epoch = epoch;
        if idling.epochs >= IDLE_EPOCHS {
            idling.epochs = 0;
            match &self.shared.answer {
                Some(answer) => answer.wait(IDLE_PAUSE),
                None => self.shared.output.idles(),
            }
        }
    }

    /// Parses the batch's buffer once.
    fn parse(
        &mut self,
        splitter: &mut Splitter,
        batch: &mut Batch,
        start: usize,
        filled: usize,
    ) -> Result<Progress, TapError> {
        let epoch = splitter.epoch();
        let (bytes, pages) = batch.parse_in_place();
        let mut sink = InPlace { pages, base: start, epoch, fill_pages: &mut self.fill_pages };
        Ok(splitter.push(&bytes[start..filled], &mut sink)?)
    }

    /// The main channel of a multifd migration: residue, marks, and in old
    /// versions zero pages.
    fn beside_channels(&mut self, before: &[u8]) -> Result<Option<Epoch>, TapError> {
        let shared = self.shared;
        let mut splitter = shared.splitter(StreamKind::Multifd);
        let mut filling = Filling::new(shared, self.number);
        let mut buffer: Vec<u8> = vec![0; RESIDUE_READ_BYTES.max(RECORD_BYTES_MAX)];
        buffer[..before.len()].copy_from_slice(before);
        let (mut start, mut filled) = (0, before.len());
        loop {
            let mut sink = Beside { filling: &mut filling, epoch: splitter.epoch(), error: None };
            let progress = splitter.push(&buffer[start..filled], &mut sink);
            if let Some(error) = sink.error {
                return Err(error);
            }
            let Progress { consumed, step } = progress?;
            self.tell_last(&splitter);
            start += consumed;
            if !matches!(step, Step::More { .. }) {
                filling.hand_on()?;
                if let Next::Residue(residue) = self.follow(step, &splitter)? {
                    self.residue(residue, buffer[start..filled].to_vec())?;
                    return Ok((residue == Residue::Tail).then(|| splitter.epoch()));
                }
                continue;
            }
            if filling.is_empty() {
                self.pace(splitter.epoch());
            }
            buffer.copy_within(start..filled, 0);
            (start, filled) = (0, filled - start);
            let room = &mut buffer[filled..];
            let soon =
                if filling.is_empty() { Found::Nothing } else { read_soon(self.socket, room)? };
            let found = match soon {
                Found::Nothing => {
                    filling.hand_on()?;
                    read_some(self.socket, room)?
                }
                found => found,
            };
            let Found::Bytes(count) = found else {
                filling.hand_on()?;
                splitter.finish()?;
                return Ok(None);
            };
            shared.counters.stream_bytes.fetch_add(count as u64, Relaxed);
            filled += count;
        }
    }

    /// Does what a step asks for, after all pages before it have been handed
    /// on.
    fn follow(&self, step: Step, splitter: &Splitter) -> Result<Next, TapError> {
        let output = &self.shared.output;
        match step {
            Step::More { .. } | Step::Paused => Ok(Next::Parse),
            Step::Head(head) => {
                output.head(Head {
                    bytes: head.bytes,
                    blocks: head.blocks,
                    ram_section: head.ram_section,
                    footers: head.footers,
                    may_turn_to_postcopy: head.may_turn_to_postcopy,
                })?;
                // Only now: the channels begin with their batches at once.
                self.shared.announce(Arc::new(splitter.blocks().clone()));
                Ok(Next::Parse)
            }
            Step::Tail(bytes) => {
                self.shared.ram_ended();
                // For a VM that does not run; otherwise it was sent before.
                if self.shared.output.ram_ended() {
                    self.shared.let_finish();
                }
                output.tail(&bytes)?;
                self.shared.epochs.end(self.number, splitter.epoch(), &**output);
                Ok(Next::Residue(Residue::Tail))
            }
            Step::Rest { bytes, reason } => {
                output.rest(&bytes, Some(&reason))?;
                self.shared.epochs.end(self.number, splitter.epoch(), &**output);
                Ok(Next::Residue(Residue::Rest))
            }
            Step::Whole { bytes, reason } => {
                let reason = reason.to_string();
                if self.shared.channels != Channels::Classic {
                    return Err(TapError::Unsplittable(reason));
                }
                output.whole(&bytes, Some(&reason))?;
                if self.shared.output.ram_ended() {
                    self.shared.let_finish();
                }
                Ok(Next::Residue(Residue::Whole))
            }
        }
    }

    /// Passes on everything to the end, beginning with what was read already.
    fn residue(&self, residue: Residue, mut buffer: Vec<u8>) -> Result<(), TapError> {
        let output = &self.shared.output;
        let pass = |bytes: &[u8]| match residue {
            _ if bytes.is_empty() => Ok(()),
            Residue::Whole => output.whole(bytes, None),
            Residue::Rest => output.rest(bytes, None),
            Residue::Tail => output.tail(bytes),
        };
        pass(&buffer)?;
        buffer.resize(RESIDUE_READ_BYTES, 0);
        while let Found::Bytes(count) = read_some(self.socket, &mut buffer)? {
            self.shared.counters.stream_bytes.fetch_add(count as u64, Relaxed);
            pass(&buffer[..count])?;
        }
        Ok(())
    }

    fn hand_on(&mut self, batch: Batch) -> Result<(), TapError> {
        let fill_pages = std::mem::take(&mut self.fill_pages);
        if batch.is_empty() {
            return Ok(());
        }
        let counters = &self.shared.counters;
        counters.body_pages.fetch_add(batch.bodies().len() as u64, Relaxed);
        counters.fill_pages.fetch_add(fill_pages, Relaxed);
        let Shared { epochs, output, .. } = self.shared;
        epochs.begin(self.number, batch.epoch, &**output);
        Ok(output.batch(batch)?)
    }
}

/// Puts what the splitter finds in a batch's buffer into its tables.
struct InPlace<'b> {
    pages: PagesMut<'b>,
    /// Where in the buffer the splitter began to look.
    base: usize,
    epoch: Epoch,
    fill_pages: &'b mut u64,
}

impl InPlace<'_> {
    /// Whether the batch can take a page of this block.
    fn takes(&mut self, block: BlockId) -> ControlFlow<()> {
        if self.pages.is_empty() {
            *self.pages.block = block;
            *self.pages.epoch = self.epoch;
        }
        if *self.pages.block == block && *self.pages.epoch == self.epoch {
            ControlFlow::Continue(())
        } else {
            ControlFlow::Break(())
        }
    }
}

impl Sink for InPlace<'_> {
    fn body(&mut self, block: BlockId, page: PageIndex, at: usize) -> ControlFlow<()> {
        if self.pages.room() == 0 {
            return ControlFlow::Break(());
        }
        self.takes(block)?;
        self.pages.push_body(page, self.base + at);
        ControlFlow::Continue(())
    }

    fn fill(&mut self, block: BlockId, page: PageIndex, byte: u8) -> ControlFlow<()> {
        if self.pages.fill_runs() >= FILL_RUNS_MAX {
            return ControlFlow::Break(());
        }
        self.takes(block)?;
        self.pages.push_fill(page, byte);
        *self.fill_pages += 1;
        ControlFlow::Continue(())
    }

    fn epoch(&mut self, epoch: Epoch) {
        self.epoch = epoch;
    }
}

/// Takes the zero pages that come beside the channels.
struct Beside<'s, 't> {
    filling: &'s mut Filling<'t>,
    epoch: Epoch,
    error: Option<TapError>,
}

impl Beside<'_, '_> {
    fn noted(&mut self, outcome: Result<(), TapError>) -> ControlFlow<()> {
        match outcome {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                self.error = Some(error);
                ControlFlow::Break(())
            }
        }
    }
}

impl Sink for Beside<'_, '_> {
    fn body(&mut self, _: BlockId, _: PageIndex, _: usize) -> ControlFlow<()> {
        self.noted(Err(TapError::Connection("pages on the main channel beside multifd")))
    }

    fn fill(&mut self, block: BlockId, page: PageIndex, byte: u8) -> ControlFlow<()> {
        let outcome = self.filling.fill(block, self.epoch, page, byte);
        self.noted(outcome)
    }

    fn epoch(&mut self, epoch: Epoch) {
        self.epoch = epoch;
        if let Err(error) = self.filling.begin(epoch) {
            self.error = Some(error);
        }
    }
}
