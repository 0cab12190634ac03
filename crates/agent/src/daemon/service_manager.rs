//! Notifications to systemd from an agent that it started with `Type=notify`.

use std::time::Duration;

use sd_notify::NotifyState;

/// The interval between updates of the line in `systemctl status`.
const STATUS_EVERY: Duration = Duration::from_secs(2);

/// Notifies the service manager, if there is one.
pub(crate) fn tell(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "cannot notify the service manager");
    }
}

/// Feeds the watchdog of `WatchdogSec=` while the API's threads are alive.
pub(crate) async fn watched() {
    let Some(deadline) = sd_notify::watchdog_enabled() else { return };
    let mut turns = tokio::time::interval(deadline / 2);
    loop {
        turns.tick().await;
        tell(NotifyState::Watchdog);
    }
}

/// Updates the line of `systemctl status` whenever it changes.
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
