//! Starts threads, assigns their log lines to a migration, and waits for them.

use std::fmt::Display;
use std::io;
use std::thread::{Builder, JoinHandle};

use tracing::Span;

/// The span of a migration's log lines, with its id. It is enabled at every log level.
pub fn migration_span(id: impl Display, vm: &str) -> Span {
    tracing::error_span!("migration", %id, vm)
}

/// Starts a thread that logs in the span of the calling thread.
///
/// # Errors
/// If the system can't start a thread.
pub fn spawn<T: Send + 'static>(
    name: impl Into<String>,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let span = Span::current();
    Builder::new().name(name.into()).spawn(move || span.in_scope(body))
}

/// A thread that is waited for when this is dropped.
///
/// Its owner ends it before: in a `Drop` of its own, or with the sender of the thread's channel,
/// which is a field above this one, because fields are dropped in order.
#[derive(Debug)]
pub struct Joined(Option<JoinHandle<()>>);

impl Joined {
    /// Waits until the thread has ended.
    pub fn join(&mut self) {
        if let Some(thread) = self.0.take() {
            // A panic was reported by the thread.
            let _ = thread.join();
        }
    }
}

impl From<JoinHandle<()>> for Joined {
    fn from(thread: JoinHandle<()>) -> Self {
        Self(Some(thread))
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        self.join();
    }
}
