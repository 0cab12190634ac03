//! `support-bundle`: what a bug report about a migration needs, in one file.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::Args as ClapArgs;
use serde_json::{Map, Value, json};

use crate::client::{Client, segment};
use crate::operation::Operation;
use crate::problem::Problem;

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
/// What the agent said before and after a migration may say why it went as it did.
const AROUND_S: u64 = 120;
/// In place of what nobody else is to know.
const LEFT_OUT: &str = "(left out)";
/// Parts of the names of QEMU's options whose values are secrets, or may hold one.
const SECRET: [&str; 6] = ["password", "passwd", "secret", "data", "key", "string"];
/// QEMU's options whose next word may hold one.
const SECRET_NEXT: [&str; 2] = ["-append", "--append"];

pub(crate) async fn run(client: &Client, args: &SupportBundleArgs) -> Result<ExitCode, Problem> {
    let operation = Operation::named(&args.id);
    // One that nobody knows is refused here.
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
    let started_s = bundle["report"]["started_unix_s"].as_u64();
    bundle.insert("log".to_owned(), log(started_s, bundle["report"]["total_s"].as_f64()));
    let mut bundle = Value::Object(bundle);
    leave_out_secrets(&mut bundle);
    let file = args.output.clone().unwrap_or_else(|| format!("droveway-{}.json", args.id).into());
    write(&file, &bundle)?;
    println!(
        "Wrote {}. It has names of hosts and VMs, addresses and QEMU's command lines, and nothing \
         of a guest's memory. Values that look like secrets are left out: read it before you send \
         it.",
        file.display()
    );
    Ok(ExitCode::SUCCESS)
}

fn write(file: &Path, bundle: &Value) -> Result<(), Problem> {
    let failed = |source| Problem::Local { what: format!("writing {}", file.display()), source };
    let mut open = OpenOptions::new();
    let mut file = open.create_new(true).write(true).mode(0o600).open(file).map_err(failed)?;
    serde_json::to_writer_pretty(&mut file, bundle).map_err(|error| failed(error.into()))?;
    file.write_all(b"\n").map_err(failed)
}

/// What the agent logged meanwhile, where systemd runs it.
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

/// In command lines, wherever they stand.
fn leave_out_secrets(value: &mut Value) {
    match value {
        Value::Object(map) => {
            for (name, value) in map {
                match value {
                    Value::Array(words) if name == "argv" => without_secrets(words),
                    value => leave_out_secrets(value),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(leave_out_secrets),
        _ => {}
    }
}

fn without_secrets(words: &mut [Value]) {
    let mut is_secret = false;
    for word in words {
        let Value::String(text) = word else { continue };
        let is_next_secret = SECRET_NEXT.contains(&text.as_str());
        *text = if is_secret {
            LEFT_OUT.to_owned()
        } else if text.starts_with('{') {
            // JSON may have a comma in a value.
            without_secrets_in_json(text)
        } else {
            text.split(',').map(part_without_secret).collect::<Vec<_>>().join(",")
        };
        is_secret = is_next_secret;
    }
}

fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    SECRET.iter().any(|secret| name.contains(secret))
}

fn part_without_secret(part: &str) -> String {
    match part.split_once('=') {
        Some((name, _)) if is_secret(name) => format!("{name}={LEFT_OUT}"),
        _ => part.to_owned(),
    }
}

fn without_secrets_in_json(text: &str) -> String {
    fn leave_out(value: &mut Value) {
        match value {
            Value::Object(map) => {
                for (name, value) in map {
                    match value {
                        Value::String(text) if is_secret(name) => *text = LEFT_OUT.to_owned(),
                        value => leave_out(value),
                    }
                }
            }
            Value::Array(values) => values.iter_mut().for_each(leave_out),
            _ => {}
        }
    }
    match serde_json::from_str(text) {
        Ok(mut value) => {
            leave_out(&mut value);
            value.to_string()
        }
        Err(_) => LEFT_OUT.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_of_command_lines_are_left_out_and_nothing_else() {
        let mut value = json!([{ "vm": "web1", "argv": [
            "qemu-system-x86_64", "-m", "4G", "-object", "secret,id=s0,data=hunter2,format=raw",
            "-append", "root=/dev/vda token=hunter2", "-fw_cfg", "name=opt/x,string=hunter2",
            "-drive", "file=/a,b,file.password-secret=s0", "-spice", "port=1,password=hunter2",
            "-blockdev", "{\"driver\":\"rbd\",\"key-secret\":\"hunter2\",\"size\":7}",
            "-blockdev", "{\"broken\":\"hunter2",
        ] }]);
        leave_out_secrets(&mut value);
        let text = value.to_string();
        assert!(!text.contains("hunter2"), "{text}");
        let argv: Vec<&str> = value[0]["argv"]
            .as_array()
            .unwrap()
            .iter()
            .map(|word| word.as_str().unwrap())
            .collect();
        assert_eq!(argv[4], "secret,id=s0,data=(left out),format=raw");
        assert_eq!(argv[2], "4G");
        assert_eq!(argv[8], "name=opt/x,string=(left out)");
        assert!(argv[14].contains("\"size\":7"), "{}", argv[14]);
    }
}
