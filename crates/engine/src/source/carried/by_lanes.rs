//! Relays a connection on lanes: its bytes go as blocks of a disk that is written once,
//! from start to end, and the destination puts them in order.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use api::Sample;
use crossbeam_channel::{Receiver, never, unbounded};
use data_threads::DataThreads;
use page::{BlockBatch, Pool, SLOT_BYTES};
use policy::pace::DestinationUse;
use rustix::net::{RecvFlags, recv};
use wire::ToDestination;

use super::agents::Agents;
use super::passed::Passed;
use super::piece_size::{self, Fitting};
use crate::error::MigrationError;
use crate::report_builder::ReportBuilder;
use crate::resources::Pools;
use crate::source::bounds::{bounded_threads, rebind};
use crate::source::context::no_thread;
use crate::source::control::pacing::Pacing;
use crate::source::control::sampler::compression::Compression;
use crate::source::control::sampler::ticking::{self, Ticking};
use crate::source::control::sampler::window::{Counts, Window};
use crate::source::lanes::{self, Lanes};
use crate::source::notice::Notice;

/// The content of a relayed connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// A migration. QEMU counts bytes as delivered once they are read, and stops the VM
    /// when little is left, so little may be in flight.
    Stream,
    /// A disk, whose server answers each write.
    Disk,
}

impl Content {
    /// Bytes of the largest piece to begin with.
    fn piece_bytes(self) -> usize {
        match self {
            Self::Stream => piece_size::LEAST_BYTES,
            Self::Disk => page::BLOCK_BYTES_MAX,
        }
    }

    /// The number of pieces that `lanes` lanes can use to begin with, as far as the destination has
    /// room.
    fn pieces_max(self, lanes: usize) -> usize {
        match self {
            Self::Stream => piece_size::buffers_least(lanes),
            Self::Disk => 16 + lanes,
        }
    }
}

/// The lanes of a relayed connection, and their control.
pub(super) struct ByLanes {
    lanes: Arc<Lanes>,
    pools: Pools,
    /// Bytes of the largest piece, which the sampler fits to the path.
    piece_bytes: Arc<AtomicUsize>,
    threads: Arc<DataThreads>,
    pacing: Pacing,
    sampler: Ticking,
    /// Reports a thread that has panicked.
    notices: Receiver<Notice>,
}

impl ByLanes {
    /// None if the destination's agent doesn't support it, or no buffers are left here:
    /// then the control connection alone relays.
    pub(super) fn start(
        agents: &Agents,
        content: Content,
        report_builder: &Arc<ReportBuilder>,
    ) -> Result<Option<Self>, MigrationError> {
        if !agents.carrying.relays_by_lanes {
            return Ok(None);
        }
        let pools = match agents.local.resources.leaving(false) {
            Ok(pools) => pools,
            Err(full) => {
                tracing::info!(%full, "relayed by the control connection");
                return Ok(None);
            }
        };
        let (tell, notices) = unbounded();
        let threads = bounded_threads(report_builder, &tell);
        let lanes = Arc::new(Lanes::new(agents.lanes_plan()?, Some(Arc::clone(&threads))));
        let count = lanes.meters().count();
        pools.pages.set_limit_bytes(content.pieces_max(count) * SLOT_BYTES);
        let piece_bytes = Arc::new(AtomicUsize::new(content.piece_bytes()));
        // Until the destination reports room.
        lanes.set_block_room(0);
        agents.disk_room.is_for(&lanes);
        agents.send(&ToDestination::RelayBegins)?;
        lanes::start(&lanes, None, &agents.link).map_err(no_thread)?;
        let pacing = Pacing::start(
            Arc::clone(&lanes),
            &agents.local.resources.network,
            Arc::clone(&threads),
            Arc::clone(report_builder),
            None,
        );
        let mut sampling = Sampling {
            compression: Compression::new(&lanes, agents.request.compress),
            lanes: Arc::clone(&lanes),
            pool: Arc::clone(&pools.pages),
            fitting: (content == Content::Stream).then(|| Fitting::new(count)),
            piece_bytes: Arc::clone(&piece_bytes),
            report_builder: Arc::clone(report_builder),
            last: (Counts::default(), Instant::now()),
        };
        let sampler = Ticking::start(lanes.guard(), never(), move || {
            sampling.sample();
            ticking::USUAL
        });
        let (pacing, sampler) = (pacing.map_err(no_thread)?, sampler.map_err(no_thread)?);
        Ok(Some(Self { lanes, pools, piece_bytes, threads, pacing, sampler, notices }))
    }

    /// The sender of a connection's bytes.
    pub(super) fn sending(&self) -> Sending {
        Sending {
            lanes: Arc::clone(&self.lanes),
            pool: Arc::clone(&self.pools.pages),
            piece_bytes: Arc::clone(&self.piece_bytes),
            number: 0,
            offset: 0,
        }
    }

    /// The failure of the lanes, if any.
    pub(super) fn failure(&self) -> Option<String> {
        if let Ok(Notice::Panicked(thread)) = self.notices.try_recv() {
            return Some(MigrationError::Panicked { thread }.to_string());
        }
        self.lanes.failure().map(|error| error.to_string())
    }

    /// Passes on the destination's use of its NICs.
    pub(super) fn receive(&self, used: DestinationUse) {
        self.pacing.receive(used);
    }

    /// Applies the operator's new bounds at both ends.
    pub(super) fn rebind(
        &self,
        agents: &Agents,
        report_builder: &ReportBuilder,
    ) -> Result<(), MigrationError> {
        let terms = rebind(report_builder, &self.threads, Some(&self.pacing), false);
        agents.send(&ToDestination::Terms(terms))
    }

    /// Ends waits for the lanes and for buffers.
    pub(super) fn shut(&self) {
        self.pools.pages.close();
        self.lanes.shut();
    }

    /// Ends the lanes, and reports their figures.
    pub(super) fn end(self, control_bytes: u64, report_builder: &ReportBuilder) {
        let Self { lanes, pools, pacing, sampler, .. } = self;
        // Before the report is changed, because these threads also change it.
        drop((sampler, pacing));
        let cpu = lanes.stop();
        report_builder.update(|report| lanes::account(&lanes, &pools, control_bytes, cpu, report));
    }
}

/// Sends the bytes of the local connection.
pub(super) struct Sending {
    lanes: Arc<Lanes>,
    pool: Arc<Pool>,
    piece_bytes: Arc<AtomicUsize>,
    number: u64,
    offset: u64,
}

impl Sending {
    /// Sends bytes that were read already.
    pub(super) fn send(&mut self, mut bytes: &[u8]) -> Result<(), String> {
        while !bytes.is_empty() {
            let mut piece = self.piece()?;
            let room = piece.room_mut();
            let count = self.piece_bytes.load(Relaxed).min(bytes.len());
            room[..count].copy_from_slice(&bytes[..count]);
            bytes = &bytes[count..];
            self.submit(piece, count)?;
        }
        Ok(())
    }

    /// Sends the connection's bytes to its end.
    pub(super) fn send_all(mut self, socket: &UnixStream, passed: &Passed) -> Result<u64, String> {
        loop {
            let mut piece = self.piece()?;
            let piece_bytes = self.piece_bytes.load(Relaxed);
            let count = fill(socket, &mut piece.room_mut()[..piece_bytes])
                .map_err(|error| format!("the connection here broke: {error}"))?;
            if count == 0 {
                passed.closed();
                return Ok(self.offset);
            }
            passed.forth(&piece.room_mut()[..count]);
            self.submit(piece, count)?;
            passed.bytes.store(self.offset, Relaxed);
        }
    }

    fn piece(&self) -> Result<BlockBatch, String> {
        let ended = |_| "the lanes have ended".to_owned();
        let mut piece = self.pool.take_blocks().map_err(ended)?;
        (piece.sequence, piece.offset) = (self.number, self.offset);
        Ok(piece)
    }

    fn submit(&mut self, mut piece: BlockBatch, bytes: usize) -> Result<(), String> {
        piece.push_data(bytes);
        self.number += 1;
        self.offset += bytes as u64;
        self.lanes.submit(piece).map_err(|error| error.to_string())
    }
}

/// Waits for data, and reads everything available by then.
fn fill(mut socket: &UnixStream, room: &mut [u8]) -> std::io::Result<usize> {
    let mut count = loop {
        match socket.read(room) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            read => break read?,
        }
    };
    while count > 0 && count < room.len() {
        match recv(socket, &mut room[count..], RecvFlags::DONTWAIT) {
            // The end is seen again by the next read. A reset ends it, too, but the bytes
            // before it go first.
            Ok((0, _)) | Err(_) => break,
            Ok((more, _)) => count += more,
        }
    }
    Ok(count)
}

/// Samples what the lanes deliver.
struct Sampling {
    compression: Compression,
    lanes: Arc<Lanes>,
    pool: Arc<Pool>,
    /// None if pieces keep their size.
    fitting: Option<Fitting>,
    piece_bytes: Arc<AtomicUsize>,
    report_builder: Arc<ReportBuilder>,
    last: (Counts, Instant),
}

impl Sampling {
    fn sample(&mut self) {
        let (counts, now) = (Counts::of(&self.lanes), Instant::now());
        self.compression.decide(&counts, now);
        let (last, at) = &self.last;
        let elapsed = now - *at;
        if elapsed.is_zero() {
            return;
        }
        let window = Window::between(last, &counts, elapsed);
        self.last = (counts, now);
        self.fit_pieces(&window);
        let delivered_bytes_per_s = window.blocks as f64 / elapsed.as_secs_f64();
        let sample = Sample {
            at_s: self.report_builder.elapsed_s(),
            delivered_bytes_per_s,
            wire_bytes_per_s: window.wire_per_s,
            dirty_bytes_per_s: 0.0,
            share: 1.0,
            left_bytes: 0,
            pool_bytes: self.pool.out_bytes() as u64,
            lanes_bytes_per_s: window.lanes_per_s,
        };
        self.report_builder.sample(sample, |progress| {
            progress.delivered_bytes_per_s = delivered_bytes_per_s;
            progress.wire_bytes_per_s = window.wire_per_s;
        });
    }

    fn fit_pieces(&mut self, window: &Window) {
        let Some(fitting) = &mut self.fitting else { return };
        let fits = fitting.next(window.elapsed, window.blocks, self.lanes.round_trip());
        if let Some(pieces) = fits {
            self.pool.set_limit_bytes(pieces.buffers * SLOT_BYTES);
            self.piece_bytes.store(pieces.bytes, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn all_available_bytes_are_read_at_once() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        for part in [&b"what "[..], b"is ", b"there"] {
            ours.write_all(part).unwrap();
        }
        let mut room = [0; 64];
        assert_eq!(fill(&theirs, &mut room).unwrap(), 13);
        assert_eq!(&room[..13], b"what is there");
        ours.write_all(&[7; 100]).unwrap();
        drop(ours);
        let counts = [(); 3].map(|()| fill(&theirs, &mut room).unwrap());
        assert_eq!(counts, [64, 36, 0]);
    }
}
