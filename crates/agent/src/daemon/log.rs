//! The agent's log on standard error, which service managers read.
//!
//! If that is systemd's journal, lines go there with fields to find them by (see [`journal`]).

mod journal;
mod limit;

use std::io::{self, IsTerminal};
use std::sync::Arc;

use journal::Journal;
use limit::{Counting, Limits};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt};

/// Begins logging, until the result is dropped; `DROVEWAY_LOG` sets the level.
pub(crate) fn begin() -> io::Result<Counting> {
    let filter = EnvFilter::try_from_env("DROVEWAY_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let limits = Arc::<Limits>::default();
    let journal = Journal::of_this_service();
    let standard_error = journal
        .is_none()
        .then(|| fmt::layer().with_writer(io::stderr).with_ansi(io::stderr().is_terminal()));
    let log = tracing_subscriber::registry().with(filter).with(limits.layer());
    // A second subscriber is refused, which is fine: tests may have set one.
    let _ = log.with(journal).with(standard_error).try_init();
    limits.count()
}
