//! Orders from forms: to move a VM, to plan and start an evacuation, to cancel.
//!
//! Also requests to agents for a single page.

use std::time::Duration;

use api::{
    Evacuation, GangRequest, GangStarted, MigrationStarted, PARALLEL_DEFAULT, Report, RequestedMove,
};
use axum::extract::{Query, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Redirect, Response};
use client::{Client, GANGS, NOTHING, Operation, Problem};
use report::html;
use serde::Deserialize;
use tokio::time::timeout;

use super::choice::Choice;
use super::guard::Fields;
use super::pages;
use super::site::{Dashboard, Site, page};

/// How long an agent may take.
///
/// Planning a gang may take a minute, because QEMUs are started to probe their capabilities.
const ORDER_MAX: Duration = Duration::from_secs(120);

#[derive(Deserialize)]
#[serde(default)]
#[derive(Default)]
pub(super) struct Moving {
    vm: String,
    from: String,
}

pub(super) async fn move_form(State(site): Site, Query(moving): Query<Moving>) -> Response {
    site.cluster.refresh().await;
    let known = site.cluster.known();
    let Some(vm) = known.vm(&moving.from, &moving.vm) else {
        return page(StatusCode::NOT_FOUND, pages::problem("That host has no VM of that name."));
    };
    page(StatusCode::OK, pages::move_form(&known, &moving.from, vm, &site.gate))
}

pub(super) async fn start_move(State(site): Site, fields: Fields) -> Response {
    let choice = match Choice::parse(fields.text("downtime_ms"), fields.text("disks")) {
        Ok(choice) => choice,
        Err(text) => return page(StatusCode::BAD_REQUEST, pages::problem(&text)),
    };
    let [vm, from, to] = ["vm", "from", "to"].map(|name| fields.text(name).to_owned());
    let started = match site.cluster.agent_of(&from) {
        Some(agent) => {
            let request = choice.options().request(&vm, &to);
            let asked = agent.request(Method::POST, "/v1/migrations", Some(&request));
            in_time(&agent, asked).await.map(|_: MigrationStarted| ())
        }
        // Any agent can order another one to move a VM.
        None => {
            let wanted = RequestedMove { vm, from: Some(from), to };
            let request = gang(vec![wanted], None, &choice, false);
            let agent = site.cluster.any();
            let asked = agent.request(Method::POST, GANGS, Some(&request));
            in_time(&agent, asked).await.map(|_: GangStarted| ())
        }
    };
    ordered(&site, started)
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Planning {
    host: String,
    downtime_ms: String,
    disks: String,
}

/// Shows a plan; a dry run moves nothing, so a link may request it.
pub(super) async fn plan(State(site): Site, Query(planning): Query<Planning>) -> Response {
    site.cluster.refresh().await;
    let Planning { host, downtime_ms, disks } = planning;
    let choice = match Choice::parse(&downtime_ms, &disks) {
        Ok(choice) => choice,
        Err(text) => return page(StatusCode::BAD_REQUEST, pages::problem(&text)),
    };
    if host.is_empty() {
        let known = site.cluster.known();
        return page(StatusCode::OK, pages::evacuation(&known, None, &choice, &site.gate));
    }
    let request = gang(Vec::new(), Some(host.clone()), &choice, true);
    let agent = site.cluster.any();
    let planned = in_time(&agent, agent.request(Method::POST, GANGS, Some(&request))).await;
    let planned = planned.map(|started: GangStarted| started.plan);
    let (status, planned) = match planned {
        Ok(plan) => (StatusCode::OK, Ok(plan)),
        Err(problem) => (status(&problem), Err(problem.to_string())),
    };
    let known = site.cluster.known();
    page(status, pages::evacuation(&known, Some((&host, &planned)), &choice, &site.gate))
}

pub(super) async fn evacuate(State(site): Site, fields: Fields) -> Response {
    let choice = match Choice::parse(fields.text("downtime_ms"), fields.text("disks")) {
        Ok(choice) => choice,
        Err(text) => return page(StatusCode::BAD_REQUEST, pages::problem(&text)),
    };
    let request = gang(Vec::new(), Some(fields.text("host").to_owned()), &choice, false);
    let agent = site.cluster.any();
    let asked = in_time(&agent, agent.request(Method::POST, GANGS, Some(&request))).await;
    ordered(&site, asked.map(|_: GangStarted| ()))
}

pub(super) async fn cancel(State(site): Site, fields: Fields) -> Response {
    let agent = fields.text("agent").parse().ok().and_then(|number| site.cluster.agent(number));
    let Some(agent) = agent else {
        return page(StatusCode::BAD_REQUEST, pages::problem("There is no such agent."));
    };
    let path = Operation::named(fields.text("id")).path();
    ordered(&site, in_time(&agent, agent.cancel(&path)).await)
}

#[derive(Deserialize)]
pub(super) struct Reported {
    id: String,
    agent: usize,
}

/// Serves a report's own page; its styles are inline, and its script does not run here.
pub(super) async fn report(State(site): Site, Query(asked): Query<Reported>) -> Response {
    let Some(agent) = site.cluster.agent(asked.agent) else {
        return page(StatusCode::NOT_FOUND, pages::problem("There is no such agent."));
    };
    let path = format!("{}/report", Operation::Migration(asked.id).path());
    let report: Report = match in_time(&agent, agent.request(Method::GET, &path, NOTHING)).await {
        Ok(report) => report,
        Err(problem) => return page(status(&problem), pages::problem(&problem.to_string())),
    };
    let policy = "default-src 'none'; style-src 'unsafe-inline'; sandbox; frame-ancestors 'none'";
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8")),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy)),
    ];
    (headers, html::page(&report)).into_response()
}

fn gang(
    moves: Vec<RequestedMove>,
    host: Option<String>,
    choice: &Choice,
    dry_run: bool,
) -> GangRequest {
    GangRequest {
        moves,
        evacuate: host.map(|host| Evacuation { host, to: Vec::new() }),
        options: choice.options(),
        parallel: PARALLEL_DEFAULT,
        atomic: false,
        dry_run,
    }
}

/// Answers an order with the first page, which shows its effect.
fn ordered(site: &Dashboard, done: Result<(), Problem>) -> Response {
    site.cluster.hurry();
    match done {
        Ok(()) => Redirect::to("./").into_response(),
        Err(problem) => page(status(&problem), pages::problem(&not_done(&problem))),
    }
}

/// Why an order was not carried out, as far as is known.
fn not_done(problem: &Problem) -> String {
    match problem {
        Problem::Lost { .. } => format!(
            "{problem}. It may be carried out anyway: check the overview before you repeat it."
        ),
        _ => problem.to_string(),
    }
}

/// An agent's answer, which may not come.
async fn in_time<T>(
    agent: &Client,
    asked: impl Future<Output = Result<T, Problem>>,
) -> Result<T, Problem> {
    timeout(ORDER_MAX, asked).await.unwrap_or_else(|_| {
        Err(agent.disconnected(format!("it has not answered within {} s", ORDER_MAX.as_secs())))
    })
}

fn status(problem: &Problem) -> StatusCode {
    match problem {
        Problem::Refused(_) => StatusCode::CONFLICT,
        Problem::NotNow(_) => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::BAD_GATEWAY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_without_an_answer_is_not_said_to_have_failed() {
        let lost = Problem::Lost { at: "/s".to_owned(), why: "no answer".to_owned() };
        let said = not_done(&lost);
        assert!(said.contains("no answer. It may be carried out anyway"), "{said}");
        assert_eq!(not_done(&Problem::Refused("no room".to_owned())), "no room");
    }
}
