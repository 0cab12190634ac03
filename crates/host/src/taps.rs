//! Open files of tap devices: each is a queue of one device.
//!
//! When its device is removed, a file stays as it was set up, and can join another device. So a
//! device gets the queue of another process, and all that the host knows of it stays as it is: its
//! name and its index, its bridge or other switch, addresses, routes, filters and counters.

mod packets;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::nic::{LinkState, NicError, link_state, remove_link};
pub use packets::Packets;

/// Where queues are opened.
pub const DRIVER: &str = "/dev/net/tun";
/// The name of a device that exists until its queues join another one. The kernel puts a number in.
const OWN: &str = "droveway%d";
/// How these names begin.
const OWN_PREFIX: &str = "droveway";
/// Flags of a queue and its device.
const TAP: u16 = 0x0002;
const MULTI_QUEUE: u16 = 0x0100;
const ENABLE: u16 = 0x0200;
const DISABLE: u16 = 0x0400;
const PERSISTENT: u16 = 0x0800;
/// No header in front of packets besides that of virtio.
const PLAIN: u16 = 0x1000;
const VIRTIO_HEADER: u16 = 0x4000;
/// A process that has ended may close its queues a moment later: a thread of the kernel (`vhost`)
/// may still have them. Nothing reports that.
const CLOSES_MAX: u32 = 500;
const CLOSES_EACH: Duration = Duration::from_millis(2);

/// Why a queue can't join a device.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// There is no such device.
    #[error("there is no tap {name} any more: create it, as it was")]
    Missing {
        /// Its name.
        name: String,
    },
    /// The queues are of another device than their own or that one.
    #[error("a queue for the tap {name} belongs to {other}")]
    Elsewhere {
        /// Its name.
        name: String,
        /// The other one's; empty if they are of none.
        other: String,
    },
    /// The kernel refuses.
    #[error("{action} the tap {name}: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// Its name.
        name: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// The kernel refuses to show or remove a device.
    #[error(transparent)]
    Link(#[from] NicError),
}

/// What all queues of a device have to agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kind {
    /// Whether packets have virtio's header in front.
    pub virtio_header: bool,
    /// Whether the device may have more than one queue.
    pub multi_queue: bool,
}

impl Kind {
    fn flags(self) -> u16 {
        let virtio_header = if self.virtio_header { VIRTIO_HEADER } else { 0 };
        let multi_queue = if self.multi_queue { MULTI_QUEUE } else { 0 };
        TAP | PLAIN | virtio_header | multi_queue
    }
}

/// The device of a queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its name.
    pub name: String,
    /// What its queues agree on.
    pub kind: Kind,
    /// Whether it stays when it has no queue.
    pub is_persistent: bool,
    /// Whether this queue passes packets.
    pub is_enabled: bool,
}

/// How queues join a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Joining {
    /// The device's name.
    pub name: String,
    /// What its queues agree on.
    pub kind: Kind,
    /// The length of the header in front of each packet, as it was set for these queues; none
    /// without one.
    pub header_bytes: Option<i32>,
    /// Whether each queue passes packets.
    pub enabled: Vec<bool>,
    /// Whether the device has to vanish with its last queue, and stays only until they joined.
    pub is_temporary: bool,
}

/// A queue: an open file of the driver.
#[derive(Debug)]
pub struct Queue(OwnedFd);

impl Queue {
    /// The queue of an open file of the driver.
    #[must_use]
    pub fn of(file: OwnedFd) -> Self {
        Self(file)
    }

    /// Queues of a new device, which exists as long as they do. It is down, and on no bridge.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn make(kind: Kind, count: usize) -> Result<Vec<Self>, TapError> {
        let failed = |source| {
            let name = OWN_PREFIX.to_owned();
            TapError::System { action: "making", name, source }
        };
        let mut made: Vec<Self> = Vec::new();
        let mut name = OWN.to_owned();
        for _ in 0..count {
            let queue = Self::open().map_err(failed)?;
            name = queue.attach(&name, kind).map_err(failed)?;
            made.push(queue);
        }
        Ok(made)
    }

    /// One without a device.
    fn open() -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_NONBLOCK);
        Ok(Self(options.open(DRIVER)?.into()))
    }

    /// Its device; none if it has none, or is no tap.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn device(&self) -> io::Result<Option<Device>> {
        let (name, flags) = match request(&self.0, libc::TUNGETIFF, "", 0) {
            Err(error) if error.raw_os_error() == Some(Errno::BADFD.raw_os_error()) => {
                return Ok(None);
            }
            found => found?,
        };
        let is = |flag: u16| flags & flag != 0;
        let kind = Kind { virtio_header: is(VIRTIO_HEADER), multi_queue: is(MULTI_QUEUE) };
        let (is_persistent, is_enabled) = (is(PERSISTENT), !is(DISABLE));
        Ok(is(TAP).then_some(Device { name, kind, is_persistent, is_enabled }))
    }

    /// Whether its device is in the network of the calling thread.
    ///
    /// # Errors
    /// If the kernel refuses.
    #[expect(unsafe_code, reason = "an ioctl that returns an open file")]
    pub fn is_here(&self) -> io::Result<bool> {
        // SAFETY: the command has no argument.
        let network = unsafe { libc::ioctl(self.0.as_raw_fd(), libc::TUNGETDEVNETNS) };
        if network < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just opened it for this caller.
        let network = File::from(unsafe { OwnedFd::from_raw_fd(network) });
        let (its, ours) = (network.metadata()?, fs::metadata("/proc/thread-self/ns/net")?);
        Ok((its.dev(), its.ino()) == (ours.dev(), ours.ino()))
    }

    /// Has its device stay when it has no queue, or vanish with the last one.
    ///
    /// # Errors
    /// If the kernel refuses.
    #[expect(unsafe_code, reason = "an ioctl")]
    pub fn persist(&self, stays: bool) -> io::Result<()> {
        // SAFETY: the kernel takes the argument as a number.
        let done = unsafe {
            libc::ioctl(self.0.as_raw_fd(), libc::TUNSETPERSIST, libc::c_ulong::from(stays))
        };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Joins a device, or with a name that no device has, makes it. Returns the device's name.
    fn attach(&self, name: &str, kind: Kind) -> io::Result<String> {
        request(&self.0, libc::TUNSETIFF, name, kind.flags()).map(|(name, _)| name)
    }

    /// Leaves its device's packets to other queues, although a process may have it open. May be
    /// called again.
    ///
    /// # Errors
    /// If the kernel refuses, as it does if the device has one queue only.
    pub fn leave(&self) -> io::Result<()> {
        match self.device()? {
            Some(device) if device.is_enabled => self.enable(false),
            _ => Ok(()),
        }
    }

    fn enable(&self, enabled: bool) -> io::Result<()> {
        let flag = if enabled { ENABLE } else { DISABLE };
        request(&self.0, libc::TUNSETQUEUE, "", flag).map(drop)
    }

    /// The length of the header in front of each packet.
    #[expect(unsafe_code, reason = "an ioctl with a pointer")]
    fn header_bytes(&self) -> io::Result<i32> {
        let mut bytes: libc::c_int = 0;
        // SAFETY: the kernel writes a number there, which outlives the call.
        let done =
            unsafe { libc::ioctl(self.0.as_raw_fd(), libc::TUNGETVNETHDRSZ, &raw mut bytes) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(bytes) }
    }

    #[expect(unsafe_code, reason = "an ioctl with a pointer")]
    fn set_header_bytes(&self, bytes: i32) -> io::Result<()> {
        // SAFETY: the kernel reads a number there, which outlives the call.
        let done =
            unsafe { libc::ioctl(self.0.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const bytes) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl AsFd for Queue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Queue {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Whether all of these queues are of that device.
///
/// # Errors
/// If the kernel refuses.
pub fn are_of(queues: &[Queue], name: &str) -> Result<bool, TapError> {
    let of = queues.iter().map(Queue::device);
    let of = of.collect::<io::Result<Vec<_>>>().map_err(failed("examining", name))?;
    Ok(of.into_iter().all(|device| device.is_some_and(|device| device.name == name)))
}

/// How these queues, which are those of a device of their own, would join another one.
///
/// # Errors
/// If they have no device of their own, or the kernel refuses.
pub fn joining(queues: &[Queue], name: &str) -> Result<Joining, TapError> {
    let (mut enabled, mut own) = (Vec::new(), None);
    for queue in queues {
        let device = queue.device().map_err(failed("examining", name))?;
        let other = device.as_ref().map_or_else(String::new, |device| device.name.clone());
        let device = device.filter(|device| device.name.starts_with(OWN_PREFIX));
        let device = device.ok_or(TapError::Elsewhere { name: name.to_owned(), other })?;
        enabled.push(device.is_enabled);
        own = Some((queue, device.kind));
    }
    let none = || TapError::Elsewhere { name: name.to_owned(), other: String::new() };
    let (queue, kind) = own.ok_or_else(none)?;
    let header_bytes = kind.virtio_header.then(|| queue.header_bytes()).transpose();
    let header_bytes = header_bytes.map_err(failed("examining", name))?;
    Ok(Joining { name: name.to_owned(), kind, header_bytes, enabled, is_temporary: false })
}

/// Has queues leave their own device, which vanishes, and join another one, whose former queues
/// were closed or [have left](Queue::leave). May be called again: what was done is not done twice.
///
/// # Errors
/// If the device is missing, or the kernel refuses.
pub fn join(queues: &[Queue], to: &Joining) -> Result<(), TapError> {
    let name = to.name.as_str();
    // The kernel would make one that is missing, on no bridge. And a queue without a device keeps
    // its process busy, which should not be for long.
    if link_state(name)? == LinkState::Missing {
        return Err(TapError::Missing { name: to.name.clone() });
    }
    for (queue, enabled) in queues.iter().zip(&to.enabled) {
        let device = queue.device().map_err(failed("examining", name))?;
        let is_enabled = match device {
            Some(device) if device.name == name => device.is_enabled,
            Some(device) if device.name.starts_with(OWN_PREFIX) => {
                // All its queues have no device then.
                remove_link(&device.name)?;
                attach_when_closed(queue, to)?
            }
            Some(Device { name: other, .. }) => {
                return Err(TapError::Elsewhere { name: name.to_owned(), other });
            }
            None => attach_when_closed(queue, to)?,
        };
        if is_enabled != *enabled {
            queue.enable(*enabled).map_err(failed("setting up", name))?;
        }
    }
    let Some(first) = queues.first() else { return Ok(()) };
    if let Some(bytes) = to.header_bytes {
        first.set_header_bytes(bytes).map_err(failed("setting up", name))?;
    }
    if to.is_temporary {
        first.persist(false).map_err(failed("setting up", name))?;
    }
    Ok(())
}

/// Joins a device when its former queue was closed. Returns whether the queue passes packets.
fn attach_when_closed(queue: &Queue, to: &Joining) -> Result<bool, TapError> {
    let mut tries = 0;
    loop {
        match queue.attach(&to.name, to.kind) {
            Ok(_) => return Ok(true),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && tries < CLOSES_MAX => {
                tries += 1;
                thread::sleep(CLOSES_EACH);
            }
            Err(error) => return Err(failed("joining", &to.name)(error)),
        }
    }
}

fn failed(action: &'static str, name: &str) -> impl Fn(io::Error) -> TapError {
    let name = name.to_owned();
    move |source| TapError::System { action, name: name.clone(), source }
}

/// Sends a command with a name and flags, and returns those in the answer.
#[expect(unsafe_code, reason = "a C structure with a union, for an ioctl")]
fn request(
    file: &OwnedFd,
    command: libc::Ioctl,
    name: &str,
    flags: u16,
) -> io::Result<(String, u16)> {
    // SAFETY: all zeros are a valid `ifreq`: arrays of numbers, and a union of
    // numbers, addresses and pointers.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays zero, which terminates the name.
    if name.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags = flags.cast_signed();
    // SAFETY: each of these commands has the kernel read and write this structure, which outlives
    // the call.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), command, &raw mut request) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    let name = request.ifr_name.iter().map(|byte| byte.cast_unsigned());
    let name = String::from_utf8(name.take_while(|byte| *byte != 0).collect());
    // SAFETY: all commands leave numbers in this member, of which any is valid.
    let flags = unsafe { request.ifr_ifru.ifru_flags }.cast_unsigned();
    Ok((name.map_err(io::Error::other)?, flags))
}

#[cfg(test)]
mod tests;
