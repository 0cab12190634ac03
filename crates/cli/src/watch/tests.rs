//! Watching an agent that does not answer as usual.

use std::future::{pending, ready};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use api::{Outcome, Progress};
use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum::routing::{get, post};
use axum::{Json, Router};
use client::{Client, Operation, Problem, Route};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixListener;
use tokio::time::timeout;

use super::follow::Said;
use super::*;

/// An agent with some routes.
struct Site {
    client: Client,
    _dir: tempfile::TempDir,
}

impl Site {
    fn new(router: Router) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("api.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        tokio::spawn(axum::serve(listener, router).into_future());
        Self { client: Client::new(Route::Socket(socket)), _dir: dir }
    }

    async fn follow(&self, signals: u32) -> Result<Followed<Progress>, Problem> {
        follow(&self.client, &operation(), &mut Signals::given(signals), &mut Silent).await
    }
}

fn operation() -> Operation {
    Operation::Migration("1".to_owned())
}

/// Shows nothing.
struct Silent;

impl Shown for Silent {
    type State = Progress;
    const CANCELLING: &str = "cancelling";
    const LOST: &str = "lost";
    const UNSEEN: &str = "unseen";

    fn show(&mut self, _: &Progress) {}

    fn say(&self, _: &str) {}

    fn is_over(state: &Progress) -> bool {
        state.outcome.is_some()
    }
}

fn progress(outcome: Option<Outcome>) -> Progress {
    Progress { outcome, ..Progress::new(("1", "web1"), ("a", "b"), 1) }
}

fn ended() -> Router {
    let state = || async { Json(progress(Some(Outcome::Done))) };
    Router::new().route("/v1/migrations/1", get(state))
}

fn is_done(followed: &Result<Followed<Progress>, Problem>) -> bool {
    matches!(followed, Ok(Followed::Ended(last)) if last.outcome == Some(Outcome::Done))
}

#[tokio::test]
async fn an_agent_with_too_many_watchers_is_asked_now_and_then() {
    let full = || async {
        let body = r#"{"error":"others follow","code":"too-many-watchers"}"#;
        (StatusCode::SERVICE_UNAVAILABLE, body)
    };
    let site = Site::new(ended().route("/v1/migrations/1/progress", get(full)));
    assert!(is_done(&site.follow(0).await));
}

#[tokio::test]
async fn an_agent_with_too_many_connections_is_asked_again() {
    let full = || (StatusCode::SERVICE_UNAVAILABLE, r#"{"error":"too many"}"#).into_response();
    let was_asked = Arc::new(AtomicBool::new(false));
    let state = move || {
        let is_full = !was_asked.swap(true, SeqCst);
        let ended = Json(progress(Some(Outcome::Done)));
        async move { if is_full { full() } else { ended.into_response() } }
    };
    let router = Router::new().route("/v1/migrations/1", get(state));
    let lines = move || async move { full() };
    let site = Site::new(router.route("/v1/migrations/1/progress", get(lines)));
    assert!(is_done(&site.follow(0).await));
}

#[tokio::test]
async fn a_watcher_that_was_given_up_asks_for_the_end() {
    let line = || async { serde_json::to_string(&progress(None)).unwrap() + "\n" };
    let site = Site::new(ended().route("/v1/migrations/1/progress", get(line)));
    assert!(is_done(&site.follow(0).await));
    // After a restart the agent does not know the operation.
    let site = Site::new(Router::new().route("/v1/migrations/1/progress", get(line)));
    let lost = site.follow(0).await.err().map(|problem| problem.to_string());
    assert_eq!(lost.as_deref(), Some("lost"));
}

#[tokio::test]
async fn a_user_whose_connection_breaks_is_told_where_to_look() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("api.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        assert_ne!(stream.read(&mut [0; 1024]).await.unwrap(), 0);
        // As of an agent that is killed: the response has no end.
        let head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
        stream.write_all(head).await.unwrap();
    });
    let client = Client::new(Route::Socket(socket));
    let followed = follow(&client, &operation(), &mut Signals::given(0), &mut Silent).await;
    let said = followed.err().map(|problem| problem.to_string()).unwrap_or_default();
    assert!(
        said.starts_with("lost the connection to the agent at ") && said.ends_with(". unseen"),
        "{said}"
    );
}

#[tokio::test]
async fn the_reason_for_leaving_is_what_the_agent_said() {
    let late = || async { (StatusCode::CONFLICT, r#"{"error":"it is too late"}"#) };
    let cancelled = || async {};
    for (cancel, expected) in
        [(post(late), Said::No), (post(cancelled), Said::Yes), (post(pending::<()>), Said::Nothing)]
    {
        let silent = Router::new().route("/v1/migrations/1/progress", get(pending::<()>));
        let site = Site::new(silent.route("/v1/migrations/1/cancel", cancel));
        let followed = site.follow(2).await;
        assert!(
            matches!(followed, Ok(Followed::Left { said }) if said == expected),
            "{expected:?}"
        );
    }
}

#[tokio::test]
async fn a_signal_before_the_answer_cancels_what_then_begins() {
    let mut signals = Signals::given(1);
    let answer = async {
        tokio::task::yield_now().await;
        Ok(7)
    };
    assert!(matches!(begin(answer, &mut signals).await, Ok(Some(7))));
    timeout(Duration::from_secs(10), signals.next()).await.expect("it is kept");
}

#[tokio::test]
async fn what_goes_on_is_waited_for_until_the_second_signal() {
    let answer = async {
        tokio::task::yield_now().await;
        Ok(7)
    };
    let answered = wait(answer, &mut Signals::given(1), pending(), "it goes on").await;
    assert!(matches!(answered, Ok(Some(7))));
    let asking = pending::<Result<(), Problem>>;
    let left = wait(asking(), &mut Signals::given(2), pending(), "it goes on").await;
    assert!(matches!(left, Ok(None)));
    // `timeout` sends one signal.
    let left = wait(asking(), &mut Signals::given(0), ready(()), "it goes on").await;
    assert!(matches!(left, Ok(None)));
}

#[tokio::test]
async fn the_second_signal_leaves_an_agent_that_does_not_answer() {
    let asking = pending::<Result<(), Problem>>();
    assert!(matches!(begin(asking, &mut Signals::given(2)).await, Ok(None)));
    let site = Site::new(Router::new().route("/v1/migrations/1/report", get(pending::<()>)));
    let none: Result<(), Problem> =
        report(&site.client, &operation(), &mut Signals::given(1)).await;
    assert!(none.is_err());
}
