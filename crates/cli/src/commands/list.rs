//! `list`: this host's VMs.

use std::process::ExitCode;

use clap::Args as ClapArgs;
use client::{Client, Problem};
use report::vm::status;
use report::{aligned, amount, phase_name};

use crate::output::{print, print_json, print_line};

#[derive(Debug, ClapArgs)]
pub(crate) struct ListArgs {
    /// List migrations from this host instead, the latest first, including those that others
    /// command, such as libvirt
    #[arg(long)]
    migrations: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) async fn run(client: &Client, args: &ListArgs) -> Result<ExitCode, Problem> {
    if args.migrations {
        return migrations(client, args.json).await;
    }
    let vms: Vec<api::VmSummary> = client.get("/v1/vms").await?;
    if args.json {
        print_json(&vms)?;
    } else {
        print(format_args!("{}", table(&vms)))?;
        for text in vms.iter().flat_map(to_decide) {
            print_line(format_args!("\n{}", text.trim_end()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn migrations(client: &Client, json: bool) -> Result<ExitCode, Problem> {
    let migrations: Vec<api::Progress> = client.get("/v1/migrations").await?;
    if json {
        print_json(&migrations)?;
    } else {
        print(format_args!("{}", migrations_table(&migrations)))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn migrations_table(migrations: &[api::Progress]) -> String {
    if migrations.is_empty() {
        return "No migrations from this host.\n".to_owned();
    }
    let mut rows = vec![["ID", "VM", "TO", "PHASE", "DONE", "OUTCOME"].map(str::to_owned)];
    for one in migrations {
        rows.push([
            one.id.clone(),
            one.vm.clone(),
            one.to.clone(),
            phase_name(one.phase).to_owned(),
            format!("{:.0} %", one.percent),
            match &one.outcome {
                None => "-",
                Some(api::Outcome::Done) => "done",
                Some(api::Outcome::Failed(_)) if one.in_doubt => "in doubt",
                Some(api::Outcome::Failed(_)) => "failed",
                Some(api::Outcome::Cancelled) => "cancelled",
            }
            .to_owned(),
        ]);
    }
    aligned(&rows)
}

/// What the operator may have to decide.
fn to_decide(vm: &api::VmSummary) -> impl Iterator<Item = &String> {
    let is_undecided = matches!(vm.status, api::VmStatus::InDoubt | api::VmStatus::Unreadable);
    vm.problem.iter().filter(move |_| is_undecided).chain(&vm.left_over)
}

fn table(vms: &[api::VmSummary]) -> String {
    if vms.is_empty() {
        return "No VMs. Start one with `droveway run NAME -- qemu-system-x86_64 ...`.\n"
            .to_owned();
    }
    let columns = ["NAME", "STATUS", "PID", "QEMU", "RAM", "MIGRATION", "PROGRAM"];
    let mut rows = vec![columns.map(str::to_owned)];
    // A blank cell would shift the others in a script that splits lines.
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    for vm in vms {
        // The process of a dead VM has ended, and another one may have its number.
        let has_process = vm.pid != 0 && vm.status != api::VmStatus::Dead;
        rows.push([
            vm.name.clone(),
            status(vm).to_owned(),
            or_dash(has_process.then(|| vm.pid.to_string())),
            or_dash((!vm.qemu.is_empty()).then(|| vm.qemu.clone())),
            or_dash((vm.ram_bytes > 0).then(|| amount::size(vm.ram_bytes))),
            or_dash(vm.migration.clone()),
            or_dash(vm.program_replaced.then(|| "replaced".to_owned())),
        ]);
    }
    aligned(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::vm::example;

    #[test]
    fn the_table_is_aligned() {
        let mut second = example("a-much-longer-name");
        second.migration = Some("deadbeef".to_owned());
        let text = table(&[example("web1"), second]);
        let columns: Vec<usize> = text
            .lines()
            .map(|line| line.find("MIGR").or(line.find("deadbeef")).unwrap_or(0))
            .collect();
        assert_eq!(columns[0], columns[2]);
        assert!(text.lines().all(|line| line == line.trim_end()));
    }

    #[test]
    fn an_empty_table_says_how_to_fill_it() {
        assert!(table(&[]).contains("droveway run"));
    }

    #[test]
    fn what_is_not_known_of_a_vm_is_a_dash() {
        let cells = |vm: api::VmSummary| {
            let text = table(&[vm]);
            let row = text.lines().next_back().unwrap_or_default();
            row.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        let (pid, qemu, ram_bytes) = (0, String::new(), 0);
        let status = api::VmStatus::Unreadable;
        let lost = api::VmSummary { status, pid, qemu, ram_bytes, ..example("web1") };
        assert_eq!(cells(lost), ["web1", "unreadable", "-", "-", "-", "-", "-"]);
        let dead = api::VmSummary { status: api::VmStatus::Dead, ..example("web1") };
        assert_eq!(cells(dead), ["web1", "dead", "-", "10.0.2", "1.00", "GiB", "-", "-"]);
        let old = api::VmSummary { program_replaced: true, ..example("web1") };
        assert_eq!(cells(old).last().unwrap(), "replaced");
    }

    #[test]
    fn vms_that_need_a_decision_are_recognized() {
        let problem = || Some("its disk is full".to_owned());
        let status = api::VmStatus::Unreadable;
        let unreadable = api::VmSummary { status, problem: problem(), ..example("web1") };
        assert_eq!(to_decide(&unreadable).collect::<Vec<_>>(), ["its disk is full"]);
        let left_over = Some("an upgrade left a QEMU".to_owned());
        let upgraded = api::VmSummary { problem: problem(), left_over, ..example("web1") };
        assert_eq!(to_decide(&upgraded).collect::<Vec<_>>(), ["an upgrade left a QEMU"]);
    }
}
