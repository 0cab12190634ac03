//! The virtio-serial port.
//!
//! While nobody has the host's end open, a read gives an end of file at once and a
//! poll says that the other end has hung up, again and again. Told of changes only
//! (edge-triggered), a thread sleeps until something happens: the driver wakes its
//! pollers when the host connects, and when it sends something.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cachemap::{Ask, AskFinder, PORT_NAME};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;

/// Where udev names ports.
const NAMED: &str = "/dev/virtio-ports";
/// Where the kernel does.
const LISTED: &str = "/sys/class/virtio-ports";

/// The usual port, also in a system without udev.
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

/// What somebody says can come out of the port before the kernel has heard that he
/// is there. That comes within this.
const THERE_MAX: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(20);

/// Why an answer is not sent on.
#[derive(Debug)]
pub enum Broken {
    /// Whoever asked has gone.
    Gone,
    /// Somebody asked anew.
    Asked(Ask),
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
    finder: AskFinder,
    room: Vec<u8>,
}

/// What a read gave.
enum Heard {
    Ask(Ask),
    Nothing,
    End,
}

impl Port {
    /// Opens it.
    ///
    /// # Errors
    /// If it isn't there, or somebody else has it open.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        Self::of(openat(CWD, path, flags, Mode::empty())?)
    }

    /// One that is open already, and doesn't block.
    ///
    /// # Errors
    /// If it can't be waited for.
    pub fn of(port: OwnedFd) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        epoll::add(&epoll, &port, epoll::EventData::new_u64(0), flags)?;
        Ok(Self { port, epoll, finder: AskFinder::default(), room: vec![0; 4096] })
    }

    /// Waits for somebody to ask, for as long as that takes. None if the other end
    /// will never come back, which only happens where this is no virtio port.
    ///
    /// # Errors
    /// If the port can't be used any more.
    pub fn wait(&mut self) -> io::Result<Option<Ask>> {
        loop {
            // First: what came before this began to wait wakes nobody.
            match self.hear()? {
                Heard::Ask(ask) => return Ok(Some(ask)),
                // Half an ask was of somebody who has gone.
                Heard::End => self.finder = AskFinder::default(),
                Heard::Nothing => {}
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
                return match self.hear()? {
                    Heard::Ask(ask) => Ok(Some(ask)),
                    Heard::Nothing | Heard::End => Ok(None),
                };
            }
        }
    }

    /// Waits until the kernel has heard that somebody is at the other end. One who
    /// has gone is not waited for longer than a moment.
    ///
    /// # Errors
    /// If somebody asks anew, or the port can't be used any more.
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
                return Err(Broken::Gone);
            }
            // That somebody is there wakes nobody: it is looked again.
            let timeout = Timespec::try_from(left.min(LOOK)).ok();
            let mut event = [epoll::Event {
                flags: epoll::EventFlags::empty(),
                data: epoll::EventData::new_u64(0),
            }];
            match epoll::wait(&self.epoll, &mut event, timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            if let Heard::Ask(ask) = self.hear().map_err(Broken::Failed)? {
                return Err(Broken::Asked(ask));
            }
        }
    }

    /// Sends all of it, until `deadline`.
    ///
    /// # Errors
    /// As [`Broken`] says.
    pub fn send(&mut self, bytes: &[u8], deadline: Instant) -> Result<(), Broken> {
        let mut rest = bytes;
        while !rest.is_empty() {
            match rustix::io::write(&self.port, rest) {
                Ok(0) | Err(Errno::PIPE | Errno::CONNRESET) => return Err(Broken::Gone),
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

    /// Does nothing for that long.
    ///
    /// # Errors
    /// If whoever asked has gone, or somebody asks anew.
    pub fn rest(&mut self, time: Duration) -> Result<(), Broken> {
        let until = Instant::now() + time;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            self.listen(PollFlags::empty(), left)?;
        }
    }

    /// Waits for `flags` or for somebody to speak, but no longer than `time`.
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
            return match self.hear().map_err(Broken::Failed)? {
                Heard::Ask(ask) => Err(Broken::Asked(ask)),
                Heard::End => Err(Broken::Gone),
                Heard::Nothing => Ok(()),
            };
        }
        if told.intersects(PollFlags::HUP | PollFlags::ERR) {
            // Perhaps only the one before has, of whom the kernel hears late.
            return self.meet();
        }
        Ok(())
    }

    /// Reads all that is there. The last ask counts.
    fn hear(&mut self) -> io::Result<Heard> {
        let mut heard = Heard::Nothing;
        loop {
            match rustix::io::read(&self.port, &mut self.room[..]) {
                Ok(0) | Err(Errno::CONNRESET) => {
                    return Ok(match heard {
                        Heard::Ask(ask) => Heard::Ask(ask),
                        Heard::Nothing | Heard::End => Heard::End,
                    });
                }
                Ok(length) => {
                    let bytes = self.room.get(..length).unwrap_or_default();
                    if let Some(ask) = self.finder.take(bytes) {
                        heard = Heard::Ask(ask);
                    }
                }
                Err(Errno::AGAIN) => return Ok(heard),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}
