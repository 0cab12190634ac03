//! Both ends of a migration of disks in one process: a disk in memory that
//! completes operations in any order, and a destination whose lanes are cut.

#![allow(clippy::cast_possible_truncation, reason = "sizes of a test")]

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::thread::{self, JoinHandle};

use disk::{DiskSink, Done, WriteBlocks, WriteFailure};
use identity::{Connection, Security};
use page::Encoding;
use parking_lot::{Condvar, Mutex};
use transport::{Endpoint, Incoming, LaneEnd, Lanes, LanesPlan};
use wire::{LaneHeader, Preamble, Reply, Token, Versions};

/// Pseudo-random numbers, reproducible from a seed.
pub(crate) struct Dice(pub u64);

impl Dice {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % bound
    }
}

enum What {
    Data(Vec<u8>),
    Zeroes(u64),
    Flush,
}

#[derive(Default)]
struct Waiting {
    pending: Vec<(u64, What, Done)>,
    image: Vec<u8>,
    durable: Vec<u8>,
    stalled: bool,
    /// How many writes succeed before all fail.
    until_failure: Option<(usize, WriteFailure)>,
    over: bool,
}

/// A disk in memory, which performs pending operations in random order.
pub(crate) struct MemoryDisk {
    waiting: Arc<(Mutex<Waiting>, Condvar)>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl MemoryDisk {
    pub(crate) fn start(bytes: usize, seed: u64) -> Arc<Self> {
        let state = Waiting { image: vec![0xee; bytes], ..Waiting::default() };
        let waiting = Arc::new((Mutex::new(state), Condvar::new()));
        let thread = thread::spawn({
            let waiting = Arc::clone(&waiting);
            move || work(&waiting, seed)
        });
        Arc::new(Self { waiting, thread: Mutex::new(Some(thread)) })
    }

    pub(crate) fn image(&self) -> Vec<u8> {
        self.waiting.0.lock().image.clone()
    }

    /// What the last flush made durable.
    pub(crate) fn durable(&self) -> Vec<u8> {
        self.waiting.0.lock().durable.clone()
    }

    pub(crate) fn stall(&self, stalled: bool) {
        self.waiting.0.lock().stalled = stalled;
        self.waiting.1.notify_all();
    }

    pub(crate) fn fail_after(&self, writes: usize, failure: WriteFailure) {
        self.waiting.0.lock().until_failure = Some((writes, failure));
    }

    fn add(&self, offset: u64, what: What, done: Done) {
        let mut state = self.waiting.0.lock();
        if state.over {
            drop(state);
            done.finish(Err(WriteFailure::Other("aborted".to_owned())));
            return;
        }
        state.pending.push((offset, what, done));
        drop(state);
        self.waiting.1.notify_all();
    }
}

fn work(waiting: &(Mutex<Waiting>, Condvar), seed: u64) {
    let mut dice = Dice(seed);
    loop {
        // So that more than one is pending.
        for _ in 0..dice.below(4) {
            thread::yield_now();
        }
        let mut state = waiting.0.lock();
        while !state.over && (state.stalled || state.pending.is_empty()) {
            waiting.1.wait(&mut state);
        }
        if state.pending.is_empty() {
            return;
        }
        let nth = dice.below(state.pending.len() as u64) as usize;
        let (offset, what, done) = state.pending.swap_remove(nth);
        let outcome = apply(&mut state, offset as usize, what);
        drop(state);
        done.finish(outcome);
    }
}

fn apply(state: &mut Waiting, at: usize, what: What) -> Result<(), WriteFailure> {
    if state.over {
        return Err(WriteFailure::Other("aborted".to_owned()));
    }
    if let Some((left, failure)) = &mut state.until_failure {
        if *left == 0 {
            return Err(failure.clone());
        }
        *left -= 1;
    }
    match what {
        What::Data(bytes) => state.image[at..at + bytes.len()].copy_from_slice(&bytes),
        What::Zeroes(bytes) => state.image[at..at + bytes as usize].fill(0),
        What::Flush => state.durable.clone_from(&state.image),
    }
    Ok(())
}

impl WriteBlocks for MemoryDisk {
    fn write(&self, offset: u64, data: &[u8], done: Done) {
        self.add(offset, What::Data(data.to_vec()), done);
    }

    fn write_zeroes(&self, offset: u64, bytes: u64, done: Done) {
        self.add(offset, What::Zeroes(bytes), done);
    }

    fn flush(&self, done: Done) {
        self.add(0, What::Flush, done);
    }

    fn abort(&self) {
        self.waiting.0.lock().over = true;
        self.waiting.1.notify_all();
    }
}

impl Drop for MemoryDisk {
    fn drop(&mut self) {
        self.abort();
        if let Some(thread) = self.thread.lock().take()
            && thread.thread().id() != thread::current().id()
        {
            thread.join().unwrap();
        }
    }
}

/// A destination: passes batches from lanes to a sink, and cuts connection
/// number `n` after `cut_after(n)` bytes.
pub(crate) struct Destination {
    pub(crate) address: SocketAddr,
    pub(crate) sink: Arc<DiskSink>,
    pub(crate) reasons: Arc<Mutex<Vec<String>>>,
    stopping: Arc<AtomicBool>,
    accepting: Option<JoinHandle<()>>,
}

impl Destination {
    pub(crate) fn start(
        sink: DiskSink,
        cut_after: impl Fn(u64) -> Option<usize> + Send + 'static,
    ) -> Self {
        let sink = Arc::new(sink);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let stopping = Arc::new(AtomicBool::new(false));
        let reasons = Arc::new(Mutex::new(Vec::new()));
        let accepted = AtomicU64::new(0);
        let accepting = thread::spawn({
            let (sink, stopping) = (Arc::clone(&sink), Arc::clone(&stopping));
            let reasons = Arc::clone(&reasons);
            move || {
                let mut threads = Vec::new();
                loop {
                    let (stream, _) = listener.accept().unwrap();
                    if stopping.load(SeqCst) {
                        break;
                    }
                    let cut = cut_after(accepted.fetch_add(1, SeqCst));
                    let (sink, reasons) = (Arc::clone(&sink), Arc::clone(&reasons));
                    threads.push(thread::spawn(move || serve(stream, cut, &sink, &reasons)));
                }
                for thread in threads {
                    thread.join().unwrap();
                }
            }
        });
        Self { address, sink, reasons, stopping, accepting: Some(accepting) }
    }

    pub(crate) fn lanes(&self, lanes: usize, encoding: Encoding) -> Arc<Lanes> {
        let endpoint = Endpoint { local: None, remote: self.address };
        let plan = LanesPlan {
            endpoints: vec![endpoint; lanes],
            peer: String::new(),
            security: Security::Plaintext,
            token: Token([1; 16]),
            encoding,
            stale_filter: None,
            deltas: None,
        };
        Arc::new(Lanes::start(plan).unwrap())
    }

    /// Lets the source send `room` batches more than the sink has finished with, until
    /// the sink ends. A real destination reports that over the control connection.
    pub(crate) fn tell_room(&self, lanes: &Arc<Lanes>, room: u64) -> JoinHandle<()> {
        let (sink, lanes) = (Arc::clone(&self.sink), Arc::clone(lanes));
        lanes.set_block_room(room);
        thread::spawn(move || {
            let mut finished = 0;
            while let Some(now) = sink.wait_finished(finished + 1) {
                finished = now;
                lanes.set_block_room(room + finished);
            }
        })
    }
}

impl Drop for Destination {
    fn drop(&mut self) {
        self.stopping.store(true, SeqCst);
        self.sink.close();
        drop(TcpStream::connect(self.address));
        self.accepting.take().unwrap().join().unwrap();
    }
}

fn serve(
    mut stream: TcpStream,
    cut: Option<usize>,
    sink: &Arc<DiskSink>,
    reasons: &Mutex<Vec<String>>,
) {
    let mut preamble = [0; Preamble::BYTES];
    if stream.read_exact(&mut preamble).is_err() {
        return;
    }
    Preamble::parse(&preamble, Versions::SPOKEN).unwrap();
    let is_over = sink.failure().is_some();
    let reply = if is_over { Reply::UnknownToken } else { Reply::Welcome };
    if stream.write_all(&reply.to_bytes(wire::VERSION)).is_err() || is_over {
        return;
    }
    let inner = match cut {
        None => stream,
        Some(bytes) => through_a_proxy(stream, bytes),
    };
    if let Err(error) = take_all(&mut Incoming::new(Connection::plain(inner)), sink)
        && !error.only_this_lane()
    {
        reasons.lock().push(error.to_string());
    }
}

fn take_all(lane: &mut Incoming, sink: &DiskSink) -> Result<(), LaneEnd> {
    while let Some(header) = lane.next_header()? {
        let LaneHeader::Blocks(header) = header else { panic!("only blocks are sent") };
        lane.take(header, sink)?;
    }
    Ok(())
}

/// A connection that forwards `bytes` from the source and then breaks for both ends.
fn through_a_proxy(outer: TcpStream, bytes: usize) -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let inner = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    let back = (inner.try_clone().unwrap(), outer.try_clone().unwrap());
    thread::spawn(move || {
        let _ = std::io::copy(&mut &back.0, &mut &back.1);
        let _ = back.1.shutdown(Shutdown::Both);
    });
    thread::spawn(move || {
        let mut limited = (&outer).take(bytes as u64);
        let _ = std::io::copy(&mut limited, &mut &inner);
        let _ = outer.shutdown(Shutdown::Both);
        let _ = inner.shutdown(Shutdown::Both);
    });
    far
}
