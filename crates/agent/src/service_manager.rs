//! What systemd is told of an agent that it has started with `Type=notify`.

use sd_notify::NotifyState;

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
