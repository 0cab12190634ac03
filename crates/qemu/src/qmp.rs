//! A blocking QMP client: one connection, any number of callers.
//!
//! A reader thread owns the receiving half. It passes each answer to the caller
//! that waits for its id, and events to subscribers. Callers share the sending
//! half. When the connection ends, all waiting callers return at once.

mod error;
mod event;
mod line;
#[cfg(test)]
pub(crate) mod played;
mod query;
mod reader;
mod receiving;

use std::io::{self, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};
use parking_lot::Mutex;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};

use crate::socket;

pub use error::QmpError;
pub use event::Event;
pub use query::{MemoryBackend, RunState};
pub(crate) use query::{list, odd};

use line::Lines;
use reader::Shared;
use receiving::Receiving;

/// How long a short command may take.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(10);

/// Where QEMU runs a command.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Band {
    /// In its main loop, after those before it.
    In,
    /// At once, in its monitor thread.
    Out,
}

impl Band {
    fn verb(self) -> &'static str {
        match self {
            Self::In => "execute",
            Self::Out => "exec-oob",
        }
    }
}

/// A connection to one QEMU.
pub struct Qmp {
    writer: Mutex<UnixStream>,
    shared: Arc<Shared>,
    reader: Option<JoinHandle<()>>,
    next_id: AtomicU64,
    version: (u32, u32, u32),
    out_of_band: bool,
    peer_pid: Option<u32>,
}

impl std::fmt::Debug for Qmp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Qmp").field("version", &self.version).finish_non_exhaustive()
    }
}

impl Qmp {
    /// Connects, greets and agrees on out-of-band commands where QEMU has them.
    ///
    /// # Errors
    /// If no server listens, if it is not QEMU or serves another client already
    /// (QEMU serves one client at a time), or if one of the steps takes longer
    /// than `timeout`.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Arc<Self>, QmpError> {
        Self::greeted(path, Self::reach(path, timeout)?, timeout)
    }

    /// The first step of [`Qmp::connect`]: a connection on which QEMU has not answered yet.
    pub(crate) fn reach(path: &Path, timeout: Duration) -> Result<UnixStream, QmpError> {
        socket::connect(path, timeout).map_err(|source| match source.kind() {
            io::ErrorKind::TimedOut => QmpError::NoGreeting { path: path.to_owned() },
            _ => QmpError::Connect { path: path.to_owned(), source },
        })
    }

    /// The other steps of [`Qmp::connect`]. They end when the connection is shut down.
    pub(crate) fn greeted(
        path: &Path,
        stream: UnixStream,
        timeout: Duration,
    ) -> Result<Arc<Self>, QmpError> {
        let connect = |source| QmpError::Connect { path: path.to_owned(), source };
        stream.set_write_timeout(Some(TIMEOUT)).map_err(connect)?;
        let peer_pid = rustix::net::sockopt::socket_peercred(stream.as_fd())
            .ok()
            .and_then(|credentials| u32::try_from(credentials.pid.as_raw_nonzero().get()).ok());
        let receiving = stream.try_clone().map_err(connect)?;
        let mut lines = Lines::new(Receiving::until(receiving, Instant::now() + timeout));

        let greeting = loop {
            match lines.next_value() {
                Err(QmpError::Timeout { .. }) => {
                    return Err(QmpError::NoGreeting { path: path.to_owned() });
                }
                // QEMU's main loop sends events to a monitor whose own thread has accepted a
                // connection, but not greeted it yet.
                Ok(value) if value.get("event").is_some() => {}
                other => break other?,
            }
        };
        let version = greeted_version(&greeting)?;
        let out_of_band = greeting["QMP"]["capabilities"]
            .as_array()
            .is_some_and(|offered| offered.iter().any(|one| one == "oob"));

        lines.source().without_end().map_err(connect)?;
        let shared = Arc::new(Shared::default());
        let name = thread_name(path);
        let reader = std::thread::Builder::new()
            .name(name)
            .spawn({
                let shared = Arc::clone(&shared);
                move || reader::run(lines, &shared)
            })
            .map_err(connect)?;
        let qmp = Self {
            writer: Mutex::new(stream),
            shared,
            reader: Some(reader),
            next_id: AtomicU64::new(1),
            version,
            out_of_band,
            peer_pid,
        };
        let enable = if out_of_band { json!({"enable": ["oob"]}) } else { json!({}) };
        qmp.execute_within("qmp_capabilities", enable, timeout)?;
        Ok(Arc::new(qmp))
    }

    /// Runs a short command, and waits for its answer.
    ///
    /// # Errors
    /// If QEMU refuses it, doesn't answer within 10 s, or has exited.
    pub fn execute(&self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        self.execute_within(command, arguments, TIMEOUT)
    }

    /// Runs a command and waits at most `timeout` for its answer.
    ///
    /// # Errors
    /// If QEMU refuses it, doesn't answer in time, or has exited. After a timeout
    /// the command may still take effect.
    pub fn execute_within(
        &self,
        command: &str,
        arguments: Value,
        timeout: Duration,
    ) -> Result<Value, QmpError> {
        self.call(Band::In, command, arguments, timeout, None)
    }

    /// Runs a command that takes an open file, such as `add-fd` or `getfd`.
    ///
    /// # Errors
    /// As [`Qmp::execute`].
    pub fn execute_with(
        &self,
        file: BorrowedFd<'_>,
        command: &str,
        arguments: Value,
    ) -> Result<Value, QmpError> {
        self.call(Band::In, command, arguments, TIMEOUT, Some(file))
    }

    /// Runs a command that QEMU executes even while its main loop is blocked
    /// (such as `yank` and `migrate-pause`).
    ///
    /// # Errors
    /// As [`Qmp::execute`], and if this QEMU has no out-of-band commands.
    pub fn execute_oob(&self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        if !self.out_of_band {
            return Err(QmpError::Refused {
                command: command.to_owned(),
                class: "CommandNotFound".to_owned(),
                desc: "this QEMU offers no out-of-band commands".to_owned(),
            });
        }
        self.call(Band::Out, command, arguments, TIMEOUT, None)
    }

    /// Every event from now on. The receiver disconnects when the connection
    /// ends, or when thousands of its events are left unread.
    #[must_use]
    pub fn events(&self) -> Receiver<Event> {
        self.shared.subscribe(None)
    }

    /// The events of these names from now on. Other events, which a guest can
    /// cause at will, can't overflow this receiver.
    #[must_use]
    pub fn events_named(&self, names: &'static [&'static str]) -> Receiver<Event> {
        self.shared.subscribe(Some(names))
    }

    /// Whether the connection ended: QEMU has exited, or has closed it.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.shared.is_closed()
    }

    /// QEMU's version, from its greeting.
    #[must_use]
    pub fn version(&self) -> (u32, u32, u32) {
        self.version
    }

    /// QEMU's version as text.
    #[must_use]
    pub fn version_text(&self) -> String {
        let (major, minor, micro) = self.version;
        format!("{major}.{minor}.{micro}")
    }

    /// The process that created the socket: QEMU, unless another program created
    /// it for QEMU.
    #[must_use]
    pub fn peer_pid(&self) -> Option<u32> {
        self.peer_pid
    }

    fn call(
        &self,
        band: Band,
        command: &str,
        arguments: Value,
        timeout: Duration,
        file: Option<BorrowedFd<'_>>,
    ) -> Result<Value, QmpError> {
        let timed_out = || QmpError::Timeout { command: command.to_owned(), waited: timeout };
        let deadline = Instant::now() + timeout;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let mut message = json!({ band.verb(): command, "id": id });
        if arguments.as_object().is_some_and(|members| !members.is_empty()) {
            message["arguments"] = arguments;
        }
        let mut text = message.to_string().into_bytes();
        text.push(b'\n');

        let (answer, answered) = bounded(1);
        if !self.shared.expect(id, band == Band::In, answer, timeout)? {
            tracing::debug!(command, "not sent: QEMU has not answered the previous commands");
            return Err(timed_out());
        }
        tracing::trace!(command, id, "to QEMU");
        let written = write(&mut self.writer.lock(), &text, file);
        if let Err(error) = written {
            // Part of the command may have been written: no other can follow it.
            tracing::debug!(command, %error, "QMP can't be written to");
            self.close();
            return Err(QmpError::Closed);
        }
        let outcome = match answered.recv_deadline(deadline) {
            Ok(outcome) => outcome,
            Err(RecvTimeoutError::Timeout) => {
                self.shared.forget(id);
                return Err(timed_out());
            }
            Err(RecvTimeoutError::Disconnected) => return Err(QmpError::Closed),
        };
        outcome.map_err(|refusal| QmpError::Refused {
            command: command.to_owned(),
            class: refusal.class,
            desc: refusal.desc,
        })
    }

    /// Ends the connection. What QEMU has sent until then is still read: only when it was do the
    /// receivers of its events disconnect.
    pub fn close(&self) {
        // A failure means that the connection is closed already.
        let _ = self.writer.lock().shutdown(std::net::Shutdown::Both);
    }
}

impl Drop for Qmp {
    fn drop(&mut self) {
        self.close();
        if let Some(reader) = self.reader.take()
            && reader.join().is_err()
        {
            tracing::error!("the QMP reader thread panicked");
        }
    }
}

/// Writes a command, and a file along with its first byte.
fn write(
    stream: &mut UnixStream,
    text: &[u8],
    file: Option<BorrowedFd<'_>>,
) -> std::io::Result<()> {
    let Some(file) = file else { return stream.write_all(text) };
    let files = [file];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&files));
    let pieces = [IoSlice::new(text)];
    let sent = sendmsg(&*stream, &pieces, &mut control, SendFlags::NOSIGNAL)?;
    stream.write_all(text.get(sent..).unwrap_or_default())
}

fn greeted_version(greeting: &Value) -> Result<(u32, u32, u32), QmpError> {
    let version = &greeting["QMP"]["version"]["qemu"];
    let part = |name: &str| version[name].as_u64().and_then(|value| u32::try_from(value).ok());
    match (part("major"), part("minor"), part("micro")) {
        (Some(major), Some(minor), Some(micro)) => Ok((major, minor, micro)),
        _ => Err(QmpError::Garbage("its greeting names no QEMU version".to_owned())),
    }
}

/// Linux keeps 15 bytes of a thread's name; the directory's name distinguishes VMs.
fn thread_name(path: &Path) -> String {
    let folder = path.parent().and_then(Path::file_name).unwrap_or_default();
    let short: String = folder.to_string_lossy().chars().take(11).collect();
    format!("qmp-{}", short.replace('\0', ""))
}

#[cfg(test)]
mod tests;
