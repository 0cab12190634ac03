//! Packets that wait in the queues of a process that has ended.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, netdevice, socket_with};

use super::Queue;

/// A queue holds 1,000 unless its owner has changed that.
const COUNT_MAX: usize = 4096;
const BYTES_MAX: usize = 16 << 20;
/// The longest packet, which its receiver is to divide, and the longest header.
const PACKET_MAX: usize = (64 << 10) + 128;
/// The part of virtio's header that the kernel takes in front of a packet.
const HEADER_BYTES: usize = 10;

/// Packets for a device.
#[derive(Debug, Default)]
pub struct Packets {
    /// Each with virtio's header, or all without.
    pub(super) packets: Vec<Vec<u8>>,
    pub(super) has_header: bool,
}

impl Packets {
    /// Takes those that wait in queues of one device which nothing else reads. What can't be read
    /// is left there.
    #[must_use]
    pub fn waiting_in(queues: &[Queue]) -> Self {
        let mut taken = Self::default();
        let mut buffer = vec![0; PACKET_MAX];
        let mut bytes = 0;
        for queue in queues {
            let Ok(Some(device)) = queue.device() else { continue };
            let header_bytes = match device.kind.virtio_header {
                true => queue.header_bytes().ok().and_then(|bytes| usize::try_from(bytes).ok()),
                false => Some(0),
            };
            let Some(header_bytes) = header_bytes else { continue };
            taken.has_header = device.kind.virtio_header;
            while taken.packets.len() < COUNT_MAX && bytes < BYTES_MAX && is_ready(queue) {
                let Ok(length) = rustix::io::read(queue, buffer.as_mut_slice()) else { break };
                let read = buffer.get(..length).unwrap_or_default();
                let Some(packet) = split(read, header_bytes) else { break };
                bytes += packet.len();
                taken.packets.push(packet);
            }
        }
        taken
    }

    /// Puts them into a device's queue. Returns how many it did not take.
    ///
    /// # Errors
    /// If the kernel refuses to reach the device.
    pub fn deliver(&self, name: &str) -> io::Result<usize> {
        if self.packets.is_empty() {
            return Ok(0);
        }
        // A QEMU that is started meanwhile must not inherit it: it reaches every device.
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)?;
        if self.has_header {
            switch_on(&socket, libc::PACKET_VNET_HDR)?;
        }
        // They have passed the device's queueing and filters before. Its queueing may also not be
        // back yet, after the moment without a queue.
        switch_on(&socket, libc::PACKET_QDISC_BYPASS)?;
        let index = netdevice::name_to_index(&socket, name)?;
        let index = libc::c_int::try_from(index).map_err(io::Error::other)?;
        let lost = self.packets.iter().filter(|packet| send(&socket, index, packet).is_err());
        Ok(lost.count())
    }
}

/// The packet with as much of its header as the kernel takes back.
fn split(read: &[u8], header_bytes: usize) -> Option<Vec<u8>> {
    let (header, packet) = read.split_at_checked(header_bytes)?;
    let header = header.get(..HEADER_BYTES).unwrap_or_default();
    Some([header, packet].concat())
}

/// Whether a packet waits. A queue may be one whose reads block.
fn is_ready(queue: &Queue) -> bool {
    let mut ready = [PollFd::new(queue, PollFlags::IN)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut ready, Some(&at_once)).is_ok()
        && ready[0].revents().contains(PollFlags::IN)
        && !ready[0].revents().contains(PollFlags::ERR)
}

/// Sets an option: that each packet that is sent begins with virtio's header, or that it passes no
/// queueing but the device's own.
#[expect(unsafe_code, reason = "socket options that rustix does not have")]
fn switch_on(socket: &OwnedFd, option: libc::c_int) -> io::Result<()> {
    let on: libc::c_int = 1;
    let length = libc::socklen_t::try_from(size_of::<libc::c_int>()).map_err(io::Error::other)?;
    // SAFETY: the kernel reads a number of that length, which outlives the call.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            option,
            (&raw const on).cast(),
            length,
        )
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[expect(unsafe_code, reason = "an address that rustix does not have")]
fn send(socket: &OwnedFd, index: libc::c_int, packet: &[u8]) -> io::Result<()> {
    // SAFETY: all zeros are a valid address: numbers.
    let mut address: libc::sockaddr_ll = unsafe { mem::zeroed() };
    address.sll_family = u16::try_from(libc::AF_PACKET).map_err(io::Error::other)?;
    address.sll_ifindex = index;
    let length = size_of::<libc::sockaddr_ll>();
    let length = libc::socklen_t::try_from(length).map_err(io::Error::other)?;
    // SAFETY: the kernel reads the packet and the address, each of that length; both outlive the
    // call.
    let sent = unsafe {
        libc::sendto(
            socket.as_raw_fd(),
            packet.as_ptr().cast(),
            packet.len(),
            libc::MSG_DONTWAIT,
            (&raw const address).cast(),
            length,
        )
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_shortened_to_what_the_kernel_takes() {
        assert_eq!(split(b"packet", 0).unwrap(), b"packet");
        assert_eq!(split(b"0123456789packet", 10).unwrap(), b"0123456789packet");
        assert_eq!(split(b"0123456789abpacket", 12).unwrap(), b"0123456789packet");
        assert_eq!(split(b"short", 12), None);
    }
}
