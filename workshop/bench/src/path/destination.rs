//! The destination's half of the path: lanes into RAM.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use audit::Hash;
use identity::Security;
use lab::error::{LabError, Result, SystemContext};
use page::{PAGE_BYTES, PageIndex};
use placer::{BlockPlan, Feeder, Placement, Placer};
use ram::Mapping;
use transport::{Incoming, LaneEnd, thread_cpu};
use wire::{LaneHeader, Preamble, Reply};

use super::run::{BLOCK, RAM_BYTES};

/// One in so many pages of arrived RAM is compared.
pub(super) const COMPARED_EVERY: usize = 61;

pub(super) struct Destination {
    address: SocketAddr,
    mapping: Arc<Mapping>,
    stopping: Arc<AtomicBool>,
    accepting: JoinHandle<std::io::Result<Duration>>,
}

impl Destination {
    pub(super) fn start(security: Security) -> Result<Self> {
        let mapping = Arc::new(Mapping::own(RAM_BYTES));
        let (qemu, other) = UnixStream::pair().doing("make a socket")?;
        let feeder = Feeder::start(qemu, page::Pool::new(1 << 20)).doing("start a thread")?;
        let placement = Placement::Mapped(Arc::clone(&mapping));
        let plan = BlockPlan { name: BLOCK.to_owned(), bytes: RAM_BYTES, placement };
        let placer = Placer::new(vec![plan], feeder.handle())
            .and_then(|placer| placer.audited(Hash::fastest()));
        let placer = Arc::new(placer.map_err(|error| LabError::Unsupported(error.to_string()))?);
        let listener = TcpListener::bind("127.0.0.1:0").doing("listen on loopback")?;
        let address = listener.local_addr().doing("listen on loopback")?;
        let stopping = Arc::new(AtomicBool::new(false));
        let accept = {
            let stopping = Arc::clone(&stopping);
            move || {
                let _keep = (feeder, other);
                accept(&listener, &stopping, &security, &placer)
            }
        };
        let accepting = thread::Builder::new().name("accept".to_owned()).spawn(accept);
        Ok(Self { address, mapping, stopping, accepting: accepting.doing("start a thread")? })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Compares RAM with the source's. Returns the CPU time of the receivers.
    pub(super) fn end(self, ram: &[u8]) -> Result<Duration> {
        self.stopping.store(true, SeqCst);
        drop(TcpStream::connect(self.address));
        let used = self.accepting.join().unwrap_or_else(|_| Err(panicked()));
        compare(&self.mapping, ram)?;
        used.doing("receive")
    }
}

/// Compares pages all over RAM.
fn compare(mapping: &Mapping, ram: &[u8]) -> Result<()> {
    let mut found = [0; PAGE_BYTES];
    for (page, expected) in ram.chunks_exact(PAGE_BYTES).enumerate().step_by(COMPARED_EVERY) {
        let offset = PageIndex(u32::try_from(page).unwrap_or(u32::MAX)).offset();
        let read = mapping.read(offset, &mut found);
        if read.is_err() || found != expected {
            return Err(wrong(page));
        }
    }
    Ok(())
}

pub(super) fn wrong(page: usize) -> LabError {
    LabError::Unsupported(format!("page {page} came out wrong"))
}

fn panicked() -> std::io::Error {
    std::io::Error::other("a thread panicked")
}

fn accept(
    listener: &TcpListener,
    stopping: &AtomicBool,
    security: &Security,
    placer: &Arc<Placer>,
) -> std::io::Result<Duration> {
    let mut threads = Vec::new();
    loop {
        let (stream, _) = listener.accept()?;
        if stopping.load(SeqCst) {
            break;
        }
        let (security, placer) = (security.clone(), Arc::clone(placer));
        threads.push(thread::spawn(move || receive(stream, &security, &placer)));
    }
    threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(panicked()))).sum()
}

fn receive(stream: TcpStream, security: &Security, placer: &Placer) -> std::io::Result<Duration> {
    transport::tune(&stream)?;
    let mut connection = security.accept(stream).map_err(std::io::Error::other)?;
    connection.read_exact(&mut [0; Preamble::BYTES])?;
    connection.write_all(&Reply::Welcome.to_bytes(wire::VERSION))?;
    let mut lane = Incoming::new(connection);
    match place_all(&mut lane, placer) {
        Err(error) if !error.only_this_lane() => Err(std::io::Error::other(error)),
        _ => Ok(thread_cpu()),
    }
}

fn place_all(lane: &mut Incoming, placer: &Placer) -> std::result::Result<(), LaneEnd> {
    while let Some(header) = lane.next_header()? {
        if let LaneHeader::Pages(header) = header {
            lane.place(header, placer)?;
        }
    }
    Ok(())
}
