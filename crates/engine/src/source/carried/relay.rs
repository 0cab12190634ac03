//! A connection that is passed on unchanged, both ways: a disk server's, or a stream that
//! can't be split. When one end closes, the other end is closed; a multifd channel only once
//! QEMU has closed it (see `caller`).

use std::io::Read;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use api::{Phase, Report};
use crossbeam_channel::{Receiver, at, bounded, never, select, tick};
use page::Buffer;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use wire::{Frame, ToDestination, ToSource};

use super::agents::Agents;
use super::by_lanes::{ByLanes, Content, Sending};
use super::caller::{CLOSED_MAX, drain};
use super::outcome;
use super::passed::Passed;
use super::request::CarryRequest;
use super::setup::Reason;
use crate::caught::caught;
use crate::error::MigrationError;
use crate::link::{Link, Received};
use crate::report_builder::ReportBuilder;
use crate::source::context::{local as local_error, no_thread};
use crate::watch::Watch;

const READ_BYTES: usize = 256 << 10;
/// Interval at which failed lanes of an idle connection are noticed.
const LANES_EVERY: Duration = Duration::from_secs(1);
/// Interval at which a cancel is noticed while the local connection's other end reads
/// nothing.
const UNREAD_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// Time for a migration that has lost one of its other connections until it is ended: at the end of
/// one that succeeds, QEMU closes them before it reports that the VM is loaded.
const LOST_MAX: Duration = Duration::from_secs(5);
/// The beginning of a TLS handshake.
const TLS_BEGINS: [u8; 2] = [0x16, 3];

/// Receives how the local connection ended.
type Ended = Receiver<Result<(), String>>;

/// A connection that is passed on.
pub struct Relay {
    pub(super) agents: Agents,
    pub(super) socket: UnixStream,
    /// Bytes already read from it.
    pub(super) before: Vec<u8>,
    /// Bytes already returned by the destination.
    pub(super) back: Vec<u8>,
    /// Whether it is a multifd channel of QEMU's.
    pub(super) is_channel: bool,
}

impl Relay {
    /// Notes that it is another connection of a migration. One that is encrypted may be a
    /// multifd channel.
    pub(super) fn mark_secondary(&mut self) {
        self.is_channel |= self.before.starts_with(&TLS_BEGINS);
    }

    /// Relays until both ends have closed, one breaks, or the operator cancels.
    ///
    /// # Errors
    /// If the connection breaks. Both ends are closed in any case.
    pub(super) fn run_watched(
        self,
        content: Content,
        passed: &Arc<Passed>,
        report_builder: &Arc<ReportBuilder>,
    ) -> Result<(), MigrationError> {
        let Self { agents, socket, before, back, is_channel } = self;
        let (mut by_lanes, mut forth) = (None, None);
        // In any case all of it is closed below, also if it can't begin.
        let outcome = caught(|| {
            by_lanes = ByLanes::start(&agents, content, report_builder)?;
            let sending = by_lanes.as_ref().map(ByLanes::sending);
            let (thread, ended) = start(&agents, &socket, before, sending, passed)?;
            forth = Some(thread);
            let mut following = Following {
                agents: &agents,
                socket: &socket,
                by_lanes: by_lanes.as_ref(),
                passed,
                report_builder,
            };
            following.write(&back)?;
            following.follow(&ended)
        });
        if !matches!(outcome.returned(), Some(Ok(()))) && !is_channel {
            tap::abort(&socket);
        }
        if let Some(Err(error)) = outcome.returned() {
            // At once: below it may take QEMU long to close a channel.
            report_builder.watch().fails(&error.to_string());
        }
        agents.link.close();
        if let Some(by_lanes) = &by_lanes {
            by_lanes.shut();
        }
        if is_channel {
            // QEMU may wait for ever if it loses a channel before its main connection.
            drain(vec![&socket]);
        }
        // The last bytes before an orderly end may still be in flight.
        let _ = socket.shutdown(Shutdown::Both);
        if let Some(forth) = forth {
            let _ = forth.join();
        }
        let control_bytes = agents.link.wire_bytes();
        report_builder.update(|report| {
            report.residue_bytes = passed.bytes.load(Relaxed);
            report.wire_bytes = control_bytes;
        });
        if let Some(by_lanes) = by_lanes {
            by_lanes.end(control_bytes, report_builder);
        }
        outcome.or_go_on()
    }

    /// Relays a disk's connection until it has ended; `watch` shows its progress.
    #[must_use]
    pub fn carry(self, request: &CarryRequest, watch: &Arc<Watch>) -> Report {
        let report_builder = Arc::new(ReportBuilder::new(Arc::clone(watch), request.downtime_ms));
        report_builder.note("carried for the program that copies this disk");
        report_builder.enter(Phase::FirstPass);
        report_builder.update(|report| report.tap = "disk".to_owned());
        let ended = self.run_watched(Content::Disk, &Arc::default(), &report_builder);
        report_builder.end(outcome(ended))
    }
}

/// Relays a stream unchanged.
pub(super) fn relayed(
    relay: Relay,
    why: Option<Reason>,
    report_builder: &Arc<ReportBuilder>,
) -> Result<(), MigrationError> {
    let resumes = why.as_ref().is_some_and(|why| why.resumes);
    // An encrypted stream doesn't reveal how it ends.
    let is_answered = resumes || why.as_ref().is_some_and(|why| why.is_answered);
    let why =
        why.map_or_else(|| "it is encrypted, or not a stream of QEMU".to_owned(), |why| why.text);
    report_builder
        .note(format!("the stream is relayed unchanged, and the VM is never throttled: {why}"));
    report_builder.enter(Phase::FirstPass);
    report_builder.update(|report| report.tap = "relayed".to_owned());
    let passed = if relay.is_channel {
        Passed::of_channel()
    } else if resumes {
        Passed::resumed(report_builder)
    } else if is_answered {
        Passed::answered(report_builder)
    } else {
        Passed::unanswered(report_builder)
    };
    let passed = Arc::new(passed);
    let ended = relay.run_watched(Content::Stream, &passed, report_builder);
    let ended = match ended {
        Ok(()) if is_answered && !passed.is_loaded() => Err(MigrationError::Qemu(
            "both QEMUs closed before the destination's had loaded the VM".to_owned(),
        )),
        ended => ended,
    };
    match ended {
        // It doesn't matter which end closes first after the last answer.
        _ if passed.is_loaded() => Ok(()),
        Err(error) if passed.is_committed() => {
            Err(MigrationError::InDoubt(format!("{error}; {}", passed.stands())))
        }
        ended => ended,
    }
}

/// The part of a relay that follows the destination.
struct Following<'r> {
    agents: &'r Agents,
    socket: &'r UnixStream,
    by_lanes: Option<&'r ByLanes>,
    passed: &'r Passed,
    report_builder: &'r ReportBuilder,
}

impl Following<'_> {
    /// Relays the returned bytes. `ended` reports the end of the local connection.
    fn follow(&mut self, ended: &Ended) -> Result<(), MigrationError> {
        let (mut said_all, mut received_all) = (false, false);
        let nothing = never();
        let mut closed_until = None;
        // Why another connection failed, and until when the migration may end in spite of that.
        let (mut lost, mut lost_until) = (None, None);
        let lanes = self.by_lanes.map_or_else(never, |_| tick(LANES_EVERY));
        let watch = self.report_builder.watch();
        while !(said_all && received_all) {
            let ended = if said_all { &nothing } else { ended };
            let late = closed_until.map_or_else(never, at);
            let given_up = lost_until.map_or_else(never, at);
            select! {
                recv(self.agents.inbox) -> received => match received {
                    Ok(Received::Disconnected(_)) if received_all => return Ok(()),
                    Ok(received) => if self.receive(received)? {
                        received_all = true;
                        if self.passed.is_loaded() {
                            closed_until = Some(Instant::now() + CLOSED_MAX);
                        }
                    },
                    Err(_) => {
                        return Err(self.agents.lost("the connection has ended"));
                    }
                },
                recv(ended) -> end => {
                    let end = end.unwrap_or_else(|_| Err("a fault in the agent".to_owned()));
                    end.map_err(|why| self.agents.lost(why))?;
                    said_all = true;
                }
                recv(lanes) -> _ => self.look_at_lanes()?,
                // A QEMU that hangs, and whose VM has moved, is not waited for.
                recv(late) -> _ => return Ok(()),
                recv(watch.cancelled()) -> _ => self.cancel()?,
                recv(watch.rebound()) -> _ => self.rebind()?,
                recv(watch.lost()) -> why => {
                    lost = lost.or(why.ok());
                    lost_until.get_or_insert_with(|| Instant::now() + LOST_MAX);
                }
                recv(given_up) -> _ => {
                    lost_until = None;
                    self.give_up(&lost.take().unwrap_or_default(), said_all)?;
                }
            }
        }
        Ok(())
    }

    /// Ends a migration that has lost another of its connections, if the VM can still stay here.
    /// The destination's QEMU may wait without end for what that one had, while the VM stands still
    /// here. A migration that QEMU here has closed is left to its end.
    fn give_up(&self, lost: &str, said_all: bool) -> Result<(), MigrationError> {
        let why = format!("another of its connections failed: {lost}");
        if self.passed.may_end() && !said_all {
            return Err(MigrationError::Connections(why));
        }
        self.report_builder.note(why);
        Ok(())
    }

    /// Handles a message; returns whether it was the last.
    fn receive(&mut self, received: Received<ToSource>) -> Result<bool, MigrationError> {
        match received {
            Received::Back(bytes) if bytes.is_empty() => {
                // It may be closed already.
                let _ = self.socket.shutdown(Shutdown::Write);
                return Ok(true);
            }
            Received::Back(bytes) => {
                self.write(&bytes)?;
                self.passed.back(&bytes);
            }
            Received::Message(ToSource::Note { text }) => self.report_builder.note(text),
            Received::Message(ToSource::NicUse(used)) => {
                if let Some(by_lanes) = self.by_lanes {
                    by_lanes.receive(used);
                }
            }
            other => return Err(self.agents.ended(other)),
        }
        Ok(false)
    }

    /// Handles the operator's cancel, which comes too late for a VM that can't stay here.
    fn cancel(&self) -> Result<(), MigrationError> {
        let is_too_late =
            !self.passed.may_cancel(self.socket) && !self.report_builder.watch().is_broken_off();
        if is_too_late { Ok(()) } else { Err(MigrationError::Cancelled) }
    }

    /// Writes to the local connection, whose other end may read slowly, or not at all.
    fn write(&self, bytes: &[u8]) -> Result<(), MigrationError> {
        let cancelled = self.report_builder.watch().cancelled();
        write_unless(self.socket, bytes, || match cancelled.try_recv() {
            Ok(()) => self.cancel(),
            Err(_) => self.look_at_lanes(),
        })
    }

    fn look_at_lanes(&self) -> Result<(), MigrationError> {
        match self.by_lanes.and_then(ByLanes::failure) {
            Some(why) => Err(self.agents.lost(why)),
            None => Ok(()),
        }
    }

    fn rebind(&self) -> Result<(), MigrationError> {
        match self.by_lanes {
            Some(by_lanes) => by_lanes.rebind(self.agents, self.report_builder),
            None => Ok(()),
        }
    }
}

/// Writes all bytes, unless `look` fails, which is called again and again while the other
/// end reads nothing.
fn write_unless(
    socket: &UnixStream,
    mut bytes: &[u8],
    look: impl Fn() -> Result<(), MigrationError>,
) -> Result<(), MigrationError> {
    let failed = |error: Errno| local_error("relaying data from the destination", error.into());
    while !bytes.is_empty() {
        match send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                let mut polled = [PollFd::new(socket, PollFlags::OUT)];
                match poll(&mut polled, Some(&UNREAD_EVERY)) {
                    Ok(0) | Err(Errno::INTR) => look()?,
                    Ok(_) => {}
                    Err(error) => return Err(failed(error)),
                }
            }
            Err(error) => return Err(failed(error)),
        }
    }
    Ok(())
}

/// Starts the thread that relays the local connection, and reports how that ended.
fn start(
    agents: &Agents,
    socket: &UnixStream,
    before: Vec<u8>,
    sending: Option<Sending>,
    passed: &Arc<Passed>,
) -> Result<(JoinHandle<()>, Ended), MigrationError> {
    let socket = socket.try_clone();
    let socket = socket.map_err(|error| local_error("relaying a connection", error))?;
    let (link, passed) = (Arc::clone(&agents.link), Arc::clone(passed));
    let (tell, ended) = bounded(1);
    let thread = data_threads::spawn(format!("relay-{}", agents.id), move || {
        let said = match sending {
            Some(sending) => pass_by_lanes(sending, &socket, &link, &before, &passed),
            None => pass(&socket, &link, &before, &passed),
        };
        let _ = tell.send(said);
    });
    Ok((thread.map_err(no_thread)?, ended))
}

/// Relays the local connection on lanes, to its end.
fn pass_by_lanes(
    mut sending: Sending,
    socket: &UnixStream,
    link: &Link<ToDestination>,
    before: &[u8],
    passed: &Passed,
) -> Result<(), String> {
    passed.forth(before);
    sending.send(before)?;
    let bytes = sending.send_all(socket, passed)?;
    link.send(&ToDestination::RelayEnds { bytes }).map_err(|error| error.to_string())
}

/// The same on the control connection.
fn pass(
    mut socket: &UnixStream,
    link: &Link<ToDestination>,
    before: &[u8],
    passed: &Passed,
) -> Result<(), String> {
    let gone = |error: crate::error::LinkError| error.to_string();
    let forward = |bytes: &[u8]| {
        passed.forth(bytes);
        passed.bytes.fetch_add(bytes.len() as u64, Relaxed);
        link.non_ram(true, bytes).map_err(gone)
    };
    forward(before)?;
    let mut buffer = Buffer::new(READ_BYTES);
    loop {
        match socket.read(&mut buffer) {
            Ok(0) => {
                passed.closed();
                return link.frame(&Frame::Whole(Vec::new())).map_err(gone);
            }
            Ok(count) => forward(&buffer[..count])?,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(format!("the connection here broke: {error}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_client_that_does_not_read_can_be_given_up() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let cancelled = || Err(MigrationError::Cancelled);
        let ended = write_unless(&ours, &vec![0; 8 << 20], cancelled);
        assert!(matches!(ended, Err(MigrationError::Cancelled)), "{ended:?}");
    }

    #[test]
    fn a_client_that_reads_late_gets_everything() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let bytes: Vec<u8> = (0..8_u32 << 20).map(|at| at.to_le_bytes()[1]).collect();
        let (tell, told) = bounded(1);
        let reader = thread::spawn({
            let mut read = vec![0; bytes.len()];
            move || {
                told.recv().unwrap();
                theirs.read_exact(&mut read).unwrap();
                read
            }
        });
        let look = || {
            let _ = tell.try_send(());
            Ok(())
        };
        write_unless(&ours, &bytes, look).unwrap();
        assert!(reader.join().unwrap() == bytes);
    }
}
