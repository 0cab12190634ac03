//! A certificate that is renewed is used without a restart: its files are read again when
//! they change, and on SIGHUP.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use identity::{Files, Identity};
use tokio::signal::unix::Signal;
use tokio::time::{MissedTickBehavior, interval};

/// Renewals are a matter of days; a copy of several files takes no longer than this.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// Goes on for as long as the agent does. Connections that are there keep the certificate
/// they began with, so no migration notices.
pub(crate) async fn follow(identity: Arc<Identity>, files: Files, mut told: Signal) {
    let mut turns = interval(LOOK_AGAIN);
    turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut used = files.changed();
    // What was seen the last time, and may be half a copy.
    let mut seen = used;
    loop {
        let is_told = tokio::select! {
            _ = turns.tick() => false,
            _ = told.recv() => true,
        };
        let now = files.changed();
        let is_whole = now == seen;
        seen = now;
        if is_told || (now != used && is_whole) {
            used = now;
            reload(&identity, &files);
        }
    }
}

fn reload(identity: &Identity, files: &Files) {
    match identity.reload(files) {
        Ok(()) => {
            tracing::info!("the certificate was read again: {}", identity.validity());
            if let Some(warning) = identity.warning(SystemTime::now()) {
                tracing::warn!("{warning}");
            }
        }
        Err(error) => {
            tracing::error!(%error, "the certificate was not replaced, the one before is used");
        }
    }
}
