//! The commands about this host's VMs.

use std::process::ExitCode;

use hyper::Method;

use crate::args::{AttachArgs, ListArgs, RunArgs, ShowArgs, StopArgs};
use crate::client::{Client, NOTHING, segment};
use crate::output::vm::{print_problem, status};
use crate::output::{aligned, amount, print_json};
use crate::problem::Problem;

pub(crate) async fn run(client: &Client, args: RunArgs) -> Result<ExitCode, Problem> {
    let mut argv = Vec::with_capacity(args.argv.len());
    for arg in args.argv {
        argv.push(arg.into_string().map_err(|arg| {
            Problem::Typed(format!("the argument {} is not UTF-8", arg.to_string_lossy()))
        })?);
    }
    let cwd = std::env::current_dir()
        .map_err(|source| Problem::Local { what: "finding this directory".to_owned(), source })?;
    let cwd = cwd
        .into_os_string()
        .into_string()
        .map_err(|_| Problem::Typed("the name of this directory is not UTF-8".to_owned()))?;
    let share_domain = args.share_domain;
    let guest_port = !args.no_guest_port;
    let request = api::RunRequest { name: args.name, argv, cwd, share_domain, guest_port };
    let vm: api::VmSummary = client.ask(Method::POST, "/v1/vms", Some(&request)).await?;
    println!("{} runs (QEMU {}, {} of RAM).", vm.name, vm.qemu, amount::size(vm.ram_bytes));
    print_problem(&vm);
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn attach(client: &Client, args: AttachArgs) -> Result<ExitCode, Problem> {
    let qmp = std::path::absolute(&args.qmp)
        .map_err(|source| Problem::Local { what: "finding the QMP socket".to_owned(), source })?;
    let qmp = qmp
        .into_os_string()
        .into_string()
        .map_err(|_| Problem::Typed("the name of the QMP socket is not UTF-8".to_owned()))?;
    let share_domain = args.share_domain;
    let request = api::AttachRequest { name: args.name, qmp, share_domain };
    let vm: api::VmSummary = client.ask(Method::POST, "/v1/vms/attach", Some(&request)).await?;
    println!("{} is adopted (QEMU {}, {}).", vm.name, vm.qemu, status(&vm));
    print_problem(&vm);
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn list(client: &Client, args: &ListArgs) -> Result<ExitCode, Problem> {
    let vms: Vec<api::VmSummary> = client.get("/v1/vms").await?;
    if args.json {
        print_json(&vms)?;
    } else {
        print!("{}", table(&vms));
        for vm in vms.iter().filter(|vm| is_undecided(vm)) {
            if let Some(problem) = &vm.problem {
                println!("\n{}", problem.trim_end());
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn show(client: &Client, args: &ShowArgs) -> Result<ExitCode, Problem> {
    let vm: api::VmSummary = client.get(&format!("/v1/vms/{}", segment(&args.name))).await?;
    if args.json {
        print_json(&vm)?;
    } else {
        print!("{}", details(&vm));
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) async fn stop(client: &Client, args: &StopArgs) -> Result<ExitCode, Problem> {
    let path =
        format!("/v1/vms/{}?force={}&timeout_s={}", segment(&args.name), args.force, args.timeout);
    let stopped: api::Stopped = client.ask(Method::DELETE, &path, NOTHING).await?;
    match stopped.end {
        api::StopEnd::ShutDown => println!("{} has shut down.", args.name),
        api::StopEnd::PlugPulled if args.force => println!("{} is off.", args.name),
        api::StopEnd::PlugPulled => println!(
            "{} did not shut down within {} s, so its plug was pulled.",
            args.name, args.timeout
        ),
        api::StopEnd::WasDead => println!("{} was dead and is removed.", args.name),
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether an operator may have to decide something.
fn is_undecided(vm: &api::VmSummary) -> bool {
    matches!(vm.status, api::VmStatus::InDoubt | api::VmStatus::Unreadable)
}

fn table(vms: &[api::VmSummary]) -> String {
    if vms.is_empty() {
        return "No VMs. Start one with `droveway run NAME -- qemu-system-x86_64 ...`.\n"
            .to_owned();
    }
    let mut rows = vec![["NAME", "STATUS", "PID", "QEMU", "RAM", "MIGRATION"].map(str::to_owned)];
    for vm in vms {
        rows.push([
            vm.name.clone(),
            status(vm).to_owned(),
            if vm.pid == 0 { "-".to_owned() } else { vm.pid.to_string() },
            vm.qemu.clone(),
            amount::size(vm.ram_bytes),
            vm.migration.clone().unwrap_or_else(|| "-".to_owned()),
        ]);
    }
    aligned(&rows)
}

fn details(vm: &api::VmSummary) -> String {
    let mut rows =
        vec![["Name".to_owned(), vm.name.clone()], ["Status".to_owned(), status(vm).to_owned()]];
    // Of one whose record can't be read nothing else is known.
    if vm.pid != 0 {
        let started = if vm.attached { "elsewhere, and adopted" } else { "by this agent" };
        rows.extend([
            ["QEMU".to_owned(), format!("{}, process {}", vm.qemu, vm.pid)],
            ["RAM".to_owned(), amount::size(vm.ram_bytes)],
            ["Started".to_owned(), started.to_owned()],
        ]);
    }
    if let Some(migration) = &vm.migration {
        rows.push(["Migration".to_owned(), migration.clone()]);
    }
    if !vm.share_domain.is_empty() {
        rows.push(["Sharing domain".to_owned(), vm.share_domain.clone()]);
    }
    if let Some(content) = vm.content {
        let known = match content.rounds {
            0 => "not all scanned yet".to_owned(),
            rounds => format!("all scanned {}", amount::counted(rounds, "time")),
        };
        let named = amount::size(content.named_bytes);
        rows.push(["Content".to_owned(), format!("{named} known by name, {known}")]);
    }
    if let Some(helper) = &vm.helper {
        rows.push(["Guest helper".to_owned(), helper_text(helper)]);
    }
    if !vm.argv.is_empty() {
        let words: Vec<String> = vm.argv.iter().map(|word| quoted(word)).collect();
        rows.push(["Command".to_owned(), words.join(" ")]);
    }
    let mut out = aligned(&rows);
    if let Some(problem) = &vm.problem {
        out.push('\n');
        out.push_str(problem.trim_end());
        out.push('\n');
    }
    out
}

fn helper_text(helper: &api::GuestHelper) -> String {
    match helper {
        api::GuestHelper::Answers { version } => format!("answers, version {version}"),
        api::GuestHelper::NoPort { why } => format!("no port: {why}"),
        api::GuestHelper::Silent { why } => format!("none: {why}"),
        api::GuestHelper::NotAsked { why } => format!("not asked: {why}"),
    }
}

/// A word as a shell takes it back.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(name: &str) -> api::VmSummary {
        api::VmSummary {
            name: name.to_owned(),
            status: api::VmStatus::Running,
            pid: 4711,
            qemu: "10.0.2".to_owned(),
            ram_bytes: 1 << 30,
            attached: false,
            migration: None,
            problem: None,
            share_domain: String::new(),
            content: None,
            helper: None,
            argv: vec!["qemu-system-x86_64".to_owned(), "-name".to_owned(), "it's".to_owned()],
        }
    }

    #[test]
    fn the_table_is_aligned() {
        let mut second = vm("a-much-longer-name");
        second.migration = Some("deadbeef".to_owned());
        let text = table(&[vm("web1"), second]);
        let columns: Vec<usize> = text
            .lines()
            .map(|line| line.find("MIGR").or(line.find("deadbeef")).unwrap_or(0))
            .collect();
        assert_eq!(columns[0], columns[2]);
        assert!(text.lines().all(|line| line == line.trim_end()));
    }

    #[test]
    fn of_an_unreadable_vm_only_the_problem_is_shown() {
        let problem = Some("record.json is damaged".to_owned());
        let status = api::VmStatus::Unreadable;
        let lost = api::VmSummary { pid: 0, status, problem, argv: Vec::new(), ..vm("web1") };
        let shown = details(&lost);
        assert!(shown.contains("unreadable\n") && shown.contains("is damaged"), "{shown}");
        assert!(!shown.contains("process") && !shown.contains("RAM"), "{shown}");
        assert!(is_undecided(&lost) && !is_undecided(&vm("web1")));
    }

    #[test]
    fn an_empty_table_says_how_to_fill_it() {
        assert!(table(&[]).contains("droveway run"));
    }

    #[test]
    fn what_a_vm_may_share_is_shown() {
        assert!(!details(&vm("web1")).contains("Sharing"));
        let content = Some(api::KnownContent { rounds: 2, named_bytes: 48 << 20 });
        let shown =
            details(&api::VmSummary { share_domain: "tenant-7".to_owned(), content, ..vm("web1") });
        assert!(shown.contains("Sharing domain  tenant-7\n"), "{shown}");
        assert!(shown.contains("48.0 MiB known by name, all scanned 2 times\n"), "{shown}");
    }

    #[test]
    fn the_helper_is_shown_or_why_there_is_none() {
        assert!(!details(&vm("web1")).contains("helper"));
        let shown = |helper| details(&api::VmSummary { helper: Some(helper), ..vm("web1") });
        let version = "0.1.0".to_owned();
        let answers = shown(api::GuestHelper::Answers { version });
        assert!(answers.contains("Guest helper  answers, version 0.1.0\n"), "{answers}");
        let none = shown(api::GuestHelper::NoPort { why: "isapc".to_owned() });
        assert!(none.contains("Guest helper  no port: isapc\n"), "{none}");
    }

    #[test]
    fn the_command_can_be_pasted() {
        assert!(details(&vm("web1")).contains(r"qemu-system-x86_64 -name 'it'\''s'"));
    }
}
