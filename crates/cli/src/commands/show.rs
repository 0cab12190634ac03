//! `show`: one VM.

use std::process::ExitCode;

use clap::Args as ClapArgs;
use client::{Client, Problem, segment};
use report::vm::status;
use report::{aligned, amount};

use crate::output::{print, print_json, quoted};

#[derive(Debug, ClapArgs)]
pub(crate) struct ShowArgs {
    /// The VM
    name: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) async fn run(client: &Client, args: &ShowArgs) -> Result<ExitCode, Problem> {
    let vm: api::VmSummary = client.get(&format!("/v1/vms/{}", segment(&args.name))).await?;
    if args.json {
        print_json(&vm)?;
    } else {
        print(format_args!("{}", details(&vm)))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn details(vm: &api::VmSummary) -> String {
    let mut rows =
        vec![["Name".to_owned(), vm.name.clone()], ["Status".to_owned(), status(vm).to_owned()]];
    // If a VM's record can't be read, nothing else is known of it.
    if vm.pid != 0 {
        let started = if vm.attached { "elsewhere, and adopted" } else { "by this agent" };
        // Another process may have its number by now.
        let ended = if vm.status == api::VmStatus::Dead { " (ended)" } else { "" };
        rows.extend([
            ["QEMU".to_owned(), format!("{}, process {}{ended}", vm.qemu, vm.pid)],
            ["RAM".to_owned(), amount::size(vm.ram_bytes)],
            ["Started".to_owned(), started.to_owned()],
        ]);
    }
    if vm.program_replaced {
        let advice = "replaced on disk since QEMU started: a move to a host with the new program \
                      brings the VM to it, and so does a stop and a new start";
        rows.push(["Program".to_owned(), advice.to_owned()]);
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
    if vm.free_page_hint {
        rows.push(["Free memory".to_owned(), hint_text(vm.helper.as_ref()).to_owned()]);
    }
    if !vm.argv.is_empty() {
        let words: Vec<String> = vm.argv.iter().map(|word| quoted(word)).collect();
        rows.push(["Command".to_owned(), words.join(" ")]);
    }
    let mut out = aligned(&rows);
    for text in vm.problem.iter().chain(&vm.left_over) {
        out.push('\n');
        out.push_str(text.trim_end());
        out.push('\n');
    }
    out
}

/// The effect of free-page hinting.
fn hint_text(helper: Option<&api::GuestHelper>) -> &'static str {
    let clears = match helper {
        Some(api::GuestHelper::Answers { clears_memory, .. }) => *clears_memory,
        _ => None,
    };
    match clears {
        Some(false) => "not sent: the guest reports it (free-page-hint)",
        Some(true) => {
            "sent, and more: the guest's kernel clears each page to report it as free. Boot it \
             with init_on_alloc=0, or start the VM without free-page-hint"
        }
        None => {
            "not sent if the guest reports it (free-page-hint); with init_on_alloc=1 in its kernel \
             moves take longer instead"
        }
    }
}

fn helper_text(helper: &api::GuestHelper) -> String {
    match helper {
        api::GuestHelper::Answers { version, .. } => format!("answers, version {version}"),
        api::GuestHelper::NoPort { why } => format!("no port: {why}"),
        api::GuestHelper::Silent { why } => format!("no answer: {why}"),
        api::GuestHelper::NotAsked { why } => format!("not queried: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::vm::example;

    #[test]
    fn of_an_unreadable_vm_only_the_problem_is_shown() {
        let problem = Some("record.json is damaged".to_owned());
        let status = api::VmStatus::Unreadable;
        let lost = api::VmSummary { pid: 0, status, problem, argv: Vec::new(), ..example("web1") };
        let shown = details(&lost);
        assert!(shown.contains("unreadable\n") && shown.contains("is damaged"), "{shown}");
        assert!(!shown.contains("process") && !shown.contains("RAM"), "{shown}");
    }

    #[test]
    fn the_process_of_a_dead_vm_is_said_to_have_ended() {
        assert!(details(&example("web1")).contains("process 4711\n"));
        let dead = api::VmSummary { status: api::VmStatus::Dead, ..example("web1") };
        assert!(details(&dead).contains("process 4711 (ended)\n"));
    }

    #[test]
    fn a_program_that_was_replaced_is_shown() {
        assert!(!details(&example("web1")).contains("Program"));
        let shown = details(&api::VmSummary { program_replaced: true, ..example("web1") });
        assert!(shown.contains("replaced on disk since QEMU started: a move"), "{shown}");
    }

    #[test]
    fn what_a_vm_may_share_is_shown() {
        assert!(!details(&example("web1")).contains("Sharing"));
        let content = Some(api::KnownContent { rounds: 2, named_bytes: 48 << 20 });
        let shown = details(&api::VmSummary {
            share_domain: "tenant-7".to_owned(),
            content,
            ..example("web1")
        });
        assert!(shown.contains("Sharing domain  tenant-7\n"), "{shown}");
        assert!(shown.contains("48.0 MiB known by name, all scanned 2 times\n"), "{shown}");
    }

    #[test]
    fn the_helper_is_shown_or_why_there_is_none() {
        assert!(!details(&example("web1")).contains("helper"));
        let shown = |helper| details(&api::VmSummary { helper: Some(helper), ..example("web1") });
        let version = "0.1.0".to_owned();
        let answers = shown(api::GuestHelper::Answers { version, clears_memory: None });
        assert!(answers.contains("Guest helper  answers, version 0.1.0\n"), "{answers}");
        let none = shown(api::GuestHelper::NoPort { why: "isapc".to_owned() });
        assert!(none.contains("Guest helper  no port: isapc\n"), "{none}");
    }

    #[test]
    fn the_effect_of_hinting_is_shown() {
        assert!(!details(&example("web1")).contains("Free memory"));
        let shown = |clears_memory| {
            let version = "0.1.0".to_owned();
            let helper = Some(api::GuestHelper::Answers { version, clears_memory });
            details(&api::VmSummary { helper, free_page_hint: true, ..example("web1") })
        };
        assert!(shown(Some(false)).contains("Free memory   not sent: "));
        assert!(shown(Some(true)).contains("Boot it with init_on_alloc=0"));
        assert!(shown(None).contains("with init_on_alloc=1"));
    }

    #[test]
    fn the_command_can_be_pasted() {
        assert!(details(&example("web1")).contains(r"qemu-system-x86_64 -name 'it'\''s'"));
    }
}
