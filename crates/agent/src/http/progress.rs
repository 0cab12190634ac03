//! A migration's progress as lines of JSON, until it has ended.

use std::sync::Arc;
use std::time::Duration;

use api::Progress;
use axum::body::{Body, Bytes};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use http_body_util::channel::{Channel, Sender};

use super::answer::refusal;
use super::blocking;
use crate::migrations::Migrations;

/// Lines that a watcher may be behind; then it gets newer ones later.
const LINES_MAX: usize = 4;
/// How long one look may block a thread.
const LOOK: Duration = Duration::from_secs(1);

pub(super) async fn stream(migrations: Arc<Migrations>, id: String) -> Response {
    let first = {
        let (migrations, id) = (Arc::clone(&migrations), id.clone());
        blocking(move || migrations.show(&id)).await
    };
    let first = match first {
        Ok(progress) => progress,
        Err(denied) => return refusal(&denied),
    };
    let (mut lines, body) = Channel::<Bytes, std::io::Error>::new(LINES_MAX);
    tokio::spawn(async move {
        let mut version = 0;
        let mut progress = first;
        // An error means that nobody watches any more.
        while send(&mut lines, &progress).await.is_some() && progress.outcome.is_none() {
            let (migrations, id) = (Arc::clone(&migrations), id.clone());
            match blocking(move || migrations.wait(&id, version, LOOK)).await {
                Ok(next) => (version, progress) = next,
                Err(denied) => {
                    tracing::warn!(%denied, "a watcher is left alone");
                    return;
                }
            }
        }
    });
    ([(CONTENT_TYPE, "application/x-ndjson")], Body::new(body)).into_response()
}

async fn send(lines: &mut Sender<Bytes, std::io::Error>, progress: &Progress) -> Option<()> {
    let mut line = serde_json::to_vec(progress).ok()?;
    line.push(b'\n');
    lines.send_data(line.into()).await.ok()
}
