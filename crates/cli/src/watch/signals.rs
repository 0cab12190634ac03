//! The signals that cancel the watched operation.

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::problem::Problem;

/// Ctrl-C, and the signal that service managers and `timeout` send.
pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    /// Signals that were received before there was an operation to cancel.
    kept: u32,
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
            kept: 0,
        })
    }

    /// Keeps a signal for the next call of [`Signals::next`].
    pub(super) fn keep(&mut self) {
        self.kept += 1;
    }

    pub(crate) async fn next(&mut self) {
        if let Some(rest) = self.kept.checked_sub(1) {
            self.kept = rest;
            return;
        }
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

#[cfg(test)]
impl Signals {
    /// Returns `kept` signals at once, and none after them.
    pub(super) fn given(kept: u32) -> Self {
        let unused = || signal(SignalKind::user_defined2()).unwrap();
        Self { interrupt: unused(), terminate: unused(), kept }
    }
}
