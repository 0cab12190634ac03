//! What all requests share.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use client::cluster::Cluster;
use maud::Markup;

use super::gate::Gate;

/// The state from which requests are answered.
pub(super) struct Dashboard {
    pub(super) gate: Gate,
    pub(super) cluster: Arc<Cluster>,
    /// Shows the next address that opens the pages.
    pub(super) announce: fn(&str),
}

pub(super) type Site = State<Arc<Dashboard>>;

pub(super) fn page(status: StatusCode, page: Markup) -> Response {
    let kind = [(header::CONTENT_TYPE, "text/html; charset=utf-8")];
    (status, kind, page.into_string()).into_response()
}
