//! `support-bundle`: the data that a bug report about a migration needs, in one file.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use agent::secrets;
use clap::Args as ClapArgs;
use client::{Client, Operation, Problem, segment};
use serde_json::{Map, Value, json};

use crate::output::print_line;

#[derive(Debug, ClapArgs)]
pub(crate) struct SupportBundleArgs {
    /// The migration, or the gang
    id: String,
    /// The file to write, which must not exist [default: droveway-ID.json]
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// The unit of the agent, as packages install it.
const UNIT: &str = "droveway";
/// Log lines from before and after a migration may explain it.
const AROUND_S: u64 = 120;

pub(crate) async fn run(client: &Client, args: &SupportBundleArgs) -> Result<ExitCode, Problem> {
    let operation = Operation::named(&args.id);
    // An unknown id is refused here.
    let progress: Value = client.get(&operation.path()).await?;
    let mut bundle = Map::new();
    bundle.insert("droveway".to_owned(), env!("CARGO_PKG_VERSION").into());
    let mut paths = vec![
        ("report", format!("{}/report", operation.path())),
        ("host", "/v1/host".to_owned()),
        ("doctor", "/v1/doctor".to_owned()),
        ("vms", "/v1/vms".to_owned()),
    ];
    if let Some(to) = progress["to"].as_str() {
        paths.push(("doctor of both hosts", format!("/v1/doctor/{}", segment(to))));
    }
    bundle.insert("progress".to_owned(), progress);
    for (name, path) in paths {
        let part = client.get(&path).await;
        let part = part.unwrap_or_else(|problem| json!({ "missing": problem.to_string() }));
        bundle.insert(name.to_owned(), part);
    }
    let log = log_of(client.is_remote(), &bundle["report"]);
    bundle.insert("log".to_owned(), log);
    let mut bundle = Value::Object(bundle);
    secrets::hide(&mut bundle);
    let file = args.output.clone().unwrap_or_else(|| format!("droveway-{}.json", args.id).into());
    write(&file, &bundle)?;
    print_line(format_args!(
        "Wrote {}. It has names of hosts and VMs, addresses and QEMU's command lines, and no guest \
         memory. Values that look like secrets are hidden: read it before you send it.",
        file.display()
    ))?;
    Ok(ExitCode::SUCCESS)
}

fn write(file: &Path, bundle: &Value) -> Result<(), Problem> {
    let failed = |source| Problem::Local { what: format!("writing {}", file.display()), source };
    let mut open = OpenOptions::new();
    let mut file = open.create_new(true).write(true).mode(0o600).open(file).map_err(failed)?;
    serde_json::to_writer_pretty(&mut file, bundle).map_err(|error| failed(error.into()))?;
    file.write_all(b"\n").map_err(failed)
}

/// The agent's log lines of the time of that report. The journal of this host has another agent's
/// if `is_remote`.
fn log_of(is_remote: bool, report: &Value) -> Value {
    if is_remote {
        return json!({
            "missing": "the agent is on another host: run this there, or add its journal"
        });
    }
    log(report["started_unix_s"].as_u64(), report["total_s"].as_f64())
}

/// The agent's log lines of that time, if systemd runs it.
fn log(started_s: Option<u64>, total_s: Option<f64>) -> Value {
    let (Some(started_s), Some(total_s)) = (started_s, total_s) else {
        return json!({ "missing": "it is not known when it ran" });
    };
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "whole seconds")]
    let until_s = started_s.saturating_add(total_s.max(0.0) as u64).saturating_add(AROUND_S);
    let since_s = started_s.saturating_sub(AROUND_S);
    let output = Command::new("journalctl")
        .args(["--no-pager", "--output", "short-iso-precise", "--unit", UNIT])
        .args(["--since", &format!("@{since_s}"), "--until", &format!("@{until_s}")])
        .output();
    match output {
        Ok(output) if output.status.success() => {
            let text = String::from_utf8_lossy(&output.stdout);
            text.lines().map(Value::from).collect()
        }
        Ok(output) => json!({ "missing": String::from_utf8_lossy(&output.stderr).trim() }),
        Err(error) => json!({ "missing": format!("journalctl: {error}") }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_of_another_host_is_not_that_of_this_one() {
        let report = json!({ "started_unix_s": 1, "total_s": 2.5 });
        let missing = log_of(true, &report)["missing"].clone();
        assert!(missing.as_str().unwrap().contains("on another host"), "{missing}");
        let missing = log_of(false, &Value::Null)["missing"].clone();
        assert_eq!(missing, "it is not known when it ran");
    }
}
