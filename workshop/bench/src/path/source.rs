//! A generator in QEMU's place, and the source's half of the path.

use std::collections::HashMap;
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, ThreadId};
use std::time::Duration;

use audit::{HandedOver, Hash};
use identity::Security;
use lab::error::{LabError, Result, SystemContext};
use page::{Batch, BlockId, Encoding, Epoch, PAGE_BYTES, PageIndex, Pool};
use parking_lot::Mutex;
use stream::multifd::{Init, PACKET_PAGES, write_head};
use stream::{PartSection, write};
use tap::{Block, Channels, Head, Output, Stopped, Tap};
use transport::{Endpoint, Lanes, LanesPlan, thread_cpu};
use wire::Token;

use super::run::{BLOCK, CHANNELS, RAM_BYTES, Stages};

/// An agent's default for a migration.
const POOL_BYTES: usize = 128 << 20;
/// QEMU's id of the section `ram`.
const SECTION: u32 = 2;

/// RAM of `bytes` whose pages are all different. Half of each page repeats, so that it can be
/// compressed.
pub(super) fn ram(bytes: u64) -> Vec<u8> {
    let words = bytes / 8;
    let mut ram = Vec::with_capacity(usize::try_from(bytes).unwrap_or_default());
    let mut state = 1_u64;
    for word in 0..words {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let repeats = word % 512 >= 256;
        ram.extend_from_slice(&(if repeats { word >> 9 } else { state }).to_le_bytes());
    }
    ram
}

/// Where to send, and how.
pub(super) struct Source {
    pub(super) endpoint: SocketAddr,
    pub(super) security: Security,
    pub(super) lanes: usize,
}

impl Source {
    /// Sends all of RAM, and waits until it is placed.
    pub(super) fn send(self, ram: &[u8], encoding: Encoding) -> Result<Stages> {
        let endpoint = Endpoint { local: None, remote: self.endpoint };
        let lanes = Arc::new(
            Lanes::start(LanesPlan {
                endpoints: vec![endpoint; self.lanes],
                peer: "destination".to_owned(),
                security: self.security,
                token: Token([1; 16]),
                encoding,
                stale_filter: None,
                deltas: None,
            })
            .doing("start the lanes")?,
        );
        let dir = tempfile::tempdir().doing("make a directory for a socket")?;
        let path = dir.path().join("qemu");
        let listener = UnixListener::bind(&path).doing("make a socket")?;
        let pool = Pool::new(POOL_BYTES);
        let collector = Arc::new(Collector {
            lanes: Arc::clone(&lanes),
            handed_over: HandedOver::new(Some(Hash::fastest())),
            used: Mutex::default(),
        });
        let output = Arc::clone(&collector) as Arc<dyn Output>;
        let tap = Tap::start(listener, Channels::Multifd(CHANNELS), false, pool, output, || ())
            .map_err(|error| LabError::Unsupported(error.to_string()))?;
        let generator = generate(ram, &path)?;
        tap.join().map_err(|error| LabError::Unsupported(error.to_string()))?;
        let failed = |error: transport::LanesError| LabError::Unsupported(error.to_string());
        lanes.wait_drained().map_err(failed)?;
        let sending = lanes.finish();
        let tap = collector.used.lock().values().sum();
        Ok(Stages { generator, tap, lanes: sending, receivers: Duration::ZERO })
    }
}

/// Writes as QEMU does, with a thread for each channel. Returns their CPU time.
fn generate(ram: &[u8], path: &Path) -> Result<Duration> {
    let mut main = UnixStream::connect(path).doing("connect to the tap")?;
    let mut head = Vec::new();
    write::header(&mut head, Some("pc-q35-10.0"));
    let blocks = [Block { name: BLOCK.to_owned(), bytes: RAM_BYTES }];
    write::ram_setup(&mut head, SECTION, &blocks, true, true);
    main.write_all(&head).doing("write to the tap")?;
    let used = thread::scope(|scope| {
        let start = |id| scope.spawn(move || channel(ram, path, id));
        let threads: Vec<_> = (0..CHANNELS).map(start).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, std::io::Result<Duration>>| {
            thread.join().unwrap_or_else(|_| Err(std::io::Error::other("a thread panicked")))
        };
        threads.into_iter().map(join).sum::<std::io::Result<Duration>>()
    });
    let mut tail = Vec::new();
    PartSection::begin_end(&mut tail, SECTION, true).finish();
    tail.extend_from_slice(b"devices");
    main.write_all(&tail).doing("write to the tap")?;
    used.doing("write to the tap")
}

/// Writes every `CHANNELS`th packet of RAM.
fn channel(ram: &[u8], path: &Path, id: u8) -> std::io::Result<Duration> {
    let mut socket = UnixStream::connect(path)?;
    write_channel(ram, id, &mut socket)?;
    Ok(thread_cpu())
}

/// Writes a channel's packets as QEMU does.
pub(super) fn write_channel(ram: &[u8], id: u8, socket: &mut impl Write) -> std::io::Result<()> {
    let mut head = Vec::new();
    Init { uuid: [0; 16], id }.write(&mut head);
    socket.write_all(&head)?;
    let packets = ram.chunks(PACKET_PAGES * PAGE_BYTES).zip((0_u32..).step_by(PACKET_PAGES));
    for (bytes, first) in packets.skip(usize::from(id)).step_by(usize::from(CHANNELS)) {
        let pages = (first..).take(bytes.len() / PAGE_BYTES).map(PageIndex);
        head.clear();
        write_head(&mut head, BLOCK, &pages.collect::<Vec<_>>(), &[], false);
        socket.write_all(&head)?;
        socket.write_all(bytes)?;
    }
    head.clear();
    write_head(&mut head, BLOCK, &[], &[], true);
    socket.write_all(&head)
}

/// An output that does for each page what the engine's does.
struct Collector {
    lanes: Arc<Lanes>,
    handed_over: HandedOver,
    /// CPU time of the tap's threads, as of their last batch.
    used: Mutex<HashMap<ThreadId, Duration>>,
}

impl Output for Collector {
    fn head(&self, head: Head) -> std::result::Result<(), Stopped> {
        let pages = head.blocks.iter().map(|block| block.bytes / PAGE_BYTES as u64);
        self.handed_over.announce(pages);
        Ok(())
    }

    fn arrived(&self, batch: &Batch, first: usize) {
        self.handed_over.bodies(batch, &batch.bodies()[first..], epoch_of(batch));
    }

    fn batch(&self, mut batch: Batch) -> std::result::Result<(), Stopped> {
        (batch.block, batch.epoch) = (BlockId(0), epoch_of(&batch));
        let submitted = self.lanes.submit(batch).map_err(|_| Stopped);
        self.used.lock().insert(thread::current().id(), thread_cpu());
        submitted
    }

    fn tail(&self, _: &[u8]) -> std::result::Result<(), Stopped> {
        Ok(())
    }

    fn whole(&self, _: &[u8], _: Option<&str>) -> std::result::Result<(), Stopped> {
        Err(Stopped)
    }
}

/// Epoch 0 is that of memory in which nothing was placed.
fn epoch_of(batch: &Batch) -> Epoch {
    Epoch(batch.epoch.0 + 1)
}
