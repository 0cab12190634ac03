//! Threads that lead, watch or carry, and what of the log is about which migration.

use std::fmt::Display;
use std::io;
use std::thread::{Builder, JoinHandle};

use tracing::Span;

/// What a migration's threads log stands in this, with its id. It is there at every level
/// of the log.
pub fn migration_span(id: impl Display, vm: &str) -> Span {
    tracing::error_span!("migration", %id, vm)
}

/// Starts a thread that is about what the one is about that starts it.
///
/// # Errors
/// If the system gives none.
pub fn spawn<T: Send + 'static>(
    name: impl Into<String>,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let span = Span::current();
    Builder::new().name(name.into()).spawn(move || span.in_scope(body))
}
