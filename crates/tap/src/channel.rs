//! Reads one multifd channel: packets, straight into batches.

use std::os::unix::net::UnixStream;

use page::{Epoch, PAGE_BYTES};
use stream::StreamError;
use stream::multifd::{HEAD_BYTES, INIT_BYTES, Init, Packet, Pages};

use crate::error::TapError;
use crate::filling::Filling;
use crate::shared::{Rounds, Shared};
use crate::socket::{SocketRead, read_all, read_some, read_soon};

/// Bodies read at a time: 64 KiB, which are still in the processor's cache when they are
/// examined.
const PIECE_PAGES: usize = 16;

/// Reads a channel's first message and returns the channel's number.
pub(crate) fn number(socket: &UnixStream) -> Result<u8, TapError> {
    let mut init = [0; INIT_BYTES];
    read_all(socket, &mut init, "a channel's first message")?;
    Ok(Init::parse(&init)?.id)
}

/// Reads channel `id` from after its first message to its end; `before` was read already.
pub(crate) fn run(
    shared: &Shared,
    socket: &UnixStream,
    reader: usize,
    (id, mut before): (u8, &[u8]),
) -> Result<Option<Rounds>, TapError> {
    let Some(blocks) = shared.wait_blocks()? else { return Ok(None) };
    let mut filling = Filling::new(shared, reader);
    let mut head = [0; HEAD_BYTES];
    let mut epoch = Epoch(0);
    let mut last_page = epoch;
    while read_head(socket, &mut before, &mut head, &mut filling)? {
        let packet = Packet::parse(&head)?;
        if let Some(pages) = packet.pages(&blocks)? {
            take(&mut filling, pages, epoch, socket)?;
            last_page = epoch;
        }
        if packet.sync() {
            epoch.0 = epoch.0.checked_add(1).ok_or(StreamError::TooManyRounds)?;
            filling.begin(epoch)?;
        }
    }
    filling.hand_on()?;
    Ok(Some(Rounds { channel: id, ended: epoch, last_page }))
}

/// Reads a packet's head, first from `before`; `false` at the channel's end. Hands on the
/// current batch before it waits long.
fn read_head(
    socket: &UnixStream,
    before: &mut &[u8],
    head: &mut [u8; HEAD_BYTES],
    filling: &mut Filling<'_>,
) -> Result<bool, TapError> {
    if !before.is_empty() {
        let (now, later) = before.split_at(before.len().min(HEAD_BYTES));
        *before = later;
        head[..now.len()].copy_from_slice(now);
        read_all(socket, &mut head[now.len()..], "a multifd packet's head")?;
        return Ok(true);
    }
    let soon = if filling.is_empty() { SocketRead::Nothing } else { read_soon(socket, head)? };
    let found = match soon {
        SocketRead::Nothing => {
            filling.hand_on()?;
            read_some(socket, head)?
        }
        found => found,
    };
    let SocketRead::Bytes(count) = found else { return Ok(false) };
    read_all(socket, &mut head[count..], "a multifd packet's head")?;
    Ok(true)
}

/// Reads a packet's pages, the bodies from the socket into the batch's buffer, one after
/// the other.
fn take(
    filling: &mut Filling<'_>,
    pages: Pages<'_>,
    epoch: Epoch,
    socket: &UnixStream,
) -> Result<(), TapError> {
    let count = pages.normal().len();
    if count > 0 {
        let (batch, output) = filling.batch(pages.block, epoch, count)?;
        let mut normal = pages.normal();
        let mut first = batch.bodies().len();
        let end = first + count;
        while first < end {
            let next = end.min(first + PIECE_PAGES);
            let (at, to) = (first * PAGE_BYTES, next * PAGE_BYTES);
            read_all(socket, &mut batch.buffer_mut()[at..to], "a multifd packet")?;
            // The buffer offsets must come first in the zip: they end with the piece, so
            // no page number is consumed and lost.
            for (at, page) in (at..to).step_by(PAGE_BYTES).zip(normal.by_ref()) {
                batch.push_body(page, at);
            }
            output.arrived(batch, first);
            first = next;
        }
    }
    for page in pages.zero() {
        filling.fill(pages.block, epoch, page, 0)?;
    }
    Ok(())
}
