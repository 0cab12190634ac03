//! One lane at the destination.

use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use audit::Delivery;
use identity::{Closer, Connection, Reader, Writer};
use page::{BlockId, Decoder, Encoding, Epoch, Fill, PageIndex};
use placer::{PlaceError, Placer};
use wire::{BatchHeader, LaneHeader, NamedHeader, NamedTables, Tables, WireError};

use crate::blocks::{BlockSink, Blocks, TakeError};
use crate::replies::{Question, Replies};

/// Batches placed before an acknowledgement is due even while more are coming:
/// 2 MiB, a fraction of any pool.
const ACK_EVERY: u64 = 4;

/// Why a lane ended other than by the source closing it.
#[derive(Debug, thiserror::Error)]
pub enum LaneEnd {
    /// The connection broke; the source sends again what was not acknowledged.
    #[error("the lane broke: {0}")]
    Io(#[from] io::Error),
    /// The source broke the rules, or RAM can't be written: the migration ends.
    #[error(transparent)]
    Peer(#[from] WireError),
    /// The source sent what can't be placed.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// An encoding that is none, or bytes that can't be decoded.
    #[error("the source sent a batch that cannot be decoded: {0}")]
    Decode(String),
    /// Disk blocks that are not taken.
    #[error(transparent)]
    Blocks(TakeError),
    /// Disk blocks in a migration that moves none.
    #[error("the source sent disk blocks, but announced no disks")]
    NoDisks,
    /// Pages by name in a migration that shares nothing.
    #[error("the source sent pages by name, which was not agreed on")]
    NoNames,
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
            Self::Peer(_) | Self::Decode(_) | Self::Blocks(_) | Self::NoDisks | Self::NoNames => {
                false
            }
        }
    }
}

/// Where what lanes bring goes. Each may block until it is known.
pub trait Ends {
    /// What places pages, once the block list is known; none: the migration ended.
    fn placer(&self) -> Option<Arc<Placer>>;

    /// What takes disk blocks, once the disks are announced.
    ///
    /// # Errors
    /// If the migration moves none, or ended.
    fn disks(&self) -> Result<Arc<dyn BlockSink>, LaneEnd> {
        Err(LaneEnd::NoDisks)
    }

    /// What finds pages that come by name.
    ///
    /// # Errors
    /// If none were agreed on.
    fn resolver(&self) -> Result<Arc<dyn Resolver>, LaneEnd> {
        Err(LaneEnd::NoNames)
    }
}

/// Finds what pages contain whose names the source sent. Shared by all lanes.
pub trait Resolver: Send + Sync {
    /// Places those of the pages whose content is here, and answers the
    /// `question` what becomes of the others: now or, so that the lane can go on, in a
    /// while.
    ///
    /// # Errors
    /// If the source sent what can't be placed, or RAM can't be written.
    fn resolve(
        &self,
        header: NamedHeader,
        named: &NamedTables,
        question: Question,
    ) -> Result<(), PlaceError>;

    /// The source has sent these pages as bytes, and they are placed.
    fn came(&self, block: BlockId, epoch: Epoch, pages: &[PageIndex]);

    /// These pages are full of one byte.
    fn filled(&self, block: BlockId, epoch: Epoch, fills: &[Fill]);
}

/// Reads a lane to its end, adds what it reads to `received_bytes`, batch by batch,
/// and closes it: a source in the middle of a write learns that nobody reads any more.
///
/// # Errors
/// If it ends other than by the source closing it between batches.
pub fn receive(
    connection: Connection,
    ends: &impl Ends,
    received_bytes: &AtomicU64,
) -> Result<(), LaneEnd> {
    let closer = connection.closer();
    let (reader, writer) = connection.into_halves();
    let replies = Replies::new(writer);
    let mut lane = Lane { reader, replies, closer, placed: 0, acknowledged: 0 };
    let outcome = read(&mut lane, ends, received_bytes);
    lane.replies.close();
    outcome
}

fn read(lane: &mut Lane, ends: &impl Ends, received_bytes: &AtomicU64) -> Result<(), LaneEnd> {
    let mut work = Work::default();
    let mut blocks = Blocks::new(|| ends.disks());
    let mut known_placer = None;
    let mut resolver = None;
    while let Some(header) = lane.next_header()? {
        data_threads::point();
        received_bytes.fetch_add(batch_bytes(&header), Relaxed);
        lane.placed += 1;
        if let LaneHeader::Blocks(header) = header {
            blocks.receive(lane, header, &mut work.decoder)?;
        } else {
            let placer = match &known_placer {
                Some(placer) => placer,
                None => known_placer.insert(ends.placer().ok_or(LaneEnd::Over)?),
            };
            match header {
                LaneHeader::Blocks(_) => {}
                LaneHeader::Pages(header) => {
                    work.place(lane, placer, header)?;
                    // They may be what was wanted of names that came by any lane.
                    if let Some(resolver) = resolver.get_or_insert_with(|| ends.resolver().ok()) {
                        resolver.came(header.block, header.epoch, &work.tables.pages);
                        resolver.filled(header.block, header.epoch, &work.tables.fills);
                    }
                }
                LaneHeader::Named(header) => {
                    let known = resolver.get_or_insert_with(|| ends.resolver().ok());
                    let resolver = known.as_ref().ok_or(LaneEnd::NoNames)?;
                    work.resolve(lane, placer, &**resolver, header)?;
                }
            }
        }
        if lane.placed - lane.acknowledged >= ACK_EVERY {
            lane.acknowledge()?;
        }
    }
    Ok(())
}

/// What a batch takes on the lane, by its header.
fn batch_bytes(header: &LaneHeader) -> u64 {
    let (tables_bytes, payload_bytes) = match header {
        LaneHeader::Pages(header) => (header.tables_bytes(), header.payload_bytes),
        LaneHeader::Blocks(header) => (header.table_bytes(), header.payload_bytes),
        LaneHeader::Named(header) => (header.tables_bytes(), 0),
    };
    (LaneHeader::BYTES + tables_bytes) as u64 + u64::from(payload_bytes)
}

struct Lane {
    reader: Reader,
    replies: Arc<Replies<Writer>>,
    closer: Closer,
    placed: u64,
    /// What was placed when that was last said to be due.
    acknowledged: u64,
}

impl Lane {
    /// The next batch's header, or none at the end. Before it waits for one,
    /// it acknowledges what is placed: the source may wait for just that.
    fn next_header(&mut self) -> Result<Option<LaneHeader>, LaneEnd> {
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
        Ok(Some(LaneHeader::parse(&bytes)?))
    }

    fn acknowledge(&mut self) -> Result<(), LaneEnd> {
        if self.acknowledged < self.placed {
            self.replies.acknowledge(self.placed)?;
            self.acknowledged = self.placed;
        }
        Ok(())
    }
}

impl Read for Lane {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.reader.read(into)
    }
}

/// Buffers of one lane, used again for each batch.
#[derive(Default)]
struct Work {
    table_bytes: Vec<u8>,
    tables: Tables,
    named: NamedTables,
    payload: Vec<u8>,
    decoder: Decoder,
}

impl Work {
    fn resolve(
        &mut self,
        lane: &mut Lane,
        placer: &Placer,
        resolver: &dyn Resolver,
        header: NamedHeader,
    ) -> Result<(), LaneEnd> {
        self.table_bytes.resize(header.tables_bytes(), 0);
        lane.read_exact(&mut self.table_bytes)?;
        self.named.parse(header, &self.table_bytes)?;
        let fills = &self.named.fills;
        if !fills.is_empty() {
            placer.place_fills(header.block, header.epoch, fills)?;
            resolver.filled(header.block, header.epoch, fills);
        }
        let question = lane.replies.question(&lane.closer, lane.placed);
        Ok(resolver.resolve(header, &self.named, question)?)
    }

    fn place(
        &mut self,
        lane: &mut Lane,
        placer: &Placer,
        header: BatchHeader,
    ) -> Result<(), LaneEnd> {
        self.table_bytes.resize(header.tables_bytes(), 0);
        lane.read_exact(&mut self.table_bytes)?;
        self.tables.parse(header, &self.table_bytes)?;
        if !self.tables.fills.is_empty() {
            placer.place_fills(header.block, header.epoch, &self.tables.fills)?;
        }
        if self.tables.pages.is_empty() {
            return Ok(());
        }
        let encoding = Encoding::try_from(header.encoding)
            .map_err(|_| LaneEnd::Decode(format!("unknown encoding {}", header.encoding)))?;
        let pages = &self.tables.pages;
        // A batch is read as a whole before any of it is placed: nobody waits for
        // the source while holding a range of RAM.
        self.payload.resize(header.payload_bytes as usize, 0);
        lane.read_exact(&mut self.payload)?;
        let bytes = self
            .decoder
            .decode(encoding, &self.payload, pages.len())
            .map_err(|error| LaneEnd::Decode(error.to_string()))?;
        placer.place_bodies(header.block, header.epoch, pages, bytes, Delivery::Body)?;
        Ok(())
    }
}
