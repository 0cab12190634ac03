//! The API of an agent: HTTP and JSON, on a unix socket and, for people with certificates,
//! over TCP.

mod answer;
mod document;
mod events;
mod gangs;
mod metrics;
mod people;
mod predict;
mod progress;
mod routes;

use std::sync::{Arc, LazyLock};

use api::{
    AttachRequest, Bounds, BoundsChange, ErrorCode, Examination, HostInfo, MigrateRequest,
    MigrationStarted, PeerInfo, PredictRequest, Prediction, Progress, Report, RunRequest,
};
use api::{ResolveRequest, StopHow, Stopped, VmSummary};
use axum::extract::rejection::{JsonRejection, PathRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, Path, Query, State};
use axum::http::Method;
use axum::response::{IntoResponse, Response};
use axum::routing::MethodRouter;
use axum::{Extension, Json, Router};
use identity::Identity;
use serde_json::Value;

use crate::config::PeerEntry;
use crate::denied::Denied;
use crate::events::Events;
use crate::examiner::Examiner;
use crate::gangs::Gangs;
use crate::migrations::Migrations;
use crate::peers::Peers;
use crate::recovery::Settlers;
use crate::registry::Registry;
use answer::Answer;
pub(crate) use metrics::{CachedText, serve as serve_metrics};
use people::Caller;
pub(crate) use people::Port;
pub(crate) use progress::Watchers;
use routes::routes;

/// The longest body; a command line with a thousand disks has some 100 KB.
const BODY_BYTES_MAX: usize = 1 << 20;

/// The state from which requests are answered.
#[derive(Clone)]
pub(crate) struct Api {
    /// This host, without its peers.
    pub(crate) host: Arc<HostInfo>,
    pub(crate) peers: Peers,
    pub(crate) registry: Arc<Registry>,
    pub(crate) settlers: Arc<Settlers>,
    pub(crate) migrations: Arc<Migrations>,
    pub(crate) gangs: Arc<Gangs>,
    pub(crate) examiner: Arc<Examiner>,
    pub(crate) events: Arc<Events>,
    /// This host's certificate, if connections are encrypted.
    pub(crate) identity: Option<Arc<Identity>>,
    pub(crate) watchers: Watchers,
    /// What `/metrics` answers, at the API and at an address of its own.
    pub(crate) metrics: CachedText,
    pub(crate) closing: tokio::sync::watch::Receiver<bool>,
}

/// All routes.
pub(crate) fn router(api: Api) -> Router {
    let routes = routes().into_iter();
    routes
        .fold(Router::new(), |router, route| router.route(route.path, route.handler))
        .route("/v1/vms/attach", MethodRouter::new().fallback(vm_named_attach))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(api)
}

type Body<T> = Result<Json<T>, JsonRejection>;
type Name = Result<Path<String>, PathRejection>;

async fn host(State(api): State<Api>) -> Json<HostInfo> {
    let peer = |peer: &PeerEntry| PeerInfo {
        name: peer.name.clone(),
        rack: peer.rack.clone(),
        address: peer.address.to_string(),
    };
    let peers = api.peers.now().iter().map(peer).collect();
    Json(HostInfo { peers, ..(*api.host).clone() })
}

async fn doctor(State(api): State<Api>) -> Answer<Examination> {
    blocking(move || Ok(api.examiner.examine_host())).await.into()
}

async fn doctor_of_pair(State(api): State<Api>, host: Name) -> Answer<Examination> {
    match host.map_err(named_wrong) {
        Ok(Path(host)) => blocking(move || api.examiner.examine_pair(&host)).await.into(),
        Err(denied) => Answer::denied(denied),
    }
}

async fn list(State(api): State<Api>, caller: Option<Extension<Caller>>) -> Answer<Vec<VmSummary>> {
    let shown = move |vm| people::shown_to(caller.as_deref(), vm);
    let list = move || Ok(api.registry.list().into_iter().map(shown).collect::<Vec<_>>());
    blocking(list).await.into()
}

async fn run(State(api): State<Api>, body: Body<RunRequest>) -> Answer<VmSummary> {
    let asked = body.map_err(asked_wrong).and_then(|Json(request)| {
        api.open()?;
        Ok(request)
    });
    match asked {
        Ok(request) => Answer::created(
            blocking(move || api.registry.run(&request, api.examiner.probes())).await,
        ),
        Err(denied) => Answer::denied(denied),
    }
}

async fn attach(State(api): State<Api>, body: Body<AttachRequest>) -> Answer<VmSummary> {
    match body.map_err(asked_wrong).and_then(|Json(request)| api.open().map(|()| request)) {
        Ok(request) => Answer::created(blocking(move || api.registry.attach(&request)).await),
        Err(denied) => Answer::denied(denied),
    }
}

async fn show(
    State(api): State<Api>,
    caller: Option<Extension<Caller>>,
    name: Name,
) -> Answer<VmSummary> {
    let shown = move |vm| people::shown_to(caller.as_deref(), vm);
    match name.map_err(named_wrong) {
        Ok(Path(name)) => blocking(move || api.registry.examine(&name).map(shown)).await.into(),
        Err(denied) => Answer::denied(denied),
    }
}

async fn stop(
    State(api): State<Api>,
    name: Name,
    how: Result<Query<StopHow>, QueryRejection>,
) -> Answer<Stopped> {
    let how = how.map_err(|rejection| Denied::Asked(rejection.body_text()));
    match (name.map_err(named_wrong), how) {
        (Ok(Path(name)), Ok(Query(how))) => {
            let stop = move || {
                api.settlers.left(&name);
                api.registry.stop(&name, how)
            };
            blocking(stop).await.into()
        }
        (Err(denied), _) | (_, Err(denied)) => Answer::denied(denied),
    }
}

/// Shows or stops the VM `attach`: its path is also that of the order to adopt a VM.
async fn vm_named_attach(
    api: State<Api>,
    method: Method,
    caller: Option<Extension<Caller>>,
    how: Result<Query<StopHow>, QueryRejection>,
) -> Response {
    let name = Ok(Path("attach".to_owned()));
    match method {
        Method::GET | Method::HEAD => show(api, caller, name).await.into_response(),
        Method::DELETE => stop(api, name, how).await.into_response(),
        _ => no_method().await,
    }
}

async fn resolve(
    State(api): State<Api>,
    name: Name,
    body: Body<ResolveRequest>,
) -> Answer<Option<VmSummary>> {
    match (name.map_err(named_wrong), body.map_err(asked_wrong)) {
        (Ok(Path(name)), Ok(Json(request))) => {
            blocking(move || api.settlers.decide(&name, request)).await.into()
        }
        (Err(denied), _) | (_, Err(denied)) => Answer::denied(denied),
    }
}

async fn predict(
    State(api): State<Api>,
    name: Name,
    body: Body<PredictRequest>,
) -> Answer<Prediction> {
    match (name.map_err(named_wrong), body.map_err(asked_wrong)) {
        (Ok(Path(name)), Ok(Json(request))) => {
            blocking(move || api.predict(&name, &request)).await.into()
        }
        (Err(denied), _) | (_, Err(denied)) => Answer::denied(denied),
    }
}

async fn migrations(State(api): State<Api>) -> Answer<Vec<Progress>> {
    Ok(api.migrations.list()).into()
}

async fn migrate(
    State(api): State<Api>,
    caller: Option<Extension<Caller>>,
    body: Body<MigrateRequest>,
) -> Answer<MigrationStarted> {
    let asked = body.map_err(asked_wrong).and_then(|Json(request)| {
        people::may_migrate(caller.as_deref(), &request)?;
        Ok(request)
    });
    match asked {
        Ok(request) => Answer::created(blocking(move || api.migrate(request)).await),
        Err(denied) => Answer::denied(denied),
    }
}

async fn migration(State(api): State<Api>, id: Name) -> Answer<Progress> {
    match id.map_err(named_wrong) {
        Ok(Path(id)) => blocking(move || api.migrations.show(&id)).await.into(),
        Err(denied) => Answer::denied(denied),
    }
}

async fn set(State(api): State<Api>, id: Name, body: Body<BoundsChange>) -> Answer<Bounds> {
    match (id.map_err(named_wrong), body.map_err(asked_wrong)) {
        (Ok(Path(id)), Ok(Json(change))) => {
            blocking(move || api.migrations.set(&id, change)).await.into()
        }
        (Err(denied), _) | (_, Err(denied)) => Answer::denied(denied),
    }
}

async fn watch(State(api): State<Api>, caller: Option<Extension<Caller>>, id: Name) -> Response {
    let caller = caller.as_deref();
    match id.map_err(named_wrong) {
        Ok(Path(id)) => progress::of_migration(api.migrations, id, &api.watchers, caller).await,
        Err(denied) => answer::refusal(&denied),
    }
}

async fn cancel(State(api): State<Api>, id: Name) -> Answer<()> {
    match id.map_err(named_wrong) {
        Ok(Path(id)) => blocking(move || api.migrations.cancel(&id)).await.into(),
        Err(denied) => Answer::denied(denied),
    }
}

async fn report(State(api): State<Api>, id: Name) -> Answer<Report> {
    match id.map_err(named_wrong) {
        Ok(Path(id)) => blocking(move || Ok((*api.migrations.report(&id)?).clone())).await.into(),
        Err(denied) => Answer::denied(denied),
    }
}

/// The document, which never changes while the agent runs.
static DOCUMENT: LazyLock<Value> = LazyLock::new(|| document::of(routes()));

async fn openapi() -> Json<&'static Value> {
    Json(&DOCUMENT)
}

async fn no_route() -> Response {
    let text = "there is no such path in the API: is the agent as new as the command?";
    answer::error(ErrorCode::NoSuchPath, text)
}

async fn no_method() -> Response {
    answer::error(ErrorCode::MethodNotAllowed, "this path has another method")
}

impl Api {
    fn open(&self) -> Result<(), Denied> {
        if *self.closing.borrow() { Err(Denied::Closing) } else { Ok(()) }
    }

    fn migrate(&self, request: MigrateRequest) -> Result<MigrationStarted, Denied> {
        let vm = request.vm.clone();
        match self.migrations.start(request) {
            Ok(id) => Ok(MigrationStarted { id }),
            Err(denied) => Err(self.located(denied, &vm)),
        }
    }

    /// Adds where a VM is, if it is not here and that is known.
    fn located(&self, denied: Denied, vm: &str) -> Denied {
        if denied.code() != ErrorCode::NoSuchVm {
            return denied;
        }
        let hosts = self.gangs.hosts_of(vm);
        let place = if hosts.is_empty() {
            let Some(Progress { id, to, .. }) = self.migrations.last_that_moved(vm) else {
                return denied;
            };
            format!("migration {id} has moved it to {to}")
        } else {
            format!("it is at {}", hosts.join(" and at "))
        };
        let text = format!("there is no VM `{vm}` here: {place}. Run the command on that host");
        Denied::Coded(ErrorCode::NoSuchVm, text)
    }
}

/// Runs `work` on a blocking thread: QEMU is asked over blocking sockets, and may be slow.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Denied> + Send + 'static,
) -> Result<T, Denied> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|_| Err(Denied::Local("a fault in the agent; see its log".to_owned())))
}

#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn asked_wrong(rejection: JsonRejection) -> Denied {
    Denied::Asked(rejection.body_text())
}

#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn named_wrong(rejection: PathRejection) -> Denied {
    Denied::Asked(rejection.body_text())
}

#[cfg(test)]
mod tests;
