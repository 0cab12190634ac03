//! A connection that is passed on as it is, both ways: a disk server's, or a stream that
//! can't be split. What one end closes is closed at the other.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use api::{Phase, Report};
use crossbeam_channel::{Receiver, bounded, select, tick};
use parking_lot::Mutex;
use stream::return_path::Follower;
use wire::{Frame, ToDestination, ToSource};

use super::agents::Agents;
use super::by_lanes::{ByLanes, Content, Sending};
use super::setup::Reason;
use super::{CarryRequest, outcome};
use crate::error::MigrationError;
use crate::link::{Heard, Link};
use crate::report_builder::ReportBuilder;
use crate::source::context::{local as local_error, no_thread};
use crate::watch::Watch;

const READ_BYTES: usize = 256 << 10;
/// Lanes that fail while nobody says anything are noticed by then.
const LANES_EVERY: Duration = Duration::from_secs(1);

/// A connection that is passed on.
pub struct Relay {
    pub(super) agents: Agents,
    pub(super) socket: UnixStream,
    /// What was read of it already.
    pub(super) before: Vec<u8>,
    /// What came back already.
    pub(super) back: Vec<u8>,
}

/// What a relay has passed on, while it does.
#[derive(Debug, Default)]
pub(super) struct Passed {
    /// Towards the destination.
    pub(super) bytes: AtomicU64,
    /// What came back, read as a QEMU's answers.
    pub(super) answers: Mutex<Follower>,
}

impl Relay {
    /// Passes it on until both ends have closed, or one breaks off, or somebody cancels.
    ///
    /// # Errors
    /// If it breaks off. Both ends are closed in any case.
    pub(super) fn run_watched(
        self,
        content: Content,
        passed: &Arc<Passed>,
        report_builder: &Arc<ReportBuilder>,
    ) -> Result<(), MigrationError> {
        let Self { agents, socket, before, back } = self;
        let by_lanes = ByLanes::start(&agents, content, report_builder)?;
        let failed = |error| local_error("passing a connection on", error);
        let (tell, ended) = bounded(1);
        let forth = data_threads::spawn(format!("relay-{}", agents.id), {
            let socket = socket.try_clone().map_err(failed)?;
            let link = Arc::clone(&agents.link);
            let sending = by_lanes.as_ref().map(ByLanes::sending);
            let passed = Arc::clone(passed);
            move || {
                let said = match sending {
                    Some(sending) => pass_by_lanes(sending, &socket, &link, &before, &passed),
                    None => pass(&socket, &link, &before, &passed),
                };
                let _ = tell.send(said);
            }
        })
        .map_err(no_thread)?;
        let mut following = Following {
            agents: &agents,
            socket: &socket,
            by_lanes: by_lanes.as_ref(),
            passed,
            report_builder,
        };
        let outcome = (&socket).write_all(&back).map_err(failed);
        let outcome = outcome.and_then(|()| following.follow(&ended));
        // Whatever it was, nothing of it stays open. What was said to the end may still be
        // on its way.
        if outcome.is_ok() {
            let _ = socket.shutdown(Shutdown::Both);
        } else {
            tap::abort(&socket);
        }
        agents.link.close();
        if let Some(by_lanes) = &by_lanes {
            by_lanes.shut();
        }
        let _ = forth.join();
        report_builder.tell(|report| {
            report.residue_bytes = passed.bytes.load(Relaxed);
            report.wire_bytes = agents.link.wire_bytes();
        });
        if let Some(by_lanes) = by_lanes {
            by_lanes.end(report_builder);
        }
        outcome
    }

    /// Passes on a disk's until it is over, which those who watch it see.
    #[must_use]
    pub fn carry(self, request: &CarryRequest, watch: &Arc<Watch>) -> Report {
        let report_builder = Arc::new(ReportBuilder::new(Arc::clone(watch), request.downtime_ms));
        report_builder.note("carried for whoever copies this disk");
        report_builder.enter(Phase::FirstPass);
        report_builder.tell(|report| report.tap = "disk".to_owned());
        let ended = self.run_watched(Content::Disk, &Arc::default(), &report_builder);
        report_builder.end(outcome(ended))
    }
}

/// Passes a stream on as it is.
pub(super) fn relayed(
    relay: Relay,
    why: Option<Reason>,
    report_builder: &Arc<ReportBuilder>,
) -> Result<(), MigrationError> {
    // What is encrypted says nothing of how it ends.
    let is_answered = why.as_ref().is_some_and(|why| why.is_answered);
    let why = why.map_or_else(|| "it is encrypted, or none of QEMU's".to_owned(), |why| why.text);
    report_builder.note(format!(
        "the stream is passed through as it is, and the VM is never throttled: {why}"
    ));
    report_builder.enter(Phase::FirstPass);
    report_builder.tell(|report| report.tap = "relayed".to_owned());
    let passed = Arc::<Passed>::default();
    let ended = relay.run_watched(Content::Stream, &passed, report_builder);
    let is_loaded = passed.answers.lock().shut() == Some(0);
    match ended {
        // Who is first to close after the last word is no matter.
        Err(error) if !is_loaded || matches!(error, MigrationError::Cancelled) => Err(error),
        Ok(()) if is_answered && !is_loaded => Err(MigrationError::Qemu(
            "both QEMUs closed before the destination's had loaded the VM".to_owned(),
        )),
        _ => Ok(()),
    }
}

/// Of a connection that is passed on, what hears the destination.
struct Following<'r> {
    agents: &'r Agents,
    socket: &'r UnixStream,
    by_lanes: Option<&'r ByLanes>,
    passed: &'r Passed,
    report_builder: &'r ReportBuilder,
}

impl Following<'_> {
    /// Passes on what comes back. `ended` tells when the local connection has ended.
    fn follow(&mut self, ended: &Receiver<Result<(), String>>) -> Result<(), MigrationError> {
        let (mut said_all, mut heard_all) = (false, false);
        let never = crossbeam_channel::never();
        let lanes = self.by_lanes.map_or_else(crossbeam_channel::never, |_| tick(LANES_EVERY));
        let watch = self.report_builder.watch();
        while !(said_all && heard_all) {
            let ended = if said_all { &never } else { ended };
            select! {
                recv(self.agents.hear) -> heard => match heard {
                    Ok(Heard::Gone(_)) if heard_all => return Ok(()),
                    Ok(Heard::Gone(error)) => return Err(self.agents.lost(error.to_string())),
                    Ok(heard) => heard_all |= self.hear(heard)?,
                    Err(_) => {
                        return Err(self.agents.lost("the connection has ended".to_owned()));
                    }
                },
                recv(ended) -> end => {
                    let end = end.unwrap_or_else(|_| Err("a fault in the agent".to_owned()));
                    end.map_err(|why| self.agents.lost(why))?;
                    said_all = true;
                }
                recv(lanes) -> _ => self.look_at_lanes()?,
                recv(watch.cancelled()) -> _ => return Err(MigrationError::Cancelled),
                recv(watch.rebound()) -> _ => self.rebind()?,
            }
        }
        Ok(())
    }

    /// Whether it was the last thing that comes back.
    fn hear(&mut self, heard: Heard<ToSource>) -> Result<bool, MigrationError> {
        match heard {
            Heard::Back(bytes) if bytes.is_empty() => {
                // It may be closed already.
                let _ = self.socket.shutdown(Shutdown::Write);
                return Ok(true);
            }
            Heard::Back(bytes) => {
                let written = (&mut &*self.socket).write_all(&bytes);
                written.map_err(|error| local_error("passing on what came back", error))?;
                self.passed.answers.lock().push(&bytes);
            }
            Heard::Message(ToSource::Refused { reason }) => {
                let reason = switchover::Reason::new(reason).into();
                let host = self.agents.peer.name.clone();
                return Err(MigrationError::DestinationFailed { host, reason });
            }
            Heard::Message(ToSource::Note { text }) => self.report_builder.note(text),
            Heard::Message(ToSource::NicUse(used)) => {
                if let Some(by_lanes) = self.by_lanes {
                    by_lanes.hear(used);
                }
            }
            _ => return Err(self.agents.lost("it sent a message out of turn".to_owned())),
        }
        Ok(false)
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

/// Passes on the local connection by lanes, to its end.
fn pass_by_lanes(
    mut sending: Sending,
    socket: &UnixStream,
    link: &Link<ToDestination>,
    before: &[u8],
    passed: &Passed,
) -> Result<(), String> {
    sending.send(before)?;
    let bytes = sending.send_all(socket, passed)?;
    link.say(&ToDestination::RelayEnds { bytes }).map_err(|error| error.to_string())
}

/// The same by the control connection.
fn pass(
    mut socket: &UnixStream,
    link: &Link<ToDestination>,
    before: &[u8],
    passed: &Passed,
) -> Result<(), String> {
    let gone = |error: crate::error::LinkError| error.to_string();
    let forward = |bytes: &[u8]| {
        passed.bytes.fetch_add(bytes.len() as u64, Relaxed);
        link.residue(true, bytes).map_err(gone)
    };
    forward(before)?;
    let mut buffer = vec![0; READ_BYTES];
    loop {
        match socket.read(&mut buffer) {
            Ok(0) => return link.frame(&Frame::Whole(Vec::new())).map_err(gone),
            Ok(count) => forward(&buffer[..count])?,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(format!("the connection here broke off: {error}")),
        }
    }
}
