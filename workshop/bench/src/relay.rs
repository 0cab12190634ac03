//! The least that a program between QEMU and the network can do: a bound for agents.
//!
//! Each end has a thread with one buffer for each of QEMU's connections, and makes the system calls
//! that an agent can't do without. At the source it reads what QEMU sends and writes it to TCP. At
//! the destination it reads that, and has the kernel copy page bodies into the RAM of QEMU. It
//! reads the heads of packets there, since they name the pages; nothing else is parsed, and nothing
//! is checked, noted, queued or acknowledged.
//!
//! QEMU has to send zero pages in packets, as it does since 9.0.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Barrier;
use std::thread::{self, ScopedJoinHandle};

use clap::Args;
use data_threads::{DataThreads, SchedParams};
use page::{PAGE_BYTES, PageIndex};
use qemu::process::Process;
use ram::{Mapping, Piece};
use stream::multifd::{HEAD_BYTES, INIT_BYTES, MAGIC, MultifdError, Packet, Pages, write_head};
use stream::{Block, Blocks, StreamError};

use crate::part;
use lab::hosts::RUN_DIR;

/// Its name in tables.
pub const RELAY: &str = "relay";

/// QEMU's multifd channels, for all contenders that have them.
pub(crate) const CHANNELS: u8 = 4;
/// Bytes read at a time.
const BUFFER_BYTES: usize = 256 << 10;
/// Pages read and placed at a time, as many as an agent's.
const PLACED_AT_ONCE: usize = BUFFER_BYTES / PAGE_BYTES;
/// Bytes of [`MAGIC`].
const MAGIC_BYTES: usize = 4;

/// Path, on either host, of the socket that QEMU connects to or listens on.
pub(crate) fn socket() -> PathBuf {
    PathBuf::from(RUN_DIR).join(RELAY)
}

/// The guest's RAM in the memory of the destination's QEMU.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct Ram {
    /// QEMU's name of the block.
    pub block: String,
    /// QEMU's process.
    pub pid: u32,
    /// The block's address there.
    pub address: u64,
    /// The block's size.
    pub bytes: u64,
}

/// The source's end, which sends to `address` what QEMU writes.
///
/// # Errors
/// If a connection fails.
pub fn source(address: &str) -> io::Result<()> {
    let listener = UnixListener::bind(socket())?;
    part::ready()?;
    let connect = || -> io::Result<(UnixStream, TcpStream)> {
        let (qemu, _) = listener.accept()?;
        let network = TcpStream::connect(address)?;
        transport::tune(&network)?;
        Ok((qemu, network))
    };
    carry(connect, |(mut qemu, mut network)| forward(&mut qemu, &mut network))
}

/// The destination's end.
///
/// # Errors
/// If a connection fails, or RAM can't be written.
pub fn destination(port: u16, ram: &Ram) -> io::Result<()> {
    let process = Process::now(ram.pid).map_err(io::Error::other)?;
    let mapping = Mapping::of_process(process.pidfd(), ram.pid, ram.address, ram.bytes);
    let placing = Placing::new(mapping.map_err(io::Error::other)?, &ram.block, CHANNELS)?;
    let listener = TcpListener::bind(("0.0.0.0", port))?;
    part::ready()?;
    let connect = || -> io::Result<(TcpStream, UnixStream)> {
        let (network, _) = listener.accept()?;
        Ok((network, UnixStream::connect(socket())?))
    };
    carry(connect, |(mut network, mut qemu)| placing.arrive(&mut network, &mut qemu))
}

/// Makes a connection for each of QEMU's, the main one and the channels, and runs each on a thread
/// that is scheduled as an agent's data threads are. A connection closes when its run ends.
fn carry<C: Send>(
    connect: impl Fn() -> io::Result<C>,
    run: impl Fn(C) -> io::Result<()> + Sync,
) -> io::Result<()> {
    let data = DataThreads::new(SchedParams::default(), |_| {});
    thread::scope(|scope| {
        let mut threads = Vec::new();
        for _ in 0..=CHANNELS {
            let connection = connect()?;
            let (data, run) = (&data, &run);
            threads.push(scope.spawn(move || {
                let _member = data.join();
                run(connection)
            }));
        }
        let join = |thread: ScopedJoinHandle<'_, io::Result<()>>| {
            thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))
        };
        threads.into_iter().try_for_each(join)
    })
}

/// Copies all bytes.
fn forward(from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok(()),
            count => to.write_all(&buffer[..count])?,
        }
    }
}

/// RAM, and the channels that write into it.
struct Placing {
    mapping: Mapping,
    /// The only block that is written here. QEMU places the pages of others, which are small.
    blocks: Blocks,
    /// Where channels wait for each other after each pass, so that an older version of a page
    /// can't overwrite a newer one.
    pass: Barrier,
}

impl Placing {
    fn new(mapping: Mapping, block: &str, channels: u8) -> io::Result<Self> {
        let block = Block { name: block.to_owned(), bytes: mapping.bytes() };
        let blocks = Blocks::new([block]).map_err(io::Error::other)?;
        Ok(Self { mapping, blocks, pass: Barrier::new(channels.into()) })
    }

    /// Carries one connection to QEMU.
    fn arrive(&self, network: &mut impl Read, qemu: &mut impl Write) -> io::Result<()> {
        let mut magic = [0; MAGIC_BYTES];
        network.read_exact(&mut magic)?;
        qemu.write_all(&magic)?;
        if u32::from_be_bytes(magic) != MAGIC {
            return forward(network, qemu);
        }
        let mut init = [0; INIT_BYTES - MAGIC_BYTES];
        network.read_exact(&mut init)?;
        qemu.write_all(&init)?;
        self.channel(network, qemu)
    }

    /// Places a channel's pages. QEMU receives only where passes end, for which its main thread
    /// waits.
    fn channel(&self, network: &mut impl Read, qemu: &mut impl Write) -> io::Result<()> {
        let mut sync = Vec::new();
        write_head(&mut sync, "", &[], &[], true);
        let mut head = [0; HEAD_BYTES];
        let mut buffer = vec![0; BUFFER_BYTES];
        let mut first_pass = true;
        while read_head(network, &mut head)? {
            let packet = Packet::parse(&head).map_err(io::Error::other)?;
            match packet.pages(&self.blocks) {
                Ok(pages) => {
                    if let Some(pages) = pages {
                        self.bodies(&pages, network, &mut buffer)?;
                        // What has not been written yet is zero.
                        if !first_pass {
                            self.zeros(&pages)?;
                        }
                    }
                    if packet.sync() {
                        qemu.write_all(&sync)?;
                    }
                }
                Err(MultifdError::Page(StreamError::UnknownBlock { .. })) => {
                    qemu.write_all(&head)?;
                    let bytes = (packet.normal() * PAGE_BYTES) as u64;
                    io::copy(&mut network.by_ref().take(bytes), qemu)?;
                }
                Err(error) => return Err(io::Error::other(error)),
            }
            if packet.sync() {
                first_pass = false;
                self.pass.wait();
            }
        }
        Ok(())
    }

    fn bodies(
        &self,
        pages: &Pages<'_>,
        network: &mut impl Read,
        buffer: &mut [u8],
    ) -> io::Result<()> {
        let mut normal = pages.normal();
        loop {
            let count = normal.len().min(PLACED_AT_ONCE);
            if count == 0 {
                return Ok(());
            }
            let mut pieces = [Piece::Drop { bytes: 0 }; PLACED_AT_ONCE];
            for (piece, page) in pieces.iter_mut().zip(normal.by_ref()) {
                *piece = Piece::Ram { offset: page.offset(), bytes: PAGE_BYTES };
            }
            let bodies = &mut buffer[..count * PAGE_BYTES];
            network.read_exact(bodies)?;
            let placed = self.mapping.write_pieces(bodies, &pieces[..count]);
            placed.map_err(io::Error::other)?;
        }
    }

    fn zeros(&self, pages: &Pages<'_>) -> io::Result<()> {
        let mut zero = pages.zero();
        let fill = |page: PageIndex| self.mapping.fill(page.offset(), PAGE_BYTES as u64, 0);
        zero.try_for_each(fill).map_err(io::Error::other)
    }
}

/// Reads a packet's head; `false` at the channel's end.
fn read_head(network: &mut impl Read, head: &mut [u8; HEAD_BYTES]) -> io::Result<bool> {
    let count = network.read(head)?;
    if count > 0 {
        network.read_exact(&mut head[count..])?;
    }
    Ok(count > 0)
}

#[cfg(test)]
mod tests {
    use stream::multifd::Init;

    use super::*;

    const PAGES: u32 = 200;

    fn placing() -> Placing {
        let mapping = Mapping::own(u64::from(PAGES) * PAGE_BYTES as u64);
        Placing::new(mapping, "pc.ram", 1).unwrap()
    }

    /// A packet, whose bodies are all of one byte.
    fn packet(block: &str, normal: &[u32], zero: &[u32], sync: bool, byte: u8) -> Vec<u8> {
        let pages = |list: &[u32]| list.iter().copied().map(PageIndex).collect::<Vec<_>>();
        let mut bytes = Vec::new();
        write_head(&mut bytes, block, &pages(normal), &pages(zero), sync);
        bytes.resize(bytes.len() + normal.len() * PAGE_BYTES, byte);
        bytes
    }

    fn byte_of(placing: &Placing, page: u32) -> u8 {
        let mut body = [0; PAGE_BYTES];
        placing.mapping.read(PageIndex(page).offset(), &mut body).unwrap();
        assert!(body.iter().all(|byte| *byte == body[0]), "page {page}");
        body[0]
    }

    #[test]
    fn pages_are_placed_and_qemu_gets_the_rest() {
        let mut init = Vec::new();
        Init { uuid: [1; 16], id: 2 }.write(&mut init);
        let small = packet("vga.vram", &[3], &[4], false, 9);
        let all: Vec<u32> = (0..100).collect();
        let sent = [
            init.clone(),
            packet("pc.ram", &all, &[150], false, 7),
            small.clone(),
            packet("", &[], &[], true, 0),
            packet("pc.ram", &[1], &[2], true, 8),
        ];
        let placing = placing();
        let mut qemu = Vec::new();
        placing.arrive(&mut &sent.concat()[..], &mut qemu).unwrap();
        let sync = packet("", &[], &[], true, 0);
        assert_eq!(qemu, [init, small, sync.clone(), sync].concat());
        let found = [0, 1, 2, 64, 99, 100, 150].map(|page| byte_of(&placing, page));
        assert_eq!(found, [7, 8, 0, 7, 7, 0, 0]);
    }

    #[test]
    fn the_main_stream_is_forwarded() {
        let sent = [&b"QEVM"[..], &[5; 300_000]].concat();
        let mut qemu = Vec::new();
        placing().arrive(&mut &sent[..], &mut qemu).unwrap();
        assert!(qemu == sent);
    }

    #[test]
    fn a_channel_that_breaks_off_is_an_error() {
        let mut sent = packet("pc.ram", &[0], &[], false, 1);
        sent.pop();
        let mut qemu = Vec::new();
        assert!(placing().channel(&mut &sent[..], &mut qemu).is_err());
    }
}
