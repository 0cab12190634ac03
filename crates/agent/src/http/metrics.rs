//! `/metrics`, among the other paths of the API and, if the operator says so, at an
//! address of its own for those who have no certificate: it says what moves and how
//! fast, and takes no orders.

use std::io;

use axum::Router;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::{Api, answer, blocking};
use crate::metrics::Now;

/// The text format, which Prometheus and all that read it know.
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

pub(super) async fn metrics(State(api): State<Api>) -> Response {
    let text = blocking(move || {
        let mut migrations = api.migrations.list();
        migrations.retain(|one| one.outcome.is_none());
        let now = Now {
            vms: api.registry.list(),
            migrations,
            buffers: api.migrations.buffers(),
            certificate_until_s: api.identity.map(|identity| identity.validity().not_after_s),
        };
        Ok(api.migrations.metrics().text(&now))
    });
    match text.await {
        Ok(text) => ([(CONTENT_TYPE, TEXT)], text).into_response(),
        Err(denied) => answer::refusal(&denied),
    }
}

/// Serves them there alone until the API is closed.
pub(crate) async fn serve(
    listener: std::net::TcpListener,
    api: Api,
    mut closed: watch::Receiver<bool>,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let router = Router::new().route("/metrics", get(metrics)).with_state(api);
    axum::serve(TcpListener::from_std(listener)?, router)
        .with_graceful_shutdown(async move {
            // An error means that the sender is gone: also an end.
            let _ = closed.wait_for(|closing| *closing).await;
        })
        .await
}
