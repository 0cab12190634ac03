//! Starts threads, and assigns their log lines to a migration.

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
