//! What systemd is told of an agent that it has started with `Type=notify`.

use std::time::Duration;

use sd_notify::NotifyState;

/// Between two looks at what `systemctl status` shows.
const STATUS_EVERY: Duration = Duration::from_secs(2);

/// Says so, if somebody wants to know.
pub(crate) fn tell(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "the service manager can't be told how the agent is");
    }
}

/// With `WatchdogSec=`, for as long as the API's threads do anything at all.
pub(crate) async fn watched() {
    let Some(deadline) = sd_notify::watchdog_enabled() else { return };
    let mut turns = tokio::time::interval(deadline / 2);
    loop {
        turns.tick().await;
        tell(NotifyState::Watchdog);
    }
}

/// The line of `systemctl status`, whenever it is another one.
pub(crate) async fn shown(line: impl Fn() -> String) {
    if std::env::var_os("NOTIFY_SOCKET").is_none() {
        return;
    }
    let mut shown = String::new();
    let mut turns = tokio::time::interval(STATUS_EVERY);
    loop {
        turns.tick().await;
        let now = line();
        if now != shown {
            tell(NotifyState::Status(&now));
            shown = now;
        }
    }
}
