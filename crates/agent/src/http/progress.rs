//! Progress as lines of JSON, until what goes on has ended.

use std::sync::Arc;
use std::time::Duration;

use api::ErrorCode;
use axum::body::{Body, Bytes};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use http_body_util::channel::{Channel, Sender};
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::answer::refusal;
use super::blocking;
use crate::denied::Denied;
use crate::gangs::Gangs;
use crate::migrations::Migrations;

/// Watchers at a time. Each has a thread look for it, and all else that waits for QEMU or
/// a file needs threads of the same 512.
const WATCHERS_MAX: usize = 128;
/// Lines that a watcher may be behind; then it gets newer ones later.
const LINES_MAX: usize = 4;
/// How long one look may block a thread.
const LOOK: Duration = Duration::from_secs(1);

/// Places for those who watch.
#[derive(Clone)]
pub(crate) struct Watchers(Arc<Semaphore>);

impl Default for Watchers {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(WATCHERS_MAX)))
    }
}

impl Watchers {
    /// A place for one more, until this is dropped.
    pub(super) fn take(&self) -> Result<OwnedSemaphorePermit, Denied> {
        Arc::clone(&self.0).try_acquire_owned().map_err(|_| {
            let text = format!(
                "{WATCHERS_MAX} commands or programs follow this agent's migrations and gangs \
                 already: end one of them, or ask now and then with `droveway list --migrations` \
                 or `droveway gang`. What was begun goes on"
            );
            Denied::Coded(ErrorCode::TooManyWatchers, text)
        })
    }
}

/// One state after the other of something that goes on.
trait Watched: Send + Sync + 'static {
    type State: Serialize + Send + Sync + 'static;
    fn show(&self) -> Result<Self::State, Denied>;
    /// Blocks until there is something newer than `version`, or a look is over.
    fn wait(&self, version: u64) -> Result<(u64, Self::State), Denied>;
    fn is_over(state: &Self::State) -> bool;
}

struct OfMigration(Arc<Migrations>, String);
struct OfGang(Arc<Gangs>, String);

impl Watched for OfMigration {
    type State = api::Progress;

    fn show(&self) -> Result<Self::State, Denied> {
        self.0.show(&self.1)
    }

    fn wait(&self, version: u64) -> Result<(u64, Self::State), Denied> {
        self.0.wait(&self.1, version, LOOK)
    }

    fn is_over(state: &Self::State) -> bool {
        state.outcome.is_some()
    }
}

impl Watched for OfGang {
    type State = api::GangProgress;

    fn show(&self) -> Result<Self::State, Denied> {
        self.0.show(&self.1)
    }

    fn wait(&self, version: u64) -> Result<(u64, Self::State), Denied> {
        self.0.wait(&self.1, version, LOOK)
    }

    fn is_over(state: &Self::State) -> bool {
        state.outcome.is_some()
    }
}

pub(super) async fn of_migration(
    migrations: Arc<Migrations>,
    id: String,
    watchers: &Watchers,
) -> Response {
    stream(OfMigration(migrations, id), watchers).await
}

pub(super) async fn of_gang(gangs: Arc<Gangs>, id: String, watchers: &Watchers) -> Response {
    stream(OfGang(gangs, id), watchers).await
}

async fn stream<S: Watched>(watched: S, watchers: &Watchers) -> Response {
    let place = match watchers.take() {
        Ok(place) => place,
        Err(denied) => return refusal(&denied),
    };
    let watched = Arc::new(watched);
    let first = {
        let watched = Arc::clone(&watched);
        blocking(move || watched.show()).await
    };
    let first = match first {
        Ok(state) => state,
        Err(denied) => return refusal(&denied),
    };
    let (mut lines, body) = Channel::<Bytes, std::io::Error>::new(LINES_MAX);
    tokio::spawn(async move {
        // Until its last look is over: so threads are bounded, too.
        let _place = place;
        let mut version = 0;
        let mut state = first;
        // An error means that nobody watches any more.
        while send(&mut lines, &state).await.is_some() && !S::is_over(&state) {
            let watched = Arc::clone(&watched);
            match blocking(move || watched.wait(version)).await {
                Ok(next) => (version, state) = next,
                Err(denied) => {
                    tracing::warn!(%denied, "a watcher is left alone");
                    return;
                }
            }
        }
    });
    ([(CONTENT_TYPE, "application/x-ndjson")], Body::new(body)).into_response()
}

async fn send(lines: &mut Sender<Bytes, std::io::Error>, state: &impl Serialize) -> Option<()> {
    let mut line = serde_json::to_vec(state).ok()?;
    line.push(b'\n');
    lines.send_data(line.into()).await.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Always something new, up to the last.
    struct Counting {
        last: u64,
    }

    impl Watched for Counting {
        type State = [u64; 2];

        fn show(&self) -> Result<[u64; 2], Denied> {
            Ok([0, self.last])
        }

        fn wait(&self, version: u64) -> Result<(u64, [u64; 2]), Denied> {
            Ok((version + 1, [version + 1, self.last]))
        }

        fn is_over([now, last]: &[u64; 2]) -> bool {
            now == last
        }
    }

    fn free(watchers: &Watchers) -> usize {
        watchers.0.available_permits()
    }

    #[tokio::test]
    async fn each_watcher_has_a_place_until_it_leaves_or_all_is_over() {
        let watchers = Watchers::default();
        let mut watching = Vec::new();
        for _ in 0..WATCHERS_MAX {
            watching.push(stream(Counting { last: u64::MAX }, &watchers).await);
        }
        let refused = stream(Counting { last: 0 }, &watchers).await;
        assert_eq!(refused.status(), 503);
        assert_eq!(free(&watchers), 0);
        watching.pop();
        while free(&watchers) == 0 {
            tokio::task::yield_now().await;
        }
        let served = stream(Counting { last: 0 }, &watchers).await;
        assert_eq!(served.status(), 200);
        // It is kept, and was over at once.
        while free(&watchers) == 0 {
            tokio::task::yield_now().await;
        }
    }
}
