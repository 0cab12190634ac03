//! A connection that is passed on as it is, both ways: a disk server's, or a stream that
//! can't be split. What one end closes is closed at the other.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use api::Phase;
use crossbeam_channel::{Receiver, bounded, select};
use parking_lot::Mutex;
use stream::return_path::Follower;
use wire::{Frame, ToDestination, ToSource};

use crate::error::MigrationError;
use crate::link::{Heard, Link};
use crate::report_builder::ReportBuilder;
use crate::source::context::{local as local_error, no_thread};

const READ_BYTES: usize = 256 << 10;

/// A connection that is passed on.
pub struct Relay {
    pub(super) id: String,
    pub(super) host: String,
    pub(super) socket: UnixStream,
    pub(super) link: Arc<Link<ToDestination>>,
    pub(super) hear: Receiver<Heard<ToSource>>,
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
    /// Passes it on until both ends have closed, or one breaks off, or `cancelled`.
    ///
    /// # Errors
    /// If it breaks off. Both ends are closed in any case.
    pub(super) fn run_until(
        self,
        passed: &Arc<Passed>,
        cancelled: &Receiver<()>,
    ) -> Result<(), MigrationError> {
        let Self { id, host, socket, link, hear, before, back } = self;
        let failed = |error| local_error("passing a connection on", error);
        let (tell, ended) = bounded(1);
        let forth = data_threads::spawn(format!("relay-{id}"), {
            let (socket, link) = (socket.try_clone().map_err(failed)?, Arc::clone(&link));
            let passed = Arc::clone(passed);
            move || {
                let _ = tell.send(pass(socket, &link, &before, &passed));
            }
        })
        .map_err(no_thread)?;
        let outcome = (&socket)
            .write_all(&back)
            .map_err(failed)
            .and_then(|()| follow(&socket, (&host, &hear, passed), &ended, cancelled));
        // Whatever it was, nothing of it stays open. What was said to the end may still be
        // on its way.
        if outcome.is_ok() {
            let _ = socket.shutdown(Shutdown::Both);
        } else {
            tap::abort(&socket);
        }
        link.close();
        let _ = forth.join();
        outcome
    }

    /// The same for one that nobody watches.
    ///
    /// # Errors
    /// If it breaks off.
    pub fn run(self) -> Result<(), MigrationError> {
        self.run_until(&Arc::default(), &crossbeam_channel::never())
    }
}

/// Passes a stream on as it is.
pub(super) fn relayed(
    relay: Relay,
    why: Option<String>,
    report_builder: &ReportBuilder,
) -> Result<(), MigrationError> {
    // What is encrypted says nothing of how it ends.
    let is_read = why.is_some();
    let why = why.unwrap_or_else(|| "it is encrypted, or none of QEMU's".to_owned());
    report_builder.note(format!(
        "the stream is passed through as it is, and the VM is never throttled: {why}"
    ));
    report_builder.enter(Phase::FirstPass);
    let passed = Arc::<Passed>::default();
    let ended = relay.run_until(&passed, report_builder.watch().cancelled());
    report_builder.tell(|report| {
        report.tap = "relayed".to_owned();
        report.residue_bytes = passed.bytes.load(Relaxed);
        report.wire_bytes = report.residue_bytes;
    });
    let is_loaded = passed.answers.lock().shut() == Some(0);
    match ended {
        // Who is first to close after the last word is no matter.
        Err(error) if !is_loaded || matches!(error, MigrationError::Cancelled) => Err(error),
        Ok(()) if is_read && !is_loaded => Err(MigrationError::Qemu(
            "both QEMUs closed before the destination's had loaded the VM".to_owned(),
        )),
        _ => Ok(()),
    }
}

/// Passes on what comes back.
fn follow(
    mut socket: &UnixStream,
    (host, hear, passed): (&str, &Receiver<Heard<ToSource>>, &Passed),
    ended: &Receiver<Result<(), String>>,
    cancelled: &Receiver<()>,
) -> Result<(), MigrationError> {
    let lost = |why: String| MigrationError::PeerLost { host: host.to_owned(), why };
    let (mut said_all, mut heard_all) = (false, false);
    let never = crossbeam_channel::never();
    while !(said_all && heard_all) {
        let ended = if said_all { &never } else { ended };
        select! {
            recv(hear) -> heard => match heard {
                Ok(Heard::Back(bytes)) if bytes.is_empty() => {
                    heard_all = true;
                    // It may be closed already.
                    let _ = socket.shutdown(Shutdown::Write);
                }
                Ok(Heard::Back(bytes)) => {
                    let written = socket.write_all(&bytes);
                    written.map_err(|error| local_error("passing on what came back", error))?;
                    passed.answers.lock().push(&bytes);
                }
                Ok(Heard::Message(ToSource::Refused { reason })) => {
                    let reason = switchover::Reason::new(reason).into();
                    return Err(MigrationError::DestinationFailed { host: host.to_owned(), reason });
                }
                // It notes what nobody looks at here.
                Ok(Heard::Message(ToSource::Note { .. })) => {}
                Ok(Heard::Gone(_)) if heard_all => return Ok(()),
                Ok(Heard::Gone(error)) => return Err(lost(error.to_string())),
                Ok(_) => return Err(lost("it sent a message out of turn".to_owned())),
                Err(_) => return Err(lost("the connection has ended".to_owned())),
            },
            recv(ended) -> end => {
                end.unwrap_or_else(|_| Err("a fault in the agent".to_owned())).map_err(lost)?;
                said_all = true;
            }
            recv(cancelled) -> _ => return Err(MigrationError::Cancelled),
        }
    }
    Ok(())
}

/// Passes on what the one who connected says, to its end.
fn pass(
    mut socket: UnixStream,
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
