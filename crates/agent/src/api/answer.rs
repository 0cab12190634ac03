//! Responses: JSON, or an error with its status.

use api::{ErrorBody, ErrorCode};
use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use crate::denied::Denied;

/// The result of a request, with the status to use on success.
pub(super) struct Answer<T> {
    outcome: Result<T, Denied>,
    success: StatusCode,
}

impl<T> Answer<T> {
    /// The result of a request that creates something.
    pub(super) fn created(outcome: Result<T, Denied>) -> Self {
        Self { outcome, success: StatusCode::CREATED }
    }

    pub(super) fn denied(denied: Denied) -> Self {
        Err(denied).into()
    }
}

impl<T> From<Result<T, Denied>> for Answer<T> {
    fn from(outcome: Result<T, Denied>) -> Self {
        Self { outcome, success: StatusCode::OK }
    }
}

impl<T: Serialize> IntoResponse for Answer<T> {
    fn into_response(self) -> Response {
        match self.outcome {
            Ok(value) => (self.success, Json(value)).into_response(),
            Err(denied) => refusal(&denied),
        }
    }
}

pub(super) fn refusal(denied: &Denied) -> Response {
    error(denied.code(), &denied.to_string())
}

pub(super) fn error(code: ErrorCode, text: &str) -> Response {
    let status = StatusCode::from_u16(code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    (status, Json(ErrorBody { error: text.to_owned(), code: Some(code) })).into_response()
}
