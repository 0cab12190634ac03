//! All routes of the API, each with its part of the OpenAPI document.

use std::sync::LazyLock;

use api::{
    AttachRequest, Bounds, BoundsChange, Event, Examination, GangProgress, GangReport, GangRequest,
    GangStarted, HostCensus, HostInfo, MigrateRequest, MigrationStarted, PlanUpgradeRequest,
    PredictRequest, Prediction, Progress, Report, ResolveRequest, RunRequest, StopHow, Stopped,
    UpgradePlan, UpgradeRequest, VmSummary,
};
use axum::Json;
use serde_json::Value;

use super::document::{self, Route};
use super::{events, gangs, host, metrics, migrations, vms};

/// The complete list of routes.
pub(super) fn routes() -> Vec<Route> {
    vec![
        Route::get("/metrics", "metrics", metrics::metrics)
            .about("Metrics in Prometheus' text format")
            .answers_text("text/plain"),
        Route::get("/v1/openapi.json", "openapi", openapi)
            .about("This document")
            .answers_any(),
        Route::get("/v1/host", "host", host::show)
            .about("This host, and the hosts of its peers file")
            .answers::<HostInfo>(),
        Route::get("/v1/hosts/{host}", "census", gangs::census)
            .about("What a host has, this one or another, as its own agent reports")
            .answers::<HostCensus>(),
        Route::get("/v1/events", "events", events::events)
            .about("What happens at this host, as server-sent events")
            .continues()
            .streams::<Event>("text/event-stream"),
        Route::get("/v1/doctor", "doctor", host::examine)
            .about("What is wrong with this host for migrations")
            .answers::<Examination>(),
        Route::get("/v1/doctor/{host}", "doctor_of_pair", host::examine_pair)
            .about("Which VMs of this host can go to another one, and why not")
            .answers::<Examination>(),
        Route::get("/v1/vms", "list_vms", vms::list)
            .about("The VMs of this host")
            .answers_many::<VmSummary>(),
        Route::post("/v1/vms", "run_vm", vms::run)
            .about("Starts a VM")
            .takes::<RunRequest>()
            .makes::<VmSummary>(),
        Route::post("/v1/vms/attach", "attach_vm", vms::attach)
            .about("Adopts a running VM")
            .takes::<AttachRequest>()
            .makes::<VmSummary>(),
        Route::get("/v1/vms/{name}", "show_vm", vms::show)
            .about("One VM, with what the helper in its guest reports")
            .answers::<VmSummary>(),
        Route::delete("/v1/vms/{name}", "stop_vm", vms::stop)
            .about("Shuts a VM down")
            .asks::<StopHow>()
            .answers::<Stopped>(),
        Route::post("/v1/vms/{name}/resolve", "resolve_vm", vms::resolve)
            .about(
                "Decides which host a VM in doubt belongs to. Answers with the VM, or null if it is \
                 no longer here",
            )
            .takes::<ResolveRequest>()
            .answers_optionally::<VmSummary>(),
        Route::post("/v1/vms/{name}/predict", "predict", vms::predict)
            .about("Watches a VM for some seconds, and predicts what moving it takes")
            .takes::<PredictRequest>()
            .answers::<Prediction>(),
        Route::post("/v1/vms/{name}/plan-upgrade", "plan_upgrade", vms::plan_upgrade)
            .about("How a VM could get another QEMU on this host, or why not; changes nothing")
            .takes::<PlanUpgradeRequest>()
            .answers::<UpgradePlan>(),
        Route::post("/v1/vms/{name}/upgrade", "upgrade_vm", vms::upgrade)
            .about("Starts to give a VM another QEMU on this host: a migration within it")
            .takes::<UpgradeRequest>()
            .makes::<MigrationStarted>(),
        Route::get("/v1/migrations", "list_migrations", migrations::list)
            .about("Migrations from this host, the latest first")
            .answers_many::<Progress>(),
        Route::post("/v1/migrations", "migrate", migrations::start)
            .about("Starts to move a VM")
            .takes::<MigrateRequest>()
            .makes::<MigrationStarted>(),
        Route::get("/v1/migrations/{id}", "show_migration", migrations::show)
            .about("Where a migration is, or how it ended")
            .answers::<Progress>(),
        Route::patch("/v1/migrations/{id}", "set_bounds", migrations::set)
            .about("Changes what a migration may use. Answers with what it may use from now on")
            .takes::<BoundsChange>()
            .answers::<Bounds>(),
        Route::get("/v1/migrations/{id}/progress", "watch_migration", migrations::watch)
            .about("Where a migration is, line by line, until it has ended")
            .streams::<Progress>("application/x-ndjson"),
        Route::post("/v1/migrations/{id}/cancel", "cancel_migration", migrations::cancel)
            .about("Has a migration end with its VM here")
            .answers_null(),
        Route::get("/v1/migrations/{id}/report", "report", migrations::report)
            .about("How a migration went")
            .answers::<Report>(),
        Route::get("/v1/gangs", "list_gangs", gangs::list)
            .about("Gangs that this host coordinates or has coordinated, the latest first")
            .answers_many::<GangProgress>(),
        Route::post("/v1/gangs", "start_gang", gangs::start)
            .about("Starts to move several VMs as one operation, or plans it")
            .takes::<GangRequest>()
            .makes::<GangStarted>(),
        Route::get("/v1/gangs/{id}", "show_gang", gangs::show)
            .about("Where a gang is, or how it ended")
            .answers::<GangProgress>(),
        Route::get("/v1/gangs/{id}/progress", "watch_gang", gangs::watch)
            .about("Where a gang is, line by line, until it has ended")
            .streams::<GangProgress>("application/x-ndjson"),
        Route::post("/v1/gangs/{id}/cancel", "cancel_gang", gangs::cancel)
            .about("Takes back the VMs of a gang that have not moved")
            .answers_null(),
        Route::post("/v1/gangs/{id}/resume", "resume_gang", gangs::resume)
            .about("Resumes a gang that has not moved all of its VMs")
            .makes::<GangStarted>(),
        Route::get("/v1/gangs/{id}/report", "gang_report", gangs::report)
            .about("How a gang went")
            .answers::<GangReport>(),
    ]
}

/// The document, which never changes while the agent runs.
pub(super) static DOCUMENT: LazyLock<Value> = LazyLock::new(|| document::of(routes()));

async fn openapi() -> Json<&'static Value> {
    Json(&DOCUMENT)
}
