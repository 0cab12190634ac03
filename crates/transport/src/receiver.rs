//! One lane at the destination.

use std::io::{self, Read};
use std::sync::Arc;

use audit::Delivery;
use identity::{Closer, Connection, Reader, Writer};
use page::{Buffer, DecodeError, Encoding, PAGE_BYTES, Reserve};
use placer::{PlaceError, Placer};
use wire::{BatchHeader, BlockHeader, LaneHeader, Tables, WireError};

use crate::blocks::{BlockSink, TakeError};
use crate::replies::{Question, Replies};
use crate::unpackers::{Unpacker, Unpackers};

/// Batches placed before an acknowledgement is due, even while more arrive: 2 MiB, a
/// fraction of any pool.
const ACK_EVERY: u64 = 4;

/// Pages that are read, hashed and copied into RAM together, so that all three find
/// them in the processor's second-level cache.
const PLACED_AT_ONCE: usize = 64;

/// Why a lane ended, if the source did not close it.
#[derive(Debug, thiserror::Error)]
pub enum LaneEnd {
    /// The connection broke; the source sends unacknowledged batches again.
    #[error("the lane broke: {0}")]
    Io(#[from] io::Error),
    /// The source violated the protocol, or RAM can't be written: the migration ends.
    #[error(transparent)]
    Peer(#[from] WireError),
    /// The source sent pages that can't be placed.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// An unknown encoding, or bytes that can't be decoded.
    #[error("the source sent a batch that cannot be decoded: {0}")]
    Decode(#[from] DecodeError),
    /// The sink refused disk blocks.
    #[error(transparent)]
    Blocks(TakeError),
    /// What takes whole batches refused one.
    #[error("{0}")]
    Refused(String),
    /// The migration ended, perhaps before this lane's batches could be used.
    #[error("the migration ended")]
    Over,
}

impl LaneEnd {
    /// Whether only this connection is lost, not the migration.
    #[must_use]
    pub fn only_this_lane(&self) -> bool {
        match self {
            Self::Io(_) | Self::Over => true,
            Self::Place(error) => error.only_this_lane(),
            Self::Peer(_) | Self::Decode(_) | Self::Blocks(_) | Self::Refused(_) => false,
        }
    }
}

/// The receiving end of one lane. Its owner reads each header and then decides where
/// the batch goes.
///
/// Dropping it closes the connection, so a source in the middle of a write learns that
/// the lane is no longer read.
pub struct Incoming {
    reader: Reader,
    replies: Arc<Replies<Writer>>,
    closer: Closer,
    placed: u64,
    /// The value of `placed` at the last acknowledgement.
    acknowledged: u64,
    // Buffers reused for each batch.
    table_bytes: Vec<u8>,
    tables: Tables,
    unpackers: Arc<Unpackers>,
}

impl Incoming {
    /// Starts on a lane that has been welcomed, and that shares no buffers with others.
    #[must_use]
    pub fn new(connection: Connection) -> Self {
        Self::within(&Unpackers::new(&Reserve::new(0)), connection)
    }

    /// Starts on a lane that has been welcomed, and that shares these buffers with others of its
    /// VM.
    #[must_use]
    pub fn within(unpackers: &Arc<Unpackers>, connection: Connection) -> Self {
        let closer = connection.closer();
        let (reader, writer) = connection.into_halves();
        Self {
            reader,
            replies: Replies::new(writer),
            closer,
            placed: 0,
            acknowledged: 0,
            table_bytes: Vec::new(),
            tables: Tables::default(),
            unpackers: Arc::clone(unpackers),
        }
    }

    /// Reads the next batch's header; none at the end. The batches before it count as
    /// done: they are acknowledged now and then, and before this waits, because the
    /// source may be waiting for that acknowledgement.
    ///
    /// # Errors
    /// If the lane ends in any way but the source closing it between batches.
    pub fn next_header(&mut self) -> Result<Option<LaneHeader>, LaneEnd> {
        if self.placed - self.acknowledged >= ACK_EVERY {
            self.acknowledge()?;
        }
        let mut bytes = [0; LaneHeader::BYTES];
        let ready = match self.reader.read_ready(&mut bytes)? {
            Some(count) => count,
            None => {
                self.acknowledge()?;
                self.reader.read(&mut bytes)?
            }
        };
        if ready == 0 {
            self.acknowledge()?;
            return Ok(None);
        }
        self.reader.read_exact(&mut bytes[ready..])?;
        let header = LaneHeader::parse(&bytes)?;
        data_threads::point();
        self.placed += 1;
        Ok(Some(header))
    }

    fn acknowledge(&mut self) -> Result<(), LaneEnd> {
        if self.acknowledged < self.placed {
            self.replies.acknowledge(self.placed)?;
            self.acknowledged = self.placed;
        }
        Ok(())
    }

    /// Reads the tables that follow a header, `bytes` long.
    ///
    /// # Errors
    /// If the lane breaks.
    pub fn read_tables(&mut self, bytes: usize) -> Result<&[u8], LaneEnd> {
        self.table_bytes.resize(bytes, 0);
        self.reader.read_exact(&mut self.table_bytes)?;
        Ok(&self.table_bytes)
    }

    /// Lends a buffer for the pages of one batch, from those that the lanes of its VM share.
    pub fn with_buffer<T>(&self, place: impl FnOnce(&mut Buffer) -> T) -> T {
        place(&mut self.unpackers.take().bodies)
    }

    /// Marks the last batch to be answered instead of acknowledged: now, or later so
    /// that the lane can continue.
    pub fn question(&self) -> Question {
        self.replies.question(&self.closer, self.placed)
    }

    /// Reads a batch of pages and places it. Returns its tables.
    ///
    /// # Errors
    /// If the lane breaks, or the batch can't be decoded or placed.
    pub fn place(&mut self, header: BatchHeader, placer: &Placer) -> Result<&Tables, LaneEnd> {
        self.read_tables(header.tables_bytes())?;
        self.tables.parse(header, &self.table_bytes)?;
        if !self.tables.fills.is_empty() {
            placer.place_fills(header.block, header.epoch, &self.tables.fills)?;
        }
        if self.tables.pages.is_empty() {
            return Ok(&self.tables);
        }
        let encoding = Encoding::try_from(header.encoding)?;
        let pages = &self.tables.pages;
        let mut unpacker = self.unpackers.take();
        let Unpacker { payload: buffer, decoder, bodies } = &mut *unpacker;
        // The payload is read before it is placed, so that no thread waits for the
        // source while it holds a range of RAM.
        let payload = if header.deltas || encoding != Encoding::Raw {
            let payload = buffer.room(header.payload_bytes as usize);
            self.reader.read_exact(payload)?;
            payload
        } else {
            &mut []
        };
        if header.deltas {
            let deltas = decoder.decode_deltas(encoding, payload, pages.len())?;
            placer.place_deltas(header.block, header.epoch, pages, deltas, bodies)?;
            return Ok(&self.tables);
        }
        if encoding == Encoding::Raw {
            if header.payload_bytes as usize != pages.len() * PAGE_BYTES {
                let (bytes, bodies) = (header.payload_bytes as usize, pages.len());
                return Err(DecodeError::WrongLength { bytes, bodies }.into());
            }
            // The batch is checked as a whole: if it can't be placed, no piece of it
            // is.
            placer.check(header.block, pages)?;
            for pages in pages.chunks(PLACED_AT_ONCE) {
                let bodies = buffer.room(pages.len() * PAGE_BYTES);
                self.reader.read_exact(bodies)?;
                placer.place_bodies(header.block, header.epoch, pages, bodies, Delivery::Body)?;
            }
            return Ok(&self.tables);
        }
        let bytes = decoder.decode(encoding, payload, pages.len())?;
        placer.place_bodies(header.block, header.epoch, pages, bytes, Delivery::Body)?;
        Ok(&self.tables)
    }

    /// Reads a batch of pages and hands it to `take` whole: its tables, and the bodies one after the
    /// other. It is acknowledged after that.
    ///
    /// # Errors
    /// If the lane breaks, or the batch can't be decoded or is refused.
    pub fn hand_on(
        &mut self,
        header: BatchHeader,
        take: impl FnOnce(&Tables, &[u8]) -> Result<(), LaneEnd>,
    ) -> Result<(), LaneEnd> {
        self.read_tables(header.tables_bytes())?;
        self.tables.parse(header, &self.table_bytes)?;
        let count = self.tables.pages.len();
        if count == 0 {
            return take(&self.tables, &[]);
        }
        if header.deltas {
            return Err(WireError::Contradiction("deltas where no page has a version").into());
        }
        let encoding = Encoding::try_from(header.encoding)?;
        let mut unpacker = self.unpackers.take();
        let Unpacker { payload: buffer, decoder, .. } = &mut *unpacker;
        // Read before it is handed on, so that no thread waits for the source meanwhile.
        let payload = buffer.room(header.payload_bytes as usize);
        self.reader.read_exact(payload)?;
        if encoding != Encoding::Raw {
            return take(&self.tables, decoder.decode(encoding, payload, count)?);
        }
        if payload.len() != count * PAGE_BYTES {
            return Err(DecodeError::WrongLength { bytes: payload.len(), bodies: count }.into());
        }
        take(&self.tables, payload)
    }

    /// Reads a batch of disk blocks into the sink's buffers and hands it to the sink.
    ///
    /// # Errors
    /// If the lane breaks, or the batch can't be decoded or is refused.
    pub fn take(&mut self, header: BlockHeader, sink: &dyn BlockSink) -> Result<(), LaneEnd> {
        // The header has capped the number of extents.
        self.read_tables(header.table_bytes())?;
        let mut batch = sink.room()?;
        header.fill(&self.table_bytes, &mut batch)?;
        let encoding = Encoding::try_from(header.encoding)?;
        let payload_bytes = header.payload_bytes as usize;
        if encoding == Encoding::Raw {
            if payload_bytes != batch.data().len() {
                return Err(WireError::Contradiction("raw disk blocks of another length").into());
            }
            self.reader.read_exact(batch.data_mut())?;
        } else {
            let mut unpacker = self.unpackers.take();
            let Unpacker { payload, decoder, .. } = &mut *unpacker;
            let payload = payload.room(payload_bytes);
            self.reader.read_exact(payload)?;
            decoder.decode_blocks(encoding, payload, batch.data_mut())?;
        }
        Ok(sink.take(batch)?)
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        self.replies.close();
    }
}
