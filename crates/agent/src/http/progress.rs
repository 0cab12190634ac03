//! Progress as lines of JSON, until what goes on has ended.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use http_body_util::channel::{Channel, Sender};
use serde::Serialize;

use super::answer::refusal;
use super::blocking;
use crate::denied::Denied;
use crate::gangs::Gangs;
use crate::migrations::Migrations;

/// Lines that a watcher may be behind; then it gets newer ones later.
const LINES_MAX: usize = 4;
/// How long one look may block a thread.
const LOOK: Duration = Duration::from_secs(1);

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

pub(super) async fn of_migration(migrations: Arc<Migrations>, id: String) -> Response {
    stream(OfMigration(migrations, id)).await
}

pub(super) async fn of_gang(gangs: Arc<Gangs>, id: String) -> Response {
    stream(OfGang(gangs, id)).await
}

async fn stream<S: Watched>(watched: S) -> Response {
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
