//! Requests to agents: HTTP to one of them, and the state of a whole cluster, kept up to date while
//! it is shown.

#![forbid(unsafe_code)]

pub mod cluster;
mod events;
mod operation;
mod problem;
mod route;

use std::error::Error;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::http::request::Builder;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use events::{EventStream, Sent};
pub use operation::Operation;
pub use problem::Problem;
pub use route::Route;

/// The longest body.
///
/// The report of a long migration has some thousand samples of 64 lanes, which is below 10 MiB.
const BODY_BYTES_MAX: usize = 64 << 20;
/// The longest line.
///
/// The state of a migration is a few hundred bytes and its notes, and a gang may have a thousand
/// migrations.
const LINE_BYTES_MAX: usize = 4 << 20;

/// The API's path of gangs.
pub const GANGS: &str = "/v1/gangs";

/// A request without a body.
pub const NOTHING: Option<&()> = None;

/// A client of one agent.
pub struct Client {
    route: Route,
}

impl Client {
    /// A client of the agent at the end of `route`. It connects for each request.
    #[must_use]
    pub fn new(route: Route) -> Self {
        Self { route }
    }

    /// Whether the agent is on another host.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        self.route.is_remote()
    }

    /// Reads what is at `path`.
    ///
    /// # Errors
    /// If the agent can't be reached, refuses, or sends no valid answer.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Problem> {
        self.request(Method::GET, path, NOTHING).await
    }

    /// Cancels the operation at `path`.
    ///
    /// # Errors
    /// As with [`Client::get`].
    pub async fn cancel(&self, path: &str) -> Result<(), Problem> {
        self.request(Method::POST, &format!("{path}/cancel"), NOTHING).await
    }

    /// Sends a request and reads the whole response.
    ///
    /// # Errors
    /// As with [`Client::get`].
    pub async fn request<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, Problem> {
        let response = self.send(method, path, body).await?;
        if !response.status().is_success() {
            return Err(self.refused(response).await);
        }
        let bytes = self.body(response).await?;
        // A response without a body is read as `null`, which is `()`.
        let json: &[u8] = if bytes.is_empty() { b"null" } else { &bytes };
        serde_json::from_slice(json).map_err(|error| {
            self.disconnected(format!("its answer is from another version of droveway ({error})"))
        })
    }

    /// Requests a stream of lines of JSON.
    ///
    /// # Errors
    /// If the agent can't be reached, or refuses.
    pub async fn lines(&self, path: &str) -> Result<Lines, Problem> {
        let response = self.send(Method::GET, path, NOTHING).await?;
        if response.status().is_success() {
            Ok(self.lines_of(response))
        } else {
            Err(self.refused(response).await)
        }
    }

    /// Requests the events from now on, or after the one with the id `last`.
    ///
    /// # Errors
    /// If the agent can't be reached, or refuses.
    pub async fn events(&self, last: Option<&str>) -> Result<EventStream, Problem> {
        let mut request = request(Method::GET, "/v1/events");
        if let Some(last) = last {
            request = request.header("last-event-id", last);
        }
        let response = self.send_as(request, "/v1/events", NOTHING).await?;
        if response.status().is_success() {
            Ok(EventStream::new(self.lines_of(response)))
        } else {
            Err(self.refused(response).await)
        }
    }

    /// The problem that a response without success reports.
    async fn refused(&self, response: Response<Incoming>) -> Problem {
        let is_full = response.status() == StatusCode::SERVICE_UNAVAILABLE;
        match self.body(response).await {
            Ok(bytes) if is_full => Problem::NotNow(refusal(&bytes)),
            Ok(bytes) => Problem::Refused(refusal(&bytes)),
            Err(problem) => problem,
        }
    }

    fn lines_of(&self, response: Response<Incoming>) -> Lines {
        Lines { body: response.into_body(), ready: Vec::new(), at: self.route.to_string() }
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<Response<Incoming>, Problem> {
        self.send_as(request(method, path), path, body).await
    }

    async fn send_as(
        &self,
        mut request: Builder,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<Response<Incoming>, Problem> {
        let stream = self.route.take().await?;
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|error| self.broken(&error))?;
        // The task ends with the connection, whose errors also reach the request.
        tokio::spawn(connection);
        let body = match body {
            Some(body) => {
                request = request.header("content-type", "application/json");
                serde_json::to_vec(body)
                    .map_err(|error| Problem::Typed(format!("can't be sent: {error}")))?
            }
            None => Vec::new(),
        };
        let request = request
            .body(Full::new(Bytes::from(body)))
            .map_err(|_| Problem::Typed(format!("`{path}` is not a name")))?;
        sender.send_request(request).await.map_err(|error| self.broken(&error))
    }

    async fn body(&self, response: Response<Incoming>) -> Result<Bytes, Problem> {
        let body = Limited::new(response.into_body(), BODY_BYTES_MAX);
        Ok(body.collect().await.map_err(|error| self.broken(&*error))?.to_bytes())
    }

    /// The problem of a failed connection.
    fn broken(&self, error: &(dyn Error + 'static)) -> Problem {
        broken(self.route.to_string(), error)
    }

    /// The connection broke, or the agent does not answer.
    #[must_use]
    pub fn disconnected(&self, why: String) -> Problem {
        Problem::Lost { at: self.route.to_string(), why }
    }
}

/// The problem of a failed connection to the agent at `at`.
///
/// An agent that rejects the certificate reports that only at the first read.
fn broken(at: String, error: &(dyn Error + 'static)) -> Problem {
    match identity::explain(error) {
        Some(why) => Problem::Insecure { at, why },
        None => Problem::Lost { at, why: reason(error) },
    }
}

/// Why a connection failed, with all causes: errors of HTTP name only the step.
fn reason(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        text = format!("{text}: {error}");
        next = error.source();
    }
    text
}

fn request(method: Method, path: &str) -> Builder {
    Request::builder().method(method).uri(path).header("host", "droveway")
}

/// The text of a response that is not 2xx.
fn refusal(bytes: &[u8]) -> String {
    match serde_json::from_slice::<api::ErrorBody>(bytes) {
        Ok(body) => body.error,
        Err(_) => String::from_utf8_lossy(bytes).trim().to_owned(),
    }
}

/// A stream of lines of JSON.
pub struct Lines {
    body: Incoming,
    ready: Vec<u8>,
    at: String,
}

impl Lines {
    /// The next value; none at the end.
    ///
    /// The future can be dropped at any time: data that has arrived stays for the next call.
    ///
    /// # Errors
    /// If the connection is lost, or the line is no such value.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, Problem> {
        let Some(line) = self.line().await? else { return Ok(None) };
        serde_json::from_slice(&line).map(Some).map_err(|e| self.disconnected(&e))
    }

    /// The next line.
    async fn line(&mut self) -> Result<Option<Vec<u8>>, Problem> {
        loop {
            if let Some(end) = self.ready.iter().position(|&byte| byte == b'\n') {
                return Ok(Some(self.ready.drain(..=end).collect()));
            }
            if self.ready.len() > LINE_BYTES_MAX {
                return Err(self.disconnected(&"a line without an end"));
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Some(data) = frame.data_ref() {
                        self.ready.extend_from_slice(data);
                    }
                }
                Some(Err(error)) => return Err(broken(self.at.clone(), &error)),
                None => return Ok(None),
            }
        }
    }

    fn disconnected(&self, why: &dyn std::fmt::Display) -> Problem {
        Problem::Lost { at: self.at.clone(), why: why.to_string() }
    }
}

/// A name as one segment of a path.
///
/// Special characters are percent-encoded, so that a wrong name reaches the agent's check instead
/// of another route.
#[must_use]
pub fn segment(name: &str) -> String {
    use std::fmt::Write;
    let mut out = String::new();
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.') {
            out.push(char::from(byte));
        } else {
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_one_segment() {
        for (name, path) in
            [("web1", "web1"), ("a/b", "a%2Fb"), ("ä?", "%C3%A4%3F"), ("..", ".."), ("", "")]
        {
            assert_eq!(segment(name), path);
        }
    }

    #[test]
    fn a_refusal_is_its_text() {
        assert_eq!(refusal(br#"{"error":"no such VM"}"#), "no such VM");
        assert_eq!(refusal(b"plain \n"), "plain");
    }

    #[test]
    fn a_lost_connection_has_all_its_causes() {
        #[derive(Debug, thiserror::Error)]
        #[error("error reading a body")]
        struct Http(#[source] std::io::Error);
        let error = Http(std::io::ErrorKind::TimedOut.into());
        assert_eq!(reason(&error), "error reading a body: timed out");
    }

    #[tokio::test]
    async fn without_an_agent_the_error_names_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let client = Client::new(Route::Socket(dir.path().join("none.sock")));
        let error = client.get::<()>("/v1/host").await.unwrap_err().to_string();
        assert!(error.contains("droveway agent") && error.contains("--api"), "{error}");
    }
}
