//! The OpenAPI document compared with the server: its routes and their responses.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path as FilePath;

use api::{GangOutcome, GapReason, Happening, MigrateRequest, MigrationResult, Phase};
use serde_json::{Value, json};

use super::*;
use crate::api::routes::DOCUMENT;

const RENEW: &str = "RENEW_OPENAPI";

fn document() -> &'static Value {
    &DOCUMENT
}

#[test]
fn the_document_is_the_one_that_is_checked_in() {
    let file = FilePath::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/openapi.json");
    if std::env::var_os(RENEW).is_some() {
        let text = serde_json::to_string_pretty(document()).unwrap() + "\n";
        std::fs::write(&file, text).unwrap();
    }
    let checked_in = std::fs::read(&file).unwrap_or_default();
    let checked_in: Value = serde_json::from_slice(&checked_in).unwrap_or_default();
    assert!(
        checked_in == *document(),
        "docs/openapi.json is stale: `{RENEW}=1 cargo test -p agent openapi` renews it"
    );
}

type Methods = BTreeMap<String, BTreeSet<String>>;

/// The paths and methods in the document.
fn documented() -> Methods {
    let document = document();
    let paths = document["paths"].as_object().unwrap();
    let methods = |item: &Value| -> BTreeSet<String> {
        item.as_object().unwrap().keys().map(|method| method.to_uppercase()).collect()
    };
    paths.iter().map(|(path, item)| (path.clone(), methods(item))).collect()
}

impl Site {
    /// The paths and methods of the server, as its router lists them.
    async fn served(&self) -> Methods {
        let router = format!("{:?}", self.router);
        let own = router.split("fallback_router").next().unwrap();
        let quoted = own.split('"').filter(|text| text.starts_with('/'));
        let mut served = Methods::new();
        for path in quoted {
            let request = Request::builder().method("STRANGE").uri(filled(path));
            let request = request.body(AxumBody::empty()).unwrap();
            let response = self.router.clone().oneshot(request).await.unwrap();
            assert_eq!(response.status(), 405, "{path}");
            let allowed = response.headers()["allow"].to_str().unwrap();
            // HEAD is implied by GET.
            let methods = allowed.split(',').filter(|one| *one != "HEAD").map(str::to_owned);
            served.insert(path.to_owned(), methods.collect());
        }
        served
    }
}

/// A path with a name in place of each parameter.
fn filled(path: &str) -> String {
    let segment = |one: &str| if one.starts_with('{') { "x".to_owned() } else { one.to_owned() };
    path.split('/').map(segment).collect::<Vec<_>>().join("/")
}

#[tokio::test]
async fn every_route_is_in_the_document_and_no_other() {
    let site = Site::new();
    let served = site.served().await;
    assert!(served.len() > 20 && served["/v1/vms"].len() == 2, "{served:?}");
    assert_eq!(served, documented());
    // The routes not only exist, they also answer.
    for (path, methods) in documented() {
        for method in methods {
            let request = Request::builder().method(method.as_str()).uri(filled(&path));
            let request = request.body(AxumBody::empty()).unwrap();
            let response = site.router.clone().oneshot(request).await.unwrap();
            let kind = response.headers()["content-type"].to_str().unwrap().to_owned();
            let status = response.status();
            if kind == "text/event-stream" || status.is_success() {
                continue;
            }
            let body = response.into_body().collect().await.unwrap().to_bytes();
            let error: api::ErrorBody = serde_json::from_slice(&body).unwrap();
            let code = error.code.unwrap();
            assert!(
                !matches!(code, ErrorCode::NoSuchPath | ErrorCode::MethodNotAllowed),
                "{method} {path}: {code}"
            );
        }
    }
}

/// A part of the document as a separate schema.
fn validator(part: &Value) -> jsonschema::Validator {
    let mut schema = part.clone();
    // For references within the document.
    schema["components"] = document()["components"].clone();
    jsonschema::draft202012::new(&schema).unwrap()
}

/// The schema of a type.
fn of_type(name: &str) -> jsonschema::Validator {
    validator(&json!({ "$ref": format!("#/components/schemas/{name}") }))
}

fn assert_valid(validator: &jsonschema::Validator, value: &Value, what: &str) {
    let errors: Vec<String> = validator.iter_errors(value).map(|error| error.to_string()).collect();
    assert!(errors.is_empty(), "{what}: {errors:#?}\n{value:#}");
}

impl Site {
    /// Makes a request, and checks its response against the document.
    async fn answers_as_documented(&self, method: &str, route: &str, path: &str, body: Value) {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let (status, answer) = self.ask(method, path, body).await;
        let operation = &document()["paths"][route][method.to_lowercase()];
        assert!(operation.is_object(), "{method} {route}");
        let responses = &operation["responses"];
        let response = match &responses[status.to_string()] {
            Value::Null if status >= 400 => &responses["default"],
            documented => documented,
        };
        let (kind, content) = response["content"].as_object().unwrap().iter().next().unwrap();
        let validator = validator(&content["schema"]);
        let text = String::from_utf8(answer).unwrap();
        let values: Vec<Value> = match kind.as_str() {
            "application/json" => vec![serde_json::from_str(&text).unwrap()],
            "application/x-ndjson" => {
                text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
            }
            _ => vec![Value::String(text)],
        };
        assert!(!values.is_empty());
        for value in &values {
            assert_valid(&validator, value, &format!("{method} {path}: {status}"));
        }
    }
}

/// A host that has moved a VM and a gang, and has a VM whose record can't be read.
fn with_history() -> Site {
    let dir = tempfile::tempdir().unwrap();
    let vm = dir.path().join("vms/web9");
    std::fs::create_dir_all(&vm).unwrap();
    std::fs::write(vm.join("record.json"), "{").unwrap();
    let site = Site::of(dir, Limits::default(), None);
    let state = site.api.registry.state();
    let report: Value =
        serde_json::from_str(include_str!("../../../../report/src/example.json")).unwrap();
    std::fs::write(state.reports().join("3f2a91c0.json"), report.to_string()).unwrap();
    let gang = json!({
        "id": "gdeadbeef", "started_unix_s": 1, "total_s": 2.5, "parallel": 2, "atomic": false,
        "options": api::GangOptions::default(), "outcome": "failed", "notes": ["a note"],
        "moves": [
            { "vm": "web1", "from": "here", "to": "there", "ram_bytes": 1, "used_bytes": 1,
              "state": "done", "migration": "3f2a91c0", "reason": null,
              "figures": { "total_s": 1.0, "downtime_ms": 38.2 } },
            { "vm": "web2", "from": "here", "to": "there", "ram_bytes": 1, "used_bytes": 1,
              "state": "failed", "migration": null, "reason": "why", "figures": null },
        ],
    });
    std::fs::write(state.gangs().join("gdeadbeef.json"), gang.to_string()).unwrap();
    site
}

#[tokio::test]
async fn answers_are_as_the_document_says() {
    let site = with_history();
    for (route, paths) in [
        ("/metrics", &["/metrics"][..]),
        ("/v1/openapi.json", &["/v1/openapi.json"]),
        ("/v1/host", &["/v1/host"]),
        ("/v1/hosts/{host}", &["/v1/hosts/here", "/v1/hosts/there"]),
        ("/v1/doctor", &["/v1/doctor"]),
        ("/v1/doctor/{host}", &["/v1/doctor/here"]),
        ("/v1/vms", &["/v1/vms"]),
        ("/v1/vms/{name}", &["/v1/vms/web9", "/v1/vms/web1"]),
        ("/v1/migrations", &["/v1/migrations"]),
        ("/v1/migrations/{id}", &["/v1/migrations/3f2a91c0", "/v1/migrations/x"]),
        ("/v1/migrations/{id}/progress", &["/v1/migrations/3f2a91c0/progress"]),
        ("/v1/migrations/{id}/report", &["/v1/migrations/3f2a91c0/report"]),
        ("/v1/gangs", &["/v1/gangs"]),
        ("/v1/gangs/{id}", &["/v1/gangs/gdeadbeef", "/v1/gangs/x"]),
        ("/v1/gangs/{id}/progress", &["/v1/gangs/gdeadbeef/progress"]),
        ("/v1/gangs/{id}/report", &["/v1/gangs/gdeadbeef/report"]),
    ] {
        for path in paths {
            site.answers_as_documented("GET", route, path, Value::Null).await;
        }
    }
    let (_, vms) = site.ask("GET", "/v1/vms", "").await;
    let vms: Vec<api::VmSummary> = serde_json::from_slice(&vms).unwrap();
    assert_eq!((vms.len(), vms[0].status), (1, api::VmStatus::Unreadable));
    let evacuate = json!({ "evacuate": { "host": "here", "to": [] }, "dry_run": true });
    site.answers_as_documented("POST", "/v1/gangs", "/v1/gangs", evacuate).await;
    let cancel = "/v1/gangs/gdeadbeef/cancel";
    site.answers_as_documented("POST", "/v1/gangs/{id}/cancel", cancel, Value::Null).await;
}

#[test]
fn requests_are_taken_as_the_document_says() {
    for (name, right, wrong) in [
        ("MigrateRequest", json!({"vm": "v", "to": "b"}), json!({"vm": "v", "to": "b", "x": 1})),
        (
            "MigrateRequest",
            json!({"vm": "v", "to": "b", "slowing": {"throttle": {"ratio": 0.7}}}),
            json!({"vm": "v"}),
        ),
        (
            "MigrateRequest",
            json!({"vm": "v", "to": "b", "slowing": {"throttle": "off"},
          "bounds": {"limit_bits_per_s": 1000, "cpus": "0-3", "priority": "high"}}),
            json!({"vm": "v", "to": "b", "bounds": {"priority": "top"}}),
        ),
        (
            "BoundsChange",
            json!({"limit_bits_per_s": null, "cpus": null, "priority": "low"}),
            json!({"limit_bits_per_s": 0}),
        ),
        (
            "GangRequest",
            json!({"moves": [{"vm": "v", "to": "b"}], "options": {"audit": "deep"}}),
            json!({"moves": [{"vm": "v"}]}),
        ),
        ("RunRequest", json!({"name": "x", "argv": ["qemu"], "cwd": "/"}), json!({"name": "x"})),
        (
            "ResolveRequest",
            json!({"side": "here", "certain": true}),
            json!({"side": "both", "certain": true}),
        ),
        ("PredictRequest", json!({"to": "b", "downtime_ms": 300}), json!({"to": "b"})),
        (
            "PredictRequest",
            json!({"to": "b", "downtime_ms": api::DOWNTIME_MS_MAX}),
            json!({"to": "b", "downtime_ms": api::DOWNTIME_MS_MAX + 1}),
        ),
        (
            "MigrateRequest",
            json!({"vm": "v", "to": "b", "timeout_s": api::SECONDS_MAX}),
            json!({"vm": "v", "to": "b", "timeout_s": api::SECONDS_MAX + 1}),
        ),
    ] {
        let validator = of_type(name);
        assert_valid(&validator, &right, name);
        assert!(!validator.is_valid(&wrong), "{name}: {wrong}");
    }
    // As the type itself is written.
    let request: MigrateRequest = serde_json::from_value(json!({"vm": "v", "to": "b"})).unwrap();
    assert_valid(&of_type("MigrateRequest"), &serde_json::to_value(request).unwrap(), "as typed");
}

/// A VM with all fields that an agent can fill.
#[test]
fn vms_are_as_the_document_says() {
    let summary = json!({
        "name": "web1", "status": "running", "pid": 4711, "qemu": "10.0.2",
        "ram_bytes": 1 << 30, "attached": true, "migration": "3f2a91c0", "problem": "why",
        "share_domain": "d",
        "content": { "rounds": 3, "named_bytes": 4096 },
        "helper": { "state": "answers", "version": "0.1.0" },
        "argv": ["qemu-system-x86_64"],
    });
    let parsed: api::VmSummary = serde_json::from_value(summary).unwrap();
    let mut said = serde_json::to_value(parsed).unwrap();
    assert_valid(&of_type("VmSummary"), &said, "a VM");
    said["status"] = json!("flying");
    assert!(!of_type("VmSummary").is_valid(&said));
}

#[test]
fn all_events_are_as_the_document_says() {
    let text = || "x".to_owned();
    let all = [
        Happening::Gap { why: GapReason::TooOld },
        Happening::MigrationBegan { migration: text(), vm: text(), from: text(), to: text() },
        Happening::MigrationPhase { migration: text(), vm: text(), phase: Phase::LaterPass },
        Happening::MigrationEnded {
            migration: text(),
            vm: text(),
            from: text(),
            to: text(),
            result: MigrationResult::Failed,
            reason: Some(text()),
            downtime_ms: None,
            total_s: 1.5,
        },
        Happening::ArrivalBegan { migration: text(), vm: text(), from: text() },
        Happening::ArrivalEnded { migration: text(), vm: text(), from: text(), arrived: true },
        Happening::GangBegan { gang: text(), vms: 2 },
        Happening::GangEnded {
            gang: text(),
            result: GangOutcome::Interrupted,
            done: 1,
            failed: 0,
            cancelled: 1,
            total_s: 1.5,
        },
        Happening::VmInDoubt { vm: text(), problem: text() },
        Happening::VmSettled { vm: text() },
        Happening::CertificateRenewed { until_unix_s: 1 },
        Happening::CertificateExpires { until_unix_s: 1, problem: text() },
    ];
    let validator = of_type("Event");
    for what in all {
        let event = api::Event { id: text(), at_unix_ms: 1, what };
        let mut event = serde_json::to_value(event).unwrap();
        assert_valid(&validator, &event, "an event");
        event["event"] = json!("vm-flew");
        assert!(!validator.is_valid(&event), "{event}");
    }
}

/// The page for operators names each code with its status.
#[test]
fn every_code_is_on_its_page() {
    let page = include_str!("../../../../../docs/operations/api.md");
    let rows: BTreeSet<(String, String)> = page
        .lines()
        .filter_map(|line| {
            let mut cells = line.split('|').map(str::trim);
            let code = cells.nth(1)?.strip_prefix('`')?.strip_suffix('`')?;
            let status = cells.next().filter(|status| status.parse::<u16>().is_ok())?;
            Some((code.to_owned(), status.to_owned()))
        })
        .collect();
    let document = document();
    let codes = document["components"]["schemas"]["ErrorCode"]["enum"].as_array().unwrap();
    let known: BTreeSet<(String, String)> = codes
        .iter()
        .map(|code| {
            let known: ErrorCode = serde_json::from_value(code.clone()).unwrap();
            (known.to_string(), known.status().to_string())
        })
        .collect();
    assert_eq!(rows, known);
}
