//! Events as they happen, as server-sent events: `GET /v1/events`.

use std::convert::Infallible;

use axum::Extension;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::HeaderMap;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;
use http_body_util::channel::{Channel, Sender};
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::caller::Caller;
use super::parts::Api;
use crate::denied::Denied;
use crate::events::{Limits, Reader};

/// The header with which a reader resumes.
const LAST_EVENT_ID: &str = "last-event-id";
/// A comment, which readers skip.
const COMMENT: Bytes = Bytes::from_static(b":\n\n");
/// Frames that are queued for the connection; more of them stay in the ring.
const FRAMES_MAX: usize = 1;

pub(super) async fn events(
    State(api): State<Api>,
    caller: Option<Extension<Caller>>,
    headers: HeaderMap,
) -> Result<Response, Denied> {
    let place = caller.map(|Extension(caller)| api.watchers.read_events(&caller)).transpose()?;
    let last = headers.get(LAST_EVENT_ID).map(|last| last.to_str().unwrap_or_default());
    let reader = api.events.read(last)?;
    let limits = api.events.limits();
    let (frames, body) = Channel::<Bytes, Infallible>::new(FRAMES_MAX);
    let (held, dropped) = oneshot::channel::<()>();
    // The body owns `held`, so the reader's place is free as soon as its connection ends, not
    // only at the next event.
    let body = body.map_frame(move |frame| {
        let _ = &held;
        frame
    });
    tokio::spawn(async move {
        let _place = place;
        tokio::select! {
            () = send(reader, frames, limits) => {}
            _ = dropped => {}
        }
    });
    let headers = [(CONTENT_TYPE, "text/event-stream"), (CACHE_CONTROL, "no-store")];
    Ok((headers, Body::new(body)).into_response())
}

/// Sends events until there are no more, or the reader has disconnected or takes none.
async fn send(mut reader: Reader, mut frames: Sender<Bytes, Infallible>, limits: Limits) {
    loop {
        let frame = match timeout(limits.silent, reader.next()).await {
            Ok(Some(frame)) => frame,
            Ok(None) => return,
            Err(_) => COMMENT,
        };
        match timeout(limits.stuck, frames.send_data(frame)).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return,
            Err(_) => {
                tracing::warn!("dropping a stalled reader of events");
                return;
            }
        }
    }
}
