//! Has the gate decide on every request, and on every form.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Form, FromRequest, Request, State};
use axum::http::StatusCode;
use axum::http::header::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http_body_util::Limited;

use super::gate::{Refusal, same};
use super::pages;
use super::site::{Dashboard, page};

/// Lets pages load nothing from elsewhere, and use only the dashboard's own scripts and
/// styles.
const POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; \
                      img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";
/// The longest body of a form.
const FORM_BYTES_MAX: usize = 64 << 10;

/// Checks every request.
pub(super) async fn check(
    State(site): State<Arc<Dashboard>>,
    request: Request,
    next: Next,
) -> Response {
    let path = request.uri().path();
    let is_icon = path == "/favicon.ico";
    let admitted = site.gate.admit(request.method(), path, request.headers());
    let mut response = match admitted {
        Ok(()) => next.run(request).await,
        // Browsers request it if a page names no icon, and send no cookie for its path.
        Err(Refusal::Stranger) if is_icon => StatusCode::NO_CONTENT.into_response(),
        Err(Refusal::Stranger) => page(StatusCode::FORBIDDEN, pages::locked()),
        Err(refusal) => page(StatusCode::FORBIDDEN, pages::problem(refusal.text())),
    };
    let headers = response.headers_mut();
    for (name, value) in [
        ("content-security-policy", POLICY),
        ("x-content-type-options", "nosniff"),
        ("x-frame-options", "DENY"),
        // The path is secret. With `no-referrer`, browsers would send no origin in a POST.
        ("referrer-policy", "same-origin"),
        ("cross-origin-opener-policy", "same-origin"),
        ("cross-origin-resource-policy", "same-origin"),
        ("cache-control", "no-store"),
    ] {
        let name = HeaderName::from_static(name);
        headers.entry(name).or_insert(HeaderValue::from_static(value));
    }
    response
}

/// The fields of one of the dashboard's forms.
///
/// Handlers get a POST's fields only this way, so that no check of the token can be forgotten.
pub(super) struct Fields(Vec<(String, String)>);

impl Fields {
    pub(super) fn text(&self, name: &str) -> &str {
        let field = self.0.iter().find(|(its_name, _)| its_name == name);
        field.map_or("", |(_, value)| value.trim())
    }
}

impl FromRequest<Arc<Dashboard>> for Fields {
    type Rejection = Response;

    async fn from_request(request: Request, site: &Arc<Dashboard>) -> Result<Self, Response> {
        let refused = |status, text| page(status, pages::problem(text));
        let request = request.map(|body| Body::new(Limited::new(body, FORM_BYTES_MAX)));
        let Ok(Form(fields)) = Form::<Vec<(String, String)>>::from_request(request, &()).await
        else {
            return Err(refused(StatusCode::BAD_REQUEST, "That is not a form of these pages."));
        };
        let fields = Self(fields);
        if same(fields.text("token"), site.gate.token()) {
            Ok(fields)
        } else {
            let text = "The form is of another start of the dashboard, or of another page. Go back, \
                        reload, and send it again.";
            Err(refused(StatusCode::FORBIDDEN, text))
        }
    }
}
