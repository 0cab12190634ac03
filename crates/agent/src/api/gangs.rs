//! Gangs in the API, `/v1/gangs`, and hosts as coordinators see them, `/v1/hosts`.

use std::sync::Arc;

use api::{GangProgress, GangReport, GangRequest, GangStarted, HostCensus};
use axum::extract::State;
use axum::response::Response;
use axum::{Extension, Json};

use super::answer::{Answer, Created, blocking, created};
use super::caller::Caller;
use super::parts::Api;
use super::progress::{LOOK, stream};
use super::request::{Body, Name};
use crate::denied::Denied;

pub(super) async fn census(State(api): State<Api>, Name(host): Name) -> Answer<HostCensus> {
    blocking(move || api.gangs.census(&host)).await.map(Json)
}

pub(super) async fn list(State(api): State<Api>) -> Answer<Vec<GangProgress>> {
    blocking(move || api.gangs.list()).await.map(Json)
}

pub(super) async fn start(
    State(api): State<Api>,
    Body(request): Body<GangRequest>,
) -> Created<GangStarted> {
    api.check_open()?;
    blocking(move || api.gangs.start(&request)).await.map(created)
}

pub(super) async fn resume(State(api): State<Api>, Name(id): Name) -> Created<GangStarted> {
    api.check_open()?;
    blocking(move || api.gangs.resume(&id)).await.map(created)
}

pub(super) async fn show(State(api): State<Api>, Name(id): Name) -> Answer<GangProgress> {
    blocking(move || api.gangs.show(&id)).await.map(Json)
}

pub(super) async fn watch(
    State(api): State<Api>,
    caller: Option<Extension<Caller>>,
    Name(id): Name,
) -> Result<Response, Denied> {
    let (shown, its) = (Arc::clone(&api.gangs), id.clone());
    let show = move || shown.show(&its);
    let wait = move |version| api.gangs.wait(&id, version, LOOK);
    stream(&api.watchers, caller.as_deref(), show, wait, |last| last.outcome.is_some()).await
}

pub(super) async fn cancel(State(api): State<Api>, Name(id): Name) -> Answer<()> {
    blocking(move || api.gangs.cancel(&id)).await.map(Json)
}

pub(super) async fn report(State(api): State<Api>, Name(id): Name) -> Answer<GangReport> {
    blocking(move || api.gangs.report(&id)).await.map(Json)
}
