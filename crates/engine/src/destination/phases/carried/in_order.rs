//! Orders the pieces of a relayed stream. Lanes deliver them in any order, and some twice; the
//! receiver here gets them one after the other.
//!
//! The source sends no more than [`ROOM`] pieces ahead of those that are written. So a piece never
//! waits for a buffer, and no lane waits for the receiver.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crossbeam_channel::Sender;
use data_threads::{DataThreads, Joined};
use page::{BlockBatch, Pool, SLOT_BYTES};
use parking_lot::{Condvar, Mutex};
use transport::{BlockSink, TakeError};

use crate::destination::lanes::CONNECTIONS_MAX;
use crate::destination::postcopies::Relayed;

/// Pieces that may be in flight: 8 MiB.
const ROOM: u64 = 16;
/// The source is notified of more room after this many.
const TELL_EVERY: u64 = 4;

/// A report of the writing thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Written {
    /// The source may send this many pieces in total since the start.
    Room(u64),
    /// Everything is written, and the receiver was notified that nothing follows.
    All,
    /// Writing has ended, for this reason.
    Failed(String),
}

/// Writes pieces in order. Dropping it ends the thread, whatever is not written yet.
pub(super) struct InOrder {
    _thread: Joined,
    pieces: Arc<Pieces>,
    socket: UnixStream,
}

impl InOrder {
    /// Writes to `socket`, and reports to `tell`.
    pub(super) fn start(
        socket: &UnixStream,
        threads: &Arc<DataThreads>,
        tell: Sender<Written>,
        mut relayed: Relayed,
    ) -> std::io::Result<Self> {
        let pieces = Arc::new(Pieces::new());
        let thread = data_threads::spawn("relay-write", {
            let (socket, threads) = (socket.try_clone()?, Arc::clone(threads));
            let pieces = Arc::clone(&pieces);
            move || {
                let _member = threads.join();
                let failed = pieces.write_to(&socket, &tell, &mut relayed).err();
                // The receiver is dropped once the migration has ended.
                let _ = tell.send(failed.map_or(Written::All, Written::Failed));
            }
        })?;
        Ok(Self { pieces, socket: socket.try_clone()?, _thread: thread.into() })
    }

    /// The sink that lanes pass pieces to.
    pub(super) fn sink(&self) -> Arc<dyn BlockSink> {
        Arc::clone(&self.pieces) as _
    }

    /// The source has sent everything, `bytes` in all.
    pub(super) fn ends_at(&self, bytes: u64) {
        self.pieces.state.lock().ends_at = Some(bytes);
        self.pieces.changed.notify_all();
    }
}

impl Drop for InOrder {
    fn drop(&mut self) {
        self.pieces.state.lock().over = true;
        self.pieces.changed.notify_all();
        // The other end may have closed it.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

/// Pieces that have arrived and are not written yet.
struct Pieces {
    pool: Arc<Pool>,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// By number.
    waiting: BTreeMap<u64, BlockBatch>,
    /// The number of the next piece to write.
    next: u64,
    /// The room last announced to the source.
    room: u64,
    written_bytes: u64,
    ends_at: Option<u64>,
    over: bool,
}

impl Pieces {
    fn new() -> Self {
        // One for each piece that may wait, and one for each connection to read into.
        let buffers = usize::try_from(ROOM).expect("a few") + CONNECTIONS_MAX;
        let state = State {
            waiting: BTreeMap::new(),
            next: 0,
            room: ROOM,
            written_bytes: 0,
            ends_at: None,
            over: false,
        };
        Self {
            pool: Pool::new(buffers * SLOT_BYTES),
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    fn write_to(
        &self,
        mut socket: &UnixStream,
        tell: &Sender<Written>,
        relayed: &mut Relayed,
    ) -> Result<(), String> {
        // The receiver is dropped once the migration has ended, here and below.
        let _ = tell.send(Written::Room(ROOM));
        while let Some(piece) = self.next()? {
            relayed.pass(piece.data());
            let written = socket.write_all(piece.data());
            written.map_err(|error| {
                format!("the program that waits for the VM accepts no data: {error}")
            })?;
            let bytes = piece.bytes();
            // Frees the buffer before the source is notified of room.
            drop(piece);
            if let Some(room) = self.wrote(bytes) {
                let _ = tell.send(Written::Room(room));
            }
        }
        // It may be closed already.
        let _ = socket.shutdown(Shutdown::Write);
        Ok(())
    }

    /// Waits for the next piece to write; none if all are written.
    fn next(&self) -> Result<Option<BlockBatch>, String> {
        let mut state = self.state.lock();
        loop {
            if state.over {
                return Err("the migration ended".to_owned());
            }
            let number = state.next;
            if let Some(piece) = state.waiting.remove(&number) {
                if piece.offset != state.written_bytes {
                    return Err("the source sent a piece out of order".to_owned());
                }
                state.next += 1;
                return Ok(Some(piece));
            }
            match state.ends_at {
                Some(end) if state.written_bytes == end => return Ok(None),
                Some(end) if state.written_bytes > end => {
                    return Err("the source sent more than it announced".to_owned());
                }
                _ => self.changed.wait(&mut state),
            }
        }
    }

    /// Counts a written piece; returns the new room if it has to be announced.
    fn wrote(&self, bytes: u64) -> Option<u64> {
        let mut state = self.state.lock();
        state.written_bytes += bytes;
        let room = state.next + ROOM;
        if room - state.room < TELL_EVERY {
            return None;
        }
        state.room = room;
        Some(room)
    }
}

impl BlockSink for Pieces {
    fn room(&self) -> Result<BlockBatch, TakeError> {
        self.pool.take_blocks().map_err(|_| TakeError::Over)
    }

    fn take(&self, piece: BlockBatch) -> Result<(), TakeError> {
        if piece.disk.0 != 0 || piece.bytes() != piece.data().len() as u64 {
            return Err(TakeError::Peer(
                "the blocks are not part of the relayed stream".to_owned(),
            ));
        }
        let mut state = self.state.lock();
        let number = piece.sequence;
        if state.over {
            return Err(TakeError::Over);
        }
        if number >= state.room {
            return Err(TakeError::Peer("more arrived than there is room for".to_owned()));
        }
        // A piece may arrive again, from a lane that has died.
        if number >= state.next {
            state.waiting.entry(number).or_insert(piece);
            drop(state);
            self.changed.notify_all();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use crossbeam_channel::{Receiver, unbounded};
    use data_threads::SchedParams;

    use super::*;

    const PIECE: usize = 1000;

    struct Tried {
        in_order: InOrder,
        waits: UnixStream,
        told: Receiver<Written>,
    }

    impl Tried {
        fn new() -> Self {
            let (ours, waits) = UnixStream::pair().unwrap();
            let (tell, told) = unbounded();
            let threads = DataThreads::new(SchedParams::default(), |_| {});
            let relayed = Relayed::new(&Arc::default());
            let in_order = InOrder::start(&ours, &threads, tell, relayed).unwrap();
            assert_eq!(told.recv().unwrap(), Written::Room(ROOM));
            Self { in_order, waits, told }
        }

        fn piece(&self, number: u64) -> BlockBatch {
            piece(&self.in_order.pieces, number)
        }

        fn take(&self, number: u64) {
            self.in_order.pieces.take(self.piece(number)).unwrap();
        }

        /// Its final report.
        fn last(&self) -> Written {
            let not_room = |told: &Written| !matches!(told, Written::Room(_));
            self.told.iter().find(not_room).unwrap()
        }
    }

    fn piece(pieces: &Pieces, number: u64) -> BlockBatch {
        let mut piece = pieces.room().unwrap();
        (piece.sequence, piece.offset) = (number, number * PIECE as u64);
        piece.push_data(PIECE);
        piece.data_mut().fill(number.to_le_bytes()[0]);
        piece
    }

    fn read(mut waits: &UnixStream, pieces: std::ops::Range<u64>) {
        for number in pieces {
            let mut bytes = [0; PIECE];
            waits.read_exact(&mut bytes).unwrap();
            assert!(bytes.iter().all(|byte| *byte == number.to_le_bytes()[0]), "{number}");
        }
    }

    #[test]
    fn pieces_are_written_in_their_order_and_once() {
        let tried = Tried::new();
        for number in [3, 1, 2, 3, 1, 0, 2] {
            tried.take(number);
        }
        read(&tried.waits, 0..4);
        assert_eq!(tried.told.recv().unwrap(), Written::Room(ROOM + 4));
        tried.take(3);
        tried.in_order.ends_at(6 * PIECE as u64);
        tried.take(5);
        tried.take(4);
        read(&tried.waits, 4..6);
        assert_eq!((&tried.waits).read(&mut [0]).unwrap(), 0);
        assert_eq!(tried.last(), Written::All);
        assert_eq!(tried.in_order.pieces.pool.out_bytes(), 0);
    }

    #[test]
    fn an_end_after_the_last_piece_is_noticed() {
        let mut tried = Tried::new();
        tried.take(0);
        read(&tried.waits, 0..1);
        tried.in_order.ends_at(PIECE as u64);
        let mut rest = Vec::new();
        tried.waits.read_to_end(&mut rest).unwrap();
        assert!(rest.is_empty());
        assert_eq!(tried.last(), Written::All);
    }

    #[test]
    fn what_can_not_be_is_refused() {
        let refused = |change: &dyn Fn(&mut BlockBatch)| {
            let tried = Tried::new();
            let mut wrong = tried.piece(0);
            change(&mut wrong);
            let refused = tried.in_order.pieces.take(wrong).unwrap_err();
            assert!(matches!(refused, TakeError::Peer(_)), "{refused}");
        };
        refused(&|piece| piece.disk.0 = 1);
        refused(&|piece| piece.push_zero(7));
        refused(&|piece| piece.sequence = ROOM);
    }

    #[test]
    fn contradictions_end_the_relay() {
        let elsewhere = Tried::new();
        let mut piece = elsewhere.piece(0);
        piece.offset = 1;
        elsewhere.in_order.pieces.take(piece).unwrap();
        let more = Tried::new();
        more.in_order.ends_at(PIECE as u64 - 1);
        more.take(0);
        for (tried, why) in [(elsewhere, "out of order"), (more, "more than it announced")] {
            let Written::Failed(said) = tried.last() else { panic!() };
            assert!(said.contains(why), "{said}");
        }
    }

    #[test]
    fn a_closed_receiver_ends_the_relay() {
        let Tried { in_order, waits, told } = Tried::new();
        drop(waits);
        in_order.pieces.take(piece(&in_order.pieces, 0)).unwrap();
        let Written::Failed(why) = told.recv().unwrap() else { panic!() };
        assert!(why.contains("accepts no data"), "{why}");
    }

    /// It is dropped while the receiver reads nothing.
    #[test]
    fn it_can_be_dropped_while_it_writes() {
        let tried = Tried::new();
        let mut big = tried.in_order.pieces.room().unwrap();
        let bytes = big.room_mut().len();
        big.push_data(bytes);
        tried.in_order.pieces.take(big).unwrap();
        let Tried { in_order, waits, .. } = tried;
        let sink = in_order.sink();
        drop(in_order);
        assert!(sink.room().is_ok_and(|piece| sink.take(piece).is_err()));
        drop(waits);
    }

    /// Several lanes, each with its share, and some pieces twice.
    #[test]
    fn concurrent_lanes_keep_the_order() {
        let all = 400;
        let Tried { in_order, waits, told } = Tried::new();
        let reader = std::thread::spawn(move || read(&waits, 0..all));
        let (next, room) = (AtomicU64::new(0), AtomicU64::new(ROOM));
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (pieces, next, room) = (&in_order.pieces, &next, &room);
                scope.spawn(move || {
                    loop {
                        let number = next.fetch_add(1, Relaxed);
                        if number >= all {
                            return;
                        }
                        while number >= room.load(Relaxed) {
                            std::thread::yield_now();
                        }
                        pieces.take(piece(pieces, number)).unwrap();
                        if number % 7 == thread {
                            pieces.take(piece(pieces, number)).unwrap();
                        }
                    }
                });
            }
            in_order.ends_at(all * PIECE as u64);
            for told in &told {
                match told {
                    Written::Room(batches) => room.store(batches, Relaxed),
                    Written::All => break,
                    Written::Failed(why) => panic!("{why}"),
                }
            }
        });
        reader.join().unwrap();
    }
}
