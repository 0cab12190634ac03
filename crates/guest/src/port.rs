//! The virtio-serial port.
//!
//! While the host's end is closed, each read returns an end of file at once, and each poll reports
//! a hangup. With edge-triggered notification, a thread sleeps until something happens: the driver
//! wakes its pollers when the host connects and when it sends something.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cachemap::{PORT_NAME, Query, QueryFinder};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;

/// Where udev lists ports by name.
const NAMED: &str = "/dev/virtio-ports";
/// Where the kernel lists them.
const LISTED: &str = "/sys/class/virtio-ports";

/// The default port, also on a system without udev.
#[must_use]
pub fn usual() -> PathBuf {
    let named = Path::new(NAMED).join(PORT_NAME);
    if named.exists() {
        return named;
    }
    let listed = fs::read_dir(LISTED).into_iter().flatten().flatten();
    let mut ours = listed.filter(|entry| {
        fs::read_to_string(entry.path().join("name")).is_ok_and(|name| name.trim() == PORT_NAME)
    });
    ours.next().map_or(named, |entry| Path::new("/dev").join(entry.file_name()))
}

/// A request can arrive through the port before the kernel learns that the host has connected. It
/// learns that within this time.
const THERE_MAX: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(20);

/// Why sending an answer ended early.
#[derive(Debug)]
pub enum Broken {
    /// The agent has disconnected.
    Disconnected,
    /// The agent has sent a new request.
    NewRequest(Query),
    /// It took too long.
    Late,
    /// The port can't be used any more.
    Failed(io::Error),
}

impl From<Errno> for Broken {
    fn from(errno: Errno) -> Self {
        Self::Failed(errno.into())
    }
}

/// A port that is open.
#[derive(Debug)]
pub struct Port {
    port: OwnedFd,
    epoll: OwnedFd,
    finder: QueryFinder,
    room: Vec<u8>,
}

/// The result of a read.
enum Received {
    Query(Query),
    Nothing,
    End,
}

impl Port {
    /// Opens it.
    ///
    /// # Errors
    /// If it doesn't exist, or another process has it open.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        Self::of(openat(CWD, path, flags, Mode::empty())?)
    }

    /// Uses a port that is open already, in non-blocking mode.
    ///
    /// # Errors
    /// If it can't be polled.
    pub fn of(port: OwnedFd) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        epoll::add(&epoll, &port, epoll::EventData::new_u64(0), flags)?;
        Ok(Self { port, epoll, finder: QueryFinder::default(), room: vec![0; 4096] })
    }

    /// Waits for a request, for as long as that takes. None if the other end will never come back,
    /// which only happens if this is not a virtio port.
    ///
    /// # Errors
    /// If the port can't be used any more.
    pub fn wait(&mut self) -> io::Result<Option<Query>> {
        loop {
            // Read first: data that arrived before the wait triggers no event.
            match self.receive()? {
                Received::Query(query) => return Ok(Some(query)),
                // Part of a request was from an agent that has disconnected.
                Received::End => self.finder = QueryFinder::default(),
                Received::Nothing => {}
            }
            let mut event = [epoll::Event {
                flags: epoll::EventFlags::empty(),
                data: epoll::EventData::new_u64(0),
            }];
            let told = match epoll::wait(&self.epoll, &mut event, None) {
                Ok(events) => events,
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            };
            let [event] = event;
            let flags = event.flags;
            if told > 0 && flags.contains(epoll::EventFlags::RDHUP) {
                return match self.receive()? {
                    Received::Query(query) => Ok(Some(query)),
                    Received::Nothing | Received::End => Ok(None),
                };
            }
        }
    }

    /// Waits until the kernel has learned that the host has connected. An agent that has
    /// disconnected is waited for only a moment.
    ///
    /// # Errors
    /// If a new request arrives, or the port can't be used any more.
    pub fn meet(&mut self) -> Result<(), Broken> {
        let until = Instant::now() + THERE_MAX;
        loop {
            let mut polled = [PollFd::new(&self.port, PollFlags::IN | PollFlags::OUT)];
            poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
            let [polled] = polled;
            if !polled.revents().intersects(PollFlags::HUP | PollFlags::ERR) {
                return Ok(());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Broken::Disconnected);
            }
            // A connection triggers no event here, so the port is polled again.
            let timeout = Timespec::try_from(left.min(LOOK)).ok();
            let mut event = [epoll::Event {
                flags: epoll::EventFlags::empty(),
                data: epoll::EventData::new_u64(0),
            }];
            match epoll::wait(&self.epoll, &mut event, timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            if let Received::Query(query) = self.receive().map_err(Broken::Failed)? {
                return Err(Broken::NewRequest(query));
            }
        }
    }

    /// Sends all bytes before `deadline`.
    ///
    /// # Errors
    /// As [`Broken`] says.
    pub fn send(&mut self, bytes: &[u8], deadline: Instant) -> Result<(), Broken> {
        let mut rest = bytes;
        while !rest.is_empty() {
            match rustix::io::write(&self.port, rest) {
                Ok(0) | Err(Errno::PIPE | Errno::CONNRESET) => return Err(Broken::Disconnected),
                Ok(sent) => rest = rest.get(sent..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(Broken::Late);
                    }
                    self.listen(PollFlags::OUT, left)?;
                }
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Does nothing for this time, and listens meanwhile: once at least, also for no time at all.
    ///
    /// # Errors
    /// If the agent disconnects, or a new request arrives.
    pub fn rest(&mut self, time: Duration) -> Result<(), Broken> {
        let until = Instant::now() + time;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            self.listen(PollFlags::empty(), left)?;
            if left.is_zero() {
                return Ok(());
            }
        }
    }

    /// Waits for `flags` or for a request, but no longer than `time`.
    fn listen(&mut self, flags: PollFlags, time: Duration) -> Result<(), Broken> {
        let timeout = Timespec::try_from(time).ok();
        let mut polled = [PollFd::new(&self.port, flags | PollFlags::IN)];
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let [polled] = polled;
        let told = polled.revents();
        if told.contains(PollFlags::IN) {
            return match self.receive().map_err(Broken::Failed)? {
                Received::Query(query) => Err(Broken::NewRequest(query)),
                Received::End => Err(Broken::Disconnected),
                Received::Nothing => Ok(()),
            };
        }
        if told.intersects(PollFlags::HUP | PollFlags::ERR) {
            // Perhaps only the previous connection has ended, which the kernel learns late.
            return self.meet();
        }
        Ok(())
    }

    /// Reads everything available. The last request counts.
    fn receive(&mut self) -> io::Result<Received> {
        let mut received = Received::Nothing;
        loop {
            match rustix::io::read(&self.port, &mut self.room[..]) {
                Ok(0) | Err(Errno::CONNRESET) => {
                    return Ok(match received {
                        Received::Query(query) => Received::Query(query),
                        Received::Nothing | Received::End => Received::End,
                    });
                }
                Ok(length) => {
                    let bytes = self.room.get(..length).unwrap_or_default();
                    if let Some(query) = self.finder.take(bytes) {
                        received = Received::Query(query);
                    }
                }
                Err(Errno::AGAIN) => return Ok(received),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}
