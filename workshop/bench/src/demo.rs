//! `make demo`: the main job, on one machine, in a minute.

pub mod gang;

use std::process::{ExitCode, Stdio};
use std::time::Duration;

use api::{Outcome, Report};
use lab_guest::orders::Orders;

use crate::contender::Mode;
use crate::contest;
use crate::scenario::Scenario;
use lab::agent::Agent;
use lab::error::{LabError, Result, SystemContext};
use lab::guest::{Checked, Guest, GuestSpec};
use lab::hosts::{Host, Hosts, Link};
use lab::program;
use lab::setup::{self, Kit};

const MBIT: u32 = 1000;
const MIB: u64 = 1 << 20;

/// Moves a VM that writes from one host to another and back; then QEMU's own migration moves the
/// same guest over the same link.
///
/// # Errors
/// If the lab fails.
pub fn run() -> Result<ExitCode> {
    let kit = setup::ensure()?;
    println!("Two hosts (network namespaces), one link of {MBIT} Mbit/s between them.");
    println!("QEMU {} with {}.\n", kit.qemu_version, kit.accelerator);
    let scenario = scenario();
    let (reports, checked) = there_and_back(&kit, &scenario)?;
    println!("\nNow QEMU's own migration: the same guest, the same link.\n");
    let race = contest::run(&kit, &scenario, 1, &[])?;
    let qemu = race.contenders.get("qemu-precopy").and_then(|contender| contender.runs.first());

    println!("\nIn short");
    for (way, report) in ["there", "back"].iter().zip(&reports) {
        println!(
            "  {way:5}  moved in {:.2} s, downtime {:.0} ms, {:.0} MB on the wire",
            report.total_s - report.prepare_s,
            report.downtime_ms.unwrap_or(0.0),
            report.wire_bytes as f64 / 1e6,
        );
    }
    if let Some(run) = qemu.filter(|run| run.ok) {
        println!(
            "  QEMU   moved in {:.2} s, downtime {:.0} ms, {:.0} MB on the wire",
            run.total_s,
            run.downtime_ms,
            run.wire_bytes as f64 / 1e6,
        );
    }
    println!("  {} pages checked by the guest itself, {} wrong", checked.pages, checked.wrong);
    let good = checked.wrong == 0 && reports.iter().all(|report| report.outcome == Outcome::Done);
    println!("{}", if good { "It works." } else { "IT DOES NOT WORK." });
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The benchmark `idle`, with one mode of QEMU's migration.
fn scenario() -> Scenario {
    let orders = Orders {
        working_set_bytes: 64 * MIB,
        rate: 5_000_000,
        text_bytes: 64 * MIB,
        seed: 7,
        ..Orders::default()
    };
    Scenario {
        name: "demo",
        about: "1 GiB, 64 MiB that don't shrink and are rewritten, 64 MiB that shrink",
        guest: GuestSpec::new("web1", "1G", orders),
        disk: None,
        neighbour: None,
        link: Link::one(MBIT),
        goal: Duration::from_millis(300),
        timeout: Duration::from_secs(120),
        modes: &[Mode::Precopy],
        ours: Vec::new(),
        plain_tcp: false,
        slowing: None,
        served: false,
        libvirt: false,
    }
}

fn there_and_back(kit: &Kit, scenario: &Scenario) -> Result<(Vec<Report>, Checked)> {
    let hosts = Hosts::new(scenario.link)?;
    let agents = [Agent::start(&hosts, &hosts.a)?, Agent::start(&hosts, &hosts.b)?];
    let spec = &scenario.guest;
    println!("host-a$ droveway run {} -- qemu-system-x86_64 -m {} ...", spec.name, spec.memory);
    let mut run = agents[0].command(&hosts.a, &["run", &spec.name, "--"]);
    program::output(run.args(spec.argv(kit, &kit.qemu)))?;
    let guest = Guest::meet(spec.clone(), &hosts.a)?;
    let mut reports = Vec::new();
    for (from, to) in [(0, 1), (1, 0)] {
        let host = [&hosts.a, &hosts.b];
        reports.push(show_move(&agents[from], host[from], host[to], &agents[to], &guest)?);
    }
    println!("\nThe guest checks all of its memory...");
    let checked = guest.check()?;
    Ok((reports, checked))
}

/// One move, with the progress that a user sees; then its report.
fn show_move(from: &Agent, here: &Host, there: &Host, to: &Agent, guest: &Guest) -> Result<Report> {
    let name = &guest.spec.name;
    println!("\n{}$ droveway migrate {name} {}", from.host_name(), to.host_name());
    guest.expect_on(there)?;
    let mut migrate = from.command(here, &["migrate", name, to.host_name()]);
    // Progress goes to standard error, the summary to standard output.
    let output = migrate.stderr(Stdio::inherit()).output().doing("run droveway")?;
    let summary = String::from_utf8_lossy(&output.stdout);
    print!("{summary}");
    if !output.status.success() {
        let reason = format!("`droveway migrate` failed: {}", from.log_text());
        return Err(LabError::Migration { contender: "droveway".to_owned(), reason });
    }
    guest.wait_beat(Duration::from_secs(20))?;
    report(from, here, &summary)
}

/// The report that the summary's last line points to.
fn report(agent: &Agent, host: &Host, summary: &str) -> Result<Report> {
    let hint = "droveway report ";
    let id = summary.rsplit_once(hint).and_then(|(_, rest)| rest.split_whitespace().next());
    let unclear = || LabError::Text { what: "droveway's summary", text: summary.to_owned() };
    let id = id.ok_or_else(unclear)?;
    let text = program::output(&mut agent.command(host, &["report", id, "--json"]))?;
    serde_json::from_str(&text).map_err(|_| LabError::Text { what: "a report", text })
}
