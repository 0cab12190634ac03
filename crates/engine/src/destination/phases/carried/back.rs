//! Passes on what the QEMU, or disk server, here sends back: unchanged and at once.

use std::io::Read;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use crossbeam_channel::{Receiver, bounded};
use data_threads::Joined;
use wire::ToSource;

use crate::destination::postcopies::Answers;
use crate::link::Link;

const READ_BYTES: usize = 256 << 10;

/// It has sent everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Closed {
    /// The code of the SHUT in its answers, if it is a QEMU and sent one.
    pub(super) shut: Option<u32>,
}

/// The thread that passes it on. Dropping this ends the connection.
pub(super) struct Back {
    _thread: Joined,
    socket: UnixStream,
    pub(super) closed: Receiver<Closed>,
    hushed: Arc<AtomicBool>,
}

impl Back {
    pub(super) fn start(
        socket: &UnixStream,
        link: &Arc<Link<ToSource>>,
        answers: Answers,
    ) -> std::io::Result<Self> {
        let (tell, closed) = bounded(1);
        let (ours, link) = (socket.try_clone()?, Arc::clone(link));
        let hushed = Arc::<AtomicBool>::default();
        let thread = data_threads::spawn("carry-back", {
            let (socket, hushed) = (ours.try_clone()?, Arc::clone(&hushed));
            move || {
                // The receiver may be dropped. Sent before the source learns of the end, because
                // the source then closes its connection.
                let _ = tell.send(pass(socket, &link, answers));
                if !hushed.load(SeqCst) {
                    let _ = link.back_ends();
                }
            }
        })?;
        Ok(Self { _thread: thread.into(), socket: ours, closed, hushed })
    }

    /// The source is not notified of the end any more.
    pub(super) fn hush(&self) {
        self.hushed.store(true, SeqCst);
    }
}

impl Drop for Back {
    fn drop(&mut self) {
        // The other end may have closed it.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

/// Passes on everything. If the source can't be reached, others notice.
fn pass(mut socket: UnixStream, link: &Link<ToSource>, mut answers: Answers) -> Closed {
    let mut buffer = vec![0; READ_BYTES];
    loop {
        match socket.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => {
                answers.push(&buffer[..count]);
                if link.back(&buffer[..count]).is_err() {
                    break;
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    Closed { shut: answers.shut() }
}
