//! Migrations in the API, `/v1/migrations`.

use std::sync::Arc;

use api::{Bounds, BoundsChange, MigrateRequest, MigrationStarted, Progress, Report};
use axum::extract::State;
use axum::response::Response;
use axum::{Extension, Json};

use super::answer::{Answer, Created, blocking, created};
use super::caller::{Caller, may_migrate};
use super::parts::Api;
use super::progress::{LOOK, stream};
use super::request::{Body, Name};
use crate::denied::Denied;

pub(super) async fn list(State(api): State<Api>) -> Json<Vec<Progress>> {
    Json(api.migrations.list())
}

pub(super) async fn start(
    State(api): State<Api>,
    caller: Option<Extension<Caller>>,
    Body(request): Body<MigrateRequest>,
) -> Created<MigrationStarted> {
    may_migrate(caller.as_deref(), &request)?;
    let start = move || {
        let vm = request.vm.clone();
        api.migrations.start(request).map_err(|denied| api.located(denied, &vm))
    };
    let id = blocking(start).await?;
    Ok(created(MigrationStarted { id }))
}

pub(super) async fn show(State(api): State<Api>, Name(id): Name) -> Answer<Progress> {
    blocking(move || api.migrations.show(&id)).await.map(Json)
}

pub(super) async fn set(
    State(api): State<Api>,
    Name(id): Name,
    Body(change): Body<BoundsChange>,
) -> Answer<Bounds> {
    blocking(move || api.migrations.set(&id, change)).await.map(Json)
}

pub(super) async fn watch(
    State(api): State<Api>,
    caller: Option<Extension<Caller>>,
    Name(id): Name,
) -> Result<Response, Denied> {
    let (shown, its) = (Arc::clone(&api.migrations), id.clone());
    let show = move || shown.show(&its);
    let wait = move |version| api.migrations.wait(&id, version, LOOK);
    stream(&api.watchers, caller.as_deref(), show, wait, |last| last.outcome.is_some()).await
}

pub(super) async fn cancel(State(api): State<Api>, Name(id): Name) -> Answer<()> {
    blocking(move || api.migrations.cancel(&id)).await.map(Json)
}

pub(super) async fn report(State(api): State<Api>, Name(id): Name) -> Answer<Report> {
    blocking(move || Ok((*api.migrations.report(&id)?).clone())).await.map(Json)
}
