//! The socket at which the agent listens for QEMU's channels, which QEMU keeps open too.
//!
//! A QEMU from 9.0 on never migrates again if one of its multifd channels can't connect: by its
//! source its migration thread then waits for the thread of that channel, which was never started.
//! An agent that is killed closes its listening socket, so a channel that connects a moment later
//! would be refused. With the socket open in QEMU as well it is not: it waits in the backlog, which
//! has room for thousands, its thread starts, and the migration fails or is cancelled as any other.
//!
//! Connections that were accepted break with the agent. While QEMU sets its migration up, one
//! broken channel has the same effect: the threads of the others end without an answer to the one
//! that waits for them. So channels stay in the backlog until then: see [`wait_set_up`].
//!
//! QEMU names the file by itself, for its monitor: an agent that is started again finds it by that
//! name, and closes it once it has ended what was left. What is still in the backlog breaks then.
//!
//! Not covered is QEMU 9.0 without a second monitor: it closes the socket's directory together with
//! the monitor's connection.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering::Relaxed;

use serde_json::json;

use super::Outgoing;
use super::ending::{self, SET_UP_MAX};
use super::progress::{PROGRESS_WAIT, Status};
use crate::qmp::{Qmp, QmpError};

/// QEMU's name for the socket.
const NAME: &str = "droveway-tap";
/// The first QEMU that waits for a channel that could not connect. Those before it fail at once.
const NEEDED_SINCE: (u32, u32, u32) = (9, 0, 0);

impl Outgoing {
    /// Has QEMU keep this socket open, to which it is going to connect, until its migration has
    /// ended. Only multifd needs it.
    ///
    /// A QEMU that refuses migrates without it, such as one that a security policy keeps from the
    /// agent's sockets.
    ///
    /// # Errors
    /// If QEMU doesn't answer.
    pub fn keep_open(&self, listener: impl AsFd) -> Result<(), QmpError> {
        if self.qmp.version() < NEEDED_SINCE {
            return Ok(());
        }
        // Before the command: QEMU may run it although its answer doesn't arrive.
        self.keeps_listener.store(true, Relaxed);
        match self.qmp.execute_with(listener.as_fd(), "getfd", json!({ "fdname": NAME })) {
            Ok(_) => Ok(()),
            Err(error @ QmpError::Refused { .. }) => {
                tracing::debug!(%error, "QEMU does not keep the socket of its channels open");
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Has QEMU close it, if it was to keep it.
    pub(super) fn close_listener(&self) {
        if self.keeps_listener.swap(false, Relaxed) {
            close(&self.qmp);
        }
    }
}

/// Has QEMU close the socket, whichever run of the agent gave it, if it has one. Connections that
/// wait in its backlog break.
pub(super) fn close(qmp: &Qmp) {
    if qmp.version() < NEEDED_SINCE {
        return;
    }
    match qmp.execute_within("closefd", json!({ "fdname": NAME }), PROGRESS_WAIT) {
        // It refuses if it has none.
        Ok(_) | Err(QmpError::Refused { .. } | QmpError::Closed) => {}
        Err(error) => tracing::debug!(%error, "QEMU keeps a socket open until it answers"),
    }
}

/// Waits until QEMU has set up the migration whose main channel has connected, or has ended it, for
/// some seconds at most. From then on the other channels may be accepted: all of them have
/// connected.
///
/// While a QEMU from 8.2 on prepares RAM, it holds its lock, and answers only then.
pub fn wait_set_up(qmp: &Qmp) {
    let events = qmp.events_named(&["MIGRATION"]);
    match ending::wait_set_up(qmp, &events, SET_UP_MAX) {
        Ok(Some(status)) if status != Status::Setup => {}
        Ok(_) => tracing::debug!("QEMU has not set its migration up in time"),
        Err(error) => {
            tracing::debug!(%error, "whether QEMU has set its migration up is not known");
        }
    }
}
