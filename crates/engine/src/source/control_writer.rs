//! Sends the leading thread's messages on a thread of its own.
//!
//! Sending takes as long as the destination likes, and the leading thread must not
//! block: it follows the operator, watches the clock, and lets the VM go on.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};
use data_threads::Joined;
use wire::{Frame, ToDestination};

use crate::error::LinkError;
use crate::link::Link;

/// Messages that may be queued. A migration sends a handful, and one more for each
/// change by its operator.
const WAITING_MAX: usize = 64;
/// Time allowed for the last message, the reason why the migration ended.
const LAST_MAX: Duration = Duration::from_secs(1);

/// Dropping it closes the connection.
pub(crate) struct ControlWriter {
    _thread: Joined,
    link: Arc<Link<ToDestination>>,
    waiting: Option<Sender<Frame>>,
    /// Disconnected once everything is sent.
    over: Receiver<()>,
}

impl ControlWriter {
    pub(crate) fn start(link: Arc<Link<ToDestination>>, name: &str) -> std::io::Result<Self> {
        let (waiting, to_send) = bounded::<Frame>(WAITING_MAX);
        let (is_over, over) = bounded(0);
        let thread = data_threads::spawn(format!("write-{name}"), {
            let link = Arc::clone(&link);
            move || {
                let _is_over: Sender<()> = is_over;
                for frame in to_send {
                    if let Err(error) = link.frame(&frame) {
                        tracing::info!(%error, "cannot send a switchover message");
                        // The thread that reads the connection notices it this way.
                        link.close();
                    }
                }
            }
        })?;
        Ok(Self { _thread: thread.into(), link, waiting: Some(waiting), over })
    }

    /// Queues a message without waiting.
    pub(crate) fn send(&self, message: &ToDestination) -> Result<(), LinkError> {
        let frame = Frame::message(message)?;
        let waiting = self.waiting.as_ref().ok_or(LinkError::Closed)?;
        waiting.try_send(frame).map_err(|_| LinkError::Unread)
    }
}

impl Drop for ControlWriter {
    fn drop(&mut self) {
        self.waiting = None;
        let _ = self.over.recv_timeout(LAST_MAX);
        self.link.close();
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use identity::Connection;
    use wire::ToSource;

    use std::thread;

    use super::*;

    /// A link whose peer accepts the connection and reads nothing.
    fn unread() -> (Arc<Link<ToDestination>>, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (peer, _) = listener.accept().unwrap();
        let (link, _) = Link::start::<ToSource>(Connection::plain(stream), "peer").unwrap();
        (Arc::new(link), peer)
    }

    #[test]
    fn sending_to_a_peer_that_does_not_read_does_not_block() {
        let (link, _peer) = unread();
        let writer = ControlWriter::start(Arc::clone(&link), "peer").unwrap();
        let abort = ToDestination::Abort { reason: "x".repeat(256 << 10) };
        // The kernel accepts some MiB; after that, messages queue.
        let error = (0..1000).find_map(|_| writer.send(&abort).err()).unwrap();
        assert!(matches!(error, LinkError::Unread), "{error}");
        drop(writer);
        assert!(link.send(&abort).is_err(), "the connection has ended");
    }

    #[test]
    fn a_thread_blocked_in_the_link_is_freed() {
        let (link, _peer) = unread();
        let writing = thread::spawn({
            let link = Arc::clone(&link);
            move || while link.non_ram(false, &[0; 1 << 20]).is_ok() {}
        });
        while !writing.is_finished() {
            link.cut_if_stuck(Duration::from_millis(20));
        }
        writing.join().unwrap();
    }

    #[test]
    fn the_last_message_arrives() {
        use std::io::Read;
        let (link, mut peer) = unread();
        let writer = ControlWriter::start(link, "peer").unwrap();
        writer.send(&ToDestination::Abort { reason: "the last word".to_owned() }).unwrap();
        drop(writer);
        let mut said = Vec::new();
        peer.read_to_end(&mut said).unwrap();
        let said = String::from_utf8_lossy(&said);
        assert!(said.contains("the last word"), "{said}");
    }
}
