//! Reads the main channel: pages of a classic stream, parsed in the batch's own
//! buffer, and the non-RAM stream, which uses no pool buffer.

use std::ops::ControlFlow;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use page::{BATCH_PAGES, Batch, BlockId, Buffer, Epoch, PAGE_BYTES, PageIndex, PagesMut};
use stream::{Progress, RECORD_BYTES_MAX, Sink, Splitter, Step, StreamKind};

use crate::error::TapError;
use crate::filling::Filling;
use crate::shared::{Channels, Shared};
use crate::socket::{SocketRead, read_some, read_soon, wait};

/// Bytes read for one batch: its bodies with their records, and one block name. The
/// batch is full once they are parsed, so little is left to carry over.
const BATCH_READ_BYTES: usize = BATCH_PAGES * (8 + PAGE_BYTES) + 256;
/// Bytes read at a time where there are no bodies.
const READ_BYTES: usize = 256 << 10;
const _: () = assert!(RECORD_BYTES_MAX <= BATCH_READ_BYTES);
/// Empty searches for dirty pages after which the main channel is not read for a
/// while.
///
/// A QEMU that is held and has nothing to send searches for dirty pages thousands of
/// times a second, which takes most of a core and its big lock: QMP commands then take
/// 0.1 s and the guest is slower. While the channel isn't read, QEMU blocks once its
/// socket is full of the searches' marks, some hundreds later.
const IDLE_EPOCHS: u32 = 32;
const IDLE_PAUSE: Duration = Duration::from_millis(250);
/// Fill runs after which a batch is handed on.
const FILL_RUNS_MAX: usize = 1024;

/// Most bytes of the main channel that may have been read before the tap.
pub(crate) const READ_BEFORE_BYTES_MAX: usize = READ_BYTES;
const _: () = assert!(READ_BEFORE_BYTES_MAX <= BATCH_READ_BYTES);

/// Reads the main channel to its end; `before` was already read. Returns the number of
/// epochs that it counted, if it was split.
pub(crate) fn run(
    shared: &Shared,
    socket: &UnixStream,
    number: usize,
    before: &[u8],
) -> Result<Option<Epoch>, TapError> {
    let mut reader = Reader { shared, socket, number, idling: Idling::default(), told_last: false };
    match shared.channels {
        Channels::Classic => reader.classic(before),
        Channels::Multifd(_) => reader.beside_channels(before),
    }
}

/// The action after a step of the splitter.
enum Next {
    /// Continue parsing, perhaps with a new batch.
    Parse,
    /// Pass on everything that follows.
    PassOn(Unsplit),
}

/// The part of a stream that is not split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unsplit {
    /// The whole stream.
    Whole,
    /// The rest, from where it can't be split any more.
    Rest,
    /// The non-RAM stream after RAM.
    Tail,
}

struct Reader<'t> {
    shared: &'t Shared,
    socket: &'t UnixStream,
    /// Its number among the readers of all channels.
    number: usize,
    idling: Idling,
    /// RAM's last section was reported.
    told_last: bool,
}

/// Consecutive epochs without a page.
#[derive(Debug, Default)]
struct Idling {
    epochs: u32,
    /// The epoch up to which they are counted.
    epoch: Epoch,
    batches: u64,
}

impl Reader<'_> {
    /// Reads a classic stream, which has the pages in it.
    fn classic(&mut self, before: &[u8]) -> Result<Option<Epoch>, TapError> {
        let mut splitter = self.shared.splitter(StreamKind::Classic);
        let mut idle = before.is_empty();
        // The incomplete record at the end of a batch, carried over to the next.
        let (mut carry, mut carried) = (Buffer::new(BATCH_READ_BYTES), before.len());
        carry[..carried].copy_from_slice(before);
        loop {
            // Between batches it holds no buffer while QEMU sends nothing.
            if idle {
                wait(self.socket, None)?;
            }
            let mut batch = self.shared.pool.take()?;
            let mut filled = carried;
            batch.buffer_mut()[..filled].copy_from_slice(&carry[..filled]);
            let mut start = 0;
            let mut ended = false;
            idle = false;
            let step = loop {
                let bodies = batch.bodies().len();
                let progress = parse(&mut splitter, &mut batch, start, filled)?;
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
                    SocketRead::Bytes(count) => {
                        filled += count;
                        continue;
                    }
                    SocketRead::Nothing => idle = true,
                    SocketRead::End => ended = true,
                }
                break progress.step;
            };
            carried = filled - start;
            carry[..carried].copy_from_slice(&batch.buffer()[start..filled]);
            self.hand_on(batch)?;
            if ended {
                splitter.finish()?;
            }
            if let Next::PassOn(part) = self.follow(step, &splitter)? {
                self.pass_on(part, &carry[..carried])?;
                return Ok((part == Unsplit::Tail).then(|| splitter.epoch()));
            }
        }
    }

    fn tell_last(&mut self, splitter: &Splitter) {
        if splitter.is_last_section() && !std::mem::replace(&mut self.told_last, true) {
            self.shared.output.last_section();
        }
    }

    /// Slows down a QEMU that is held and has nothing to send.
    fn pace(&mut self, epoch: Epoch) {
        let batches = self.shared.counters.batches.load(Relaxed);
        let idling = &mut self.idling;
        if batches != idling.batches {
            *idling = Idling { epochs: 0, epoch, batches };
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

    /// Reads the main channel of a multifd migration: the non-RAM stream, epoch marks,
    /// and in old versions zero pages.
    fn beside_channels(&mut self, before: &[u8]) -> Result<Option<Epoch>, TapError> {
        let shared = self.shared;
        let mut splitter = shared.splitter(StreamKind::Multifd);
        let mut filling = Filling::new(shared, self.number);
        let mut buffer = Buffer::new(READ_BYTES.max(RECORD_BYTES_MAX));
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
                if let Next::PassOn(part) = self.follow(step, &splitter)? {
                    self.pass_on(part, &buffer[start..filled])?;
                    return Ok((part == Unsplit::Tail).then(|| splitter.epoch()));
                }
                continue;
            }
            if filling.is_empty() {
                self.pace(splitter.epoch());
            }
            buffer.copy_within(start..filled, 0);
            (start, filled) = (0, filled - start);
            let room = &mut buffer[filled..];
            let soon = if filling.is_empty() {
                SocketRead::Nothing
            } else {
                read_soon(self.socket, room)?
            };
            let found = match soon {
                SocketRead::Nothing => {
                    filling.hand_on()?;
                    read_some(self.socket, room)?
                }
                found => found,
            };
            let SocketRead::Bytes(count) = found else {
                filling.hand_on()?;
                splitter.finish()?;
                return Ok(None);
            };
            filled += count;
        }
    }

    /// Acts on a step, after all pages before it have been handed on.
    fn follow(&self, step: Step, splitter: &Splitter) -> Result<Next, TapError> {
        let output = &self.shared.output;
        match step {
            Step::More { .. } | Step::Paused => Ok(Next::Parse),
            Step::Head(head) => {
                output.head(head)?;
                // Only now, because the channels start to deliver batches at once.
                self.shared.announce(Arc::new(splitter.blocks().clone()));
                Ok(Next::Parse)
            }
            Step::Tail(bytes) => {
                self.shared.ram_ended();
                // Its SWITCHOVER_ACK is for a stopped VM; a running VM's was sent
                // before.
                self.shared.let_finish();
                output.tail(&bytes)?;
                self.shared.epochs.end(self.number, splitter.epoch(), &**output);
                Ok(Next::PassOn(Unsplit::Tail))
            }
            Step::Rest { bytes, reason } => {
                output.rest(&bytes, Some(&reason))?;
                self.shared.epochs.end(self.number, splitter.epoch(), &**output);
                Ok(Next::PassOn(Unsplit::Rest))
            }
            Step::Whole { bytes, reason } => {
                let reason = reason.to_string();
                if self.shared.channels != Channels::Classic {
                    return Err(TapError::Unsplittable(reason));
                }
                output.whole(&bytes, Some(&reason))?;
                self.shared.let_finish();
                Ok(Next::PassOn(Unsplit::Whole))
            }
        }
    }

    /// Passes on everything to the end, starting with the bytes already read.
    fn pass_on(&self, part: Unsplit, before: &[u8]) -> Result<(), TapError> {
        let output = &self.shared.output;
        let pass = |bytes: &[u8]| match part {
            _ if bytes.is_empty() => Ok(()),
            Unsplit::Whole => output.whole(bytes, None),
            Unsplit::Rest => output.rest(bytes, None),
            Unsplit::Tail => output.tail(bytes),
        };
        pass(before)?;
        let mut buffer = Buffer::new(READ_BYTES);
        while let SocketRead::Bytes(count) = read_some(self.socket, &mut buffer)? {
            pass(&buffer[..count])?;
        }
        Ok(())
    }

    fn hand_on(&self, batch: Batch) -> Result<(), TapError> {
        if batch.is_empty() {
            return Ok(());
        }
        let Shared { counters, epochs, output, .. } = self.shared;
        counters.batches.fetch_add(1, Relaxed);
        epochs.begin(self.number, batch.epoch, &**output);
        Ok(output.batch(batch)?)
    }
}

/// Parses the batch's buffer once.
fn parse(
    splitter: &mut Splitter,
    batch: &mut Batch,
    start: usize,
    filled: usize,
) -> Result<Progress, TapError> {
    let epoch = splitter.epoch();
    let (bytes, pages) = batch.parse_in_place();
    let mut sink = InPlace { pages, base: start, epoch };
    Ok(splitter.push(&bytes[start..filled], &mut sink)?)
}

/// Enters the pages that the splitter finds in a batch's buffer into the batch's
/// tables.
struct InPlace<'b> {
    pages: PagesMut<'b>,
    /// The buffer offset where the splitter started.
    base: usize,
    epoch: Epoch,
}

impl Sink for InPlace<'_> {
    fn body(&mut self, block: BlockId, page: PageIndex, at: usize) -> ControlFlow<()> {
        if self.pages.room() == 0 {
            return ControlFlow::Break(());
        }
        self.pages.takes(block, self.epoch)?;
        self.pages.push_body(page, self.base + at);
        ControlFlow::Continue(())
    }

    fn fill(&mut self, block: BlockId, page: PageIndex, byte: u8) -> ControlFlow<()> {
        if self.pages.fill_runs() >= FILL_RUNS_MAX {
            return ControlFlow::Break(());
        }
        self.pages.takes(block, self.epoch)?;
        self.pages.push_fill(page, byte);
        ControlFlow::Continue(())
    }

    fn epoch(&mut self, epoch: Epoch) {
        self.epoch = epoch;
    }
}

/// Takes the zero pages that the main channel carries next to multifd channels.
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
        self.noted(Err(TapError::Connection("pages on the main channel next to multifd")))
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
