//! `/metrics`, as a path of the API and, if the operator configures it, at a separate address for
//! clients without a certificate.
//!
//! It shows which VMs move and how fast, and takes no orders.

mod cached;

use std::io;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::few::Few;
use super::parts::Api;
use crate::denied::Denied;
use crate::metrics::Now;
pub(crate) use cached::CachedText;

/// Connections to that address at a time, so that idle ones can't use up the agent's open
/// files.
const CONNECTIONS_MAX: usize = 32;
/// The longest duration of a connection; a reader of metrics connects again.
const CONNECTION_MAX: Duration = Duration::from_secs(60);

/// Prometheus' text format, which all its readers accept.
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

pub(super) async fn metrics(State(api): State<Api>) -> Result<Response, Denied> {
    let cached = api.metrics.clone();
    let text = cached.read(move || collected(&api)).await.ok_or_else(|| {
        let text = "the metrics can't be collected now: see the agent's log";
        Denied::Local(text.to_owned())
    })?;
    Ok(([(CONTENT_TYPE, TEXT)], text).into_response())
}

fn collected(api: &Api) -> String {
    let now = Now {
        vms: api.registry.list(),
        migrations: api.migrations.moving(),
        buffers: api.migrations.buffers(),
        certificate_until_s: api.identity.as_ref().map(|one| one.validity().not_after_s),
    };
    api.migrations.metrics().text(&now)
}

/// Serves only metrics at `listener` until the API is closed.
pub(crate) async fn serve(
    listener: std::net::TcpListener,
    api: Api,
    mut closed: watch::Receiver<bool>,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let router = Router::new().route("/metrics", get(metrics)).with_state(api);
    let listener = Few::new(TcpListener::from_std(listener)?, CONNECTIONS_MAX, CONNECTION_MAX);
    axum::serve(listener, router)
        .with_graceful_shutdown(async move {
            // An error means that the sender was dropped, which is an end as well.
            let _ = closed.wait_for(|closing| *closing).await;
        })
        .await
}
