//! The signals that cancel the watched operation, or end the wait for one that continues.

use std::future::pending;

use client::Problem;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Ctrl-C, and the signal that service managers and `timeout` send.
pub(crate) struct Signals {
    interrupt: Signal,
    /// None if it is not taken for a Ctrl-C: see [`terminated`].
    terminate: Option<Signal>,
    /// Signals that were received before there was an operation to cancel.
    kept: u32,
}

impl Signals {
    pub(crate) fn new() -> Result<Self, Problem> {
        Ok(Self { terminate: Some(listen(SignalKind::terminate())?), ..Self::interrupts()? })
    }

    /// Ctrl-C alone.
    pub(crate) fn interrupts() -> Result<Self, Problem> {
        Ok(Self { interrupt: listen(SignalKind::interrupt())?, terminate: None, kept: 0 })
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
        let Self { interrupt, terminate, .. } = self;
        let terminated = async {
            match terminate {
                Some(terminate) => terminate.recv().await,
                None => pending().await,
            }
        };
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminated => {}
        }
    }
}

/// Waits for the signal that service managers and `timeout` send, which is listened for from now
/// on.
pub(crate) fn terminated() -> Result<impl Future<Output = ()>, Problem> {
    let mut terminate = listen(SignalKind::terminate())?;
    Ok(async move {
        terminate.recv().await;
    })
}

fn listen(kind: SignalKind) -> Result<Signal, Problem> {
    signal(kind)
        .map_err(|source| Problem::Local { what: "listening for signals".to_owned(), source })
}

#[cfg(test)]
impl Signals {
    /// Returns `kept` signals at once, and none after them.
    pub(super) fn given(kept: u32) -> Self {
        let unused = || signal(SignalKind::user_defined2()).unwrap();
        Self { interrupt: unused(), terminate: Some(unused()), kept }
    }
}
