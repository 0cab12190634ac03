//! Sends a message of a switchover on a connection of its own.

use std::time::{Duration, Instant};

use identity::{Connection, Security};
use switchover::journal::Opened;
use transport::{Endpoint, connect};
use wire::{Frame, Inquiry, Kind, SwitchoverMessage, WireError, read_frame, read_message};

use crate::peers::Peers;

/// For the other side's answer: it may have to write to disk and to ask its QEMU.
const ANSWER_MAX: Duration = Duration::from_secs(6);

/// Sends it as the agent of the host `from` to that of the other host, and returns the answer, if
/// there is one.
pub(crate) fn inquire(
    (from, security): (&str, &Security),
    (peers, opened): (&Peers, &Opened),
    message: SwitchoverMessage,
) -> Result<Option<SwitchoverMessage>, String> {
    let peer = &opened.peer;
    let known = peers.named(peer).map(|peer| peer.address);
    let remote = known.or_else(|| opened.peer_address.parse().ok());
    let remote = remote.ok_or_else(|| format!("where {peer} is, is not known"))?;
    let endpoint = Endpoint { local: None, remote };
    let mut stream =
        connect(endpoint, peer, security, Kind::Inquiry).map_err(|error| error.to_string())?;
    let talk = |stream: &mut Connection| -> Result<Option<SwitchoverMessage>, WireError> {
        stream.set_read_deadline(Some(Instant::now() + ANSWER_MAX))?;
        let inquiry = Inquiry { from: from.to_owned(), message };
        Frame::message(&inquiry)?.write_to(stream)?;
        match read_frame(stream)? {
            Some(Frame::Message(json)) => Ok(Some(read_message(&json)?)),
            _ => Ok(None),
        }
    };
    talk(&mut stream).map_err(|error| error.to_string())
}
