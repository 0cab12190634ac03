use std::collections::BTreeSet;
use std::path::Path;

use api::{LaneReport, Limit, PhaseTime, Progress, VmStatus, VmSummary};
use engine::Buffers;

use super::*;

fn progress() -> Progress {
    Progress {
        phase: Phase::LaterPass,
        elapsed_s: 2.0,
        percent: 50.0,
        delivered_bytes_per_s: 1e8,
        wire_bytes_per_s: 5e7,
        dirty_bytes_per_s: 1e6,
        share: 0.5,
        pass: 2,
        left_bytes: 1 << 29,
        limit: Limit::Network,
        ..Progress::new(("5f", "web1"), ("here", "there"), 1 << 30)
    }
}

fn report(outcome: Outcome) -> Report {
    let mut report = Report::empty(&progress(), 1, outcome);
    report.phases = vec![PhaseTime { phase: Phase::Stopped, start_s: 1.0 }];
    report.downtime_ms = Some(40.0);
    (report.body_bytes, report.dropped_bytes, report.named_bytes) = (1000, 100, 300);
    (report.peer_bytes, report.stored_bytes) = (50, 50);
    let lane = |name: &str, deaths| LaneReport {
        name: name.to_owned(),
        wire_bytes: 7,
        batches: 1,
        deaths,
    };
    report.lanes = vec![
        lane("10.0.0.1 -> 10.0.0.2:7450", 2),
        lane("10.0.0.1 -> 10.0.0.2:7450", 0),
        lane("10.0.0.2:7450", 0),
    ];
    report
}

fn now(migrations: Vec<Progress>) -> Now {
    let buffers = Buffers { bytes: 64, used_bytes: 8 };
    Now { vms: Vec::new(), migrations, buffers: [buffers; 2], certificate_until_s: Some(5) }
}

fn has(text: &str, line: &str) -> bool {
    text.lines().any(|one| one == line)
}

#[test]
fn migrations_that_ended_are_added_up() {
    let metrics = Metrics::default();
    metrics.count(&report(Outcome::Done));
    metrics.count(&report(Outcome::Done));
    metrics.count(&report(Outcome::Failed("it was cut".to_owned())));
    let text = metrics.text(&now(Vec::new()));
    for line in [
        r#"droveway_migrations_total{outcome="done",phase="stopped"} 2"#,
        r#"droveway_migrations_total{outcome="failed",phase="stopped"} 1"#,
        r#"droveway_audits_total{result="not-made"} 3"#,
        // A VM that stayed has no downtime.
        "droveway_migration_downtime_seconds_count 2",
        r#"droveway_migration_downtime_seconds_bucket{le="0.05"} 2"#,
        r#"droveway_migration_downtime_seconds_bucket{le="0.02"} 0"#,
        r#"droveway_guest_bytes_total{kind="sent"} 1800"#,
        r#"droveway_guest_bytes_total{kind="named"} 600"#,
        r#"droveway_lane_bytes_total{nic="10.0.0.1"} 42"#,
        r#"droveway_lane_bytes_total{nic="routed"} 21"#,
        r#"droveway_lane_deaths_total{nic="10.0.0.1"} 6"#,
    ] {
        assert!(has(&text, line), "{line}:\n{text}");
    }
}

/// Otherwise an alert on their increase would miss the first of them.
#[test]
fn what_has_not_happened_yet_is_reported_as_zero() {
    let metrics = Metrics::default();
    let started = metrics.text(&now(Vec::new()));
    for line in [
        r#"droveway_migrations_total{outcome="failed",phase="prepare"} 0"#,
        r#"droveway_migrations_total{outcome="done",phase="running"} 0"#,
        r#"droveway_audits_total{result="differences"} 0"#,
    ] {
        assert!(has(&started, line), "{line}:\n{started}");
    }
    // The first of any kind adds no series of these.
    let of = |text: &str, name: &str| text.lines().filter(|line| line.starts_with(name)).count();
    metrics.count(&report(Outcome::Cancelled));
    let later = metrics.text(&now(Vec::new()));
    for name in ["droveway_migrations_total{", "droveway_audits_total{"] {
        assert_eq!(of(&later, name), of(&started, name), "{name}");
    }
}

#[test]
fn a_destinations_figures_are_capped_by_what_was_named() {
    let metrics = Metrics::default();
    let mut lie = report(Outcome::Done);
    (lie.peer_bytes, lie.stored_bytes) = (u64::MAX, u64::MAX);
    metrics.count(&lie);
    let text = metrics.text(&now(Vec::new()));
    for line in [
        r#"droveway_guest_bytes_total{kind="peer"} 300"#,
        r#"droveway_guest_bytes_total{kind="stored"} 0"#,
        r#"droveway_guest_bytes_total{kind="named"} 0"#,
    ] {
        assert!(has(&text, line), "{line}:\n{text}");
    }
}

#[test]
fn a_vm_has_series_of_its_own_while_it_moves() {
    let metrics = Metrics::default();
    let moving = metrics.text(&now(vec![progress()]));
    assert!(has(&moving, r#"droveway_migration_cpu_share{to="there",vm="web1"} 0.5"#), "{moving}");
    assert!(has(&moving, "droveway_migrations_running 1"));
    let text = metrics.text(&now(Vec::new()));
    assert!(!text.contains("web1") && has(&text, "droveway_migrations_running 0"), "{text}");
}

#[test]
fn a_status_without_vms_is_reported_as_zero() {
    let mut now = now(Vec::new());
    now.vms = vec![VmSummary { status: VmStatus::InDoubt, ..vm() }];
    let text = Metrics::default().text(&now);
    assert!(has(&text, r#"droveway_vms{status="in-doubt"} 1"#), "{text}");
    assert!(has(&text, r#"droveway_vms{status="running"} 0"#));
    assert!(has(&text, "droveway_vms_program_replaced 0"));
    assert!(has(&text, "droveway_certificate_expiry_timestamp_seconds 5"));
}

#[test]
fn vms_on_replaced_programs_are_counted() {
    let mut now = now(Vec::new());
    now.vms = vec![vm(), VmSummary { program_replaced: true, ..vm() }];
    let text = Metrics::default().text(&now);
    assert!(has(&text, "droveway_vms_program_replaced 1"), "{text}");
}

fn vm() -> VmSummary {
    serde_json::from_value(serde_json::json!({
        "name": "web1", "status": "running", "pid": 1, "qemu": "10.0.2", "ram_bytes": 1,
        "attached": false, "migration": null, "argv": [],
    }))
    .unwrap()
}

/// The names of all series.
fn series() -> BTreeSet<String> {
    let metrics = Metrics::default();
    metrics.count(&report(Outcome::Done));
    let text = metrics.text(&now(vec![progress()]));
    let typed = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    typed.map(|line| line.split(' ').next().unwrap().to_owned()).collect()
}

/// The names of the series that a file of `dist` uses.
fn asked(file: &str) -> BTreeSet<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dist").join(file);
    let text = std::fs::read_to_string(path).unwrap();
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let asked = words.filter(|word| word.starts_with("droveway_"));
    asked.map(|word| word.strip_suffix("_bucket").unwrap_or(word).to_owned()).collect()
}

#[test]
fn alerts_and_the_dashboard_use_existing_series() {
    let series = series();
    for file in ["prometheus/droveway.rules.yml", "grafana/droveway.json"] {
        let asked = asked(file);
        assert!(asked.len() > 5, "{file}: {asked:?}");
        assert_eq!(asked.difference(&series).collect::<Vec<_>>(), [""; 0], "{file}");
    }
    // The dashboard uses all of them.
    assert_eq!(series, asked("grafana/droveway.json"));
}
