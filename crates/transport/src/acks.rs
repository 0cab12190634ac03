//! Reads a lane's acknowledgements and answers, and releases the batches they cover.

use std::io::{self, Read};
use std::sync::atomic::Ordering::Relaxed;

use identity::Reader;
use wire::{Ack, Answer};

use crate::error::LanesError;
use crate::flight::Flight;
use crate::load::Load;
use crate::shared::Shared;

/// Batches of one connection that are both written and acknowledged.
///
/// Whichever of its two threads comes second, the one that wrote a batch or the one
/// that read its acknowledgement, finds it here.
#[derive(Debug)]
pub struct Released<'c, X> {
    shared: &'c Shared<X>,
    number: usize,
    flight: &'c Flight<X>,
}

// Without a bound on `X`, unlike a derive.
impl<X> Clone for Released<'_, X> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<X> Copy for Released<'_, X> {}

impl<'c, X> Released<'c, X> {
    pub(crate) fn new(shared: &'c Shared<X>, number: usize, flight: &'c Flight<X>) -> Self {
        Self { shared, number, flight }
    }

    /// The next such batch, and the destination's answer if it was more than an
    /// acknowledgement.
    #[must_use]
    pub fn next(self) -> Option<(Load<X>, Option<Answer>)> {
        let released = self.flight.release()?;
        let meter = &self.shared.meters[self.number];
        meter.batches.fetch_add(1, Relaxed);
        meter.window_bytes.store(self.flight.window_bytes(), Relaxed);
        Some(released)
    }

    /// Notes that a batch of pages or blocks is placed.
    ///
    /// # Errors
    /// If it was answered, though it was no query.
    pub fn placed(self, load: Load<X>, answer: Option<Answer>) -> io::Result<()> {
        match answer {
            None => {
                if let (Some(deltas), Load::Pages(batch)) = (&self.shared.plan.deltas, &load) {
                    deltas.placed(batch);
                }
                self.shared.queue.placed(load);
            }
            Some(_) => return Err(self.nonsense()),
        }
        Ok(())
    }

    /// The destination sent an impossible reply. This fails all lanes, not just the
    /// connection: the peer is broken or hostile.
    #[must_use]
    pub fn nonsense(self) -> io::Error {
        self.shared.queue.fail(LanesError::Nonsense);
        io::Error::new(io::ErrorKind::InvalidData, LanesError::Nonsense)
    }

    /// Notes all released batches as placed, if there is no stage.
    pub(crate) fn all_placed(self) -> io::Result<()> {
        while let Some((load, answer)) = self.next() {
            self.placed(load, answer)?;
        }
        Ok(())
    }
}

/// Reads the destination's replies on one connection.
pub struct Acks<'c, X> {
    reader: &'c mut Reader,
    flight: &'c Flight<X>,
    released: Released<'c, X>,
    bytes: [u8; Answer::BYTES],
}

/// A reply of the destination on a lane.
enum Reply {
    Ack(Ack),
    Answer(Answer),
}

impl<'c, X> Acks<'c, X> {
    pub(crate) fn new(
        shared: &'c Shared<X>,
        number: usize,
        reader: &'c mut Reader,
        flight: &'c Flight<X>,
    ) -> Self {
        let released = Released::new(shared, number, flight);
        Self { reader, flight, released, bytes: [0; Answer::BYTES] }
    }

    /// Waits for a reply, which may release batches.
    ///
    /// # Errors
    /// If the connection ends, or the reply is impossible.
    pub fn wait(&mut self) -> io::Result<Released<'c, X>> {
        let reply = self.read_reply()?;
        data_threads::point();
        let known = match reply {
            Some(Reply::Ack(ack)) => self.flight.acknowledged(ack.placed),
            Some(Reply::Answer(answer)) => self.flight.answered(answer),
            None => None,
        };
        known.map(|()| self.released).ok_or_else(|| self.released.nonsense())
    }

    /// None if it is neither kind.
    fn read_reply(&mut self) -> io::Result<Option<Reply>> {
        let (ack, rest) =
            self.bytes.split_first_chunk_mut::<{ Ack::BYTES }>().expect("an answer is longer");
        self.reader.read_exact(ack)?;
        if !ack.first_chunk().is_some_and(Answer::begins) {
            return Ok(Ack::parse(ack).ok().map(Reply::Ack));
        }
        self.reader.read_exact(rest)?;
        Ok(Answer::parse(&self.bytes).ok().map(Reply::Answer))
    }
}

/// Reads the replies to pages and blocks until the connection ends.
pub(crate) fn receive_all<X>(acks: &mut Acks<'_, X>) -> io::Result<()> {
    loop {
        acks.wait()?.all_placed()?;
    }
}
