//! Progress as lines of JSON, until the migration or gang has ended.

use std::sync::Arc;
use std::time::Duration;

use api::ErrorCode;
use axum::body::{Body, Bytes};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use http_body_util::channel::{Channel, Sender};
use serde::Serialize;
use tokio::time::timeout;

use super::answer::blocking;
use super::caller::Caller;
use crate::denied::Denied;
use crate::shares::{Share, Shares};

/// Watchers at a time, at the socket and as many over TCP: those of one can't keep the other's
/// away. Each uses a blocking thread, and everything else that waits for QEMU or a file uses the
/// same pool of 512 threads.
const WATCHERS_MAX: usize = 64;
/// Those of one certificate over TCP.
const WATCHERS_OF_ONE_MAX: usize = 48;
/// Readers of events over TCP, and those of one certificate. The agent has places for 32 readers,
/// so that some are left at the socket.
const READERS_MAX: usize = 24;
const READERS_OF_ONE_MAX: usize = 16;
/// A watcher that reads nothing for longer is dropped. It can connect again.
const STUCK: Duration = Duration::from_secs(30);
/// Lines that are queued for a watcher; one that falls behind skips states.
const LINES_MAX: usize = 4;

/// The places for watchers, and over TCP those for readers of events.
#[derive(Clone)]
pub(crate) struct Watchers {
    at_socket: Arc<Shares>,
    over_tcp: Arc<Shares>,
    readers_over_tcp: Arc<Shares>,
    stuck: Duration,
}

impl Default for Watchers {
    fn default() -> Self {
        Self {
            at_socket: Shares::new(WATCHERS_MAX, WATCHERS_MAX),
            over_tcp: Shares::new(WATCHERS_MAX, WATCHERS_OF_ONE_MAX),
            readers_over_tcp: Shares::new(READERS_MAX, READERS_OF_ONE_MAX),
            stuck: STUCK,
        }
    }
}

impl Watchers {
    /// Takes a place. Over TCP there is a caller.
    fn take(&self, caller: Option<&Caller>) -> Result<Share, Denied> {
        let (place, max) = match caller {
            Some(caller) => (self.over_tcp.take(&caller.name), WATCHERS_OF_ONE_MAX),
            None => (self.at_socket.take(""), WATCHERS_MAX),
        };
        place.ok_or_else(|| {
            let text = format!(
                "{max} commands or programs follow this agent's migrations and gangs already: end \
                 one of them, or poll with `droveway list --migrations` or `droveway gang`. What \
                 was started continues"
            );
            Denied::Coded(ErrorCode::TooManyWatchers, text)
        })
    }

    /// Takes a place for a caller that reads events over TCP.
    pub(super) fn read_events(&self, caller: &Caller) -> Result<Share, Denied> {
        self.readers_over_tcp.take(&caller.name).ok_or_else(|| {
            let text = format!(
                "{READERS_OF_ONE_MAX} readers follow this agent's events over TCP already: end one \
                 of them"
            );
            Denied::Coded(ErrorCode::TooManyReaders, text)
        })
    }
}

/// How long one wait for news may block a thread.
pub(super) const LOOK: Duration = Duration::from_secs(1);

/// Sends the successive states of an operation: first what `show` returns, then what `wait`
/// does, which gets the version of the last one and blocks until there is a newer one, or for
/// [`LOOK`] at most.
pub(super) async fn stream<S: Serialize + Send + Sync + 'static>(
    watchers: &Watchers,
    caller: Option<&Caller>,
    show: impl FnOnce() -> Result<S, Denied> + Send + 'static,
    wait: impl Fn(u64) -> Result<(u64, S), Denied> + Send + Sync + 'static,
    is_over: fn(&S) -> bool,
) -> Result<Response, Denied> {
    let place = watchers.take(caller)?;
    let first = blocking(show).await?;
    let (mut lines, body) = Channel::<Bytes, std::io::Error>::new(LINES_MAX);
    let (stuck, wait) = (watchers.stuck, Arc::new(wait));
    tokio::spawn(async move {
        // Held until the last wait has ended, so that the number of threads is bounded too.
        let _place = place;
        let mut version = 0;
        let mut state = first;
        // None means that the watcher has disconnected, or takes nothing.
        while send(&mut lines, &state, stuck).await.is_some() && !is_over(&state) {
            let wait = Arc::clone(&wait);
            match blocking(move || wait(version)).await {
                Ok(next) => (version, state) = next,
                Err(denied) => {
                    tracing::warn!(%denied, "cannot follow progress for a watcher");
                    return;
                }
            }
        }
    });
    Ok(([(CONTENT_TYPE, "application/x-ndjson")], Body::new(body)).into_response())
}

async fn send(
    lines: &mut Sender<Bytes, std::io::Error>,
    state: &impl Serialize,
    stuck: Duration,
) -> Option<()> {
    let mut line = serde_json::to_vec(state).ok()?;
    line.push(b'\n');
    match timeout(stuck, lines.send_data(line.into())).await {
        Ok(sent) => sent.ok(),
        Err(_) => {
            tracing::warn!("dropping a stalled watcher");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use identity::Role;

    use super::*;

    /// An operation with a new state at each wait, up to `last`.
    async fn counting(
        last: u64,
        watchers: &Watchers,
        caller: Option<&Caller>,
    ) -> Result<Response, Denied> {
        let wait = move |version: u64| Ok((version + 1, [version + 1, last]));
        stream(watchers, caller, move || Ok([0, last]), wait, |[now, last]| now == last).await
    }

    fn free(watchers: &Watchers) -> usize {
        watchers.at_socket.free()
    }

    async fn watch(last: u64, watchers: &Watchers) -> Response {
        counting(last, watchers, None).await.into_response()
    }

    #[tokio::test]
    async fn each_watcher_has_a_place_until_it_leaves_or_all_is_over() {
        let watchers = Watchers::default();
        let mut watching = Vec::new();
        for _ in 0..WATCHERS_MAX {
            watching.push(watch(u64::MAX, &watchers).await);
        }
        assert_eq!(watch(0, &watchers).await.status(), 503);
        assert_eq!(free(&watchers), 0);
        // Those at the socket are not in the way of people, nor the other way round.
        let person = Caller::example(Role::Observe);
        for of_person in 0..=WATCHERS_OF_ONE_MAX {
            let over_tcp = counting(u64::MAX, &watchers, Some(&person)).await;
            let over_tcp = over_tcp.into_response();
            let status: u16 = if of_person < WATCHERS_OF_ONE_MAX { 200 } else { 503 };
            assert_eq!(over_tcp.status(), status);
            watching.push(over_tcp);
        }
        let another = Caller::named("bob", Role::Observe);
        let over_tcp = counting(0, &watchers, Some(&another)).await;
        assert_eq!(over_tcp.into_response().status(), 200, "nor is one person in another's");
        watching.truncate(WATCHERS_MAX);
        watching.pop();
        while free(&watchers) == 0 {
            tokio::task::yield_now().await;
        }
        let served = watch(0, &watchers).await;
        assert_eq!(served.status(), 200);
        // The response is kept, but its stream ended at once.
        while free(&watchers) == 0 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_watcher_that_takes_nothing_loses_its_place() {
        let watchers = Watchers { stuck: Duration::from_millis(20), ..Watchers::default() };
        let _unread = watch(u64::MAX, &watchers).await;
        while free(&watchers) < WATCHERS_MAX {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
