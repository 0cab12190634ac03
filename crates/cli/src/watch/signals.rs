//! The signals that cancel what is watched.

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::problem::Problem;

/// Ctrl-C, and the signal that service managers and `timeout` send.
pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    pub(crate) fn new() -> Result<Self, Problem> {
        let listen = |kind| {
            signal(kind).map_err(|source| Problem::Local {
                what: "listening for signals".to_owned(),
                source,
            })
        };
        Ok(Self {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
        })
    }

    pub(crate) async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}
