//! The agent's log on standard error, which service managers read.
//!
//! If that is systemd's journal, lines go there with fields to find them by (see [`journal`]).

mod journal;

use std::io::{self, IsTerminal};

use journal::Journal;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Begins logging; `DROVEWAY_LOG` sets the level.
pub(crate) fn begin() {
    let filter = EnvFilter::try_from_env("DROVEWAY_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    // A second subscriber is refused, which is fine: tests may have set one.
    let _ = match Journal::of_this_service() {
        Some(journal) => {
            tracing_subscriber::registry().with(filter).with(journal).try_init().is_ok()
        }
        None => tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(io::stderr)
            .with_ansi(io::stderr().is_terminal())
            .try_init()
            .is_ok(),
    };
}
