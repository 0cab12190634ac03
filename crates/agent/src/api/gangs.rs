//! Gangs in the API, `/v1/gangs`, and hosts as coordinators see them, `/v1/hosts`.

use api::{GangProgress, GangReport, GangRequest, GangStarted, HostCensus};
use axum::extract::{Path, State};
use axum::response::Response;
use axum::{Extension, Json};

use super::answer::{self, Answer};
use super::people::Caller;
use super::{Api, Body, Name, asked_wrong, blocking, named_wrong, progress};

pub(super) async fn census(State(api): State<Api>, host: Name) -> Answer<HostCensus> {
    match host.map_err(named_wrong) {
        Ok(Path(host)) => blocking(move || api.gangs.census(&host)).await.into(),
        Err(denied) => Answer::denied(denied),
    }
}

pub(super) async fn list(State(api): State<Api>) -> Answer<Vec<GangProgress>> {
    blocking(move || api.gangs.list()).await.into()
}

pub(super) async fn start(State(api): State<Api>, body: Body<GangRequest>) -> Answer<GangStarted> {
    match body.map_err(asked_wrong).and_then(|Json(request)| api.open().map(|()| request)) {
        Ok(request) => Answer::created(blocking(move || api.gangs.start(&request)).await),
        Err(denied) => Answer::denied(denied),
    }
}

pub(super) async fn resume(State(api): State<Api>, id: Name) -> Answer<GangStarted> {
    match id.map_err(named_wrong).and_then(|Path(id)| api.open().map(|()| id)) {
        Ok(id) => Answer::created(blocking(move || api.gangs.resume(&id)).await),
        Err(denied) => Answer::denied(denied),
    }
}

pub(super) async fn show(State(api): State<Api>, id: Name) -> Answer<GangProgress> {
    match id.map_err(named_wrong) {
        Ok(Path(id)) => blocking(move || api.gangs.show(&id)).await.into(),
        Err(denied) => Answer::denied(denied),
    }
}

pub(super) async fn watch(
    State(api): State<Api>,
    caller: Option<Extension<Caller>>,
    id: Name,
) -> Response {
    let caller = caller.as_deref();
    match id.map_err(named_wrong) {
        Ok(Path(id)) => progress::of_gang(api.gangs, id, &api.watchers, caller).await,
        Err(denied) => answer::refusal(&denied),
    }
}

pub(super) async fn cancel(State(api): State<Api>, id: Name) -> Answer<()> {
    match id.map_err(named_wrong) {
        Ok(Path(id)) => blocking(move || api.gangs.cancel(&id)).await.into(),
        Err(denied) => Answer::denied(denied),
    }
}

pub(super) async fn report(State(api): State<Api>, id: Name) -> Answer<GangReport> {
    match id.map_err(named_wrong) {
        Ok(Path(id)) => blocking(move || api.gangs.report(&id)).await.into(),
        Err(denied) => Answer::denied(denied),
    }
}
