//! TCP counters of one connection.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

/// Counters of a connection since it was opened, and its current state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpCounts {
    /// Bytes sent, including retransmissions.
    pub sent_bytes: u64,
    /// Retransmitted bytes.
    pub again_bytes: u64,
    /// Bytes sent and not acknowledged yet.
    pub flying_bytes: u64,
    /// The bandwidth-delay product: the recent delivery rate times the shortest round trip so far.
    pub path_bytes: u64,
    /// The shortest round trip of the last five minutes (`tcp_min_rtt_wlen`); none if it is not
    /// known.
    pub round_trip: Option<Duration>,
    /// For how long the peer had no room for what was to be sent.
    pub peer_full: Duration,
}

impl TcpCounts {
    /// Reads the counters of a connection's socket.
    ///
    /// # Errors
    /// If it is no TCP socket.
    #[expect(unsafe_code, reason = "the kernel fills in a C structure")]
    pub fn of(socket: BorrowedFd<'_>) -> io::Result<Self> {
        let mut info = MaybeUninit::<libc::tcp_info>::zeroed();
        let mut length = u32::try_from(size_of::<libc::tcp_info>()).expect("it is small");
        // SAFETY: the kernel writes at most `length` bytes there, which is the size of the
        // structure.
        let done = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                info.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the structure consists of numbers, which are zero where the kernel wrote nothing:
        // an older kernel knows fewer fields.
        let info = unsafe { info.assume_init() };
        let round_trip_us = if info.tcpi_min_rtt == u32::MAX { 0 } else { info.tcpi_min_rtt };
        let rate = u128::from(info.tcpi_delivery_rate);
        let path_bytes = rate * u128::from(round_trip_us) / 1_000_000;
        let round_trip = Duration::from_micros(round_trip_us.into());
        Ok(Self {
            sent_bytes: info.tcpi_bytes_sent,
            again_bytes: info.tcpi_bytes_retrans,
            flying_bytes: u64::from(info.tcpi_unacked) * u64::from(info.tcpi_snd_mss),
            path_bytes: u64::try_from(path_bytes).unwrap_or(u64::MAX),
            round_trip: Some(round_trip).filter(|time| !time.is_zero()),
            peer_full: Duration::from_micros(info.tcpi_rwnd_limited),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn what_was_sent_is_counted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        assert_eq!(TcpCounts::of(near.as_fd()).unwrap().sent_bytes, 0);
        near.write_all(&[7; 300_000]).unwrap();
        far.read_exact(&mut [0; 300_000]).unwrap();
        far.write_all(b"all").unwrap();
        // The answer acknowledges all bytes that were read.
        near.read_exact(&mut [0; 3]).unwrap();
        let counts = TcpCounts::of(near.as_fd()).unwrap();
        assert_eq!(counts.sent_bytes - counts.again_bytes, 300_000);
        assert_eq!(counts.flying_bytes, 0);
        assert!(counts.path_bytes > 0 && counts.round_trip.is_some());
        near.set_nonblocking(true).unwrap();
        // Nothing reads that.
        while near.write(&[7; 65536]).is_ok() {}
        let until = std::time::Instant::now() + Duration::from_secs(20);
        let peer_full = || TcpCounts::of(near.as_fd()).unwrap().peer_full;
        while peer_full().is_zero() && std::time::Instant::now() < until {
            std::thread::yield_now();
        }
        assert!(!peer_full().is_zero());
        let other = UdpSocket::bind("127.0.0.1:0").unwrap();
        assert!(TcpCounts::of(other.as_fd()).is_err());
    }
}
