//! VMs in the API, `/v1/vms`.

use api::{
    AttachRequest, MigrationStarted, PlanUpgradeRequest, PredictRequest, Prediction,
    ResolveRequest, RunRequest, StopHow, Stopped, UpgradePlan, UpgradeRequest, VmSummary,
};
use axum::extract::State;
use axum::http::Method;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};

use super::answer::{Answer, Created, blocking, created, no_method};
use super::caller::{Caller, shown_to};
use super::parts::Api;
use super::request::{Body, Name, Options};
use crate::denied::Denied;

pub(super) async fn list(
    State(api): State<Api>,
    caller: Option<Extension<Caller>>,
) -> Answer<Vec<VmSummary>> {
    let list = move || {
        let mut vms = api.registry.list();
        vms.extend(api.domains_in_doubt());
        Ok(vms)
    };
    let vms = blocking(list).await?;
    Ok(Json(vms.into_iter().map(|vm| shown_to(caller.as_deref(), vm)).collect()))
}

pub(super) async fn run(
    State(api): State<Api>,
    Body(request): Body<RunRequest>,
) -> Created<VmSummary> {
    api.check_open()?;
    blocking(move || api.registry.run(&request, api.examiner.probes())).await.map(created)
}

pub(super) async fn attach(
    State(api): State<Api>,
    Body(request): Body<AttachRequest>,
) -> Created<VmSummary> {
    api.check_open()?;
    blocking(move || api.registry.attach(&request)).await.map(created)
}

pub(super) async fn show(
    State(api): State<Api>,
    caller: Option<Extension<Caller>>,
    Name(name): Name,
) -> Answer<VmSummary> {
    let examine = move || {
        let domain = api.domains_in_doubt().into_iter().find(|domain| domain.name == name);
        domain.map_or_else(|| api.registry.examine(&name), Ok)
    };
    let vm = blocking(examine).await?;
    Ok(Json(shown_to(caller.as_deref(), vm)))
}

pub(super) async fn stop(
    State(api): State<Api>,
    Name(name): Name,
    Options(how): Options<StopHow>,
) -> Answer<Stopped> {
    let stop = move || {
        api.settlers.left(&name);
        api.registry.stop(&name, how)
    };
    blocking(stop).await.map(Json)
}

/// Shows or stops the VM `attach`: its path is also that of the order to adopt a VM.
pub(super) async fn named_attach(
    api: State<Api>,
    method: Method,
    caller: Option<Extension<Caller>>,
    how: Result<Options<StopHow>, Denied>,
) -> Result<Response, Denied> {
    let name = Name("attach".to_owned());
    match method {
        Method::GET | Method::HEAD => Ok(show(api, caller, name).await.into_response()),
        Method::DELETE => Ok(stop(api, name, how?).await.into_response()),
        _ => Ok(no_method().await),
    }
}

pub(super) async fn resolve(
    State(api): State<Api>,
    Name(name): Name,
    Body(request): Body<ResolveRequest>,
) -> Answer<Option<VmSummary>> {
    let decide = move || {
        let domain = api.domains.as_ref().and_then(|domains| domains.decide(&name, request));
        match domain {
            Some(decided) => decided.map(|()| None),
            None => api.settlers.decide(&name, request),
        }
    };
    blocking(decide).await.map(Json)
}

pub(super) async fn predict(
    State(api): State<Api>,
    Name(name): Name,
    Body(request): Body<PredictRequest>,
) -> Answer<Prediction> {
    blocking(move || api.predict(&name, &request)).await.map(Json)
}

pub(super) async fn plan_upgrade(
    State(api): State<Api>,
    Name(name): Name,
    Body(request): Body<PlanUpgradeRequest>,
) -> Answer<UpgradePlan> {
    blocking(move || api.plan_upgrade(&name, &request)).await.map(Json)
}

pub(super) async fn upgrade(
    State(api): State<Api>,
    Name(name): Name,
    Body(request): Body<UpgradeRequest>,
) -> Created<MigrationStarted> {
    api.check_open()?;
    let id = blocking(move || api.upgrade(&name, request)).await?;
    Ok(created(MigrationStarted { id }))
}
