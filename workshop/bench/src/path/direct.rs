//! The path without Droveway: packets go into TCP connections, and from there into RAM.

use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use lab::error::{Result, SystemContext};
use page::PAGE_BYTES;
use stream::multifd::{HEAD_BYTES, INIT_BYTES, Init, PACKET_PAGES, Packet};
use transport::thread_cpu;

use super::destination::{COMPARED_EVERY, wrong};
use super::run::{CHANNELS, Run, Stages};
use super::source::write_channel;

pub(super) fn run(ram: &[u8]) -> Result<Run> {
    // Fresh memory, as an arriving QEMU's.
    let mut arrived = vec![0; ram.len()];
    let began = Instant::now();
    let (generator, receivers) = carry(ram, &mut arrived).doing("send and receive")?;
    let took = began.elapsed();
    let pages = ram.chunks_exact(PAGE_BYTES).zip(arrived.chunks_exact(PAGE_BYTES)).enumerate();
    for (page, (sent, arrived)) in pages.step_by(COMPARED_EVERY) {
        if sent != arrived {
            return Err(wrong(page));
        }
    }
    Ok(Run { took, stages: Stages { generator, receivers, ..Stages::default() } })
}

/// Returns the CPU time of the senders, and that of the receivers.
fn carry(ram: &[u8], arrived: &mut [u8]) -> std::io::Result<(Duration, Duration)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    // A channel carries every `CHANNELS`th packet of RAM.
    let mut places: Vec<Vec<&mut [u8]>> = (0..CHANNELS).map(|_| Vec::new()).collect();
    for (nth, packet) in arrived.chunks_mut(PACKET_PAGES * PAGE_BYTES).enumerate() {
        places[nth % usize::from(CHANNELS)].push(packet);
    }
    thread::scope(|scope| {
        let send = |id| {
            scope.spawn(move || {
                let mut socket = TcpStream::connect(address)?;
                socket.set_nodelay(true)?;
                write_channel(ram, id, &mut socket)?;
                Ok(thread_cpu())
            })
        };
        let senders: Vec<_> = (0..CHANNELS).map(send).collect();
        let mut receivers = Vec::new();
        for _ in 0..CHANNELS {
            let (mut socket, _) = listener.accept()?;
            let mut init = [0; INIT_BYTES];
            socket.read_exact(&mut init)?;
            let init = Init::parse(&init).map_err(std::io::Error::other)?;
            let places = std::mem::take(&mut places[usize::from(init.id)]);
            receivers.push(scope.spawn(move || receive(socket, places)));
        }
        Ok((sum(senders)?, sum(receivers)?))
    })
}

fn sum(threads: Vec<ScopedJoinHandle<'_, std::io::Result<Duration>>>) -> std::io::Result<Duration> {
    let join = |thread: ScopedJoinHandle<'_, std::io::Result<Duration>>| {
        thread.join().unwrap_or_else(|_| Err(std::io::Error::other("a thread panicked")))
    };
    threads.into_iter().map(join).sum()
}

fn receive(mut socket: TcpStream, places: Vec<&mut [u8]>) -> std::io::Result<Duration> {
    let mut head = [0; HEAD_BYTES];
    for place in places {
        socket.read_exact(&mut head)?;
        Packet::parse(&head).map_err(std::io::Error::other)?;
        socket.read_exact(place)?;
    }
    socket.read_exact(&mut head)?;
    Ok(thread_cpu())
}
