//! The API of an agent: HTTP and JSON, on a unix socket and, for people with certificates,
//! over TCP. And the webhook, by which the agent reports events by itself.

mod answer;
mod caller;
mod document;
mod events;
pub(crate) mod few;
mod gangs;
mod host;
mod metrics;
mod migrations;
mod parts;
mod people;
mod predict;
mod progress;
mod request;
mod routes;
pub(crate) mod socket;
mod upgrade;
mod vms;
pub(crate) mod webhook;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::MethodRouter;

use answer::{no_method, no_route};
pub(crate) use metrics::{CachedText, serve as serve_metrics};
pub(crate) use parts::Api;
pub(crate) use people::Port;
pub(crate) use progress::Watchers;
use request::BODY_BYTES_MAX;
use routes::routes;

/// All routes.
pub(crate) fn router(api: Api) -> Router {
    let routes = routes().into_iter();
    routes
        .fold(Router::new(), |router, route| router.route(route.path, route.handler))
        .route("/v1/vms/attach", MethodRouter::new().fallback(vms::named_attach))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(api)
}

#[cfg(test)]
mod tests;
