//! The first packets of QEMU's multifd channels, which show whether it compresses its pages.
//!
//! Nothing on the main connection shows it, and once the destination splits a stream, it can't be
//! passed on whole any more. So the decision waits for the first packet with pages. QEMU waits for
//! no answer until then.

use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use stream::multifd::{HEAD_BYTES, MultifdError, Packet};

use super::caller::{Channel, wait_readable};

/// Time for a packet with pages. There may be none before the main connection is read, which
/// carries zero pages in old versions.
const PAGES_MAX: Duration = Duration::from_secs(1);
/// Most heads without pages that are read from a channel.
const HEADS_MAX: usize = 16;

/// What a channel has shown so far.
enum Seen {
    /// Packets without pages, or none.
    Nothing,
    /// Nothing, and nothing else will be read here: the tap finds out why.
    NoMore,
    /// Pages that can be split.
    Pages,
    /// A packet that can't be split.
    Unsplittable(MultifdError),
}

/// Why the packets can't be split; none if they can, or show nothing in time. What is read is
/// kept with the channels.
pub(super) fn unsplittable(channels: &mut [Channel]) -> Option<MultifdError> {
    let end = Instant::now() + PAGES_MAX;
    let mut awaited: Vec<&mut Channel> = channels.iter_mut().collect();
    loop {
        let sockets: Vec<_> = awaited.iter().map(|channel| &channel.socket).collect();
        if sockets.is_empty() || !wait_readable(&sockets, end) {
            return None;
        }
        let mut rest = Vec::with_capacity(awaited.len());
        for channel in awaited {
            match look(channel) {
                Seen::Nothing => rest.push(channel),
                Seen::NoMore => {}
                Seen::Pages => return None,
                Seen::Unsplittable(error) => return Some(error),
            }
        }
        awaited = rest;
    }
}

/// Reads the heads that are there, up to the first with pages.
fn look(channel: &mut Channel) -> Seen {
    let mut head = [0; HEAD_BYTES];
    loop {
        let begun = channel.after.len() % HEAD_BYTES;
        let count = match recv(&channel.socket, &mut head[begun..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Seen::NoMore,
            Ok((count, _)) => count,
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => return Seen::Nothing,
            Err(_) => return Seen::NoMore,
        };
        channel.after.extend_from_slice(&head[begun..begun + count]);
        if begun + count < HEAD_BYTES {
            continue;
        }
        match channel.after.last_chunk::<HEAD_BYTES>().map(Packet::parse) {
            Some(Err(error)) => return Seen::Unsplittable(error),
            Some(Ok(packet)) if !packet.is_empty() => return Seen::Pages,
            _ if channel.after.len() >= HEADS_MAX * HEAD_BYTES => return Seen::NoMore,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use page::{PAGE_BYTES, PageIndex};
    use stream::multifd::{INIT_BYTES, write_head};

    use super::*;

    /// Channels, and QEMU's end of each.
    fn channels(count: u8) -> (Vec<Channel>, Vec<UnixStream>) {
        let one = |id| {
            let (socket, qemu) = UnixStream::pair().unwrap();
            let (first, after) = ([0; INIT_BYTES], Vec::new());
            (Channel { id, uuid: [0; 16], first, after, socket }, qemu)
        };
        (0..count).map(one).unzip()
    }

    fn sync() -> Vec<u8> {
        let mut out = Vec::new();
        write_head(&mut out, "", &[], &[], true);
        out
    }

    fn pages(flags: u8) -> Vec<u8> {
        let mut out = Vec::new();
        write_head(&mut out, "pc.ram", &[PageIndex(7)], &[], false);
        out[11] |= flags;
        out
    }

    #[test]
    fn pages_that_qemu_compresses_are_noticed_on_any_channel() {
        let (mut channels, mut qemus) = channels(3);
        qemus.iter_mut().for_each(|qemu| qemu.write_all(&sync()).unwrap());
        qemus[1].write_all(&pages(4)).unwrap();
        let error = unsplittable(&mut channels);
        assert_eq!(error, Some(MultifdError::Compressed { flags: 4 }));
        assert_eq!(channels[1].after, [sync(), pages(4)].concat());
    }

    /// What follows the head stays in the connection.
    #[test]
    fn other_pages_can_be_split_and_nothing_is_lost() {
        let (mut channels, mut qemus) = channels(2);
        qemus[0].write_all(&sync()[..99]).unwrap();
        let body = [0xab; PAGE_BYTES];
        qemus[1].write_all(&[&sync()[..], &pages(0)[..], &body[..]].concat()).unwrap();
        assert_eq!(unsplittable(&mut channels), None);
        assert_eq!(channels[1].after, [sync(), pages(0)].concat());
        let mut rest = [0; PAGE_BYTES];
        channels[1].socket.read_exact(&mut rest).unwrap();
        assert_eq!(rest, body);
        let mut all = channels[0].after.clone();
        drop(qemus);
        channels[0].socket.read_to_end(&mut all).unwrap();
        assert_eq!(all, sync()[..99]);
    }

    #[test]
    fn channels_that_end_or_never_have_pages_are_left_to_the_tap() {
        let (mut channels, mut qemus) = channels(2);
        for _ in 0..HEADS_MAX {
            qemus[0].write_all(&sync()).unwrap();
        }
        drop(qemus);
        assert_eq!(unsplittable(&mut channels), None);
        assert_eq!(channels[0].after.len(), HEADS_MAX * HEAD_BYTES);
    }
}
