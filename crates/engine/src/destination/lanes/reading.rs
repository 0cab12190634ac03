//! Reads a lane's batches, and has them placed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use placer::Placer;
use transport::{BlockSink, Incoming, LaneEnd};
use wire::{BatchHeader, LaneHeader};

use super::ArrivingLanes;
use crate::destination::by_name::ByName;
use crate::destination::domain::DomainWriter;

/// Why a lane is not read any further.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unread {
    #[error(transparent)]
    Lane(#[from] LaneEnd),
    /// The migration moves no disks.
    #[error("the source sent disk blocks, but announced no disks")]
    NoDisks,
    /// The migration shares no content.
    #[error("the source sent pages by name, which was not agreed on")]
    NoNames,
}

impl Unread {
    /// Whether only this connection is lost, not the migration.
    pub(super) fn only_this_lane(&self) -> bool {
        matches!(self, Self::Lane(end) if end.only_this_lane())
    }
}

/// The memory of the VM that arrives.
#[derive(Clone)]
pub(crate) enum Memory {
    /// That of a QEMU.
    Qemu(Arc<Placer>),
    /// That of a domain of Xen, to whose receiver it is written.
    Domain(Arc<DomainWriter>),
}

/// The destination of pages.
#[derive(Clone)]
pub(super) struct Pages {
    pub(super) memory: Memory,
    /// None: no pages are sent by name.
    pub(super) by_name: Option<Arc<ByName>>,
}

impl Pages {
    /// Reads a batch, and has it placed.
    fn read(&self, lane: &mut Incoming, header: BatchHeader) -> Result<(), LaneEnd> {
        let by_name = self.by_name.as_deref();
        match &self.memory {
            Memory::Qemu(placer) => {
                let tables = lane.place(header, placer)?;
                if let Some(by_name) = by_name {
                    by_name.came(header.block, header.epoch, tables);
                }
                Ok(())
            }
            Memory::Domain(writer) => lane.hand_on(header, |tables, bodies| {
                writer.take(header, tables, bodies)?;
                if let Some(by_name) = by_name {
                    by_name.came_as(header.block, header.epoch, tables, bodies);
                }
                Ok(())
            }),
        }
    }
}

impl ArrivingLanes {
    /// Reads a lane to its end, and adds what it reads to `received_bytes`, batch by
    /// batch.
    pub(super) fn read(
        &self,
        lane: &mut Incoming,
        received_bytes: &AtomicU64,
    ) -> Result<(), Unread> {
        let (mut pages, mut sink) = (None, None);
        while let Some(header) = lane.next_header()? {
            // A batch counts when it is placed: a lane that stands still brings nothing.
            let batch_bytes = header.batch_bytes();
            if let LaneHeader::Blocks(header) = header {
                let sink = match &sink {
                    Some(sink) => sink,
                    None => sink.insert(self.sink().ok_or(Unread::NoDisks)?),
                };
                lane.take(header, &**sink)?;
                received_bytes.fetch_add(batch_bytes, Relaxed);
                continue;
            }
            let pages = match &pages {
                Some(pages) => pages,
                None => pages.insert(self.pages().ok_or(LaneEnd::Over)?),
            };
            match header {
                LaneHeader::Blocks(_) => {}
                LaneHeader::Pages(header) => {
                    if header.has_names && pages.by_name.is_none() {
                        return Err(Unread::NoNames);
                    }
                    pages.read(lane, header)?;
                }
                LaneHeader::Named(header) => {
                    let by_name = pages.by_name.as_deref().ok_or(Unread::NoNames)?;
                    by_name.take(lane, header)?;
                }
            }
            received_bytes.fetch_add(batch_bytes, Relaxed);
        }
        Ok(())
    }

    /// Blocks until it is known where pages go. None: the migration ended.
    fn pages(&self) -> Option<Pages> {
        let mut state = self.state.lock();
        while state.pages.is_none() && !state.over {
            self.changed.wait(&mut state);
        }
        state.pages.clone().filter(|_| !state.over)
    }

    fn sink(&self) -> Option<Arc<dyn BlockSink>> {
        self.state.lock().disks.clone()
    }
}
