//! Responses: JSON, or an error with its status.

use api::{ErrorBody, ErrorCode};
use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use crate::denied::Denied;

/// The result of a request.
pub(super) type Answer<T> = Result<Json<T>, Denied>;

/// The result of a request that creates something.
pub(super) type Created<T> = Result<(StatusCode, Json<T>), Denied>;

pub(super) fn created<T>(value: T) -> (StatusCode, Json<T>) {
    (StatusCode::CREATED, Json(value))
}

impl IntoResponse for Denied {
    fn into_response(self) -> Response {
        error(self.code(), &self.to_string())
    }
}

pub(super) fn error(code: ErrorCode, text: &str) -> Response {
    let status = StatusCode::from_u16(code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    (status, Json(ErrorBody { error: text.to_owned(), code: Some(code) })).into_response()
}

pub(super) async fn no_route() -> Response {
    let text = "there is no such path in the API: is the agent as new as the command?";
    error(ErrorCode::NoSuchPath, text)
}

pub(super) async fn no_method() -> Response {
    error(ErrorCode::MethodNotAllowed, "this path has another method")
}

/// Runs `work` on a blocking thread: QEMU is queried over blocking sockets, and may be slow.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Denied> + Send + 'static,
) -> Result<T, Denied> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|_| Err(Denied::Local("a fault in the agent; see its log".to_owned())))
}
