//! One lane at the destination.

use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use identity::{Connection, Reader, Writer};
use page::{Decoder, Encoding};
use placer::{PlaceError, Placer, RawSource};
use wire::{Ack, BatchHeader, LaneHeader, Tables, WireError};

use crate::blocks::{BlockSink, Blocks, TakeError};

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
            Self::Peer(_) | Self::Decode(_) | Self::Blocks(_) | Self::NoDisks => false,
        }
    }
}

/// Reads a lane to its end. `placer` is asked for at the first batch of pages
/// and may block until the block list is known; so is `disks` at the first batch
/// of disk blocks, until the disks are announced.
///
/// # Errors
/// If it ends other than by the source closing it between batches.
pub fn receive(
    connection: &mut Connection,
    placer: impl Fn() -> Option<Arc<Placer>>,
    disks: impl Fn() -> Result<Arc<dyn BlockSink>, LaneEnd>,
) -> Result<(), LaneEnd> {
    receive_counted(connection, placer, disks, &AtomicU64::new(0))
}

/// As [`receive`], and adds what it reads to `received_bytes`, batch by batch.
///
/// # Errors
/// As there.
pub fn receive_counted(
    connection: &mut Connection,
    placer: impl Fn() -> Option<Arc<Placer>>,
    disks: impl Fn() -> Result<Arc<dyn BlockSink>, LaneEnd>,
    received_bytes: &AtomicU64,
) -> Result<(), LaneEnd> {
    let (reader, writer) = connection.halves();
    let mut lane = Lane { reader, writer, placed: 0, acknowledged: 0 };
    let mut work = Work::default();
    let mut blocks = Blocks::new(disks);
    let mut known_placer = None;
    while let Some(header) = lane.next_header()? {
        received_bytes.fetch_add(batch_bytes(&header), Relaxed);
        match header {
            LaneHeader::Pages(header) => {
                let placer = match &known_placer {
                    Some(placer) => placer,
                    None => known_placer.insert(placer().ok_or(LaneEnd::Over)?),
                };
                work.place(&mut lane, placer, header)?;
            }
            LaneHeader::Blocks(header) => blocks.receive(&mut lane, header, &mut work.decoder)?,
        }
        lane.placed += 1;
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
    };
    (LaneHeader::BYTES + tables_bytes) as u64 + u64::from(payload_bytes)
}

struct Lane<'c> {
    reader: &'c mut Reader,
    writer: &'c mut Writer,
    placed: u64,
    acknowledged: u64,
}

impl Lane<'_> {
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
            self.writer.write_all(&Ack { placed: self.placed }.to_bytes())?;
            self.acknowledged = self.placed;
        }
        Ok(())
    }
}

impl RawSource for Lane<'_> {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.reader.fd()
    }

    fn read_exact(&mut self, buf: &mut [u8]) -> io::Result<()> {
        self.reader.read_exact(buf)
    }
}

/// Buffers of one lane, used again for each batch.
#[derive(Default)]
struct Work {
    table_bytes: Vec<u8>,
    tables: Tables,
    payload: Vec<u8>,
    scratch: Vec<u8>,
    decoder: Decoder,
}

impl Work {
    fn place(
        &mut self,
        lane: &mut Lane<'_>,
        placer: &Placer,
        header: BatchHeader,
    ) -> Result<(), LaneEnd> {
        self.table_bytes.resize(header.tables_bytes(), 0);
        RawSource::read_exact(lane, &mut self.table_bytes)?;
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
        let payload_bytes = header.payload_bytes as usize;
        if encoding == Encoding::Raw {
            if payload_bytes != pages.len() * page::PAGE_BYTES {
                return Err(WireError::Contradiction("raw pages of another length").into());
            }
            placer.place_raw(header.block, header.epoch, pages, lane, &mut self.scratch)?;
        } else {
            self.payload.resize(payload_bytes, 0);
            RawSource::read_exact(lane, &mut self.payload)?;
            let bytes = self
                .decoder
                .decode(encoding, &self.payload, pages.len())
                .map_err(|error| LaneEnd::Decode(error.to_string()))?;
            placer.place_bodies(header.block, header.epoch, pages, bytes)?;
        }
        Ok(())
    }
}
