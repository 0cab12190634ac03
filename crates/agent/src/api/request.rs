//! What handlers take from a request. What can't be read is refused as any other request.

use axum::Json;
use axum::extract::rejection::{JsonRejection, PathRejection, QueryRejection};
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use serde::de::DeserializeOwned;

use crate::denied::Denied;

/// The longest body; a command line with a thousand disks has some 100 KB.
pub(super) const BODY_BYTES_MAX: usize = 1 << 20;

/// The one name or id in the path.
pub(super) struct Name(pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for Name {
    type Rejection = Denied;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Denied> {
        let name = Path::from_request_parts(parts, state).await;
        let wrong = |wrong: PathRejection| Denied::Invalid(wrong.body_text());
        name.map(|Path(name)| Self(name)).map_err(wrong)
    }
}

/// The options in the query.
pub(super) struct Options<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Options<T> {
    type Rejection = Denied;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Denied> {
        let options = Query::from_request_parts(parts, state).await;
        let wrong = |wrong: QueryRejection| Denied::Invalid(wrong.body_text());
        options.map(|Query(options)| Self(options)).map_err(wrong)
    }
}

/// The body, from JSON.
pub(super) struct Body<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Denied;

    async fn from_request(request: Request, state: &S) -> Result<Self, Denied> {
        let body = Json::from_request(request, state).await;
        let wrong = |wrong: JsonRejection| Denied::Invalid(wrong.body_text());
        body.map(|Json(body)| Self(body)).map_err(wrong)
    }
}
