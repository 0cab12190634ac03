mod connections;
mod events;
mod gangs;
mod metrics;
mod openapi;
mod secrets;

use std::sync::Arc;

use api::{ErrorCode, Examination, HostInfo};
use axum::body::Body as AxumBody;
use axum::http::Request;
use engine::Local;
use http_body_util::BodyExt;
use identity::Identity;
use switchover::journal::JournalDir;
use tower::ServiceExt;

use super::*;
use crate::events::{Events, Limits};
use crate::examiner::Examiner;
use crate::gangs::{Gangs, OrderHandler};
use crate::moves::history::History;
use crate::moves::migrations::Migrations;
use crate::moves::recovery::Settlers;
use crate::peers::{Peers, Routes};
use crate::state::StateDir;
use crate::vms::registry::{Held, Registry};

struct Site {
    api: Api,
    router: Router,
    close: tokio::sync::watch::Sender<bool>,
    _dir: tempfile::TempDir,
}

impl Site {
    /// A host without VMs.
    fn new() -> Self {
        Self::with(Limits::default(), None)
    }

    fn with(limits: Limits, identity: Option<Arc<Identity>>) -> Self {
        Self::of(tempfile::tempdir().unwrap(), limits, identity)
    }

    /// A host with the state in `dir`.
    fn of(dir: tempfile::TempDir, limits: Limits, identity: Option<Arc<Identity>>) -> Self {
        let state = StateDir::open(dir.path()).unwrap();
        let journals = JournalDir::open(&state.journals()).unwrap();
        let registry = Registry::open(state, &Held::default()).unwrap();
        let registry = Arc::new(registry);
        let local = Local {
            agent: "here".to_owned(),
            security: identity::Security::Plaintext,
            nics: Vec::new(),
            resources: engine::Resources::new(16 << 20, Vec::new()),
            programs: Arc::new(qemu::programs::Programs::usual(None)),
            scratch: registry.state().scratch(),
            fixed_cost: Arc::default(),
            journals: journals.clone(),
            quota_notes: None,
            agent_port: 7450,
            cpu_floor: api::CpuFloor::ALL,
            waits: engine::Waits::default(),
            sharing: None,
            manager: None,
            xen: None,
        };
        let events = Events::new(limits).unwrap();
        let settlers = Settlers::new(
            Arc::clone(&registry),
            Arc::clone(&events),
            Arc::new(History::open("here", registry.state().reports())),
            journals,
            "here",
            identity::Security::Plaintext,
            Peers::default(),
        );
        let routes = Routes { peers: Peers::default(), insecure_plaintext: false };
        let listen = "127.0.0.1:7450".parse().unwrap();
        let examiner = Arc::new(Examiner::new(
            Arc::clone(&registry),
            local.clone(),
            routes.clone(),
            listen,
            Vec::new(),
            None,
            Vec::new(),
        ));
        let mover = Box::new(engine::migrate);
        let migrations = Arc::new(Migrations::new(&settlers, local, routes, mover));
        let order_handler = Arc::new(OrderHandler::new(
            Arc::clone(&migrations),
            Arc::clone(&examiner),
            Arc::clone(&registry),
            None,
            None,
            None,
        ));
        let gangs = Arc::new(Gangs::new(&order_handler, &events));
        let host = Arc::new(HostInfo {
            name: "here".to_owned(),
            rack: None,
            version: "0".to_owned(),
            pid: 1,
            listen: "127.0.0.1:7450".to_owned(),
            nics: Vec::new(),
            peers: Vec::new(),
        });
        let (close, closing) = tokio::sync::watch::channel(false);
        let api = Api {
            host,
            peers: Peers::default(),
            registry,
            settlers,
            domains: None,
            migrations,
            gangs,
            examiner,
            events,
            identity,
            watchers: Watchers::default(),
            metrics: CachedText::default(),
            closing,
        };
        Self { router: router(api.clone()), api, close, _dir: dir }
    }

    async fn ask(&self, method: &str, path: &str, body: impl Into<AxumBody>) -> (u16, Vec<u8>) {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("content-type", "application/json")
            .body(body.into())
            .unwrap();
        let response = self.router.clone().oneshot(request).await.unwrap();
        let status = response.status().as_u16();
        (status, response.into_body().collect().await.unwrap().to_bytes().to_vec())
    }

    async fn refused(
        &self,
        method: &str,
        path: &str,
        body: impl Into<AxumBody>,
    ) -> (u16, ErrorCode, String) {
        let (status, body) = self.ask(method, path, body).await;
        let error: api::ErrorBody = serde_json::from_slice(&body).unwrap_or_else(|_| {
            panic!("{method} {path}: {status} without a reason: {}", String::from_utf8_lossy(&body))
        });
        let code = error.code.unwrap_or_else(|| panic!("{method} {path}: no code"));
        (status, code, error.error)
    }
}

#[tokio::test]
async fn the_host_and_its_empty_lists() {
    let site = Site::new();
    let (status, body) = site.ask("GET", "/v1/host", "").await;
    let host: HostInfo = serde_json::from_slice(&body).unwrap();
    assert_eq!((status, host.name.as_str()), (200, "here"));
    for path in ["/v1/vms", "/v1/migrations", "/v1/gangs"] {
        assert_eq!(site.ask("GET", path, "").await, (200, b"[]".to_vec()));
    }
}

#[tokio::test]
async fn the_host_is_examined() {
    let site = Site::new();
    let (status, body) = site.ask("GET", "/v1/doctor", "").await;
    let examined: Examination = serde_json::from_slice(&body).unwrap();
    assert_eq!((status, examined.of.as_str()), (200, "here"));
    for about in ["droveway", "qemu", "memory", "state", "network card", "encryption"] {
        assert!(examined.findings.iter().any(|one| one.about == about), "{examined:#?}");
    }
    assert!(!examined.has_errors(), "{examined:#?}");
}

#[tokio::test]
async fn every_refusal_has_a_status_a_code_and_a_reason() {
    use ErrorCode::{
        InvalidRequest, MethodNotAllowed, NoSuchGang, NoSuchHost, NoSuchMigration, NoSuchPath,
        NoSuchVm, QemuFailed,
    };
    let site = Site::new();
    let argv = r#""argv":["/nonexistent/qemu"]"#;
    for (method, path, body, (status, expected), says) in [
        ("GET", "/v1/nothing", String::new(), (404, NoSuchPath), "no such path"),
        ("PUT", "/v1/vms", String::new(), (405, MethodNotAllowed), "another method"),
        ("GET", "/v1/vms/web1", String::new(), (404, NoSuchVm), "no VM `web1`"),
        ("DELETE", "/v1/vms/web1", String::new(), (404, NoSuchVm), "no VM `web1`"),
        ("DELETE", "/v1/vms/web1?force=maybe", String::new(), (400, InvalidRequest), "force"),
        ("GET", "/v1/vms/a%2Fb", String::new(), (404, NoSuchVm), "no VM `a/b`"),
        ("GET", "/v1/vms/%FF", String::new(), (400, InvalidRequest), ""),
        // Its path is also that of an order.
        ("GET", "/v1/vms/attach", String::new(), (404, NoSuchVm), "no VM `attach`"),
        ("DELETE", "/v1/vms/attach", String::new(), (404, NoSuchVm), "no VM `attach`"),
        ("DELETE", "/v1/vms/attach?force=maybe", String::new(), (400, InvalidRequest), "force"),
        ("PUT", "/v1/vms/attach", String::new(), (405, MethodNotAllowed), "another method"),
        (
            "POST",
            "/v1/vms/attach/predict",
            r#"{"to":"y","downtime_ms":60001}"#.to_owned(),
            (400, InvalidRequest),
            "outside 1 to 60000",
        ),
        ("GET", "/v1/doctor/there", String::new(), (404, NoSuchHost), "no host `there`"),
        ("GET", "/v1/hosts/there", String::new(), (404, NoSuchHost), "no host `there`"),
        ("GET", "/v1/doctor/here", String::new(), (400, InvalidRequest), "is this host"),
        ("POST", "/v1/vms", "{".to_owned(), (400, InvalidRequest), ""),
        ("POST", "/v1/vms", r#"{"name":"x"}"#.to_owned(), (400, InvalidRequest), "argv"),
        (
            "POST",
            "/v1/vms",
            format!(r#"{{"name":"../x",{argv},"cwd":"/"}}"#),
            (400, InvalidRequest),
            "is not a name",
        ),
        (
            "POST",
            "/v1/vms",
            format!(r#"{{"name":"x",{argv},"cwd":"y"}}"#),
            (400, InvalidRequest),
            "not absolute",
        ),
        (
            "POST",
            "/v1/vms",
            format!(r#"{{"name":"x",{argv},"cwd":"/"}}"#),
            (502, QemuFailed),
            "QEMU installed",
        ),
        (
            "POST",
            "/v1/vms",
            r#"{"name":"x","argv":[],"cwd":"/"}"#.to_owned(),
            (400, InvalidRequest),
            "empty",
        ),
        ("POST", "/v1/vms", " ".repeat(BODY_BYTES_MAX + 1), (400, InvalidRequest), "limit"),
        (
            "POST",
            "/v1/vms/attach",
            r#"{"name":"x","qmp":"/nonexistent"}"#.to_owned(),
            (502, QemuFailed),
            "QMP",
        ),
        (
            "POST",
            "/v1/migrations",
            r#"{"vm":"x","to":"y"}"#.to_owned(),
            (404, NoSuchHost),
            "--peers",
        ),
        (
            "POST",
            "/v1/migrations",
            r#"{"vm":"x","to":"y","colour":1}"#.to_owned(),
            (400, InvalidRequest),
            "colour",
        ),
        (
            "POST",
            "/v1/vms/web1/predict",
            r#"{"to":"y","downtime_ms":60001}"#.to_owned(),
            (400, InvalidRequest),
            "outside 1 to 60000",
        ),
        ("GET", "/v1/migrations/deadbeef", String::new(), (404, NoSuchMigration), "deadbeef"),
        (
            "GET",
            "/v1/migrations/deadbeef/progress",
            String::new(),
            (404, NoSuchMigration),
            "deadbeef",
        ),
        (
            "GET",
            "/v1/migrations/deadbeef/report",
            String::new(),
            (404, NoSuchMigration),
            "deadbeef",
        ),
        (
            "POST",
            "/v1/migrations/deadbeef/cancel",
            String::new(),
            (404, NoSuchMigration),
            "deadbeef",
        ),
        (
            "PATCH",
            "/v1/migrations/deadbeef",
            r#"{"priority":"low"}"#.to_owned(),
            (404, NoSuchMigration),
            "deadbeef",
        ),
        (
            "PATCH",
            "/v1/migrations/deadbeef",
            r#"{"priority":"top"}"#.to_owned(),
            (400, InvalidRequest),
            "priority",
        ),
        (
            "PATCH",
            "/v1/migrations/deadbeef",
            r#"{"cpus":"9-1"}"#.to_owned(),
            (400, InvalidRequest),
            "0-3,8",
        ),
        (
            "PATCH",
            "/v1/migrations/deadbeef",
            "{}".to_owned(),
            (400, InvalidRequest),
            "nothing to change",
        ),
        ("GET", "/v1/migrations/..%2Fx/report", String::new(), (404, NoSuchMigration), ""),
        ("POST", "/v1/gangs", "{}".to_owned(), (400, InvalidRequest), "no VM to move"),
        ("POST", "/v1/gangs", r#"{"colour":1}"#.to_owned(), (400, InvalidRequest), "colour"),
        (
            "POST",
            "/v1/gangs",
            r#"{"moves":[{"vm":"x","to":"y"}]}"#.to_owned(),
            (404, NoSuchHost),
            "no host `y`",
        ),
        (
            "POST",
            "/v1/gangs",
            r#"{"evacuate":{"host":"y"}}"#.to_owned(),
            (404, NoSuchHost),
            "no host `y`",
        ),
        ("GET", "/v1/gangs/gdeadbeef", String::new(), (404, NoSuchGang), "no gang `gdeadbeef`"),
        ("GET", "/v1/gangs/gdeadbeef/progress", String::new(), (404, NoSuchGang), "gdeadbeef"),
        ("GET", "/v1/gangs/..%2Fx/report", String::new(), (404, NoSuchGang), ""),
        ("POST", "/v1/gangs/gdeadbeef/cancel", String::new(), (404, NoSuchGang), "gdeadbeef"),
        ("POST", "/v1/gangs/gdeadbeef/resume", String::new(), (404, NoSuchGang), "gdeadbeef"),
    ] {
        let (got, code, reason) = site.refused(method, path, body).await;
        assert_eq!((got, code), (status, expected), "{method} {path}: {reason}");
        assert!(reason.contains(says), "{method} {path}: {reason}");
    }
    assert_eq!(site.ask("GET", "/v1/vms", "").await.1, b"[]");
}

#[tokio::test]
async fn an_agent_that_is_ending_starts_nothing() {
    let site = Site::new();
    site.close.send(true).unwrap();
    let body = r#"{"name":"x","argv":["qemu"],"cwd":"/"}"#;
    assert_eq!(site.refused("POST", "/v1/vms", body).await.1, ErrorCode::AgentStopping);
    let body = r#"{"name":"x","qmp":"/q"}"#;
    assert_eq!(site.refused("POST", "/v1/vms/attach", body).await.1, ErrorCode::AgentStopping);
    let body = r#"{"evacuate":{"host":"here"}}"#;
    assert_eq!(site.refused("POST", "/v1/gangs", body).await.1, ErrorCode::AgentStopping);
}
